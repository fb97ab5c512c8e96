"""What runs did: their states, and reports of one run or of a comparison as one HTML file.

Everything here reads run directories, also those of strangers, and imports neither Keras nor a
framework. `states` finds runs and their states, `reading` reads one run, `curves` reduces its
curves, `page` writes the file, and `server` serves it while runs train.
"""

from typing import TYPE_CHECKING

from ..core.lazy import lazy

if TYPE_CHECKING:  # importing it imports NumPy
    from .page import write as write

__getattr__, __dir__, __all__ = lazy(__name__)
