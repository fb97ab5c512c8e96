"""Checks of the types and the bounds of parsed JSON, in bounded memory.

Files of a run directory may be damaged or malicious, so every value in them is checked before it is
used. A check is called with a value and its name, and raises a `ValueError` that says what was
expected and what was found.
"""

import json
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any, Final, cast

_FLOAT_END: Final = 1 << 1023
Check = Callable[[Any, str], None]

MOST = (1 << 63) - 1  # of steps, examples and bytes
DEEPEST = 50  # levels of nested lists and objects; the library itself writes fewer than 10
LONGEST = 1 << 20  # characters of a text
MOST_DIGITS: Final = 300  # of a whole number: each can be converted to a float


def parse(data: bytes, most_values: int) -> Any:
    """Parse JSON in bounded memory.

    Args:
        data: The text, in UTF-8. Its reader limits its size.
        most_values: The largest number of values, each of which takes up to 100 bytes of memory.

    Raises:
        ValueError: If it is not JSON, holds more values or a number that is too large, or is nested
            too deeply. NaN and Infinity are numbers, as Python writes them.

    Example:
        >>> parse(b'{"step": 3}', most_values=10)
        {'step': 3}
    """
    values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if values > most_values:
        raise ValueError(f"it holds about {values:,} values; at most {most_values:,} are allowed")
    deep = f"it is nested more than {DEEPEST} levels deep"
    try:
        found = json.loads(data, parse_int=_whole_number, parse_float=_finite_number)
    except RecursionError:
        raise ValueError(deep) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not a text in UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"it is not JSON: {error.msg} in line {error.lineno}, column {error.colno}"
        ) from error
    if _is_deeper(found, DEEPEST):
        raise ValueError(deep)
    return found


def _whole_number(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(
            f"it holds a whole number of {len(digits):,} digits; at most {MOST_DIGITS} are allowed"
        )
    return int(digits)


def _finite_number(digits: str) -> float:
    if not isfinite(found := float(digits)):
        raise ValueError(f"it holds {shown(digits)}, which is too large for a number")
    return found


def _is_deeper(value: Any, levels: int) -> bool:
    if isinstance(value, dict):
        value = list(cast(dict[str, Any], value).values())
    if not isinstance(value, list):
        return False
    parts = cast(list[Any], value)
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in parts)


def text(value: Any, name: str) -> None:
    """Check that a value is a text."""
    if not isinstance(value, str) or len(value) > LONGEST:
        raise _wrong(name, value, "a text")


def flag(value: Any, name: str) -> None:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise _wrong(name, value, "true or false")


def whole(least: int = 0, most: int = MOST) -> Check:
    """Return a check for a whole number from `least` to `most`."""

    def check(value: Any, name: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise _wrong(name, value, f"a whole number from {least:,} to {most:,}")

    return check


def number(value: Any, name: str) -> None:
    """Check that a value is a number that fits into a float, which may be NaN or infinite."""
    if not isinstance(value, (bool, int, float)) or (
        type(value) is int and abs(value) >= _FLOAT_END
    ):
        raise _wrong(name, value, "a number")


def amount(value: Any, name: str) -> None:
    """Check that a value is a finite number of at least 0."""
    if type(value) not in (int, float) or not 0 <= value <= MOST:  # NaN is in no range
        raise _wrong(name, value, "a finite number of at least 0")


def anything(value: Any, name: str) -> None:
    """Accept any value, for values that are only compared or printed."""


def optional(check: Check) -> Check:
    """Return a check that also accepts null."""

    def check_unless_none(value: Any, name: str) -> None:
        if value is not None:
            check(value, name)

    return check_unless_none


def listed(check: Check) -> Check:
    """Return a check for a list whose items all pass a check."""

    def check_list(value: Any, name: str) -> None:
        if not isinstance(value, list):
            raise _wrong(name, value, "a list")
        for i, part in enumerate(cast(list[Any], value)):
            check(part, f"{name}[{i}]")

    return check_list


def mapping(check: Check) -> Check:
    """Return a check for an object whose values all pass a check."""

    def check_mapping(value: Any, name: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(name, value, "an object")
        for key, part in cast(dict[str, Any], value).items():
            found = key if key.isidentifier() else shown(key)
            check(part, f"{name}.{found}" if name else found)

    return check_mapping


def record(checks: Mapping[str, Check], required: tuple[str, ...] = ()) -> Check:
    """Return a check for an object with known keys. Other keys are accepted.

    Args:
        checks: A check for each known key.
        required: The keys that must exist.
    """

    def check_record(value: Any, name: str) -> None:
        mapping(anything)(value, name)
        found = cast(dict[str, Any], value)
        for key in required:
            if key not in found:
                raise ValueError(f"{name + '.' if name else ''}{key} is missing")
        for key in checks.keys() & found.keys():
            checks[key](found[key], f"{name}.{key}" if name else key)

    return check_record


def complete(checks: Mapping[str, Check]) -> Check:
    """Return a check for an object that has all of these keys. Other keys are accepted."""
    return record(checks, required=tuple(checks))


def shown(value: Any) -> str:
    """Format a value of a file for a message: shortened, and without control characters."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > 1024:  # Python may refuse to format it
        return f"a whole number of {value.bit_length():,} bits"
    found = ascii(value)
    return found if len(found) <= 80 else f"{found[:77]}…"


def _wrong(name: str, value: Any, expected: str) -> ValueError:
    return ValueError(f"{name or 'it'} is {shown(value)}; expected {expected}")
