"""Objects of the user's own classes are searched for state, if they hold some."""

from collections import UserDict
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, batches, cross_entropy, head

import treadle
from treadle.errors import StateError
from treadle.steps.state import State
from treadle.testing import run_steps

X, Y = batches(4)
BATCHES = list(zip(X, Y, strict=True))


class Part:
    """Has no `__dict__`."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = keras.Variable(1.0)


class Trainer:
    """A class as its author wrote it, which is no task."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(1)
        self.model = keras.Sequential([head()])
        self.optimizer = keras.optimizers.Adam(0.01)
        self.loss, self.rate = cross_entropy(), 0.5
        self.parts = {"first": Part()}

    def step(self, x: Any, y: Any) -> Any:
        scale = self.parts["first"].scale
        loss = treadle.minimize(
            lambda: self.loss(y, self.model(x) * scale), self.model, self.optimizer
        )
        scale.assign_add(self.rate)
        return loss


class Listed(treadle.Task):
    """The same objects as attributes of a task."""

    def __init__(self) -> None:
        self.trainer = Trainer()
        self.model, self.optimizer = self.trainer.model, self.trainer.optimizer
        self.scale = self.trainer.parts["first"].scale

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.trainer.step(*batch)}


class Counter:
    """Holds no state of a step but numbers that change."""

    def __init__(self, model: Any = None) -> None:
        self.count, self.model = 0, model


def test_a_plain_object_holds_the_state_of_a_task() -> None:
    trainer = Trainer()
    trace = run_steps(treadle.task(trainer.step, trainer=trainer), BATCHES)
    assert set(trace.state) == {
        "trainer/model/layers/0/kernel",
        "trainer/model/layers/0/bias",
        "trainer/parts/first/scale",
        "trainer/optimizer/iterations",
        "trainer/optimizer/learning_rate",
        *(
            f"trainer/optimizer/{slot}/trainer/model/layers/0/{name}"
            for slot in ("momentums", "velocities")
            for name in ("kernel", "bias")
        ),
        "random/keras",
    }
    assert trace.state["trainer/parts/first/scale"] == 3.0
    assert "trainer/rate" in State.constants_of(treadle.task(trainer.step, trainer=trainer))
    expected = run_steps(Listed(), BATCHES)
    np.testing.assert_array_equal(trace.values["loss"], expected.values["loss"])
    assert {"model/layers/0/kernel", "scale"} <= set(expected.state)


def test_a_number_of_an_object_without_state_is_no_constant() -> None:
    """Else a counter would compile the step again each time it counts."""
    model = keras.Sequential([keras.Input((FEATURES,)), head()])
    task = treadle.task(lambda x, y: 0.0, model=model, counters=[Counter(), Counter(model)])
    assert not [path for path in State.constants_of(task) if path.endswith("/count")]
    assert "model/layers/0/kernel" in State.discover(task).variables


def test_the_class_of_a_library_that_holds_a_variable_is_named() -> None:
    scale = keras.Variable(2.0, name="scale")
    held = UserDict(scale=scale)
    task = treadle.task(lambda x, y: held["scale"] + 0.0, held=held)
    message = (
        r"train_step uses scale, which no attribute of the task reaches, .*: keep what holds it as "
        r"an attribute, or pass it to treadle.task\(…, model=model\). held holds it in a UserDict, "
        "whose attributes are not searched$"
    )
    with pytest.raises(StateError, match=message):
        run_steps(task, BATCHES)


def test_an_object_that_holds_itself_and_the_task_is_searched_once() -> None:
    task, trainer = Listed(), Trainer()
    trainer.parts |= {"task": task, "self": trainer}
    task.trainer = trainer
    paths = list(State.discover(task).variables)
    assert "trainer/parts/first/scale" in paths
    assert not [path for path in paths if "task" in path or "self" in path]
