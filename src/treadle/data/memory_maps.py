"""Memory-mapped arrays, whose pages are released while they are read."""

import mmap
from typing import Any, Final

from ..core import structures
from .leaves import mapped_base

MAPPED_BYTES: Final = 64 * 2**20
MAPPED_AROUND: Final = 64 * 2**10
"""The bytes of memory-mapped arrays that may be in memory, and those that Linux reads for a row."""

_RELEASE: Final[int | None] = getattr(mmap, "MADV_DONTNEED", None)  # not on Windows


class MemoryMaps:
    """The memory-mapped arrays of a source, whose pages are released while they are read.

    The pages of a file that were read count as memory of the process until it ends. Released pages
    stay in the system's file cache, which shrinks if memory is needed.

    Args:
        maps: The memory maps.
        row_bytes: Bytes of an example in all of them.
    """

    def __init__(self, maps: list[Any], row_bytes: int) -> None:
        self._maps = maps
        self._rows_between = max(1, MAPPED_BYTES // (row_bytes + len(maps) * MAPPED_AROUND))
        self._rows = 0

    @classmethod
    def of(cls, arrays: Any) -> "MemoryMaps | None":
        """Return the memory-mapped arrays of a structure, or None if there are none."""
        leaves = structures.flatten(arrays)
        bases = [base for leaf in leaves if (base := mapped_base(leaf)) is not None]
        if not bases:
            return None
        # Releasing a private copy-on-write map would discard changes of its arrays.
        bases = [base for base in bases if base.mode != "c"]
        maps = {id(x): x for x in map(_map_of, bases)} if _RELEASE is not None else {}
        return cls(list(maps.values()), sum(leaf[:1].nbytes for leaf in leaves))

    def gathered(self, rows: int) -> None:
        """Count rows that were read, and release the pages if there are many."""
        self._rows += rows
        if self._rows >= self._rows_between:
            self._rows = 0
            for each in self._maps:
                each.madvise(_RELEASE)


def _map_of(array: Any) -> Any:
    """Return the `mmap` of a memory-mapped array."""
    while not isinstance(array, mmap.mmap):
        array = array.base
    return array
