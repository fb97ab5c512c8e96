"""Windows that a graph draws from a `tf.data.Dataset` in one call."""

from collections import namedtuple

import numpy as np
import pytest
import tensorflow as tf
from keras import tree

from tests.data_batches import all_batches
from treadle.data import as_source, reader
from treadle.data.foreign.tensorflow_windows import DatasetIterator
from treadle.errors import DataError

Pair = namedtuple("Pair", ["x", "y"])
NUMBERS = tf.data.Dataset.range(10)

STREAMS = {
    "one tensor": NUMBERS.batch(2),
    "scalars": NUMBERS,
    "short last batch": NUMBERS.batch(4),
    "shapes that change": NUMBERS.map(lambda i: tf.zeros([i // 3 + 1, i // 4])),
    "shapes that change in one component": NUMBERS.map(lambda i: (i, {"x": tf.zeros([i // 4])})),
    "no examples": NUMBERS.map(lambda i: tf.zeros([0, 3])),
    "nested": NUMBERS.map(lambda i: {"b": (i, [i + 1, i]), "a": i}).batch(2),
    "a named tuple": NUMBERS.map(lambda i: Pair(i, -i)).batch(3),
    "dtypes": NUMBERS.map(lambda i: (i > 4, tf.cast(i, tf.bfloat16), tf.cast(i, tf.uint8))),
    "no batch": NUMBERS.take(3).batch(4, drop_remainder=True).concatenate(NUMBERS.batch(2)),
}


def one_by_one(data):
    """Return the batches as TensorFlow yields them, as `all_batches` does."""
    found = []
    for batch in data.as_numpy_iterator():
        leaves = [
            (path, (np.shape(x), str(np.asarray(x).dtype), np.asarray(x).tobytes()))
            for path, x in tree.flatten_with_path(batch)
        ]
        found.append(leaves)
    return found


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("most", [1, 3, 100])
def test_a_window_holds_the_batches_of_the_data_set(name, most):
    found = all_batches(as_source(STREAMS[name]), most=most)
    assert [leaves for _, leaves in found] == one_by_one(STREAMS[name])


@pytest.mark.parametrize("name", STREAMS)
def test_batches_that_are_put_back_come_again(name):
    source = as_source(STREAMS[name])
    expected, again = all_batches(source), source.read(0)
    given = 0
    while (window := again.take(3)) is not None:
        again.put_back(window)
        again.put_back(again.take(1))
        window = again.take(2)
        given += window.count
    assert given == again.given == len(expected)


def test_windows_after_the_first_are_drawn_in_one_call(monkeypatch):
    drawn, stacked = [], DatasetIterator.stacked

    def remembered(self, most, seconds):
        structure, count = stacked(self, most, seconds)
        drawn.append(count)
        return structure, count

    monkeypatch.setattr(DatasetIterator, "stacked", remembered)
    reading = as_source(NUMBERS.batch(1)).read(0)
    assert [reading.take(4).count for _ in range(3)] == [4, 4, 2]
    assert reading.take(4) is None
    assert drawn == [4, 2]


def test_a_window_from_a_slow_data_set_ends_early(monkeypatch):
    monkeypatch.setattr(reader, "DRAWING_SECONDS", -1.0)
    reading = as_source(NUMBERS.batch(2)).read(0)
    assert [reading.take(4).count for _ in range(3)] == [1, 1, 1]


def failing():
    def checked(i):
        with tf.control_dependencies([tf.debugging.assert_less(i, tf.constant(6, tf.int64))]):
            return i * 2

    return NUMBERS.map(checked)


@pytest.mark.parametrize("first", [0, 1, 2, 6])
def test_an_error_comes_after_the_batches_before_it(first):
    reading, found = as_source(failing()).read(0), []
    if first:
        found += reading.take(first).batches.tolist()
    while len(found) < 6:
        found += reading.take(100).batches.tolist()
    assert found == [0, 2, 4, 6, 8, 10]
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            reading.take(100)
    assert raised.value.__notes__ == ["while the source was giving batch 7 of epoch 1"]
    assert reading.given == 6


def test_an_error_of_the_first_batch():
    reading = as_source(failing().skip(6)).read(0)
    with pytest.raises(tf.errors.InvalidArgumentError):
        reading.take(3)


def test_strings_are_rejected_in_any_batch():
    reading = as_source(tf.data.Dataset.from_tensor_slices(["a", "b", "c"])).read(0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^the batch is a bytes of dtype \|S1: batches are"):
            reading.take(2)


def test_python_functions_draw_the_same_numbers_in_windows_of_any_size():
    def drawn():
        return tf.numpy_function(lambda: np.random.rand(), [], tf.float64)

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # else another thread draws ahead
    data = NUMBERS.map(lambda i: drawn()).with_options(options)
    assert all_batches(as_source(data), most=4) == all_batches(as_source(data))


def test_an_endless_data_set_is_read_as_far_as_asked():
    reading = as_source(NUMBERS.batch(4).repeat()).read(0)
    shapes = [reading.take(5).batches.shape for _ in range(6)]
    assert shapes == [(2, 4), (1, 2), (2, 4), (1, 2), (2, 4), (1, 2)]
