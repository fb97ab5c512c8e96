"""Tasks and runs that the tests of mistakes share."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, dense, head, labelled

import treadle
from treadle import data
from treadle.errors import TreadleError

ROWS = 40


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    return labelled(ROWS, seed)


def source() -> Any:
    return data.from_arrays(*arrays(), batch_size=8)


class Does(Classifier):
    """A classifier that does something of the test's own after each step of learning."""

    def __init__(self, action: Callable[..., Any], **state: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.action = action
        vars(self).update(state)

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        self.action(self, batch, logs["loss"])
        return logs


def told(
    kind: type[TreadleError], task: Any, options: treadle.Options | None = None, train: Any = None
) -> str:
    """The message that training ends with."""
    with pytest.raises(kind) as caught, treadle.Loop(task, options=options, console=False) as loop:
        loop.fit(source() if train is None else train, epochs=1)
    assert type(caught.value) is kind
    return str(caught.value)


def raised(task: Any, train: Any = None, options: treadle.Options | None = None) -> Exception:
    """What training ends with."""
    with (
        pytest.raises(Exception) as caught,
        treadle.Loop(task, options=options, console=False) as loop,
    ):
        loop.fit(source() if train is None else train, epochs=1)
    assert not isinstance(caught.value, TreadleError)
    return caught.value
