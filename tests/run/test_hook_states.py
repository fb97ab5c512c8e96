"""A resumed run gives each hook its own state, also if a script removes, adds or moves hooks."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.checkpoint import Checkpoints
from treadle.errors import DirectoryError
from treadle.hooks import BestWeights, Checkpoint, EarlyStopping, KerasCallbacks, ReduceOnPlateau

# Each falls and rises at other epochs, so that states that were exchanged are seen.
VALUES = {"error": [1, 5, 6, 7, 8, 9, 9, 9], "loss": [9, 8, 7, 6, 5, 4, 5, 6]}
EPOCHS = 8


class Drift(treadle.Task):
    """Adds 1 to a weight in each step, which tells its epoch."""

    def __init__(self) -> None:
        self.w = keras.Variable(0.0)
        self.model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])  # for callbacks
        self.optimizer = keras.optimizers.SGD(1.0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        treadle.minimize(lambda: -self.w, [self.w], self.optimizer)
        return {
            name: keras.ops.take(keras.ops.convert_to_tensor(values, "float32"), treadle.step())
            for name, values in VALUES.items()
        }


def run(directory: Path, *hooks: Any, until: int = EPOCHS, **how: Any) -> treadle.Loop:
    """Train, and end as a killed process does: with the checkpoint of its last epoch."""

    class Dies(Exception):
        pass

    def dies(loop: Any) -> None:
        loop.save()
        raise Dies

    given = [*hooks, Checkpoint(every="1 epoch")]
    if until < EPOCHS:
        given.append(treadle.at(f"{until} steps", dies))
    loop = treadle.Loop(Drift(), directory, hooks=given, console=False, **how)
    with suppress(Dies), loop:
        loop.fit([np.zeros(1)], epochs=EPOCHS)
    return loop


def weight(loop: treadle.Loop) -> float:
    return float(loop.task.w.numpy())  # pyright: ignore


def test_the_best_weights_are_those_of_the_hook_that_is_left(tmp_path: Path) -> None:
    """The value of the removed hook was best in epoch 1, that of the other is in epoch 6."""
    run(tmp_path, BestWeights("error"), BestWeights("loss"), until=4)
    with pytest.raises(DirectoryError) as raised:
        run(tmp_path, BestWeights("loss"))
    assert str(raised.value) == (
        f"{tmp_path} holds a run with the states of other hooks: hooks was ['BestWeights(error "
        "min)'], now []. Choose another directory, start from scratch with fresh=True (--fresh), "
        "or resume the run anyway with override=True (--override)"
    )
    assert weight(run(tmp_path, BestWeights("loss"), override={"hooks"})) == 6


@pytest.mark.parametrize("kind", [BestWeights, EarlyStopping])
def test_an_added_hook_begins_and_leaves_the_state_of_the_other(tmp_path: Path, kind: Any) -> None:
    patience = {"patience": 9} if kind is EarlyStopping else {}
    run(tmp_path, kind("loss", **patience), until=7)
    hooks = [kind("error", **patience), kind("loss", **patience)]
    run(tmp_path, *hooks)
    assert [hook._monitor.best_step for hook in hooks] == [7, 6]


@pytest.mark.parametrize("swapped", [False, True])
def test_moved_hooks_keep_their_states(tmp_path: Path, swapped: bool) -> None:
    def plateaus() -> list[Any]:
        return [
            ReduceOnPlateau(name, factor, patience=2)
            for name, factor in (("error", 0.5), ("loss", 0.1))
        ]

    whole = run(tmp_path / "whole", *plateaus())
    run(tmp_path / "killed", *plateaus(), until=2)
    hooks = plateaus()[::-1] if swapped else plateaus()
    resumed = run(tmp_path / "killed", *hooks)
    assert weight(resumed) == weight(whole) < 8


class Counts(treadle.Hook):
    """Counts windows, and has a state."""

    def __init__(self, identity: str = "") -> None:
        self.identity, self.count = identity, 0

    def steps(self, loop: Any, logs: Any) -> None:
        self.count += logs.steps

    def state(self) -> dict[str, Any]:
        return {"count": self.count}

    def restore(self, state: Any) -> None:
        self.count = state["count"]


def test_hooks_of_users_are_told_apart_by_their_identity(tmp_path: Path) -> None:
    run(tmp_path, Counts("a"), Counts("b"), Counts(), Counts(), until=3)
    assert {"Counts(a)", "Counts(b)", "Counts", "Counts-2"} <= saved_names(tmp_path)
    hooks = [Counts("b"), Counts("c"), Counts()]
    with pytest.raises(
        DirectoryError, match=r"was \['Counts\(a\)', 'Counts-2'\], now \['Counts\(c\)'\]"
    ):
        run(tmp_path, *hooks)
    run(tmp_path, *hooks, override=True)
    assert [hook.count for hook in hooks] == [8, 5, 8]


def saved_names(directory: Path) -> set[str]:
    """Return the names of the hooks whose states the newest checkpoint holds."""
    return {*Checkpoints(directory / "checkpoints").latest().hooks}


def test_keras_callbacks_are_told_apart_by_what_they_monitor(tmp_path: Path) -> None:
    stopping = keras.callbacks.EarlyStopping
    hooks = [KerasCallbacks([stopping(name, patience=9)]) for name in VALUES]
    assert [hook.identity for hook in hooks] == ["EarlyStopping error", "EarlyStopping loss"]
    run(tmp_path, *hooks, until=2)
    assert "KerasCallbacks(EarlyStopping loss)" in saved_names(tmp_path)
