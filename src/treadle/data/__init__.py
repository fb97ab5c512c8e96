"""Data: what is accepted as batches, and how epochs are ordered, combined and cut.

Each public name is imported when it is first asked for (PEP 562).

While a source gives a batch, the global random states of Python, NumPy and torch are functions of
(seed, epoch, batch), and afterwards they are as before: what a source draws comes out the same
after a resume, and disturbs nobody.
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
    from .functions import closed as closed
    from .functions import from_function as from_function

_MODULE_OF = {
    "Environments": "environments",
    "Moves": "environments",
    "as_source": "foreign.sources",
    "closed": "functions",
    "from_arrays": "arrays",
    "from_function": "functions",
    "groups": "combine",
    "limited": "epochs",
    "zipped": "combine",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"treadle.data.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'treadle.data' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
