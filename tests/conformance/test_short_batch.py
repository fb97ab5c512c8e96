"""A short batch between full ones: a window of its own, of the same steps."""

from typing import Any

import keras
import numpy as np
import pytest
from classifier import Classifier, batches, dense, head
from executions import long_to_compile

import treadle
from treadle.testing import compiled_equals_eager, fused_equals_unfused, run_steps

SHORT = 3


def make() -> treadle.Task:
    return Classifier(
        [dense(), keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=1), head()],
        keras.optimizers.Adam(1e-2),
    )


def two_epochs() -> list[Any]:
    """Of three batches each, the last of them short."""
    x, y = batches(6)
    return [(x[i, :SHORT], y[i, :SHORT]) if i % 3 == 2 else (x[i], y[i]) for i in range(len(x))]


@pytest.mark.parametrize(
    "windows", [(6,), *(pytest.param(x, marks=long_to_compile) for x in ((2,), (3,)))]
)
def test_windows_end_at_it_and_change_no_bit(windows: tuple[int, ...]) -> None:
    fused_equals_unfused(make, two_epochs(), partitions=(windows,))


@long_to_compile
def test_compiled_is_close_to_eager() -> None:
    compiled_equals_eager(make, two_epochs())


@pytest.mark.parametrize("form", [(0,), ()])
def test_scalars_and_empty_trailing_dimensions_travel(form: tuple[int, ...]) -> None:
    class Adds(treadle.Task):
        def __init__(self) -> None:
            self.total = keras.Variable(0.0)

        def train_step(self, batch: Any) -> Any:
            self.total.assign_add(batch["x"] + keras.ops.sum(batch["empty"]))
            return {"total": self.total.value}

    given = [{"x": np.float32(i), "empty": np.zeros(form, "float32")} for i in range(4)]
    trace = run_steps(Adds(), given, windows=(3,))
    assert trace.values["total"].tolist() == [0, 1, 3, 6]
