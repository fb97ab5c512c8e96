"""What a run must survive: kills, signals, and what becomes of its directory.

Where a fault needs no process of its own, the directory is copied at the moment at which the
process would have been killed: what lies in it then is what a kill leaves. The file system's own
faults are in `tests/checkpoint/`: `test_crashes` and `test_damage`.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import drill
import keras
import pytest
from drill import Batches, Copies, Drill, batches, newest, outcome, run
from forks import Forks, killed_at_random

from treadle.core.folder import FileSystem
from treadle.errors import CheckpointError, DirectoryError, Terminated
from treadle.hooks.log_file import read_log

LAST = f"step {drill.STEPS}"


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks(Path(drill.__file__), keras.config.backend())
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The outcome of the drill in a process of its own that is let alone."""
    root = tmp_path_factory.mktemp("whole")
    found = forks.start(root / "output.txt", directory=root / "run").result()
    assert found["step"] == drill.STEPS
    return found


@cache
def never_interrupted() -> dict[str, Any]:
    """The outcome of the drill in this process, when nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        return outcome(run(Path(folder)))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed at step 16: tests copy it."""
    copies = Copies(tmp_path_factory.mktemp("killed") / "run", "step 16")
    run(copies.directory, at=copies.at)
    return copies.taken["step 16"]


# Kills


# The step at which a process is killed, and how many seconds later. XLA compiles in each process.
KILLS = ((15, 0.011), (16, 0), (20, 0.003), (24, 0.007), (25, 0))
CHOSEN = KILLS if keras.config.backend() == "torch" else KILLS[::3]


@pytest.mark.long
def test_a_run_killed_often_within_one_epoch_ends_as_if_it_had_not_been(
    forks: Forks, whole: Any, tmp_path: Path
) -> None:
    directory, at = tmp_path / "run", []
    following = {15: 16, 16: 20, 20: 24, 24: 25, 25: 26}
    for life, (step, after) in enumerate(CHOSEN):
        # One state is saved for sure, and however late the kill comes, the next window is the last.
        how: Any = {"settles": ["step 4", "step 8"], "holds": f"step {following[step]}"}
        process = forks.start(tmp_path / f"{life}.txt", directory=directory, pace=0.02, **how)
        assert process.reach(f"step {step}") and process.kill(after), process.printed
        at.append(newest(directory))
    assert at == sorted(at) and at[-1] > 0
    last = forks.start(tmp_path / "last.txt", directory=directory)
    assert last.result() == whole
    assert last.printed[0] == f"start {at[-1]}"


@pytest.mark.long
@pytest.mark.timeout(900)  # 15 kills take a minute, and longer on a busy machine
def test_a_kill_at_any_instant_does_not_change_the_result(forks: Forks, tmp_path: Path) -> None:
    kills = int(os.environ.get("TREADLE_KILLS", "15"))
    found = killed_at_random(forks, tmp_path, kills)
    assert found["kills"] == found["same"] == kills and not found["differ"], found
    assert found["damaged"] == 0


@pytest.mark.long
def test_a_run_killed_anywhere_resumes_to_the_same_end(tmp_path: Path) -> None:
    moments = [
        "start 0",  # before the first checkpoint
        "epoch 2",  # at its end
        "validation",  # in its midst
        "step 40",  # in the second call
        LAST,
        f"end {drill.STEPS}",
    ]
    copies = Copies(tmp_path / "run", *moments)
    seen: list[int] = []

    def asked(index: int) -> None:
        seen.append(index)
        if len(seen) == 6:  # in the second epoch's validation
            copies.at("validation")

    validation = Batches(batches(4, seed=1), asked)
    whole = outcome(run(tmp_path / "run", validation=validation, at=copies.at))
    assert set(copies.taken) == set(moments) and whole == never_interrupted()
    for moment, copy in copies.taken.items():
        assert outcome(run(copy)) == whole, moment


def test_a_finished_run_does_nothing_when_it_is_run_again(tmp_path: Path) -> None:
    moments: list[str] = []
    whole = outcome(run(tmp_path / "run"))
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    again = run(tmp_path / "run", at=lambda moment, loop: moments.append(moment))
    assert again.reason == "it was finished before" and moments == []
    assert outcome(again) == whole
    after = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    assert {file for file in after if after[file] != before.get(file)} <= {tmp_path / "run/.lock"}


# Signals


class Sends:
    """Sends this process a signal at a moment, once."""

    def __init__(self, number: int, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number, self.moment, self.sent = number, moment, False
        self.traced = False
        perform = FileSystem.perform

        def watched(files: FileSystem, operation: Any, *arguments: Any) -> Any:
            if operation.__name__ == "append" and "arrays.safetensors" in str(arguments[0].name):
                self.at("save" if self.traced else "first save")
            return perform(files, operation, *arguments)

        monkeypatch.setattr(FileSystem, "perform", watched)

    def at(self, moment: str, loop: Any = None) -> None:
        self.traced |= moment == "step 12"
        if moment == self.moment and not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.number)

    def task(self) -> Drill:
        at = self.at

        class Told(Drill):
            def train_step(self, batch: Any) -> Any:
                at("compile")
                return super().train_step(batch)

        Told.__qualname__ = Drill.__qualname__
        return Told()

    def validation(self) -> Batches:
        return Batches(batches(4, seed=1), lambda index: self.at("validation"))


@pytest.mark.long
@pytest.mark.parametrize("moment", ["compile", "step 16", "save", "validation"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_at_the_next_boundary_and_loses_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals
) -> None:
    if number == signal.SIGINT and moment in ("compile", "validation"):
        pytest.skip("the same as SIGTERM there")
    sends = Sends(number, moment, monkeypatch)
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(BaseException) as raised:
        run(tmp_path, task=sends.task, validation=sends.validation(), at=sends.at)
    assert sends.sent
    if number == signal.SIGTERM:
        assert isinstance(raised.value, Terminated) and raised.value.code == 143
    else:
        assert type(raised.value) is KeyboardInterrupt
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == handlers
    if moment == "compile":  # no step was done, and nothing is left
        assert {file.name for file in tmp_path.iterdir()} <= {".lock", "checkpoints"}
    else:
        steps, _ = read_log(tmp_path / "log.jsonl")
        assert newest(tmp_path) == len(steps) > 0
    assert outcome(run(tmp_path, task=sends.task)) == never_interrupted()


# The directory


@pytest.mark.long
def test_signals_end_a_process_with_their_exit_code(
    forks: Forks, whole: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    for life, (moment, names, code) in enumerate(
        (
            ("step 8", "SIGTERM", 143),
            ("step 16", "SIGTERM SIGTERM", 143),
            ("step 24", "SIGINT", -signal.SIGINT),
        )
    ):
        signals = {moment: names}
        process = forks.start(tmp_path / f"{life}.txt", directory=directory, signals=signals)
        assert process.wait() == code, process.printed
        assert process.printed.count(moment) == 1
    assert forks.start(tmp_path / "last.txt", directory=directory).result() == whole


def test_an_unwritable_directory_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    moments: list[str] = []
    (tmp_path / "run").write_text("a file")
    with pytest.raises(
        DirectoryError, match=r"cannot write to the run directory .*run: .*\. Choose another"
    ):
        run(tmp_path / "run", at=lambda moment, loop: moments.append(moment))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match=r"cannot .* .*checkpoints.*: "):
        run(tmp_path / "other", at=lambda moment, loop: moments.append(moment))
    assert not [moment for moment in moments if moment.startswith("step")]


def test_a_directory_removed_during_a_run_is_reported(tmp_path: Path) -> None:
    def at(moment: str, loop: Any) -> None:
        if moment == "step 16":
            (tmp_path / "run").rename(tmp_path / "gone")

    with pytest.raises(
        DirectoryError, match=r"the run directory .*/run is gone: it was removed or renamed"
    ) as raised:
        run(tmp_path / "run", at=at)
    (where,) = raised.value.__notes__
    assert where.startswith("in JSONLines.record, after step 16, epoch 2, batch 3")


# Logs


@pytest.mark.parametrize(
    ("log", "table"),
    [
        (b'{"step": 17, "loss": 0.5}\n{"st', b"2,26,0.1,"),  # torn
        (b'{"step": 16, "loss": 0.5}\n' * 3, b"2,26,0.1,0.2\n2,26,0.1,0.2\n"),  # of later steps
        (b"\x00\xff garbage \n\x00", b"\x00\x00"),
    ],
)
def test_logs_are_cut_to_the_step_that_is_resumed(
    killed: Path, tmp_path: Path, log: bytes, table: bytes
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(killed, directory)
    for name, tail in (("log.jsonl", log), ("epochs.csv", table)):
        with (directory / name).open("ab") as file:
            file.write(tail)
    assert outcome(run(directory)) == never_interrupted()
    steps, _ = read_log(directory / "log.jsonl")
    assert [line["step"] for line in steps] == list(range(1, drill.STEPS + 1))
