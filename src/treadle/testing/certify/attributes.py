"""Plain Python values of a task, its data and its hooks, which checkpoints do not save.

Two processes at the same step should hold the same values. If their batches or results differ, a
difference in these values is the probable cause.
"""

import dis
import hashlib
import random
from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from ...core.triggers import Scheduled
from ...core.user_code import closure_of, code_in, is_library, namespace_of_class

DEEPEST: Final = 7
MOST: Final = 500
LONGEST: Final = 60
WHOLE: Final = 1 << 20
"""Larger arrays (in bytes) are described by dtype and shape only: they are data sets, which do not
change."""

PLAIN = (bool, int, float, complex, str, bytes, type(None))
MANY = (list, tuple, set, frozenset)

OF_THE_MOMENT: Final = frozenset(
    (
        *("time", "time_ns", "perf_counter", "monotonic", "now", "utcnow", "today", "getpid"),
        *("urandom", "uuid1", "uuid4", "token_bytes"),
        *("default_rng", "RandomState", "Random", "SystemRandom"),
    )
)
"""Functions that return the time, process-specific values, or unseeded random generators."""


class PlainValues:
    """Plain Python values by path.

    Attributes:
        found: A short text of each value; equal for equal values in another process.
        calls: The functions of `OF_THE_MOMENT` that a function calls, by that function's name.

    Example:
        >>> attributes = PlainValues()
        >>> attributes.take({"seen": [1, 2], "rate": 0.5}, "task")
        >>> attributes.found
        {"task['seen']": 'list of 2: [1, 2]', "task['rate']": '0.5'}
    """

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.calls: dict[str, str] = {}
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that their ids stay unique

    def take(self, thing: Any, path: str, depth: int = 0) -> None:
        """Record a value, and the values that it holds or uses."""
        if depth > DEEPEST or len(self.found) >= MOST:
            return
        text = _text_of(thing)
        if text is not None:
            self.found[path] = text
        elif id(thing) not in self._seen:
            self._seen[id(thing)] = thing
            for inner, part in list(self._parts(thing, path)):
                self.take(part, inner, depth + 1)

    def _parts(self, thing: Any, path: str) -> Iterator[tuple[str, Any]]:
        """Yield what a value holds or uses, by path."""
        kind = type(thing)
        if issubclass(kind, Mapping):
            yield from ((f"{path}[{key!r}]", part) for key, part in thing.items())
        elif issubclass(kind, MANY):
            yield from ((f"{path}[{i}]", part) for i, part in enumerate(thing))
        elif issubclass(kind, partial):
            yield from ((path, part) for part in (thing.func, *thing.args))
        elif issubclass(kind, Scheduled):
            yield path, thing.function
        elif issubclass(kind, MethodType):
            yield from ((path, part) for part in (thing.__self__, thing.__func__))
        elif issubclass(kind, FunctionType):
            yield from self._used(thing, path)
        elif issubclass(kind, GeneratorType):
            frame = thing.gi_frame
            if frame is not None and not is_library(frame.f_globals):
                local = f"{root_of(path)}: {frame.f_code.co_name}"
                yield from ((f"{local}.{name}", part) for name, part in frame.f_locals.items())
        else:
            yield from _attributes(thing, path)

    def _used(self, function: FunctionType, path: str) -> Iterator[tuple[str, Any]]:
        """Yield a function's closure, its defaults and the globals that it uses."""
        own = not is_library(function.__globals__)
        name = f"{root_of(path)}: {function.__qualname__.rpartition('<locals>.')[2]}"
        for variable, value in closure_of(function).items():
            yield f"{name}.{variable}" if own else path, value
        if not own:
            return
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(default, PLAIN):
                yield f"{name}'s default", default
        names = _names_read(function.__code__)
        if moments := sorted(names & OF_THE_MOMENT):
            self.calls[name] = ", ".join(moments)
        for used in sorted(names & function.__globals__.keys()):
            value = function.__globals__[used]
            if not used.startswith("__") and not isinstance(value, ModuleType | type):
                yield f"{root_of(path)}: {used}", value


def _attributes(thing: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a user-defined object; Keras' own objects have variables."""
    held: dict[str, Any] = getattr(thing, "__dict__", {})
    if type(thing).__module__.startswith("treadle.data"):
        yield from ((path, part) for name, part in held.items() if not name.startswith("_"))
    elif _is_users(type(thing)):
        yield from ((f"{path}.{name}", part) for name, part in held.items())
        for base in filter(_is_users, type(thing).__mro__):
            for name, member in vars(base).items():
                if not (name.startswith("__") and isinstance(member, PLAIN)):
                    yield f"{path}.{name}", getattr(member, "__func__", member)


def differing(before: Mapping[str, str], now: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return `(path, before, now)` of the values that are in both and differ.

    Example:
        >>> differing({"task.a": "1", "task.b": "2"}, {"task.a": "1", "task.b": "0"})
        [('task.b', '2', '0')]
    """
    return [(p, old, now[p]) for p, old in before.items() if p in now and now[p] != old]


def root_of(path: str) -> str:
    """Return the first part of a path: `task`, `train`, `validation` or `hooks`.

    Example:
        >>> root_of("task.seen[0]"), root_of("train: growing.seen")
        ('task', 'train')
    """
    return path.partition(":")[0].partition(".")[0].partition("[")[0]


def _text_of(thing: Any) -> str | None:
    """Return a text of a plain value; None if its parts are to be recorded instead."""
    if isinstance(thing, PLAIN):
        return _short(repr(thing))
    if isinstance(thing, random.Random):
        return f"a random.Random in state {_digest(repr(thing.getstate()))}"
    if isinstance(thing, np.random.Generator):
        return f"a NumPy Generator in state {_digest(repr(thing.bit_generator.state))}"
    if isinstance(thing, np.random.RandomState):
        return f"a NumPy RandomState in state {_digest(repr(thing.get_state()))}"
    kind, name = type(thing), type(thing).__name__
    if issubclass(kind, np.ndarray):
        form = f"{thing.dtype} array of shape {thing.shape}"
        is_data = thing.nbytes > WHOLE or thing.dtype.hasobject
        return form if is_data else f"{form}, {_digest(thing.tobytes())}"
    if issubclass(kind, Mapping):
        if all(isinstance(x, PLAIN) for pair in thing.items() for x in pair):
            return f"{name} of {len(thing)}: {_short(repr(dict(thing)))}"
    elif issubclass(kind, MANY) or name == "deque":
        items = sorted(thing, key=repr) if issubclass(kind, set | frozenset) else list(thing)
        if all(isinstance(x, PLAIN) for x in items):
            return f"{name} of {len(items)}: {_short(repr(items))}"
    elif kind.__module__ == "itertools" and name == "count":
        return repr(thing)
    return None


def _is_users(kind: type) -> bool:
    return not issubclass(kind, BuiltinFunctionType) and not is_library(namespace_of_class(kind))


def _names_read(code: CodeType) -> set[str]:
    """Return the globals and attributes that code reads; `co_names` has assigned ones too."""
    return {
        str(instruction.argval)
        for part in code_in(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in _READING
    }


_READING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "LOAD_METHOD")


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({_digest(text)})"


def _digest(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()[:8]
