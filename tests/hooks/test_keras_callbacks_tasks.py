"""Keras callbacks and what they find in a task: optimizers, epochs, NaN, files, evaluations."""

import math
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle import data
from treadle.errors import ConfigurationError, NonFiniteError, StateError
from treadle.hooks import KerasCallbacks

kinds = keras.callbacks
OPTIONS = treadle.Options(execution="eager")  # compiling would take most of the time here
X = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def source(x: Any = X, y: Any = Y) -> Any:
    return data.from_arrays(x, y, batch_size=8, shuffle=False)


def new_model(trainable: bool = True) -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, trainable=trainable)])


def train(task: Any, callbacks: Any, *hooks: Any, **how: Any) -> treadle.Loop:
    hook = KerasCallbacks(callbacks, **how.pop("named", {}))
    loop = treadle.Loop(task, how.pop("directory", None), [hook, *hooks], OPTIONS, console=False)
    loop.fit(how.pop("train", source()), source(), **{"epochs": 3, **how})
    return loop


def compiled_model(tmp_path: Path | None = None) -> Any:
    """Return a compiled model; where there is a folder, one that was trained, saved and loaded."""
    model = new_model()
    model.compile(keras.optimizers.Adam(0.5), "mse", jit_compile=False)
    if tmp_path is not None:
        model.fit(X, Y, verbose=0)
        model.save(tmp_path / "compiled.keras")
        model = keras.models.load_model(tmp_path / "compiled.keras")
    return model


@pytest.mark.parametrize("loaded", [False, True])
def test_the_optimizer_is_the_one_that_the_task_trains_with(loaded: bool, tmp_path: Path) -> None:
    model = compiled_model(tmp_path if loaded else None)
    task = treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1))
    logged = kinds.History()
    halving = kinds.LearningRateScheduler(lambda epoch, rate: rate / 2)
    plateau = kinds.ReduceLROnPlateau("loss", factor=0.1, patience=0, min_delta=100.0, cooldown=9)
    train(task, [halving, plateau, logged])
    assert logged.history["learning_rate"] == pytest.approx([0.05, 0.025, 0.0125 / 10], rel=1e-5)
    assert float(task.optimizer.learning_rate) == pytest.approx(0.0125 / 10)
    assert float(model.optimizer.learning_rate) == pytest.approx(0.5)


def test_averages_are_those_of_the_optimizer_that_trains() -> None:
    task = treadle.Supervised(compiled_model(), "mse", keras.optimizers.SGD(0.1, use_ema=True))
    train(task, kinds.SwapEMAWeights())


class Compiled(treadle.Task):
    def __init__(self, model: Any) -> None:
        self.model = model

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return keras.ops.mean((self.model(x, training=True) - y) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.model.optimizer)}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": keras.ops.mean((self.model(x, training=False) - y) ** 2)}


def test_the_optimizer_of_compile_counts_where_the_task_trains_with_it() -> None:
    task = Compiled(compiled_model())
    train(task, kinds.LearningRateScheduler(lambda epoch: 0.25))
    assert float(task.model.optimizer.learning_rate) == 0.25


def test_compile_may_scale_losses_where_the_task_does_not_train_with_it() -> None:
    model = compiled_model()
    model.optimizer = keras.optimizers.LossScaleOptimizer(model.optimizer)
    train(treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1)), kinds.History())
    with pytest.raises(StateError, match=r"^model/optimizer scales its loss itself"):
        train(Compiled(model), [])


class TwoOptimizers(treadle.Supervised):
    def __init__(self) -> None:
        super().__init__(compiled_model(), "mse", keras.optimizers.SGD(0.1))
        self.others = [keras.optimizers.SGD(0.2)]

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return self.total_loss(y, self.model(x, training=True))

        kernel, bias = self.model.trainable_variables
        loss, (first, second) = treadle.gradients(objective, [kernel, bias])
        self.optimizer.apply([first], [kernel])
        self.others[0].apply([second], [bias])
        return {"loss": loss}


def test_of_several_optimizers_one_must_be_chosen_for_callbacks_that_use_it() -> None:
    train(TwoOptimizers(), [kinds.EarlyStopping("loss"), kinds.History()])
    halving = kinds.LearningRateScheduler(lambda epoch, rate: rate / 2)
    with pytest.raises(ConfigurationError) as caught:
        train(TwoOptimizers(), halving)
    assert str(caught.value) == (
        "a callback uses model.optimizer, and TwoOptimizers updates the model with "
        "optimizer, others/0: choose one, as KerasCallbacks([...], optimizer=task.optimizer)"
    )
    task = TwoOptimizers()
    train(task, halving, named={"optimizer": task.others[0]})
    assert float(task.others[0].learning_rate) == pytest.approx(0.025)
    assert float(task.optimizer.learning_rate) == pytest.approx(0.1)


class Unsized:
    """Batches without a known number."""

    def __iter__(self) -> Any:
        return iter([(X[:8], Y[:8]), (X[8:16], Y[8:16])])


@pytest.mark.parametrize(
    ("how", "epochs"),
    [
        ({"epochs": 2}, 2),
        ({"epochs": None, "steps": 6}, 2),
        ({"epochs": None, "steps": 7}, 3),
        ({"epochs": 5, "steps": 6}, 2),
        ({"epochs": 2, "steps": 60}, 2),
        ({"epochs": None, "steps": 7, "train": Unsized()}, math.inf),
        ({"epochs": None, "steps": 7, "until": "1 h", "train": Unsized()}, math.inf),
    ],
)
def test_epochs_are_a_number(how: dict[str, Any], epochs: float) -> None:
    seen: list[Any] = []
    reading = kinds.LambdaCallback(
        on_train_begin=lambda logs: seen.append(reading.params["epochs"])
    )
    swap = kinds.SwapEMAWeights(swap_on_epoch=True)
    task = treadle.Supervised(new_model(), "mse", keras.optimizers.SGD(0.1, use_ema=True))
    train(task, [swap, reading], **how)
    assert seen == [epochs] and type(seen[0]) is type(epochs)
    for weight, average in zip(
        task.model.trainable_variables, task.optimizer._model_variables_moving_average, strict=True
    ):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (weight, average)))


def with_nan() -> Any:
    y = Y.copy()
    y[20] = np.nan
    return source(y=y)


def test_terminate_on_nan_replaces_the_default_nonfinite_hook(tmp_path: Path) -> None:
    ended: list[str] = []
    watching = kinds.LambdaCallback(
        on_epoch_end=lambda epoch, logs: ended.append(f"epoch {epoch}"),
        on_train_end=lambda logs: ended.append("training"),
    )
    table = kinds.CSVLogger(str(tmp_path / "log.csv"))
    task = treadle.Supervised(new_model(), "mse", "sgd")
    loop = train(task, [kinds.TerminateOnNaN(), watching, table], train=with_nan())
    assert loop.progress.step == 3 and ended == ["epoch 0", "training"]
    assert loop.reason == "TerminateOnNaN set model.stop_training"
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 2
    with pytest.raises(NonFiniteError):  # the default
        train(treadle.Supervised(new_model(), "mse", "sgd"), [watching], train=with_nan())


def test_a_nonfinite_hook_passed_by_the_user_keeps_its_action() -> None:
    def run(action: Any) -> treadle.Loop:
        task = treadle.Supervised(new_model(), "mse", "sgd")
        guard = treadle.hooks.NonFinite(action)
        return train(task, kinds.TerminateOnNaN(), guard, train=with_nan())

    with pytest.raises(NonFiniteError):
        run("raise")
    assert run("skip").progress.step == 9  # the means lack the skipped step, so nothing is NaN
    assert run("stop").progress.step == 3


def test_a_model_without_trainable_weights_is_evaluated_in_each_epoch() -> None:
    history = kinds.History()
    model = new_model(trainable=False)
    task = treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1), {"mae": "mae"})
    before = model.get_weights()
    train(task, [kinds.LearningRateScheduler(lambda epoch: 0.5), history])
    assert history.epoch == [0, 1, 2]
    assert set(history.history) == {"loss", "mae", "val_loss", "val_mae", "learning_rate"}
    expected = np.mean((X @ before[0] + before[1] - Y) ** 2)
    np.testing.assert_allclose(history.history["loss"], expected, rtol=1e-5)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def half_squared(y: Any, outputs: Any) -> Any:
    return keras.ops.mean((outputs - y) ** 2, axis=-1) / 2


@pytest.mark.parametrize("loss", ["mse", half_squared])
def test_a_file_of_a_callback_loads_as_a_compiled_model(loss: Any, tmp_path: Path) -> None:
    optimizer = keras.optimizers.Adam(0.01)
    task = treadle.Supervised(new_model(), loss, optimizer, ["mae"])
    path = tmp_path / "model.keras"
    train(task, kinds.ModelCheckpoint(str(path)))
    assert not task.model.compiled  # the model itself is left as it was
    loaded = keras.models.load_model(path, custom_objects={"half_squared": half_squared})
    assert loaded.compiled and isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert len(loaded.optimizer.variables) == len(optimizer.variables) > 4
    for one, other in zip(loaded.optimizer.variables, optimizer.variables, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, (one, other)))
    results = loaded.evaluate(X, Y, 8, verbose=0, return_dict=True)
    loop = treadle.Loop(task, options=OPTIONS, console=False)
    measured = loop.evaluate(source())
    assert results["loss"] == pytest.approx(measured["loss"], rel=1e-5)
    assert results["mae"] == pytest.approx(measured["mae"], rel=1e-5)


def test_a_file_where_several_optimizers_update_the_model_holds_the_model(tmp_path: Path) -> None:
    path, task = tmp_path / "model.keras", TwoOptimizers()
    train(task, kinds.ModelCheckpoint(str(path)))
    loaded = keras.models.load_model(path, compile=False)
    np.testing.assert_array_equal(loaded.get_weights()[0], task.model.get_weights()[0])


def test_an_explicit_evaluation_notifies_callbacks() -> None:
    seen: list[str] = []
    watching = kinds.LambdaCallback(
        on_test_begin=lambda logs: seen.append("begin"),
        on_test_end=lambda logs: seen.append(f"end {sorted(logs)}"),
    )
    optimizer = keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)
    task = treadle.Supervised(new_model(), "mse", optimizer)
    hooks = [KerasCallbacks([watching, kinds.SwapEMAWeights()])]
    with treadle.Loop(task, None, hooks, OPTIONS, console=False) as loop:
        loop.evaluate(source())  # before training: callbacks have no model yet
        for _ in loop.epochs(2):
            for _ in loop.steps(source(), every="auto"):
                pass
            swapped = loop.evaluate(source())["loss"]
    assert seen == ["begin", "end ['loss']"] * 2
    assert swapped == pytest.approx(loop.evaluate(source())["loss"], rel=1e-5)  # the averages
    assert len(seen) == 4  # training has ended


def test_what_fit_takes_as_callbacks() -> None:
    history = kinds.History()
    listed = kinds.CallbackList([history], add_progbar=False)
    for given in (history, (history,), [[history], []], listed, [listed]):
        task = treadle.Supervised(new_model(), "mse", "sgd")
        train(task, given, epochs=2)
        assert history.epoch == [0, 1]
    train(treadle.Supervised(new_model(), "mse", "sgd"), None)
    with pytest.raises(ConfigurationError, match=r"and found 'history'"):
        KerasCallbacks("history")


def test_model_history_is_there() -> None:
    seen: list[Any] = []
    reading = kinds.LambdaCallback(
        on_train_end=lambda logs: seen.append(reading.model.history.history["loss"])
    )
    loop = train(treadle.Supervised(new_model(), "mse", "sgd"), reading)
    assert seen == [loop.history["loss"]]


def test_a_distribution_strategy_is_refused() -> None:
    if keras.config.backend() != "tensorflow":
        pytest.skip("strategies of TensorFlow")
    tf = pytest.importorskip("tensorflow")
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        task = treadle.Supervised(new_model(), "mse", "sgd")
    with pytest.raises(ConfigurationError) as caught:
        train(task, [])
    assert str(caught.value) == (
        "model/layers/0/kernel was created under tf.distribute.MirroredStrategy, but a loop trains "
        "on one device: create the task, and train, outside of strategy.scope(). Several "
        "devices train with treadle.setup(devices=…) on JAX, or in several processes (treadle "
        "launch)"
    )
    task = treadle.Supervised(new_model(), "mse", "sgd")
    with pytest.raises(ConfigurationError) as caught, strategy.scope():
        train(task, [])
    assert str(caught.value).startswith("training runs under tf.distribute.MirroredStrategy, but")
