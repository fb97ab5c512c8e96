"""What tells one run from another: what a task is made with, the data, and the user's own code.

Nothing here needs a framework: Keras' objects tell what they are by `get_config`.
"""

import ast
import hashlib
import inspect
import math
import platform
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .options import backend_name, precision_name, run_seed, without_tensorflow

PLAIN = (bool, int, float, str, type(None))
SOURCE_FACTS = (
    "length",
    "batch_examples",
    "examples",
    "fingerprint",
    "shuffle",
    "drop_last",
    "seed",
)
PACKAGES = ("treadle", "keras", "tensorflow", "jax", "torch", "numpy")
NAMED = 5  # pieces of code in a message
LONGEST = 100  # of a longer list, as of an array, only the size is told

# Code that is nobody's own: Python's, installed packages', and Treadle's.
_paths = sysconfig.get_paths()
_FOREIGN = tuple(
    f"{Path(folder)}/"
    for folder in (
        *(_paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
        Path(__file__).parent,
    )
)


@dataclass(frozen=True)
class MadeWith:
    """What a task was made with.

    Attributes:
        settings: The arguments of its `__init__` by name, in JSON's types.
        functions: Those of them that are functions.
    """

    settings: Mapping[str, Any]
    functions: tuple[Callable[..., Any], ...] = ()


def made_with(init: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> MadeWith:
    """Return what `init` is called with, defaults included.

    Nothing where the arguments do not fit: `init` itself is about to say so.
    """
    if init is object.__init__:
        return MadeWith({})
    try:
        bound = inspect.signature(init).bind(None, *args, **kwargs)
    except (TypeError, ValueError):
        return MadeWith({})
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            found |= value
        elif kind is not inspect.Parameter.VAR_POSITIONAL or value:
            found[name] = value
    functions = tuple(value for value in found.values() if _function_of(value) is not None)
    return MadeWith({name: described(value) for name, value in found.items()}, functions)


def identity(task: Any) -> dict[str, Any]:
    """Return what makes a run of a task another run than one of another task.

    Its class, its settings (what it was made with, and its attributes that are numbers or texts),
    the backend, the seed and the precision.

    Example:
        >>> import keras, treadle
        >>> class Line(treadle.Task):
        ...     def __init__(self, slope, rate=0.1):
        ...         self.optimizer = keras.optimizers.SGD(rate)
        >>> identity(Line(2))["settings"]
        {'slope': 2, 'rate': 0.1}
    """
    # The attributes of a task that is also a layer are Keras' own bookkeeping.
    attributes = {} if hasattr(task, "get_config") else vars(task)
    plain = {k: described(v) for k, v in attributes.items() if isinstance(v, PLAIN[:4])}
    made: MadeWith = getattr(task, "_made_with", MadeWith({}))
    return {
        "task": type(task).__qualname__,
        "settings": {**plain, **made.settings},
        "backend": backend_name(),
        "seed": run_seed(),
        "precision": precision_name(),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of what computes.

    Example:
        >>> sorted(versions())[:2]
        ['jax', 'keras']
    """
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def source_facts(source: Any) -> dict[str, Any]:
    """Return what is known of a source without reading it.

    Example:
        >>> import numpy as np, treadle
        >>> source_facts(treadle.data.from_arrays(np.zeros(8), batch_size=4))["length"]
        2
    """
    found = {name: getattr(source, name, None) for name in SOURCE_FACTS}
    return {name: value for name, value in found.items() if value is not None}


def described(value: Any, nested: bool = True) -> Any:
    """Return a value in JSON's types, equal for equal values in another process.

    Of an object of Keras its class and its configuration, without the name, which is another one
    each time; of a model or a layer only what is plain in it; of any other object its class.

    Args:
        value: Anything.
        nested: Look into configurations within a configuration.

    Example:
        >>> import keras
        >>> described((1, keras.optimizers.SGD(0.5)))[1]["learning_rate"]
        0.5
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN equals nothing
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, (Mapping, list, tuple)) and len(value) > LONGEST:
        return f"{type(value).__name__} of {len(value):,}"
    if isinstance(value, Mapping):
        return {str(key): described(part, nested) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [described(part, nested) for part in value]
    if isinstance(value, (type, FunctionType)):
        return value.__qualname__
    if isinstance(value, Path):
        return str(value)
    shape = getattr(value, "shape", None)
    if shape == () and hasattr(value, "item"):
        return described(value.item(), nested)
    if not hasattr(value, "get_config"):
        return type(value).__name__ if shape is None else f"{type(value).__name__} {tuple(shape)}"
    found: dict[str, Any] = {"class": type(value).__name__}
    parts = list(getattr(value, "layers", ()))
    if parts:  # of a model: its own configuration would be pages
        layers = {str(i): described(part, nested=False) for i, part in enumerate(parts)}
        return {**found, "layers": layers}
    try:
        with without_tensorflow():
            configuration = dict(value.get_config())
    except Exception:  # whatever a class of the user's raises: this only describes
        return found
    inner = nested and not hasattr(value, "trainable_variables")
    for name, part in configuration.items():
        if name != "name" and part is not None and (inner or isinstance(part, PLAIN)):
            found[name] = _without_names(described(part))
    return found


def code_of(task: Any) -> dict[str, str]:
    """Return a short hash of every piece of the user's own code that makes a task what it is.

    These are the methods of its class and of the bases that are neither Treadle's nor Keras', the
    functions that it was made with, and the functions, classes and numbers that these use by name.
    Comments and blanks do not count. What has no source, as in a shell, is left out.

    Returns:
        Hashes by qualified name: `{"Digits.train_step": "1b4f0e9851971998"}`.
    """
    code = _Code()
    code.take_class(type(task))
    for function in getattr(task, "_made_with", MadeWith({})).functions:
        code.take(function)
    return {name: "+".join(sorted(hashes)) for name, hashes in sorted(code.found.items())}


def changed_code(before: Mapping[str, str], now: Mapping[str, str], since: str = "this run") -> str:
    """Return a sentence on what changed between two results of `code_of`; empty if nothing did.

    Args:
        before: The earlier one.
        now: The later one.
        since: What the earlier one is of.

    Example:
        >>> changed_code({"M.train_step": "1b4f"}, {"M.train_step": "77c2"})[:51]
        'the code of M.train_step changed since this run, so'
    """
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if not before or not now or not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return (
        f"the code of {', '.join(names[:NAMED])}{more} changed since {since}, so its results are "
        "those of other code: fresh=True (--fresh) trains anew"
    )


class _Code:
    """The user's own code, followed from name to name."""

    def __init__(self) -> None:
        self.found: dict[str, set[str]] = {}  # two modules may have functions of one name
        self._seen: set[int] = set()

    def take_class(self, kind: type) -> None:
        """Take the methods and plain attributes of a class, and of its bases."""
        for base in kind.__mro__:
            file = getattr(sys.modules.get(base.__module__), "__file__", None)
            if base.__module__ == "builtins" or foreign(file) or not self._first(base):
                continue
            for name, member in list(vars(base).items()):
                if isinstance(member, PLAIN) and not name.startswith("__"):
                    self._take_value(f"{base.__qualname__}.{name}", member)
                else:
                    self.take(member)

    def take(self, thing: Any) -> None:
        """Take a function, in whatever it is wrapped, and what it uses by name."""
        function = _function_of(thing)
        if function is None or not self._first(function):
            return
        if foreign(function.__code__.co_filename):
            return
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError):
            return
        self._found(function.__qualname__, _without_comments(source))
        names = set(_names(function.__code__))
        used = {name: function.__globals__[name] for name in names if name in function.__globals__}
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in cells:
            try:
                used[name] = cell.cell_contents
            except ValueError:  # not yet filled
                continue
        for name, value in used.items():
            if isinstance(value, ModuleType):
                if not foreign(getattr(value, "__file__", None)):
                    for part in names & set(vars(value)):
                        self._take_used(f"{name}.{part}", vars(value)[part])
            else:
                self._take_used(name, value)

    def _take_used(self, name: str, value: Any) -> None:
        if isinstance(value, type):
            self.take_class(value)
        elif isinstance(value, PLAIN):
            self._take_value(name, value)
        else:
            self.take(value)

    def _take_value(self, name: str, value: Any) -> None:
        if not name.startswith("__"):  # __file__ and the like
            self._found(name, repr(value))

    def _found(self, name: str, text: str) -> None:
        self.found.setdefault(name, set()).add(hashlib.sha256(text.encode()).hexdigest()[:16])

    def _first(self, thing: Any) -> bool:
        new = id(thing) not in self._seen
        self._seen.add(id(thing))
        return new


def _function_of(thing: Any) -> FunctionType | None:
    """Return the Python function in a method, a decorator's result, a property or a partial."""
    for _ in range(10):
        if isinstance(thing, FunctionType) and not hasattr(thing, "__wrapped__"):
            return thing
        if isinstance(thing, partial):
            thing = thing.func
        elif isinstance(thing, property):
            thing = thing.fget
        else:
            for name in ("__wrapped__", "__func__", "python_function"):  # the last: tf.function
                if not isinstance(thing, type) and hasattr(thing, name):
                    thing = getattr(thing, name)
                    break
            else:
                return None
    return None


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and the attributes that code uses, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def foreign(file: str | None) -> bool:
    """Say whether code of this file is nobody's own: Python's, a package's, or Treadle's."""
    return file is not None and str(Path(file)).startswith(_FOREIGN)


def _without_comments(source: str) -> str:
    try:
        return ast.unparse(ast.parse(textwrap.dedent(source)))
    except SyntaxError:  # a lambda is cut out of its line
        return source


def _without_names(value: Any) -> Any:
    """Leave the automatic names out of a configuration."""
    if isinstance(value, list):
        return [_without_names(part) for part in value]
    if not isinstance(value, dict):
        return value
    return {key: _without_names(part) for key, part in value.items() if key != "name"}
