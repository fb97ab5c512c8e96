"""Single steps give the bits of windows, and notice every change of a Python value."""

import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures.thread import _WorkItem
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, dense, head
from executions import long_to_compile
from keras import ops
from loops import loop_of, make, same, source

import treadle
from treadle import data
from treadle.backends.background import _worker
from treadle.steps.snapshot import Snapshot
from treadle.steps.state import State


def trained(every: str, steps: int = 18) -> tuple[dict[str, Any], list[float]]:
    """Return the state and the losses after some steps of one and the same task."""
    loop = loop_of(make())
    with loop:
        for _ in loop.epochs():
            for _ in loop.steps(source(rows=40), every=every):
                if loop.progress.step >= steps:
                    loop.stop("enough")
    return loop.state.arrays(), loop.history.steps("loss")[:steps].tolist()


def test_single_steps_have_the_bits_of_windows() -> None:
    (single, losses), (windows, expected) = trained("1 step"), trained("6 steps")
    same(single, windows)
    assert losses == expected


MOST_CALLS = {
    "1 step": {"jax": 120, "torch": 135, "tensorflow": 150},
    "10 steps": {"jax": 14, "torch": 22, "tensorflow": 15},
}
"""Calls of Python functions for a step, by how often the loop yields, for any number of variables.

On JAX, steps run ahead, and the calls of the background thread are counted for each of its windows.
On PyTorch, those of the captured step's code are included; on TensorFlow, those that a concrete
function makes when it is called are not."""
COMPILED = "ConcreteFunction._call_flat"


@pytest.fixture
def no_step_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """How steps run does not depend on how long they take, which differs on a busy machine.

    Else a window that was slow is followed by shorter ones, a batch that was read slowly by steps
    in another thread, and on JAX fewer steps run ahead: each has calls of its own.
    """
    monkeypatch.setattr("treadle.steps.planning.WINDOW_SECONDS", 1e6)
    monkeypatch.setattr("treadle.run.prefetch.SLOW_SECONDS", 1e6)
    if keras.config.backend() == "jax":
        for name in ("TARGET_SECONDS", "MAX_WINDOW_SECONDS"):
            monkeypatch.setattr(f"treadle.backends.jax.ahead.{name}", 1e6)


@long_to_compile
@pytest.mark.usefixtures("no_step_is_slow")
@pytest.mark.parametrize("every", MOST_CALLS)
def test_the_calls_of_python_do_not_depend_on_the_number_of_variables(every: str) -> None:
    def calls(layers: int) -> tuple[float, float]:
        task = Classifier([keras.Input((FEATURES,)), *(dense() for _ in range(layers)), head()])
        rows = np.zeros((4000, FEATURES), "float32"), np.zeros(4000, "int32")
        main, background = Counter[Any](), Counter[Any]()
        loop = treadle.Loop(task, console=False)

        inside = False

        def count(found: Counter[Any], frame: Any, event: str, argument: Any) -> None:
            nonlocal inside
            if frame.f_code.co_qualname == COMPILED and event in ("call", "return"):
                inside = event == "call"
            locks = frame.f_globals.get("__name__") == "threading"  # as often as threads must wait
            if event == "call" and not inside and not locks:
                found[frame.f_code] += 1

        def profile(on: bool) -> None:
            there, here = (partial(count, x) if on else None for x in (background, main))
            _worker.submit(sys.setprofile, there).result()
            sys.setprofile(here)

        try:
            for logs in loop.steps(data.from_arrays(*rows, batch_size=8), every=every):
                assert logs["loss"] > 0
                if logs.step == 240:  # steps on JAX run ahead by now
                    profile(True)
                if logs.step == 440:
                    profile(False)
        finally:
            profile(False)
        return main.total() / 200, background.total() / background[_WorkItem.run.__code__]

    few, few_background = calls(2)
    # Twice: a window that began before the counting is counted in part, which may add calls.
    many, many_background = map(min, zip(calls(12), calls(12), strict=True))
    # Half a call for each of the 20 variables more, as waiting threads on a busy machine add some.
    assert many <= few + 10 / int(every.split()[0])
    assert few <= MOST_CALLS[every][keras.config.backend()]
    assert many_background <= few_background + 10


@dataclass
class Settings:
    factor: float = 1.0


class Valued(treadle.Task):
    """Its loss is the sum of its Python values."""

    def __init__(self) -> None:
        self.number = 1.0
        self.listed = [1.0, [1.0]]
        self.named = {"a": 1.0}
        self.array = np.ones(2, "float32")
        self.settings = Settings()
        self.layer = keras.layers.Dropout(0.5)
        self.weight = keras.Variable(1.0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        values = [self.number, self.listed[0], self.listed[1][0], self.named["a"]]
        values += [float(self.array.sum()), self.settings.factor, self.layer.rate]
        return {"loss": ops.sum(batch) * 0 + sum(values), "trainable": self.layer.trainable + 0.0}


CHANGES: dict[str, tuple[Callable[[Valued], None], float]] = {
    "an attribute": (lambda task: setattr(task, "number", 3.0), 2.0),
    "an item of a list": (lambda task: task.listed.__setitem__(0, 4.0), 3.0),
    "an item of a nested list": (lambda task: task.listed[1].__setitem__(0, 5.0), 4.0),
    "a value of a dict": (lambda task: task.named.update(a=6.0), 5.0),
    "an element of an array": (lambda task: task.array.__setitem__(1, 7.0), 6.0),
    "a field of a dataclass": (lambda task: setattr(task.settings, "factor", 8.0), 7.0),
    "another dataclass": (lambda task: setattr(task, "settings", Settings(9.0)), 8.0),
    "an attribute of a layer": (lambda task: setattr(task.layer, "rate", 0.25), -0.25),
    "a list that replaces another": (lambda task: setattr(task, "listed", [2.0, [1.0]]), 1.0),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_in_the_body_takes_effect_in_the_next_step(what: str) -> None:
    change, difference = CHANGES[what]
    task, found = Valued(), list[float]()
    batches = data.from_arrays(np.ones((6, 2), "float32"), batch_size=1)
    with treadle.Loop(task, console=False) as loop:
        for logs in loop.steps(batches):
            found.append(logs["loss"])
            if logs.step == 3:
                change(task)
    assert np.diff(found).tolist() == pytest.approx([0, 0, difference, 0, 0])


def test_trainable_of_a_layer_is_read_by_its_property() -> None:
    task = Valued()
    snapshot = State.discover(task).snapshot()
    assert snapshot.is_current()
    task.layer.trainable = False
    assert not snapshot.is_current()


class Checked:
    """A descriptor that keeps its value in the object's dict, as validating ones do."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, holder: Any, owner: type) -> Any:
        return vars(holder)[self._name] if holder is not None else self

    def __set__(self, holder: Any, value: Any) -> None:
        vars(holder)[self._name] = value


class Described:
    sizes = Checked()

    def __init__(self) -> None:
        self.sizes = [1, 2]
        self.name = "text"


def test_a_snapshot_reads_descriptors_and_a_replaced_dict() -> None:
    task = Described()
    snapshot = Snapshot(State.constants_of(task))
    assert snapshot.is_current()
    task.sizes = [1, 3]
    assert not snapshot.is_current()
    snapshot = Snapshot(State.constants_of(task))
    task.__dict__ = {**vars(task), "name": "another"}
    assert not snapshot.is_current()


def test_a_snapshot_is_current_until_an_object_is_another_one() -> None:
    task: Any = SimpleNamespace(name="text", items=(1, 2), keys={"a": 1})
    snapshot = Snapshot(State.constants_of(task))
    assert snapshot.is_current()
    task.keys["b"] = 2
    assert not snapshot.is_current()
    snapshot = Snapshot(State.constants_of(task))
    del task.name
    assert not snapshot.is_current()


@long_to_compile
def test_reading_rows_ahead_leaves_the_position_exact() -> None:
    """A save in the body is that of the step, although the rows of later ones were read."""
    found: list[int] = []
    with loop_of() as loop:
        for logs in loop.steps(source()):
            found.append(loop.view.capture({}).progress.batch)
            if logs.step == 3:
                break
        for _ in loop.steps(source()):
            break
        assert (found, loop.progress.batch) == ([1, 2, 3], 4)
