"""What tells one run from another: what a task is made with, the data, and the user's own code.

Nothing here needs a framework: Keras' objects tell what they are by `get_config`.
"""

import ast
import hashlib
import inspect
import math
import platform
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from inspect import getattr_static
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from .options import backend_name, precision_name, run_seed, without_tensorflow
from .ownership import Project, namespace_of, namespace_of_class

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
    if issubclass(type(value), ModuleType):  # a lazy one must not be asked for anything
        return namespace_of(value)["__name__"]
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

    These are the methods of its class and of its bases, the functions that it was made with, and
    the functions, classes and numbers that these use by name, all as far as they lie in the task's
    own project (see `ownership`). Comments and blanks do not count. Code without a source, as in a
    shell, is left out.

    Returns:
        Hashes by qualified name: `{"Digits.train_step": "1b4f0e9851971998"}`.
    """
    functions = getattr(task, "_made_with", MadeWith({})).functions
    code = _Code(Project([type(task), *map(_function_of, functions)]))
    code.take_class(type(task))
    for function in functions:
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
    """The code of a project, followed from name to name."""

    def __init__(self, project: Project) -> None:
        self._project = project
        self.found: dict[str, set[str]] = {}  # two modules may have functions of one name
        self._seen: set[int] = set()

    def take_class(self, kind: type) -> None:
        """Take the methods and plain attributes of a class, and of its bases."""
        for base in kind.__mro__:
            if not self._project.owns(namespace_of_class(base)) or not self._first(base):
                continue
            for name, member in list(vars(base).items()):
                if issubclass(type(member), PLAIN) and not name.startswith("__"):
                    self._take_value(f"{base.__qualname__}.{name}", member)
                else:
                    self.take(member)

    def take(self, thing: Any) -> None:
        """Take a function, in whatever it is wrapped, and what it uses by name."""
        function = _function_of(thing)
        if function is None or not self._first(function):
            return
        if not self._project.owns(function.__globals__):
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
            if issubclass(type(value), ModuleType):
                parts = namespace_of(value)
                if self._project.owns(parts):
                    for part in names & set(parts):
                        self._take_used(f"{name}.{part}", parts[part])
            else:
                self._take_used(name, value)

    def _take_used(self, name: str, value: Any) -> None:
        kind = type(value)  # isinstance would ask a lazy object for its __class__
        if issubclass(kind, type):
            self.take_class(value)
        elif issubclass(kind, PLAIN):
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
    """Return the Python function in a method, a decorator's result, a property or a partial.

    Attributes are looked up statically: a lazy object imports what it stands for when it is asked.
    """
    for _ in range(10):
        kind = type(thing)
        if issubclass(kind, type | ModuleType):
            return None
        if issubclass(kind, partial):
            thing = thing.func
            continue
        if issubclass(kind, property):
            thing = thing.fget
            continue
        for name in ("__wrapped__", "__func__", "python_function"):  # the last: tf.function
            if getattr_static(thing, name, None) is not None:
                thing = getattr(thing, name)
                break
        else:
            return thing if issubclass(kind, FunctionType) else None
    return None


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names and the attributes that code uses, inner functions included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


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
