"""Arrays that are changed in place while a source holds them."""

import keras
import numpy as np
import pytest
from executions import EXECUTIONS

import treadle


class Mean(treadle.Task):
    """Returns the mean of a batch from each step."""

    def __init__(self):
        self.count = keras.Variable(0.0)

    def train_step(self, batch):
        self.count.assign_add(1.0)
        return {"mean": keras.ops.mean(batch)}

    def eval_step(self, batch):
        return {"mean": keras.ops.mean(batch)}

    def predict_step(self, batch):
        return batch


def test_the_arrays_of_a_source_are_read_only():
    whole = np.zeros((8, 1), "float32")
    kept, given = whole[4:], whole[:4]
    treadle.data.from_arrays({"x": given, "none": None}, batch_size=2)
    for array in (given, whole):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1
    kept[:] = 1  # other rows of the same memory, through a view from before


def test_a_second_source_of_the_same_arrays_has_writable_views_too():
    whole = np.zeros((8, 1), "float32")
    sources = [treadle.data.from_arrays(part, batch_size=2) for part in (whole, whole, whole[:4])]
    assert all(source.arrays.flags.writeable for source in sources)  # PyTorch would copy others
    assert all(np.shares_memory(source.arrays, whole) for source in sources)
    assert not whole.flags.writeable
    fixed = np.broadcast_to(np.float32(1), (4, 1))  # which may not become writable
    treadle.data.from_arrays(np.asarray(keras.ops.ones((4, 1))), fixed, batch_size=2)


@EXECUTIONS
def test_changing_arrays_are_read_for_each_batch(execution):
    x = np.zeros((8, 1), "float32")
    source = treadle.data.from_arrays(x, batch_size=2, changing=True)

    def add_one(loop):
        x[:] += 1

    hooks = [treadle.every("1 epoch", add_one)]
    options = treadle.Options(execution=execution)
    loop = treadle.Loop(Mean(), hooks=hooks, options=options, console=False)
    history = loop.fit(source, source, epochs=3)
    assert history["mean"] == [0, 1, 2] and history["val_mean"] == [0, 1, 2]
    assert loop.evaluate(source) == {"mean": 3}
    assert loop.predict(source).tolist() == [[3]] * 8
    x[:] = 9
    assert loop.fit(source, epochs=1)["mean"][-1] == 9
    assert treadle.Loop(Mean(), console=False).evaluate(source) == {"mean": 10}
