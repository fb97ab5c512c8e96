"""Sources of examples of different lengths: padded, in buckets of similar length, or packed."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ..errors import DataError, whole_number
from .collating import Collating, rows_of
from .combine import refuse_shards
from .foreign.sources import as_source, is_indexed
from .ragged_sources import Bucket, Buckets, RaggedSource, RaggedStream, RowPacker, of_all
from .source import Source


def padded(
    examples: Any,
    batch_size: int,
    *,
    to: int | Sequence[int] | None = None,
    multiple_of: int = 1,
    value: Any = 0,
    mask: bool = False,
    fixed: Sequence[Any] = (),
    cut: bool = False,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int | None = None,
) -> "RaggedSource | RaggedStream":
    """Create a source of batches from examples of different lengths, which are padded at the end.

    Each array of an example is a sequence along its first axis, and numbers are stacked. The step
    is compiled for each length of a batch that comes often: give few lengths.

    Args:
        examples: A sequence of examples (a list, a PyTorch data set, or any object with a length
            and an index), read in another order in each epoch; or a stream of them (a generator
            function, a `tf.data.Dataset`, any iterable), read as it comes. An example is any
            structure of arrays and numbers. A list is an array, except in a stream.
        batch_size: The number of examples in a batch.
        to: Length of the sequences: one, or several, of which each batch has the smallest that
            fits. None means the longest in the batch, for each array.
        multiple_of: If `to` is None, lengths are rounded up to a multiple of this number.
        value: What is added: a number, or one for each array in the structure of an example.
        mask: Whether a boolean array of shape (batch size, length), True at the places that are not
            padded, is added to the batch: at the end of a tuple, as `"mask"` to a dict, otherwise
            as `(batch, mask)`. It is that of the first sequence.
        fixed: Keys of arrays (names of a dict, numbers in a tuple) that are no sequences.
        cut: Whether examples beyond the largest length are cut; otherwise they are an error.
        shuffle: Whether the examples are shuffled in each epoch. A stream keeps its order.
        drop_last: Whether to drop the last batch if it is shorter than the others.
        seed: The seed of the order; None derives it from the seed of the run.

    Raises:
        DataError: If an argument is invalid, or there are no examples or full batches. When
            reading: if an example is too long, or differs from others in more than lengths.

    Example:
        >>> texts = [([1, 2, 3], 0), ([4], 1)]
        >>> source = padded(texts, batch_size=2, to=(4, 8), mask=True, shuffle=False)
        >>> tokens, labels, mask = source.read(epoch=0).take(1).batches
        >>> tokens[0].tolist(), labels[0].tolist(), mask[0].sum(axis=1).tolist()
        ([[1, 2, 3, 0], [4, 0, 0, 0]], [0, 1], [3, 1])
    """
    size = whole_number("batch_size", batch_size, DataError)
    multiple = whole_number("multiple_of", multiple_of, DataError)
    lengths = None if to is None else _increasing("to", to)
    if lengths and multiple > 1:
        raise DataError("give either to, the lengths of batches, or multiple_of, which rounds them")
    collating = Collating(value, cut, lengths, multiple, mask, _keys(fixed))
    if not is_indexed(examples):
        joined = Buckets(collating, None, [size], drop_last)
        return RaggedStream(_stream(examples, "padded"), joined)
    bucket = Bucket(np.arange(len(examples)), size)
    return RaggedSource(examples, [bucket], collating, shuffle, drop_last, _seed(seed))


def bucketed(
    examples: Any,
    lengths: Sequence[int],
    batch_size: int | Sequence[int] | None = None,
    *,
    tokens: int | None = None,
    in_a_row: int = 1,
    value: Any = 0,
    mask: bool = False,
    fixed: Sequence[Any] = (),
    cut: bool = False,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int | None = None,
) -> "RaggedSource | RaggedStream":
    """Create a source whose batches hold examples of similar length, padded at the end.

    Each example belongs to the smallest of `lengths` that it fits, to which batches are padded: the
    step is compiled once for each length. The order of an epoch depends on the seed and the epoch
    only. Examples of a stream wait until their batch is full; at its end, batches may be shorter.

    Args:
        examples: As for `padded`. Those of a sequence are read once, for their lengths.
        lengths: The lengths of batches, from the smallest.
        batch_size: The number of examples in a batch, or one for each length.
        tokens: Places in a batch, instead of `batch_size`: a batch of length n has `tokens // n`
            examples.
        in_a_row: How many batches of one length follow one another, if the examples are a sequence.
            A compiled window holds batches of one length: more make small networks faster.
        value: As for `padded`.
        mask: As for `padded`.
        fixed: As for `padded`.
        cut: As for `padded`.
        shuffle: As for `padded`.
        drop_last: Whether to drop the last batch of each length if it is shorter than the others.
        seed: As for `padded`.

    Raises:
        DataError: As for `padded`; also if an example is longer than the largest length.

    Example:
        >>> texts = [[1, 2, 3], [4], [5, 6, 7, 8], [9]]
        >>> source = bucketed(texts, (2, 4), batch_size=2, shuffle=False)
        >>> reader = source.read(epoch=0)
        >>> [reader.take(1).batches[0].tolist() for _ in range(2)]
        [[[4, 0], [9, 0]], [[1, 2, 3, 0], [5, 6, 7, 8]]]
    """
    lengths = _increasing("lengths", lengths)
    sizes = _sizes(lengths, batch_size, tokens)
    runs = whole_number("in_a_row", in_a_row, DataError)
    collating = Collating(value, cut, lengths, mask=mask, fixed=_keys(fixed))
    if not is_indexed(examples):
        joined = Buckets(collating, lengths, sizes, drop_last)
        return RaggedStream(_stream(examples, "bucketed"), joined)
    found = np.array(of_all(examples, collating, collating.place), "int64")
    members = [np.flatnonzero(found == place) for place in range(len(lengths))]
    buckets = [Bucket(*each) for each in zip(members, sizes, strict=True)]
    return RaggedSource(examples, buckets, collating, shuffle, drop_last, _seed(seed), runs)


def packed(
    examples: Any,
    length: int,
    batch_size: int,
    *,
    value: Any = 0,
    cut: bool = False,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int | None = None,
) -> "RaggedSource | RaggedStream":
    """Create a source of batches with several examples in each row, one after another.

    Two int32 arrays of shape (batch size, length) are added at the end of the batch, or to a dict
    by their names. `segments` numbers the examples of a row from 1, and is 0 at places that are
    padded; `positions` counts from 0 in each example. Attention within examples needs the mask
    `segments[:, :, None] == segments[:, None, :]` (Krell et al. 2021, "Efficient Sequence Packing
    without Cross-contamination", https://arxiv.org/abs/2107.02027).

    The examples of a sequence are assigned to rows once, best-fit decreasing; rows are shuffled in
    each epoch. An example of a stream goes to the first row of the batch that has room for it; if
    none has, the next batch begins. Predictions have the order of rows, not of examples: use
    `padded` to predict.

    Args:
        examples: As for `padded`; all arrays of an example are sequences of one length. Those of a
            sequence are read once, for their lengths, which must not change.
        length: The length of a row.
        batch_size: The number of rows in a batch.
        value: As for `padded`.
        cut: As for `padded`.
        shuffle: Whether the rows are shuffled in each epoch.
        drop_last: As for `padded`.
        seed: As for `padded`.

    Raises:
        DataError: As for `padded`; also if an example is longer than a row, or its arrays have
            different lengths.

    Example:
        >>> source = packed([[1, 2, 3], [4], [5, 6]], length=4, batch_size=2, shuffle=False)
        >>> for part in source.read(epoch=0).take(1).batches:
        ...     print(part[0].tolist())
        [[1, 2, 3, 4], [5, 6, 0, 0]]
        [[1, 1, 1, 2], [1, 1, 0, 0]]
        [[0, 1, 2, 0], [0, 1, 0, 0]]
    """
    length = whole_number("length", length, DataError)
    size = whole_number("batch_size", batch_size, DataError)
    collating = Collating(value, cut, (length,))
    if not is_indexed(examples):
        joined = RowPacker(collating, length, size, drop_last)
        return RaggedStream(_stream(examples, "packed"), joined)
    rows = rows_of(of_all(examples, collating, collating.used), length)
    bucket = Bucket(np.arange(len(rows)), size)
    return RaggedSource(examples, [bucket], collating, shuffle, drop_last, _seed(seed), rows=rows)


def _stream(examples: Any, function: str) -> Source:
    if isinstance(examples, Mapping):
        raise DataError(
            f"{function} takes examples, not a dict of arrays: give a list with a dict or a tuple "
            "for each example, such as list(zip(texts, labels))"
        )
    source = as_source(examples)
    refuse_shards(source, function)
    return source


def _keys(fixed: Any) -> tuple[Any, ...]:
    return (fixed,) if isinstance(fixed, int | str) else tuple(fixed)


def _increasing(name: str, lengths: Any) -> tuple[int, ...]:
    each = lengths if isinstance(lengths, Iterable) else [lengths]
    found = tuple(whole_number(name, length, DataError) for length in each)
    if not found or any(a >= b for a, b in pairwise(found)):
        raise DataError(f"{name} must be lengths from the smallest to the largest, not {found}")
    return found


def _sizes(
    lengths: Sequence[int], batch_size: int | Sequence[int] | None, tokens: int | None
) -> list[int]:
    """Return the number of examples in a batch of each length."""
    if (batch_size is None) == (tokens is None):
        raise DataError("give either batch_size, the examples in a batch, or tokens, its places")
    if tokens is not None:
        tokens = whole_number("tokens", tokens, DataError)
        if tokens < lengths[-1]:
            raise DataError(f"tokens={tokens} is less than one example of length {lengths[-1]}")
        return [tokens // length for length in lengths]
    if not isinstance(batch_size, Sequence | np.ndarray):
        return [whole_number("batch_size", batch_size, DataError)] * len(lengths)
    if len(batch_size) != len(lengths):
        raise DataError(
            f"batch_size has {len(batch_size)} numbers for {len(lengths)} lengths: give one for "
            "each"
        )
    return [whole_number("batch_size", size, DataError) for size in batch_size]


def _seed(seed: int | None) -> int | None:
    return None if seed is None else whole_number("seed", seed, DataError, least=0)
