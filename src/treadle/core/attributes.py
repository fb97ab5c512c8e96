"""The attributes of an object, with and without a `__dict__`."""

from typing import Any

OF_TASKS = ("_made_with", "_own_values")
"""Slots of `Task`, which are no state."""


def attributes_of(holder: Any) -> dict[str, Any]:
    """Return the attributes of an object by name, also those in `__slots__`.

    Example:
        >>> class Point:
        ...     __slots__ = ("x",)
        >>> point = Point()
        >>> point.x = 3
        >>> attributes_of(point)
        {'x': 3}
    """
    found = dict(getattr(holder, "__dict__", {}))
    for base in type(holder).__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):  # mangled by Python
                name = f"_{base.__name__.lstrip('_')}{name}"
            if not name.startswith("__") and name not in OF_TASKS and hasattr(holder, name):
                found.setdefault(name, getattr(holder, name))
    return found
