"""Replaying a step of a past run: the command `treadle replay`."""

import json
import runpy
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
from replayed_runs import hashes, logged, plain, train

import treadle
from tests import cli_runs
from treadle.checkpoint.arrays import read_arrays

FILE = """
    import keras
    import numpy as np
    import treadle
    from keras import ops

    class Mine(treadle.Task):
        epochs = 3

        def __init__(self, bad: int = 13):
            self.model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.2),
                                           keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.bad = bad

        def train_step(self, batch):
            x, y = batch
            def objective():
                return ops.mean((self.model(x, training=True) - y) ** 2)
            return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

        def datasets(self):
            x = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
            if self.bad >= 0:
                x[self.bad, 1] = np.nan
            return treadle.Datasets(train=treadle.data.from_arrays(x, x[:, :1], batch_size=8))

        def hooks(self):
            return [treadle.hooks.Checkpoint(every="2 steps"), treadle.at("3 steps", slower)]

    def slower(loop):
        loop.task.optimizer.learning_rate.assign(0.001)
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    monkeypatch.delenv("TREADLE_DATA", raising=False)
    Path("mine.py").write_text(textwrap.dedent(FILE))
    return cli_runs.treadle


def test_the_command_that_ends_the_message_names_the_row(mine: Callable[..., Any]) -> None:
    text = mine("run", "mine.py", "--directory", "a run", "-q", code=1).output
    command = shlex.split(text[text.index("treadle replay") :].splitlines()[0])
    assert command[:4] == ["treadle", "replay", str(Path("a run").absolute()), "--step"]
    before = hashes(Path("a run"))
    shown = mine(*command[1:]).output
    assert "equal to the log bit for bit" in shown
    assert "of the first array of the batch, row " in shown
    assert "(of the data set: 13)" in shown
    assert hashes(Path("a run")) == before


def test_the_command_in_the_second_epoch(mine: Callable[..., Any]) -> None:
    mine("run", "mine.py", "--directory", "run", "--set", "bad=-1", "--quiet")
    found = mine("replay", "run", "--step", 9, "--json", "--save", "step.safetensors")
    told = json.loads(found.stdout)
    assert told["agreement"]["exact"] and told["epoch"] == 2
    assert told["values"]["loss"] == logged(Path("run"))[9]["loss"]
    kept = read_arrays("step.safetensors")
    assert kept["gradients/model/layers/0/kernel"].shape == (3, 4)
    least = min(line["loss"] for line in logged(Path("run")).values())
    shown = mine("replay", "run", "--bisect", f"loss <= {least}").output
    step = next(step for step, line in logged(Path("run")).items() if line["loss"] == least)
    assert f"first holds at step {step} of the log" in shown
    for arguments, message in (
        (["--step", 1, "--save", "none/x.npz"], "--save none/x.npz: there is no folder none"),
        (
            ["--step", 1, "--save", "x.npz"],
            "--save x.npz: arrays are saved as .safetensors. Use --save x.safetensors",
        ),
    ):
        assert message in mine("replay", "run", *arguments, code=2).output


def test_the_command_sends_scripts_to_python(mine: Callable[..., Any]) -> None:
    train(plain, Path("script"), epochs=1)
    told = mine("replay", "script", "--step", 3, code=2).output
    assert (
        "script holds a run that a script started, and does not say where its task is: name it "
        "with --task FILE.py:TASK, whose file makes the data too (datasets), or call "
        "treadle.doctor.replay(task, train, 'script', step=3) in Python, with the task and the "
        "source that the script makes"
    ) in told
    told = mine("replay", "script", "--bisect", "isnan(loss)", code=2).output
    assert "'script', bisect='isnan(loss)') in Python" in told


def test_the_task_of_a_script_is_named(mine: Callable[..., Any]) -> None:
    task = runpy.run_path("mine.py")["Mine"](bad=-1)
    with treadle.Loop(task, "script", task.hooks(), console=False) as loop:
        loop.fit(task.datasets().train, epochs=1)
    named = ("--task", "mine.py:Mine", "--json")
    told = json.loads(mine("replay", "script", "--step", 4, *named).stdout)
    assert (
        told["agreement"]["exact"] and told["values"]["loss"] == logged(Path("script"))[4]["loss"]
    )
    Path("trains.py").write_text(f"{textwrap.dedent(FILE)}\ntreadle.Loop(Mine(), 'script')\n")
    told = mine("evaluate", "script", "--task", "trains.py:Mine", code=2).output
    assert "trains.py trains in " in told
    assert "when it is imported: put the lines that train under `if __name__ == " in told
