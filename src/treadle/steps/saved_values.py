"""Python values in a form that a checkpoint can store."""

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

import keras
import numpy as np

from ..checkpoint.arrays import name_of
from .constants import LARGE

MOST_ITEMS = 10_000  # of a recorded list
LONGEST_TEXT = 65_536  # characters of a recorded text

Kind = Literal["plain", "enum", "array", "list", "tuple", "dict", "fields", "object"]
CONTAINERS: tuple[Kind, ...] = ("list", "tuple", "dict")


@dataclass(frozen=True, eq=False)
class Value:
    """A Python value without its parts, in a form that a checkpoint can store.

    Attributes:
        kind: The kind of value. `fields` is a dataclass or a schedule, whose attributes are
            separate values; `object` is any value that cannot be recorded.
        content: The value, the name of an enum's member, the length of a list or tuple, or the keys
            of a dict.
        type: The name of its class.
        thing: The object itself, if it exists in this process.
    """

    kind: Kind
    content: Any
    type: str
    thing: Any = None

    @classmethod
    def of(cls, value: Any) -> "Value":
        """Return the `Value` of a Python object in its current state."""
        name = type(value).__qualname__
        if isinstance(value, enum.Enum):
            return cls("enum", value.name, name, value)
        if type(value) in (bool, int, float, str, NoneType):
            if isinstance(value, str) and len(value) > LONGEST_TEXT:
                return cls("object", None, f"str of {len(value):,} characters", value)
            return cls("plain", value, name)
        if isinstance(value, (np.ndarray, np.generic)):
            array = np.asarray(value)
            if array.nbytes <= LARGE and name_of(array.dtype) is not None:
                return cls("array", array.copy(), name)
        if isinstance(value, (list, tuple)):
            kind: Kind = "list" if isinstance(value, list) else "tuple"
            return cls(kind, len(value), name, value)  # type: ignore[reportUnknownArgumentType]
        if isinstance(value, dict):
            keys: tuple[Any, ...] = tuple(value)  # type: ignore[reportUnknownArgumentType]
            return cls("dict", keys, name, value)
        schedule = isinstance(value, keras.optimizers.schedules.LearningRateSchedule)
        if schedule or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return cls("fields", None, name, value)
        return cls("object", None, name, value)

    def is_like(self, other: "Value | None") -> bool:
        """Return whether another value is equal: objects by identity, everything else by value."""
        if other is None or (self.kind, self.type) != (other.kind, other.type):
            return False
        if self.kind == "array":
            a, b = self.content, other.content
            return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        if self.kind == "object":
            return self.thing is other.thing
        return repr(self.content) == repr(other.content)  # 1 is not True, and NaN equals itself

    def __str__(self) -> str:
        if self.kind == "plain":
            return repr(self.content)
        if self.kind == "enum":
            return f"{self.type}.{self.content}"
        if self.kind == "array":
            return f"an array of shape {self.content.shape}"
        if self.kind == "dict":
            return f"a dict of {len(self.content)}"
        if self.kind in CONTAINERS:
            return f"a {self.type} of {self.content}"
        return f"one {self.type}"

    def encoded(self) -> dict[str, Any]:
        """Return the value in the form stored in a checkpoint."""
        content, kind = self.content, self.kind
        if kind == "dict":
            content = list(content)
        if kind in CONTAINERS and not _fits(kind, content):
            kind, content = "object", None
        return {"kind": kind, "type": self.type, "content": content}

    @classmethod
    def decoded(cls, found: Any) -> "Value":
        """Return the value from the result of `encoded`.

        Raises:
            ValueError: `found` is not a result of `encoded`.
        """
        if not isinstance(found, Mapping) or set(found) != {"kind", "type", "content"}:  # type: ignore[reportUnknownArgumentType]
            raise ValueError("a value has no kind, type or content")
        kind, name, content = found["kind"], found["type"], found["content"]  # type: ignore[reportUnknownVariableType]
        if not isinstance(kind, str) or not isinstance(name, str) or not _fits(kind, content):
            raise ValueError(f"a value of the kind {kind!a:.40} has invalid content")
        if kind == "dict":
            content = tuple(content)  # type: ignore[reportUnknownArgumentType]
        return cls(kind, content, name)  # type: ignore[arg-type]


def _fits(kind: str, content: Any) -> bool:
    if kind == "plain":
        return type(content) in (bool, int, float, str, NoneType)
    if kind == "enum":
        return isinstance(content, str)
    if kind == "array":
        return isinstance(content, np.ndarray) and content.nbytes <= LARGE
    if kind in ("list", "tuple"):
        return type(content) is int and 0 <= content <= MOST_ITEMS
    if kind == "dict":
        keys: list[Any] = content if isinstance(content, list) else [()]  # type: ignore[reportUnknownVariableType]
        return len(keys) <= MOST_ITEMS and all(_fits("plain", key) for key in keys)
    return kind in ("fields", "object") and content is None
