"""`from_function` and `closed_loop`: sources that call a function for each batch."""

import numpy as np

from tests.data_batches import View, all_batches
from treadle.data import closed_loop, from_function


def test_function_generators_depend_on_seed_epoch_and_index_alone():
    source = from_function(lambda rng: rng.random(3), 4)
    seen = [all_batches(source, epoch, seed=seed) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(batch) for batches in seen for batch in batches}) == 16
    assert all_batches(source, 1, seed=1) == seen[-1]
    own = from_function(lambda rng: rng.random(3), 4, seed=1)
    assert all_batches(own, 1, seed=0) == seen[-1]


def test_function_never_changes():
    source = from_function(lambda rng: rng.bit_generator.random_raw(2), 2, seed=1)
    assert source.read(3).take(2).batches.tolist() == [
        [11473269591732156432, 9464950590866214932],
        [17766880989420897144, 1344313678706538938],
    ]


def test_a_closed_loop_source_is_called_when_needed_and_never_ahead():
    loop, calls = View(), []

    def act(view):
        assert view is loop
        calls.append(len(calls))
        return np.array(calls[-1:])

    source = closed_loop(act)
    assert source.endless and source.length is None
    assert "checkpoint" in source.inexact
    reader = source.read(0, 3, loop=loop)
    assert calls == []
    for step in range(4):
        window = reader.take(100)
        assert window.count == 1 and window.batches.tolist() == [[step]]
        assert len(calls) == step + 1
    reader.put_back(window)
    assert reader.take(100).batches.tolist() == [[3]]
    assert len(calls) == 4


def test_a_closed_loop_source_with_a_length_has_epochs():
    source = closed_loop(lambda loop: np.zeros(2), length=3)
    assert (source.length, source.endless) == (3, False)
    assert len(all_batches(source, 1, loop=View())) == 3
    assert len(all_batches(source, 1, 2, loop=View())) == 1
