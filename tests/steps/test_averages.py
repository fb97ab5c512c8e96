"""A run whose optimizer averages weights (`use_ema=True`) ends with the averages, as `fit` does."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import some

import treadle
from tests.dying import Dying, DyingAtTheEnd
from treadle import data
from treadle.checkpoint.arrays import read_arrays

OPTIONS = treadle.Options(execution="eager")  # compiling would take most of the time here
rng = np.random.default_rng(0)
X = rng.normal(size=(40, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
VALIDATION = X[:16], Y[:16]


def sources() -> tuple[Any, Any]:
    train = data.from_arrays(X, Y, batch_size=8, shuffle=False)
    return train, data.from_arrays(*VALIDATION, batch_size=8, shuffle=False)


def new_model() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def averaging(rate: float = 0.05) -> Any:
    return keras.optimizers.SGD(rate, momentum=0.5, use_ema=True, ema_momentum=0.9)


def new_task() -> treadle.Supervised:
    return treadle.Supervised(new_model(), "mse", averaging())


def train(
    epochs: int = 3, directory: Path | None = None, hooks: Any = (), task: Any = None, **how: Any
) -> treadle.Loop:
    task = task or new_task()
    loop = treadle.Loop(task, directory, hooks, OPTIONS, console=False, **how)
    loop.fit(*sources(), epochs=epochs)
    return loop


def of_fit(epochs: int, callbacks: Any = ()) -> list[Any]:
    model = new_model()
    model.compile(averaging(), "mse", jit_compile=keras.config.backend() == "jax")
    kwargs = {"validation_data": VALIDATION, "epochs": epochs, "verbose": 0}
    model.fit(X, Y, 8, shuffle=False, callbacks=[*callbacks], **kwargs)
    return model.get_weights()


def averages(optimizer: Any) -> list[Any]:
    found = optimizer._model_variables_moving_average
    return [keras.ops.convert_to_numpy(average) for average in found]


def same(ours: list[Any], theirs: list[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_end_is_that_of_fit(tmp_path: Path) -> None:
    loop = train(directory=tmp_path)
    model = loop.task.model
    for ours, theirs in zip(model.get_weights(), of_fit(3), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    same(model.get_weights(), averages(loop.task.optimizer))
    # What was saved, what evaluates, and what a script that runs again finds, are the same.
    same(keras.models.load_model(tmp_path / "model.keras").get_weights(), model.get_weights())
    saved = read_arrays(tmp_path / "state.safetensors")
    np.testing.assert_array_equal(saved["model/layers/0/kernel"], model.get_weights()[0])
    _, validation = sources()
    predictions = X[:16] @ model.get_weights()[0] + model.get_weights()[1]
    expected = float(np.mean((predictions - Y[:16]) ** 2))
    assert loop.evaluate(validation)["loss"] == pytest.approx(expected, rel=1e-4)
    assert loop.history["val_loss"][-1] != pytest.approx(expected, rel=1e-4)  # of raw weights
    again = train(directory=tmp_path)
    assert again.reason == "it was finished before"
    same(again.task.model.get_weights(), model.get_weights())


def test_a_second_call_starts_from_the_averages_as_fit_does() -> None:
    model = new_model()
    model.compile(averaging(), "mse", jit_compile=keras.config.backend() == "jax")
    for _ in range(2):
        model.fit(X, Y, 8, shuffle=False, verbose=0)
        # Keras' second `fit` fails on JAX, where weights and averages are one buffer then.
        model.set_weights([np.array(value) for value in model.get_weights()])
    loop = train(epochs=1)
    loop.fit(sources()[0], epochs=1)
    for ours, theirs in zip(loop.task.model.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_longer_run_resumes_from_the_raw_weights(tmp_path: Path) -> None:
    train(epochs=2, directory=tmp_path / "a")
    longer = train(epochs=4, directory=tmp_path / "a", override=["epochs"])
    whole = train(epochs=4, directory=tmp_path / "b")
    assert longer.progress.step == whole.progress.step == 20
    for (path, ours), theirs in zip(
        longer.state.arrays().items(), whole.state.arrays().values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs, path)


@pytest.mark.parametrize("killed", some([Dying(7), Dying(13), DyingAtTheEnd()]))
def test_a_killed_run_ends_the_same(tmp_path: Path, killed: treadle.Hook) -> None:
    whole = train(directory=tmp_path / "a")
    saving = treadle.hooks.Checkpoint("5 steps")
    with pytest.raises(OSError, match="killed"):
        train(directory=tmp_path / "b", hooks=[saving, killed])
    rest = train(directory=tmp_path / "b")
    same(rest.task.model.get_weights(), whole.task.model.get_weights())
    same(rest.task.optimizer.variables, whole.task.optimizer.variables)
    same(
        keras.models.load_model(tmp_path / "b" / "model.keras").get_weights(),
        whole.task.model.get_weights(),
    )


def test_a_stopped_run_ends_with_averages_and_a_failed_one_does_not() -> None:
    stopping = treadle.every("7 steps", lambda loop: loop.stop("enough"))
    loop = train(hooks=[stopping])
    assert loop.progress.step == 7
    same(loop.task.model.get_weights(), averages(loop.task.optimizer))
    task = new_task()
    with pytest.raises(OSError, match="killed"):
        train(hooks=[Dying(7)], task=task)
    assert not np.array_equal(task.model.get_weights()[0], averages(task.optimizer)[0])


@pytest.mark.parametrize("swapped", [False, True])
def test_early_stopping_ends_with_the_averages_of_the_best_step(swapped: bool) -> None:
    stopping = treadle.hooks.EarlyStopping("val_loss", direction="max", patience=1)
    swap = treadle.hooks.KerasCallbacks(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
    loop = train(hooks=[swap, stopping] if swapped else [stopping])
    assert loop.progress.step == 10 and int(loop.task.optimizer.iterations) == 5
    same(loop.task.model.get_weights(), averages(loop.task.optimizer))
    for ours, theirs in zip(
        loop.task.model.get_weights(), train(epochs=1).task.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_hand_written_loop_ends_with_averages_at_the_end_of_its_with_block() -> None:
    task = new_task()
    with treadle.Loop(task, options=OPTIONS, console=False) as loop:
        for _ in loop.epochs(3):
            for _ in loop.steps(sources()[0], every="2 steps"):
                pass
        assert not np.array_equal(task.model.get_weights()[0], averages(task.optimizer)[0])
    same(task.model.get_weights(), train().task.model.get_weights())
    task = new_task()
    loop = treadle.Loop(task, options=OPTIONS, console=False)
    for _ in loop.epochs(3):
        for _ in loop.steps(sources()[0]):
            pass
    same(task.model.get_weights(), train().task.model.get_weights())


def test_single_steps_keep_raw_weights_between_them() -> None:
    task = new_task()
    loop = treadle.Loop(task, options=OPTIONS, console=False)
    for i in range(0, 40, 8):
        loop.step((X[i : i + 8], Y[i : i + 8]))
    assert not np.array_equal(task.model.get_weights()[0], averages(task.optimizer)[0])


class Pair(treadle.Task):
    """Two models; the third optimizer has averages of an earlier training, and is not used."""

    def __init__(self, shared: bool = False) -> None:
        self.one, self.two = new_model(), new_model()
        self.optimizers = [averaging(0.1), averaging(0.02)]
        self.old = averaging(1.0)
        self.old.apply([keras.ops.ones((3, 1)), keras.ops.ones((1,))], self.one.trainable_variables)
        self.shared = shared

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        models = (self.one, self.one if self.shared else self.two)
        for model, optimizer in zip(models, self.optimizers, strict=True):

            def objective(model: Any = model) -> Any:
                return keras.ops.mean((model(x, training=True) - y) ** 2)

            loss = treadle.minimize(objective, model, optimizer)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": keras.ops.mean((self.one(x, training=False) - y) ** 2)}


def test_each_optimizer_has_its_own_variables() -> None:
    loop = train(task=Pair())
    task = loop.task
    same(task.one.get_weights(), averages(task.optimizers[0]))
    same(task.two.get_weights(), averages(task.optimizers[1]))
    assert not np.array_equal(task.one.get_weights()[0], averages(task.old)[0])
    assert "warning" not in loop.history.names()


def test_of_two_averages_of_one_variable_the_last_counts_and_a_warning_is_logged() -> None:
    loop = train(task=Pair(shared=True))
    task = loop.task
    same(task.one.get_weights(), averages(task.optimizers[1]))
    assert loop.history["warning"][0] == (
        "optimizers/0 and optimizers/1 both average one/layers/0/kernel (use_ema=True): training "
        "ends with the average of optimizers/1, which comes last in the task"
    )


class Late(Pair):
    """A second optimizer that no step applies."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss = treadle.minimize(
            lambda: keras.ops.mean((self.one(x, training=True) - y) ** 2),
            self.one,
            self.optimizers[0],
        )
        return {"loss": loss}


def test_an_optimizer_that_never_updated_sets_nothing() -> None:
    task = Late()
    task.optimizers[1].build(task.two.trainable_variables)
    before = task.two.get_weights()
    train(task=task)
    same(task.one.get_weights(), averages(task.optimizers[0]))
    same(task.two.get_weights(), before)


def test_parts_of_a_multi_optimizer() -> None:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("this Keras has no MultiOptimizer")
    task = new_task()
    parts = keras.optimizers.OptimizerMap(default_optimizer=averaging())
    parts[".*bias"] = keras.optimizers.SGD(0.05)
    task.optimizer = keras.optimizers.MultiOptimizer(parts)
    loop = train(task=task)
    kernel = loop.state.arrays()["model/layers/0/kernel"]
    raw = [path for path in loop.state.variables if "average" in path]
    assert len(raw) == 1, raw
    np.testing.assert_array_equal(kernel, loop.state.arrays()[raw[0]])


@pytest.mark.parametrize("by_epochs", [False, True])
@pytest.mark.parametrize("how", [{"epochs": 3}, {"steps": 15}, {"steps": 13}])
def test_weights_that_a_callback_swaps(by_epochs: bool, how: dict[str, int]) -> None:
    seen: list[float] = []

    def new() -> list[Any]:
        reading = keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"])
        )
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=by_epochs), reading]

    hook = treadle.hooks.KerasCallbacks(new())
    task = new_task()
    loop = treadle.Loop(task, None, [hook], OPTIONS, console=False)
    loop.fit(*sources(), **how)
    same(task.model.get_weights(), averages(task.optimizer))
    if how != {"steps": 13}:  # `fit` has whole epochs only
        ours, seen = seen, []
        theirs = of_fit(3, new())
        np.testing.assert_allclose(ours, seen, rtol=1e-4)
        for one, other in zip(task.model.get_weights(), theirs, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("by_epochs", [False, True])
def test_swapped_weights_end_as_averages_if_another_callback_stops_the_run(by_epochs: bool) -> None:
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=by_epochs),
        keras.callbacks.EarlyStopping("val_loss", mode="max", patience=1),
    ]
    loop = train(epochs=9, hooks=[treadle.hooks.KerasCallbacks(callbacks)])
    assert loop.progress.step == 10
    # On TensorFlow the callback swaps by sums and differences, which round.
    for ours, theirs in zip(
        loop.task.model.get_weights(), train(epochs=2).task.model.get_weights(), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    same(loop.task.model.get_weights(), averages(loop.task.optimizer))
