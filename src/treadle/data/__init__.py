"""Data sources: creating, converting, combining and limiting sources of batches.

Each public name is imported when it is first used (PEP 562).

While a source produces a batch, the global random states of Python, NumPy and torch are functions
of (seed, epoch, batch), and they are restored afterwards. A source therefore draws the same random
numbers after a resume, and does not affect other code that draws from these generators.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .arrays import from_arrays as from_arrays
    from .combine import groups as groups
    from .combine import zipped as zipped
    from .environments import Environments as Environments
    from .environments import Moves as Moves
    from .epochs import limited as limited
    from .foreign.sources import as_source as as_source
    from .functions import closed_loop as closed_loop
    from .functions import from_function as from_function
    from .shards import sharded as sharded

_MODULE_OF = {
    "Environments": "environments",
    "Moves": "environments",
    "as_source": "foreign.sources",
    "closed_loop": "functions",
    "from_arrays": "arrays",
    "from_function": "functions",
    "groups": "combine",
    "limited": "epochs",
    "sharded": "shards",
    "zipped": "combine",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"treadle.data.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'treadle.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
