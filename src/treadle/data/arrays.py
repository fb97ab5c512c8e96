"""Sources of in-memory or memory-mapped arrays."""

import hashlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final
from weakref import WeakSet

import numpy as np

from ..backends.window import Rows, Window
from ..core import structures
from ..core.locked_arrays import RenewedLock, use, writable_view
from ..errors import DataError, whole_number, whole_number_or_none
from .iterables import type_name
from .leaves import Array, as_arrays, mapped_base, named
from .order import Integers, Permutation
from .reader import refuse_beyond
from .source import BaseSource, Position, ReadRequest

_order: Final[Callable[[int, int, int], Permutation]] = lru_cache(maxsize=8)(Permutation)

ORDERED_AT_ONCE: Final = 2048
"""The number of positions permuted together: this takes 120 µs, and 100 µs for one position."""

FINGERPRINT_ROWS: Final = 256
FINGERPRINT_BYTES: Final = 2**20
"""Limits of the rows and bytes of an array that a fingerprint hashes. It takes 0.5 ms for MNIST."""

CHANGING_BYTES: Final = 2**22
"""The most bytes of an array that changes for which it is saved in each checkpoint."""

MAPPED_BYTES: Final = 64 * 2**20
MAPPED_AROUND: Final = 64 * 2**10
"""The bytes of memory-mapped arrays that may be in memory, and those that Linux reads for a row."""

_RELEASE: Final[int | None] = getattr(mmap, "MADV_DONTNEED", None)  # not on Windows

_changing: Final["WeakSet[ArraySource]"] = WeakSet()


def from_arrays(
    *arrays: Any,
    batch_size: int,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int | None = None,
    changing: bool = False,
) -> "ArraySource":
    """Create a source of batches from arrays whose first axis is the example.

    `from_arrays(x, y, batch_size=64)` yields batches `(x, y)`; pass sample weights as a third
    array. A single argument may be any structure of arrays, and batches then have this structure:
    `from_arrays({"image": x, "label": y}, batch_size=64)`. A single array yields single arrays.

    Every epoch has a different order, which depends on (seed, epoch) only, needs no memory, and can
    be read from any position. Dtypes are not changed (float64 is kept); models cast their inputs.

    The arrays become read-only, since copies of them may be on a device: assigning to them raises
    NumPy's error. They are writable again when the `with` block of the loop ends, or when source
    and loop are gone. With `changing=True` they stay writable, and each step sees the values that
    they have when it begins, which takes longer: no batch is prefetched. Checkpoints contain those
    of up to 4 MiB, and restore them in place.

    Args:
        *arrays: Arrays of shape (examples, …), or structures of them. None leaves stay None.
            Memory-mapped arrays are read as needed.
        batch_size: The number of examples in a batch.
        shuffle: Whether to shuffle each epoch; otherwise examples come in stored order.
        drop_last: Whether to drop the last batch of an epoch if it is shorter than the others.
        seed: The seed of the order; None derives it from the seed of the run.
        changing: Whether the values of the arrays change while the source is in use.

    Raises:
        DataError: If there are no arrays, examples or full batches; if lengths differ; if
            `batch_size` is not a positive integer or `seed` is not a non-negative one; or if a leaf
            is not an array of numbers; or, with `changing`, if a leaf had to be copied.

    Example:
        >>> source = from_arrays(np.arange(5), batch_size=2, shuffle=False)
        >>> reader = source.read(epoch=0)
        >>> reader.take(10).batches.tolist()
        [[0, 1], [2, 3]]
        >>> reader.take(10).batches.tolist()
        [[4]]
    """
    given = arrays[0] if len(arrays) == 1 else arrays
    structure = as_arrays(given)
    sized = structures.with_paths(structure)
    if not sized:
        raise DataError("from_arrays got no arrays: call it as from_arrays(x, y, batch_size=64)")
    examples = _common_length(sized)
    batch_size = whole_number("batch_size", batch_size, DataError)
    if drop_last and examples < batch_size:
        raise DataError(
            f"{examples} examples make no full batch of {batch_size}, and drop_last drops shorter "
            f"batches: use a smaller batch_size"
        )
    seed = whole_number_or_none("seed", seed, DataError, least=0)
    lock = None
    if changing:
        _refuse_copies(given, structure)
    else:  # what was given is locked also if it was converted, and is not read again
        lock = RenewedLock([*structures.flatten(given), *structures.flatten(structure)])
        structure = structures.mapped(writable_view, structure)
    source = ArraySource(structure, examples, batch_size, shuffle, drop_last, seed, changing, lock)
    if changing:
        _changing.add(source)
    return source


def note_contents() -> None:
    """Note what the arrays that change contain: a checkpoint restores none that is set later.

    To be called where a resumed run begins an epoch, before the body of a `for` loop.
    """
    for source in _changing:
        object.__setattr__(source, "noted", source.saved())


def _common_length(arrays: list[tuple[structures.Path, Any]]) -> int:
    """Return the number of examples, which all arrays must have."""
    first, of_first = arrays[0]
    for path, leaf in arrays:
        if leaf.ndim == 0:
            raise DataError(
                f"{named(path)} is a number, not an array of examples: convert lists of numbers to "
                f"arrays with numpy.asarray"
            )
        if len(leaf) != len(of_first):
            raise DataError(
                f"{named(path)} has {len(leaf)} examples, but {named(first)} has "
                f"{len(of_first)}: all arrays must be of one length"
            )
    if len(of_first) == 0:
        raise DataError(f"{named(first)} holds no examples: its shape is {of_first.shape}")
    return len(of_first)


@dataclass(frozen=True, eq=False)
class ArraySource(BaseSource):
    """A source of batches from arrays; created by `from_arrays`.

    Attributes:
        arrays: The structure of NumPy arrays, each of shape (examples, …).
        examples: The number of examples.
        batch_size: The number of examples in a full batch.
        shuffle: Whether each epoch is shuffled.
        drop_last: Whether a shorter last batch is dropped.
        seed: The seed of the order, or None for the seed of the run.
        changing: Whether the values of the arrays change while the source is in use.
        lock: Keeps the arrays read-only unless they change, until the loop is closed.
        noted: What `saved` returned before the script set values for the epoch; None otherwise.
        endless: Always False: every epoch ends.
        is_stored: Always True: reading a batch leaves no trace.
    """

    arrays: Any
    examples: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int | None
    changing: bool = False
    lock: RenewedLock | None = field(default=None, repr=False)
    noted: Mapping[str, Array] | None = field(default=None, repr=False, init=False)

    endless: bool = field(default=False, init=False)
    is_stored: bool = field(default=True, init=False)

    @property
    def length(self) -> int:
        """The number of batches in an epoch."""
        full = self.examples // self.batch_size
        return full if self.drop_last or self.examples % self.batch_size == 0 else full + 1

    @property
    def batch_examples(self) -> int:
        """The number of examples in a full batch."""
        return min(self.batch_size, self.examples)

    @property
    def intact(self) -> bool:
        """Whether the arrays are locked, so that copies of them have their values."""
        return self.lock is None or self.lock.is_intact(lambda: self.fingerprint)

    @property
    def closed_loop(self) -> bool:
        """Whether batches are read only when their step begins: if the arrays change."""
        return self.changing

    @property
    def inexact(self) -> str | None:
        """The reason why the source cannot be resumed exactly, or None."""
        if not self.changing:
            return None
        large = [path for path, leaf in self._changeable() if leaf.nbytes > CHANGING_BYTES]
        if not large:
            return None
        return (
            f"{named(large[0])} may change (changing=True), but is larger than the "
            f"{CHANGING_BYTES:,} bytes that checkpoints save of an array: give arrays that do not "
            "change in a source of their own, as in zipped(from_arrays(x, …), from_arrays(y, …, "
            "changing=True)), or restore the array before training"
        )

    def _changeable(self) -> list[tuple[structures.Path, Array]]:
        """Return the arrays that may change, with their paths."""
        return [(p, x) for p, x in structures.with_paths(self.arrays) if x.flags.writeable]

    def saved(self) -> dict[str, Array] | None:
        """Return the bytes of the small arrays that may change, by path; None if there are none."""
        if not self.changing:
            return None
        small = [(p, x) for p, x in self._changeable() if x.nbytes <= CHANGING_BYTES]
        found = {structures.text_of(p): np.frombuffer(x.tobytes(), np.uint8) for p, x in small}
        return found or None

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Assign the values that `saved` returned to the arrays.

        Raises:
            DataError: If an array has another size.
        """
        for path, leaf in self._changeable():
            values = saved.get(structures.text_of(path))
            if values is not None and values.nbytes != leaf.nbytes:
                raise DataError(
                    f"{named(path)} has {leaf.nbytes:,} bytes, but {values.nbytes:,} when the run "
                    "was saved: this is not the data that the run began with"
                )
            if values is not None:
                leaf[...] = np.frombuffer(values.tobytes(), leaf.dtype).reshape(leaf.shape)

    def _restore_for(self, saved: Mapping[str, Any], begins: bool) -> None:
        """Restore the arrays for an epoch, but for those that the script set since it began."""
        noted, now = (self.noted or {}) if begins else {}, self.saved() or {}
        object.__setattr__(self, "noted", None)
        is_set = {p for p, x in noted.items() if p in now and not np.array_equal(x, now[p])}
        self.restore({path: x for path, x in saved.items() if path not in is_set})

    @property
    def fingerprint(self) -> str | None:
        """A short hash of the shapes, dtypes, and a sample of evenly spaced rows.

        Other rows are not hashed. The memory layout of arrays has no effect. None if they change.
        """
        if self.changing:
            return None
        found = hashlib.sha256()
        for path, leaf in structures.with_paths(self.arrays):
            found.update(repr((path, (leaf.shape, leaf.dtype.name))).encode())
            most = max(2, min(FINGERPRINT_ROWS, FINGERPRINT_BYTES // max(1, leaf[0].nbytes)))
            rows = np.linspace(0, len(leaf) - 1, min(most, len(leaf))).astype(np.int64)
            found.update(np.asarray(leaf[rows]).tobytes())
        return found.hexdigest()[:16]

    def indices(
        self, epoch: int, start: int, most: int, *, seed: int = 0, ordered: bool = False
    ) -> Integers:
        """Return the indices of the examples in the next batches.

        Args:
            epoch: The number of the epoch, from 0.
            start: The number of the first batch within the epoch, from 0.
            most: The maximum number of batches.
            seed: The seed of the run, used if the source has no seed.
            ordered: Return the examples in stored order.

        Returns:
            int64 of shape (batches, examples per batch): up to `most` full batches, or the shorter
            last batch alone; of shape (0, batch_size) at the end of the epoch.
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

    def open(self, request: ReadRequest) -> "ArrayReader":
        """Open a reader. A position holds the values of arrays that change.

        Raises:
            DataError: If the epoch has fewer than `start` batches, or a saved array another size.
        """
        refuse_beyond(request.start, self.length, request.epoch)
        if self.changing and request.position is not None:
            self._restore_for(request.position, begins=request.start == 0)
        if self.lock is not None:
            if not self.intact:
                self.lock.renew(lambda: self.fingerprint)
            use(self.lock, request.loop)

        def indices(start: int, most: int) -> Integers:
            return self.indices(
                request.epoch, start, most, seed=request.seed, ordered=request.ordered
            )

        at_least = max(1, ORDERED_AT_ONCE // self.batch_size)
        return ArrayReader(self, indices, request.start, at_least)


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


class ArrayReader:
    """Returns windows as row indices, without copying rows.

    Args:
        source: The source being read.
        indices: Given the number of the first batch and the maximum number of batches, returns the
            indices of their examples.
        start: The number of the first batch.
        at_least: The minimum number of batches whose indices are computed together.
    """

    def __init__(
        self,
        source: ArraySource,
        indices: Callable[[int, int], Integers],
        start: int,
        at_least: int,
    ) -> None:
        self._source, self._mapped = source, MemoryMaps.of(source.arrays)
        self._indices = indices
        self._next = start
        self._at_least = at_least
        self._known_from = start
        self._known = indices(start, 0)

    def take(self, most: int) -> Window | None:
        """Return the next batches as row indices, or None at the end of the epoch."""
        offset = self._next - self._known_from
        if offset < 0 or offset + most > len(self._known):
            offset, self._known_from = 0, self._next
            self._known = self._indices(self._next, max(most, self._at_least))
        indices = self._known[offset : offset + most]
        if len(indices) == 0:
            return None
        self._next += len(indices)
        lock = self._source.lock
        owner = self._source if lock is None else lock.lock
        window = Window.of_rows(Rows(owner, self._source.arrays, indices))
        if self._mapped is None and not self._source.changing:
            return window
        gathered = window.streamed()
        if self._mapped is not None:
            self._mapped.gathered(indices.size)
        return gathered

    def put_back(self, window: Window) -> None:
        """Put back batches; the next `take` returns them again."""
        self._next -= window.count

    def position(self, ahead: int = 0) -> Position | None:
        """Return the values of small arrays that change; None if epoch and batch are enough."""
        return self._source.saved()

    def close(self) -> None:
        """Do nothing: the reader has no resources."""


def _refuse_copies(given: Any, structure: Any) -> None:
    """Reject leaves of `from_arrays` whose changes cannot be seen, since they were converted.

    Raises:
        DataError: If a leaf was copied.
    """
    again = dict(structures.with_paths(as_arrays(given)))
    leaves = dict(structures.with_paths(given))
    for path, array in structures.with_paths(structure):
        if not np.may_share_memory(array, again[path]):
            leaf = leaves[path]
            raise DataError(
                f"{named(path)} is a {type_name(leaf)} of dtype {leaf.dtype}, which is copied, so "
                "that changing=True would not see its changes: pass a NumPy array of dtype "
                f"{array.dtype.name}, and change that"
            )
