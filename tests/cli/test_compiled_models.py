"""Commands on a function that returns a compiled Keras model and its data."""

import sys
import textwrap
from pathlib import Path

import keras
import pytest

from tests import cli_runs

FILE = """
    import keras
    import numpy as np
    import treadle

    epochs = 2

    def program(units: int = 3):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
        model.compile("sgd", "mse", metrics=["mae"])
        x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
        return model, (x, x[:, :1] + np.zeros((64, units), "float32"))

    def sets():
        model, (x, y) = program()
        both = treadle.data.from_arrays(x, y, batch_size=16)
        return model, treadle.Datasets(train=both, validation=both)

    def bare():
        return program()[0]

    def uncompiled():
        return keras.Sequential([keras.layers.Dense(1)]), None
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    (tmp_path / "prog.py").write_text(textwrap.dedent(FILE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    yield
    sys.modules.pop("treadle_task_prog", None)


def treadle(*arguments, code=0):
    return " ".join(cli_runs.treadle(*arguments, code=code).output.split())


def test_a_run_of_a_compiled_model_is_resumed_replayed_and_reported():
    text = treadle("run", "prog.py:program", "--set", "units=2", "--directory", "runs/a")
    assert "epoch 2/2" in text and "mae" in text
    assert "units=2" in treadle("runs", "runs")
    assert "model/layers/0/kernel" in treadle("replay", "runs/a", "--step", "3")
    assert "epoch 3/3" in treadle("resume", "runs/a", "--epochs", "3")
    treadle("report", "runs/a")
    assert Path("runs/a/report.html").exists()
    assert "KerasTask" in treadle("doctor", "prog.py:program", "--set", "units=2")


def test_data_sets_and_their_absence():
    assert "val_mae" in treadle("run", "prog.py:sets", "--directory", "runs/b")
    assert "has no datasets" in treadle("run", "prog.py:bare", "--directory", "runs/c", code=2)
    assert "is not compiled" in treadle(
        "run", "prog.py:uncompiled", "--directory", "runs/d", code=2
    )
