"""Notes on the exceptions that come out of steps: what they are likely to mean, what to do."""

from collections.abc import Generator
from contextlib import contextmanager

from ..backends.base import active
from ..backends.window import Window
from ..data.leaves import flattened, named
from ..errors import TreadleError


@contextmanager
def explaining(window: Window | None = None) -> Generator[None]:
    """Add notes to an exception that is not Treadle's own.

    Args:
        window: The batches that the step was given.
    """
    try:
        yield
    except TreadleError:
        raise
    except Exception as error:
        notes = [active().explain(error), _uneven(window) if window is not None else ""]
        for note in filter(None, notes):
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise


def _uneven(window: Window) -> str:
    """Say which arrays of a batch differ in length; some may do so on purpose."""
    leaves = [(path, leaf) for path, leaf in flattened(window.batch(0)) if leaf is not None]
    lengths = [(named(path), len(leaf)) for path, leaf in leaves if leaf.ndim]
    others = [(name, length) for name, length in lengths[1:] if length != lengths[0][1]]
    if not others:
        return ""
    (first, expected), (name, length) = lengths[0], others[0]
    return (
        f"{first[0].upper()}{first[1:]} of the batch has {expected} rows, but {name} has {length}: "
        "if both count examples, the batch was cut wrongly"
    )
