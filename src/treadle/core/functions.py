"""Inspecting the code of functions: what they wrap, what they close over, which names they use."""

from collections.abc import Iterator
from functools import partial
from inspect import getattr_static
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

WRAPPERS: Final = ("__wrapped__", "__func__", "python_function")
"""Attributes that hold the wrapped function; the last one is that of `tf.function`."""

DEEPEST: Final = 10
"""At most this many wrappers are unwrapped, since a wrapper may refer to itself."""


def function_of(thing: Any) -> FunctionType | None:
    """Return the Python function inside a method, a decorated function, a property or a partial.

    Attributes are looked up statically, because accessing one would import a lazy object.

    Example:
        >>> def double(x): return 2 * x
        >>> function_of(partial(double, 3)).__name__
        'double'
    """
    for _ in range(DEEPEST):
        kind = type(thing)
        if issubclass(kind, type | ModuleType):
            return None
        if issubclass(kind, partial):
            thing = thing.func
            continue
        if issubclass(kind, property):
            thing = thing.fget
            continue
        for name in WRAPPERS:
            if getattr_static(thing, name, None) is not None:
                thing = getattr(thing, name)
                break
        else:
            return thing if issubclass(kind, FunctionType) else None
    return None


def closure_of(function: FunctionType) -> dict[str, Any]:
    """Return the variables that a function closes over, by name, without unassigned ones.

    Example:
        >>> def outer(scale): return lambda x: scale * x
        >>> closure_of(outer(2))
        {'scale': 2}
    """
    found: dict[str, Any] = {}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    return found


def code_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of its inner functions.

    Example:
        >>> def outer(): return lambda x: x
        >>> [code.co_name for code in code_in(outer.__code__)]
        ['outer', '<lambda>']
    """
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_in(constant)
