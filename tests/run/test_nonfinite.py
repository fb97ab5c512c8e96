"""NaN and infinity in weights and results are detected and named."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, head
from keras import ops
from mistakes import arrays, source

import treadle
from treadle import data
from treadle.backends.base import active
from treadle.errors import NonFiniteError
from treadle.steps.state import State


class Ruined(Classifier):
    """A classifier of which one step makes a weight NaN while every loss stays a number."""

    def __init__(self, step: int, value: float = float("nan"), **state: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), keras.layers.Dense(4), head()])
        self.step, self.value = step, value
        vars(self).update(state)

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        kernel = self.model.layers[0].kernel
        ruins = treadle.step() == self.step - 1
        corner = np.zeros(kernel.shape, bool)
        corner[:2, :1] = True
        kept = ops.convert_to_tensor(kernel)
        kernel.assign(ops.where(ops.logical_and(ruins, corner), self.value, kept))
        return logs


def loop_of(task: Any, *args: Any, **kwargs: Any) -> treadle.Loop:
    return treadle.Loop(task, *args, console=False, **kwargs)


def relu_hides_nan() -> bool:
    """Return whether a layer with relu returns numbers for NaN, when it runs as a graph."""
    layer = keras.layers.Dense(8, activation="relu")
    layer.build((8, 6))
    call: Any = layer
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf

        call = tf.function(layer)  # which fuses the layer's operations on some processors
    outputs = call(keras.ops.convert_to_tensor(np.full((8, 6), np.nan, "float32")))
    return not np.isnan(keras.ops.convert_to_numpy(outputs)).any()


def test_weights_ruined_by_the_data_end_the_run(tmp_path: Path) -> None:
    """The case itself: relu hides NaN on TensorFlow on some processors, else the loss is NaN."""
    x, y = arrays()
    x[35, 1] = np.nan
    moving = keras.optimizers.SGD(0.1, momentum=0.9)
    task = Classifier([keras.layers.Dense(8, activation="relu"), head()], moving)
    graph = treadle.Options(jit=False)  # XLA hides nothing
    with pytest.raises(NonFiniteError) as caught, loop_of(task, tmp_path, options=graph) as loop:
        loop.fit(data.from_arrays(x, y, batch_size=8, shuffle=False), epochs=1)
    told = (
        "model/layers/0/kernel holds 8 of 48 values that are not finite (and 1 more variable "
        "does), since some step from 1 to 5, although every step returned finite values. The batch "
        "of step 5 held some already: the first array, row 3. Fix or remove these rows (numbered "
        "within the batch)"
    )
    assert (
        told if relu_hides_nan() else "The batch held it already: the first array, row 3"
    ) in str(caught.value)
    assert not (tmp_path / "state.safetensors").exists()


def message_of(how: Any, task: Any, **kwargs: Any) -> str:
    with pytest.raises(NonFiniteError) as caught, loop_of(task, **kwargs) as loop:
        how(loop)
    return str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_are_checked_at_the_end_of_an_epoch(value: float, tmp_path: Path) -> None:
    # Ruined by the last step of the second epoch, so that no later loss shows it.
    task = Ruined(10, value)
    text = message_of(lambda loop: loop.fit(source(), epochs=3), task, directory=tmp_path)
    assert text == (
        "model/layers/0/kernel holds 2 of 24 values that are not finite, since some step from 6 to "
        "10, although every step returned finite values. Look for such values in the data, as with "
        "numpy.isfinite(x).all(); if there are none, lower the learning rate, or clip gradients "
        "(clipnorm=1.0 in the optimizer). To inspect the step: "
        f"print(treadle.doctor.replay(task, train, {str(tmp_path)!r}, "
        "bisect='not isfinite(model/layers/0/kernel)'))"
    )
    assert not (tmp_path / "state.safetensors").exists()
    assert not (tmp_path / "model.keras").exists()


def test_weights_are_checked_when_a_call_ends_within_an_epoch() -> None:
    for how in (
        lambda loop: loop.fit(source(), steps=3),
        lambda loop: [logs for _, logs in zip(range(3), loop.steps(source()), strict=False)],
    ):
        assert "since some step from 1 to 3" in message_of(how, Ruined(3))


def test_weights_are_checked_when_the_with_block_ends(tmp_path: Path) -> None:
    def left(loop: Any) -> None:
        for logs in loop.steps(source()):
            if logs.step == 2:
                break

    text = message_of(left, Ruined(2), directory=tmp_path)
    assert "since some step from 1 to 2" in text
    assert not (tmp_path / "state.safetensors").exists()


def test_the_run_may_stop_instead(tmp_path: Path) -> None:
    guard = treadle.hooks.NonFinite(action="stop")
    with loop_of(Ruined(5), tmp_path, hooks=[guard]) as loop:
        loop.fit(source(), epochs=3)
    assert loop.progress.step == 5
    assert str(loop.reason).startswith("model/layers/0/kernel holds 2 of 24 values")

    with loop_of(Ruined(2), hooks=[treadle.hooks.NonFinite(action="stop")]) as loop:
        for logs in loop.steps(source()):
            if logs.step == 2:
                break
    assert str(loop.history["warning"][0]).startswith("model/layers/0/kernel holds 2 of 24")


def test_variables_of_every_float_dtype_are_checked() -> None:
    for dtype in ("float32", "bfloat16"):
        values = [[1.0, 2.0], [1.0, np.nan], [np.inf, -np.inf]]
        variables = [keras.Variable(value, dtype=dtype) for value in values]
        assert list(active().finite(variables)) == [True, False, False]
        assert list(active().finite([])) == []


def test_a_variable_that_was_infinite_from_the_start_is_allowed() -> None:
    best = keras.Variable(float("inf"), trainable=False)
    with loop_of(Ruined(0, best=best)) as loop:
        loop.fit(source(), epochs=2)
    assert loop.progress.step == 10


def test_nonfinite_results_of_evaluations_are_warned_of_once() -> None:
    class Measures(Ruined):
        def eval_step(self, batch: Any) -> Any:
            return {"loss": super().eval_step(batch)["loss"], "ratio": ops.mean(batch[0]) / 0.0}

    with loop_of(Measures(0)) as loop:
        history = loop.fit(source(), validation=source(), epochs=3)
    assert np.isinf(history["val_ratio"]).all() or np.isnan(history["val_ratio"]).all()
    assert history["warning"] == [
        f"val_ratio is {history['val_ratio'][0]} after step 5, epoch 1, batch 5: look for values "
        "that are not finite in the data it was computed on, and check the step or metric that "
        "computed it"
    ]


def test_at_the_end_of_an_epoch_the_task_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    original = State.discover
    with loop_of(Ruined(0)) as loop:

        def counted(task: Any) -> State:
            searched.append(loop.progress.epoch)
            return original(task)

        monkeypatch.setattr(State, "discover", counted)
        loop.fit(source(), epochs=4)
        assert searched and set(searched) <= {0, 4}
        assert loop.view.known_state.variables.keys() == loop.state.variables.keys()
