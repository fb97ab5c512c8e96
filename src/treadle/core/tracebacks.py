"""Shortened tracebacks, without Treadle's own frames."""

import os
from pathlib import Path
from types import TracebackType

from ..errors import TreadleError
from .backend_choice import BACKENDS

PACKAGE = str(Path(__file__).parents[1]) + os.sep
RECIPES = PACKAGE + "recipes" + os.sep  # these contain steps like those of users
WRAPPERS = PACKAGE + os.path.join("backends", "ranges.py")  # around functions of libraries
SETTING = "TREADLE_TRACEBACK"
# Modules whose frames may be between two frames of Treadle without any user code: tracing, threads.
MACHINERY = frozenset({"keras", "contextlib", "concurrent", "threading", *BACKENDS})


class shortened:
    """A context manager that removes Treadle's frames from the tracebacks of exceptions.

    Frames of user code and of libraries are kept, and so are notes. The environment variable
    `TREADLE_TRACEBACK=full` keeps everything. An exception that is not a `TreadleError` keeps all
    its frames if it was raised in Treadle's code; otherwise it keeps the last frame of Treadle
    before the library that raised it. Frames can only be removed while an exception leaves a
    function, so the context must enclose the body of each public method.

    Example:
        >>> with shortened():
        ...     pass
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Shorten the tracebacks of an exception, its causes and its contexts."""
        if not isinstance(error, Exception) or os.environ.get(SETTING) == "full":
            return
        seen: set[int] = set()
        waiting: list[BaseException | None] = [error]
        while waiting:
            one = waiting.pop()
            if one is not None and id(one) not in seen:
                seen.add(id(one))
                one.__traceback__ = _cut(one.__traceback__, isinstance(one, TreadleError))
                waiting += [one.__cause__, one.__context__]


def _cut(trace: TracebackType | None, meant: bool) -> TracebackType | None:
    """Return a traceback without Treadle's frames.

    Args:
        trace: The traceback.
        meant: Whether the exception is a `TreadleError`.
    """
    entries: list[TracebackType] = []
    while trace is not None:
        if trace.tb_next is None or trace.tb_frame.f_code.co_filename != WRAPPERS:
            entries.append(trace)
        trace = trace.tb_next
    if not entries:
        return None
    own = [_is_own(entry) for entry in entries]
    if own[-1] and not meant:
        return entries[0]
    kept: list[TracebackType] = []
    waiting: list[TracebackType] = []  # frames of tracing or threads after a frame of Treadle
    last_own: TracebackType | None = None
    for entry, is_own in zip(entries, own, strict=True):
        if is_own:
            waiting, last_own = [], entry
        elif last_own is not None and _is_machinery(entry):
            waiting.append(entry)
        else:
            kept += [*waiting, entry]
            waiting, last_own = [], None
    if waiting and last_own is not None:
        kept += [last_own, *waiting]
    for entry, following in zip(kept, [*kept[1:], None], strict=False):
        entry.tb_next = following
    return kept[0] if kept else None


def _is_own(entry: TracebackType) -> bool:
    file = entry.tb_frame.f_code.co_filename
    return file.startswith(PACKAGE) and not file.startswith(RECIPES)


def _is_machinery(entry: TracebackType) -> bool:
    module = str(entry.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0] in MACHINERY
