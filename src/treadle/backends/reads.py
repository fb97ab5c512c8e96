"""Reads of variables in steps: what a step reads is a value, which later assignments do not change.

JAX arrays never change. A variable's own tensor does on TensorFlow and PyTorch, so that a step that
reads it there and assigns the variable afterwards would see the new value. In steps, the user's
reads of variables that the step assigns are therefore copies. Keras' own code and Treadle's, which
use what they read at once or change it in place, get the tensor itself.
"""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from ..core.internals import Internal

_thread = threading.local()
_PACKAGES = ("keras", "treadle")


@contextmanager
def copied(
    value: Internal, written: frozenset[int], copy: Callable[[Any, Any], Any]
) -> Generator[None]:
    """Copy what the user's code reads of some variables in this context, in this thread.

    Args:
        value: The property `value` of the backend's variables.
        written: The ids of the variables.
        copy: A function of a variable and its tensor, which returns a copy.
    """
    before = getattr(_thread, "written", frozenset())
    original: property = value.resolve()
    read: Any = original.fget

    def get(self: Any) -> Any:
        found = read(self)
        if id(self) not in getattr(_thread, "written", ()) or found is not self._value:
            return found
        caller = sys._getframe(1)  # type: ignore[reportPrivateUsage]
        return copy(self, found) if _is_kept(caller) else found

    _thread.written = written
    try:
        with value.replaced(property(get)):
            yield
    finally:
        _thread.written = before


def _is_kept(frame: Any) -> bool:
    """Return whether the reader of a tensor may keep it: a frame of the user, or of a view."""
    if not _is_own(frame):
        return True
    name = frame.f_code.co_name
    if name == "convert_to_tensor":  # of a backend, which each function of `keras.ops` calls
        frame = frame.f_back
        name = frame.f_code.co_name
    if name not in _VIEWS:
        return False
    while frame.f_back is not None and _package(frame) == "keras":
        frame = frame.f_back
    return not _is_own(frame)


_VIEWS = frozenset(
    {
        *("convert_to_tensor", "stop_gradient", "cast", "__getitem__", "unstack", "split", "slice"),
        *("reshape", "ravel", "squeeze", "expand_dims", "transpose", "swapaxes", "moveaxis"),
        *("array", "broadcast_to", "diagonal", "real", "view"),
    }
)
"""Functions of `keras.ops` and methods of variables whose results may share memory."""


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _is_own(frame: Any) -> bool:
    """Return whether code is Keras' or Treadle's; recipes are programs of the user."""
    name = str(frame.f_globals.get("__name__", ""))
    return name.partition(".")[0] in _PACKAGES and not name.startswith("treadle.recipes.")
