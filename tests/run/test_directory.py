"""Run directories: runs are kept apart, and nothing that was learned is lost."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.dying import killed
from tests.run_content import write_record
from treadle import data
from treadle.errors import ConfigurationError, DirectoryError, TreadleError, TreadleWarning

ROWS = 24


def source(batch_size: int = 8, rows: int = ROWS, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 3)).astype("float32")
    return data.from_arrays(x, x[:, :1], batch_size=batch_size)


class Line(treadle.Task):
    """Written as users write: no argument is kept."""

    def __init__(self, units: int = 2, learning_rate: float = 0.01) -> None:
        self.model = keras.Sequential([keras.layers.Dense(units), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(learning_rate)
        self.errors = {"a": [keras.metrics.MeanSquaredError()]}

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return keras.ops.mean((self.model(x) - y) ** 2)

        loss = treadle.minimize(objective, self.model, self.optimizer)
        self.errors["a"][0].update_state(y, self.model(x))
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": keras.ops.mean((self.model(x) - y) ** 2)}


def run(directory: Path, seed: int = 0, console: bool = False, **how: Any) -> treadle.Loop:
    """Train as a script does, with other arguments where they are given."""
    keras.utils.set_random_seed(seed)
    made = {name: how.pop(name) for name in ("units", "learning_rate") if name in how}
    hooks, fresh = how.pop("hooks", ()), how.pop("fresh", False)
    train = how.pop("train", source())
    task = Line(**made)
    with treadle.Loop(task, directory, hooks=hooks, fresh=fresh, console=console) as loop:
        loop.fit(train, **{"epochs": 2, **how})
    return loop


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run with validation: tests copy it."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(directory, validation=source())
    return directory


def recorded(directory: Path) -> Any:
    return json.loads((directory / "run.json").read_text())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"learning_rate": 1.0}, r"settings\.learning_rate was 0\.01, now 1\.0"),
        ({"units": 3}, r"settings\.units was 2, now 3"),
        ({"seed": 1}, r"seed was 0, now 1"),
        ({"train": source(4)}, r"train\.length was 3, now 6; train\.batch_examples was 8, now 4"),
        ({"train": source(rows=20)}, r"train\.examples was 24, now 20"),
        ({"train": source(seed=5)}, r"train\.fingerprint was '\w+', now '\w+'"),
        ({"validation": source(4)}, r"validation\.validation\.length was 3, now 6"),
        ({"validation": {"a": source()}}, r"validation\.a was None, now \{"),
        ({"validate_every": "2 steps"}, r"validate_every\.of was 'epoch', now 'step'"),
        ({"epochs": 3}, r"epochs was 2, now 3.*override=\[\"epochs\""),
    ],
)
def test_another_configuration_is_not_the_finished_run(
    finished: Path, tmp_path: Path, changed: Any, message: str
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(finished, directory)
    with pytest.raises(DirectoryError, match=message):
        run(directory, **{"validation": source(), **changed})
    assert run(directory, validation=source()).reason == "it was finished before"


def test_backend_and_precision_are_part_of_the_configuration(tmp_path: Path) -> None:
    run(tmp_path)
    record = recorded(tmp_path)
    configuration = record["configuration"]
    assert configuration["backend"] == record["backend"] == keras.config.backend()
    assert configuration["precision"] == record["precision"] == "float32"
    configuration["backend"], configuration["precision"] = "another", "float99"
    write_record(tmp_path, record)
    with pytest.raises(
        DirectoryError, match=r"backend was 'another', now .*; precision was 'float99', now 'fl"
    ):
        run(tmp_path)


def test_a_finished_run_is_reported_and_has_its_final_state(tmp_path: Path, capsys: Any) -> None:
    first = run(tmp_path, validation=source())
    capsys.readouterr()
    again = run(tmp_path, console=True, validation=source())
    expected = f"the run in {tmp_path} is already finished; nothing was done: fresh=True trains "
    assert capsys.readouterr().out == f"{expected}again, another directory keeps both\n"
    assert again.progress == first.progress and again.progress.step == 6
    assert repr(again.history) == repr(first.history)
    assert "loss, m" not in repr(first.history) and "errors/a/0" in first.history.names()


class Failing(treadle.Hook):
    def __init__(self, error: BaseException, step: int) -> None:
        self.error, self.at = error, step

    def steps(self, loop: Any, logs: Any) -> None:
        if loop.progress.step >= self.at:
            raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [(KeyboardInterrupt(), "KeyboardInterrupt"), (ValueError("boom"), "ValueError: boom")],
)
def test_a_failed_run_is_recorded_and_resumes(
    tmp_path: Path, error: BaseException, text: str
) -> None:
    look = treadle.every("4 steps", lambda loop: None)
    with pytest.raises(type(error)):
        run(tmp_path, hooks=[look, Failing(error, 4)])
    record = recorded(tmp_path)
    assert (record["finished"], record["error"], record["progress"]["step"]) == (None, text, 4)
    assert not (tmp_path / "state.safetensors").exists() and not (tmp_path / "model.keras").exists()
    look = treadle.every("4 steps", lambda loop: None)
    again = run(tmp_path, hooks=[look])
    straight = run(tmp_path / "straight", hooks=[look])
    assert recorded(tmp_path)["error"] is None and again.progress.step == 6
    for path, value in straight.state.arrays().items():
        np.testing.assert_array_equal(again.state.arrays()[path], value, err_msg=path)
    assert again.history["loss"] == straight.history["loss"]
    logs = [(folder / "log.jsonl").read_text() for folder in (tmp_path, tmp_path / "straight")]
    assert len({len(text.splitlines()) for text in logs}) == 1


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda loop: loop.fit(source()), "needs an end"),
        (lambda loop: loop.fit(3, epochs=1), "cannot read batches from a int"),
        (lambda loop: loop.fit(source(), epochs=0), "epochs"),
        (lambda loop: next(loop.epochs(0)), "epochs"),
        (lambda loop: next(loop.steps(source(), every="often")), "often"),
    ],
)
def test_a_rejected_call_leaves_no_folder(tmp_path: Path, call: Any, text: str) -> None:
    directory = tmp_path / "runs" / "1"
    loop = treadle.Loop(Line(), directory, console=False)
    assert directory.exists()
    with pytest.raises(TreadleError, match=text):
        call(loop)
    assert not list(tmp_path.iterdir())
    loop.fit(source(), epochs=1)  # the same loop may be used afterwards
    assert recorded(directory)["finished"]


def test_a_rejected_call_keeps_the_files_of_a_run(tmp_path: Path) -> None:
    run(tmp_path / "run")
    before = sorted((tmp_path / "run").iterdir())
    loop = treadle.Loop(Line(), tmp_path / "run", console=False)
    with pytest.raises(ConfigurationError):
        loop.fit(source())
    assert sorted((tmp_path / "run").iterdir()) == before


def test_a_loop_that_trains_no_step_leaves_no_folder(tmp_path: Path) -> None:
    def evaluated(loop: Any) -> None:
        loop.evaluate(source())

    def left(loop: Any) -> None:
        for _ in loop.epochs(2):
            break

    for body in (evaluated, left):
        with treadle.Loop(Line(), tmp_path / "run", console=False) as loop:
            body(loop)
        assert list(tmp_path.iterdir()) == []
    with treadle.Loop(Line(), tmp_path / "run", console=False) as loop:
        left(loop)
        loop.fit(source(), epochs=1)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["finished"]


def test_a_failed_run_leaves_no_folder_that_it_created(tmp_path: Path) -> None:
    def broken() -> Any:
        raise OSError("no data")
        yield

    failures: list[tuple[Any, dict[str, Any]]] = [
        (OSError, {"train": broken}),
        (TreadleError, {"train": 3}),
        (ConfigurationError, {"hooks": [treadle.hooks.NonFinite("rollback"), 3]}),
    ]
    for error, how in failures:
        with pytest.raises(error):
            run(tmp_path / "a" / "b", **how)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").mkdir()
    with pytest.raises(OSError, match="no data"):
        run(tmp_path / "a", train=broken)
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]  # it was there before
    (tmp_path / "a" / "log.jsonl").touch()  # what a killed process leaves
    run(tmp_path / "a")


def test_other_files_in_the_directory_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "run.csv").write_text("mine")
    run(tmp_path)
    (tmp_path / "pretrained.keras").touch()
    run(tmp_path, fresh=True)
    assert (tmp_path / "pretrained.keras").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert (tmp_path / "data" / "run.csv").read_text() == "mine"


def test_the_user_s_own_files_are_not_overwritten(tmp_path: Path) -> None:
    for name in ("model.keras", "log.jsonl", "notes.txt"):
        (tmp_path / name).write_text("mine")
    for fresh in (False, True):
        with pytest.raises(
            DirectoryError,
            match=r"holds log\.jsonl, model\.keras, but no run\.json: these files are not of",
        ):
            run(tmp_path, fresh=fresh)
    assert {path.read_text() for path in tmp_path.iterdir()} == {"mine"}


@pytest.mark.parametrize("method", ["fit", "epochs", "steps", "step"])
def test_a_hook_cannot_train(method: str) -> None:
    x = np.zeros((8, 3), "float32")
    calls: dict[str, Any] = {
        "fit": lambda loop: loop.fit(source(), epochs=1),
        "epochs": lambda loop: list(loop.epochs(1)),
        "steps": lambda loop: list(loop.steps(source())),
        "step": lambda loop: loop.step((x, x[:, :1])),
    }

    wanted = True

    def training(loop: Any) -> None:
        if wanted:
            calls[method](loop)

    class Training(treadle.Hook):
        def record(self, loop: Any, record: Any) -> None:
            training(loop)

    hooks = (treadle.every("1 step", training), Training())
    for hook, name in zip(hooks, ("training", "Training.record"), strict=True):
        message = rf"loop\.{method} trains, and was called by the hook {name} while the loop"
        with (
            pytest.raises(ConfigurationError, match=message),
            treadle.Loop(Line(), hooks=[hook], console=False) as loop,
        ):
            loop.fit(source(), epochs=1)
    wanted = False
    loop.fit(source(), epochs=2)  # afterwards it may train again
    assert loop.progress.step > 3
    view: Any = loop.view
    with pytest.raises(AttributeError, match=rf"the view of a loop has no '{method}': call it on"):
        calls[method](view)


@pytest.mark.long
def test_a_saved_model_imports_no_other_framework(tmp_path: Path) -> None:
    code = f"""
        import sys
        import keras, numpy as np, treadle
        treadle.setup(seed=0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        task = treadle.Supervised(treadle.frozen_copy(model), "mse", "sgd")
        task.model.trainable = True
        x = np.ones((8, 3), "float32")
        board = treadle.hooks.TensorBoard(histograms="1 epoch")
        with treadle.Loop(task, {str(tmp_path)!r}, [board]) as loop:
            loop.fit(treadle.data.from_arrays(x, x[:, :1], batch_size=4), epochs=1)
        print("tensorflow" in sys.modules)
        print(keras.models.load_model({str(tmp_path / "model.keras")!r}).count_params())
    """
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    on_tensorflow = keras.config.backend() == "tensorflow"
    assert done.stdout.splitlines()[-2:] == [str(on_tensorflow), "4"]


def test_a_run_with_only_the_checkpoint_of_step_0_reports_that_it_starts_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = treadle.hooks.Checkpoint(every="2 steps")
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, hooks=[treadle.at("1 steps", killed)])
    run(tmp_path, hooks=[often, treadle.at("1 epochs", lambda loop: loop.save())], console=True)
    restarts = (
        "checkpoint after step 0: the run restarts from step 0. To lose less, save more often: "
    )
    restarts += "hooks=[treadle.hooks.Checkpoint(every='10 s')]"
    assert f"there is no {restarts}" in said(capsys)
    write_record(tmp_path, {**recorded(tmp_path), "finished": None})
    for file in tmp_path.glob("checkpoints/step-00000000000[1-9]*/*.safetensors"):
        file.write_bytes(file.read_bytes()[:100])
    run(tmp_path, console=True)
    told = said(capsys)
    assert "warning: skipped checkpoint step-000000000006" in told
    assert "there is no readable checkpoint after step 0: the run restarts from step 0" in told


def test_warnings_without_a_console_are_python_warnings(tmp_path: Path) -> None:
    def batches() -> Any:
        for _ in range(3):
            yield np.ones((8, 3), "float32"), np.ones((8, 1), "float32")

    told = (
        "a resume of this run may not be exact: the function batches cannot seek: a resumed run "
        "draws and discards the batches before its position, which is exact only if they come in "
        "the same order again"
    )
    with pytest.warns(TreadleWarning, match=f"^{told}$"):
        run(tmp_path, train=batches)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """What was shown, in one line."""
    return " ".join(capsys.readouterr().out.split())


def test_a_run_whose_settings_are_not_numbers_resumes(tmp_path: Path) -> None:
    nan = float("nan")

    class Odd(Line):
        def __init__(self, rate: float = nan, pair: Any = (1.0, {"a": nan})) -> None:
            super().__init__()
            self.limit = nan

    def trained(epochs: int, **changed: Any) -> int:
        configuration: Any = {"scale": nan, "nested": ((1, nan), {"b": -float("inf")}), **changed}
        keras.utils.set_random_seed(0)
        task = Odd()
        with treadle.Loop(task, tmp_path, configuration=configuration, console=False) as loop:
            loop.fit(source(), steps=epochs)
        return loop.progress.step

    assert trained(2) == 2 and trained(2) == 2
    same = {"nested": ([1.0, nan], {"b": -float("inf")})}  # a number may be whole or not
    assert trained(2, **same) == 2
    with pytest.raises(DirectoryError, match=r"configuration: scale was nan, now 1\.0\. Choose"):
        trained(2, scale=1.0)
    with pytest.raises(DirectoryError, match=r"configuration: scale was nan, now 'nan'\. Choose"):
        trained(2, scale="nan")
