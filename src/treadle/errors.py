"""Every error that Treadle raises on purpose: one tree, so that `except TreadleError` catches it.

A message names the culprit by its path, shows what was expected and what was found, and says what
to do next.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from operator import index
from typing import Any


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
