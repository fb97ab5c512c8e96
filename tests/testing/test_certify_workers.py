"""`treadle certify --workers`: several processes compared with one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.forked import python
from tests.waiting import WATCHDOG, until
from treadle import cli
from treadle.cli import certifying as module
from treadle.errors import Terminated

TASK = """
import keras, numpy as np, treadle
from keras import ops

class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y, predicted):
        self.largest.assign(ops.maximum(self.largest, ops.max(ops.abs(y - predicted))))

    def result(self):
        return self.largest

class Line(treadle.Task):
    epochs = 1

    def __init__(
        self, reduction: str = "sum_over_batch_size", couples: bool = False, largest: bool = False
    ):
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(0.01)
        self.loss = keras.losses.MeanSquaredError(reduction=reduction)
        self.couples, self.metrics = couples, [Largest()] if largest else []

    def train_step(self, batch):
        x, y = batch

        def objective():
            z = self.model(x)
            for metric in self.metrics:
                metric.update_state(y, z)
            if self.couples:
                return ops.mean(ops.logsumexp(z * ops.transpose(z), axis=1))
            return self.loss(y, z)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    def datasets(self):
        x = np.random.default_rng(0).normal(size=(20, 3)).astype("float32")
        return treadle.Datasets(train=treadle.data.from_arrays(x, x[:, :1], batch_size=8))
"""


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    monkeypatch.setattr(sys, "executable", python())
    (tmp_path / "line.py").write_text(TASK)


def certify(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["certify", "line.py", "--workers", "2", *arguments])
    assert result.exit_code == code, result.output
    return result.stdout.splitlines()


def test_equal_results():
    first, result, last = certify("--steps", "4", "--seed", "3")
    assert first == "Line: 4 steps in one process, and in 2"
    assert result.startswith(
        "within rounding 2 processes = one: logged values 1, variables 5; the largest difference is"
    )
    assert last == "equal within rounding"


LOSS = r"a loss is [\d.]+, but [\d.]+ for the whole batch\."
METRIC = r"metrics/0/largest, a variable of a metric, is no sum or mean over the examples\."
REMEDY = (
    r" Each process computes its rows, and the mean over processes is weighted by their number: "
    r"compute losses and values as means over the examples, combine examples only with "
    r"treadle\.gathered, or train with one process"
)


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("reduction=sum", LOSS),
        pytest.param("couples=True", LOSS, marks=pytest.mark.long),
        pytest.param("largest=True", METRIC, marks=pytest.mark.long),
    ],
)
def test_a_step_that_processes_cannot_divide(setting, fault):
    lines = certify("--set", setting, "--steps", "1", code=1)
    start = "failed          2 processes = one: train_step on 2 processes: "
    assert re.fullmatch(re.escape(start) + fault + REMEDY, lines[1]), lines[1]
    assert lines[2] == "not verified: see above"


def test_data_of_which_each_process_reads_a_share():
    text = Path("line.py").read_text()
    whole = "treadle.data.from_arrays(x, x[:, :1], batch_size=8)"
    Path("line.py").write_text(text.replace(whole, f"treadle.data.sharded(lambda *_: {whole})"))
    lines = certify("--steps", "2", code=1)
    assert lines[1] == (
        "failed          2 processes = one: 2 processes read other batches than one, since each "
        "reads its own share of the data (treadle.data.sharded): give all processes the whole data "
        "to compare them"
    )


@pytest.fixture
def values(monkeypatch):
    """The values of both trainings, none of which runs."""
    given = {"one": {}, "several": {}}
    monkeypatch.setattr(module, "_error_of", lambda command: "")
    monkeypatch.setattr(module, "_values", lambda directory: given[directory.name])
    monkeypatch.setattr(module, "read_run", lambda directory: {"precision": "float32"})
    return given


def test_other_results(values):
    values["one"] = {"logged loss": np.ones(3), "w": np.full(2, 10.0), "n": np.array(3), "u": 1.0}
    values["several"] = {"logged loss": np.array([1, 1.2, 1]), "w": np.full(2, 10.0005), "n": 4}
    lines = certify(code=1)
    assert lines[1:] == [
        "differs         2 processes = one: logged values 1, variables 3, of which 3 differ",
        f"{'':<16}n differs by inf",
        f"{'':<16}u differs by inf",
        f"{'':<16}logged loss differs by 2.0e-01",
        "not equal: see above",
    ]
    facts = json.loads("\n".join(certify("--json", code=1)))
    assert (facts["exact"], facts["steps"], facts["workers"]) == (False, 16, 2)
    assert facts["differences"]["n"] == "inf" and facts["differences"]["w"] < 1e-4


def test_values_that_are_not_finite(values):
    values["one"] = {"logged loss": np.array([1.0, np.nan])}
    values["several"] = {"logged loss": np.array([1.0, np.nan])}
    assert certify()[-1] == "equal within rounding"
    values["several"] = {"logged loss": np.array([np.nan, 1.0])}
    assert "logged loss differs by inf" in certify(code=1)[2]


def test_values_that_are_infinite(values):
    values["one"] = {"w": np.array([np.inf, 1.0]), "u": np.float32(2.0)}
    values["several"] = {"w": np.array([np.inf, 1.0]), "u": np.float32(2.0)}
    assert certify()[-1] == "equal within rounding"
    for other in ([np.inf, 2.0], [1.0, 1.0], [-np.inf, 1.0]):
        values["several"]["w"] = np.array(other)
        assert certify(code=1)[-1] == "not equal: see above"


# Not by the traps of a shell: it may miss a signal that comes just before it waits.
LAUNCHER = f"""#!{sys.executable} -IS
import os, signal, subprocess
child = subprocess.Popen(["sleep", "1000"])
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
with open("child.new", "w") as file:
    file.write(str(child.pid))
os.rename("child.new", "child")
signal.sigwait([signal.SIGTERM])
child.terminate()
child.wait()
raise SystemExit(1)
"""


def runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_a_training_has_started(number, starting, tmp_path, monkeypatch):
    program, written = tmp_path / "launcher", tmp_path / "child"
    program.write_text(LAUNCHER)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(module, "PATIENCE", WATCHDOG)

    def stop():
        until(written.exists, "the start of the child")
        os.kill(os.getpid(), number)

    class Stopped(subprocess.Popen):
        """The signal comes before the caller has the process."""

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            stop()

    if starting:
        monkeypatch.setattr(subprocess, "Popen", Stopped)
    else:
        threading.Thread(target=stop).start()
    error = KeyboardInterrupt if number == signal.SIGINT else Terminated
    with pytest.raises(error):
        module._error_of(["run"])
    child = int(written.read_text())
    until(lambda: not runs(child), "the end of the child")


def test_an_error_names_no_folder_that_is_removed(tmp_path, monkeypatch):
    program = tmp_path / "program"
    advice = "To inspect the step: treadle replay /tmp/one --step 2"
    program.write_text(f"#!/bin/sh\necho 'error: loss is inf at step 2. {advice}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert module._error_of(["run"]) == "loss is inf at step 2."


def test_processes_that_fail_at_once(tmp_path, monkeypatch):
    """Each may say that the other one has failed."""
    program = tmp_path / "program"
    why = "error: process {} failed: StepError: 'loss' is 6, but 11. This process ends too; start"
    program.write_text(f'#!/bin/sh\necho "[1] {why.format(0)}\n{why.format(1)}" >&2\nexit 1\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert module._error_of(["launch"]) == "'loss' is 6, but 11"


def test_a_failure_without_a_message(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    lines = certify(code=1)
    assert lines[1] == "failed          2 processes = one: exit code 1:"
