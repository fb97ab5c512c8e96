"""Examples of different lengths: what batches hold, their order, and what is refused."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from treadle.data import as_source, bucketed, from_arrays, packed, padded, sharded
from treadle.data.collating import rows_of
from treadle.data.same_source import is_same_source
from treadle.errors import DataError

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 17, size=200)]
TEXTS = [np.full(n, i) for i, n in enumerate(LENGTHS)]


def batches(source, epoch=0, **how):
    reader, found = source.read(epoch, **how), []
    while (window := reader.take(1)) is not None:
        found.append(window.batch(0))
    return found


def test_padding_keeps_dtypes_structures_and_values():
    examples = [
        {"source": [1, 2], "target": np.ones((3, 2), "float32"), "label": 4},
        {"source": [5], "target": np.zeros((1, 2), "float32"), "label": 6},
    ]
    value = {"source": -1, "target": 9.0, "label": 0}
    (batch,) = batches(padded(examples, 2, value=value, mask=True, shuffle=False))
    assert batch["source"].tolist() == [[1, 2], [5, -1]]
    assert batch["target"].dtype == "float32" and batch["target"].shape == (2, 3, 2)
    assert batch["target"][1].tolist() == [[0, 0], [9, 9], [9, 9]]
    assert batch["label"].tolist() == [4, 6]
    assert batch["mask"].tolist() == [[True, True], [True, False]]
    assert list(batch) == ["source", "target", "label", "mask"]


def test_examples_may_have_their_keys_in_another_order():
    examples = [{"a": [1], "b": [2, 3]}, {"b": [4], "a": [5, 6]}]
    (batch,) = batches(padded(examples, 2, shuffle=False))
    assert batch["a"].tolist() == [[1, 0], [5, 6]] and batch["b"].tolist() == [[2, 3], [4, 0]]


def test_the_batches_before_an_error_of_a_stream_are_read():
    def stream():
        reused = np.empty(2)
        for i in range(5):
            reused[:] = i
            yield reused
        raise KeyError("x")

    reader = padded(stream, 2).read(0)
    assert [reader.take(1).batches[0, :, 0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError) as error:
        reader.take(1)
    assert "while the source was giving batch 6 of epoch 1" in error.value.__notes__


def test_the_length_of_a_batch_is_the_smallest_that_fits_or_the_longest_example():
    lengths = [batch.shape[1] for batch in batches(padded(TEXTS, 4, to=(4, 8, 16)))]
    assert {*lengths} <= {4, 8, 16} and len(lengths) == 50
    free = batches(padded(TEXTS, 4, shuffle=False))
    assert [batch.shape[1] for batch in free] == [max(LENGTHS[i : i + 4]) for i in range(0, 200, 4)]
    rounded = batches(padded(TEXTS, 4, multiple_of=8, mask=True, value=-1))
    assert {tokens.shape[1] for tokens, _ in rounded} == {8, 16}
    assert all(((tokens >= 0) == mask).all() for tokens, mask in rounded)
    (short,) = batches(padded([[1, 2, 3], [4]], 2, to=2, cut=True, shuffle=False))
    assert short.tolist() == [[1, 2], [4, 0]]


@pytest.mark.parametrize("stream", [False, True])
def test_a_batch_of_a_bucket_holds_examples_of_its_lengths_each_once(stream):
    examples = (lambda: iter(TEXTS)) if stream else TEXTS
    source = bucketed(examples, (4, 8, 16), tokens=32, value=-1)
    for epoch in (0, 1):
        found = batches(source, epoch)
        assert source.length in (None, len(found))
        for batch in found:
            size, length = batch.shape
            assert size <= 32 // length
            used = (batch >= 0).sum(axis=1)
            assert ((used > {4: 0, 8: 4, 16: 8}[length]) & (used <= length)).all()
            assert [LENGTHS[i] for i in batch[:, 0]] == used.tolist()
        assert sorted(i for batch in found for i in batch[:, 0]) == list(range(200))


def test_the_order_depends_on_seed_and_epoch_only():
    def order(epoch, run=0, **more):
        found = batches(bucketed(TEXTS, (4, 8, 16), 4, **more), epoch, seed=run)
        return [batch[:, 0].tolist() for batch in found]

    assert order(1) == order(1) != order(2)
    assert order(1, run=3) != order(1)
    assert order(1, run=3, seed=5) == order(1, seed=5) != order(1)
    shapes = [b.shape for b in batches(bucketed(TEXTS, (4, 8, 16), 4, in_a_row=3, drop_last=True))]
    changes = sum(a != b for a, b in pairwise(shapes))
    assert {shape[0] for shape in shapes} == {4} and changes <= len(shapes) // 3 + 3
    in_order = batches(bucketed(TEXTS, (4, 8, 16), 4), ordered=True)
    assert [i for batch in in_order for i in batch[:, 0]] == list(range(200))


@pytest.mark.parametrize("stream", [False, True])
def test_the_lengths_bound_the_number_of_shapes(stream):
    examples = (lambda: iter(TEXTS)) if stream else TEXTS

    def shapes(make, *arguments, **more):
        source = make(examples, *arguments, **more)
        return {batch.shape for epoch in range(2) for batch in batches(source, epoch)}

    full = {(8, 4), (4, 8), (2, 16)}
    assert shapes(bucketed, (4, 8, 16), tokens=32, drop_last=True) == full
    shorter = shapes(bucketed, (4, 8, 16), tokens=32) - full
    assert len({length for _, length in shorter}) == len(shorter) <= 3
    assert shapes(padded, 3, to=16, drop_last=True) == {(3, 16)}


@pytest.mark.parametrize("stream", [False, True])
def test_packed_rows_hold_each_example_once(stream):
    source = packed((lambda: iter(TEXTS)) if stream else TEXTS, 32, 3, value=-1)
    found, rows = [], 0
    for tokens, segments, positions in batches(source):
        assert tokens.shape == segments.shape == positions.shape == (len(tokens), 32)
        rows += len(tokens)
        for row, numbers, places in zip(tokens, segments, positions, strict=True):
            assert ((numbers == 0) == (row == -1)).all()
            for number in range(1, numbers.max() + 1):
                part = row[numbers == number]
                assert len({*part}) == 1 and LENGTHS[part[0]] == len(part)
                assert places[numbers == number].tolist() == list(range(len(part)))
                found.append(part[0])
    assert sorted(found) == list(range(200))
    least = -(-sum(LENGTHS) // 32)
    assert rows <= least * (1.25 if stream else 1.02)


def test_packing_leaves_little_room():
    lengths = np.random.default_rng(1).integers(1, 513, size=2000).tolist()
    rows = rows_of(lengths, 512)
    assert sorted(i for row in rows for i in row) == list(range(2000))
    assert all(sum(lengths[i] for i in row) <= 512 for row in rows)
    assert len(rows) * 512 <= 1.02 * sum(lengths)


def test_a_stream_may_be_without_end():
    def stream():
        while True:
            yield from TEXTS

    source = bucketed(stream, (4, 8, 16), 4)
    assert source.length is None
    reader = source.read(0)
    assert [reader.take(1).count for _ in range(120)] == [1] * 120


@pytest.mark.parametrize("make", [bucketed, padded])
def test_a_stream_is_predicted_in_its_order_and_as_a_whole(make):
    lengths = ((4, 8, 16), 3) if make is bucketed else (3,)
    for examples in (TEXTS, lambda: iter(TEXTS)):
        found = batches(make(examples, *lengths, drop_last=True), ordered=True)
        assert [i for batch in found for i in batch[:, 0]] == list(range(200))


def test_streams_with_other_settings_are_other_data():
    one, other = (bucketed(numbers(), (4, 8), 2, value=value) for value in (0, 9))
    assert not is_same_source(one, other)
    assert is_same_source(one, bucketed(numbers(), (4, 8), 2))


def test_reading_lengths_draws_from_no_global_generator():
    class Drawing(Growing):
        def __getitem__(self, index):
            return np.random.random(2)

    np.random.seed(0)
    bucketed(Drawing(), (4,), 1)
    packed(Drawing(), 4, 1)
    found = np.random.random()
    np.random.seed(0)
    assert np.random.random() == found


def test_lengths_may_be_numpy_integers():
    source = bucketed(TEXTS, np.array([4, 8, 16]), np.int64(4), fixed=())
    assert source.length == bucketed(TEXTS, (4, 8, 16), 4).length
    assert batches(padded(TWO, 2, to=np.int64(4)))[0].shape == (2, 4)


def test_equal_lists_are_the_same_data_and_other_settings_are_not():
    def fingerprint(**how):
        return bucketed(TEXTS, (4, 8, 16), 4, **how).fingerprint

    assert fingerprint() == fingerprint() is not None
    assert len({fingerprint(), fingerprint(value=1), fingerprint(in_a_row=2)}) == 3
    other = [*TEXTS[:-1], TEXTS[-1] + 1]
    assert bucketed(other, (4, 8, 16), 4).fingerprint != fingerprint()
    named = [padded([{a: [1], b: [2]}], 1).fingerprint for a, b in ("ab", "ba")]
    assert named[0] != named[1]
    assert padded(np.array(TEXTS, object), 4).fingerprint is None


def numbers():
    return from_arrays(np.arange(8), batch_size=1)


class Growing:
    """Gives longer examples each time that they are read."""

    def __init__(self):
        self.read = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.read += 1
        return np.ones(2 if self.read <= 2 else 3)


TWO = [[1, 2, 3], [4]]
REFUSED = {
    "unordered": (
        lambda: bucketed(TWO, (4, 2), 1),
        "lengths must be lengths from the smallest to the largest, not (4, 2)",
    ),
    "both": (
        lambda: bucketed(TWO, (4,), 1, tokens=8),
        "give either batch_size, the examples in a batch, or tokens, its places",
    ),
    "few tokens": (
        lambda: bucketed(TWO, (4,), tokens=3),
        "tokens=3 is less than one example of length 4",
    ),
    "sizes": (
        lambda: bucketed(TWO, (2, 4), (1,)),
        "batch_size has 1 numbers for 2 lengths: give one for each",
    ),
    "none": (lambda: padded([], 2), "there are no examples"),
    "no full batch": (
        lambda: padded(TWO, 3, drop_last=True),
        "2 examples make no full batch, and drop_last drops shorter batches: use a smaller "
        "batch_size",
    ),
    "too long": (
        lambda: bucketed(TWO, (1, 2), 1),
        "example 0 has length 3, but the largest is 2: allow larger lengths, or cut longer "
        "examples with cut=True",
    ),
    "too long when read": (
        lambda: batches(padded(TWO, 1, to=2)),
        "example 0 has length 3, but the largest is 2: allow larger lengths, or cut longer "
        "examples with cut=True",
    ),
    "too long in a stream": (
        lambda: batches(packed(lambda: iter(map(np.asarray, TWO)), 2, 1)),
        "example 0 of the epoch has length 3, but the largest is 2: allow larger lengths, or cut "
        "longer examples with cut=True",
    ),
    "ragged list": (
        lambda: bucketed([[[1, 2], [3]]], (4,), 1),
        "example 0: a list of 2 has parts of different lengths, which make no array. If these are "
        "all examples, give one after another, such as list(zip(texts, labels))",
    ),
    "text": (
        lambda: bucketed([{"text": "a"}], (4,), 1),
        "example 0: the array 'text' is a str of dtype <U1: batches are arrays of numbers or "
        "booleans. Encode strings and categories as numbers, pad ragged arrays, and make sparse "
        "arrays dense",
    ),
    "nothing": (
        lambda: bucketed([{}], (4,), 1),
        "example 0 holds no arrays: give arrays, or structures of them",
    ),
    "structures": (
        lambda: batches(padded([{"a": [1]}, {"b": [1]}], 2, shuffle=False)),
        "example 1 and example 0 have different structures: it is a dict with 'a' in one, and a "
        "dict with 'b' in the other",
    ),
    "shapes": (
        lambda: batches(padded([(np.ones((1, 2)),), (np.ones((1, 3)),)], 2, shuffle=False)),
        "the first array has shape (1, 3) and dtype float64 in example 1, but (1, 2) and float64 "
        "in example 0: only the length of a sequence, its first axis, may differ",
    ),
    "fixed": (
        lambda: batches(padded([([1], [1, 2]), ([1], [1])], 2, fixed=[1], shuffle=False)),
        "the second array has shape (1,) and dtype int64 in example 1, but (2,) and int64 in "
        "example 0: only the length of a sequence, its first axis, may differ",
    ),
    "unknown key": (
        lambda: batches(padded([{"a": [1]}], 1, fixed=["b"])),
        "fixed has the key 'b', but the arrays of example 0 have the keys 'a'",
    ),
    "value": (
        lambda: batches(padded([([1], 2)], 1, value=(0,))),
        "value must be a number or have the structure of an example: it is a tuple of 2 in one, "
        "and a tuple of 1 in the other",
    ),
    "value of another dtype": (
        lambda: batches(padded([np.ones(2, "uint8"), np.ones(1, "uint8")], 2, value=-1)),
        "the padding value -1 does not fit the dtype uint8",
    ),
    "NumPy value of another dtype": (
        lambda: batches(padded([np.ones(2, "uint8")], 1, value=np.int64(-1))),
        "the padding value np.int64(-1) does not fit the dtype uint8",
    ),
    "fraction of integers": (
        lambda: batches(padded([[1]], 1, value=0.5)),
        "the padding value 0.5 does not fit the dtype int64",
    ),
    "infinite in half precision": (
        lambda: batches(padded([np.ones(1, "float16")], 1, value=1e6)),
        "the padding value 1000000.0 does not fit the dtype float16",
    ),
    "text as value": (
        lambda: batches(padded([[1]], 1, value="x")),
        "the padding value 'x' does not fit the dtype int64",
    ),
    "empty list": (
        lambda: bucketed([[]], (4,), 1),
        "example 0: an empty list has no dtype: give numpy.zeros(0, dtype), or leave the example "
        "out",
    ),
    "mask of no sequence": (
        lambda: batches(padded([1, 2], 2, mask=True, shuffle=False)),
        "example 0 has no sequence, of which the mask would be: give an array that is not in "
        "fixed, or mask=False",
    ),
    "changed lengths": (
        lambda: batches(packed(Growing(), 4, 1, shuffle=False)),
        "example 1 no longer fits its row: the examples of a sequence must keep the lengths that "
        "they had when packed was called",
    ),
    "torch stream": (
        lambda: padded(torch.utils.data.Dataset(), 1),
        "torch.utils.data.dataset.Dataset has no length or no index: give "
        "torch.utils.data.DataLoader(dataset, batch_size=None), or a generator function",
    ),
    "shards": (
        lambda: padded(sharded(lambda index, count: numbers()), 2),
        "padded cannot combine a source of sharded: combine the sources inside, as in "
        "sharded(lambda shard_index, shard_count: padded(…))",
    ),
    "dict": (
        lambda: padded({"a": [1]}, 2),
        "padded takes examples, not a dict of arrays: give a list with a dict or a tuple for each "
        "example, such as list(zip(texts, labels))",
    ),
    "multiple of given lengths": (
        lambda: padded(TWO, 1, to=4, multiple_of=2),
        "give either to, the lengths of batches, or multiple_of, which rounds them",
    ),
    "multiple of zero": (
        lambda: padded(TWO, 1, multiple_of=0),
        "multiple_of must be at least 1, not 0",
    ),
    "name": (
        lambda: batches(padded([{"mask": [1]}], 1, mask=True)),
        "the examples have an array 'mask' already: rename it, as the batch gets 'mask'",
    ),
    "number in a row": (
        lambda: batches(packed([([1, 2], 3)], 4, 1)),
        "example 0: the second array is no sequence, of which several would be in a row: give one "
        "value for each position, or use treadle.data.padded",
    ),
    "unequal in a row": (
        lambda: batches(packed([([1, 2], [3])], 4, 1)),
        "example 0 has sequences of lengths 2, 1: packed examples need one length",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(DataError) as error:
        make()
    assert str(error.value).replace("\n", " ") == message


def test_a_source_of_examples_may_be_of_any_library():
    import tensorflow as tf
    from torch.utils.data import DataLoader, Dataset

    class Texts(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return {"words": torch.arange(index % 3 + 1), "label": index}

    (batch,) = batches(padded(Texts(), 8, shuffle=False))
    assert batch["words"].shape == (8, 3) and batch["label"].tolist() == list(range(8))
    loader = DataLoader(Texts(), batch_size=None)
    assert [b["words"].shape for b in batches(padded(loader, 4))] == [(4, 3), (4, 3)]
    words = tf.data.Dataset.range(8).map(lambda i: (tf.range(i), i))
    assert [x.shape for x, _ in islice(batches(padded(words, 3)), 2)] == [(3, 2), (3, 5)]
    assert as_source(padded(words, 3)).inexact is None
