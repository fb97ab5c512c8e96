"""Python values of a task that changed during a run: saved in checkpoints, and restored on resume.

A compiled step takes Python values as constants (see `constants`), and a hook may change them. When
a script runs again, it creates the task with the original values. So a checkpoint holds every plain
value that changed: a number, string, flag, None, a member of an enum, a small array, or a tuple of
these; `trainable` of a layer is one. Items of lists and dicts and fields of dataclasses are values
of their own. If anything else changed, the run cannot be resumed, which is an error at once.

A checkpoint never determines which code runs: restoring sets only attributes and items that the
task already has, to plain values, and replaces objects by nothing but None.
"""

import dataclasses
import enum
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal

import keras
import numpy as np

from ..checkpoint.arrays import name_of
from ..errors import StateError
from .constants import LARGE, Items, tuple_like
from .discovery import Discovery
from .state import State

MOST_CHANGED = 10_000  # values in a checkpoint, and items of a tuple
LONGEST_TEXT = 65_536  # characters of a text
LONGEST_INT = 10_000  # bits: Python does not write integers of more than 4,300 digits
NAMED = 5  # values listed in a message
# Setting a value may change others: `trainable` of a layer sets that of its sublayers, which follow
# it. So values are set repeatedly, at most this often.
_MOST_PASSES = 8

Kind = Literal["plain", "enum", "array", "tuple", "parts", "object"]
SAVED: tuple[Kind, ...] = ("plain", "enum", "array", "tuple")


@dataclass(frozen=True, eq=False)
class Value:
    """A Python value.

    Attributes:
        kind: The kind of value; those of `SAVED` can be saved. `parts` is a list, a dict, a
            dataclass or a schedule, whose parts are values of their own.
        content: The value; the name of an enum's member; the values in a tuple; the length or the
            keys of a list or dict.
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
            if value.name not in type(value).__members__:  # flags that are combined
                return cls("object", None, name, value)
            return cls("enum", value.name, name, value)
        if type(value) in (bool, int, float, str, NoneType):
            if isinstance(value, str) and len(value) > LONGEST_TEXT:
                return cls("object", None, f"str of {len(value):,} characters", value)
            if isinstance(value, int) and value.bit_length() > LONGEST_INT:
                return cls("object", None, f"int of {value.bit_length():,} bits", value)
            return cls("plain", value, name, value)
        if isinstance(value, (np.ndarray, np.generic, complex)):
            array = np.asarray(value)
            if array.nbytes <= LARGE and name_of(array.dtype) is not None:
                return cls("array", array.copy(), name, value)
        if isinstance(value, tuple) and len(value) <= MOST_CHANGED:
            parts = tuple(map(cls.of, value))  # type: ignore[reportUnknownArgumentType]
            if all(part.kind in SAVED for part in parts):
                return cls("tuple", parts, name, value)
        if isinstance(value, (list, tuple, dict)):
            return cls("parts", Items(value), name, value)
        schedule = isinstance(value, keras.optimizers.schedules.LearningRateSchedule)
        if schedule or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
            return cls("parts", None, name, value)
        return cls("object", None, name, value)

    @property
    def is_none(self) -> bool:
        """Whether it is the value None."""
        return self.kind == "plain" and self.content is None

    def is_like(self, other: "Value | None") -> bool:
        """Return whether another value is equal: objects by identity, everything else by value."""
        if other is None or (self.kind, self.type) != (other.kind, other.type):
            return False
        if self.kind == "array":
            a, b = self.content, other.content
            return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()
        if self.kind == "tuple":
            a, b = self.content, other.content
            return len(a) == len(b) and all(part.is_like(b[i]) for i, part in enumerate(a))
        if self.kind == "object":
            return self.thing is other.thing
        if self.kind == "parts":
            return self.content == other.content
        return repr(self.content) == repr(other.content)  # 1 is not True, and NaN equals itself

    def __str__(self) -> str:
        if self.kind == "plain":
            return repr(self.content)
        if self.kind == "enum":
            return f"{self.type}.{self.content}"
        if self.kind == "array":
            return f"an array of shape {self.content.shape}"
        if self.kind == "tuple":
            more = ["…"] * (len(self.content) > NAMED)
            return f"({', '.join([*map(str, self.content[:NAMED]), *more])})"
        return f"one {self.type}" if self.content is None else repr(self.content)

    def encoded(self) -> dict[str, Any]:
        """Return the value in the form stored in a checkpoint."""
        content = self.content if self.kind in SAVED else None
        if self.kind == "tuple":
            content = [part.encoded() for part in self.content]
        return {"kind": self.kind, "type": self.type, "content": content}

    @classmethod
    def decoded(cls, found: Any) -> "Value":
        """Return the value from the result of `encoded`.

        Raises:
            ValueError: `found` is not a result of `encoded`.
        """
        if not isinstance(found, Mapping) or set(found) != {"kind", "type", "content"}:  # type: ignore[reportUnknownArgumentType]
            raise ValueError("a value has no kind, type or content")
        kind, name, content = found["kind"], found["type"], found["content"]  # type: ignore[reportUnknownVariableType]
        if kind == "tuple" and isinstance(content, list) and len(content) <= MOST_CHANGED:  # type: ignore[reportUnknownArgumentType]
            content = tuple(cls.decoded(part) for part in content)  # type: ignore[reportUnknownVariableType]
        if not isinstance(kind, str) or not isinstance(name, str) or not _fits(kind, content):
            raise ValueError(f"a value of the kind {kind!a:.40} has invalid content")
        return cls(kind, content, name)  # type: ignore[arg-type]


def _fits(kind: str, content: Any) -> bool:
    if kind == "plain":
        return type(content) in (bool, int, float, str, NoneType)
    if kind == "enum":
        return isinstance(content, str)
    if kind == "array":
        return isinstance(content, np.ndarray) and content.nbytes <= LARGE
    if kind == "tuple":
        return isinstance(content, tuple) and all(part.kind in SAVED for part in content)  # type: ignore[reportUnknownVariableType]
    return kind in ("parts", "object") and content is None


Values = Mapping[str, Value]


@dataclass(frozen=True)
class Change:
    """A change of a Python value since the run began.

    Attributes:
        was: The value when the run began; None if the attribute or item did not exist.
        now: The current value; None if the attribute or item no longer exists.
    """

    was: Value | None
    now: Value | None

    @property
    def can_be_saved(self) -> bool:
        """Whether it can be restored from a checkpoint, or is new, which need not be restored.

        An object is replaced by nothing but None.
        """
        if self.was is None:
            return True
        if self.now is None or self.now.kind not in SAVED:
            return False
        return self.was.kind in SAVED or self.now.is_none


class PythonValues:
    """The Python values of a task in a run: saves and restores those that changed.

    Args:
        task: The task, with its values at the beginning of the run.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._used_by_name: set[str] = set()
        self._of_unbuilt: set[str] = set()  # attributes of layers, which building may replace
        self._first: dict[str, Value] = {}
        with suppress(StateError):  # an invalid optimizer: building the step reports it
            self._first = self.values()
        self._made = dict(self._first)  # before anything was built
        self._touched: set[str] = set()

    def values(self) -> dict[str, Value]:
        """Return the current Python values, by path; of those used by name, only plain ones."""
        found: dict[str, Value] = {}
        for path, constant in State.constants_of(self._task).items():
            value = Value.of(constant.read())
            if constant.used_by_name:
                self._used_by_name.add(path)
            if not getattr(constant.holder, "built", True):
                self._of_unbuilt.add(path)
            if not constant.used_by_name or value.kind in SAVED:
                found[path] = value
        return found

    def begin_call(self) -> None:
        """Treat objects that the script has replaced before a call as initial values.

        The script does so again when it runs again.
        """
        now = self.values()
        objects = {path: x for path, x in now.items() if x.kind not in SAVED}
        self._first = {path: x for path, x in self._first.items() if path in now} | objects

    @contextmanager
    def building(self) -> Generator[None]:
        """Treat changes made while a step is built as initial values, as a context manager.

        Building layers creates attributes.
        """
        before = self.values()
        yield
        self._begin_with(before, self.values())

    @contextmanager
    def starting(self, reverted: bool) -> Generator[None]:
        """Let hooks start, as a context manager: objects that they change are initial values.

        Args:
            reverted: Whether to restore the plain values that they change, since they had started
                before the checkpoint.
        """
        before = self.values()
        yield
        opaque = {path for path, x in before.items() if x.kind not in SAVED}
        objects = {p: x for p, x in self.values().items() if x.kind not in SAVED or p in opaque}
        self._begin_with({path: x for path, x in before.items() if path in objects}, objects)
        if reverted:
            self.set({path: x for path, x in before.items() if x.kind in SAVED})

    def _begin_with(self, before: Values, after: Values) -> None:
        """Treat changes from some values to others as initial values."""
        for path in {**before, **after}:
            if path not in after:
                self._first.pop(path, None)
            elif not after[path].is_like(before.get(path)):
                self._first[path] = after[path]

    def changes(self, values: Values | None = None) -> dict[str, Change]:
        """Return the values that differ from the beginning, or differed at an earlier call.

        Args:
            values: All values by path; default: the current ones.

        Raises:
            StateError: A checkpoint cannot hold one of them.
        """
        now = self.values() if values is None else values
        found: dict[str, Change] = {}
        for path in {**now, **self._first}:
            change = Change(self._first.get(path), now.get(path))
            if path in self._used_by_name and None in (change.was, change.now):
                continue  # an item of a container that the task does not hold, such as a cache
            built = not change.now and path in self._of_unbuilt  # perhaps; None before
            if built and change.was and change.was.is_none:
                differs = False  # hooks, and an eval_step of its own, may build layers later
            elif change.now is None:
                differs = not is_within(path, found)  # else its owner was replaced
            else:
                differs = not change.now.is_like(change.was)
            if differs or (path in self._touched and path in now):
                self._touched.add(path)
                found[path] = change
        lost = {path: change for path, change in found.items() if not change.can_be_saved}
        if lost or len(found) > MOST_CHANGED:
            what = described(lost) if lost else f"{len(found):,} Python values changed"
            raise StateError(
                f"{what}, which a checkpoint cannot hold, so this run could not be resumed: make "
                "it a keras.Variable, or give the task both objects from the start, and let a flag "
                "select one"
            )
        return found

    def capture(self, values: Values | None = None) -> dict[str, Any]:
        """Return the changed Python values in the form stored in a checkpoint."""
        return {
            path: {"was": c.was and c.was.encoded(), "now": c.now and c.now.encoded()}
            for path, c in self.changes(values).items()
        }

    def read(self, found: Any) -> dict[str, Change]:
        """Read the changed values from a checkpoint, as returned by `capture`.

        Raises:
            ValueError: `found` is not a result of `capture`.
        """
        if not isinstance(found, Mapping) or len(found) > MOST_CHANGED:  # type: ignore[reportUnknownArgumentType]
            raise ValueError("it is not a dict of changed values")
        changes: dict[str, Change] = {}
        for path, change in found.items():  # type: ignore[reportUnknownVariableType]
            if not isinstance(change, Mapping) or set(change) != {"was", "now"}:  # type: ignore[reportUnknownArgumentType]
                raise ValueError(f"{path!a:.80} has no 'was' or no 'now'")
            was, now = change["was"], change["now"]  # type: ignore[reportUnknownVariableType]
            changes[str(path)] = Change(  # type: ignore[reportUnknownArgumentType]
                None if was is None else Value.decoded(was),
                None if now is None else Value.decoded(now),
            )
        self._touched |= set(changes)
        return changes

    def edited(self, changes: Mapping[str, Change]) -> dict[str, tuple[str, str]]:
        """Return the values that the script now sets differently at its beginning.

        Args:
            changes: The changes recorded in a checkpoint.

        Returns:
            The earlier and the present initial value, by path, as strings.
        """
        found: dict[str, tuple[str, str]] = {}
        for path, change in changes.items():
            first = self._first.get(path)
            if change.was is None or first is None:
                continue
            opaque = change.was.kind == first.kind and first.kind not in SAVED
            # Building may have changed it in this process, but not when the run began.
            same = change.was.is_like(first) or change.was.is_like(self._made.get(path))
            if not (opaque or same):
                found[path] = str(change.was), str(first)
        return found

    def restore(self, changes: Mapping[str, Change], everything: bool = False) -> None:
        """Set values to those of a checkpoint, if possible.

        Args:
            changes: The changes recorded in the checkpoint.
            everything: Also reset values that the checkpoint does not record to the values at the
                beginning of the run.
        """
        # All other values are targets too, since `trainable` of a layer sets that of its sublayers.
        saved = {path: change.now for path, change in changes.items() if change.now is not None}
        self.set({**self.values(), **(self._first if everything else {}), **saved})

    def set(self, target: Values) -> None:
        """Set values by path, if possible; repeat, since setting one value may change others."""
        before: list[str] = []
        for _ in range(_MOST_PASSES):
            wrong: list[str] = []
            for path, constant in State.constants_of(self._task).items():
                wanted = target.get(path)
                if wanted is None or wanted.is_like(found := Value.of(now := constant.read())):
                    continue
                # A value read from a file may replace an object only if it is None.
                if wanted.thing is None and not wanted.is_none and found.kind not in SAVED:
                    continue
                wrong.append(path)
                # User code (a property or a class) may raise anything. Values that could not be set
                # are reported by `missing`.
                with suppress(Exception):
                    constant.write(_object(wanted, now))
            if not wrong or wrong == before:
                return
            before = wrong

    def missing(self, changes: Mapping[str, Change]) -> dict[str, Change]:
        """Return the changes of a checkpoint that the task does not have."""
        now = self.values()
        return {p: c for p, c in changes.items() if c.now is None or not c.now.is_like(now.get(p))}


def described(changes: Mapping[str, Change]) -> str:
    """Describe how values changed; of an object that was replaced, without its parts."""
    shown = [
        f"{path} changed from {change.was or 'nothing'} to {change.now or 'nothing'}"
        for path, change in changes.items()
        if not is_within(path, changes)
    ]
    more = f"; and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return "; ".join(shown[:NAMED]) + more


def is_within(path: str, found: Mapping[str, object]) -> bool:
    """Return whether a path is below one of the given paths."""
    parts = path.split("/")
    return any("/".join(parts[:i]) in found for i in range(1, len(parts)))


def _object(wanted: Value, now: Any) -> Any:
    """Return the Python object that a `Value` describes, which is to replace another one.

    Raises:
        ValueError: It cannot be made from what a checkpoint holds.
    """
    if wanted.kind == "array":
        array = wanted.content.copy()
        if wanted.type == "complex":
            return array.item()
        return array if wanted.type == "ndarray" else array[()]
    if wanted.thing is not None:
        return wanted.thing
    if wanted.kind == "plain":
        return wanted.content
    if (
        wanted.kind == "enum"
        and isinstance(now, enum.Enum)
        and type(now).__qualname__ == wanted.type
    ):
        return type(now)[wanted.content]
    if wanted.kind == "tuple":
        like: Any = now if type(now).__qualname__ == wanted.type else ()
        if type(like).__qualname__ != wanted.type:  # a named tuple, of which there is no instance
            raise ValueError
        held: Sequence[Any] = like
        parts = [
            _object(x, held[i] if i < len(held) else None) for i, x in enumerate(wanted.content)
        ]
        return tuple_like(like, parts)
    raise ValueError


@contextmanager
def undone(task: Any) -> Generator[None]:
    """Undo changes of plain Python values of a task at the end of a `with` block.

    An attribute that the block sets for the first time gets the value that its class has for it.
    """
    before = {path: c.read() for path, c in Discovery.constants_of(task).items()}
    try:
        yield
    finally:
        for path, constant in Discovery.constants_of(task).items():
            default = getattr(type(constant.holder), constant.name, None)
            new, old = Value.of(constant.read()), Value.of(before.get(path, default))
            if new.kind in SAVED and old.kind in SAVED and not new.is_like(old):
                constant.write(old.thing)
