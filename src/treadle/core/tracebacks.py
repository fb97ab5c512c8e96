"""Exceptions that leave Treadle: tracebacks without its own frames, and notes on the progress."""

import os
import re
from pathlib import Path
from types import TracebackType

from ..errors import TreadleError
from .process_settings import BACKENDS
from .progress import Progress

PACKAGE = str(Path(__file__).parents[1]) + os.sep
COMMANDS = PACKAGE + "cli" + os.sep
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


WEIGHTS = "; the weights are those "


class noting:
    """A context manager that adds a note with the run's progress to an exception.

    In nested contexts, only the innermost one adds a note. Several of them are entered in every
    step, so this is a class: a generator with `contextmanager` takes five times as long.

    Args:
        what: The activity in this context.
        progress: The progress at its beginning.
        running: The number of steps being run, or 0 if the activity is not running steps.
    """

    __slots__ = ("_progress", "_running", "_what")

    def __init__(self, what: str, progress: Progress, running: int = 0) -> None:
        self._what, self._progress, self._running = what, progress, running

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the note."""
        if isinstance(error, Exception):
            add_note(error, self._what, self._progress, self._running)


def add_note(
    error: Exception, what: str, progress: Progress, running: int = 0, lost: int = 0
) -> None:
    """Add a note with the run's progress to an exception, unless it has one; see `noting`.

    `lost` is the largest number of running steps by which the weights may be ahead of `progress`.
    """
    if not any(WEIGHTS in note for note in getattr(error, "__notes__", ())):
        put_note(error, f"in {what}, {_where(progress, running, lost)}")
        from .locked_arrays import explanation  # late: it imports NumPy

        if note := explanation(error):
            put_note(error, note)


def put_note(error: Exception, note: str) -> None:
    """Add a note to an exception, before those below a line of dashes.

    JAX adds such a note, of four lines on its own frames, to each exception that passes a
    transformation.
    """
    error.add_note(note)
    error.__notes__.sort(key=lambda text: text.startswith("-----"))  # stable


def _where(progress: Progress, running: int, lost: int) -> str:
    if running:
        if running == 1:
            weights = "before or after it" if lost else "before it"
        else:
            later = f" or of any step to {progress.step + lost}" if lost else ""
            weights = f"before step {progress.step + 1}{later}"
        return f"{progress.following(running)}{WEIGHTS}{weights}"
    if not progress.step:
        return f"before the first step{WEIGHTS}of the start"
    return f"after {progress}{WEIGHTS}of that step"


def in_one_line(error: Exception) -> str:
    """Format an exception as one line, without the color codes that Keras' layers add."""
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return f"{type(error).__name__}: {text[:200]}"
