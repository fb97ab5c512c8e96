"""Notes that say where a run stood when an exception was raised."""

from collections.abc import Generator
from contextlib import contextmanager

from .progress import Progress


@contextmanager
def noting(what: str, progress: Progress, running: int = 0, lost: int = 0) -> Generator[None]:
    """Add to an exception that passes through where the run stood; the innermost note stays.

    Args:
        what: What was being done.
        progress: What was done before.
        running: How many steps were being run, where it was steps.
        lost: By how many of them the weights may be further than `progress`.
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
