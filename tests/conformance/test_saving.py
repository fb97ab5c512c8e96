"""What is saved while a run goes on: of which moment, whatever went wrong before."""

import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle import data
from treadle.checkpoint import Checkpoints, Files
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


def test_what_a_hook_keeps_is_saved_as_it_was_at_that_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, perform = threading.Event(), Files.perform

    def late(files: Files, operation: Any, *arguments: Any) -> Any:
        if operation.__name__ == "mkdir" and "step-000000000001" in str(arguments[0]):
            assert changed.wait(60)
        return perform(files, operation, *arguments)

    monkeypatch.setattr(Files, "perform", late)
    run(tmp_path, Checkpoint(every="1 step", keep_every="1 step"), Counting(changed))
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
