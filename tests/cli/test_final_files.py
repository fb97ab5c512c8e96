"""Damaged and exchanged files of finished runs, in every command that reads them.

Each command gives the numbers of the whole run, with one sentence if it used a checkpoint, or ends
with one sentence. tests/conformance/test_final_files.py is a smoke test on every backend.
"""

import json
import os
import re
import shutil
import textwrap
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
from executions import some

import treadle as library
from tests import cli_runs
from tests.report_directories import data_in
from tests.run_content import list_again
from treadle.checkpoint.arrays import read_arrays, write_arrays
from treadle.core.directory import HEALTH, RUN, STATE, read_run
from treadle.errors import DirectoryError, TreadleError

SCRIPT = """
import numpy as np
import treadle
from mine import Tiny as Base

class Tiny(Base):
    def __init__(self, averages: bool = False):
        super().__init__()
        self.optimizer.use_ema = averages

    def hooks(self):
        def picture(loop):
            shade = loop.state.arrays()["model/layers/0/kernel"][0, 0] % 1
            return {"picture": treadle.Image(np.full((2, 2), shade))}

        return [treadle.at("1 epoch", picture), treadle.hooks.GradientHealth("1 step")]
"""
IMAGE = "images/picture-2.png"
MODEL = "model.keras"


def treadle(*arguments):
    """Run a command; return its standard output, or raise what it printed if it failed."""
    keras.backend.clear_session()
    result = cli_runs.CliRunner().invoke(cli_runs.cli.app, [str(a) for a in arguments])
    said = result.stderr.replace("made\n", "")  # the task prints it
    if result.exit_code:
        assert result.exit_code == 2 and said.startswith("error: "), result.output
        raise DirectoryError(said)
    for line in said.splitlines():
        warnings.warn(line, stacklevel=2)
    return result.stdout


def task_of():
    import task

    keras.backend.clear_session()
    keras.utils.set_random_seed(7)  # another one than that of the runs
    return task.Tiny()


def weights(run):
    shutil.rmtree("new", ignore_errors=True)
    task = task_of()
    library.warm_start(task, run)
    return [np.asarray(x).tolist() for x in task.model.get_weights()]


def variables(run):
    return {path: x.tolist() for path, x in library.load_run(run).variables().items()}


def model(run):
    return library.load_run(run).model().predict(np.ones((1, 2)), verbose=0).tolist()


def exported(run):
    treadle("export", run, "--output", "exported.keras", "--force")
    return keras.saving.load_model("exported.keras").predict(np.ones((1, 2)), verbose=0).tolist()


def replayed(run):
    """What a replay computed, without its note on the record."""
    head, _, values = treadle("replay", run, "--step", 3).partition("\n\n")
    head, _, note = head.partition(f"\nnote: {run}/{RUN}")
    if note:
        warnings.warn(f"{run}/{RUN}{note}", stacklevel=2)
    return head, values


def report(run):
    """The images and the health in a report; its warnings are about damaged files."""
    treadle("report", run, "--out", "report.html")
    [found] = data_in(Path("report.html"))["runs"]
    if found["state"] == "unreadable":
        raise DirectoryError(found["reason"])
    for event in found["events"]:
        if event["kind"] in ("warning", "end"):
            warnings.warn(event["text"], stacklevel=2)
    return {"images": found["images"], "health": found["health"], "steps": found["steps"]}


def listing(run):
    [found] = json.loads(treadle("runs", run, "--json"))["runs"]
    if found["state"] == "unreadable":
        raise DirectoryError(found["reason"])
    if found["reason"]:
        warnings.warn(found["reason"], stacklevel=2)
    return found["settings"], found["best"], found["step"]


def resumed(run):
    """The variables of a run that is opened again."""
    keras.backend.clear_session()
    for line in treadle("resume", run).splitlines():
        if line.startswith("warning: "):
            warnings.warn(line, stacklevel=2)
    return variables(run)


READERS = {
    "evaluate": lambda run: json.loads(treadle("evaluate", run, "--json")),
    "export": exported,
    "warm_start": weights,
    "variables": variables,
    "model": model,
    "replay": replayed,
    "report": report,
    "runs": listing,
    "log": lambda run: treadle("log", run, "--last", 1),
    "resume": resumed,
}
OF_WEIGHTS = {"evaluate", "export", "warm_start", "variables", "resume"}
READ_BY = {
    STATE: OF_WEIGHTS,
    MODEL: {"model"},
    RUN: {*READERS} - {"log"},  # its values are not shown
    IMAGE: {"report"},
    HEALTH: {"report"},
}
# What a command leaves out if it cannot be verified; everything else must be right.
LEFT_OUT = {IMAGE: "images", HEALTH: "health"}


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 4
    file.write_bytes(data)


DAMAGES = {
    **{f"flipped at {at}": lambda file, at=at: flip(file, at) for at in (0, 0.5, 1)},
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "emptied": lambda file: file.write_bytes(b""),
    "deleted": lambda file: file.unlink(),
    "exchanged": lambda file: shutil.copy(Path("other", *file.parts[1:]), file),
}


def outcome(name, run):
    """Return what a reader returned, None after an error; and what it said in sentences."""
    found, said = None, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)  # also `TreadleWarning`
        try:
            found = READERS[name](run)
        except TreadleError as error:
            said = [str(error).strip()]
    return found, "\n".join([*(str(warning.message) for warning in caught), *said])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of one task with other seeds, and what every command reads of the first one."""
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.syspath_prepend(root)
        patch.setenv("KERAS_BACKEND", keras.config.backend())
        Path("mine.py").write_text(textwrap.dedent(cli_runs.TASK))
        Path("task.py").write_text(SCRIPT)
        how = ("run", "task.py:Tiny", "--quiet", "--directory")
        for directory, seed in (("run", 0), ("other", 1)):
            treadle(*how, directory, "--seed", seed)
        treadle(*how, "averaged", "--set", "averages=true")
        yield root, {name: outcome(name, "run") for name in READERS}


@pytest.fixture
def copy(runs, monkeypatch):
    """A copy of a run, in the place of the run."""
    root, expected = runs
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(root)
    shutil.copytree("run", "whole")
    yield expected
    shutil.rmtree("run", ignore_errors=True)
    Path("whole").rename("run")


def test_whole_files_are_read_in_silence(copy):
    for name, (found, said) in copy.items():
        assert found is not None and said == "", name


@pytest.mark.parametrize("damage", some(DAMAGES))
@pytest.mark.parametrize("file", READ_BY)
def test_a_damaged_file_is_never_used_in_silence(copy, file, damage):
    for name in READERS:
        if name not in READ_BY[file] and file != RUN:
            continue  # the next test
        shutil.rmtree("run", ignore_errors=True)
        shutil.copytree("whole", "run")
        DAMAGES[damage](Path("run", file))
        found, said = outcome(name, "run")
        check(file, damage, name, found, said, copy[name][0])


def check(file, damage, name, found, said, expected):
    where = f"{name}: {said}"
    if name in READ_BY[file]:
        assert f"run/{file}" in said, where
    if found is None:
        # Of weights, there is a checkpoint. Those of a model alone cannot make it.
        assert name == "model" or (file, damage) == (RUN, "exchanged"), where
        assert said.count("\n") <= 1 and "Traceback" not in said, where
        return
    if (file, damage) == (RUN, "exchanged"):
        raise AssertionError(where)
    if file in LEFT_OUT:
        left_out = expected[LEFT_OUT[file]]
        assert left_out and found[LEFT_OUT[file]] != left_out, where
        found, expected = ({**x, LEFT_OUT[file]: None} for x in (found, expected))
    assert found == expected, where


@pytest.mark.parametrize(("file", "name"), [(STATE, "variables"), (MODEL, "model")])
def test_a_file_of_another_size_is_not_read(copy, file, name):
    """To hash 64 GB would take minutes."""
    os.truncate(Path("run", file), 1 << 36)
    assert "but found 68,719,476,736 bytes" in outcome(name, "run")[1]


@pytest.mark.parametrize("file", READ_BY)
def test_commands_that_do_not_read_a_file_need_it_not(copy, file):
    Path("run", file).unlink()
    for name in {"evaluate", "model", "runs", "log"} - READ_BY[file]:
        assert outcome(name, "run")[0] == copy[name][0], name


@pytest.mark.parametrize("checkpoints", [False, True])
def test_the_files_of_another_run_are_refused_together(copy, checkpoints):
    """Either everything but the checkpoints is exchanged, or the checkpoints alone."""
    for path in Path("other").iterdir():
        if (path.name == "checkpoints") == checkpoints and path.name != ".lock":
            target = Path("run", path.name)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
            shutil.copytree(path, target) if path.is_dir() else shutil.copy(path, target)
    for name in READERS:
        found, said = outcome(name, "run")
        assert found is None and "run/run.json is of another run than checkpoint step-" in said
        assert "expected the id '" in said and "', but found '" in said, name


def test_an_older_end_of_the_same_run_is_not_used(copy):
    """`run.json` and the final files are those of a copy from before the run was extended."""
    treadle("resume", "run", "--epochs", 3)
    expected = variables("run")
    assert expected != copy["variables"][0]
    for name in (RUN, STATE, MODEL):
        shutil.copy(Path("whole", name), Path("run", name))
    said = "run/run.json says that the run ended before checkpoint step-000000000006"
    with pytest.warns(UserWarning, match=said):
        assert weights("run") == expected_weights(expected)
    assert outcome("evaluate", "run")[1].startswith(said)
    assert "did not finish" in outcome("model", "run")[1]


def expected_weights(values):
    return [values["model/layers/0/kernel"], values["model/layers/0/bias"]]


def test_averages_are_computed_again_from_the_checkpoint(copy):
    """The checkpoint holds the weights, and the file holds their averages."""
    expected = variables("averaged")
    last = library.load_run("averaged").variables(4)
    assert expected["model/layers/0/kernel"] != last["model/layers/0/kernel"].tolist()
    shutil.copytree("averaged", "run", dirs_exist_ok=True)
    Path("run", STATE).unlink()
    found, said = outcome("variables", "run")
    assert found == expected
    assert re.fullmatch(
        r"run/state\.safetensors: expected [0-9]+ bytes with the SHA-256 [0-9a-f]{12}…, as "
        r"run\.json lists, but found no file\. The values are those of checkpoint "
        r"step-000000000004, which are the same",
        said,
    )


def test_without_equal_values_the_error_is_one_sentence(copy):
    flip(Path("run", STATE), 0.9)
    shutil.rmtree("run/checkpoints/step-000000000004")
    for name in OF_WEIGHTS:
        found, said = outcome(name, "run")
        assert found is None and re.search(
            r"run/state\.safetensors: expected ([0-9]+) bytes with the SHA-256 [0-9a-f]{12}…, as "
            r"run\.json lists, but found \1 bytes with the SHA-256 [0-9a-f]{12}…; there is no "
            r"valid checkpoint of step 4\. Restore a copy of the file, or read a checkpoint, "
            r"treadle\.load_run\('[^']*run'\)\.variables\(step\)",
            said,
        ), name


def test_other_values_in_the_checkpoint_are_not_used(copy):
    """Such as the last weights, if training ended with the best ones."""
    state = read_arrays("run/state.safetensors")
    write_arrays("run/state.safetensors", {**state, "model/layers/0/bias": np.ones(1, "float32")})
    list_again(Path("run"))
    Path("run", STATE).unlink()
    found, said = outcome("evaluate", "run")
    assert found is None
    assert (
        "; the values in run/checkpoints/step-000000000004 are others, since training end" in said
    )


def test_files_that_are_absent_by_design_are_recorded_as_absent(tmp_path):
    class Bare(library.hooks.FinalModel):
        def end(self, loop, error):
            pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    data = library.data.from_arrays(np.ones((4, 2)), np.ones((4, 1)), batch_size=2)
    task = library.Supervised(model, "mse", "sgd")
    with library.Loop(task, tmp_path, hooks=[Bare()], console=False) as loop:
        loop.fit(data, epochs=1)
    files = read_run(tmp_path)["files"]
    assert files == {STATE: None, MODEL: None, HEALTH: None}
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = library.load_run(tmp_path).variables()
        np.testing.assert_array_equal(found["model/layers/0/kernel"], task.model.get_weights()[0])
    with pytest.raises(DirectoryError, match="holds no model: its task has none, or Keras could"):
        library.load_run(tmp_path).model()
