"""`JSONLines` and `CSV`: the files that log values, also those of a resumed run."""

import csv
import hashlib
import json
import math

import numpy as np
import pytest

from tests.hook_loop import INF, NAN, Loop
from treadle import Image, hooks
from treadle.core import folder_operations as operations
from treadle.core.logs import Record
from treadle.core.progress import Progress
from treadle.errors import ConfigurationError
from treadle.hooks.log_file import read, read_log
from treadle.run.recorded_history import history_of

# JSONLines


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_json_lines_are_strict_and_exact(tmp_path):
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    losses = np.array([0.1, 1 / 3, 1e-45], np.float32)
    loop.window(hook, loss=losses, norm=np.array([NAN, INF, -INF]), n=np.arange(3))
    loop.record(hook, "epoch", loss=1 / 3, val_loss=NAN, note='a "text"\n', image=np.zeros((2, 2)))
    path = tmp_path / "log.jsonl"
    text = path.read_text()  # flushed while the run continues
    assert strict(text) == [
        {"step": 1, "loss": float(losses[0]), "norm": "NaN", "n": 0},
        {"step": 2, "loss": float(losses[1]), "norm": "Infinity", "n": 1},
        {"step": 3, "loss": float(losses[2]), "norm": "-Infinity", "n": 2},
        {
            "kind": "epoch",
            "epoch": 1,
            "step": 3,
            "batch": 3,
            "examples": 24,
            "seconds": 0.25,
            "loss": 1 / 3,
            "val_loss": "NaN",
            "note": 'a "text"\n',
        },
    ]
    hook.end(loop, None)
    steps, records = read_log(path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["norm"] for step in steps][1:] == [INF, -INF] and math.isnan(steps[0]["norm"])
    assert [np.float32(step["loss"]) for step in steps] == losses.tolist()
    assert records[0]["loss"] == 1 / 3 and math.isnan(records[0]["val_loss"])


def test_json_lines_of_odd_names_and_values(tmp_path):
    loop, hook = Loop(), hooks.JSONLines(tmp_path / "new" / "folder.jsonl")
    hook.start(loop)
    odd = {'a "b" %d é': [1.0], "step": [2.0], "ok": np.array([True])}
    loop.window(hook, **odd)
    loop.window(hook)
    values = {"kind": 1, "done": np.bool_(False), "none": None}
    hook.record(loop, Record("log", loop.progress, values))
    hook.end(loop, None)
    assert strict((tmp_path / "new" / "folder.jsonl").read_text()) == [
        {"step": 1, 'a "b" %d é': 1.0, "step_": 2.0, "ok": True},
        {"step": 2},
        {
            **{"kind": "log", "epoch": 1, "step": 2, "batch": 2, "examples": 16, "seconds": 0.25},
            **{"kind_": 1, "done": False},
        },
    ]


def test_a_window_is_one_write(tmp_path, monkeypatch):
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    written = []
    monkeypatch.setattr(operations, "append", lambda _, text: written.append(text))
    loop.window(hook, loss=np.arange(50.0))
    assert len(written) == 1 and written[0].count(b"\n") == 50
    hook.end(loop, None)


def test_json_lines_need_a_place():
    with pytest.raises(ConfigurationError) as caught:
        hooks.JSONLines().start(Loop())
    assert str(caught.value) == (
        "JSONLines() writes log.jsonl into the run directory, but this run has none: pass "
        "JSONLines('log.jsonl'), or a directory to the loop"
    )


LOG = b"""{"step": 1, "loss": 0.5}
{"step": 2, "loss": 0.5}
{"kind": "log", "epoch": 1, "step": 2, "seconds": 1.0, "text": "NaN"}
{"step": 3, "loss": 0.5}
{"kind": "epoch", "epoch": 1, "step": 3, "seconds": 1.0}
"""


@pytest.mark.parametrize("tail", [b"", b"{", b'{"step": 4, "lo', b"\xff\xfe\x00"])
@pytest.mark.parametrize(("step", "lines"), [(0, 0), (1, 1), (2, 3), (3, 5), (9, 5)])
def test_a_log_continues_at_the_step_of_the_resume(tmp_path, step, lines, tail):
    path = tmp_path / "log.jsonl"
    path.write_bytes(LOG + tail)
    loop, hook = Loop(tmp_path, step=step), hooks.JSONLines()
    hook.start(loop)
    loop.window(hook, loss=[1.0])
    hook.end(loop, None)
    kept = b"".join(LOG.splitlines(keepends=True)[:lines])
    assert path.read_bytes() == kept + b'{"step": %d, "loss": 1.0}\n' % (step + 1)


def test_a_log_is_cut_to_its_size_at_the_checkpoint(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(LOG)
    hook = hooks.JSONLines()
    hook.restore({"size": 24, "sha256": ""})
    hook.start(Loop(tmp_path, step=9))
    assert path.read_bytes() == LOG[:24]
    assert hook.state() == {"size": 24, "sha256": hashlib.sha256(LOG[:24]).hexdigest()}
    hook.end(Loop(), None)


@pytest.mark.parametrize("changed", [None, "step", "file", "error", "folder"])
def test_a_further_call_parses_a_log_only_if_something_changed(tmp_path, changed, monkeypatch):
    path = tmp_path / "log.jsonl"
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    loop.window(hook, loss=[0.5, 0.5])
    hook.end(loop, ValueError() if changed == "error" else None)
    text = path.read_bytes()
    if changed == "step":  # a rollback
        loop.progress = Progress(step=1)
    if changed == "file":
        path.write_bytes(text + b'{"step": 3, "lo')
    if changed == "folder":
        loop.directory = tmp_path / "other"
        loop.directory.mkdir()
        path = path.rename(loop.directory / path.name)
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda line: (parsed.append(line), loads(line))[1])
    hook.start(loop)
    assert bool(parsed) == (changed is not None)
    kept = text.splitlines(keepends=True)[0] if changed == "step" else text
    assert path.read_bytes() == kept
    assert hook.state() == {"size": len(kept), "sha256": hashlib.sha256(kept).hexdigest()}
    hook.end(loop, None)


def test_a_further_call_parses_a_log_whose_last_line_is_half_written(tmp_path):
    path = tmp_path / "log.jsonl"
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    loop.window(hook, loss=[0.5])
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(b'{"step": 2, "lo')  # as when the disk is full
    hook.end(loop, None)
    hook.start(loop)
    hook.end(loop, None)
    assert path.read_bytes() == whole


def test_a_resumed_log_is_cut_to_its_size_also_after_a_call(tmp_path):
    path = tmp_path / "log.jsonl"
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    loop.window(hook, loss=[0.5])
    state = hook.state()
    loop.window(hook, loss=[0.5])
    hook.end(loop, None)
    hook.restore(state)
    hook.start(loop)
    hook.end(loop, None)
    assert path.stat().st_size == state["size"]


# CSV


def test_csv_is_a_row_per_epoch(tmp_path):
    loop, hook = Loop(tmp_path), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=np.float64(1 / 3), note="a, b", image=np.zeros(3))
    loop.record(hook, "validation", step=15, val_loss=1.0)
    loop.record(hook, "log", step=15, other=1.0)
    loop.record(hook, "epoch", step=20, note="c", loss=np.float32(0.5))
    hook.end(loop, None)
    assert (tmp_path / "epochs.csv").read_text() == (
        'epoch,step,seconds,loss,note\n2,10,2.5,0.3333333333333333,"a, b"\n3,20,5.0,0.5,c\n'
    )


def test_csv_grows_columns(tmp_path):
    loop, hook = Loop(), hooks.CSV(tmp_path / "table.csv")
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=2.0)
    loop.record(hook, "epoch", step=20, loss=1.0, val_loss=3.0, step_size=1)
    loop.record(hook, "epoch", step=30, val_loss=2.0, epoch=7)
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["epoch", "step", "seconds", "loss", "val_loss", "step_size", "epoch_"],
        ["2", "10", "2.5", "2.0", "", "", ""],
        ["3", "20", "5.0", "1.0", "3.0", "1", ""],
        ["4", "30", "7.5", "", "2.0", "", "7"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_csv_is_rewritten_once_for_a_new_column(tmp_path, monkeypatch):
    loop, hook = Loop(tmp_path), hooks.CSV()
    replaced, replace = [], operations.replace
    monkeypatch.setattr(operations, "replace", lambda *a: (replaced.append(a), replace(*a)))
    hook.start(loop)
    for step in range(1, 9):
        loop.record(hook, "epoch", step=step, loss=1.0, **({"val_loss": 1.0} if step > 4 else {}))
    assert len(replaced) == 2


def history_of_two_epochs(directory):
    loop, hook = Loop(directory), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=1 / 3, note="a, b", scale=np.float32(0.1))
    loop.record(hook, "validation", step=15, val_loss=1.0)
    loop.record(hook, "epoch", step=20, loss=NAN, done=True)
    hook.end(loop, None)
    return loop


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text,
        lambda text: text + "4,30,7.5,0.1,,\n",
        lambda text: text.replace("0.333", "0.334"),
        lambda text: text[:-9],
        lambda text: text.splitlines()[0],
        lambda text: text + "\0\n\xff",
        lambda text: "",
    ],
)
def test_csv_is_written_again_from_the_history(tmp_path, damage):
    loop = history_of_two_epochs(tmp_path)
    path = tmp_path / "epochs.csv"
    whole = path.read_text()
    path.write_text(damage(whole))
    hook = hooks.CSV()
    hook.start(loop)
    assert path.read_text() == whole
    loop.record(hook, "epoch", step=30, loss=0.25)
    assert path.read_text() == whole + "4,30,7.5,0.25,,,\n"
    path.unlink()
    hooks.CSV().start(loop)
    assert path.read_text() == whole + "4,30,7.5,0.25,,,\n"


def test_csv_of_a_history_from_a_log_is_the_same(tmp_path):
    """With each kind of value that a log holds, and an image."""
    loop, log, table = Loop(tmp_path), hooks.JSONLines(), hooks.CSV()
    for hook in (log, table):
        hook.start(loop)
    values = {"loss": np.float32(1 / 3), "n": 3, "done": False, "note": 'a "b", c\n', "epoch": 1.5}
    for step in (10, 20):
        loop.record(table, "epoch", step=step, **values, picture=Image(np.eye(8)), bad=INF)
        log.record(loop, loop.history.records[-1])
    for hook in (log, table):
        hook.end(loop, None)
    whole = (tmp_path / "epochs.csv").read_bytes()
    assert b"images/picture-10.png" in whole
    loop.history = history_of(read(tmp_path / "log.jsonl"))
    (tmp_path / "epochs.csv").unlink()
    hooks.CSV().start(loop)
    assert (tmp_path / "epochs.csv").read_bytes() == whole


def test_csv_without_epochs_is_removed_or_kept_apart(tmp_path):
    history_of_two_epochs(tmp_path)
    path = tmp_path / "epochs.csv"
    whole = path.read_text()
    lost = Loop(tmp_path)
    lost.progress = Progress(step=20, epoch=2)
    hooks.CSV().start(lost)
    assert not path.exists() and path.with_name("epochs.csv.old").read_text() == whole
    assert lost.warnings == [
        f"{path} is now epochs.csv.old: the history lacks the epochs in it. The weights are not "
        "affected"
    ]
    path.write_text(whole)
    loop = Loop(tmp_path, step=3)
    hooks.CSV().start(loop)
    assert not path.exists() and not loop.warnings


def test_csv_is_no_other_table(tmp_path):
    path = tmp_path / "epochs.csv"
    path.write_text("name,price\nbread,3\n")
    with pytest.raises(ConfigurationError) as caught:
        hooks.CSV().start(Loop(tmp_path))
    assert str(caught.value) == (
        f"{path} is not a table of epochs: its first columns are not epoch, step and "
        "seconds. Choose another path, or move it away"
    )
    assert path.read_text() == "name,price\nbread,3\n"


@pytest.mark.parametrize("value", ["2", -1, [2], 2.5])
def test_a_log_refuses_a_damaged_state(value):
    with pytest.raises(ValueError, match=r"size is .*; expected a whole number from 0 to"):
        hooks.JSONLines().restore({"size": value})


def test_csv_needs_a_place():
    with pytest.raises(
        ConfigurationError, match=r"CSV\(\) writes epochs.csv into the run directory"
    ):
        hooks.CSV().start(Loop())
