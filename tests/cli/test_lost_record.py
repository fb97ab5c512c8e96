"""Commands on a run directory whose `run.json` is lost: trust is that of any other directory."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401
from tests.run_content import content_of, write_record

COPY = "run.json is missing: the record of the run is that of checkpoint step-"


@pytest.fixture
def run(apart, tmp_path, monkeypatch):  # noqa: F811
    """A run of the user's own script that failed after three steps, without its `run.json`."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run_tiny("--directory", "mine", "--quiet", "--set", "fails=late", code=1)
    Path("mine/run.json").unlink()
    return Path("mine")


def mend():
    """Remove the cause of the failure from the script."""
    text = Path("mine.py").read_text()
    assert 'self.fails == "late":' in text
    Path("mine.py").write_text(text.replace('self.fails == "late":', "False:"))


@pytest.mark.parametrize(
    "command",
    [["resume", "mine"], ["run", "mine.py:Tiny", "--set", "fails=late", "--directory", "mine"]],
)
def test_the_run_resumes(run, command):
    mend()
    shown = " ".join(treadle(*command).output.split())
    assert shown.count(COPY) == 1
    record = json.loads((run / "run.json").read_text())
    assert record["finished"] and record["progress"]["step"] == 4
    assert record["configuration"]["recipe"].endswith("mine.py:Tiny")
    assert "already finished" in treadle("resume", "mine").output


def test_commands_that_read_use_the_copy_and_change_nothing(run):
    mend()
    before = content_of(run)
    shown = treadle("evaluate", "mine", "--json")
    assert json.loads(shown.stdout)["test"]["loss"] > 0
    assert shown.stderr.count(COPY) == 1
    assert "mine: evaluating its weights after step 0" in shown.stderr
    assert COPY in json.loads(treadle("replay", "mine", "--step", 2, "--json").stdout)["notes"][0]
    [found] = json.loads(treadle("runs", ".", "--json").stdout)["runs"]
    assert (found["directory"], found["state"]) == ("mine", "interrupted")
    assert COPY in found["reason"] and found["step"] == 3
    assert "step 3" in treadle("log", "mine").stdout
    assert content_of(run) == before


def test_a_copy_in_a_checkpoint_is_trusted_no_more_than_the_file(run, tmp_path):
    script = tmp_path / "evil.py"
    script.write_text(f"open({str(tmp_path / 'executed')!r}, 'w').close()\nthis is not Python (")
    shutil.copytree("mine", "sent")
    for command in (["resume"], ["evaluate"], ["replay", "--step", 1]):
        assert "you did not start a run with it" in treadle(*command, "sent", code=2).stderr
    from treadle.checkpoint.format import digest_line

    for directory in ("sent", "mine"):
        for manifest in Path(directory).rglob("manifest.json"):
            record = json.loads(manifest.read_text())
            record["about"]["run"]["configuration"]["recipe"] = f"{script}:Evil"
            manifest.write_text(json.dumps(record))
            manifest.with_name("manifest.sha256").write_bytes(digest_line(manifest.read_bytes()))
        for command in (["resume"], ["evaluate"], ["replay", "--step", 1]):
            shown = treadle(*command, directory, code=2).stderr
            assert f"{directory} holds a run of the script {script} (SHA-256 " in shown
        treadle("runs", ".")
        treadle("log", directory)
    assert not (tmp_path / "executed").exists()


def test_without_a_copy_the_error_is_one_sentence(run):
    shutil.rmtree("mine/checkpoints")
    for command in (["resume"], ["evaluate"], ["replay", "--step", 1]):
        shown = treadle(*command, "mine", code=2).stderr
        assert shown == "error: mine holds no run: there is no run.json in it\n"


def test_the_weights_that_a_directory_names_are_not_read(apart, tmp_path):  # noqa: F811
    run_tiny("--directory", "before", "--quiet")
    run_tiny("--directory", "after", "--quiet", "--weights-from", "before", "--steps", 1)
    record = json.loads(Path("after/run.json").read_text())
    record["configuration"]["weights_from"] = str(tmp_path / "elsewhere")
    write_record(Path("after"), {**record, "finished": None})
    treadle("resume", "after", "--quiet")  # its checkpoint has the weights
    write_record(Path("after"), {**record, "finished": None})
    shutil.rmtree("after/checkpoints")
    assert treadle("resume", "after", code=2).stderr == (
        f"error: the run in after began with the weights of {tmp_path / 'elsewhere'}, and has no "
        "checkpoint to resume from. A folder that a run directory names is not read: start the run "
        f"again with treadle run … --weights-from {tmp_path / 'elsewhere'} --directory after\n"
    )


def test_without_a_checkpoint_a_run_begins_with_the_given_weights_again(apart):  # noqa: F811
    run_tiny("--directory", "before", "--quiet")
    how = ("--directory", "after", "--quiet", "--weights-from", "before", "--steps", 1)
    run_tiny(*how)
    expected = content_of(Path("after"))
    record = json.loads(Path("after/run.json").read_text())
    write_record(Path("after"), {**record, "finished": None})
    shutil.rmtree("after/checkpoints")
    run_tiny(*how)
    assert content_of(Path("after"))["state.safetensors"] == expected["state.safetensors"]
