"""The name, length and resume limitation of an iterable."""

from typing import Any


def type_name(data: Any) -> str:
    """Return the name of an object's class, with its module."""
    kind: type = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def length_of(iterable: Any) -> int | None:
    """Return the number of batches of an iterable, or None if it has no length."""
    try:
        return len(iterable)
    except TypeError:  # raised also by a DataLoader of an iterable data set
        return None


def forward_only(what: str) -> str:
    """Return the reason why a source that can only be iterated may not be resumed exactly."""
    return (
        f"{what} cannot seek: a resumed run draws and discards the batches before its position, "
        f"which is exact only if they come in the same order again"
    )
