"""Plain Python values of a task, its data and its hooks, which checkpoints do not save.

Two processes at the same step should hold the same values. If their batches or results differ, a
difference in these values is the probable cause.
"""

import dis
import hashlib
import random
from collections.abc import Iterable, Mapping
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any, Final, cast

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
    [
        "time",
        "time_ns",
        "perf_counter",
        "monotonic",
        "now",
        "utcnow",
        "today",
        "urandom",
        "uuid1",
        "uuid4",
        "token_bytes",
        "getpid",
        "default_rng",
        "RandomState",
        "Random",
        "SystemRandom",
    ]
)
"""Functions that return the time, process-specific values, or unseeded random generators."""


class Attributes:
    """Plain Python values by path.

    Attributes:
        found: A short text of each value; equal for equal values in another process.
        calls: The functions of `OF_THE_MOMENT` that a function calls, by that function's name.

    Example:
        >>> attributes = Attributes()
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
        if isinstance(thing, PLAIN) or id(thing) in self._seen:
            return
        self._seen[id(thing)] = thing
        if isinstance(thing, Mapping):
            pairs = cast("Mapping[Any, Any]", thing)
            if text is None:
                self._take_all(((f"{path}[{key!r}]", part) for key, part in pairs.items()), depth)
        elif isinstance(thing, MANY):
            items = cast("Iterable[Any]", thing)
            if text is None:
                self._take_all(((f"{path}[{i}]", part) for i, part in enumerate(items)), depth)
        elif isinstance(thing, partial):
            call = cast("partial[Any]", thing)
            self._take_all([(path, call.func), *((path, part) for part in call.args)], depth)
        elif isinstance(thing, Scheduled):
            self.take(thing.function, path, depth + 1)
        elif isinstance(thing, MethodType):
            self._take_all([(path, thing.__self__), (path, thing.__func__)], depth)
        elif isinstance(thing, FunctionType):
            self._take_function(thing, path, depth)
        elif isinstance(thing, GeneratorType):
            frame = cast("Any", thing).gi_frame
            if frame is not None and not is_library(frame.f_globals):
                local = f"{root_of(path)}: {frame.f_code.co_name}"
                self._take_all(((f"{local}.{k}", x) for k, x in frame.f_locals.items()), depth)
        elif text is None:
            self._take_object(thing, path, depth)

    def _take_all(self, pairs: Iterable[tuple[str, Any]], depth: int) -> None:
        for path, part in list(pairs):
            self.take(part, path, depth + 1)

    def _take_function(self, function: FunctionType, path: str, depth: int) -> None:
        """Record a function's closure, its defaults and the globals that it uses."""
        own = not is_library(function.__globals__)
        name = f"{root_of(path)}: {function.__qualname__.rpartition('<locals>.')[2]}"
        for variable, value in closure_of(function).items():
            self.take(value, f"{name}.{variable}" if own else path, depth + 1)
        if not own:
            return
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(default, PLAIN):
                self.take(default, f"{name}'s default", depth + 1)
        names = _names_read(function.__code__)
        moments = sorted(names & OF_THE_MOMENT)
        if moments:
            self.calls[name] = ", ".join(moments)
        for used in sorted(names & function.__globals__.keys()):
            value = function.__globals__[used]
            if not used.startswith("__") and not isinstance(value, ModuleType | type):
                self.take(value, f"{root_of(path)}: {used}", depth + 1)

    def _take_object(self, thing: Any, path: str, depth: int) -> None:
        """Record the attributes of a user-defined object; Keras' own objects have variables."""
        ours = type(thing).__module__.startswith("treadle.data")
        if not ours and not _is_users(type(thing)):
            return
        held = cast("dict[str, Any]", getattr(thing, "__dict__", {}))
        for name, part in held.items():
            if ours and not name.startswith("_"):
                self.take(part, path, depth + 1)
            elif not ours:
                self.take(part, f"{path}.{name}", depth + 1)
        if not ours:
            for base in type(thing).__mro__:
                if _is_users(base):
                    self._take_all(
                        (
                            (f"{path}.{name}", getattr(member, "__func__", member))
                            for name, member in vars(base).items()
                            if not (name.startswith("__") and isinstance(member, PLAIN))
                        ),
                        depth,
                    )


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
    if isinstance(thing, np.ndarray):
        array = cast("np.ndarray[Any, Any]", thing)
        form = f"{array.dtype} array of shape {array.shape}"
        if array.nbytes > WHOLE or array.dtype.hasobject:
            return form
        return f"{form}, {_digest(array.tobytes())}"
    kind = type(thing).__name__
    if isinstance(thing, Mapping):
        pairs = cast("Mapping[Any, Any]", thing)
        if all(isinstance(x, PLAIN) for pair in pairs.items() for x in pair):
            return f"{kind} of {len(pairs)}: {_short(repr(dict(pairs)))}"
        return None
    if isinstance(thing, MANY) or kind == "deque":
        items = list(cast("Iterable[Any]", thing))
        if all(isinstance(x, PLAIN) for x in items):
            ordered = sorted(items, key=repr) if isinstance(thing, set | frozenset) else items
            return f"{kind} of {len(items)}: {_short(repr(ordered))}"
        return None
    if type(thing).__module__ == "itertools" and kind == "count":
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
