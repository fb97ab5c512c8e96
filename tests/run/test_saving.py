"""Saves during a run hold the state of their step, also after failed saves."""

import errno
import json
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.dying import killed
from tests.faults import path_of
from treadle import data
from treadle.checkpoint import Checkpoints
from treadle.core.folder import FileSystem
from treadle.errors import CheckpointError, DirectoryError
from treadle.hooks import Checkpoint, EarlyStopping
from treadle.run.services import Services


def source() -> Any:
    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    return data.from_arrays(x, x[:, :1], batch_size=8)


def task() -> treadle.Task:
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return treadle.Supervised(model, "mse", keras.optimizers.Adam(0.01))


def run(directory: Path, *hooks: Any, **how: Any) -> treadle.Loop:
    with treadle.Loop(task(), directory, hooks=hooks, console=False) as loop:
        loop.fit(source(), **{"epochs": 2, **how})
    return loop


def saved(directory: Path) -> Checkpoints:
    return Checkpoints(directory / "checkpoints")


class Counting(treadle.Hook):
    """Returns an array that it changes afterwards."""

    def __init__(self, changed: threading.Event) -> None:
        self.kept: Any = {"steps": [], "count": np.zeros(1)}
        self.changed = changed

    def steps(self, loop: Any, logs: Any) -> None:
        self.kept["steps"].append(loop.progress.step)
        self.kept["count"] += 1
        self.kept[f"at {loop.progress.step}"] = 1
        if loop.progress.step > 1:
            self.changed.set()

    def state(self) -> Any:
        return self.kept


def fail(monkeypatch: pytest.MonkeyPatch, operation: str, text: str, times: int = 1) -> None:
    """Let the disk refuse an operation so often, where a path contains a text."""
    perform, left = FileSystem.perform, [1] * times

    def refused(files: FileSystem, does: Any, *arguments: Any) -> Any:
        place = str(path_of(arguments))
        if left and does.__name__ == operation and text in place:
            left.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return perform(files, does, *arguments)

    monkeypatch.setattr(FileSystem, "perform", refused)


def test_arrays_of_a_hook_are_saved_as_they_were_at_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, perform = threading.Event(), FileSystem.perform

    def late(files: FileSystem, operation: Any, *arguments: Any) -> Any:
        if operation.__name__ == "make_folder" and "step-000000000001" in arguments[1]:
            assert changed.wait(600)
        return perform(files, operation, *arguments)

    monkeypatch.setattr(FileSystem, "perform", late)
    hook = Checkpoint(every="1 step", keep_every="1 step")
    calm = treadle.at("1 step", lambda loop: hook.saved.settle())
    run(tmp_path, hook, calm, Counting(changed))
    found = saved(tmp_path).before(1)
    assert found is not None and found.progress.step == 1
    kept = found.hooks["Counting"]
    assert list(kept) == ["steps", "count", "at 1"]
    assert kept["steps"] == [1] and kept["count"].tolist() == [1.0]


def test_the_best_weights_are_not_copied_once_more(tmp_path: Path) -> None:
    stopping = EarlyStopping("loss")
    look: list[Any] = []
    run(tmp_path, stopping, treadle.every("5 steps", lambda loop: look.append(stopping.state())))
    other = EarlyStopping("loss")
    other.restore(saved(tmp_path).latest().hooks["EarlyStopping(loss min)"])  # type: ignore[union-attr]
    for state in (*look, other.state()):
        assert state["arrays"]
        assert not any(array.flags.writeable for array in state["arrays"].values())


def save_by_hand(directory: Path, *steps: int, last: int = 2) -> treadle.Loop:
    """Save after some steps, in the background, and then once more, waiting for it."""
    hook = Checkpoint(every="1 h", keep_last=last)
    with treadle.Loop(task(), directory, hooks=[hook], console=False) as loop:
        for logs in loop.steps(source(), every="1 step"):
            if logs.step in steps:
                hook.saved.settle()  # step 0
                assert hook.save(loop.view)
                hook.saved.settle()
            if logs.step == steps[-1]:
                loop.log({"seen": 1.0})  # an equal state is not saved again
                loop.save()
                break
    return loop


def test_a_failed_save_does_not_keep_the_next_one_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, "append", "step-000000000002")
    loop = save_by_hand(tmp_path, 2)
    (told,) = loop.history["warning"]
    assert told.startswith("no checkpoint of step 2: cannot write ") and "disk is full" in told
    assert saved(tmp_path).steps() == [0, 2]


def test_a_save_that_fails_again_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail(monkeypatch, "append", "step-000000000002", times=2)
    with pytest.raises(CheckpointError, match=r"^cannot write .*step-000000000002"):
        save_by_hand(tmp_path, 2)


def test_a_run_whose_last_save_failed_has_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Services, loop: Any) -> None:
        raise CheckpointError("planted")

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match="planted"):
        patched.setattr(Services, "save", fails)
        run(tmp_path)

    def record() -> Any:
        return json.loads((tmp_path / "run.json").read_text())

    assert not record().get("finished") and record()["error"] == "CheckpointError: planted"
    resumed, whole = run(tmp_path), run(tmp_path / "whole")
    assert resumed.progress.step == 6 and record()["finished"]
    for one, other in zip(resumed.task.model.weights, whole.task.model.weights, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


@pytest.mark.parametrize("steps", [(1, 2), (1,)])
def test_old_checkpoints_that_cannot_be_removed_give_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Any
) -> None:
    fail(monkeypatch, "unlink", "removed-step-000000000001")
    loop = save_by_hand(tmp_path, *steps, last=1)
    (told,) = loop.history["warning"]
    step = steps[-1]
    assert told.startswith(f"step {step} is saved, but old checkpoints were not removed: cannot re")
    assert saved(tmp_path).steps() == [0, step]


def scores(directory: Path) -> dict[int, Any]:
    found = saved(directory)
    kept = [found.before(step) for step in found.steps()]
    return {each.progress.step: each.about["score"] for each in kept if each is not None}


@pytest.mark.parametrize("every", ["1 h", "1 step"])
def test_the_best_checkpoint_is_one_of_the_measured_ones(tmp_path: Path, every: str) -> None:
    hook = Checkpoint(every, keep_last=1, keep_best=2, monitor="val_loss", keep_every="1 step")
    calm = treadle.every("1 step", lambda loop: hook.saved.settle())  # each is saved that is due
    how: Any = {"validation": source(), "validate_every": "4 steps", "epochs": 4}
    loop = run(tmp_path, hook, calm, **how)
    assert len(scores(tmp_path)) == (13 if every == "1 step" else 4)
    measured = [r for r in loop.history.records if "val_loss" in r.values]
    expected = {r.progress.step: r.values["val_loss"] for r in measured}
    assert list(expected) == [4, 8, 12]
    found = scores(tmp_path)
    assert {step: score for step, score in found.items() if score is not None} == expected
    best = saved(tmp_path).best()
    assert best is not None and best.about["score"] == min(expected.values())


def test_states_measured_while_a_checkpoint_is_written_are_saved_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = Checkpoint("1 h", keep_best=9, monitor="val_loss")
    perform = FileSystem.perform

    def slow(files: FileSystem, operation: Any, *arguments: Any) -> Any:
        if operation.__name__ == "replace":
            time.sleep(0.05)
        return perform(files, operation, *arguments)

    monkeypatch.setattr(FileSystem, "perform", slow)
    run(tmp_path, hook, validation=source(), validate_every="1 step")
    assert all(score is not None for step, score in scores(tmp_path).items() if step)
    assert list(scores(tmp_path)) == [0, 1, 2, 3, 4, 5, 6]


def test_the_measured_score_is_part_of_the_state_of_the_hook(tmp_path: Path) -> None:
    hook, other = Checkpoint(monitor="loss"), Checkpoint(monitor="loss")
    loop = run(tmp_path, hook)
    assert hook.state()["measured"] == (6, loop.history["loss"][-1])
    other.restore(saved(tmp_path).latest().hooks["Checkpoint"])  # type: ignore[union-attr]
    assert other.state() == hook.state()


def files(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def begun(directory: Path, steps: int) -> None:
    """A run that was interrupted after so many steps."""
    with pytest.raises(OSError, match="killed"):
        run(directory, Checkpoint(every="1 step"), treadle.at(f"{steps} steps", killed))


@pytest.mark.parametrize("before", [True, False])
def test_a_run_continued_by_another_process_is_an_error(tmp_path: Path, before: bool) -> None:
    """A script may take a while from what it reads to its first step."""
    if before:
        begun(tmp_path, 3)
    with treadle.Loop(task(), tmp_path, console=False) as stale:
        begun(tmp_path, 5)
        there = files(tmp_path)
        for _ in range(2):
            with pytest.raises(
                DirectoryError,
                match=f"^another process continued the run in {tmp_path} after it was read here",
            ):
                stale.fit(source(), epochs=2)
            assert files(tmp_path) == there
    assert files(tmp_path) == there
    assert run(tmp_path).progress.step == 6


@pytest.mark.parametrize("moment", ["start", "steps"])
def test_a_second_loop_changes_nothing_in_the_directory_in_use(tmp_path: Path, moment: str) -> None:
    late = treadle.Loop(task(), tmp_path, console=False)

    class Meanwhile(treadle.Hook):
        def start(self, loop: Any) -> None:
            if moment == "start":
                self.look()

        def steps(self, loop: Any, logs: Any) -> None:
            if moment == "steps" and loop.progress.step == 2:
                self.look()

        def look(self) -> None:
            hook.saved.settle()
            there = files(tmp_path)
            with pytest.raises(DirectoryError, match="is being trained into by another loop of"):
                late.fit(source(), epochs=2)
            assert files(tmp_path) == there

    hook = Checkpoint(every="1 h")
    run(tmp_path, hook, Meanwhile(), treadle.every("1 step", lambda loop: None))
    assert json.loads((tmp_path / "run.json").read_text())["finished"]


def test_several_calls_and_saves_by_hand_are_no_other_process(tmp_path: Path) -> None:
    with treadle.Loop(task(), tmp_path, console=False) as loop:
        for steps in (2, 4):
            loop.fit(source(), steps=2)
            loop.save()
            assert loop.progress.step == steps


@pytest.mark.parametrize("action", ["raise", "rollback"])
def test_a_model_with_a_constant_that_is_not_finite_is_saved(tmp_path: Path, action: Any) -> None:
    """A causal mask holds -inf from the start: only values that become non-finite are faults."""

    def masked() -> treadle.Task:
        made = task()
        mask = np.array([0.0, -np.inf, np.nan], "float32")
        made.mask = keras.Variable(mask, trainable=False, name="mask")  # pyright: ignore
        return made

    hooks = [Checkpoint(every="2 steps"), treadle.hooks.NonFinite(action)]
    for epochs in (2, 4):  # the second run resumes
        with treadle.Loop(masked(), tmp_path, hooks=hooks, override=True, console=False) as loop:
            loop.fit(source(), epochs=epochs)
        assert not [record for record in loop.history.records if "warning" in record.values]
        assert saved(tmp_path).latest().progress.step == 3 * epochs
