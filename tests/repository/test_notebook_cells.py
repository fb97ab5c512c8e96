"""Cells of a notebook that are interrupted or run again, as docs/working-with-results.md describes.

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


def task():
    keras.backend.clear_session()
    treadle.setup(seed=0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return treadle.Supervised(model, "mse", keras.optimizers.Adam(0.01))


def interrupting(step):
    return treadle.at(f"{step} steps", lambda loop: os.kill(os.getpid(), signal.SIGINT))


def weights(loop):
    return [np.array(w) for w in loop.task.model.get_weights()]


@pytest.fixture(scope="module")
def uninterrupted():
    loop = treadle.Loop(task(), console=False)
    loop.fit(TRAIN, epochs=3)
    return weights(loop)


def test_an_interrupted_loop_stays_usable(uninterrupted):
    loop = treadle.Loop(task(), hooks=[interrupting(3)], console=False)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(TRAIN, epochs=3)
    assert loop.progress.step == 3

    history = loop.fit(TRAIN, epochs=3)  # the interrupted epoch is the first of them
    assert (loop.progress.step, loop.progress.epoch, len(history["loss"])) == (24, 3, 3)
    for found, expected in zip(weights(loop), uninterrupted, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert loop.evaluate(TRAIN)["loss"] >= 0


def test_a_cell_with_a_directory_resumes_and_then_does_nothing(tmp_path, uninterrupted):
    def cell(*hooks):
        loop = treadle.Loop(task(), tmp_path / "run", hooks=list(hooks), console=False)
        loop.fit(TRAIN, epochs=3)
        return loop

    with pytest.raises(KeyboardInterrupt):
        cell(interrupting(11))
    assert treadle.load_run(tmp_path / "run").state == "interrupted"
    for reason in ("", "it was finished before"):
        loop = cell(interrupting(11))  # of a resumed run, step 11 is over
        assert (loop.progress.step, loop.reason or "") == (24, reason)
        for found, expected in zip(weights(loop), uninterrupted, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_a_cell_without_a_directory_starts_from_scratch(uninterrupted):
    for _ in range(2):
        loop = treadle.Loop(task(), console=False)
        loop.fit(TRAIN, epochs=3)
        assert loop.progress.step == 24
        for found, expected in zip(weights(loop), uninterrupted, strict=True):
            np.testing.assert_array_equal(found, expected)
