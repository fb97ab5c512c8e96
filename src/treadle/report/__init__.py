"""What runs did: their states, and reports of one run or of a comparison as one HTML file.

Everything here reads run directories, also those of strangers, and imports neither Keras nor a
framework. `states` finds runs and their states, `reading` reads one run, `curves` reduces its
curves, `page` writes the file, and `server` serves it while runs train.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # importing it imports NumPy
    from .page import write as write

__all__ = ["write"]


def __getattr__(name: str) -> Any:
    if name == "write":
        from .page import write

        return write
    raise AttributeError(f"module 'treadle.report' has no attribute {name!r}")
