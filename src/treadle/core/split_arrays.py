"""Arrays that several processes hold together, each a part of them.

An array is cut along its axes into a grid of parts, as devices hold it. Two processes may hold the
same part; one of them, its owner, writes it to checkpoints.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Region = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    """How an array is cut into parts, which are numbered in C order.

    Attributes:
        shape: The shape of the whole array.
        starts: For each axis, where parts begin, in ascending order from 0.

    Example:
        >>> grid = Grid((4, 6), ((0,), (0, 2)))
        >>> grid.regions()
        [(slice(0, 4, None), slice(0, 2, None)), (slice(0, 4, None), slice(2, 6, None))]
    """

    shape: tuple[int, ...]
    starts: tuple[tuple[int, ...], ...]

    @property
    def parts(self) -> int:
        """The number of parts."""
        return prod(len(starts) for starts in self.starts)

    def regions(self) -> list[Region]:
        """Return the place of each part in the whole array."""
        axes = (
            [slice(a, b) for a, b in zip(starts, (*starts[1:], size), strict=True)]
            for starts, size in zip(self.starts, self.shape, strict=True)
        )
        return list(product(*axes))

    @classmethod
    def of(cls, shape: Sequence[int], regions: Sequence[Region]) -> "Grid":
        """Return the grid whose parts are these regions, which may repeat."""
        starts = (sorted({region[axis].start for region in regions}) for axis in range(len(shape)))
        return cls(tuple(shape), tuple(map(tuple, starts)))


def region_of(index: Any, shape: Sequence[int]) -> Region:
    """Return the region that slices of an array select, with a start and an end for each axis."""
    return tuple(slice(*s.indices(size)[:2]) for s, size in zip(index, shape, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class OwnParts:
    """The parts of an array that this process writes, of all that processes hold together.

    Attributes:
        grid: How the array is cut.
        dtype: The dtype of the array.
        owners: The process that writes each part.
        own: The parts of this process, by number.
    """

    grid: Grid
    dtype: np.dtype[Any]
    owners: tuple[int, ...]
    own: Mapping[int, Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.grid.shape


class Readable(Protocol):
    """An array of which any region can be read, such as one in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype."""
        ...

    def __getitem__(self, index: Any) -> Array:
        """Read a region, given by slices."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredParts:
    """An array whose parts are read when they are needed.

    Attributes:
        grid: How the array is cut.
        dtype: The dtype of the array.
        read: Reads a part, by its number.
    """

    grid: Grid
    dtype: np.dtype[Any]
    read: Callable[[int], Array]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole array."""
        return self.grid.shape

    def __getitem__(self, index: Any) -> Array:
        """Read a region: only the parts that overlap it are read."""
        wanted = region_of(index, self.shape)
        found = np.empty([s.stop - s.start for s in wanted], self.dtype)
        for number, place in enumerate(self.grid.regions()):
            common = [
                slice(max(a.start, b.start), min(a.stop, b.stop))
                for a, b in zip(place, wanted, strict=True)
            ]
            if all(s.start < s.stop for s in common):
                found[_within(common, wanted)] = self.read(number)[_within(common, place)]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        """Read the whole array."""
        found = self[tuple(slice(0, size) for size in self.shape)]
        return found if dtype is None else found.astype(dtype)


def _within(region: Sequence[slice], place: Region) -> Region:
    """Return a region as slices of the array that lies at a place."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(region, place, strict=True)
    )
