"""Checkpoints to which several processes write their parts of arrays."""

import errno
import hashlib
import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from tests.faults import Quick, Refuses, read, same
from tests.part_writers import Members, cut, save_in_parts
from tests.waiting import WATCHDOG
from treadle.checkpoint import Checkpoints, SavedState, parts, reading
from treadle.checkpoint.format import digest_line, temporary_name
from treadle.core import processes
from treadle.core.logs import Record
from treadle.core.progress import Progress
from treadle.core.split_arrays import Grid, StoredParts
from treadle.errors import CheckpointError
from treadle.hooks import Checkpoint

NEWEST = "step-000000000012"
ROWS = (((0, 1, 3), (0,)), (0, 1, 1))
BLOCKS = (((0, 2), (0, 4)), (1, 0, 1, 0))
CUTS = {"model/kernel": ROWS, "optimizer/momentums/model/kernel": BLOCKS}


def state_at(step: int) -> SavedState:
    kernel = np.arange(24, dtype=np.float32).reshape(4, 6) + step
    state = {
        "model/kernel": kernel,
        "model/bias": np.full(6, step, np.float32),
        "optimizer/momentums/model/kernel": (kernel / 7).astype("float16"),
        "frozen": np.ones(3),
    }
    hooks = {"stopping": {"seen": np.arange(3)}}
    return SavedState(Progress(step=step), state, frozenset(["frozen"]), hooks=hooks)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Checkpoints of steps 6 and 12, whose kernels two processes wrote."""
    chief = save_in_parts(tmp_path / "checkpoints", state_at(6), CUTS, monkeypatch)
    save_in_parts(tmp_path / "checkpoints", state_at(12), CUTS, monkeypatch, chief=chief)
    chief.check()
    return tmp_path / "checkpoints"


def test_one_process_reads_whole_arrays(folder: Path) -> None:
    assert sorted(p.name for p in (folder / NEWEST).iterdir()) == [
        *("arrays.safetensors", "manifest.json", "manifest.sha256"),
        *("part-00000.safetensors", "part-00001.safetensors"),
    ]
    record = json.loads((folder / NEWEST / "manifest.json").read_text())
    assert record["format"] == 1
    assert record["state"]["model/kernel"]["starts"] == [[0, 1, 3], [0]]
    assert [owner for owner, _ in record["state"]["model/kernel"]["parts"]] == [0, 1, 1]
    found = Checkpoints(folder).latest()
    assert found is not None and same(found, state_at(12))
    assert list(found.state) == list(state_at(12).state)


def test_a_process_reads_the_parts_that_it_needs(folder: Path, monkeypatch: Any) -> None:
    group, numbers = Members(2), list[int]()
    monkeypatch.setattr(processes, "_group", group)
    found = Checkpoints(folder).latest(together=True)
    kernel = found.state["optimizer/momentums/model/kernel"]
    whole = state_at(12).state["optimizer/momentums/model/kernel"]
    assert (kernel.shape, kernel.dtype) == (whole.shape, whole.dtype)
    counting = StoredParts(kernel.grid, kernel.dtype, lambda n: numbers.append(n) or kernel.read(n))
    assert (counting[1:2, 5:6] == whole[1:2, 5:6]).all() and numbers == [1]
    numbers.clear()
    assert (counting[:, :4] == whole[:, :4]).all() and numbers == [0, 2]
    assert (np.asarray(kernel) == whole).all()
    assert np.asarray(kernel, "float32").dtype == np.float32


def test_each_process_verifies_its_share_of_the_parts(folder: Path, monkeypatch: Any) -> None:
    group, hashed = Members(2), list[str]()
    monkeypatch.setattr(processes, "_group", group)
    before = reading._read_tensors
    monkeypatch.setattr(
        reading, "_read_tensors", lambda path, *a: hashed.append(path.name) or before(path, *a)
    )
    for group.rank in range(2):
        assert Checkpoints(folder).latest(together=True) is not None
    parts = [name for name in hashed if name.startswith("part")]
    assert parts == ["part-00000.safetensors", "part-00001.safetensors"]


def test_what_another_process_finds_damaged_is_skipped_by_all(
    folder: Path, monkeypatch: Any
) -> None:
    group = Members(2)
    monkeypatch.setattr(processes, "_group", group)
    answers = iter([["part-00001.safetensors is damaged"], [None]])
    monkeypatch.setattr(group, "exchange", lambda value, at: [value, *next(answers)])
    checkpoints = Checkpoints(folder)
    assert checkpoints.latest(together=True).progress.step == 6
    assert checkpoints.rejected == [(NEWEST, "part-00001.safetensors is damaged")]


def damaged(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(data[:-1])
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("missing", "cannot read {}: No such file or directory"),
        ("short", "{} is damaged: it has "),
        ("changed", "{} is damaged: its SHA-256 is not the one in its manifest"),
    ],
)
def test_a_damaged_part_makes_a_checkpoint_invalid(folder: Path, how: str, why: str) -> None:
    path = folder / NEWEST / "part-00001.safetensors"
    damaged(path, how)
    checkpoints = Checkpoints(folder)
    found = checkpoints.latest()
    assert found is not None and same(found, state_at(6))
    [(name, reason)] = checkpoints.rejected
    assert name == NEWEST and reason.startswith(why.format(path))


@pytest.mark.parametrize("how", ["short", "changed"])
def test_a_part_that_changes_after_it_was_verified_is_named(
    folder: Path, how: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(processes, "_group", Members(2))
    found = Checkpoints(folder).latest(together=True)
    path = folder / NEWEST / "part-00001.safetensors"
    damaged(path, how)  # the last array of the file is the momentum's last part
    with pytest.raises(CheckpointError) as raised:
        np.asarray(found.state["optimizer/momentums/model/kernel"])
    assert str(raised.value) == (
        f"{path} has changed after it was verified: the CRC-32 of part/2/optimizer/momentums/model/"
        "kernel is not the one in the manifest. Start again, and the run resumes from the "
        "checkpoint before"
    )


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ((errno.ENOSPC, "append", "part-00001"), "cannot write ."),
        ((errno.EACCES, "open_path"), "cannot open t"),
    ],
)
def test_a_process_that_cannot_write_its_parts_fails_the_save(
    tmp_path: Path, monkeypatch: Any, refused: Any, message: str
) -> None:
    systems = {1: Refuses(*refused)}
    chief = save_in_parts(tmp_path, state_at(6), CUTS, monkeypatch, systems=systems)
    with pytest.raises(CheckpointError, match=f"^process 1 did not write its parts: {message}"):
        chief.check()
    assert list(tmp_path.glob("step*")) == [] and list(tmp_path.glob(".partial*")) == []
    save_in_parts(tmp_path, state_at(6), CUTS, monkeypatch, chief=chief)
    chief.check()
    assert chief.latest().progress.step == 6


class Slow(Members):
    """Two processes, of which the other one is still writing when process 0 has failed."""

    def __init__(self) -> None:
        super().__init__(2)
        self.is_waited_for, self.has_written = threading.Event(), threading.Event()

    def reports(self, about: str) -> list[Any]:
        self.is_waited_for.set()
        assert self.has_written.wait(WATCHDOG)
        return super().reports(about)


@pytest.mark.parametrize(
    ("state", "system", "why"),
    [
        ({}, Refuses(errno.ENOSPC, "append", "arrays"), "cannot write .*: the disk is full"),
        ({}, Refuses(errno.EACCES, "list_names", "checkpoints"), "cannot list the folder"),
        ({"seen": object()}, Quick(), "hooks.*is a object, which a checkpoint cannot hold"),
    ],
)
def test_a_save_that_fails_in_process_0_leaves_no_parts(
    tmp_path: Path, monkeypatch: Any, state: Any, system: Any, why: str
) -> None:
    group, temporary = Slow(), temporary_name(6)
    monkeypatch.setattr(processes, "_group", group)
    chief = Checkpoints(tmp_path / "checkpoints", system=system)
    saved, name = replace(state_at(6), hooks={"other": state}), "model/kernel"
    kernel = saved.state[name]
    chief.save(replace(saved, state={**saved.state, name: cut(kernel, *ROWS, rank=0)}), temporary)
    while chief.busy and not group.is_waited_for.is_set():
        time.sleep(0.01)
    group.rank, other = 1, Checkpoints(tmp_path / "checkpoints", system=Quick())
    other.save_parts(replace(saved, state={name: cut(kernel, *ROWS, rank=1)}), temporary)
    other.wait()
    group.has_written.set()
    with pytest.raises(CheckpointError, match=why):
        chief.wait()
    assert list((tmp_path / "checkpoints").glob(".partial-step*")) == [] and group.told == {}


def test_parts_in_another_directory_fail_the_save(tmp_path: Path, monkeypatch: Any) -> None:
    """As on machines with a disk each."""
    group, temporary = Members(2), temporary_name(6)
    monkeypatch.setattr(processes, "_group", group)
    saved, name = state_at(6), "model/kernel"
    for group.rank in (1, 0):
        parts = cut(saved.state[name], *ROWS, group.rank)
        writer = Checkpoints(tmp_path / str(group.rank), system=Quick())
        mine = replace(saved, state={**saved.state, name: parts})
        if group.rank:
            writer.save_parts(mine, temporary)
            writer.wait()
        else:
            writer.save(mine, temporary)
            with pytest.raises(CheckpointError) as raised:
                writer.wait()
    assert str(raised.value) == (
        "process 1 wrote part-00001.safetensors, but process 0 does not find it in "
        f"{tmp_path / '0' / temporary}: all processes need the same run directory, on a disk that "
        "they share"
    )
    assert list((tmp_path / "0").glob("*step*")) == []


def test_a_failed_save_does_not_change_when_the_chief_saves_next(monkeypatch: Any) -> None:
    """The other processes know nothing of the failure, and save the best state now."""
    hook = Checkpoint(keep_best=1, monitor="val_loss")
    failed = MagicMock(busy=False, check=MagicMock(side_effect=CheckpointError("disk full")))
    monkeypatch.setattr(hook, "_saved", failed)
    monkeypatch.setattr("treadle.hooks.checkpoint._is_split", lambda loop: True)
    saves = MagicMock(return_value=True)
    monkeypatch.setattr(hook, "save", saves)
    hook.when, now, loop = MagicMock(), Progress(step=3), MagicMock()
    hook.when.due.return_value = False
    hook.record(loop, Record("validation", now, {"val_loss": 0.5}))
    hook.save_if_due(loop, Progress(step=2), now)
    assert saves.called and "disk full" in loop.log.call_args[0][0]["warning"]


def test_an_equal_checkpoint_of_a_step_is_not_kept(folder: Path, monkeypatch: Any) -> None:
    chief = Checkpoints(folder, system=Quick())
    assert chief.latest() is not None  # it is known to be readable
    before = sorted(folder.iterdir())
    save_in_parts(folder, state_at(12), CUTS, monkeypatch, chief=chief)
    chief.check()
    assert sorted(folder.iterdir()) == before
    other = replace(state_at(12), about={"score": 1.0})
    save_in_parts(folder, other, CUTS, monkeypatch, chief=chief)
    chief.check()
    assert f"{NEWEST}-1" in {path.name for path in folder.iterdir()}
    assert same(chief.latest(), other)


def test_a_process_without_parts_writes_no_file(tmp_path: Path, monkeypatch: Any) -> None:
    save_in_parts(tmp_path, state_at(3), {"model/kernel": ROWS}, monkeypatch, size=3).check()
    parts = sorted(p.name for p in tmp_path.rglob("part*"))
    assert parts == ["part-00000.safetensors", "part-00001.safetensors"]
    assert same(Checkpoints(tmp_path).latest(), state_at(3))


FORGED: dict[str, Any] = {
    "is cut at (0, 3, 1), (0,)": {"starts": [[0, 3, 1], [0]]},
    "is cut at (1, 2, 3), (0,)": {"starts": [[1, 2, 3], [0]]},
    "is cut at (0, 1, 4), (0,)": {"starts": [[0, 1, 4], [0]]},
    "is cut at (0, 1, 3)": {"starts": [[0, 1, 3]]},
    "is cut at (), (0,)": {"starts": [[], [0]]},
    "starts[0][1] is -1; expected a whole number from 0 to": {"starts": [[0, -1, 3], [0]]},
    "starts[0][1] is True; expected a whole number from 0 to": {"starts": [[0, True, 3], [0]]},
    ".starts is 3; expected a list": {"starts": 3},
    "has 1 parts, but is cut into 3": {"parts": [[0, 1]]},
    "parts[0] has 1 numbers; expected a process and a CRC-32": {"parts": [[0], [1, 1], [1, 1]]},
    "parts[0][0] is -1; expected a whole number from 0 to": {"parts": [[-1, 1], [1, 1], [1, 1]]},
    "the file of part/0/model/kernel is 'part-00007'": {"parts": [[7, 1], [1, 1], [1, 1]]},
    ".dtype is 3; expected a text": {"dtype": 3},
    "does not fit into its file of": {"shape": [4, 1 << 40]},
    "has the shape (0, 4294967296, 1073741824)": {
        "shape": [0, 1 << 32, 1 << 30],
        "starts": [[0], [0, 1 << 30, 1 << 31], [0]],
    },
    "parts[0][1] is -1; expected a whole number from 0 to": {"parts": [[0, -1], [1, 1], [1, 1]]},
}


@pytest.mark.parametrize("why", FORGED)
def test_a_forged_manifest_is_rejected(folder: Path, why: str) -> None:
    path = folder / NEWEST / "manifest.json"
    record = json.loads(path.read_bytes())
    record["state"]["model/kernel"].update(FORGED[why])
    data = json.dumps(record).encode()
    path.write_bytes(data)
    path.with_name("manifest.sha256").write_bytes(digest_line(data))
    with pytest.raises(CheckpointError) as raised:
        read(folder / NEWEST)
    shown = str(raised.value).replace("((", "(").replace("),)", ")")
    assert why in shown, raised.value


def test_parts_in_another_order_are_rejected(folder: Path) -> None:
    """A file of the right size and hash that holds other parts."""
    path = folder / NEWEST / "part-00001.safetensors"
    data = path.read_bytes().replace(b"part/1/model/kernel", b"part/2/model/kernel", 1)
    path.write_bytes(data)
    manifest = folder / NEWEST / "manifest.json"
    record = json.loads(manifest.read_bytes())
    record["files"]["part-00001"]["sha256"] = hashlib.sha256(data).hexdigest()
    text = json.dumps(record).encode()
    manifest.write_bytes(text)
    manifest.with_name("manifest.sha256").write_bytes(digest_line(text))
    with pytest.raises(CheckpointError, match=r"its header describes other arrays$"):
        read(folder / NEWEST)


def test_a_run_directory_may_be_moved(folder: Path) -> None:
    shutil.move(folder, folder.with_name("moved"))
    assert same(Checkpoints(folder.with_name("moved")).latest(), state_at(12))


def test_a_grid_is_made_of_the_regions_of_devices() -> None:
    whole = slice(0, 4)
    grid = Grid.of((4, 6), [(whole, slice(3, 6)), (whole, slice(0, 3)), (whole, slice(0, 3))])
    assert grid == Grid((4, 6), ((0,), (0, 3))) and grid.parts == 2


def test_an_unknown_dtype_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    texts = SavedState(Progress(step=3), {"names": np.array([["a"], ["b"]])})
    chief = save_in_parts(tmp_path, texts, {"names": (((0, 1), (0,)), (0, 0))}, monkeypatch)
    with pytest.raises(
        CheckpointError, match=r"^names of dtype <U1 cannot be in a checkpoint: onl"
    ):
        chief.check()


@pytest.mark.long
def test_more_parts_than_a_manifest_can_list_are_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, many = parts.MOST_PARTS - 2, tuple(range(parts.MOST_PARTS - 2))
    state = {"large": np.zeros(whole, np.int8), "small": np.zeros(3, np.int8)}
    saved = SavedState(Progress(step=6), state)

    def cuts(small: tuple[int, ...]) -> dict[str, Any]:
        return {"large": ((many,), (0,) * whole), "small": ((small,), (0,) * len(small))}

    folder, temporary = tmp_path / "checkpoints", temporary_name(6)
    for rank in (1, 0):  # all of them, at once, and not only when the chief has tried to write
        mine = {path: cut(state[path], *how, rank) for path, how in cuts((0, 1, 2)).items()}
        checkpoints, split = Checkpoints(folder), replace(saved, state=mine)
        with pytest.raises(CheckpointError) as caught:
            (checkpoints.save_parts if rank else checkpoints.save)(split, temporary)
        assert str(caught.value) == (
            "2 variables are cut into 90,001 parts, large alone into 89,998; a checkpoint holds at "
            "most 90,000. In the LayoutMap, leave small variables whole, and split others along "
            "one axis of the mesh"
        )
    assert not folder.exists()
    save_in_parts(folder, saved, cuts((0, 1)), monkeypatch).check()
    found = Checkpoints(folder).latest()
    assert found is not None and same(found, saved)
