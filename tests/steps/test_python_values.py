"""Python values of a task as checkpoints hold them, and what a file may and may not set."""

import enum
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import treadle
from treadle.checkpoint.structure import decode, encode
from treadle.errors import StateError
from treadle.steps.constants import fingerprint
from treadle.steps.python_values import MOST_CHANGED, PythonValues, described


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    low: float
    high: float


@dataclass(frozen=True)
class Setting:
    name: str = "a"
    rate: float = 0.5


class Plain(treadle.Task):
    def __init__(self) -> None:
        self.number, self.text, self.flag, self.nothing = 1.5, "a", True, None
        self.color, self.pair, self.setting = Color.RED, Pair(0.0, 1.0), Setting()
        self.items: Any = [1, {"a": 2, 3: [4]}]
        self.array, self.scalar = np.arange(3), np.float32(0.1)
        self.layer = keras.layers.Dense(2)
        self.layers = [self.layer]
        self.function: Any = max

    def method(self) -> str:
        return "mine"


def changed(change: Any) -> dict[str, Any]:
    """What a checkpoint holds after a change, as it comes back from the disk."""
    task = Plain()
    values = PythonValues(task)
    change(task)
    arrays: list[Any] = []
    written = encode(values.capture(), "constants", arrays)
    return decode(written, arrays)


def restored(found: Any) -> tuple[Plain, dict[str, Any]]:
    task = Plain()
    values = PythonValues(task)
    changes = values.read(found)
    values.restore(changes)
    return task, values.missing(changes)


def test_unchanged_values_are_not_recorded() -> None:
    assert changed(lambda task: None) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("number", 2),
        ("number", math.nan),
        ("number", -math.inf),
        ("number", None),
        ("number", (1.0, ("x", None))),
        ("flag", 1),
        ("text", "é\n\udc80"),
        ("color", Color.BLUE),
        ("pair", Pair(0.0, 2.0)),
        ("setting", Setting("b", 0.25)),
        ("items", [7, {"a": 5, 3: [6]}]),
        ("items", None),
        ("array", np.arange(4, dtype="int8")),
        ("scalar", np.float32(0.2)),
        ("layer", None),
        ("function", None),
    ],
)
def test_values_are_restored_with_their_types(name: str, value: Any) -> None:
    found, missing = restored(changed(lambda task: setattr(task, name, value)))
    back = getattr(found, name)
    assert not missing
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_a_value_changed_back_is_recorded_too() -> None:
    task = Plain()
    values = PythonValues(task)
    task.number = 3.0
    values.capture()
    task.number = 1.5
    found = values.capture()
    assert found["number"]["now"] == found["number"]["was"]
    other = Plain()
    other.number = 3.0  # set by the script between the loop and its first call
    again = PythonValues(Plain())
    again._task = other
    again.restore(again.read(found))
    assert other.number == 1.5


def test_the_list_itself_is_kept() -> None:
    found = changed(lambda task: task.items.__setitem__(0, 5))
    task = Plain()
    held = task.items
    values = PythonValues(task)
    values.restore(values.read(found))
    assert held is task.items and held == [5, {"a": 2, 3: [4]}]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            lambda task: setattr(task, "function", min),
            "function changed from one builtin_function_or_method to one builtin_function_or_method",  # noqa: E501
        ),
        (
            lambda task: setattr(task, "layer", keras.layers.Dense(2)),
            "layer changed from one Dense to one Dense",
        ),
        (
            lambda task: task.layers.append(keras.layers.Dense(2)),
            "layers changed from a list of 1 to a list of 2",
        ),
        (
            lambda task: task.items[1].update(b=1),
            "items/1 changed from a dict of 2 (a, 3) to a dict of 3 (a, 3, b)",
        ),
        (
            lambda task: setattr(task, "text", "x" * 70_000),
            "text changed from 'a' to one str of 70,000 characters",
        ),
        (
            lambda task: setattr(task, "number", 1 << 20_000),
            "number changed from 1.5 to one int of 20,001 bits",
        ),
        (
            lambda task: setattr(task, "array", np.zeros(10_000)),
            "array changed from an array of shape (3,) to one ndarray",
        ),
        (lambda task: delattr(task, "number"), "number changed from 1.5 to nothing"),
        (
            lambda task: setattr(task, "color", Mode.READ | Mode.WRITE),
            "color changed from Color.RED to one Mode",
        ),
        (lambda task: setattr(task, "color", Mode(0)), "color changed from Color.RED to one Mode"),
        (
            lambda task: setattr(task, "function", 7),
            "function changed from one builtin_function_or_method to 7",
        ),
        (lambda task: setattr(task, "items", 7), "items changed from a list of 2 to 7"),
        (
            lambda task: setattr(task, "pair", tuple(range(20_000))),
            "pair changed from (0.0, 1.0) to a tuple of 20000",
        ),
        (
            lambda task: [setattr(task, f"new_{i}", i) for i in range(MOST_CHANGED + 1)],
            "10,001 Python values changed",
        ),
    ],
)
def test_changes_that_a_checkpoint_cannot_hold_are_refused(change: Any, told: str) -> None:
    with pytest.raises(StateError) as raised:
        changed(change)
    assert str(raised.value) == (
        f"{told}, which a checkpoint cannot hold, so this run could not be resumed: make it a "
        "keras.Variable, or give the task both objects from the start, and let a flag select one"
    )


def test_a_value_that_the_task_does_not_take_is_reported() -> None:
    found = changed(lambda task: setattr(task, "number", 2.5))
    task = Plain()
    del task.number
    values = PythonValues(task)
    changes = values.read(found)
    values.restore(changes)
    assert described(values.missing(changes)) == "number changed from 1.5 to 2.5"


def test_parts_of_a_layer_keep_what_its_own_trainable_does_not_say() -> None:
    class Frozen(treadle.Task):
        def __init__(self) -> None:
            self.model = keras.Sequential([keras.Input((2,)), *map(keras.layers.Dense, (3, 2, 1))])

    task = Frozen()
    values = PythonValues(task)
    task.model.trainable = False
    task.model.layers[1].trainable = True
    found = values.capture()
    other = Frozen()
    again = PythonValues(other)
    changes = again.read(found)
    again.restore(changes)
    assert not again.missing(changes)
    assert [layer.trainable for layer in other.model.layers] == [False, True, False]


# Files made to harm


def value(kind: str, content: Any, name: str = "float") -> dict[str, Any]:
    return {"kind": kind, "type": name, "content": content}


@pytest.mark.parametrize(
    "path",
    ["method", "__class__", "train_step", "_made_with", "layer/kernel_initializer", "layer/_dtype",
     "items/-1", "items/7", "other", "../number", ""],
)  # fmt: skip
def test_no_path_is_set_but_those_of_the_tasks_own_values(path: str) -> None:
    task, missing = restored({path: {"was": None, "now": value("plain", 7.0)}})
    assert set(missing) == {path}
    assert task.method() == "mine" and type(task) is Plain
    assert not hasattr(task, "other") and task.items == [1, {"a": 2, 3: [4]}]
    assert callable(task.layer.kernel_initializer)


def test_objects_are_replaced_by_no_value_but_none() -> None:
    for path in ("layer", "layers/0", "function", "setting"):
        task, missing = restored({path: {"was": None, "now": value("plain", 7.0)}})
        assert set(missing) == {path}
        assert isinstance(task.layer, keras.Layer) and task.layers == [task.layer]
        assert task.function is max and task.setting == Setting()


@pytest.mark.parametrize(
    "found",
    [
        7,
        {"number": 7},
        {"number": {"was": None}},
        {"number": {"was": None, "now": 7}},
        {"number": {"was": None, "now": {"kind": "plain", "type": "float"}}},
        {"number": {"was": None, "now": value("plain", [1])}},
        {"number": {"was": None, "now": value("code", "print()")}},
        {"number": {"was": None, "now": value("tuple", 10**12)}},
        {"number": {"was": None, "now": value("tuple", [1])}},
        {"number": {"was": None, "now": value("tuple", [value("object", None)])}},
        {"number": {"was": None, "now": value("array", 3)}},
        {"number": {"was": None, "now": value("array", np.zeros(10**5))}},
        {"number": {"was": None, "now": value("plain", 1.0, 3)}},  # type: ignore[arg-type]
        {str(i): {"was": None, "now": None} for i in range(MOST_CHANGED + 1)},
    ],
)
def test_values_that_no_checkpoint_contains_are_refused(found: Any) -> None:
    why = "is not a dict of changed values|has no 'was'|has no kind|has invalid content"
    with pytest.raises(ValueError, match=f"(?:{why})"):
        PythonValues(Plain()).read(found)


@pytest.mark.parametrize(
    "now",
    [
        value("enum", "PURPLE", "Color"),
        value("enum", "RED", "int"),
        value("parts", None, "Evil"),
        value("object", None, "Evil"),
        value("tuple", [], "Evil"),
    ],
)
def test_values_of_another_type_are_not_restored(now: Any) -> None:
    task, missing = restored({"color": {"was": None, "now": now}})
    assert set(missing) == {"color"} and task.color is Color.RED


def test_scalars_of_numpy_are_unchanged_however_often_they_are_read() -> None:
    for scalar in (np.complex64(1j), np.datetime64("2020-01-01"), np.float32(0.1)):
        assert fingerprint(scalar) == fingerprint(scalar.copy())
    assert fingerprint(np.complex64(1j)) != fingerprint(np.complex64(2j))


def test_an_object_that_a_hook_replaces_by_a_number_when_it_starts_is_an_initial_value() -> None:
    task = Plain()
    values = PythonValues(task)
    with values.starting(reverted=False):
        task.function = 7
    assert values.changes() == {}


def test_a_layer_may_be_built_while_steps_run() -> None:
    task = Plain()
    task.layer = keras.layers.BatchNormalization()
    values = PythonValues(task)
    assert "layer/gamma" in values.values()  # None
    task.layer.build((None, 3))
    assert "layer/gamma" not in values.values() and not values.changes()
    values.begin_call()
    task.layer.gamma = None
    assert values.changes()["layer/gamma"].now is not None
