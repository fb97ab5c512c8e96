"""Notes on exceptions that report the progress of the run when they were raised."""

import re

from .progress import Progress

WEIGHTS = "; the weights are those "


class noting:
    """A context manager that adds a note with the run's progress to an exception.

    In nested contexts, only the innermost one adds a note. Several of them are entered in every
    step, so this is a class: a generator with `contextmanager` takes five times as long.

    Args:
        what: The activity in this context.
        progress: The progress at its beginning.
        running: The number of steps being run, or 0 if the activity is not running steps.
        lost: The largest number of these steps by which the weights may be ahead of `progress`.
    """

    __slots__ = ("_lost", "_progress", "_running", "_what")

    def __init__(self, what: str, progress: Progress, running: int = 0, lost: int = 0) -> None:
        self._what, self._progress, self._running, self._lost = what, progress, running, lost

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the note."""
        if isinstance(error, Exception):
            add_note(error, self._what, self._progress, self._running, self._lost)


def add_note(
    error: Exception, what: str, progress: Progress, running: int = 0, lost: int = 0
) -> None:
    """Add a note with the run's progress to an exception, unless it has one; see `noting`."""
    if not any(WEIGHTS in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in {what}, {_where(progress, running, lost)}")


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
