"""Notes on exceptions that report the progress of the run when they were raised."""

from collections.abc import Generator
from contextlib import contextmanager

from .progress import Progress


@contextmanager
def noting(what: str, progress: Progress, running: int = 0, lost: int = 0) -> Generator[None]:
    """Add a note with the run's progress to an exception raised in this context.

    In nested contexts, only the innermost one adds a note.

    Args:
        what: The activity in this context.
        progress: The progress at its beginning.
        running: The number of steps being run, or 0 if the activity is not running steps.
        lost: The largest number of these steps by which the weights may be ahead of `progress`.
    """
    try:
        yield
    except Exception as error:
        if not any(WEIGHTS in note for note in getattr(error, "__notes__", ())):
            error.add_note(f"in {what}, {_where(progress, running, lost)}")
        raise


WEIGHTS = "; the weights are those "


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
