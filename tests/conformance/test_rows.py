"""Sums over the rows of processes on PyTorch, in one process: the other one has no rows."""

from types import SimpleNamespace
from typing import Any

import keras
import pytest
from keras import ops

import treadle

if keras.config.backend() != "torch":
    pytest.skip("each process computes its rows on PyTorch only", allow_module_level=True)

from treadle.backends.processes.rows import Rows, Seen
from treadle.backends.torch.processes.engine import TorchEngine


@pytest.fixture
def rows() -> Rows:
    """All rows of a batch of one, of which the second process has none."""
    processes: Any = SimpleNamespace(
        size=2, rank=0, is_alone=True, note=lambda x: None, engine=TorchEngine()
    )
    found = Rows(processes, 1, Seen())
    found.total = lambda x: x.detach()  # type: ignore[method-assign]
    return found


def test_a_weighted_mean_in_half_precision_of_many_items(rows: Rows) -> None:
    loss = treadle.weighted(ops.cast(3.0, "float16"), ops.cast(1e5, "float32"))
    shares = rows.shares({"": loss})
    result, _ = rows.reduced(loss, {"": []}, {"": loss.value}, shares)
    assert float(result.value) == 3.0
    assert keras.backend.standardize_dtype(result.value.dtype) == "float16"


def test_weighted_scalars_that_are_no_tensors(rows: Rows) -> None:
    variable = keras.Variable(2.0)
    given = (treadle.weighted(0.5, 3), treadle.weighted(variable, 3), treadle.weighted(7, 3))
    found, _ = rows.reduced(given, {}, {}, {})
    assert [float(x.value) for x in found] == [0.5, 2.0, 7.0]
    # `Accumulator.add(weight=loss.weight)` sums tensors over the processes, and no numbers.
    assert all(ops.is_tensor(x.weight) for x in found)
