"""Plain values that functions use by name, and objects with slots: they are no exceptions."""

import copy
import dataclasses
import enum
import pickle
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from executions import EXECUTIONS
from keras import ops

import treadle
from treadle.core.user_code import attributes_of
from treadle.steps.own_values import own_values

ROWS = np.ones((2, 1), "float32")
FACTOR = 1.0


class Scaled(treadle.Task):
    """Multiplies by a global that a method of it uses."""

    def __init__(self):
        self.count = keras.Variable(0.0)

    def scaled(self, x):
        return x * FACTOR

    def train_step(self, batch):
        self.count.assign_add(1.0)
        return {"value": ops.mean(self.scaled(batch))}

    def eval_step(self, batch):
        return {"value": ops.mean(self.scaled(batch))}


@EXECUTIONS
def test_a_changed_global_recompiles(monkeypatch, execution):
    options = treadle.Options(execution=execution)
    with treadle.Loop(Scaled(), options=options, console=False) as loop:
        loop.fit([ROWS] * 2, epochs=1)
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        loop.fit([ROWS] * 2, epochs=1)
        assert loop.history.steps("value").tolist() == [1, 1, 3, 3]
        assert loop.evaluate([ROWS]) == {"value": 3}
        assert loop.call(loop.task.scaled, ROWS).tolist() == [[3], [3]]
    if execution == "auto":
        notes = loop.history["note"]
        assert any(note.endswith("FACTOR changed from 1.0 to 3.0") for note in notes), notes


def test_a_changed_closure_recompiles():
    factor = 1.0

    def scaled(x):
        return x * factor

    def train_step(x, count):
        count.assign_add(1.0)
        return {"value": ops.mean(scaled(x))}

    task = treadle.task(train_step, count=keras.Variable(0.0))
    loop = treadle.Loop(task, console=False)
    loop.fit([ROWS], epochs=1)
    before = loop.call(scaled, ROWS)
    factor = 3.0
    loop.fit([ROWS], epochs=1)
    assert loop.history.steps("value").tolist() == [1, 3]
    assert (before.tolist(), loop.call(scaled, ROWS).tolist()) == ([[1], [1]], [[3], [3]])


class Mode(enum.Enum):
    EASY = 1
    HARD = 2


LEVEL: object = None


class Levels(Scaled):
    def scaled(self, x):
        return x * (1.0 if LEVEL in (None, Mode.EASY) else 3.0)


@pytest.mark.parametrize("first", [None, Mode.EASY, np.float32(2)])
def test_none_and_members_of_enums_are_plain_values(monkeypatch, first):
    monkeypatch.setitem(globals(), "LEVEL", first)
    with treadle.Loop(Levels(), console=False) as loop:
        loop.fit([ROWS], epochs=1)
        monkeypatch.setitem(globals(), "LEVEL", Mode.HARD if first != 2 else None)
        loop.fit([ROWS], epochs=1)
        assert sorted(loop.history.steps("value")) == [1, 3]


def adjustable(factor):
    def scaled(x):
        return x * factor

    def change(value):
        nonlocal factor
        factor = value

    return scaled, change


def test_each_function_that_a_task_holds_has_its_own_closure():
    task, changes = Scaled(), []
    for name in ("first", "second"):
        function, change = adjustable(1.0)
        setattr(task, name, function)
        changes.append(change)
    task.scaled = lambda x: task.first(x) + 10 * task.second(x)
    with treadle.Loop(task, console=False) as loop:
        for change in (lambda _: None, *changes):
            change(2.0)
            loop.fit([ROWS], epochs=1)
        assert loop.history.steps("value").tolist() == [11, 12, 22]


def scaled_error(y, outputs):
    return FACTOR * ops.mean(ops.ones_like(outputs), axis=-1)


def test_functions_in_lists_of_arguments_are_searched(monkeypatch):
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    task = treadle.Supervised(model, [scaled_error], keras.optimizers.SGD(0.0))
    with treadle.Loop(task, console=False) as loop:
        assert loop.evaluate([(ROWS, ROWS)])["loss"] == 1
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        assert loop.evaluate([(ROWS, ROWS)])["loss"] == 3


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_task_can_be_copied_after_training(monkeypatch, copied):
    with treadle.Loop(Scaled(), console=False) as loop:
        loop.fit([ROWS], epochs=1)
    with treadle.Loop(copied(loop.task), console=False) as other:
        monkeypatch.setitem(globals(), "FACTOR", 3.0)
        other.fit([ROWS], epochs=1)
        assert other.history.steps("value").tolist() == [3]


def test_names_that_a_function_assigns_or_only_mentions_are_no_constants():
    calls, rate, name = 0, 1.0, SimpleNamespace(FACTOR=2)

    def step(x):
        nonlocal calls
        calls += 1
        return x * rate * name.FACTOR, [rate for _ in range(2)]

    found = own_values([step], [])
    prefix = "test_names_that_a_function_assigns_or_only_mentions_are_no_constants.<locals>.step"
    assert list(found) == [f"{prefix}.rate"]
    constant = found[f"{prefix}.rate"]
    constant.write(2.0)
    assert constant.read() == rate == 2.0 and calls == 0


@dataclasses.dataclass(slots=True)
class Part:
    model: object
    optimizer: object
    rate: float = 1.0


def minimized(part, batch):
    def objective():
        return ops.mean(part.model(batch)) * part.rate

    return {"loss": treadle.minimize(objective, part.model, part.optimizer)}


class Holds(treadle.Task):
    def __init__(self, part):
        self.part = part

    def train_step(self, batch):
        return minimized(self.part, batch)


@dataclasses.dataclass(slots=True)
class Slotted(treadle.Task):
    model: object
    optimizer: object
    rate: float = 1.0

    def train_step(self, batch):
        return minimized(self, batch)


def parts():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    return model, keras.optimizers.SGD(0.1, momentum=0.5)


@pytest.mark.parametrize("kind", ["part", "task"])
def test_attributes_in_slots_are_state_and_constants(kind, tmp_path):
    def made():
        return Slotted(*parts()) if kind == "task" else Holds(Part(*parts()))

    task = made()
    with treadle.Loop(task, tmp_path, console=False) as loop:
        loop.fit([ROWS] * 3, epochs=1)
        (task if kind == "task" else task.part).rate = 2.0
        loop.fit([ROWS] * 3, epochs=1)
        prefix = "" if kind == "task" else "part/"
        assert f"{prefix}model/layers/0/kernel" in loop.state.variables
        assert any("momentum" in path for path in loop.state.variables)
        changes = np.diff(loop.history.steps("loss"))
        state = loop.state.arrays()
    assert changes[2] < changes[0] < 0
    saved = treadle.load_run(tmp_path).variables()
    assert all((saved[path] == value).all() for path, value in state.items())


def test_attributes_of_a_base_class_and_of_the_dict_are_found():
    class Base:
        __slots__ = ("first",)

    class Derived(Base):
        __slots__ = ("__dict__", "__hidden", "missing")

    thing = Derived()
    thing.first, thing._Derived__hidden, thing.other = 1, 2, 3
    assert attributes_of(thing) == {"other": 3, "_Derived__hidden": 2, "first": 1}
