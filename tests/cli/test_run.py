"""`treadle run`: its files and output, its options, and how it ends."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tests.cli_runs import apart, run_tiny, treadle  # noqa: F401
from treadle.checkpoint import Checkpoints
from treadle.checkpoint.arrays import read_arrays
from treadle.core import process_settings


def test_a_run_leaves_its_files_and_says_where():
    result = run_tiny("--quiet")
    assert "loss" in result.stdout
    assert "runs/Tiny-1: " in result.stdout
    assert "epoch 1" not in result.stdout
    names = {path.name for path in Path("runs/Tiny-1").iterdir()}
    assert {"run.json", "log.jsonl", "epochs.csv", "model.keras", "state.safetensors"} <= names
    run_tiny("--quiet")
    assert Path("runs/Tiny-2/run.json").exists()


def test_a_run_shows_what_it_trains_and_how_far_it_is():
    text = run_tiny("--epochs", 1).stdout
    assert "a tiny task" in text
    assert "epoch 1/1" in text


def test_a_run_that_ends_before_its_first_step_says_so():
    message = "ended before its first step, so nothing was trained: time limit reached. Give it"
    for _ in range(2):
        found = run_tiny("--until", "0.000001 s", "--directory", "short", code=2)
        assert message in " ".join(found.stderr.split())
    run_tiny("--epochs", 1, "--directory", "short", "--override")


@pytest.fixture
def float32_again():
    import keras

    yield
    keras.config.set_dtype_policy("float32")


def test_precision_is_recorded_and_belongs_to_the_run(float32_again):
    told = json.loads(run_tiny("--json", "--precision", "mixed_float16", "--directory", "d").stdout)
    assert 0 < told["last"]["loss_scale"] <= 2.0**15
    record = json.loads(Path("d/run.json").read_text())
    assert record["precision"] == record["configuration"]["precision"] == "mixed_float16"
    again = run_tiny("--precision", "float32", "--directory", "d", code=2)
    assert "precision was 'mixed_float16', now 'float32'" in again.stderr
    assert json.loads(treadle("evaluate", "d", "--json").stdout)["test"]["loss"] > 0


@pytest.mark.long
def test_bfloat16_is_recommended_where_it_pays(monkeypatch, tmp_path):
    import keras

    from treadle.backends.base import active
    from treadle.cli import advice

    large = SimpleNamespace(model=keras.Sequential([keras.Input((512,)), keras.layers.Dense(512)]))
    small = SimpleNamespace(model=keras.Sequential([keras.Input((512,)), keras.layers.Dense(64)]))
    images = keras.Input((8, 8, 64))
    pictures = SimpleNamespace(model=keras.Sequential([images, keras.layers.Conv2D(64, 3)]))
    unbuilt = SimpleNamespace(model=keras.Sequential([keras.layers.Dense(512)]))
    monkeypatch.setattr(type(active()), "bfloat16_pays", True)
    cpu = tmp_path / "cpuinfo"
    cpu.write_text("processor : 0\nflags\t: fpu avx512f avx512_bf16\n")
    monkeypatch.setattr(advice, "CPU", cpu)
    word = "this CPU has instructions for bfloat16: --precision mixed_bfloat16 is worth trying"
    tasks = (large, pictures, small, unbuilt)
    assert [advice.on_precision(task) for task in tasks] == [word, word, None, None]
    assert word not in run_tiny().stderr
    code = Path("mine.py").read_text().replace("Input((2,))", "Input((512,))")
    code = code.replace("Dense(1)", "Dense(512)").replace("size=(8, 2)", "size=(8, 512)")
    Path("mine.py").write_text(code)
    assert run_tiny("--directory", "a").stderr.count(word) == 1
    for silent in (["--directory", "a"], ["--precision", "float32"], ["--quiet"], ["--json"]):
        assert word not in run_tiny(*silent).stderr
    cpu.write_text("flags\t: fpu avx512f\n")
    assert advice.on_precision(large) is None
    cpu.unlink()
    assert advice.on_precision(large) is None
    cpu.write_text("flags\t: amx_bf16\n")
    assert advice.on_precision(large) == word
    monkeypatch.setattr(type(active()), "bfloat16_pays", False)
    assert advice.on_precision(large) is None


def test_json_is_all_that_is_printed():
    result = run_tiny("--json", "--steps", 3)
    told = json.loads(result.stdout)
    assert told["progress"]["step"] == 3
    assert told["directory"] == "runs/Tiny-1"
    assert told["last"]["val_easy_loss"] > 0
    assert not told["finished_before"]
    assert "made" in result.stderr  # what the task prints is kept out


def test_a_finished_run_is_not_run_again():
    first = json.loads(run_tiny("--json", "--directory", "here").stdout)
    again = json.loads(run_tiny("--json", "--directory", "here").stdout)
    assert again["finished_before"]
    assert (again["last"], again["progress"]) == (first["last"], first["progress"])
    assert "nothing was done" in run_tiny("--directory", "here").stdout
    result = run_tiny("--directory", "here", "--epochs", 3, "--set", "rate=0.2", code=2)
    assert "epochs was 2, now 3" in result.stderr
    assert "rate was 0.1, now 0.2" in result.stderr
    fresh = run_tiny("--json", "--directory", "here", "--epochs", 3, "--fresh")
    assert not json.loads(fresh.stdout)["finished_before"]


@pytest.mark.long
def test_a_run_may_begin_with_the_weights_of_another():

    run_tiny("--directory", "before", "--epochs", 3)
    how = ("--json", "--directory", "after", "--weights-from", "before", "--seed", 4, "--steps", 1)
    first = run_tiny(*how)
    begun = Checkpoints(Path("after/checkpoints")).before(0).state
    learned = read_arrays("before/state.safetensors")
    path = "model/layers/0/kernel"
    np.testing.assert_array_equal(begun[path], learned[path])
    assert begun["optimizer/iterations"] == 0 and learned["optimizer/iterations"] == 6
    again = json.loads(run_tiny(*how).stdout)
    assert again["finished_before"] and again["last"] == json.loads(first.stdout)["last"]
    longer = treadle("resume", "after", "--steps", "3", "--json")
    assert json.loads(longer.stdout)["progress"]["step"] == 3
    missing = run_tiny("--weights-from", "nowhere", code=2)
    assert "nowhere holds no run" in missing.stderr


@pytest.mark.long
def test_a_new_end_replaces_the_recorded_one():

    run_tiny("--directory", "here", "--quiet", "--steps", 3)
    for how, step in ((("--epochs", 3), 6), (("--steps", 7), 7), ((), 7), (("--epochs", 5), 10)):
        told = json.loads(treadle("resume", "here", *how, "--json").stdout)
        assert told["progress"]["step"] == step
    overridden = json.loads(Path("here/run.json").read_text())["overridden"]
    assert "steps was 3, now None" in overridden and "epochs was 3, now None" in overridden


def test_a_run_that_fails_leaves_no_folder():
    run_tiny("--set", "fails=interrupt", "--directory", "a/b", code=130)
    assert not Path("a").exists() and not Path("runs").exists()


def test_the_seed_decides():
    runs = [json.loads(run_tiny("--json", "--seed", seed).stdout)["last"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_windows_and_eager_steps_agree():
    runs = [json.loads(run_tiny("--json", *how).stdout)["last"] for how in ((), ("--eager",))]
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert json.loads(run_tiny("--json", "--window", 1).stdout)["last"] == runs[0]


def test_the_compiler_is_recorded_and_belongs_to_the_run():
    run_tiny("--compiler", "captured", "--directory", "compiled")
    recorded = json.loads(Path("compiled/run.json").read_text())
    assert recorded["configuration"]["compiler"] == "captured"
    assert recorded["options"]["compiler"] == "captured"
    found = run_tiny("--directory", "compiled", code=2).output
    assert "compiler was 'captured', now None" in " ".join(found.split())
    treadle("resume", "compiled", "--epochs", "3")
    recorded = json.loads(Path("compiled/run.json").read_text())
    assert recorded["options"]["compiler"] == "captured" and recorded["progress"]["epoch"] == 3
    found = run_tiny("--compiler", "gcc", code=2).output
    text = " ".join(found.replace("│", " ").split())
    assert "'gcc' is not one of 'auto', 'inductor', 'cuda-graph', 'captured'" in text


@pytest.mark.long
def test_deterministic_algorithms_belong_to_the_run(monkeypatch):

    switched = []
    monkeypatch.setattr("torch.use_deterministic_algorithms", switched.append)
    monkeypatch.setattr(process_settings, "_deterministic", False)
    for name in ("CUBLAS_WORKSPACE_CONFIG", "XLA_FLAGS"):  # put back at the end
        monkeypatch.setenv(name, "")
    run_tiny("--deterministic", "--directory", "here")
    recorded = json.loads(Path("here/run.json").read_text())
    assert recorded["configuration"]["deterministic"] is True and switched == [True]
    for command in (("resume", "here", "--epochs", "3"), ("evaluate", "here")):
        monkeypatch.setattr(process_settings, "_deterministic", False)
        treadle(*command)
        assert switched.pop() is True
    monkeypatch.setattr(process_settings, "_deterministic", False)
    found = run_tiny("--directory", "here", code=2).output
    assert "deterministic was True, now None" in " ".join(found.split())


def test_the_user_s_own_exception_keeps_its_traceback_and_its_notes():
    result = run_tiny("--set", "fails=user", code=1)
    assert "KeyError: 'my own mistake'" in result.stderr
    assert "mine.py" in result.stderr
    assert "in train_step, step 1 (epoch 1, batch 1)" in result.stderr
    assert not Path("runs").exists()
    assert "EOFError: in init" in run_tiny("--set", "fails=init", code=1).stderr


def test_an_error_in_the_step_exits_with_1():
    result = run_tiny("--set", "fails=step", code=1)
    assert result.stderr.splitlines()[-2].startswith("error: train_step returned 'loss' of shape")
    assert "step 1 (epoch 1, batch 1)" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_an_interrupt_is_told_once(quiet):
    result = run_tiny("--set", "fails=late interrupt", *quiet, code=130)
    assert result.output.count("interrupted") == 1
    assert ("interrupted after step 3" in result.stdout) == (not quiet)


def test_edited_code_is_told_of():
    first = json.loads(run_tiny("--json", "--directory", "here").stdout)["last"]
    file = Path("mine.py")
    text = file.read_text()
    assert text.count("ops.mean(") == 2
    file.write_text(text.replace("ops.mean(", "3 * ops.mean("))
    for how in (("--json",), ("--quiet",), ()):
        result = run_tiny("--directory", "here", *how)
        assert result.output.count("the code of Tiny.eval_step, Tiny.train_step changed since") == 1
        if how == ("--json",):
            assert json.loads(result.stdout)["last"] == first
