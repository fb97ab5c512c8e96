"""Beginning with the weights of another run, and with nothing else of it."""

import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.dying import killed
from tests.run_content import write_record
from treadle.core.directory import read_run
from treadle.errors import ConfigurationError, DirectoryError, StateError


class Body(treadle.Task):
    """Weights that train and weights that follow, with seeds, metrics and slots."""

    def __init__(self, units: int = 3, outputs: int = 1, built: bool = True) -> None:
        inputs = [keras.Input((2,))] if built else []
        body = [keras.layers.Dense(units), keras.layers.BatchNormalization()]
        self.model = keras.Sequential([*inputs, *body, keras.layers.Dropout(0.5, seed=1)])
        self.head = keras.layers.Dense(outputs)
        self.scale = keras.Variable(1.0)
        if built:
            self.head.build((None, units))
        self.optimizer = keras.optimizers.Adam(0.1)
        self.error = keras.metrics.MeanSquaredError()

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return keras.ops.mean((self.head(self.model(x, training=True)) - y) ** 2)

        watched = [*self.model.trainable_variables, *self.head.trainable_variables]
        loss = treadle.minimize(objective, watched, self.optimizer)
        self.scale.assign_add(1.0)
        self.error.update_state(y, y + 1.0)
        return {"loss": loss}


def source() -> Any:
    x = np.random.default_rng(0).normal(size=(32, 2)).astype("float32")
    return treadle.data.from_arrays(x, x[:, :1], batch_size=8)


@pytest.fixture(name="before", scope="module")
def _before(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run, which tests only read."""
    directory = tmp_path_factory.mktemp("before")
    with treadle.Loop(Body(), directory, console=False) as loop:
        loop.fit(source(), epochs=2)
    return directory, loop.state.arrays()


WEIGHTS = [
    *("model/layers/0/kernel", "model/layers/0/bias"),
    *(f"model/layers/1/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")),
    *("head/kernel", "head/bias", "scale"),
]


def test_weights_are_taken_over_and_nothing_else(before: Any) -> None:
    directory, theirs = before
    task = Body()
    fresh = treadle.Loop(task, console=False).state.arrays()
    assert treadle.warm_start(task, directory) == WEIGHTS
    for path, value in treadle.Loop(task, console=False).state.arrays().items():
        expected = theirs if path in WEIGHTS else fresh
        np.testing.assert_array_equal(value, expected[path], err_msg=path)
    assert int(task.optimizer.iterations.numpy()) == 0


def test_the_newest_checkpoint_counts_of_a_run_that_has_not_finished(tmp_path: Path) -> None:
    hooks = [treadle.hooks.Checkpoint(every="2 steps"), treadle.at("5 steps", killed)]
    with (
        pytest.raises(OSError, match="killed"),
        treadle.Loop(Body(), tmp_path, hooks=hooks, console=False) as loop,
    ):
        loop.fit(source(), epochs=3)
    task = Body()
    treadle.warm_start(task, tmp_path)
    newest = treadle.checkpoint.Checkpoints(tmp_path / "checkpoints").latest()
    assert newest is not None and 0 < newest.progress.step < 5
    assert float(task.scale.numpy()) == 1.0 + newest.progress.step
    name = f"step-{newest.progress.step:012d}"
    (tmp_path / "checkpoints" / name / "manifest.json").unlink()
    with pytest.warns(treadle.errors.TreadleWarning, match=rf"^skipped checkpoint {name}: cannot"):
        treadle.warm_start(task, tmp_path)
    assert float(task.scale.numpy()) < 1.0 + newest.progress.step


def test_paths_may_have_other_names_and_some_be_left_out(before: Any) -> None:
    directory, theirs = before

    class Other(Body):
        def __init__(self) -> None:
            super().__init__(outputs=5)  # a new head
            self.encoder = self.model
            del self.model

    task = Other()
    kernel = np.asarray(task.head.kernel)
    renamed = {"model": "encoder", "model/layers/0": "encoder/layers/0"}
    done = treadle.warm_start(task, directory, rename=renamed, only=["encoder/*"])
    assert done == [path.replace("model", "encoder") for path in WEIGHTS[:6]]
    ours = treadle.Loop(task, console=False).state.arrays()
    np.testing.assert_array_equal(ours["encoder/layers/0/kernel"], theirs["model/layers/0/kernel"])
    np.testing.assert_array_equal(np.asarray(task.head.kernel), kernel)


@pytest.mark.long
def test_a_script_run_again_resumes_with_its_own_weights(before: Any, tmp_path: Path) -> None:
    directory, _ = before

    def script(folder: str, *hooks: Any) -> treadle.Loop:
        keras.utils.set_random_seed(0)
        task = Body()
        treadle.warm_start(task, directory)
        hooks = (treadle.hooks.Checkpoint(every="2 steps"), *hooks)
        with treadle.Loop(task, tmp_path / folder, hooks=hooks, console=False) as loop:
            loop.fit(source(), epochs=2)
        return loop

    straight = script("straight")
    with pytest.raises(OSError, match="killed"):
        script("cut", treadle.at("5 steps", killed))
    theirs = straight.state.arrays()
    for path, value in script("cut").state.arrays().items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ({"task": {"units": 4}}, StateError, r"0/kernel has shape \(2, 3\), expected \(2, 4\)"),
        ({"task": {"built": False}}, ConfigurationError, "model is not built, so it has no weigh"),
        ({"rename": {"modle": "x"}}, ConfigurationError, "rename has 'modle', which is not a path"),
        ({"rename": {"head": "x"}}, StateError, "has no value for head/kernel, head/bias. Did you"),
        (
            {"only": ["encoder/*"]},
            ConfigurationError,
            r"only='encoder/\*' matches no weight of this",
        ),
    ],
)
def test_a_mismatch_changes_nothing(
    before: Any, how: dict[str, Any], error: Any, message: str
) -> None:
    task = Body(**how.pop("task", {}))
    values = treadle.Loop(task, console=False).state.arrays()
    with pytest.raises(error, match=message):
        treadle.warm_start(task, before[0], **how)
    for path, value in treadle.Loop(task, console=False).state.arrays().items():
        np.testing.assert_array_equal(value, values[path], err_msg=path)


def test_a_directory_without_anything_learned(before: Any, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="holds no run"):
        treadle.warm_start(Body(), tmp_path / "nowhere")
    directory = tmp_path / "damaged"
    shutil.copytree(before[0], directory)
    (directory / "state.safetensors").unlink()
    for file in directory.glob("checkpoints/*/*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(DirectoryError, match=r"found no file; there is no valid checkpoint of"):
        treadle.warm_start(Body(), directory)
    for folder in directory.glob("checkpoints/step-*"):
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
    write_record(directory, {**read_run(directory), "finished": None})
    with pytest.raises(DirectoryError, match="did not finish, and has no checkpoint"):
        treadle.warm_start(Body(), directory)
