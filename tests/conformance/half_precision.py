"""Tasks in half precision: what their tests share."""

from collections.abc import Callable
from typing import Any

import keras
import pytest
from classifier import FEATURES, ROWS, batches
from executions import long_to_compile

import treadle
from treadle import data

EAGER = treadle.Options(execution="eager")
BATCHES = list(zip(*batches(7), strict=True))
EXECUTIONS = pytest.mark.parametrize(
    "options",
    [pytest.param(None, id="compiled"), pytest.param(EAGER, id="eager", marks=long_to_compile)],
)


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    keras.config.set_dtype_policy("float32")


def half(make: Callable[[], Any]) -> Any:
    """A task whose layers compute in float16, from the same start each time."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    return make()


def full(make: Callable[[], Any]) -> Any:
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    return make()


def source(batch_size: int = ROWS) -> Any:
    x, y = batches(6)
    return data.from_arrays(
        x.reshape(-1, FEATURES), y.reshape(-1), batch_size=batch_size, shuffle=False
    )


def loop_of(task: Any, **kwargs: Any) -> treadle.Loop:
    return treadle.Loop(task, console=False, **kwargs)
