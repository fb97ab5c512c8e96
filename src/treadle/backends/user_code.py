"""Finding the line of user code that runs or fails, and the NumPy function that it calls."""

import ast
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, islice
from linecache import getline
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, NamedTuple

import keras
import numpy as np

from ..core.process_settings import BACKENDS

INSTALLED: Final = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
INSTEAD: Final = {
    **dict.fromkeys(("array", "asarray", "asanyarray", "ascontiguousarray"), "convert_to_tensor"),
    **dict.fromkeys(("float16", "float32", "float64", "int32", "int64", "bool"), "cast"),
}


class SourceLine(NamedTuple):
    """A line of a function that runs, or that an exception passed.

    Attributes:
        frame: The function's frame.
        number: The number of the line.
        instruction: The position of the running instruction.
    """

    frame: FrameType
    number: int
    instruction: int

    def __str__(self) -> str:
        """Return file, number and text."""
        file = self.frame.f_code.co_filename
        return f"{Path(file).name}:{self.number}: {getline(file, self.number).strip()}"


def running_line() -> SourceLine | None:
    """Return the innermost line of user code that runs now, or None."""

    def lines() -> Iterator[SourceLine]:
        frame = inspect.currentframe()
        while frame is not None:
            yield SourceLine(frame, frame.f_lineno, frame.f_lasti)
            frame = frame.f_back

    return _of_user(lines)


def failed_line(error: BaseException) -> SourceLine | None:
    """Return the innermost line of user code that an exception passed, or None."""
    found: list[SourceLine] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        found.append(SourceLine(trace.tb_frame, trace.tb_lineno, trace.tb_lasti))
        trace = trace.tb_next
    return _of_user(lambda: reversed(found))


def numpy_function(line: SourceLine | None) -> tuple[str, str]:
    """Return the NumPy function that a line calls, and what replaces it; empty if it calls none.

    Example:
        >>> numpy_function(running_line())
        ('', '')
    """
    called = line and _called(line)
    name = str(getattr(called, "__name__", ""))
    module = str(getattr(called, "__module__", ""))
    if not name or not (isinstance(called, np.ufunc) or module.partition(".")[0] == "numpy"):
        return "", ""
    instead = INSTEAD.get(name, name)
    known = hasattr(keras.ops, instead)
    part = f"{module}." if module == "numpy.linalg" else "numpy."
    return f"{part}{name}", f"keras.ops.{instead}" if known else "functions of keras.ops"


def _called(line: SourceLine) -> Any:
    """Return the function in the source of the running call, or None."""
    code, file = line.frame.f_code, line.frame.f_code.co_filename
    first, last, start, end = next(islice(code.co_positions(), line.instruction // 2, None))
    if first is None or last is None or start is None or end is None:
        return None
    texts = [getline(file, number).encode() for number in range(first, last + 1)]
    texts[-1] = texts[-1][:end]  # before the start, which may be in the same line
    texts[0] = texts[0][start:]
    try:
        call = ast.parse(b"(" + b"".join(texts) + b")", mode="eval").body
    except (SyntaxError, ValueError):
        return None
    return _value(call.func, line.frame) if isinstance(call, ast.Call) else None


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """Return the value of a name, or of attributes of modules, without running code."""
    if isinstance(expression, ast.Name):
        return frame.f_locals.get(expression.id, frame.f_globals.get(expression.id))
    if isinstance(expression, ast.Attribute):
        holder = _value(expression.value, frame)
        return getattr(holder, expression.attr, None) if inspect.ismodule(holder) else None
    return None


def _of_user(lines: Callable[[], Iterator[SourceLine]]) -> SourceLine | None:
    """Return the first line in no library; if all are installed, the first in no known one."""
    others = (line for line in lines() if not _is_known(line.frame.f_code.co_filename))
    first = next(others, None)
    rest = chain([first], others) if first else ()
    own = (line for line in rest if not _is_installed(line.frame.f_code.co_filename))
    return next(own, first)


@cache
def _is_known(file: str) -> bool:
    """Return whether a file is of Treadle, Keras, NumPy, a framework, or the standard library."""
    modules = [keras, np, inspect, *(sys.modules[name] for name in BACKENDS if name in sys.modules)]
    folders = [str(Path(module.__file__).parent) for module in modules if module.__file__]
    inside = file.startswith((*folders, str(Path(__file__).parents[1])))
    return (inside and not _is_recipe(file)) or file.startswith("<") or "__autograph_" in file


@cache
def _is_installed(file: str) -> bool:
    return file.startswith(INSTALLED) and not _is_recipe(file)


def _is_recipe(file: str) -> bool:
    return "/recipes/" in file
