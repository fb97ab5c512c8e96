"""Saving changed Python values of a task in checkpoints, and restoring them.

A compiled step takes Python values as constants (see `constants`), and a hook may change them. When
a script runs again, it creates the task with the original values. So a checkpoint records every
value that changed, and the value it had when the run began.

Numbers, strings, flags, None, members of enums, small arrays, and lists, tuples, dicts and
dataclasses of these are restored. For any other object only the class is recorded, so that a
checkpoint never determines which code runs. Restoring sets only attributes and items that the task
already has, to values of these kinds.
"""

import enum
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ..errors import StateError
from .constants import Constant, tuple_like
from .saved_values import CONTAINERS, Value
from .state import State

MOST_CHANGED = 10_000  # recorded values
NAMED = 5  # values listed in a message
KEPT = 4  # checkpoints of this process whose objects are remembered
# Setting a value may change others: `trainable` of a layer sets that of its sublayers, and setting
# a list creates items. So values are set repeatedly, at most this often.
_MOST_PASSES = 8

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


class _NotRestorableError(Exception):
    """A value cannot be created from the data in a checkpoint."""


class SavedConstants:
    """Saves and restores the changed Python values of a task in a run's checkpoints.

    Args:
        task: The task, with its values at the beginning of the run.
    """

    def __init__(self, task: Any) -> None:
        self._task = task
        self._first: dict[str, Value] = {}
        with suppress(StateError):  # an invalid optimizer: building the step reports it
            self._first = self.values()
        self._made = dict(self._first)  # before anything was built
        self._touched: set[str] = set()
        self._saved: dict[int, dict[str, Change]] = {}

    def values(self) -> dict[str, Value]:
        """Return the current Python values, by path."""
        return {path: Value.of(c.read()) for path, c in State.constants_of(self._task).items()}

    @contextmanager
    def building(self) -> Generator[None]:
        """Treat changes made while a step is built as initial values, as a context manager.

        Building layers creates attributes.
        """
        before = self.values()
        yield
        after = self.values()
        for path in {**before, **after}:
            if path not in after:
                self._first.pop(path, None)
            elif not after[path].is_like(before.get(path)):
                self._first[path] = after[path]

    def changes(self, values: Values | None = None) -> dict[str, Change]:
        """Return the values that differ from the beginning, or differed at some time before.

        Args:
            values: All values by path; default: the current ones.
        """
        now = self.values() if values is None else values
        found: dict[str, Change] = {}
        for path in {**now, **self._first}:
            change = Change(self._first.get(path), now.get(path))
            if change.now is None:
                differs = not is_within(path, found)  # else its container is gone or replaced too
            else:
                differs = not change.now.is_like(change.was)
            if differs or (path in self._touched and path in now):
                self._touched.add(path)
                found[path] = change
        return found

    def capture(self, step: int, values: Values | None = None) -> dict[str, Any]:
        """Return the changed Python values in the form stored in the checkpoint of a step."""
        changes = self.changes(values)
        self._saved[step] = changes
        for old in list(self._saved)[:-KEPT]:
            del self._saved[old]
        if len(changes) > MOST_CHANGED:  # too many to record: none of them can be restored
            many = Value("object", None, f"set of {len(changes):,} changed values")
            changes = {"": Change(Value("object", None, "set of values"), many)}
        return {
            path: {"was": c.was and c.was.encoded(), "now": c.now and c.now.encoded()}
            for path, c in changes.items()
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

    def saved(self, step: int) -> dict[str, Change] | None:
        """Return what this process saved at a step, including objects; None if it saved nothing."""
        return self._saved.get(step)

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
            opaque = change.was.kind == first.kind == "object"
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
        target = {**self.values(), **(self._first if everything else {})}
        for path, change in changes.items():
            if change.now is None:
                target.pop(path, None)
            else:
                target[path] = change.now
        self.put_back(target)

    def put_back(self, target: Values) -> None:
        """Set values by path, if possible; repeat, since setting one value may change others."""
        before: list[str] = []
        for _ in range(_MOST_PASSES):
            wrong: list[str] = []
            constants = State.constants_of(self._task)
            for path, constant in constants.items():
                wanted = target.get(path)
                if wanted is None or not _must_be_set(wanted, constant.read()):
                    continue
                wrong.append(path)
                # User code (a property or a class) may raise anything. Values that could not be set
                # are reported by `missing`.
                with suppress(Exception):
                    _set(path, constant, wanted, target)
            if not wrong or wrong == before:
                return
            before = wrong

    def missing(self, changes: Mapping[str, Change]) -> dict[str, Change]:
        """Return the changes of a checkpoint that the task does not have.

        If only the class of an object is known, any object of this class counts as restored, unless
        it is the one that the script created at the beginning.
        """
        now = self.values()
        found: dict[str, Change] = {}
        for path, change in changes.items():
            value, wanted = now.get(path), change.now
            if wanted is None:
                there = value is None
            elif wanted.kind == "object" and wanted.thing is None:
                there = (
                    value is not None
                    and value.type == wanted.type
                    and value.encoded()["kind"] == wanted.kind
                    and not value.is_like(self._made.get(path))
                )
            else:
                there = wanted.is_like(value)
            if not there:
                found[path] = change
        return found


def described(changes: Mapping[str, Change]) -> str:
    """Describe how values changed; for an object that was replaced, without its contents."""
    opaque = {path: c for path, c in changes.items() if c.now and c.now.kind not in CONTAINERS}
    old = {p: c for p, c in changes.items() if c.was or (c.now and c.now.kind == "object")}
    shown = [
        f"{path or 'the task'} changed from {c.was or 'nothing'} to {c.now or 'nothing'}"
        for path, c in (old or changes).items()
        if not is_within(path, opaque)
    ]
    more = f"; and {len(shown) - NAMED} more" if len(shown) > NAMED else ""
    return "; ".join(shown[:NAMED]) + more


def is_within(path: str, found: Mapping[str, object]) -> bool:
    """Return whether a path is below one of the given paths."""
    parts = path.split("/")
    return any("/".join(parts[:i]) in found for i in range(1, len(parts)))


def _must_be_set(wanted: Value, now: Any) -> bool:
    """Return whether a value must be set: it differs, and may be replaced by this kind of value."""
    found = Value.of(now)
    if wanted.is_like(found):
        return False
    if wanted.kind in ("object", "fields") and wanted.thing is None:
        return False
    # A value read from a file may replace an object only if it is None.
    own = wanted.thing is not None or (wanted.kind == "plain" and wanted.content is None)
    return own or found.kind not in ("object", "fields")


def _set(path: str, constant: Constant, wanted: Value, target: Values) -> None:
    now = constant.read()
    value = _rebuild(path, wanted, now, target)
    if wanted.kind == "list" and type(now).__qualname__ == wanted.type:
        now[:] = value  # another attribute may hold the same list
    elif wanted.kind == "dict" and type(now).__qualname__ == wanted.type:
        now.clear()
        now.update(value)
    else:
        constant.write(value)


def _rebuild(path: str, wanted: Value, now: Any, target: Values) -> Any:
    """Create a Python object from a `Value`, with the parts in `target`.

    Raises:
        _NotRestorableError: A part of it is an object that does not exist in this process.
    """
    if wanted.kind == "plain":
        return wanted.content
    if wanted.kind == "array":
        array = wanted.content.copy()
        return array if wanted.type == "ndarray" else array[()]
    if wanted.kind == "enum":
        if wanted.thing is not None:
            return wanted.thing
        if not isinstance(now, enum.Enum) or type(now).__qualname__ != wanted.type:
            raise _NotRestorableError
        return type(now)[wanted.content]
    if wanted.kind not in CONTAINERS:
        if wanted.thing is None:
            raise _NotRestorableError
        return wanted.thing
    like = now if type(now).__qualname__ == wanted.type else wanted.thing
    if like is None and wanted.type != wanted.kind:  # a subclass, of which there is no instance
        raise _NotRestorableError
    keys: Sequence[Any] = wanted.content if wanted.kind == "dict" else range(wanted.content)
    held = dict(now) if isinstance(now, dict) else dict(enumerate(now)) if _is_row(now) else {}  # type: ignore[reportUnknownArgumentType]
    parts: dict[Any, Any] = {}
    for key in keys:
        inner = target.get(f"{path}/{key}")
        if inner is not None and not (key in held and inner.is_like(Value.of(held[key]))):
            with suppress(_NotRestorableError):
                parts[key] = _rebuild(f"{path}/{key}", inner, held.get(key), target)
        if key not in parts:
            if key not in held:
                raise _NotRestorableError
            parts[key] = held[key]
    if wanted.kind == "dict":
        return parts
    if wanted.kind == "list":
        return list(parts.values())
    return tuple_like(like if like is not None else (), list(parts.values()))


def _is_row(value: Any) -> bool:
    return isinstance(value, (list, tuple))
