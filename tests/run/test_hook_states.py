"""A resumed run gives each hook its own state, also if a script removes, adds or moves hooks."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.checkpoint import Checkpoints
from treadle.errors import ConfigurationError, TreadleWarning
from treadle.hooks import BestWeights, Checkpoint, EarlyStopping, KerasCallbacks, ReduceOnPlateau

# Each falls and rises at other epochs, so that states that were exchanged are seen.
VALUES = {"error": [1, 5, 6, 7, 8, 9, 9, 9], "loss": [9, 8, 7, 6, 5, 4, 5, 6]}
EPOCHS = 8
OPTIONS = treadle.Options(execution="eager")  # compiling would take most of the time here


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
    loop = treadle.Loop(Drift(), directory, given, OPTIONS, console=False, **how)
    with suppress(Dies), loop:
        loop.fit([np.zeros(1)], epochs=EPOCHS)
    return loop


def weight(loop: treadle.Loop) -> float:
    return float(loop.task.w.numpy())  # pyright: ignore


def test_the_best_weights_are_those_of_the_hook_that_is_left(tmp_path: Path) -> None:
    """The value of the removed hook was best in epoch 1, that of the other is in epoch 6."""
    run(tmp_path, BestWeights("error"), BestWeights("loss"), until=4)
    with pytest.warns(TreadleWarning) as caught:
        assert weight(run(tmp_path, BestWeights("loss"))) == 6
    assert [str(x.message) for x in caught if x.category is TreadleWarning] == [
        "states of hooks in the checkpoint of step 4: BestWeights(error min) fits no hook of the "
        "script and is lost"
    ]


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
    said = (
        r"of step 3: Counts\(a\), Counts-2 fits no hook of the script and is lost; Counts\(c\) has "
        "none and begins$"
    )
    with pytest.warns(TreadleWarning, match=said):
        run(tmp_path, *hooks)
    assert [hook.count for hook in hooks] == [8, 5, 8]


def saved_names(directory: Path) -> set[str]:
    """Return the names of the hooks whose states the newest checkpoint holds."""
    return {*Checkpoints(directory / "checkpoints").latest().hooks}


class Writes(Counts):
    """A hook that only the process that writes files calls."""

    chief_only = True


@pytest.mark.filterwarnings("error::treadle.errors.TreadleWarning")
def test_hooks_that_stay_are_not_mentioned(tmp_path: Path) -> None:
    def hooks() -> list[Any]:
        return [Writes(), treadle.hooks.LossSpikes(), treadle.hooks.NonFinite("rollback")]

    run(tmp_path, *hooks(), until=3)
    again = hooks()
    run(tmp_path, *again)
    assert again[0].count == EPOCHS


@pytest.mark.filterwarnings("error::treadle.errors.TreadleWarning")
def test_default_hooks_may_be_replaced(tmp_path: Path) -> None:
    run(tmp_path, until=3)
    terminating = keras.callbacks.TerminateOnNaN()  # replaces NonFinite
    assert weight(run(tmp_path, KerasCallbacks([terminating]))) == EPOCHS


def test_an_identity_is_a_text() -> None:
    with pytest.raises(ConfigurationError) as raised:
        treadle.Loop(Drift(), hooks=[Counts(3)], console=False)  # type: ignore[arg-type]
    assert str(raised.value) == (
        "Counts.identity must be a text that tells the hook from others of its class, not 3"
    )


def test_keras_callbacks_are_told_apart_by_what_they_monitor(tmp_path: Path) -> None:
    stopping = keras.callbacks.EarlyStopping

    def hooks() -> list[KerasCallbacks]:
        return [KerasCallbacks([stopping(name, patience=9)]) for name in VALUES]

    assert [hook.identity for hook in hooks()] == ["EarlyStopping error", "EarlyStopping loss"]
    run(tmp_path, *hooks(), until=7)
    swapped = hooks()[::-1]
    run(tmp_path, *swapped)
    assert [hook._callbacks[0].best_epoch for hook in swapped] == [5, 0]


def test_a_callback_may_be_added_to_the_others(tmp_path: Path) -> None:
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    run(tmp_path, KerasCallbacks([stopping]), until=7)
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", "error")
    run(tmp_path, KerasCallbacks([saving, stopping]))
    assert stopping.best_epoch == 5
