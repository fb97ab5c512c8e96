"""Forms of batches in containers of classes: described as plain data, and made again."""

from collections import OrderedDict, UserDict, defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from treadle.checkpoint.batch_forms import (
    MissingClassError,
    described,
    example,
    refuse_other_structure,
    structure,
    zeros,
)
from treadle.errors import DataError

X, Y = np.ones((2, 3), "float32"), np.ones(2, "int32")


class Named(NamedTuple):
    y: Any
    x: Any


@dataclass(frozen=True, slots=True)
class Record:
    y: Any
    x: Any
    more: Any = field(init=False, default=None)


class Rows(list[Any]):
    pass


@dataclass
class Checked:
    x: Any

    def __post_init__(self) -> None:
        raise AssertionError("no constructor is called")


def checked() -> Any:
    made = object.__new__(Checked)
    made.x = X
    return made


CONTAINERS = {
    "named tuple": Named(Y, {"z": X, "b": None}),
    "dataclass": Record(Y, (X, None)),
    "ordered dict": OrderedDict(z=X, b=Named(Y, None)),
    "default dict": defaultdict(list, {"z": X}),
    "list": Rows([X, Rows([Y])]),
    "checked": checked(),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_is_made_again(kind):
    batch = CONTAINERS[kind]
    form = described(batch)
    again = zeros(form)
    assert described(again) == form
    assert type(again) is type(batch)


def test_a_class_in_a_function_is_found_if_it_was_described():
    class Inside(NamedTuple):
        x: Any

    assert type(zeros(described(Inside(X)))) is Inside


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (["no.such", "Named"], "there is no class no.such.Named"),
        ([__name__, "X"], f"there is no class {__name__}.X"),
        ([__name__, "Checked"], "has changed: a Checked has the fields x"),
        (["subprocess", "Popen"], "has changed: a Popen cannot hold 'y'"),
        (["collections", "UserDict"], "has changed: a UserDict cannot hold 'y'"),
    ],
)
def test_a_class_that_is_missing_or_another_now(name, message):
    form = ["object", *name, [["y", ["none"]]]]
    with pytest.raises(MissingClassError, match=message):
        zeros(form)
    batch = Named(Y, X)
    assert example(form, batch) is batch


def test_what_has_no_description():
    assert described(UserDict(x=X)) is None
    assert described(Named({0.5: X}, Y)) is None


def test_an_error_shows_the_fields_of_both_structures():
    forms, now = [described(Named(Y, X))], described(Record(Y, X))
    assert structure(now) == "Record(y: array, x: array, more: None)"
    message = r"trained on batches Named\(y: array, x: array\), .* gives Record\(y: array"
    with pytest.raises(DataError, match=message):
        refuse_other_structure(forms, now, KeyError("x"))
