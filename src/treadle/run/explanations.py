"""Notes that explain exceptions raised in steps: the likely cause, and what to do."""

from collections.abc import Generator
from contextlib import contextmanager

from ..backends.base import active
from ..backends.window import Window
from ..data.leaves import flattened, named
from ..errors import TreadleError


@contextmanager
def explaining(window: Window | None = None) -> Generator[None]:
    """Add explanatory notes to exceptions, except to those raised by Treadle itself.

    Args:
        window: The batches passed to the step.
    """
    try:
        yield
    except TreadleError:
        raise
    except Exception as error:
        notes = [active().explain(error), _length_mismatch(window) if window is not None else ""]
        for note in filter(None, notes):
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _length_mismatch(window: Window) -> str:
    """Describe two arrays of a batch that differ in length, if any; this may be intended."""
    leaves = [(path, leaf) for path, leaf in flattened(window.batch(0)) if leaf is not None]
    lengths = [(named(path), len(leaf)) for path, leaf in leaves if leaf.ndim]
    others = [(name, length) for name, length in lengths[1:] if length != lengths[0][1]]
    if not others:
        return ""
    (first, expected), (name, length) = lengths[0], others[0]
    return (
        f"{first[0].upper()}{first[1:]} of the batch has {expected} rows, but {name} has {length}: "
        "they must match if both contain one row per example"
    )
