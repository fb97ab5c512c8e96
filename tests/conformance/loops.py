"""A task with all kinds of state, its data and its loop: what the tests of the loop share."""

from typing import Any

import keras
import numpy as np
from classifier import Classifier, dense, head, labelled

import treadle
from treadle import data

ROWS = 44  # 5 batches of 8 and a short one of 4


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return labelled(ROWS, seed)


def source(seed: int = 0, rows: int = ROWS, **kwargs: Any) -> Any:
    x, y = arrays(seed)
    return data.from_arrays(x[:rows], y[:rows], batch_size=8, **kwargs)


class WithEverything(Classifier):
    """Dropout and BatchNorm, so that whatever validation touched would show."""

    def __init__(self) -> None:
        super().__init__(
            [
                dense(),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dropout(0.3, seed=4),
                head(),
            ],
            keras.optimizers.Adam(1e-2),
        )


def make(task: Any = WithEverything) -> Any:
    keras.utils.set_random_seed(0)
    return task()


def loop_of(task: Any = None, **kwargs: Any) -> treadle.Loop:
    return treadle.Loop(task or make(), console=False, **kwargs)


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)
