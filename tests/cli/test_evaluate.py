"""`treadle evaluate`: its results, and runs whose files, data or code are missing."""

import json
import shutil
import textwrap
from pathlib import Path

import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401
from tests.run_content import write_record


def test_evaluate_gives_the_run_s_last_values():
    last = json.loads(run_tiny("--json").stdout)["last"]
    results = json.loads(treadle("evaluate", "runs/Tiny-1", "--json").stdout)
    assert results["validation/easy"]["loss"] == last["val_easy_loss"]
    assert set(results) == {"validation/easy", "validation/hard", "test"}
    assert "test: loss" in treadle("evaluate", "runs/Tiny-1").stdout


def test_evaluate_says_what_is_missing():
    assert "holds no run" in treadle("evaluate", "nowhere", code=2).stderr
    run_tiny("--quiet")
    state = Path("runs/Tiny-1/state.safetensors")
    state.unlink()
    shown = treadle("evaluate", "runs/Tiny-1").stderr
    assert "expected 404 bytes" in shown and "those of checkpoint step-000000000004" in shown
    Path("mine.py").unlink()
    find_again = treadle("evaluate", "runs/Tiny-1", code=2).stderr
    assert "the task of runs/Tiny-1 cannot be made again: there is no file" in find_again
    write_record(Path("runs/Tiny-1"), {"id": "0a", "configuration": {"task": "Tiny"}})
    shown = treadle("evaluate", "runs/Tiny-1", code=2).stderr
    assert "run.json is of another run than checkpoint step-000000000004: expected the id" in shown
    shutil.rmtree("runs/Tiny-1/checkpoints")
    assert "a run that a script started" in treadle("evaluate", "runs/Tiny-1", code=2).stderr


def test_a_task_that_its_recorded_settings_no_longer_make_is_named():
    run_tiny("--quiet")
    text = Path("mine.py").read_text()
    made = text.replace(
        "        self.model =", "        self.none = {}['x']\n        self.model =", 1
    )
    assert made != text
    Path("mine.py").write_text(made)
    line = 1 + made.splitlines().index("        self.none = {}['x']")
    told = treadle("evaluate", "runs/Tiny-1", "--trust", code=2).stderr
    assert (
        "the task of runs/Tiny-1 cannot be made again with the settings in its run.json (" in told
    )
    assert (
        f"): KeyError: 'x' ({Path('mine.py').absolute()}, line {line}). Correct the task, name "
        in told
    )
    assert "the one that the run had with --task FILE.py:Task, or start the run again" in told
    assert "Traceback" not in told


@pytest.mark.long
@pytest.mark.parametrize("command", [["evaluate"], ["resume"], ["replay", "--step", 1]])
def test_data_that_has_moved_is_asked_for(command):

    Path("old").mkdir()
    run_tiny("--quiet", "--data-dir", "old", "--directory", "here")
    Path("old").rename("new")
    told = treadle(*command, "here", code=2).stderr
    assert "the data folder of the run in here, " in told
    assert f"{Path('old').absolute()}, no longer exists" in told
    assert "give its new location with --data-dir" in told
    treadle(*command, "here", "--data-dir", "new")


def test_what_was_learnt_before_an_error_can_be_evaluated():
    run_tiny("--set", "fails=late", "--directory", "here", code=1)
    result = treadle("evaluate", "here", "--json")
    assert json.loads(result.stdout)["validation/easy"]["loss"] > 0
    assert (
        "here holds a run that did not finish (ValueError: boom after step 3): evaluating its "
        "weights after step 0"
    ) in result.stderr
    shutil.rmtree("here/checkpoints")
    message = treadle("evaluate", "here", code=2).stderr
    assert "did not finish (ValueError: boom after step 3), and has no checkpoint" in message


CHANGED = """
    from types import SimpleNamespace

    import keras
    import treadle
    from keras import ops
    from mine import Tiny

    class Changed(Tiny):
        def __init__(self):
            super().__init__()
            self.scale, self.shift = 1.0, SimpleNamespace(by=1.0)
            self.late = keras.Sequential([keras.layers.Dense(1)])

        def train_step(self, batch):
            x, y = batch
            if x.shape[0] == 2:  # a short last batch: the only one that builds this layer
                self.late(x)
            return super().train_step((x, self.scale * y))

        def eval_step(self, batch):
            loss = super().eval_step(batch)["loss"]
            return {"loss": self.scale * loss + self.shift.by}

        def datasets(self):
            found = super().datasets()
            x = ops.convert_to_numpy(ops.ones((6, 2)))
            train = treadle.data.from_arrays(x, x[:, :1], batch_size=4)
            return treadle.Datasets(train=train, validation=found.test, test=found.test)

        def hooks(self):
            def change(loop):
                loop.task.scale, loop.task.added = 3.0, 2.0
            return [treadle.at("1 epoch", change)]
"""


def test_values_that_a_hook_changed_are_those_of_the_run(monkeypatch):
    monkeypatch.syspath_prepend(".")
    Path("changed.py").write_text(textwrap.dedent(CHANGED))
    last = json.loads(run_tiny("--json", "--directory", "here", task="changed.py:Changed").stdout)
    loss = last["last"]["val_loss"]
    result = treadle("evaluate", "here", "--json")
    assert json.loads(result.stdout)["validation"]["loss"] == loss
    assert (
        "added changed from nothing to 2.0 during the run, and is not restored: results that "
        "depend on it differ from those of the run"
    ) in result.stderr


def test_values_of_a_finished_run_without_a_readable_checkpoint():
    run_tiny("--quiet", "--directory", "here")
    for file in Path("here/checkpoints").glob("*/*"):
        file.write_bytes(b"damaged")
    assert "Python values that hooks changed are not restored" in treadle("evaluate", "here").stderr


OTHER = """
    import numpy as np
    import treadle

    x = np.random.default_rng(1).normal(size=(6, 2)).astype("float32")

    def photos():
        return treadle.data.from_arrays(x, x[:, 1:], batch_size=4, shuffle=False)

    def several():
        return {"first": photos(), "second": [(x, x[:, 1:])]}

    def nothing():
        return None

    def arrays():
        return x, x[:, 1:]

    size = 3
"""


def evaluated_on(data, code=0):
    return treadle("evaluate", "here", "--data", data, *["--json"][: code == 0], code=code)


def test_other_data_are_evaluated_instead_of_those_of_the_task():
    import numpy as np

    from treadle.checkpoint.arrays import read_arrays

    run_tiny("--quiet", "--directory", "here")
    Path("other.py").write_text(textwrap.dedent(OTHER))
    results = json.loads(evaluated_on("other.py:photos").stdout)
    weights = read_arrays("here/state.safetensors")
    x = np.random.default_rng(1).normal(size=(6, 2)).astype("float32")
    outputs = x @ weights["model/layers/0/kernel"] + weights["model/layers/0/bias"]
    expected = float(np.mean((outputs - x[:, 1:]) ** 2))
    assert results == {"photos": {"loss": pytest.approx(expected, rel=1e-5)}}
    results = json.loads(evaluated_on("other.py:several").stdout)
    assert set(results) == {"several/first", "several/second"}
    assert results["several/second"]["loss"] == pytest.approx(expected, rel=1e-5)


def test_other_data_in_the_file_of_the_task():
    import numpy as np

    text = Path("mine.py").read_text()
    own = "\n\ntreadle.setup(seed=3)\n\n\ndef own():\n    x = np.ones((4, 2), 'float32')\n"
    own += "    return treadle.data.from_arrays(x, x[:, :1], batch_size=4)\n"
    Path("mine.py").write_text(f"import numpy as np\n{text}{own}")
    run_tiny("--quiet", "--directory", "here")
    results = json.loads(evaluated_on("mine.py:own").stdout)
    assert np.isfinite(results["own"]["loss"])


def test_other_data_that_cannot_be_used():
    run_tiny("--quiet", "--directory", "here")
    Path("other.py").write_text(textwrap.dedent(OTHER))

    def message(data):
        return " ".join(evaluated_on(data, code=2).stderr.split())

    path = Path("other.py").absolute()
    assert "--data takes FILE.py:FUNCTION, not 'digits': name a function" in message("digits")
    assert "--data takes FILE.py:FUNCTION, not 'other.py'" in message("other.py")
    assert f"--data: {path} has no function 'photo'. Did you mean 'photos'" in message(
        "other.py:photo"
    )
    assert "there is no file" in message("absent.py:photos")
    assert f"--data: size in {path} is of type int, and not a function: name" in message(
        "other.py:size"
    )
    assert f"--data: nothing() in {path} returned no data, but None" in message("other.py:nothing")
    assert "not cut into batches" in message("other.py:arrays")


def test_a_task_without_evaluation_data_needs_other_data(monkeypatch):
    monkeypatch.syspath_prepend(".")
    bare = "from mine import *\n\nclass Bare(Tiny):\n    def datasets(self):\n"
    Path("bare.py").write_text(f"{bare}        return treadle.Datasets(super().datasets().train)\n")
    run_tiny("--quiet", "--directory", "here", task="bare.py:Bare")
    told = treadle("evaluate", "here", code=2).stderr
    assert "neither validation nor test data. Name data with --data FILE.py:FUNCTION" in told
    Path("other.py").write_text(textwrap.dedent(OTHER))
    assert "photos" in evaluated_on("other.py:photos").stdout
