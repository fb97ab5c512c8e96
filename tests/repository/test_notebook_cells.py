"""A cell that is interrupted and run again, as docs/working-with-results.md describes.

A cell is a function here. An interruption is SIGINT in the main thread, as a kernel sends it.
"""

import os
import signal

import keras
import numpy as np
import pytest

import treadle

X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
TRAIN = treadle.data.from_arrays(X, X[:, :1], batch_size=8)  # 8 steps in an epoch


def cell(*hooks):
    keras.backend.clear_session()
    treadle.setup(seed=0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    task = treadle.Supervised(model, "mse", keras.optimizers.Adam(0.01))
    return treadle.Loop(task, hooks=list(hooks), console=False)


def test_an_interrupted_loop_stays_usable():
    uninterrupted = cell()
    uninterrupted.fit(TRAIN, epochs=3)
    loop = cell(treadle.at("3 steps", lambda loop: os.kill(os.getpid(), signal.SIGINT)))
    with pytest.raises(KeyboardInterrupt):
        loop.fit(TRAIN, epochs=3)
    assert loop.progress.step == 3

    history = loop.fit(TRAIN, epochs=3)  # the interrupted epoch is the first of them
    assert (loop.progress.step, loop.progress.epoch, len(history["loss"])) == (24, 3, 3)
    models = [one.task.model for one in (loop, uninterrupted)]
    for found, expected in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert loop.evaluate(TRAIN)["loss"] >= 0
