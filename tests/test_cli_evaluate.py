"""`treadle evaluate`: its results, and runs whose files, data or code are missing."""

import json
import shutil
from pathlib import Path

import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401


def test_evaluate_gives_the_run_s_last_values():
    last = json.loads(run_tiny("--json").stdout)["last"]
    import keras

    keras.backend.clear_session()
    results = json.loads(treadle("evaluate", "runs/Tiny-1", "--json").stdout)
    assert results["validation/easy"]["loss"] == last["val_easy_loss"]
    assert set(results) == {"validation/easy", "validation/hard", "test"}
    keras.backend.clear_session()
    assert "test: loss" in treadle("evaluate", "runs/Tiny-1").stdout


def test_evaluate_says_what_is_missing():
    assert "holds no run" in treadle("evaluate", "nowhere", code=2).stderr
    run_tiny("--quiet")
    state = Path("runs/Tiny-1/state.safetensors")
    state.unlink()
    import keras

    keras.backend.clear_session()
    assert "did not finish" in treadle("evaluate", "runs/Tiny-1").stderr  # its last checkpoint
    Path("mine.py").unlink()
    find_again = treadle("evaluate", "runs/Tiny-1", code=2).stderr
    assert "the task of runs/Tiny-1 cannot be made again: there is no file" in find_again
    Path("runs/Tiny-1/run.json").write_text('{"configuration": {"task": "Tiny"}}')
    assert "a run of a script" in treadle("evaluate", "runs/Tiny-1", code=2).stderr


@pytest.mark.long
@pytest.mark.parametrize("command", [["evaluate"], ["resume"], ["replay", "--step", 1]])
def test_data_that_has_moved_is_asked_for(command):
    import keras

    Path("old").mkdir()
    run_tiny("--quiet", "--data-dir", "old", "--directory", "here")
    Path("old").rename("new")
    keras.backend.clear_session()
    told = treadle(*command, "here", code=2).stderr
    assert f"the data folder of this run, {Path('old').absolute()}, no longer exists" in told
    assert "give its new location with --data-dir" in told
    treadle(*command, "here", "--data-dir", "new")


def test_what_was_learnt_before_an_error_can_be_evaluated():
    run_tiny("--set", "fails=late", "--directory", "here", code=1)
    import keras

    keras.backend.clear_session()
    result = treadle("evaluate", "here", "--json")
    assert json.loads(result.stdout)["validation/easy"]["loss"] > 0
    assert (
        "here holds a run that did not finish (ValueError: boom after step 3): evaluating its "
        "weights after step 0"
    ) in result.stderr
    shutil.rmtree("here/checkpoints")
    message = treadle("evaluate", "here", code=2).stderr
    assert "did not finish (ValueError: boom after step 3), and has no checkpoint" in message
