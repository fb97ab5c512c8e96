"""`FinalModel`: what is saved at the end of training."""

from types import SimpleNamespace

import keras
import numpy as np

from tests.hook_loop import Loop
from treadle import hooks
from treadle.checkpoint.arrays import read_arrays


class Twice(keras.Model):
    """Keras cannot save it: it does not know how it was made."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.function = keras.layers.Dense(2), function

    def call(self, x):
        return self.function(self.dense(x))


def dense():
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])


def test_final_model_saves_the_model(tmp_path):
    task = SimpleNamespace(model=dense(), critic=dense(), units=3, optimizer=keras.optimizers.SGD())
    loop = Loop(tmp_path, step=5, task=task)
    loop.weights = 7
    hooks.FinalModel().end(loop, None)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["critic.keras", "model.keras", "state.safetensors"]
    assert read_arrays(tmp_path / "state.safetensors") == {"weights": 7}
    loaded = keras.models.load_model(tmp_path / "critic.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], task.critic.get_weights()[0])
    assert loop.warnings == []


def test_final_model_reports_a_model_that_cannot_be_saved(tmp_path):
    odd = Twice(lambda x: x)
    odd(np.zeros((1, 2), np.float32))
    loop = Loop(tmp_path, step=5, task=SimpleNamespace(odd=odd, model=dense()))
    hooks.FinalModel().end(loop, None)
    assert loop.warnings == [
        "odd.keras was not written: Keras cannot save it. Object Twice was created by passing "
        "non-serializable argument values in `__init__()`, and therefore the object must override "
        "`get_config()` in order to be serializable. Please implement `get_config()`. Its weights "
        "are in state.safetensors"
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "state.safetensors"]


def test_final_model_saves_nothing_before_the_first_step_or_without_a_directory(tmp_path):
    task = SimpleNamespace(model=dense())
    hooks.FinalModel().end(Loop(tmp_path, task=task), KeyboardInterrupt())
    hooks.FinalModel().end(Loop(tmp_path, task=task), None)
    hooks.FinalModel().end(Loop(step=5, task=task), None)
    assert list(tmp_path.iterdir()) == []


def test_an_unfinished_run_saves_no_final_model(tmp_path):
    loop = Loop(tmp_path, step=5, task=SimpleNamespace(model=dense()))
    hooks.FinalModel().end(loop, KeyboardInterrupt())
    loop.unfinished = True
    hooks.FinalModel().end(loop, None)
    assert list(tmp_path.iterdir()) == []
    loop.unfinished = False
    hooks.FinalModel().end(loop, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.keras", "state.safetensors"]
