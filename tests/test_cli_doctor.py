"""`treadle doctor`: what it prints, and its exit codes."""

import json
import sys

import keras
import pytest
from typer.testing import CliRunner

from treadle import cli

WRONG = '''
import keras, numpy as np, treadle

class Wrong(treadle.Task):
    """Applies gradients with the wrong sign."""

    epochs = 2

    def __init__(self, right: bool = False):
        self.right = right
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)

    def train_step(self, batch):
        x, y = batch
        loss, gradients = treadle.gradients(
            lambda: keras.ops.mean((self.model(x) - y) ** 2), self.model.trainable_variables
        )
        gradients = gradients if self.right else [-g for g in gradients]
        self.optimizer.apply(gradients, self.model.trainable_variables)
        return {"loss": loss}

    def datasets(self):
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        y = x[:, :1] - x[:, 1:2]
        return treadle.Datasets(train=treadle.data.from_arrays(x, y, batch_size=16))
'''


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    (tmp_path / "wrong.py").write_text(WRONG)
    yield
    sys.modules.pop("treadle_task_wrong", None)


def treadle(*arguments, code=0):
    keras.backend.clear_session()
    result = CliRunner().invoke(cli.app, ["doctor", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_an_error_has_its_line_and_exit_code_1():
    lines = treadle("wrong.py:Wrong", code=1).stdout.splitlines()
    assert lines[0].split()[:3] == ["error", "O-ascent", "model/layers/0/kernel"]
    assert lines[0].endswith("(wrong.py:20)")
    assert [line.split()[0] for line in lines[1:4]] == ["seen:", "why:", "fix:"]
    assert lines[-1].startswith("Wrong: 1 error, 0 warnings, 0 notes (")


def test_a_sound_task_has_exit_code_0():
    text = treadle("wrong.py:Wrong", "--set", "right=true").stdout
    assert "Wrong: 0 errors, 0 warnings, 0 notes" in text
    assert "not checked: E-trains" in text


def test_the_report_in_json():
    facts = json.loads(treadle("wrong.py:Wrong", "--json", code=1).stdout)
    (finding,) = facts["findings"]
    assert (finding["code"], finding["severity"]) == ("O-ascent", "error")
    assert facts["task"] == "Wrong" and facts["steps"] > 3


def test_schedules_are_compared_with_the_steps_given(tmp_path):
    text = WRONG.replace("SGD(0.01)", "SGD(keras.optimizers.schedules.CosineDecay(0.01, 100))")
    (tmp_path / "wrong.py").write_text(text)
    settings = ("wrong.py:Wrong", "--set", "right=true")
    assert "O-over" not in treadle(*settings, "--steps", 100).stdout
    sys.modules.pop("treadle_task_wrong", None)
    assert "O-over-early" in treadle(*settings, "--steps", 1000).stdout


def test_an_unknown_task_is_wrong_usage():
    assert "there is no recipe" in treadle("nothing-like-this", code=2).output
