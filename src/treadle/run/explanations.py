"""Notes that explain exceptions raised in steps: the likely cause, and what to do."""

from ..backends import hints
from ..backends.base import active
from ..backends.window import Window
from ..data.leaves import flattened, named
from ..errors import TreadleError


class explaining:
    """A context manager that adds explanatory notes to exceptions, except to Treadle's own.

    Args:
        window: The batches passed to the step.
    """

    __slots__ = ("_window",)

    def __init__(self, window: Window | None = None) -> None:
        self._window = window

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Add the notes."""
        if not isinstance(error, Exception) or isinstance(error, TreadleError):
            return
        mismatch = _length_mismatch(self._window) if self._window is not None else ""
        lost = hints.DEVICE_LOST if hints.device_lost(error) else ""
        for note in filter(None, [lost or active().explain(error), mismatch]):
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)


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
