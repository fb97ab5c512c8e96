"""Exception classes of Treadle, all derived from `TreadleError`, and helpers for messages.

Each message names the cause by its path, the expected and the found value, and what to do.

Example:
    >>> import treadle
    >>> try:
    ...     treadle.data.from_arrays([[1.0], [2.0]], batch_size=4, drop_last=True)
    ... except treadle.errors.DataError as error:
    ...     print(isinstance(error, treadle.errors.TreadleError))
    True
"""

import importlib.util
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from operator import index
from typing import Any


class TreadleError(Exception):
    """Base class of all errors that Treadle raises on purpose."""


class TreadleWarning(UserWarning):
    """Warning category of a run's warnings if no progress display shows them."""


class ConfigurationError(TreadleError):
    """A setting, an option or an argument is invalid."""


class BackendError(TreadleError):
    """The Keras backend is missing, unknown, or differs from the requested one."""


class DataError(TreadleError):
    """A data set is missing, empty or has the wrong structure, shape or dtype."""


class StateError(TreadleError):
    """A variable is not reachable from the task's attributes, or a value does not fit it."""


class StepError(TreadleError):
    """A step returned something invalid, or did something that a step must not do."""


class GradientError(StepError):
    """There are no variables, the loss is not a scalar, or it does not depend on a variable."""


class OwnershipError(StepError):
    """A phase changed a variable that it does not own."""


class NonFiniteError(TreadleError):
    """A loss became NaN or infinite."""


class DirectoryError(TreadleError):
    """A run directory contains a different run, or cannot be used."""


class ProcessError(TreadleError):
    """Another process that trains the same task has failed, or does something else."""


class CheckpointError(TreadleError):
    """A checkpoint cannot be written, or is damaged."""


class ExportError(TreadleError):
    """A task cannot be written in a format, or the written file computes something else."""


class Terminated(SystemExit):
    """The run received SIGTERM: a checkpoint was saved, and the process exits with code 143."""

    CODE = 143  # 128 plus the signal's number, as shells report it

    def __init__(self) -> None:
        super().__init__(self.CODE)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the most similar known name, and the list of known names.

    Example:
        >>> did_you_mean("unit", ["units", "learning_rate"])
        " Did you mean 'units'? Known: units, learning_rate."
    """
    known = list(known)
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    guess = f" Did you mean '{close[0]}'?" if close else ""
    return f"{guess} Known: {', '.join(known) or 'none'}."


def listed(names: Sequence[Any], most: int) -> str:
    """Return the first names for a message, and how many more there are.

    Example:
        >>> listed(["a", "b", "c", "d"], most=2)
        'a, b and 2 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def require_package(package: str, what: str) -> None:
    """Check that a package is installed.

    Args:
        package: The name that it is imported and installed by.
        what: The beginning of the message, such as `history.plot() needs Matplotlib, which`.

    Raises:
        ConfigurationError: The package is not installed.
    """
    if importlib.util.find_spec(package) is None:
        raise ConfigurationError(f"{what} is not installed: pip install {package}")


def whole_number(name: str, value: Any, error: type[TreadleError], least: int = 1) -> int:
    """Return `value` as an int, after checking that it is a whole number of at least `least`.

    Args:
        name: The argument's name, for the message.
        value: The argument's value.
        error: The exception class to raise.
        least: The smallest valid value.

    Raises:
        TreadleError: The value is not a whole number, or is less than `least`.

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


def whole_number_or_none(
    name: str, value: Any, error: type[TreadleError], least: int = 1
) -> int | None:
    """Return `value` as an int, as `whole_number` does, or None if it is None."""
    return None if value is None else whole_number(name, value, error, least)
