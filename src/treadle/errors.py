"""Every error that Treadle raises on purpose: one tree, so that `except TreadleError` catches it.

A message names the culprit by its path, shows what was expected and what was found, and says what
to do next.
"""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from difflib import get_close_matches
from operator import index
from typing import Any

from .progress import Progress


class TreadleError(Exception):
    """The root of all errors that Treadle raises on purpose."""


class TreadleWarning(UserWarning):
    """What a run warns of where no progress is shown."""


class ConfigurationError(TreadleError):
    """A setting, an option or an argument that cannot be meant."""


class BackendError(TreadleError):
    """The Keras backend is missing, unknown, or another one than was asked for."""


class DataError(TreadleError):
    """A data set that is missing, empty or of the wrong form."""


class StateError(TreadleError):
    """A variable that no attribute reaches, or a value that does not fit its variable."""


class StepError(TreadleError):
    """A step that returned or did what a step must not."""


class GradientError(StepError):
    """No variables to differentiate, a loss that is no scalar, or a loss that misses a variable."""


class OwnershipError(StepError):
    """A phase changed a variable that it does not own."""


class NonFiniteError(TreadleError):
    """A loss became NaN or infinite."""


class RolledBack(NonFiniteError):
    """A call of the loop goes back to a checkpoint, and on from there; users never see it.

    Args:
        why: What was not finite.
        passed: Where the run stood before the batch that is to be passed over; None where the step
            that did it is still to be found.
    """

    def __init__(self, why: str, passed: Progress | None = None) -> None:
        super().__init__(why)
        self.passed = passed


class DirectoryError(TreadleError):
    """A run directory that holds another run, or cannot be used."""


class CheckpointError(TreadleError):
    """A checkpoint that cannot be written, or that is damaged."""


class Terminated(SystemExit):
    """SIGTERM asked the run to end: all is saved, and the process leaves with exit code 143."""

    CODE = 143  # 128 and the signal's number, as a shell tells it

    def __init__(self) -> None:
        super().__init__(self.CODE)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the nearest known name, or the names themselves.

    Example:
        >>> did_you_mean("unit", ["units", "learning_rate"])
        " Did you mean 'units'? Known: units, learning_rate."
    """
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f" Did you mean '{close[0]}'?" if close else ""
    return f"{guess} Known: {', '.join(known) or 'none'}."


def whole_number(name: str, value: Any, error: type[TreadleError], least: int = 1) -> int:
    """Return a whole number from 1, or from another least one.

    Args:
        name: What it is called, for the message.
        value: What was given.
        error: The kind of error to raise.
        least: The smallest that is meant.

    Raises:
        TreadleError: It is something else.

    Example:
        >>> whole_number("epochs", 2, ConfigurationError)
        2
    """
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        meant = ""
        if isinstance(value, (float, str)) and str(value).removesuffix(".0").isdecimal():
            meant = f": write {name}={str(value).removesuffix('.0')}"
        raise error(f"{name} must be a whole number, not {value!r}{meant}")
    if number < least:
        raise error(f"{name} must be at least {least}, not {number}")
    return number


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
