"""`treadle.load_run`: what it reads of a run, and what it refuses."""

import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import treadle
from tests.forging import Bomb
from tests.report_directories import PATTERN, log_of, record, write_run
from tests.run_content import chunks, list_again, write_record
from treadle.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    DirectoryError,
    TreadleWarning,
)

X = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Pair(treadle.Supervised):
    """Two models, and an argument."""

    def __init__(self, units=2):
        layers = [keras.layers.Dense(units), keras.layers.Dense(1)]
        super().__init__(keras.Sequential([keras.Input((3,)), *layers]), "mse", "sgd")
        self.probe = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


class Doubled(keras.layers.Layer):
    """A layer that Keras does not know."""

    def call(self, x):
        return 2 * x


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def train(directory="run", task=None, epochs=2, **arguments):
    data = treadle.data.from_arrays(X, Y, batch_size=8)
    with treadle.Loop(task or Pair(), directory, console=False, **arguments) as loop:
        return loop.fit(data, epochs=epochs)


def test_a_finished_run():
    train(task=Pair(units=4))
    run = treadle.load_run("run")
    assert (run.task, run.state, run.reason) == ("Pair", "finished", "")
    assert (run.step, run.epoch, run.backend) == (4, 2, keras.backend.backend())
    assert run.settings["units"] == 4 and run.versions["keras"] == keras.__version__
    assert run.best["loss"] == (min(run.history["loss"]), 1 + np.argmin(run.history["loss"]))
    assert run.models == ("model", "probe")
    assert run.model("probe").count_params() == 4
    with pytest.raises(AttributeError):
        run.state = "failed"  # type: ignore[misc]


def test_images_are_those_that_the_log_lists():
    def log_pattern(loop):
        loop.log({"a/b": treadle.Image(np.eye(8)), "note": "images/none-1.jpg"})

    train(hooks=[treadle.every("2 steps", log_pattern)])
    (Path("run/images") / "mine-1.png").write_bytes(PATTERN)
    found = treadle.load_run("run").images
    assert [(image.name, image.step) for image in found] == [("a/b", 2), ("a/b", 4)]
    assert found[0].path == Path("run/images/a%2fb-2.png")
    assert found[0].png() == found[0]._repr_png_() == found[0].path.read_bytes()
    assert [*chunks(found[0].png())][2:] == [*chunks(PATTERN)][1:]  # the second names the run
    found[0].path.write_bytes(b"GIF89a")
    with pytest.raises(DirectoryError, match=r"a%2fb-2\.png is not .* logged: it is not a PNG f"):
        found[0].png()
    found[1].path.unlink()
    found[1].path.symlink_to(found[0].path)
    with pytest.raises(DirectoryError, match=r"a%2fb-4\.png: it is a symbolic link"):
        found[1].png()


class Stopping(Exception):
    """What ends a run in a test."""


def test_a_failed_run_has_history_and_variables_and_no_model():
    def fail(loop):
        raise Stopping("at step 3")

    with pytest.raises(Stopping):
        train(hooks=[treadle.at("3 steps", fail)])
    run = treadle.load_run("run")
    assert (run.state, run.step) == ("failed", 3)
    assert run.reason.startswith("Stopping")
    assert len(run.history.steps("loss")) == 3
    assert run.variables()["model/layers/0/kernel"].shape == (3, 2)
    with pytest.raises(DirectoryError) as caught:
        run.model()
    assert str(caught.value) == (
        "run holds a run that did not finish (Stopping: at step 3 after step 3). Make the task "
        "again, and call treadle.warm_start(task, 'run'), or read run.variables()"
    )


def test_the_model_of_an_earlier_end_is_not_that_of_an_extended_run():
    train()

    def fail(loop):
        raise Stopping("in epoch 3")

    with pytest.raises(Stopping):
        train(epochs=4, hooks=[treadle.at("5 steps", fail)], override=True)
    run = treadle.load_run("run")
    assert run.models == ()  # the files are there
    with pytest.raises(DirectoryError, match="did not finish"):
        run.model("probe")


def test_which_model_is_named():
    train()
    run = treadle.load_run("run")
    with pytest.raises(ConfigurationError) as caught:
        run.model()
    assert str(caught.value) == (
        "run holds 2 models: model, probe. Choose one, for example run.model('model')"
    )
    with pytest.raises(DirectoryError, match=r"holds no model 'prob'\. Did you mean 'probe'"):
        run.model("prob")
    for name in run.models:
        Path(f"run/{name}.keras").unlink()
    list_again(Path("run"))  # as if Keras could not save them
    with pytest.raises(DirectoryError, match="run holds no model: its task has none, or Keras"):
        treadle.load_run("run").model()


def test_a_layer_that_keras_does_not_know():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1), Doubled()])
    train(task=treadle.Supervised(model, "mse", "sgd"))
    run = treadle.load_run("run")
    with pytest.raises(DirectoryError) as caught:
        run.model()
    message = str(caught.value)
    assert message.startswith("Keras did not load run/model.keras: Could not locate class 'Doubl")
    assert "custom_objects={name: class}" in message and len(message) < 700
    loaded = run.model(custom_objects={"Doubled": Doubled})
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_a_model_with_code_is_refused(tmp_path):
    """Functions that Keras pickles into a model, and files that are pickles themselves."""
    trace = str(tmp_path / "executed")
    layer = keras.layers.Lambda(lambda x: [__import__("os").mkdir(trace), x][1], output_shape=(1,))
    inputs = keras.Input((3,))
    train(epochs=1)
    run = treadle.load_run("run")
    model = keras.Model(inputs, layer(keras.layers.Dense(1)(inputs)))
    shutil.rmtree(trace, ignore_errors=True)  # the layer may be called to build the model
    model.save("run/model.keras")
    list_again(Path("run"))
    run = treadle.load_run("run")
    with pytest.raises(DirectoryError, match=r"did not load run/model\.keras.*arbitrary code"):
        run.model("model")
    Path("run/model.keras").write_bytes(pickle.dumps(Bomb(trace)))
    list_again(Path("run"))
    run = treadle.load_run("run")
    with pytest.raises(DirectoryError, match=r"did not load run/model\.keras"):
        run.model("model")
    assert not Path(trace).exists()


def test_links_in_the_place_of_files_are_not_followed():
    train("other", epochs=1)
    train(epochs=1)
    run = treadle.load_run("run")
    for name in ("model.keras", "log.jsonl", "state.safetensors"):
        Path("run", name).unlink()
        Path("run", name).symlink_to(Path("other", name).absolute())
    with pytest.raises(DirectoryError, match=r"model\.keras: .*, but found a symbolic link"):
        run.model("model")
    with pytest.warns(TreadleWarning, match=r"state\.safetensors: .* found a symbolic link"):
        run.variables()  # those of the checkpoint
    with pytest.raises(DataError, match=r"log\.jsonl: it is a symbolic link"):
        treadle.load_run("run")
    Path("run/log.jsonl").unlink()
    shutil.copy("other/log.jsonl", "run")
    assert treadle.load_run("run").models == ("model", "probe")


def test_checkpoints_are_chosen_by_their_step():
    train(epochs=3)
    run = treadle.load_run("run")
    assert 0 in run.checkpoints and run.checkpoints[-1] == 6
    with pytest.raises(DirectoryError) as caught:
        run.variables(1)
    listed = ", ".join(map(str, run.checkpoints))
    assert str(caught.value) == (
        f"run has no checkpoint of step 1. There are: {listed}. Choose one of these steps"
    )
    for file in Path("run/checkpoints").glob("*6*/*.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"of step 6 in run cannot be read: .* is damaged"):
        run.variables(6)
    assert run.variables()["model/layers/0/kernel"].shape == (3, 2)  # at the end of the run


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: None, DirectoryError, "run holds no run: there is no such folder"),
        (lambda: Path("run").mkdir(), DirectoryError, r"run holds no run: there is no run\.json"),
        (
            lambda: write_run("run") and Path("run/run.json").write_text("{}"),
            DirectoryError,
            r"run/run\.json is damaged.*configuration is missing.*Restore a copy",
        ),
        (
            lambda: write_run("run", [*log_of([1.0]), {"step": "two"}, *log_of([1.0])]),
            DataError,
            r"line 2 of run/log\.jsonl is not a line of a log",
        ),
    ],
)
def test_what_is_no_run_is_explained(make, error, match):
    make()
    with pytest.raises(error, match=match):
        treadle.load_run("run")


def test_a_lost_record_and_a_lost_log_are_warnings():
    train()
    Path("run/run.json").unlink()
    with pytest.warns(TreadleWarning, match=r"run/run\.json is missing: the record of the run"):
        run = treadle.load_run("run")
    assert run.settings["units"] == 2 and run.state == "interrupted"
    write_run("bare")
    Path("bare/log.jsonl").unlink()
    with pytest.warns(TreadleWarning, match=r"bare/log\.jsonl is missing, so the history is empty"):
        assert treadle.load_run("bare").history.names() == []


def test_a_run_that_trains_is_running():
    def look(loop):
        loop.log({"state": treadle.load_run("run").state})

    assert train(hooks=[treadle.at("3 steps", look)])["state"] == ["running"]


def test_no_framework_is_imported_before_a_model_is_loaded():
    log = [*log_of([1.0]), record("log", 1, picture="images/picture-1.png")]
    write_run("run", log, images=["picture-1.png"])
    code = (
        "import sys, treadle; run = treadle.load_run('run'); run.images[0].png();"
        "print(run, [m for m in ('keras', 'torch', 'jax', 'tensorflow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "SavedRun('run': Tiny, finished, 8 steps, 2 epochs) []\n"


def test_control_characters_in_a_task_name_are_escaped():
    write_run("run")
    facts = json.loads(Path("run/run.json").read_text())
    facts["configuration"]["task"] = "Evil\x1b[2J"
    write_record(Path("run"), facts)
    assert "\\x1b" in repr(treadle.load_run("run")) and "\x1b" not in repr(treadle.load_run("run"))
