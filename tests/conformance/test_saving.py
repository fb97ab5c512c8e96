"""What is saved while a run goes on: of which moment, whatever went wrong before."""

import errno
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle import data
from treadle.checkpoint import Checkpoints, Files
from treadle.errors import CheckpointError
from treadle.hooks import Checkpoint, EarlyStopping


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
    """Returns what it goes on changing."""

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
    perform, left = Files.perform, [1] * times

    def refused(files: Files, does: Any, *arguments: Any) -> Any:
        place = str(getattr(arguments[0], "name", "") if does.__name__ == "append" else arguments)
        if left and does.__name__ == operation and text in place:
            left.pop()
            raise OSError(errno.ENOSPC, "No space left on device")
        return perform(files, does, *arguments)

    monkeypatch.setattr(Files, "perform", refused)


def test_what_a_hook_keeps_is_saved_as_it_was_at_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, perform = threading.Event(), Files.perform

    def late(files: Files, operation: Any, *arguments: Any) -> Any:
        if operation.__name__ == "mkdir" and "step-000000000001" in str(arguments[0]):
            assert changed.wait(60)
        return perform(files, operation, *arguments)

    monkeypatch.setattr(Files, "perform", late)
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
    other.restore(saved(tmp_path).latest().hooks["EarlyStopping"])  # type: ignore[union-attr]
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
                assert hook.save(loop)
                hook.saved.settle()
            if logs.step == steps[-1]:
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


@pytest.mark.parametrize("steps", [(1, 2), (1,)])
def test_what_cannot_be_removed_is_told_of_what_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: Any
) -> None:
    fail(monkeypatch, "unlink", "removed-step-000000000001")
    loop = save_by_hand(tmp_path, *steps, last=1)
    (told,) = loop.history["warning"]
    step = steps[-1]
    assert told.startswith(f"step {step} is saved, but what it replaces is still there: cannot re")
    assert saved(tmp_path).steps() == [0, step]
