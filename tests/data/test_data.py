"""`treadle.data`: what its functions reject, its examples, and what it imports."""

import numpy as np
import pytest

from tests.data_batches import X, Y
from treadle.data import as_source, closed_loop, from_arrays, from_function
from treadle.errors import DataError


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: from_arrays(batch_size=1), r"^from_arrays got no arrays: call it as"),
        (lambda: from_arrays(None, batch_size=1), r"^from_arrays got no arrays: call it as"),
        (
            lambda: from_arrays(X[:0], Y[:0], batch_size=1),
            r"^the first array holds no examples: its shape is \(0, 2\)$",
        ),
        (
            lambda: from_arrays({"x": X, "y": Y[:9]}, batch_size=1),
            r"^the array 'y' has 9 examples, but the array 'x' has 12: all arrays must be of one",
        ),
        (
            lambda: from_arrays(X, (Y, Y[:9]), batch_size=1),
            r"^the array \[1\]\[1\] has 9 examples, but the first array has 12:",
        ),
        (lambda: from_arrays(X, batch_size=0), r"^batch_size must be at least 1, not 0$"),
        (
            lambda: from_arrays(X, batch_size=13, drop_last=True),
            r"^12 examples make no full batch of 13, and drop_last drops shorter batches: use",
        ),
        (lambda: from_arrays(X, batch_size=1, seed=-1), r"^seed must be at least 0, not -1$"),
        (
            lambda: from_arrays(X, batch_size=1, seed=1.5),
            r"^seed must be a whole number, not 1\.5$",
        ),
        (
            lambda: from_arrays(X, np.array(["a"] * 12, object), batch_size=1),
            r"^the second array is a ndarray of dtype object: batches are arrays of numbers",
        ),
        (
            lambda: from_arrays(np.array(["a"]), batch_size=1),
            r"^the batch is a ndarray of dtype <U",
        ),
        (lambda: from_arrays([1, 2], batch_size=1), r"^the first array is a number, not an ar"),
        (lambda: from_function(lambda rng: 0, 0), r"^length must be at least 1, not 0$"),
        (lambda: from_function(lambda rng: 0, 2.0), r"^length must be .*2\.0: write length=2$"),
        (lambda: from_function(lambda rng: 0, 1, seed=-1), r"^seed must be at least 0, not -1$"),
        (lambda: from_function(lambda rng: 0, 1, seed="1"), r"^seed must be .*'1': write seed=1$"),
        (lambda: closed_loop(lambda loop: 0, 0), r"^length must be at least 1, not 0$"),
        (lambda: closed_loop(lambda loop: 0, 1.5), r"^length must be a whole number, not 1\.5$"),
        (
            lambda: closed_loop(lambda loop: 0).read(0).take(1),
            r"^a closed-loop source calls its function with the running loop, but no loop is run",
        ),
        (lambda: as_source([]).read(0).take(1), r"^the source gave no batch in epoch 1: is it emp"),
        (lambda: as_source([None]).read(0).take(1), r"^the source gave None where a batch was exp"),
    ],
)
def test_messages(call, message):
    with pytest.raises(DataError, match=message):
        call()
