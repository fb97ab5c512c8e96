"""Which code and data a run directory can make a command use; the claims of docs/security.md."""

import hashlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

import treadle as library
from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401 - a fixture
from tests.forging import Bomb
from tests.run_content import write_record
from treadle.core import trust

COMMANDS = (["resume"], ["evaluate"], ["replay", "--step", 1])


@pytest.fixture
def state(tmp_path, monkeypatch):
    """The user's state folder, apart from that of other tests."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


@pytest.fixture
def run(state, apart, tmp_path):  # noqa: F811
    """A finished run of the user's own script."""
    run_tiny("--directory", "mine", "--quiet")
    return tmp_path / "mine"


def sha256(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def refusal(directory, script):
    return (
        f"error: {directory} holds a run of the script {script} (SHA-256 {sha256(script)}), and "
        "you did not start a run with it in this directory: the command would execute code that "
        "the directory chose. Inspect the script, then add --trust, or name the task yourself with "
        "--task FILE.py:Task\n"
    )


def edit(directory, **changes):
    """Change the configuration in `run.json`, as the sender of a directory can."""
    record = json.loads((directory / "run.json").read_text())
    record["configuration"].update(changes)
    write_record(directory, record)


def evil(folder):
    """A script that leaves a trace if it is executed."""
    path = folder / "evil.py"
    path.write_text(f"open({str(folder / 'executed')!r}, 'w').close()\nthis is not Python (")
    return path


def test_a_script_of_the_user_needs_no_question(run):
    for command, *options in COMMANDS:
        assert "script" not in treadle(command, "mine", *options).stderr


def test_a_recipe_runs_in_any_directory(state, apart, tmp_path):  # noqa: F811
    treadle("run", "linear", "--steps", 2, "--directory", "mine", "--quiet")
    shutil.copytree("mine", "sent")
    shutil.rmtree(state)
    assert "already finished" in treadle("resume", "sent", "--quiet").stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_script_that_another_directory_names_is_not_executed(run, command, tmp_path):
    name, *options = command
    shutil.copytree("mine", "sent")
    assert treadle(name, "sent", *options, code=2).stderr == refusal("sent", tmp_path / "mine.py")
    script = evil(tmp_path)
    for directory in ("sent", "mine"):  # nor in a directory of one's own that was replaced
        edit(Path(directory), recipe=f"{script}:Evil")
        shown = treadle(name, directory, *options, code=2).stderr
        assert shown == refusal(directory, script)  # it was not even parsed
    assert not (tmp_path / "executed").exists()


def test_a_relative_path_is_a_script_as_well(run, tmp_path):
    script = evil(tmp_path)
    edit(run, recipe="evil.py:Evil")
    assert treadle("resume", "mine", code=2).stderr == refusal("mine", script)


def test_trust_executes_the_script_from_then_on(run, tmp_path):
    shutil.copytree("mine", "sent")
    shown = treadle("evaluate", "sent", "--trust").stderr
    script = tmp_path / "mine.py"
    assert f"trusted: the script {script} (SHA-256 {sha256(script)})\n" in shown
    for command, *options in COMMANDS:
        assert "script" not in treadle(command, "sent", *options).stderr


def test_a_task_given_by_the_user_replaces_the_recorded_one(run, tmp_path):
    (tmp_path / "mine.py").rename(tmp_path / "moved.py")
    shown = treadle("evaluate", "mine", code=2).stderr
    assert shown == (
        f"error: the task of mine cannot be made again: there is no file {tmp_path / 'mine.py'}. "
        "If it has moved, name it with --task FILE.py:Task\n"
    )
    for command, *options in COMMANDS[1:]:
        treadle(command, "mine", *options, "--task", "moved.py:Tiny")
    treadle("evaluate", "mine", code=2)  # only resuming changes what the run records
    treadle("resume", "mine", "--epochs", 3, "--task", "moved.py:Tiny")
    assert "script" not in treadle("evaluate", "mine").stderr


def test_an_edited_script_of_the_user_runs_and_its_hashes_are_shown(run, tmp_path):
    script, before = tmp_path / "mine.py", sha256(tmp_path / "mine.py")
    script.write_text(script.read_text() + "\n# mended\n")
    note = f"the script {script} (SHA-256 {sha256(script)}) changed since you started this run "
    note += f"(SHA-256 {before})\n"
    assert note in treadle("evaluate", "mine").stderr
    assert note in treadle("resume", "mine", "--epochs", 3).stderr
    assert "script" not in treadle("resume", "mine", "--epochs", 4).stderr


def test_an_edited_script_inside_the_run_directory_is_not_executed(state, apart, tmp_path):  # noqa: F811
    inside = tmp_path / "mine" / "task.py"
    inside.parent.mkdir()
    shutil.copy("mine.py", inside)
    run_tiny("--directory", "mine", "--quiet", task="mine/task.py:Tiny")
    before = sha256(inside)
    treadle("evaluate", "mine")
    inside.write_text(inside.read_text() + "\n# replaced\n")
    assert treadle("resume", "mine", code=2).stderr == (
        f"error: the script {inside} (SHA-256 {sha256(inside)}) changed since you started the run "
        f"in mine (SHA-256 {before}), and another person may have changed it: it belongs to "
        "another user or lies in the run directory. Inspect it, then add --trust\n"
    )
    treadle("evaluate", "mine", "--trust")


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner here")
def test_a_script_replaced_by_another_user_is_not_executed(run, tmp_path, monkeypatch):
    script = tmp_path / "mine.py"
    script.write_text(script.read_text() + "\n# replaced\n")
    monkeypatch.setattr(os, "geteuid", lambda: script.stat().st_uid + 1)
    allowed = script.stat().st_uid == 0  # root may replace everything anyway
    assert trust.may_be_edited(script, run) is allowed
    monkeypatch.setattr(os, "geteuid", lambda: script.stat().st_uid)
    assert trust.may_be_edited(script, run)
    assert not trust.may_be_edited(tmp_path / "absent.py", run)


def test_a_pipe_in_the_place_of_a_script_is_refused(run, tmp_path):
    os.mkfifo(tmp_path / "pipe.py")
    edit(run, recipe=f"{tmp_path / 'pipe.py'}:Tiny")
    assert treadle("evaluate", "mine", "--trust", code=2).stderr == (
        f"error: the task of mine cannot be made again: {tmp_path / 'pipe.py'} is not a readable "
        "file. Name the task with --task FILE.py:Task\n"
    )


def test_a_note_for_another_directory_is_not_believed(run, state, tmp_path):
    shutil.copytree("mine", "sent")
    [note] = state.rglob("*.json")
    name = hashlib.sha256(str(tmp_path / "sent").encode()).hexdigest()
    shutil.copy(note, note.with_name(f"{name}.json"))
    assert "you did not start" in treadle("evaluate", "sent", code=2).stderr
    for damage in ("", "[]", "{}", "[" * 100_000):
        note.write_text(damage)
        assert "you did not start" in treadle("evaluate", "mine", code=2).stderr


def test_without_a_state_folder_a_note_says_what_follows(state, apart):  # noqa: F811
    state.write_text("a file in its place")
    shown = run_tiny("--directory", "mine").stderr
    assert "So `treadle resume mine` will not know that you started this run" in shown
    assert "you did not start" in treadle("resume", "mine", code=2).stderr


@pytest.mark.long
def test_a_data_folder_that_another_directory_names_is_not_read(state, apart, tmp_path):  # noqa: F811
    (tmp_path / "data").mkdir()
    run_tiny("--directory", "mine", "--quiet", "--data-dir", "data")
    for command, *options in COMMANDS:
        treadle(command, "mine", *options)
    shutil.copytree("mine", "sent")
    shown = treadle("evaluate", "sent", "--task", "mine.py:Tiny", code=2).stderr
    assert shown == (
        f"error: sent names the data folder {tmp_path / 'data'}, and you did not start this run "
        "with it here: give its data with --data-dir FOLDER, or accept that folder with --trust\n"
    )
    treadle("evaluate", "sent", "--task", "mine.py:Tiny", "--data-dir", "data")
    treadle("evaluate", "sent", "--trust")
    treadle("evaluate", "sent")
    edit(tmp_path / "mine", data_dir=str(tmp_path))
    assert "names the data folder" in treadle("evaluate", "mine", code=2).stderr


def test_commands_that_only_read_execute_nothing(run, tmp_path, monkeypatch):
    """`runs`, `log`, `load_run` and `warm_start` execute no code of a directory."""
    import keras
    from keras import layers, saving

    script = evil(tmp_path)
    bomb = f"import os\nos.close(os.open({str(tmp_path / 'executed')!r}, os.O_CREAT))\n"
    for name in ("mine", "evil", "treadle", "numpy", "sitecustomize", "conftest"):
        (run / f"{name}.py").write_text(bomb)
    (run / "model.keras").write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    edit(run, recipe=f"{script}:Evil", settings={"units": f"__import__({script.stem!r})"})
    for name in ("load_model", "deserialize_keras_object"):
        monkeypatch.setattr(saving, name, lambda *a, **k: pytest.fail("a model was loaded"))
    monkeypatch.chdir(run)  # where a module of the directory would be found first
    for recorded in (True, False):
        if not recorded:  # the record is that of a checkpoint
            (run / "run.json").unlink()
        shown = treadle("runs", tmp_path, "--json").stdout
        [found] = json.loads(shown[shown.index("{") :])["runs"]
        assert found["directory"] == str(run)
        assert "step 4" in treadle("log", run).stdout
        assert "step 4" in treadle("log", run, "--follow").stdout
        loaded = library.load_run(run)
        assert loaded.history["loss"] and loaded.variables()["model/layers/0/bias"].shape == (1,)
        model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
        task = library.Supervised(model, "mse", "sgd")
        assert library.warm_start(task, run) == ["model/layers/0/kernel", "model/layers/0/bias"]
    assert not (tmp_path / "executed").exists()


def test_help_says_what_is_executed():
    for command, *_ in COMMANDS:
        shown = " ".join(treadle(command, "--help").output.replace("│", " ").split())
        assert "a script, only if you started the run with it in this directory" in shown
        assert "--trust" in shown and "Inspect the script first" in shown


def test_the_page_names_existing_tests():
    tests = Path(__file__).parents[1]
    page = (tests.parent / "docs/security.md").read_text()
    named = re.findall(r"`(test_\w+)`", page)
    sources = [tests / f"{name}.py" for name in re.findall(r"tests/([\w/]+)\.py", page)]
    defined = {
        name for path in sources for name in re.findall(r"^def (test_\w+)", path.read_text(), re.M)
    }
    assert len(named) > 15
    assert set(named) - defined == set()
