"""Formatting of logged values and durations."""

from collections.abc import Mapping
from math import floor, isfinite, log10
from typing import Any

from .logs import Plain as Plain
from .logs import plain as plain


def short(value: Any, fixed: bool = False) -> str:
    """Format a value with about four significant digits.

    Args:
        value: Any value; if it is neither a number nor a string, its type and shape are returned.
        fixed: Keep trailing zeros, so that columns of numbers are aligned.

    Example:
        >>> short(0.512), short(0.512, fixed=True), short(12800), short(1.5e-7), short(1234.5)
        ('0.512', '0.5120', '12,800', '1.5e-07', '1,234')
    """
    number = plain(value)
    if number is None:
        shape = getattr(value, "shape", None)
        of = f" {'x'.join(map(str, shape))}" if shape is not None else ""
        return f"<{type(value).__name__}{of}>"
    if isinstance(number, (bool, str)):
        return str(number)
    if isinstance(number, int):
        return f"{number:,}"
    return _short_float(number, fixed)


def _short_float(number: float, fixed: bool) -> str:
    if not isfinite(number):
        return str(number)
    size = abs(number)
    if size != 0 and not 1e-4 <= size < 1e9:
        return f"{number:.3e}" if fixed else f"{number:.4g}"
    decimals = 3 - floor(log10(size)) if size != 0 else 3
    text = f"{number:,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and not fixed else text


def line(values: Mapping[str, Any]) -> str:
    """Format named values as a line: `loss 0.512  samples 12,800`; strings follow a colon."""
    parts: list[str] = []
    for name, value in values.items():
        text = short(value)
        if not isinstance(value, str):
            parts.append(f"{name} {text}")
        else:
            parts.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return "  ".join(parts)


def brief(seconds: float) -> str:
    """Format a number of seconds, with two decimals below ten seconds.

    Example:
        >>> brief(0.0416), brief(31.24)
        ('0.04', '31.2')
    """
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:,.1f}"


def clock(seconds: float) -> str:
    """Format a duration as `1:02:03` or `2:03`.

    Example:
        >>> clock(3723.4), clock(123)
        ('1:02:03', '2:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
