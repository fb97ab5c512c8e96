"""What a loop cannot mean is refused at once, and the message says what to write."""

from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.errors import ConfigurationError, DataError


class Mine(treadle.Task):
    def train_step(self, batch: Any) -> Any:
        return {"mean": keras.ops.mean(batch)}


def fit(**how: Any) -> Any:
    return treadle.Loop(Mine(), console=False).fit([np.ones(2)], **how)


def loop(**how: Any) -> Any:
    return treadle.Loop(Mine(), console=False, **how)


def dense() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="net")


EVERY = treadle.every("1 step", lambda loop: None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: treadle.Loop(Mine),
            r"got the class Mine: pass an instance, treadle\.Loop\(Mine\(\)\)",
        ),
        (
            lambda: treadle.Loop(dense()),
            r"got a Keras model \(Sequential 'net'\): write treadle.Loop\(treadle.Supervised\(",
        ),
        (lambda: treadle.Loop(object()), r"got a object, which has no train_step: inherit from"),
        (lambda: treadle.Loop("mine.py"), r"got 'mine.py', which has no train_step"),
        (lambda: loop(options={"window": 8}), r"not a dict: write options=treadle.Options\("),
        (lambda: loop(hooks=EVERY), r"a list, not one Scheduled: write hooks=\[…\] around it"),
        (lambda: loop(hooks=treadle.hooks.NonFinite()), r"not one NonFinite: write hooks=\[…\]"),
        (lambda: loop(hooks=print), r"hooks must be a list, not a builtin_function"),
        (lambda: loop(hooks=[print]), r"is not a hook: schedule a function"),
        (lambda: fit(epochs=1.5), r"^epochs must be a whole number, not 1\.5$"),
        (lambda: fit(epochs=2.0), r"^epochs must be a whole number, not 2\.0: write epochs=2$"),
        (lambda: fit(epochs="2"), r"^epochs must be a whole number, not '2': write epochs=2$"),
        (lambda: fit(steps=True), r"^steps must be a whole number, not True$"),
        (lambda: fit(steps=-1), r"^steps must be at least 1, not -1$"),
        (lambda: next(loop().epochs("3")), r"^epochs must be a whole number, not '3'"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call()


@pytest.mark.parametrize("size", [32.0, "32", None])
def test_a_batch_size_is_a_whole_number(size: Any) -> None:
    message = r"^batch_size must be a whole number, not [\w.']+(: write batch_size=32)?$"
    with pytest.raises(DataError, match=message):
        treadle.data.from_arrays(np.ones(64), batch_size=size)
    assert treadle.data.from_arrays(np.ones(64), batch_size=np.int64(32)).length == 2


def test_numpy_s_whole_numbers_count() -> None:
    assert fit(epochs=np.int32(2)).steps("mean").tolist() == [1, 1]
