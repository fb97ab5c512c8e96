"""Windows of batches: reading from any position, where they end, and errors."""

import gc
import random

import numpy as np
import pytest

from tests.data.test_combine import SEEKING as COMBINED
from tests.data_batches import X, Y, all_batches, one
from treadle.data import as_source, from_arrays, from_function
from treadle.data.source import Source
from treadle.errors import DataError

SEEKING = {
    "one array": lambda: from_arrays(X, batch_size=5),
    "a pair": lambda: from_arrays(X, Y, batch_size=4),
    "a pair in order": lambda: from_arrays(X, Y, batch_size=5, shuffle=False),
    "last one dropped": lambda: from_arrays(X, Y, batch_size=5, drop_last=True),
    "larger batch than data": lambda: from_arrays(X, Y, batch_size=50),
    "nested, with None": lambda: from_arrays({"a": X, "b": (Y, None)}, batch_size=3),
    "a seed of its own": lambda: from_arrays(X, batch_size=5, seed=9),
    "function": lambda: from_function(lambda rng: {"z": rng.normal(size=(2, 3))}, 7),
    "function with structure": lambda: from_function(lambda rng: (rng.random(2), None), 4, seed=1),
    "list": lambda: as_source([(X[i : i + 5], Y[i : i + 5]) for i in range(0, 12, 5)]),
    "drawing from global states": lambda: as_source(Drawing()),
    **COMBINED,
}


class Drawing:
    """Indexed, without `__iter__`; draws from the global random states."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.array([random.random(), np.random.rand(), index])


@pytest.mark.parametrize("name", SEEKING)
def test_reading_from_k_equals_skipping_k(name):
    source = SEEKING[name]()
    assert isinstance(source, Source)
    assert source.inexact is None and not source.endless
    for epoch in (0, 3):
        expected = all_batches(SEEKING[name](), epoch, seed=5)
        assert len(expected) == source.length > 0
        for start in range(source.length + 1):
            assert all_batches(source, epoch, start, seed=5) == expected[start:]
            assert all_batches(SEEKING[name](), epoch, start, most=3, seed=5) == expected[start:]


@pytest.mark.parametrize("name", SEEKING)
@pytest.mark.parametrize("most", [2, 3, 100])
def test_windows_of_any_size_hold_the_same_batches(name, most):
    source = SEEKING[name]()
    assert all_batches(source, 1, most=most) == all_batches(source, 1)


@pytest.mark.parametrize("name", SEEKING)
@pytest.mark.parametrize("most", [1, 2, 5])
def test_returned_batches_are_read_again(name, most):
    source = SEEKING[name]()
    expected = all_batches(source, 2)
    reader, found = source.read(2), []
    while (window := reader.take(4)) is not None:
        reader.put_back(window)
        window = reader.take(most)
        found += [one(window, i) for i in range(window.count)]
    assert found == expected
    reader = source.read(2)
    for batch in expected:
        reader.put_back(reader.take(3))
        assert one(reader.take(1), 0) == batch


@pytest.mark.parametrize("name", SEEKING)
def test_beyond_the_end_is_an_error_and_the_end_is_not(name):
    source = SEEKING[name]()
    assert source.read(0, source.length).take(1) is None
    for epoch in (0, 2):
        with pytest.raises(DataError, match=rf"^epoch {epoch + 1} has {source.length} batches, b"):
            source.read(epoch, source.length + 1)


@pytest.mark.parametrize("name", SEEKING)
@pytest.mark.parametrize("ordered", [False, True])
def test_views_of_a_window_are_its_batches(name, ordered):
    window = SEEKING[name]().read(0, ordered=ordered).take(3)
    batches = [window.batch(i) for i in range(window.count)]
    np.testing.assert_equal(list(window.views()), batches)


def test_consecutive_rows_are_views_without_copies():
    window = from_arrays(X, batch_size=5).read(0, ordered=True).take(2)
    assert all(np.shares_memory(view, X) for view in window.views())
    assert not np.shares_memory(window.batch(0), X)


def test_windows_end_where_the_form_changes():
    forms = [np.zeros(2), np.ones(2), np.ones(3), np.ones(3, np.int32), (np.ones(3),), (None,)]
    reader, counts = as_source(forms).read(0), []
    while (window := reader.take(10)) is not None:
        counts.append(window.count)
    assert counts == [2, 1, 1, 1, 1]


def test_leaves_of_every_kind():
    import jax.numpy as jnp
    import ml_dtypes
    import tensorflow as tf
    import torch

    batch = {
        "bool": True,
        "half": torch.ones(2, dtype=torch.bfloat16),
        "grad": torch.ones(2, requires_grad=True),
        "jax": jnp.ones(2),
        "tuple": (1, 2.5),
        "none": None,
        "numpy": np.float32(3),
        "tf": tf.ones(2),
    }
    window = as_source([batch, batch]).read(0).take(2)
    found = window.batches
    assert window.count == 2 and window.examples == 2  # scalars do not count
    assert found["none"] is None
    assert found["half"].dtype == ml_dtypes.bfloat16 and (found["half"] == 1).all()
    assert [leaf.tolist() for leaf in found["tuple"]] == [[1, 1], [2.5, 2.5]]
    for name in ("grad", "jax", "tf", "numpy"):
        assert found[name].dtype == np.float32
    assert found["bool"].dtype == np.bool_


def test_arrays_that_are_refilled_are_copied_in_time():
    def refilling():
        buffer = np.zeros(2)
        for i in range(4):
            buffer[:] = i
            yield buffer

    window = as_source(refilling).read(0).take(4)
    assert window.batches[:, 0].tolist() == [0, 1, 2, 3]


def test_exceptions_of_the_source_keep_their_traceback_and_say_where():
    def breaking(start):
        for i in range(start, 9):
            if i == 6:
                raise RuntimeError("disk gone")
            yield np.zeros(2)

    class Breaking(Drawing):
        def __getitem__(self, index):
            return next(breaking(index + 4))

    for data, good in ((lambda: breaking(0), 6), (Breaking(), 2)):
        reader = as_source(data).read(1)
        assert reader.take(9).count == good  # what came before it can be trained on
        for _ in range(2):
            with pytest.raises(RuntimeError, match="disk gone") as caught:
                reader.take(9)
            note = f"while the source was giving batch {good + 1} of epoch 2"
            assert caught.value.__notes__ == [note]
            assert caught.traceback[-1].name == "breaking"


def test_stopping_inside_a_batch_does_not_end_the_epoch():
    source = from_function(lambda rng: next(iter(())), 3)
    with pytest.raises(RuntimeError, match="StopIteration"):
        source.read(0).take(1)


def test_bad_leaves_name_batch_and_path():
    reader = as_source([{"text": np.zeros(1)}, {"text": "a"}]).read(0)
    assert reader.take(2).count == 1
    with pytest.raises(DataError, match=r"^the array 'text' is a str of dtype <U1:") as caught:
        reader.take(2)
    assert caught.value.__notes__ == ["while the source was giving batch 2 of epoch 1"]


def test_global_random_states_are_left_alone_and_keyed():
    import torch

    def drawing():
        for _ in range(4):
            yield np.array([random.random(), np.random.rand(), torch.rand(()).item()])

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    before = states()
    expected = all_batches(as_source(drawing), 1)
    assert states() == before
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert all_batches(as_source(drawing), 1, most=4) == expected
    assert all_batches(as_source(drawing), 1, start=2) == expected[2:]
    assert all_batches(as_source(drawing), 2) != expected
    assert all_batches(as_source(drawing), 1, seed=1) != expected


def test_closing_a_reader_closes_the_generator():
    closed_at = []

    def stream():
        try:
            for i in range(9):
                yield np.array(i)
        finally:
            closed_at.append(i)

    reader = as_source(stream).read(0)
    reader.close()  # nothing was opened yet
    reader.take(2)
    reader.close()
    assert closed_at == [1]
    gc.collect()
