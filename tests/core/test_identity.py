"""The identity of a run: the arguments of its task, its source, and the user's code."""

import copy
import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, Generic, TypeVar

import keras
import numpy as np
import pytest

import treadle
from treadle.core.identity import described, identity, source_facts
from treadle.core.user_code import changed_code, code_of

T = TypeVar("T")


def settings(task: Any) -> Any:
    return identity(task)["settings"]


class Plain(treadle.Task):
    def __init__(self, units: int = 8, *, rate: float = 0.1, **more: Any) -> None:
        super().__init__()
        self.doubled = 2 * units


class Inner(Plain):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, rate=0.5, **kwargs)


@dataclasses.dataclass
class Data(treadle.Task):
    units: int = 3


@dataclasses.dataclass(frozen=True)
class Frozen(treadle.Task):
    units: int


class Several(treadle.Task, Generic[T]):
    def __init__(self, units: int) -> None:
        self.units = units


class Both(treadle.Task, keras.Model):
    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(units)


class BothTurned(keras.Model, treadle.Task):
    def __init__(self, units: int) -> None:
        super().__init__()


class Making(Plain):
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__new__(cls, *args, **kwargs)


class Bare(treadle.Task):
    pass


def test_settings_are_the_arguments_and_plain_attributes() -> None:
    assert settings(Plain(5, rate=0.2, z="a")) == {"doubled": 10, "units": 5, "rate": 0.2, "z": "a"}
    assert settings(Plain()) == {"doubled": 16, "units": 8, "rate": 0.1}
    assert identity(Plain())["task"] == "Plain"
    assert identity(Plain())["backend"] == keras.config.backend()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Inner(5, z=1), {"doubled": 10, "args": [5], "z": 1}),
        (lambda: Data(4), {"units": 4}),
        (lambda: copy.copy(Data(5)), {"units": 5}),
        (lambda: copy.deepcopy(Data(6)), {"units": 6}),
        (lambda: Frozen(7), {"units": 7}),
        (lambda: Several[int](8), {"units": 8}),
        (lambda: Both(9), {"units": 9}),
        (lambda: Making(9, rate=1.0), {"doubled": 18, "units": 9, "rate": 1.0}),
        (lambda: Bare(), {}),
    ],
)
def test_classes_of_all_kinds_keep_their_arguments(make: Any, expected: Any) -> None:
    assert settings(make()) == expected


def test_what_a_task_is_made_with_is_no_attribute() -> None:
    assert vars(Data(3)) == {"units": 3}
    assert isinstance(BothTurned(3), treadle.Task)  # Keras' own __new__ comes first: unknown


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Bare(3), r"Bare\(\) takes no arguments"),
        (lambda: Plain(1, 2), r"takes from 1 to 2 positional arguments but 3 were given"),
        (lambda: Frozen(), r"missing 1 required positional argument: 'units'"),
    ],
)
def test_wrong_arguments_are_python_s_own_errors(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_supervised_identifies_models_and_optimizers_by_their_configuration() -> None:
    def made(units: int = 4, rate: float = 0.1, loss: Any = "mse") -> Any:
        layers = [keras.layers.Flatten(), keras.layers.Dense(units)]
        model, optimizer = keras.Sequential(layers), keras.optimizers.SGD(rate)
        return settings(treadle.Supervised(model, loss, optimizer, [keras.metrics.AUC()]))

    def contrastive(y: Any, outputs: Any) -> Any:
        return y - outputs

    assert made() == made()  # automatic names apart
    assert json.loads(json.dumps(made())) == made()
    assert made(units=5)["model"]["layers"]["1"]["units"] == 5
    assert made(rate=1.0)["optimizer"]["learning_rate"] == 1.0
    assert made(loss=contrastive)["loss"].endswith("contrastive")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (float("nan"), "nan"),
        ((1, "a", None), [1, "a", None]),
        ({"a": np.float32(0.5)}, {"a": 0.5}),
        (np.zeros((2, 3)), "ndarray (2, 3)"),
        ([0.5] * 100_000, "list of 100,000"),
        (Path("a/b"), "a/b"),
        (dict, "dict"),
        (object(), "object"),
        (
            keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5),
            {
                "class": "ExponentialDecay",
                "initial_learning_rate": 0.1,
                "decay_steps": 10,
                "decay_rate": 0.5,
                "staircase": False,
            },
        ),
    ],
)
def test_values_in_words_that_files_know(value: Any, expected: Any) -> None:
    assert described(value) == expected


def test_a_class_without_a_readable_configuration_is_named() -> None:
    class Odd(keras.layers.Layer):
        def get_config(self) -> Any:
            raise RuntimeError("odd")

    assert described(Odd()) == {"class": "Odd"}


def test_sources_are_described_without_reading_them() -> None:
    arrays = treadle.data.from_arrays(np.zeros(10), batch_size=4, shuffle=False)
    assert source_facts(arrays) == {
        "length": 3,
        "batch_examples": 4,
        "examples": 10,
        "shuffle": False,
        "drop_last": False,
        "fingerprint": arrays.fingerprint,
    }
    found = source_facts(treadle.data.limited(arrays, 2))
    assert found == {"length": 2, "batch_examples": 4, "fingerprint": arrays.fingerprint}


# The user's own code

SOURCE = """
import keras
import functools
import treadle
import helper_of_mine

SCALE = 3

def contrastive(x):
    return SCALE * x

def apart(x):
    return x

def twice(function):
    @functools.wraps(function)
    def called(*args):
        return 2 * function(*args)
    return called

class Base(treadle.Task):
    flag = True

    def helped(self, x):
        return helper_of_mine.helping(x)

class Mine(Base):
    @twice
    def train_step(self, batch):
        def objective():
            # a comment
            return contrastive(batch)
        return objective()

    @property
    def name(self):
        return "mine"
"""
HELPER = "def helping(x):\n    return x\n\ndef other(x):\n    return x\n"


def hashes(folder: Path, source: str = SOURCE, helper: str = HELPER) -> dict[str, str]:
    """The hashes of a class in a file of this folder."""
    folder.mkdir(exist_ok=True)
    loaded: Any = None
    for name, text in (("helper_of_mine", helper), ("mine_with_code", source)):
        path = folder / f"{name}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = loaded = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(loaded)
    return code_of(loaded.Mine())


def test_code_is_what_a_class_uses_by_name(tmp_path: Path) -> None:
    found = hashes(tmp_path)
    assert {"Base.flag", "Base.helped", "Mine.train_step", "Mine.name", "contrastive"} < set(found)
    assert {"SCALE", "helping"} < set(found)
    assert not {"apart", "other"} & set(found)
    assert not [name for name in found if "Task" in name or name.startswith("__")]


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("return contrastive(batch)", "return 3 * contrastive(batch)", "Mine.train_step"),
        ("return SCALE * x", "return SCALE - x", "contrastive"),
        ("SCALE = 3", "SCALE = 4", "SCALE"),
        ("flag = True", "flag = False", "Base.flag"),
        ('return "mine"', 'return "yours"', "Mine.name"),
        ("def helping(x):\n    return x", "def helping(x):\n    return -x", "helping"),
        ("# a comment", "# another", None),
        ("def apart(x):", "def apart(x, y):", None),
        ("def twice", "\n\n\n\ndef twice", None),
    ],
)
def test_what_changed_is_named(tmp_path: Path, old: str, new: str, changed: str | None) -> None:
    assert old in SOURCE + HELPER
    before = hashes(tmp_path / "before")
    after = hashes(tmp_path / "after", SOURCE.replace(old, new), HELPER.replace(old, new))
    assert [name for name in before if before[name] != after[name]] == [changed] * bool(changed)
    sentence = changed_code(before, after)
    assert sentence.startswith(f"the code of {changed} changed since this run") == bool(changed)
    assert sentence.endswith(": fresh=True (--fresh) trains from scratch") == bool(changed)


def test_functions_of_one_name_are_distinguished(tmp_path: Path) -> None:
    source = SOURCE.replace("def apart(x)", "def helping(y, x=1)").replace(
        "return contrastive(batch)", "return helping(batch)"
    )
    before = hashes(tmp_path / "before", source)
    after = hashes(tmp_path / "after", source, HELPER.replace("return x", "return -x"))
    assert "+" in before["helping"]
    assert [name for name in before if before[name] != after[name]] == ["helping"]


def test_unknown_code_is_not_reported() -> None:
    assert changed_code({}, {"a": "1"}) == changed_code({"a": "1"}, {}) == ""
    many = {str(i): "1" for i in range(8)}
    assert "the code of 0, 1, 2, 3, 4 and 3 more changed" in changed_code(many, dict.fromkeys(many))


def test_the_functions_of_a_task_are_its_code() -> None:
    def train_step(batch: Any) -> Any:
        return {"loss": other(batch)}

    def other(x: Any) -> Any:
        return x

    task = treadle.task(functools.partial(train_step))
    assert [name.rpartition(".")[2] for name in code_of(task)] == ["other", "train_step"]
    namespace: dict[str, Any] = {}
    exec("def typed(batch): return batch", namespace)  # no source, as in a shell
    assert code_of(treadle.task(namespace["typed"])) == {}


def test_installed_code_is_not_the_user_s() -> None:
    supervised = treadle.Supervised(keras.Sequential([keras.layers.Dense(1)]), "mse", "sgd")
    assert code_of(supervised) == {}
