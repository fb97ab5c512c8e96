"""Data sources: creating, converting, combining and limiting sources of batches.

Each public name is imported when it is first used (PEP 562).

While a source produces a batch, the global random states of Python, NumPy and torch are functions
of (seed, epoch, batch), and they are restored afterwards. A source therefore draws the same random
numbers after a resume, and does not affect other code that draws from these generators.
"""

from typing import TYPE_CHECKING

from ..core.lazy import lazy

if TYPE_CHECKING:
    from ..distribute.shards import sharded as sharded
    from .arrays import from_arrays as from_arrays
    from .combine import groups as groups
    from .combine import zipped as zipped
    from .environments import Environments as Environments
    from .environments import Moves as Moves
    from .epochs import limited as limited
    from .foreign.sources import as_source as as_source
    from .functions import closed_loop as closed_loop
    from .functions import from_function as from_function
    from .ragged import bucketed as bucketed
    from .ragged import packed as packed
    from .ragged import padded as padded

__getattr__, __dir__, __all__ = lazy(__name__)
