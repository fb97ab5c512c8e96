"""`treadle doctor`: what it prints, and its exit codes."""

import json
import os
import sys

import keras
import pytest

from tests import cli_runs
from treadle.core.processes import ProcessGroup
from treadle.report.reading import read_run

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


def treadle(*arguments, code=0, command="doctor"):
    return cli_runs.treadle(command, *arguments, code=code)


def test_an_error_has_its_line_and_exit_code_1():
    lines = treadle("wrong.py:Wrong", code=1).stdout.splitlines()
    assert lines[0] == "batch" and lines[1].startswith("    data: shuffled yes")
    assert lines[-5].split()[:3] == ["error", "O-ascent", "model/layers/0/kernel"]
    assert lines[-5].endswith("(wrong.py:20)")
    assert [line.split()[0] for line in lines[-4:-1]] == ["seen:", "why:", "fix:"]
    assert (
        lines[-1].startswith("Wrong on ") and ": 1 certain mistake, 1 unusual fact (" in lines[-1]
    )


def test_a_sound_task_has_exit_code_0():
    text = treadle("wrong.py:Wrong", "--set", "right=true", "--how").stdout
    assert ": 0 certain mistakes, 0 unusual facts" in text
    assert "optimizer: SGD; rate 0.01; updates 1 in a step" in text
    assert "        rate: read from the object" in text or ", rate: read from the object" in text
    assert "second pass the same batches" not in text


def test_every_fact_is_shown_if_asked_for():
    text = treadle("wrong.py:Wrong", "--set", "right=true", "--all").stdout
    assert "second pass the same batches" in text


def test_the_sheet_in_json():
    facts = json.loads(treadle("wrong.py:Wrong", "--json", code=1).stdout)
    (finding,) = facts["findings"]
    assert finding["code"] == "O-ascent"
    assert facts["task"] == "Wrong" and facts["steps"] > 3
    assert "applies" in [line["fact"] for line in facts["lines"] if line["subject"] == "optimizer"]


def test_what_an_edit_changed(tmp_path):
    (tmp_path / "right.py").write_text(WRONG.replace("right: bool = False", "right: bool = True"))
    lines = treadle("right.py:Wrong", "wrong.py:Wrong").stdout.splitlines()
    assert lines[0] == (
        "optimizers  optimizer: applies the gradient → the gradient with the other sign"
    )
    sys.modules.pop("treadle_task_right", None)
    assert treadle("wrong.py:Wrong", "wrong.py:Wrong").stdout == "both sheets show the same\n"
    found = json.loads(treadle("right.py:Wrong", "wrong.py:Wrong", "--json").stdout)
    assert found["differences"][0]["subject"] == "optimizer" and len(found["sheets"]) == 2
    sys.modules.pop("treadle_task_right", None)


def test_rates_are_those_of_the_steps_given(tmp_path):
    text = WRONG.replace("SGD(0.01)", "SGD(keras.optimizers.schedules.CosineDecay(0.01, 100))")
    (tmp_path / "wrong.py").write_text(text)
    settings = ("wrong.py:Wrong", "--set", "right=true")
    assert "0 at step 999" in treadle(*settings, "--steps", 1000).stdout


def test_variables_for_frameworks_are_set_until_a_task_is_inspected(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")  # of the user
    names = ("OMP_WAIT_POLICY", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    printed = f"print([os.environ[name] for name in {names}])"
    (tmp_path / "wrong.py").write_text(f"import os\n{printed}\n{WRONG}")
    shown = treadle("wrong.py:Wrong", "--set", "right=true").output
    assert "['passive', '0']" in shown
    assert "OMP_WAIT_POLICY" not in os.environ


def test_an_unknown_task_is_wrong_usage():
    assert "there is no recipe" in treadle("nothing-like-this", code=2).output


def run(*arguments, code=0):
    return treadle("wrong.py:Wrong", "-q", "--seed", 1, *arguments, code=code, command="run")


def test_preflight_trains_no_task_with_errors(tmp_path):
    result = run("--preflight", "--directory", "it", code=2)
    assert result.stdout.split()[:3] == ["error", "O-ascent", "model/layers/0/kernel"]
    assert " ".join(result.stderr.split()).endswith(
        "error: Wrong was not trained, because of mistakes that are listed above. Correct them, "
        "or, where one is intended, add its code to the task: doctor_ignore = ['O-ascent']"
    )
    assert not (tmp_path / "it").exists()


def test_preflight_changes_no_bit_of_a_run_and_keeps_its_sheet(tmp_path):
    text = WRONG.replace("keras.Input((3,)), ", "keras.layers.Dropout(0.5), ")  # built by a batch
    (tmp_path / "wrong.py").write_text(text.replace("right: bool = False", "right: bool = True"))
    run("--preflight", "--directory", "a")
    run("--directory", "b")
    states = [(tmp_path / name / "state.safetensors").read_bytes() for name in "ab"]
    assert states[0] == states[1]
    facts = json.loads((tmp_path / "a" / "doctor.json").read_text())
    found = read_run(tmp_path / "a", points=10, image_bytes=0)
    assert found["findings"] == facts["findings"] == []
    dropout = [line for line in found["sheet"] if line[1] == "model/layers/0"]
    assert ["layers", "model/layers/0", "in training off", "off in training"] in dropout


def test_preflight_inspects_a_run_once(tmp_path):
    right = ("--preflight", "--directory", "a", "--set", "right=true")
    run(*right, "--epochs", 1)
    (tmp_path / "a" / "doctor.json").unlink()
    run(*right, "--epochs", 2, "--override")
    assert not (tmp_path / "a" / "doctor.json").exists()


def test_a_run_from_scratch_has_no_findings_of_the_earlier_one(tmp_path):
    run("--preflight", "--directory", "a", "--set", "right=true")
    assert (tmp_path / "a" / "doctor.json").exists()
    run("--fresh", "--directory", "a", "--set", "right=true")
    assert not (tmp_path / "a" / "doctor.json").exists()


def test_preflight_is_for_one_process(monkeypatch):
    monkeypatch.setattr(ProcessGroup, "size", 2)
    result = run("--preflight", code=2)
    assert " ".join(result.stderr.split()).endswith(
        "error: --preflight inspects a task in one process: run treadle doctor with the same task "
        "and settings before, and leave the option out here"
    )
