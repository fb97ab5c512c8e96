"""What is known of any iterable: its name, its length, and why it cannot be entered anywhere."""

from typing import Any


def type_name(data: Any) -> str:
    """Return the name of a thing's class, with its module."""
    kind: type = type(data)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def length_of(iterable: Any) -> int | None:
    """Return the number of batches, or None where an iterable does not know it."""
    try:
        return len(iterable)
    except TypeError:  # also what a DataLoader over an iterable data set raises
        return None


def forward_only(what: str) -> str:
    """Say why a run on something that can only be iterated may not be resumed exactly."""
    return (
        f"{what} cannot seek: a resumed run draws and discards the batches before its position, "
        f"which is exact only if they come in the same order again"
    )
