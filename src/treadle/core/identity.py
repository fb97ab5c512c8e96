"""Identity of a run: constructor arguments of the task, and facts about the data.

This module needs no framework: Keras objects are described by their `get_config`.
"""

import inspect
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from .options import backend_name, precision_name, run_seed, without_tensorflow
from .process_settings import is_deterministic
from .user_code import PLAIN, attributes_of, function_of, namespace_of

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
LONGEST = 100  # longer lists are described by their length only


@dataclass(frozen=True)
class MadeWith:
    """The constructor arguments of a task.

    Attributes:
        settings: The arguments of its `__init__` by name, in JSON's types.
        functions: The functions that the arguments are or contain.
    """

    settings: Mapping[str, Any]
    functions: tuple[Callable[..., Any], ...] = ()


def made_with(init: Callable[..., Any], args: Iterable[Any], kwargs: Mapping[str, Any]) -> MadeWith:
    """Return the arguments with which `init` is called, including defaults.

    Empty if the arguments do not fit, because then the call of `init` raises the error.
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
    functions = tuple(_functions_in(list(found.values())))
    return MadeWith({name: described(value) for name, value in found.items()}, functions)


def _functions_in(value: Any) -> Iterator[Callable[..., Any]]:
    """Yield the functions in a value: itself, or the items of short containers."""
    if issubclass(type(value), (list, tuple, dict)):
        parts: Any = value.values() if isinstance(value, dict) else value
        for part in parts if len(value) <= LONGEST else ():
            yield from _functions_in(part)
    elif function_of(value) is not None:
        yield value


def identity(task: Any) -> dict[str, Any]:
    """Return the values that identify the runs of a task.

    These are its class, its settings (constructor arguments, and attributes that are numbers, flags
    or strings), the backend, the seed, the precision, whether algorithms are deterministic, and
    what a compiled model was compiled with.

    Example:
        >>> import keras, treadle
        >>> class Line(treadle.Task):
        ...     def __init__(self, slope, rate=0.1):
        ...         self.optimizer = keras.optimizers.SGD(rate)
        >>> identity(Line(2))["settings"]
        {'slope': 2, 'rate': 0.1}
    """
    # If the task is also a layer, its attributes include Keras' internal bookkeeping.
    attributes = {} if hasattr(task, "get_config") else attributes_of(task)
    plain = {k: described(v) for k, v in attributes.items() if isinstance(v, PLAIN[:4])}
    made: MadeWith = getattr(task, "_made_with", MadeWith({}))
    compiled = getattr(task, "_compiled_with", None)
    return {
        "task": type(task).__qualname__,
        "settings": {**plain, **made.settings},
        "backend": backend_name(),
        "seed": run_seed(),
        "precision": precision_name(),
        # Only where it is on: runs that were recorded without it continue.
        **({"deterministic": True} if is_deterministic() else {}),
        **({} if compiled is None else {"compiled": compiled}),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, Treadle, Keras, NumPy and the installed backends.

    Example:
        >>> sorted(versions())[:2]
        ['jax', 'keras']
    """
    found = {package: _version(package) for package in PACKAGES}
    if "keras" in sys.modules:  # its nightly builds are a package of another name
        found["keras"] = sys.modules["keras"].__version__
    installed = {package: number for package, number in found.items() if number is not None}
    return {"python": platform.python_version(), **installed}


@cache
def _version(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    Reading the metadata of all packages takes milliseconds, and each checkpoint contains them.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def source_facts(source: Any) -> dict[str, Any]:
    """Return the facts about a source that are known without reading it, such as its length.

    The length is none of them if the data itself may change it between epochs.

    Example:
        >>> import numpy as np, treadle
        >>> source_facts(treadle.data.from_arrays(np.zeros(8), batch_size=4))["length"]
        2
    """
    # The others depend on the number of processes. A user's source may list its files as `shards`.
    if isinstance(getattr(source, "shards", None), int):
        return {"sharded": True}
    facts = SOURCE_FACTS[1:] if getattr(source, "length_varies", False) else SOURCE_FACTS
    found = {name: getattr(source, name, None) for name in facts}
    return {name: value for name, value in found.items() if value is not None}


def in_json_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert values to what JSON returns after writing and reading them, to compare with a record.

    Example:
        >>> in_json_types({"shape": (2, 3), "path": Path("a")})
        {'shape': [2, 3], 'path': 'a'}
    """
    return json.loads(json.dumps(dict(values), default=str))


def described(value: Any, nested: bool = True) -> Any:
    """Describe a value in JSON's types, such that equal values are equal in another process.

    A Keras object is described by its class and its configuration without the name, which may
    differ in each process; a model or layer only by the plain values of its configuration; any
    other object by its class.

    Args:
        value: Any value.
        nested: Describe configurations inside a configuration too.

    Example:
        >>> import keras
        >>> described((1, keras.optimizers.SGD(0.5)))[1]["learning_rate"]
        0.5
    """
    if issubclass(type(value), ModuleType):  # accessing an attribute would import a lazy module
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
    if parts:  # of a model, whose own configuration would be very long
        layers = {str(i): described(part, nested=False) for i, part in enumerate(parts)}
        return {**found, "layers": layers}
    try:
        with without_tensorflow():
            configuration = dict(value.get_config())
    except Exception:  # a user's class may raise anything, and a description must not fail
        return found
    inner = nested and not hasattr(value, "trainable_variables")
    for name, part in configuration.items():
        if name != "name" and part is not None and (inner or isinstance(part, PLAIN)):
            found[name] = _without_names(described(part))
    return found


def _without_names(value: Any) -> Any:
    """Remove the automatic names from a configuration."""
    if isinstance(value, list):
        return [_without_names(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.get("class_name") == "__lambda__":  # Keras stores its file and line as well
        return "lambda"
    return {key: _without_names(part) for key, part in value.items() if key != "name"}
