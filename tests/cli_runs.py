"""What the tests of the commands share: a small task in a separate folder."""

import os
import textwrap
from pathlib import Path

import pytest
from typer.testing import CliRunner

from treadle import cli

TASK = """
    import keras
    import numpy as np
    import treadle
    from keras import ops

    class Tiny(treadle.Task):
        epochs = 2

        def __init__(self, fails: str = "", rate: float = 0.1):
            self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.SGD(rate)
            self.fails = fails
            print("made")
            if fails == "init":
                raise EOFError("in init")

        def train_step(self, batch):
            x, y = batch
            if self.fails == "user":
                raise KeyError("my own mistake")
            if self.fails == "step":
                return {"loss": x}
            def objective():
                return ops.mean(ops.subtract(self.model(x), y) ** 2)
            return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

        def eval_step(self, batch):
            x, y = batch
            return {"loss": ops.mean(ops.subtract(self.model(x), y) ** 2)}

        def datasets(self):
            if self.fails == "interrupt":
                raise KeyboardInterrupt
            if self.fails == "datasets":
                return 3
            x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
            data = treadle.data.from_arrays(x, x[:, :1], batch_size=4)
            return treadle.Datasets(train=data, validation={"easy": data, "hard": data}, test=data)

        def describe(self):
            return "a tiny task"

        def hooks(self):
            def failing(loop):
                if self.fails == "late interrupt":
                    raise KeyboardInterrupt
                if self.fails == "late":
                    raise ValueError("boom")
            return [treadle.at("3 steps", failing)]

    class Endless(Tiny):
        epochs = None

    model = Tiny
    number = 3
"""


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A separate folder, a clean environment, and Keras with its default settings."""
    import keras

    monkeypatch.chdir(tmp_path)
    for name in ("KERAS_BACKEND", "TREADLE_DATA", "TF_CPP_MIN_LOG_LEVEL"):
        value = os.environ.get(name)
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    keras.backend.clear_session()
    Path("mine.py").write_text(textwrap.dedent(TASK))


def treadle(*arguments, code=0):
    """Call a command as in a new process."""
    import keras

    keras.backend.clear_session()
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def run_tiny(*arguments, code=0, task="mine.py:Tiny"):
    return treadle("run", task, *arguments, code=code)
