"""The commands: what they print, and the codes that they exit with."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from treadle import __version__, cli
from treadle.checkpoint import Checkpoints
from treadle.checkpoint.arrays import read_arrays
from treadle.cli import environment, output
from treadle.core import backend_choice
from treadle.errors import BackendError
from treadle.recipes import find

TASK = """
    import keras
    import numpy as np
    import treadle
    from keras import ops

    class Tiny(treadle.Task):
        epochs = 2

        def __init__(self, fails: str = "", rate: float = 0.1):
            self.model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.SGD(rate)
            self.fails = fails
            print("made")
            if fails == "init":
                raise EOFError("in init")

        def train_step(self, batch):
            x, y = batch
            if self.fails == "user":
                raise KeyError("my own mistake")
            if self.fails == "step":
                return {"loss": x}
            def objective():
                return ops.mean(ops.subtract(self.model(x), y) ** 2)
            return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

        def eval_step(self, batch):
            x, y = batch
            return {"loss": ops.mean(ops.subtract(self.model(x), y) ** 2)}

        def datasets(self):
            if self.fails == "interrupt":
                raise KeyboardInterrupt
            if self.fails == "datasets":
                return 3
            x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
            data = treadle.data.from_arrays(x, x[:, :1], batch_size=4)
            return treadle.Datasets(train=data, validation={"easy": data, "hard": data}, test=data)

        def describe(self):
            return "a tiny task"

        def hooks(self):
            def failing(loop):
                if self.fails == "late interrupt":
                    raise KeyboardInterrupt
                if self.fails == "late":
                    raise ValueError("boom")
            return [treadle.at("3 steps", failing)]

    class Endless(Tiny):
        epochs = None

    model = Tiny
    number = 3
"""


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    """A separate folder, a clean environment, and Keras with its default settings."""
    import keras

    monkeypatch.chdir(tmp_path)
    for name in ("KERAS_BACKEND", "TREADLE_DATA", "TF_CPP_MIN_LOG_LEVEL"):
        value = os.environ.get(name)
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    keras.backend.clear_session()
    Path("mine.py").write_text(textwrap.dedent(TASK))


def treadle(*arguments, code=0):
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def run_tiny(*arguments, code=0, task="mine.py:Tiny"):
    import keras

    keras.backend.clear_session()
    return treadle("run", task, *arguments, code=code)


def test_help_names_the_commands_and_exit_codes():
    text = treadle("--help").output
    commands = ("recipes", "run", "resume", "evaluate", "replay", "certify", "find-lr", "schedule")
    commands += ("tune",)
    for word in (*commands, "Exit codes"):
        assert word in text
    assert treadle("--version").output == f"treadle {__version__}\n"


def test_recipes_lists_each_with_its_settings():
    text = treadle("recipes").output
    for name in find():
        assert name in text
    assert "learning_rate=0.001" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "Did you mean 'digits'?"),
        (["none.py:Task"], "there is no file"),
        (["digits", "--set", "unit=3"], "Did you mean 'units'?"),
        (["digits", "--set", "units=x"], "expected int"),
        (["digits", "--until", "20 steps"], "--until takes a time"),
        (["digits", "--until", "soon"], "cannot read 'soon'"),
        (["digits", "--backend", "numpy"], "unknown backend 'numpy'"),
        (["digits", "--precision", "float17"], "unknown precision 'float17'"),
        (["digits", "--data-dir", "nowhere"], "there is no such folder"),
        (["linear-native", "--backend", "jax"], "runs on tensorflow only, but --backend is jax"),
        (
            ["mine.py:Tiny", "--set", "rate=0.1", "fails=init"],
            "unexpected argument 'fails=init': repeat --set for each setting, as --set fails=init",
        ),
        (["mine.py:Tiny", "more"], "unexpected argument 'more': see --help"),
        (["mine.py:Endless"], "does not define how long it trains"),
        (["mine.py:number"], "is no task, but int"),
        (["mine.py:Tiny", "--set", "fails=datasets"], "must return treadle.Datasets"),
    ],
)
def test_what_cannot_be_meant_is_one_red_line(arguments, message):
    result = treadle("run", *arguments, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


@pytest.mark.parametrize(
    "arguments", [["--epochs", "0"], ["--seed", "-1"], ["--window", "0"], ["--nonsense"]]
)
def test_wrong_usage_exits_with_2(arguments):
    treadle("run", "digits", *arguments, code=2)


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
    import keras

    keras.backend.clear_session()
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
    monkeypatch.setattr(type(active()), "bfloat16_pays", lambda self: True)
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
    monkeypatch.setattr(type(active()), "bfloat16_pays", lambda self: False)
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


def test_a_run_may_begin_with_the_weights_of_another():
    import keras

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
    keras.backend.clear_session()  # as in another process
    longer = CliRunner().invoke(cli.app, ["resume", "after", "--steps", "3", "--json"])
    assert longer.exit_code == 0, longer.output
    assert json.loads(longer.stdout)["progress"]["step"] == 3
    missing = run_tiny("--weights-from", "nowhere", code=2)
    assert "nowhere holds no run" in missing.stderr


def test_the_seed_decides():
    runs = [json.loads(run_tiny("--json", "--seed", seed).stdout)["last"] for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


SETS_UP = "import keras, treadle\nkeras.backend.clear_session()\n"


def setting_up(line, *arguments, code=0):
    Path("sets_up.py").write_text(
        SETS_UP + line + "\nfrom mine import Tiny as Base\n"
        "class Own(Base):\n    def train_step(self, batch):\n"
        "        return super().train_step(batch)\n"
    )
    result = run_tiny("--json", *arguments, task="sets_up.py:Own", code=code)
    if code:
        return result.stderr
    told = json.loads(result.stdout)
    run = json.loads(Path(told["directory"], "run.json").read_text())
    return told["last"], run["configuration"]["seed"], run["seed"]


@pytest.mark.long
def test_the_seed_of_the_command_wins_over_that_of_the_file():
    line = "treadle.setup(seed=1)"
    files_own, third, fourth = (setting_up(line, *s) for s in ((), ("--seed", 3), ("--seed", 4)))
    assert [run[1:] for run in (files_own, third, fourth)] == [(1, 1), (3, 3), (4, 4)]
    assert files_own[0] != third[0] != fourth[0]
    assert files_own == setting_up("treadle.setup(seed=8)", "--seed", 1)
    assert setting_up("")[1:] == (0, 0)


def test_what_the_command_says_is_evaluated_again():
    last, _, _ = setting_up("treadle.setup(seed=1)", "--seed", 3)
    import keras

    keras.backend.clear_session()
    results = json.loads(treadle("evaluate", "runs/Own-1", "--json").stdout)
    assert results["validation/easy"]["loss"] == last["val_easy_loss"]


def test_the_precision_of_the_command_wins_over_that_of_the_file():
    import keras

    try:
        setting_up("treadle.setup(precision='mixed_bfloat16')", "--precision", "float32")
    finally:
        keras.config.set_dtype_policy("float32")
    run = json.loads(Path("runs/Own-1/run.json").read_text())
    assert run["configuration"]["precision"] == "float32"


def test_the_backend_of_the_command_wins_over_that_of_the_file():
    import keras

    backend = keras.config.backend()
    other = "jax" if backend != "jax" else "torch"
    line = f"treadle.setup(backend={other!r})"
    setting_up(line, "--backend", backend)
    assert f"Keras already runs on {backend!r}" in setting_up(line, code=2)


def test_a_seed_that_keras_own_function_sets_over_the_command_is_refused():
    line = "keras.utils.set_random_seed(1)"
    assert setting_up(line)[1:] == (1, 1)
    assert (
        "--seed 3 has no effect, since the file itself sets the seed 1 with Keras' own function: "
        "write treadle.setup(seed=1) there"
    ) in setting_up(line, "--seed", 3, code=2)
    assert setting_up("treadle.setup(seed=1)", "--seed", 2)[1:] == (2, 2)  # nothing is left behind


def test_windows_and_eager_steps_agree():
    runs = [json.loads(run_tiny("--json", *how).stdout)["last"] for how in ((), ("--eager",))]
    assert runs[0] == pytest.approx(runs[1], rel=1e-5)
    assert json.loads(run_tiny("--json", "--window", 1).stdout)["last"] == runs[0]


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


def test_the_user_s_own_exception_keeps_its_traceback_and_its_notes():
    result = run_tiny("--set", "fails=user", code=1)
    assert "KeyError: 'my own mistake'" in result.stderr
    assert "mine.py" in result.stderr
    assert "in train_step, step 1 (epoch 1, batch 1)" in result.stderr
    assert not any(Path("runs").iterdir())
    assert "EOFError: in init" in run_tiny("--set", "fails=init", code=1).stderr


def test_an_error_in_the_step_exits_with_1():
    result = run_tiny("--set", "fails=step", code=1)
    assert result.stderr.splitlines()[-2].startswith("error: train_step returned 'loss' of shape")
    assert "step 1 (epoch 1, batch 1)" in result.stderr.splitlines()[-1]


def test_an_interrupt_exits_with_130():
    run_tiny("--set", "fails=interrupt", code=130)


@pytest.mark.parametrize("quiet", [(), ("--quiet",)])
def test_an_interrupt_is_told_once(quiet):
    result = run_tiny("--set", "fails=late interrupt", *quiet, code=130)
    assert result.output.count("interrupted") == 1
    assert ("interrupted after step 3" in result.stdout) == (not quiet)


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


def choose(monkeypatch, installed, configured=None, backend=None, only=None):
    monkeypatch.setattr(
        backend_choice,
        "find_spec",
        lambda name: SimpleNamespace(origin=name) if name in installed else None,
    )
    home = Path("home")
    home.mkdir(exist_ok=True)
    monkeypatch.setenv("KERAS_HOME", str(home))
    if configured is not None:
        (home / "keras.json").write_text(configured)
    return environment.choose(backend, only)


EVERY = ("tensorflow", "jax", "torch")


def test_the_option_wins_over_the_variable(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert choose(monkeypatch, EVERY, backend="torch") == "torch"


def test_the_variable_wins_over_the_configuration(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    assert choose(monkeypatch, EVERY, '{"backend": "torch"}') == "jax"


@pytest.mark.parametrize(
    ("configured", "backend"),
    [(None, "tensorflow"), ('{"backend": "torch"}', "torch"), ("{", "tensorflow")],
)
def test_then_comes_keras_own_configuration(monkeypatch, configured, backend):
    monkeypatch.delenv("KERAS_BACKEND")
    assert choose(monkeypatch, EVERY, configured) == backend


@pytest.mark.parametrize("configured", [None, '{"backend": "jax"}'])
def test_the_only_installed_backend_is_chosen(monkeypatch, configured):
    monkeypatch.delenv("KERAS_BACKEND")
    assert choose(monkeypatch, ("torch",), configured) == "torch"


def test_several_backends_without_the_configured_one_are_named(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(BackendError) as caught:
        choose(monkeypatch, ("jax", "torch"))
    assert str(caught.value) == (
        "Keras is configured for 'tensorflow', which is not installed; installed are jax and "
        "torch. Choose one: set KERAS_BACKEND=jax, call treadle.setup(backend='jax') before "
        "importing keras, or pass --backend jax to the treadle command"
    )


def test_no_backend_says_what_to_install(monkeypatch):
    monkeypatch.delenv("KERAS_BACKEND")
    with pytest.raises(BackendError) as caught:
        choose(monkeypatch, ())
    assert str(caught.value) == (
        "no backend is installed: pip install 'treadle[tensorflow]', 'treadle[jax]' or "
        "'treadle[torch]'"
    )


def test_a_task_s_only_backend_is_chosen_unless_another_was_asked_for(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    with pytest.raises(BackendError, match="KERAS_BACKEND is jax: use --backend tensorflow"):
        choose(monkeypatch, EVERY, only="tensorflow")
    monkeypatch.delenv("KERAS_BACKEND")
    assert choose(monkeypatch, EVERY, only="tensorflow") == "tensorflow"
    with pytest.raises(BackendError) as caught:
        choose(monkeypatch, ("jax",), only="tensorflow")
    assert str(caught.value) == (
        "this task runs on tensorflow only, which is not installed: pip install "
        "'treadle[tensorflow]' (installed: jax)"
    )


def test_a_folder_of_a_backend_s_name_is_no_backend(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backend_choice, "BACKENDS", ("not_a_real_backend",))
    (tmp_path / "not_a_real_backend").mkdir()
    assert backend_choice.installed_backends() == ()


def test_run_uses_the_backend_of_the_run_in_the_directory(monkeypatch):
    run_tiny("--quiet", "--directory", "here")
    monkeypatch.delenv("KERAS_BACKEND")
    recorded = json.loads(Path("here/run.json").read_text())["backend"]
    other = next(name for name in EVERY if name != recorded)
    Path("home").mkdir()
    Path("home/keras.json").write_text(json.dumps({"backend": other}))
    monkeypatch.setenv("KERAS_HOME", "home")
    assert json.loads(run_tiny("--directory", "here", "--json").stdout)["finished_before"]


def test_a_run_whose_backend_is_not_installed_is_named(monkeypatch):
    run_tiny("--quiet", "--directory", "here")
    monkeypatch.setattr(backend_choice, "find_spec", lambda name: None)
    for command in (["evaluate"], ["resume"], ["replay", "--step", 1]):
        message = treadle(*command, "here", code=2).stderr
        assert "here holds a run on" in message and "is not installed: pip install" in message


@pytest.mark.long
def test_the_command_starts_without_chatter():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
    result = subprocess.run(
        [sys.executable, "-c", "from treadle.cli import main; main()", "run", "linear", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert abs(json.loads(result.stdout)["last"]["prediction_of_3"] - 3) < 0.5


def test_help_shows_no_types_of_flags_and_has_examples():
    for command in (
        "run",
        "resume",
        "evaluate",
        "replay",
        "certify",
        "find-lr",
        "schedule",
        "tune",
    ):
        text = treadle(command, "--help").output
        assert "<bool>" not in text and "<str>" not in text and "<path>" not in text
        assert f"treadle {command} " in text[text.index("Examples:") :]
    assert "<bool>" not in treadle("--help").output


def test_help_of_a_task_lists_its_settings():
    text = treadle("run", "digits", "--help").output
    assert "Settings of digits, given as --set NAME=VALUE:" in text
    assert re.search(r"batch_size +int, default 64, searched by tune in 16,32,64,128", text)
    own = treadle("run", "mine.py:Tiny", "--epochs", 2, "--help").output
    assert re.search(r"rate +float, default 0.1\n", own)
    assert "Settings of" not in treadle("run", "--help").output
    assert "mine.py" not in treadle("run", "none.py", "--help").output


@pytest.mark.parametrize("option", [["--batch-size", "32"], ["--batch-size=32"]])
def test_an_option_that_is_a_setting_gets_a_hint(option):
    text = " ".join(treadle("run", "digits", *option, code=2).output.replace("│", " ").split())
    assert (
        "No such option: --batch-size. It is a setting of the task digits: use --set batch_size=32"
    ) in text
    text = treadle("run", "digits", "--nonsense", "32", code=2).output
    assert "No such option: --nonsense" in text and "--set" not in text


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"treadle {__version__}\n"


WRONG = [
    (["replay", "here", "--step", "99"], "there is no step 99 in here: its steps are 1 to 4"),
    (["replay", "here"], "specify the step: either --step N"),
    (["replay", "here", "--bisect", "los > 5"], "names 'los', which is neither a value"),
    (["replay", "here", "--bisect", "loss >"], "cannot read the condition 'loss >'"),
    (["replay", "here", "--bisect", "loss > 1e9"], "holds for none of the 4 steps in"),
    (
        ["schedule", "cyclick(1, 2, 3)"],
        "there is no schedule 'cyclick'. Did you mean 'Cyclic'?",
    ),
    (["schedule", "cyclic(1, 2)"], "Cyclic needs step_size; its arguments are low, high"),
    (["schedule", "cyclic(1, 2, size=3)"], "Cyclic has no argument 'size'. Did you mean"),
    (["schedule", "warm_up(cosine_decay(1), 5)"], "CosineDecay needs decay_steps"),
    (["schedule", "one_cycle(1, 2, 3, 4, 5, 6)"], "OneCycle takes 5 arguments (peak, steps"),
    (["schedule", "cyclic(a, 2, 3)"], "cannot read the schedule 'cyclic(a, 2, 3)'"),
]
REFUSE = """
import contextlib, io, json, sys
from treadle.cli import main

answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["treadle", *arguments]
    printed, code = io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as end:
            code = end.code
    answers.append([code, "keras" in sys.modules, printed.getvalue()])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Exit code, whether Keras was imported, and what was printed, of each of `WRONG`.

    All of them in one process: a second one would take most of its time to import.
    """
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "mine.py").write_text(textwrap.dedent(TASK))
    with contextlib.chdir(folder):
        run_tiny("--quiet", "--directory", "here")
    arguments = json.dumps([arguments for arguments, _ in WRONG])
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=folder,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(each) for each, _ in WRONG])
def test_wrong_arguments_are_refused_without_importing_keras(number, refused):
    code, imported, printed = refused[number]
    assert WRONG[number][1] in printed
    assert (code, imported) == (2, False)


@pytest.mark.long
def test_what_takes_long_is_shown_in_plain_lines_when_piped():
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "run", "mine.py:Tiny"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("importing keras and ")
    assert "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr


def test_lines_of_a_terminal_are_broken_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = SimpleNamespace(isatty=lambda: True)
    text = "error: one sentence with a/path/that/is/longer/than/the/terminal at the end"
    assert output.fitted(text, stream).split("\n") == [
        "error: one sentence with",
        "a/path/that/is/longer/than/the/terminal",
        "at the end",
    ]
    assert output.fitted(text, SimpleNamespace(isatty=lambda: False)) == text
