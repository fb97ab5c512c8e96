"""Examples of different lengths, joined into arrays: padded, or several in a row."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..core import structures
from ..core.structures import Path
from ..errors import DataError
from .leaves import Array, as_array, named


class Example(NamedTuple):
    """An example, as arrays.

    Attributes:
        name: Its name for messages.
        outline: Its structure, with 0 in the place of each array.
        paths: The path of each array in the structure.
        leaves: The arrays.
        sizes: The length of each array that is a sequence, None for the others.
    """

    name: str
    outline: Any
    paths: list[Path]
    leaves: list[Array]
    sizes: list[int | None]


@dataclass(frozen=True)
class Collating:
    """How examples of different lengths become the arrays of a batch.

    Attributes:
        value: What arrays are padded with: a number, or one for each array in the structure of an
            example.
        cut: Whether examples beyond the largest length are cut. Otherwise they are an error.
        lengths: The lengths of batches, from the smallest; None for that of the longest sequence.
        multiple_of: If `lengths` is None, a multiple of this number that is no shorter.
        mask: Whether a batch has a mask, which is True at the places that are not padded.
        fixed: Keys of arrays that are no sequences: they are stacked.
    """

    value: Any
    cut: bool
    lengths: Sequence[int] | None
    multiple_of: int = 1
    mask: bool = False
    fixed: tuple[Any, ...] = ()

    def example(self, item: Any, name: str) -> Example:
        """Return an example: any structure of arrays, lists and numbers; a list is an array.

        Raises:
            DataError: If it holds no arrays of numbers, or a list of different lengths.
        """
        paths: list[Path] = []
        leaves: list[Array] = []

        def outline(part: Any, path: Path) -> Any:
            if isinstance(part, list):
                part = _array_of(part)
            elif part is None:
                return None
            elif (pairs := structures.parts(part)) is not None:
                inner = [(key, outline(each, (*path, key))) for key, each in pairs]
                return structures.rebuilt(type(part), inner)
            leaves.append(as_array(path, part))
            paths.append(path)
            return 0

        try:
            outlined = outline(item, ())
        except (DataError, ValueError) as error:
            raise DataError(f"{name}: {error}") from error
        if not leaves:
            raise DataError(f"{name} holds no arrays: give arrays, or structures of them")
        sizes = [
            len(leaf) if leaf.ndim and not (path and path[0] in self.fixed) else None
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        return Example(name, outlined, paths, leaves, sizes)

    def used(self, example: Example) -> int:
        """Return the length that is used of an example, at most the largest length.

        Raises:
            DataError: If the example is longer and must not be cut.
        """
        length = max(size or 0 for size in example.sizes)
        most = length if self.lengths is None else self.lengths[-1]
        if length > most and not self.cut:
            raise DataError(
                f"{example.name} has length {length}, but the largest is {most}: allow "
                "larger lengths, or cut longer examples with cut=True"
            )
        return min(length, most)

    def place(self, example: Example) -> int:
        """Return the number of the smallest length that an example fits."""
        assert self.lengths is not None
        return bisect_left(self.lengths, self.used(example))

    def padded(self, examples: Sequence[Example]) -> Any:
        """Return a batch of examples, whose sequences are padded.

        Raises:
            DataError: If the examples differ in more than the lengths of sequences, or a mask is
                asked for and no array is a sequence.
        """
        first, columns = examples[0], self._columns(examples)
        to = self.lengths[max(map(self.place, examples))] if self.lengths else None
        batch: list[Array] = []
        mask: Array | None = None
        for array, column, size, value in zip(
            first.leaves, columns, first.sizes, self._values(first), strict=True
        ):
            if size is None:
                batch.append(np.stack(column))
                continue
            ends = np.array([len(part) for part in column])
            length = ends.max() + -ends.max() % self.multiple_of if to is None else to
            rows = _filled((len(column), length, *array.shape[1:]), value, array.dtype)
            for row, part in zip(rows, column, strict=True):
                row[: len(part)] = part[:length]
            batch.append(rows)
            if mask is None:
                mask = np.arange(length) < ends[:, None]
        packed = structures.pack(first.outline, batch)
        if self.mask and mask is None:
            raise DataError(
                f"{first.name} has no sequence, of which the mask would be: give an array that is "
                "not in fixed, or mask=False"
            )
        return self._with(packed, {"mask": mask}) if self.mask else packed

    def packed(self, rows: Sequence[Sequence[Example]]) -> Any:
        """Return a batch with several examples in each row, with segment numbers and positions.

        Args:
            rows: The examples of each row, which fit into it.

        Raises:
            DataError: If the examples differ as for `padded`, an array is no sequence, or an
                example has sequences of different lengths.
        """
        assert self.lengths is not None
        flat = [example for row in rows for example in row]
        first, length = flat[0], self.lengths[0]
        columns = iter(zip(*self._columns(flat), strict=True))
        for path, size in zip(first.paths, first.sizes, strict=True):
            if size is None:
                raise DataError(
                    f"{first.name}: {named(path)} is no sequence, of which several would be in a "
                    "row: give one value for each position, or use treadle.data.padded"
                )
        shape = len(rows), length
        batch = [
            _filled((*shape, *array.shape[1:]), value, array.dtype)
            for array, value in zip(first.leaves, self._values(first), strict=True)
        ]
        segments, positions = np.zeros(shape, "int32"), np.zeros(shape, "int32")
        for row, examples in enumerate(rows):
            start = 0
            for segment, example in enumerate(examples, start=1):
                used = self.used(example)
                parts = [part[:used] for part in next(columns)]
                if len({len(part) for part in parts}) > 1:
                    lengths = ", ".join(str(len(part)) for part in parts)
                    raise DataError(
                        f"{example.name} has sequences of lengths {lengths}: packed examples need "
                        "one length"
                    )
                if start + used > length:
                    raise DataError(
                        f"{example.name} no longer fits its row: the examples of a sequence must "
                        "keep the lengths that they had when packed was called"
                    )
                place = slice(start, start + used)
                for array, part in zip(batch, parts, strict=True):
                    array[row, place] = part
                segments[row, place] = segment
                positions[row, place] = np.arange(used)
                start = place.stop
        whole = structures.pack(first.outline, batch)
        return self._with(whole, {"segments": segments, "positions": positions})

    def _columns(self, examples: Sequence[Example]) -> list[list[Array]]:
        """Return the examples' arrays by their place in the structure."""
        first = examples[0]
        keys = {path[0] for path in first.paths if path}
        if unknown := [key for key in self.fixed if key not in keys]:
            raise DataError(
                f"fixed has the key {unknown[0]!r}, but the arrays of {first.name} have the keys "
                f"{', '.join(map(repr, sorted(keys, key=str))) or 'of no dict or tuple'}"
            )
        rows: list[list[Array]] = []
        for each in examples:
            leaves = each.leaves
            if (each.paths, each.outline) != (first.paths, first.outline):
                try:
                    whole = structures.pack(each.outline, leaves)
                    leaves = structures.aligned(whole, like=first.outline)
                except ValueError as error:
                    raise DataError(
                        f"{each.name} and {first.name} have different structures: {error}"
                    ) from None
            rows.append(leaves)
            for path, a, b, size in zip(
                first.paths, first.leaves, leaves, first.sizes, strict=True
            ):
                start = 0 if size is None else 1
                if (a.ndim, a.shape[start:], a.dtype) != (b.ndim, b.shape[start:], b.dtype):
                    raise DataError(
                        f"{named(path)} has shape {b.shape} and dtype {b.dtype} in {each.name}, "
                        f"but {a.shape} and {a.dtype} in {first.name}: only the length of a "
                        "sequence, its first axis, may differ"
                    )
        return [list(column) for column in zip(*rows, strict=True)]

    def _values(self, example: Example) -> list[Any]:
        """Return the padding value of each array."""
        if isinstance(self.value, bool | int | float | np.generic):
            return [self.value] * len(example.leaves)
        try:
            return structures.aligned(self.value, like=example.outline)
        except ValueError as error:
            raise DataError(
                f"value must be a number or have the structure of an example: {error}"
            ) from None

    @staticmethod
    def _with(batch: Any, more: dict[str, Any]) -> Any:
        """Add arrays to a batch: under their names to a dict, otherwise at the end of a tuple."""
        if isinstance(batch, Mapping):
            known = [name for name in more if name in batch]
            if known:
                raise DataError(
                    f"the examples have an array {known[0]!r} already: rename it, as the batch "
                    f"gets {', '.join(map(repr, more))}"
                )
            return {**batch, **more}
        return (*(batch if type(batch) is tuple else (batch,)), *more.values())


def _array_of(numbers: list[Any]) -> Array:
    if not numbers:
        raise DataError(
            "an empty list has no dtype: give numpy.zeros(0, dtype), or leave the example out"
        )
    try:
        return np.asarray(numbers)
    except ValueError:
        raise DataError(
            f"a list of {len(numbers)} has parts of different lengths, which make no array. If "
            "these are all examples, give one after another, such as list(zip(texts, labels))"
        ) from None


def _filled(shape: tuple[int, ...], value: Any, dtype: Any) -> Array:
    """Return an array of the padding value.

    Raises:
        DataError: If the dtype does not have the value; the rounding of a fraction is no error.
    """
    wrong = f"the padding value {value!r} does not fit the dtype {dtype}"
    try:
        one = np.asarray(value, "float64")
        with np.errstate(all="ignore"):
            there = np.asarray(value).astype(dtype)
    except (TypeError, ValueError, OverflowError):
        raise DataError(wrong) from None
    back = there.astype("float64")
    same = np.isfinite(back) == np.isfinite(one) if dtype.kind not in "biu" else back == one
    if not same:
        raise DataError(wrong)
    return np.full(shape, there, dtype)


def rows_of(lengths: Iterable[int], most: int) -> list[list[int]]:
    """Assign examples to rows of a length, and return the numbers of the examples in each row.

    Best-fit decreasing: from the longest to the shortest, each example goes to the fullest row that
    has room for it (Johnson 1974, "Fast algorithms for bin packing", Journal of Computer and System
    Sciences 8, https://doi.org/10.1016/S0022-0000(74)80026-7).

    Args:
        lengths: The length of each example, from 0 to `most`.
        most: The length of a row.

    Example:
        >>> rows_of([3, 5, 2, 6], most=8)
        [[3, 2], [1, 0]]
    """
    rows: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(most + 1)]
    free = 0  # bit n: there is a row with room for n more
    each = list(lengths)
    for number in sorted(range(len(each)), key=lambda i: (-each[i], i)):
        length = each[number]
        fitting = free >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            free ^= 0 if by_room[room] else 1 << room
        else:
            room, row = most, len(rows)
            rows.append([])
        rows[row].append(number)
        by_room[room - length].append(row)
        free |= 1 << (room - length)
    return rows
