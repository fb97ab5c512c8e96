"""Values in objects that are no state: a step sees the current ones wherever it reads them."""

import functools
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile, once
from keras import ops

import treadle
from tests.dying import killed
from treadle.hooks import Checkpoint
from treadle.steps.settings import MOST_SETTINGS
from treadle.steps.state import State

ROWS = np.ones((2, 1), "float32")


class Settings:
    def __init__(self) -> None:
        self.factor, self.seen = 1.0, 0

    def current(self) -> float:
        return self.factor


class Slots:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


@dataclass
class Nested:
    inner: list[Any] = field(default_factory=lambda: [{"settings": Settings()}])


class Scale(keras.layers.Layer):
    """Holds a dict, as layers often hold their configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.table = {"factor": 1.0}

    def call(self, x: Any) -> Any:
        return x * self.table["factor"]


def set_item(settings: Any, value: float) -> None:
    settings["factor"] = value


def set_attribute(settings: Any, value: float) -> None:
    settings.factor = value


def set_nested(settings: Any, value: float) -> None:
    settings.inner[0]["settings"].factor = value


Case = tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any, float], None]]
KINDS: dict[str, Case] = {
    "SimpleNamespace": (lambda: SimpleNamespace(factor=1.0), lambda s: s.factor, set_attribute),
    "Namespace": (lambda: Namespace(factor=1.0), lambda s: s.factor, set_attribute),
    "slots": (Slots, lambda s: s.factor, set_attribute),
    "method": (Settings, lambda s: s.current(), set_attribute),
    "vars": (Settings, lambda s: vars(s)["factor"], set_attribute),
    "getattr": (Settings, lambda s: getattr(s, "fac" + "tor"), set_attribute),
    "nested": (Nested, lambda s: s.inner[0]["settings"].factor, set_nested),
    "dict": (lambda: {"factor": 1.0}, lambda s: s["factor"], set_item),
    "complex": (
        lambda: SimpleNamespace(factor=1.0 + 0.0j),
        lambda s: s.factor.real,
        lambda s, value: setattr(s, "factor", complex(value)),
    ),
}


class Held(treadle.Task):
    """Reads a value of an object that it holds."""

    def __init__(self, settings: Any, read: Callable[[Any], Any]) -> None:
        self.settings, self.read, self.count = settings, read, keras.Variable(0.0)

    def train_step(self, batch: Any) -> Any:
        self.count.assign_add(1.0)
        return {"value": ops.mean(batch) * self.read(self.settings)}


def by_name(settings: Any, read: Callable[[Any], Any]) -> treadle.Task:
    """Reads a value of an object that the step closes over."""

    def train_step(x: Any, count: Any) -> Any:
        count.assign_add(1.0)
        return {"value": ops.mean(x) * read(settings)}

    return treadle.task(train_step, count=keras.Variable(0.0))


def by_default(settings: Any, read: Callable[[Any], Any]) -> treadle.Task:
    """Reads a value of a default argument of a function that wraps another one."""

    def scaled(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(x: Any, held: Any = settings) -> Any:
            return function(x) * read(held)

        return wrapper

    @scaled
    def mean(x: Any) -> Any:
        return ops.mean(x)

    def train_step(x: Any, count: Any) -> Any:
        count.assign_add(1.0)
        return {"value": mean(x)}

    return treadle.task(train_step, count=keras.Variable(0.0))


CASES = pytest.mark.parametrize(
    ("kind", "where"),
    [
        pytest.param(kind, where, marks=() if kind == quick else long_to_compile)
        for where, quick in ((Held, "method"), (by_name, "dict"), (by_default, "Namespace"))
        for kind in KINDS
    ],
)


def values(task: treadle.Task, change: Callable[[float], None], **how: Any) -> list[float]:
    """Train for six steps, where a hook changes the factor after each two."""
    hook = treadle.every("2 steps", lambda loop: change(float(loop.progress.step)))
    with treadle.Loop(task, console=False, hooks=[hook], **how) as loop:
        loop.fit([ROWS] * 6, epochs=1)
        return loop.history.steps("value").tolist()


@EXECUTIONS
@CASES
def test_a_hook_changes_a_value(kind: str, where: Any, execution: Any) -> None:
    make, read, change = KINDS[kind]
    settings = make()
    task = where(settings, read)
    options = treadle.Options(execution=execution)
    found = values(task, lambda value: change(settings, value), options=options)
    assert found == [1, 1, 2, 2, 4, 4]


@CASES
def test_a_run_resumes_with_changed_values(kind: str, where: Any, tmp_path: Path) -> None:
    make, read, change = KINDS[kind]

    def trained(*hooks: Any) -> list[float]:
        settings = make()
        each = treadle.every("2 steps", lambda loop: change(settings, float(loop.progress.step)))
        hooks = (each, *hooks, Checkpoint("1 step"))
        task = where(settings, read)
        with treadle.Loop(task, console=False, directory=tmp_path, hooks=hooks) as loop:
            loop.fit([ROWS] * 6, epochs=1)
            return loop.history.steps("value").tolist()

    with pytest.raises(OSError, match="killed"):
        trained(treadle.at("4 steps", killed))
    assert trained() == [1, 1, 2, 2, 4, 4]


def test_what_a_step_changes_itself_is_left_out() -> None:
    """A cache, or a counter of traces, that a step closes over."""
    cache: dict[str, Any] = {}
    traced: list[int] = []

    def train_step(x: Any, count: Any) -> Any:
        traced.append(1)
        count.assign_add(cache.setdefault("one", 1.0))
        return {"value": ops.mean(x)}

    task = treadle.task(train_step, count=keras.Variable(0.0))
    with treadle.Loop(task, console=False) as loop:
        for _ in range(2):
            loop.fit([ROWS] * 2, epochs=1)
        cache.clear()
        loop.fit([ROWS] * 2, epochs=1)
        assert "note" not in loop.history.names()


@once
def test_attributes_that_no_step_reads_are_no_constants() -> None:
    constants = State.constants_of(Held(Settings(), lambda s: s.current()))
    assert "settings/factor" in constants and "settings/seen" not in constants


@once
def test_an_object_with_too_many_values_is_named() -> None:
    settings = SimpleNamespace(factor=1.0, words=["a"] * MOST_SETTINGS)
    task = Held(settings, lambda s: s.factor * len(s.words))
    with pytest.warns(match="^settings/words holds too many values to compare: a compiled step d"):
        values(task, lambda value: None)
    assert "settings/factor" in State.constants_of(task)


class Agent:
    """Holds state, and settings that only its own method reads."""

    def __init__(self) -> None:
        self.weight, self.settings = keras.Variable(1.0), SimpleNamespace(factor=1.0)

    def scaled(self, x: Any) -> Any:
        return x * self.weight * self.settings.factor


class Weighted(keras.losses.Loss):
    """Keras calls its method."""

    def __init__(self) -> None:
        super().__init__()
        self.settings = SimpleNamespace(factor=1.0)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred * self.settings.factor


@pytest.mark.parametrize(
    ("make", "use", "change"),
    [
        (Agent, lambda held, x: held.scaled(x), lambda x, to: set_attribute(x.settings, to)),
        (Weighted, lambda held, x: held(x, x), lambda x, to: set_attribute(x.settings, to)),
        (Scale, lambda held, x: held(x), lambda x, to: set_item(x.table, to)),
    ],
    ids=["with state", "loss", "layer"],
)
def test_an_object_whose_own_methods_read_settings(make: Any, use: Any, change: Any) -> None:
    held = make()

    def train_step(x: Any, held: Any, count: Any) -> Any:
        count.assign_add(1.0)
        return {"value": ops.mean(use(held, x))}

    task = treadle.task(train_step, held=held, count=keras.Variable(0.0))
    assert values(task, lambda value: change(held, value)) == [1, 1, 2, 2, 4, 4]


class Scores(Held):
    def scores(self, x: Any) -> Any:
        return ops.mean(x) * self.settings.temperature


def test_a_called_method_reads_what_no_step_reads() -> None:
    settings = SimpleNamespace(factor=1.0, temperature=1.0)
    with treadle.Loop(Scores(settings, lambda s: s.factor), console=False) as loop:
        found = []
        for settings.temperature in (1.0, 3.0):
            found.append(float(loop.call(loop.task.scores, ROWS)))
    assert found == [1, 3]


class Buffer:
    """A step of its task has no name of it, though it calls another `add`."""

    def __init__(self) -> None:
        self.size = 0

    def add(self) -> None:
        self.size += 1


@once
def test_an_object_that_no_step_names_is_no_setting() -> None:
    class Collects(Held):
        def __init__(self) -> None:
            super().__init__(SimpleNamespace(factor=1.0), lambda s: s.factor)
            self.buffer = Buffer()

        def train_step(self, batch: Any) -> Any:
            return super().train_step(ops.add(batch, 0.0))

    task = Collects()
    assert not any("buffer/" in path for path in State.constants_of(task))


@once
def test_containers_that_only_functions_reach_may_shrink(tmp_path: Path) -> None:
    rates, cache = [1.0, 2.0, 3.0], dict[str, Any]()

    def train_step(x: Any, count: Any) -> Any:
        count.assign_add(cache.setdefault("one", 1.0))
        return {"value": ops.mean(x) * rates[0]}

    def change(value: float) -> None:
        rates.pop(0)
        cache.clear()

    task = treadle.task(train_step, count=keras.Variable(0.0))
    message = (
        r"^the items of test_containers.*\.rates changed, which only functions reach, so that no "
        "checkpoint holds them: a resumed run begins with those of the script. Keep what changes "
        "as an attribute of the task$"
    )
    with pytest.warns(match=message):
        found = values(task, change, directory=tmp_path)
    assert found == [1, 1, 2, 2, 3, 3]


SHARED = SimpleNamespace(factor=1.0)


class Aliased(treadle.Task):
    """Holds an object by a name that no step reads; a step reads it by another one."""

    def __init__(self, other: str) -> None:
        SHARED.factor = 1.0
        self.unread, self.count = SHARED, keras.Variable(0.0)
        if other == "layer":
            self.layer = Reads(SHARED)
        self.read = (lambda x: x * SHARED.factor) if other == "global" else self.layer

    def train_step(self, batch: Any) -> Any:
        self.count.assign_add(1.0)
        return {"value": ops.mean(self.read(batch))}


class Reads(keras.layers.Layer):
    def __init__(self, settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def call(self, x: Any) -> Any:
        return x * self.settings.factor


@once
@pytest.mark.parametrize("other", ["global", "layer"])
def test_an_object_has_two_names(other: str) -> None:
    found = values(Aliased(other), lambda value: set_attribute(SHARED, value))
    assert found == [1, 1, 2, 2, 4, 4]


@once
def test_what_changes_while_a_step_runs_is_named() -> None:
    settings = {"factor": 1.0}

    def generated() -> Any:
        for _ in range(4):
            settings["factor"] += 1.0
            yield ROWS

    def train_step(x: Any, count: Any) -> Any:
        count.assign_add(1.0)
        return {"value": ops.mean(x) * settings["factor"]}

    task = treadle.task(train_step, count=keras.Variable(0.0))
    with treadle.Loop(task, console=False) as loop:
        loop.fit(generated, epochs=1)
        assert loop.history["note"][0].endswith(
            "settings/factor changed while steps ran, as what a callback changes does: compiled "
            "steps keep what they were compiled with, and are not compiled again if it changes"
        )
