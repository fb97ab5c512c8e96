"""`loop.predict`: what it returns, and that it changes and holds nothing more."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from tests.forked import python
from treadle import data
from treadle.errors import StepError

X = np.random.default_rng(0).normal(size=(44, 6)).astype("float32")


class Predicts(treadle.Task):
    """A task whose `predict_step` is given."""

    def __init__(self, predict: Any) -> None:
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        self.count = keras.Variable(0.0, trainable=False)
        self.predict = predict

    def predict_step(self, batch: Any) -> Any:
        return self.predict(self, batch)


def loop_of(predict: Any, **options: Any) -> treadle.Loop:
    keras.utils.set_random_seed(0)
    return treadle.Loop(Predicts(predict), console=False, options=treadle.Options(**options))


def forward(task: Any, x: Any) -> Any:
    return task.model(x, training=False)


def in_batches(size: int) -> list[np.ndarray]:
    return [X[start : start + size] for start in range(0, len(X), size)]


def expected(loop: treadle.Loop, size: int = 8) -> Any:
    """Return the predictions of the model itself, batch by batch."""
    parts = [ops.convert_to_numpy(loop.task.model(x, training=False)) for x in in_batches(size)]
    return np.concatenate(parts)


def generated() -> Any:
    def batches() -> Iterator[np.ndarray]:
        yield from in_batches(8)

    return batches


SOURCES = {
    "arrays, the last batch short": lambda: data.from_arrays(X, batch_size=8),
    "arrays, more batches than run in one call": lambda: data.from_arrays(X, batch_size=1),
    "a list of batches": lambda: in_batches(8),
    "a generator": generated,
    "the first batch short": lambda: [X[:4], *(X[i : i + 8] for i in range(4, 44, 8))],
}


@pytest.mark.parametrize("name", SOURCES)
def test_predictions_are_those_of_the_model_in_the_order_of_the_data(name: str) -> None:
    with loop_of(forward) as loop:
        for _ in range(2):
            found = loop.predict(SOURCES[name]())
            np.testing.assert_allclose(found, expected(loop), rtol=1e-5, atol=1e-6)
            assert found.dtype == np.float32 and found.flags.writeable


@pytest.mark.parametrize("data_on_device", [True, False])
def test_predictions_are_those_of_a_network_with_convolutions(data_on_device: bool) -> None:
    """They run in another way on JAX: convolutions are slow in a loop."""

    def convolved(task: Any, x: Any) -> Any:
        return ops.conv(x[..., None], ops.ones((3, 1, 2)), padding="same")

    with loop_of(convolved, data_on_device=data_on_device) as loop:
        found = loop.predict(data.from_arrays(X, batch_size=8))
    around = np.pad(X, ((0, 0), (1, 1)))
    sums = around[:, :-2] + around[:, 1:-1] + around[:, 2:]
    np.testing.assert_allclose(found, np.stack([sums, sums], axis=-1), rtol=1e-5, atol=1e-6)


def test_predictions_do_not_share_memory_with_the_data() -> None:
    for source in (data.from_arrays(X, batch_size=8), in_batches(8)):
        with loop_of(lambda task, x: x) as loop:
            found = loop.predict(source)
        assert not np.shares_memory(found, X)
        np.testing.assert_array_equal(found, X)


def test_predictions_of_more_rows_than_the_first_batch_are_joined() -> None:
    def doubled(task: Any, x: Any) -> Any:
        return ops.concatenate([x, x]) if x.shape[0] == 4 else x

    with loop_of(doubled) as loop:
        found = loop.predict(data.from_arrays(X, batch_size=8))
    np.testing.assert_array_equal(found, np.concatenate([X, X[-4:]]))


def test_predictions_without_a_first_axis_are_rejected() -> None:
    message = "predict_step returned an output without an axis: the outputs of all batches are"
    with loop_of(lambda task, x: ops.sum(x)) as loop, pytest.raises(StepError, match=message):
        loop.predict(data.from_arrays(X, batch_size=8))


def test_predictions_use_the_newest_weights_and_change_nothing() -> None:
    def counts(task: Any, x: Any) -> Any:
        task.count.assign_add(1.0)
        return forward(task, x) + task.count

    for step, added in ((forward, 0.0), (counts, 1.0)):
        with loop_of(step) as loop:
            source = data.from_arrays(X, batch_size=8)
            for factor in (1.0, 2.0, 3.0):
                loop.task.model.layers[0].kernel.assign(np.full((6, 3), factor, "float32"))
                found = loop.predict(source)
                np.testing.assert_allclose(found, expected(loop) + added, rtol=1e-5, atol=1e-5)
            assert float(ops.convert_to_numpy(loop.task.count.value)) == 0.0


def test_every_batch_draws_the_same_random_numbers() -> None:
    def noise(task: Any, x: Any) -> Any:
        return keras.random.normal((1, 4)) + 0 * ops.sum(x)

    with loop_of(noise) as loop:
        first, second = (loop.predict(data.from_arrays(X[:40], batch_size=8)) for _ in range(2))
    assert first.shape == (5, 4)
    np.testing.assert_array_equal(first, np.repeat(first[:1], 5, axis=0))
    np.testing.assert_array_equal(first, second)


def test_a_changed_constant_changes_the_predictions() -> None:
    with loop_of(lambda task, x: x * task.factor) as loop:
        source = data.from_arrays(X, batch_size=8)
        for loop.task.factor in (2.0, 3.0):
            np.testing.assert_array_equal(loop.predict(source), X * np.float32(loop.task.factor))


@pytest.mark.skipif(
    keras.config.backend() != "torch", reason="only PyTorch changes arrays in place"
)
def test_the_data_stay_as_they_are_if_the_step_changes_its_batch() -> None:
    before = X.copy()
    with loop_of(lambda task, x: x.mul_(2.0)) as loop:
        found = loop.predict(data.from_arrays(X, batch_size=8))
    np.testing.assert_array_equal(X, before)
    np.testing.assert_array_equal(found, before * 2)


MEMORY = """
import json, sys
import numpy as np, keras, treadle
from treadle import data
from treadle.errors import StepError

class Wide(treadle.Task):
    def __init__(self):
        self.scale = keras.Variable(2.0)
    def predict_step(self, batch):
        return keras.ops.tile(batch, (1, 4096)) * self.scale

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

x = np.ones((int(sys.argv[1]), 1), "float32")
# The outputs of a window are in memory too: its length must not depend on the processor's speed.
options = treadle.Options(window=4)
with treadle.Loop(Wide(), options=options, console=False) as loop:
    loop.predict(data.from_arrays(x[:1600], batch_size=400))
    before = peak()
    result = loop.predict(data.from_arrays(x, batch_size=400))
print(json.dumps({"size": result.nbytes, "more": peak() - before}))
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads memory from /proc")
def test_predictions_are_in_memory_once() -> None:
    done = subprocess.run(
        [python(), "-c", MEMORY, "16000"], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["size"] == 16000 * 4096 * 4  # 250 MiB
    # Two copies would be twice the size; the outputs of a window are there as well.
    assert found["more"] < 1.5 * found["size"]
