"""`from_arrays`: order, seeds, short last batches, and indices."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.data_batches import X, Y, all_batches
from treadle.data import arrays, as_source, from_arrays


def test_shuffled_epochs_hold_every_example_once_in_another_order():
    source = from_arrays(X, Y, batch_size=5)
    orders = []
    for epoch in range(3):
        reader, seen = source.read(epoch, seed=1), []
        while (window := reader.take(9)) is not None:
            x, y = window.batches
            assert np.array_equal(x[..., 0], 2 * y)  # both indexed alike
            assert x.dtype == np.float32 and y.dtype == Y.dtype
            seen += y.ravel().tolist()
        assert sorted(seen) == list(range(12))
        orders.append(seen)
    assert len({tuple(order) for order in orders}) == 3


def test_short_last_batch_is_a_window_of_its_own():
    reader = from_arrays(Y, batch_size=5, shuffle=False).read(0)
    first, last = reader.take(9), reader.take(9)
    assert first.batches.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert (first.count, first.examples) == (2, 5)
    assert last.batches.tolist() == [[10, 11]]
    assert (last.count, last.examples) == (1, 2)
    assert reader.take(9) is None


def test_short_last_batch_is_dropped_on_request():
    source = from_arrays(Y, batch_size=5, drop_last=True)
    assert source.length == 2
    assert len(all_batches(source)) == 2
    assert from_arrays(Y, batch_size=4, drop_last=True).length == 3


def test_batch_examples_and_length():
    assert from_arrays(Y, batch_size=5).batch_examples == 5
    assert from_arrays(Y, batch_size=50).batch_examples == 12
    assert from_arrays(Y, batch_size=50).length == 1


def test_structures_and_sample_weights():
    weights = np.linspace(0, 1, 12)
    window = from_arrays(X, Y, weights, batch_size=4).read(0).take(3)
    x, y, w = window.batches
    assert (x.shape, y.shape, w.shape) == ((3, 4, 2), (3, 4), (3, 4))
    assert w.dtype == np.float64 and np.allclose(w, y / 11)
    window = from_arrays({"x": X, "y": None}, Y, batch_size=4).read(0).take(2)
    (features, labels) = window.batches
    assert features["y"] is None and features["x"].shape == (2, 4, 2) and labels.shape == (2, 4)
    assert window.examples == 4


def test_seeds_of_run_and_source():
    run = from_arrays(Y, batch_size=12)
    own = from_arrays(Y, batch_size=12, seed=3)
    assert all_batches(run, seed=1) != all_batches(run, seed=2)
    assert all_batches(own, seed=1) == all_batches(own, seed=2) == all_batches(run, seed=3)


def test_ordered_reading_is_as_stored():
    source = from_arrays(Y, batch_size=5)
    assert all_batches(source, ordered=True) == all_batches(
        from_arrays(Y, batch_size=5, shuffle=False)
    )


def test_indices_are_those_of_the_windows():
    source = from_arrays(X, Y, batch_size=5)
    assert np.shares_memory(source.arrays[1], Y)
    for start in range(4):
        indices = source.indices(2, start, 4, seed=7)
        window = source.read(2, start, seed=7).take(4)
        if window is None:
            assert indices.shape == (0, 5)
        else:
            assert np.array_equal(source.arrays[1][indices], window.batches[1])
    assert source.indices(0, 0, 9, ordered=True).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_windows_do_not_share_memory_with_the_arrays():
    stored = np.zeros((4, 2))
    for source in (from_arrays(stored, batch_size=2, shuffle=False), as_source([stored])):
        source.read(0).take(1).batches[:] = 1
    assert not stored.any()


def test_tensors_and_memory_maps_as_arrays(tmp_path):
    import tensorflow as tf
    import torch

    mapped = np.memmap(tmp_path / "x", np.float32, "w+", shape=(4, 2))
    mapped[:] = 3
    batches = from_arrays(
        mapped, torch.ones(4), tf.constant([1, 2, 3, 4]), batch_size=4, shuffle=False
    )
    x, ones, numbers = batches.read(0).take(1).batches
    assert (x == 3).all() and (ones == 1).all() and numbers.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_pages_of_mapped_arrays_are_released_and_their_values_stay(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(arrays, "MAPPED_BYTES", 1)
    np.save(tmp_path / "x.npy", np.arange(24.0).reshape(12, 2))
    mapped = np.load(tmp_path / "x.npy", mmap_mode=mode)
    expected = np.array(mapped)
    if mode != "r":
        mapped[3] = expected[3] = 7.0  # with "c" in this process only
    source = from_arrays(mapped[:, ::-1], batch_size=4, shuffle=False)  # a view of the map
    for _ in range(2):
        reader = source.read(0)
        found = [reader.take(1).batch(0) for _ in range(3)]
        np.testing.assert_array_equal(np.concatenate(found), expected[:, ::-1])


@pytest.mark.skipif(sys.platform != "linux", reason="reads resident memory from /proc")
@pytest.mark.long
def test_reading_a_mapped_array_holds_few_of_its_pages(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "MAPPED_BYTES", 16 * 2**20)
    rows = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.uint8, (2**15, 2**11))  # 64 MiB
    del rows
    source = from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), batch_size=64)

    def resident():
        """Return the bytes of all mapped files: a list of each map would take long."""
        text = Path("/proc/self/status").read_text()
        return int(re.search(r"RssFile:\s+(\d+) kB", text)[1]) * 1024

    reader, before, most = source.read(0), resident(), 0
    while reader.take(1) is not None:
        most = max(most, resident() - before)
    assert 4 * 2**20 < most < 32 * 2**20
