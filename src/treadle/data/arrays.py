"""A data set that lies in memory as arrays."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

import numpy as np

from ..backends.window import Rows, Window
from ..core.hook import LoopView
from ..errors import DataError, whole_number
from .leaves import as_array, flattened, named, packed
from .order import Integers, Permutation
from .reader import refuse_beyond
from .source import Position

_order: Final[Callable[[int, int, int], Permutation]] = lru_cache(maxsize=8)(Permutation)

ORDERED_AT_ONCE: Final = 2048
"""Positions that are ordered together: it takes 120 µs for as many, and 100 for one."""

FINGERPRINT_ROWS: Final = 256
FINGERPRINT_BYTES: Final = 2**20
"""What a fingerprint looks at of an array, spread over all of it: at most so many rows and bytes.
It takes 0.5 ms for MNIST."""


def from_arrays(
    *arrays: Any,
    batch_size: int,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int | None = None,
) -> "ArraySource":
    """Make batches of arrays whose first axis counts the examples.

    `from_arrays(x, y, batch_size=64)` gives batches `(x, y)`, and sample weights are one more
    array. One argument alone may be any structure of arrays, and is the structure of the batches:
    `from_arrays({"image": x, "label": y}, batch_size=64)`; a bare array gives bare arrays.

    Every epoch has another order, which follows from (seed, epoch) alone, needs no memory and can
    be entered anywhere. Dtypes stay as they are, float64 too: casting is the model's business.

    Args:
        *arrays: Arrays of shape (examples, …), or structures of them; None leaves stay None.
            Memory-mapped arrays are read as they are needed.
        batch_size: Examples in a batch.
        shuffle: Whether each epoch has an order of its own; else batches come as stored.
        drop_last: Leave out the last batch of an epoch where it is shorter than the others; it
            comes as a shorter one otherwise.
        seed: Seed of the order; None derives it from the run's.

    Raises:
        DataError: No arrays, no examples, no batch, lengths that differ, a batch size that
            is no whole number from 1, a seed that is none from 0, or what is no array of numbers.

    Example:
        >>> source = from_arrays(np.arange(5), batch_size=2, shuffle=False)
        >>> reader = source.read(epoch=0)
        >>> reader.take(10).batches.tolist()
        [[0, 1], [2, 3]]
        >>> reader.take(10).batches.tolist()
        [[4]]
    """
    structure = arrays[0] if len(arrays) == 1 else arrays
    pairs = flattened(structure)
    leaves = [as_array(path, leaf) for path, leaf in pairs]
    sized = [
        (path, leaf) for (path, _), leaf in zip(pairs, leaves, strict=True) if leaf is not None
    ]
    if not sized:
        raise DataError("from_arrays got no arrays: call it as from_arrays(x, y, batch_size=64)")
    for path, leaf in sized:
        if leaf.ndim == 0:
            raise DataError(
                f"{named(path)} is a number, not an array of examples: make lists of numbers "
                f"arrays with numpy.asarray"
            )
        if len(leaf) != len(sized[0][1]):
            raise DataError(
                f"{named(path)} has {len(leaf)} examples, but {named(sized[0][0])} has "
                f"{len(sized[0][1])}: all arrays must be of one length"
            )
    examples = len(sized[0][1])
    if examples == 0:
        raise DataError(f"{named(sized[0][0])} holds no examples: its shape is {sized[0][1].shape}")
    batch_size = whole_number("batch_size", batch_size, DataError)
    if drop_last and examples < batch_size:
        raise DataError(
            f"{examples} examples make no full batch of {batch_size}, and drop_last leaves out the "
            f"short one: use a smaller batch_size"
        )
    if seed is not None:
        seed = whole_number("seed", seed, DataError, least=0)
    return ArraySource(packed(structure, leaves), examples, batch_size, shuffle, drop_last, seed)


@dataclass(frozen=True, eq=False)
class ArraySource:
    """Batches of arrays; made by `from_arrays`.

    Attributes:
        arrays: The structure of NumPy arrays, each of shape (examples, …).
        examples: How many examples there are.
        batch_size: Examples in a full batch.
        shuffle: Whether each epoch has an order of its own.
        drop_last: Whether a shorter last batch is left out.
        seed: Seed of the order, or None for the run's.
        endless: False: every epoch ends.
        inexact: None: any position can be read from.
        closed: False: batches do not depend on the state of the run.
    """

    arrays: Any
    examples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int | None

    endless: bool = field(default=False, init=False)
    inexact: str | None = field(default=None, init=False)
    closed: bool = field(default=False, init=False)

    @property
    def on_disk(self) -> bool:
        """Whether some array is memory-mapped: then nobody should read all of it at once."""
        return any(_is_mapped(leaf) for _, leaf in flattened(self.arrays))

    @property
    def length(self) -> int:
        """Batches in an epoch."""
        full = self.examples // self.batch_size
        return full if self.drop_last or self.examples % self.batch_size == 0 else full + 1

    @property
    def batch_examples(self) -> int:
        """Examples in a full batch."""
        return min(self.batch_size, self.examples)

    @property
    def fingerprint(self) -> str:
        """A short hash of shapes, dtypes, and rows spread over the data: other data has another.

        What lies between those rows is not looked at, and their layout in memory does not count.
        """
        found = hashlib.sha256()
        for path, leaf in flattened(self.arrays):
            found.update(repr((path, leaf is None or (leaf.shape, leaf.dtype.name))).encode())
            if leaf is not None:
                most = max(2, min(FINGERPRINT_ROWS, FINGERPRINT_BYTES // max(1, leaf[0].nbytes)))
                rows = np.linspace(0, len(leaf) - 1, min(most, len(leaf))).astype(np.int64)
                found.update(np.asarray(leaf[rows]).tobytes())
        return found.hexdigest()[:16]

    def indices(
        self, epoch: int, start: int, most: int, *, seed: int = 0, ordered: bool = False
    ) -> Integers:
        """Return which examples the next batches hold, so that arrays on a device can be indexed.

        Args:
            epoch: The epoch's number, from 0.
            start: The number of the first of these batches in the epoch, from 0.
            most: The most batches wanted.
            seed: The run's seed; the source's own wins.
            ordered: Take the examples as they are stored.

        Returns:
            int64 of shape (batches, examples in each): at most `most` full batches, or the shorter
            last batch alone; of shape (0, batch_size) at the epoch's end.
        """
        full = self.examples // self.batch_size
        if start < full:
            shape = min(most, full - start), self.batch_size
        elif start < self.length:
            shape = 1, self.examples - full * self.batch_size
        else:
            shape = 0, self.batch_size
        first = start * self.batch_size
        positions = np.arange(first, first + shape[0] * shape[1]).reshape(shape)
        if ordered or not self.shuffle:
            return positions
        return _order(self.examples, seed if self.seed is None else self.seed, epoch)(positions)

    def read(
        self,
        epoch: int,
        start: int = 0,
        *,
        seed: int = 0,
        loop: LoopView | None = None,
        ordered: bool = False,
        position: Position | None = None,
    ) -> "ArrayReader":
        """Read an epoch from its batch number `start` on; no `position` is ever needed.

        Raises:
            DataError: The epoch has fewer batches than `start`.
        """
        refuse_beyond(start, self.length, epoch)
        return ArrayReader(
            self,
            lambda start, most: self.indices(epoch, start, most, seed=seed, ordered=ordered),
            start,
            max(1, ORDERED_AT_ONCE // self.batch_size),
        )


class ArrayReader:
    """Tells which rows the batches of a window are; a step back is only a number.

    Args:
        source: What is read.
        indices: Returns which examples the next batches hold, given their first and most number.
        start: The number of the batch that comes first.
        at_least: Batches whose indices are computed at once.
    """

    def __init__(
        self,
        source: ArraySource,
        indices: Callable[[int, int], Integers],
        start: int,
        at_least: int,
    ) -> None:
        self._source, self._on_disk = source, source.on_disk
        self._indices = indices
        self._next = start
        self._at_least = at_least
        self._known_from = start
        self._known = indices(start, 0)

    def take(self, most: int) -> Window | None:
        """Return the next batches, to be gathered by whoever needs them; None at the end."""
        offset = self._next - self._known_from
        if offset < 0 or offset + most > len(self._known):
            offset, self._known_from = 0, self._next
            self._known = self._indices(self._next, max(most, self._at_least))
        indices = self._known[offset : offset + most]
        if len(indices) == 0:
            return None
        self._next += len(indices)
        window = Window.of_rows(Rows(self._source, self._source.arrays, indices))
        return window.streamed() if self._on_disk else window

    def put_back(self, window: Window) -> None:
        """Give these batches again."""
        self._next -= window.count

    def position(self, ahead: int = 0) -> None:
        """Nothing is needed."""

    def close(self) -> None:
        """Nothing is held."""


def _is_mapped(array: Any) -> bool:
    """Say whether an array's memory is that of a file, through whatever views."""
    while array is not None and not isinstance(array, np.memmap):
        array = getattr(array, "base", None)
    return array is not None
