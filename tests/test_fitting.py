"""`treadle.fit`, `evaluate` and `predict`: their arguments, errors, and what they leave behind."""

import json
import re
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from typer.testing import CliRunner

import treadle
from treadle import cli, fitting
from treadle.core.directory import encode_record
from treadle.core.identity import identity
from treadle.errors import ConfigurationError, DataError, DirectoryError

rng = np.random.default_rng(0)
X = rng.normal(size=(40, 4)).astype("float32")
Y = X[:, :1] * 2


def compiled(**more: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile(**{"optimizer": "sgd", "loss": "mse", "metrics": ["mae"], **more})
    return model


def fit(model: Any = None, *data: Any, **more: Any) -> Any:
    model = compiled() if model is None else model
    return treadle.fit(model, *(data or (X, Y)), **{"verbose": 0, **more})


class Columns(keras.metrics.Mean):
    """A mean of each column, in variables of its own."""

    def __init__(self) -> None:
        super().__init__(name="columns")
        self.total = self.add_variable((2,), "zeros", name="totals")
        self.count = self.add_variable((2,), "zeros", name="counts")

    def reset_state(self) -> None:
        for variable in (self.total, self.count):
            variable.assign(keras.ops.zeros(2))

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.ones(2) * keras.ops.sum(y_pred))
        self.count.assign_add(keras.ops.ones(2) * y_pred.shape[0])


def test_the_log_has_the_value_of_each_step_alone() -> None:
    """A metric to which a step adds nothing, such as weights of zero, has the mean so far.

    So has one that is no single number.
    """
    still = keras.optimizers.SGD(0.0)
    model = compiled(optimizer=still, metrics=[Columns()], weighted_metrics=["mae"])
    weights = np.ones(40, "float32")
    weights[10:20] = 0
    with treadle.Loop(treadle.KerasTask(model), console=False) as loop:
        batches = treadle.data.from_arrays(X, Y, weights, batch_size=10, shuffle=False)
        history = loop.fit(batches, epochs=1)
    predicted = model.predict(X, verbose=0).astype("float64")
    errors = (predicted - Y).reshape(4, 10)
    alone = np.abs(errors).mean(axis=1)
    alone[1] = alone[0]
    np.testing.assert_allclose(history.steps("mae"), alone, rtol=1e-5)
    squares = (errors**2).mean(axis=1)
    np.testing.assert_allclose(history.steps("loss"), squares * [1, 0, 1, 1], rtol=1e-5)
    so_far = np.cumsum(predicted.reshape(4, 10).sum(axis=1)) / [10, 20, 30, 40]
    np.testing.assert_allclose(history.steps("columns_1"), so_far, rtol=1e-5, atol=1e-6)


class Overriding(keras.Sequential):
    def make_train_function(self, force: bool = False) -> Any:
        return super().make_train_function(force)


def overriding() -> Any:
    model = Overriding([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class Ragged:
    """Stands for a tensor that is no array."""

    shape, dtype = (40, None), "float32"


Ragged.__name__ = "RaggedTensor"


def batches() -> Any:
    yield from [(X[:8], Y[:8]), (X[8:16], Y[8:16])]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: fit(keras.Sequential([layers.Dense(1)], name="net")),
            ConfigurationError,
            r"the model 'net' \(Sequential\) is not compiled: write model.compile\(",
        ),
        (
            lambda: fit(treadle.Supervised(compiled(), "mse", "sgd")),
            ConfigurationError,
            r"KerasTask needs a compiled keras.Model, but got a Supervised; a treadle.Task is "
            r"trained by treadle.Loop\(task\)\.fit\(source, epochs=…\)",
        ),
        (
            lambda: fit(overriding()),
            ConfigurationError,
            r"Overriding overrides make_train_function, which has no effect, since a loop calls "
            r"train_step itself: move what it does to train_step, or use model.fit",
        ),
        (
            lambda: fit(None, X, Y, class_weight={0: 2.0}, sample_weight=np.ones(40)),
            DataError,
            r"class_weight and sample_weight were both passed: pass one of them",
        ),
        (
            lambda: fit(None, X, {"a": Y, "b": Y}, class_weight={0: 2.0}),
            DataError,
            r"class_weight needs one array of labels, but y has 2: pass sample_weight",
        ),
        (
            lambda: fit(None, batches(), Y),
            DataError,
            r"y was passed next to x, a generator of batches: let it give batches \(x, y\)",
        ),
        (
            lambda: fit(None, batches(), validation_split=0.2),
            DataError,
            r"validation_split=0.2 needs arrays, but x is a generator: pass validation_data",
        ),
        (
            lambda: fit(None, Ragged(), Y),
            DataError,
            r"the data is a RaggedTensor, and a loop trains on dense arrays: convert it, for",
        ),
        (lambda: fit(validation_split=1.5), DataError, r"validation_split=1.5 must be between"),
        (
            lambda: fit(validation_split=0.99),
            DataError,
            r"validation_split=0.99 of 40 rows leaves none to train on: change it, or pass",
        ),
        (
            lambda: fit(validation_data=(X, Y, Y, Y)),
            DataError,
            r"validation_data is a tuple of 4 parts: pass \(x, y\) or \(x, y, sample_weight\)",
        ),
        (
            lambda: fit(validation_data=(X, Y), validation_freq="2"),
            ConfigurationError,
            r"validation_freq must be a whole number, not '2'",
        ),
        (
            lambda: fit(
                None,
                treadle.data.as_source([(X[:8], Y[:8], np.ones(8, "float32"))]),
                class_weight={0: 2.0},
            ),
            DataError,
            r"class_weight needs batches \(x, y\), but the source gives 3 parts: remove",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


class Seen(keras.callbacks.Callback):  # type: ignore[misc]
    """Keeps the numbers of epochs and batches, and the `params`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append(dict(self.params))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch", epoch))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("batch", batch, {k: round(v, 5) for k, v in logs.items()}))

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("test batch", batch))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.calls.append(("tested", batch, {k: round(v, 5) for k, v in logs.items()}))

    def on_test_end(self, logs: Any = None) -> None:
        self.calls.append(("test", sorted(logs)))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(("epoch ends", epoch, list(logs)))


@pytest.mark.parametrize("frequency", [2, [1, 4]])
def test_callbacks_see_the_epochs_and_logs_of_fit(frequency: Any) -> None:
    arguments: dict[str, Any] = {"initial_epoch": 1, "epochs": 4, "batch_size": 16}
    arguments |= {"shuffle": False, "verbose": 0, "validation_freq": frequency}
    arguments |= {"validation_data": (X[:10], Y[:10]), "validation_batch_size": 4}
    seen = Seen(), Seen()
    expected = compiled().fit(X, Y, callbacks=[seen[0]], **arguments)
    found = treadle.fit(compiled(), X, Y, callbacks=[seen[1]], **arguments)
    assert seen[1].calls == seen[0].calls
    assert found.epoch == expected.epoch == [1, 2, 3]
    assert found.history.keys() == expected.history.keys()


class Stopping(keras.callbacks.Callback):  # type: ignore[misc]
    """Stops after the first epoch."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.stop_training = True


def test_the_model_is_trained_and_compiled_afterwards() -> None:
    plain, model = compiled(optimizer="adam"), compiled(optimizer="adam")
    for each, run in ((plain, plain.fit), (model, lambda *a, **k: treadle.fit(model, *a, **k))):
        run(X, Y, epochs=2, shuffle=False, verbose=0)
        each.fit(X, Y, epochs=1, shuffle=False, verbose=0)  # goes on with the optimizer's state
    for one, other in zip(plain.variables, model.variables, strict=True):
        np.testing.assert_allclose(np.array(one), np.array(other), 1e-6, 1e-6)
    assert model.stop_training is False
    history = fit(model, epochs=5, callbacks=[Stopping()])
    assert model.stop_training and history.epoch == [0] and model.history is history
    assert history.loop.progress.epoch == 1


def test_evaluate_and_predict_return_what_keras_returns() -> None:
    model = compiled()
    np.testing.assert_allclose(
        treadle.evaluate(model, X, Y, batch_size=16), model.evaluate(X, Y, 16, verbose=0), 1e-6
    )
    expected = model.evaluate(X, Y, 16, verbose=0, return_dict=True)
    found = treadle.evaluate(model, X, Y, batch_size=16, return_dict=True)
    assert list(found) == list(expected)
    assert isinstance(treadle.evaluate(compiled(metrics=None), X, Y), float)
    outputs = treadle.predict(model, X, batch_size=16)
    np.testing.assert_allclose(outputs, model.predict(X, verbose=0), 1e-6, 1e-6)
    lazy = keras.Sequential([layers.Dense(2)])
    assert treadle.predict(lazy, X).shape == (40, 2)


def test_arrays_stay_writable_and_the_shuffled_order_goes_on() -> None:
    x, view = X.copy(), X.copy()[:20]
    orders: list[Any] = []
    model = compiled()
    for _ in range(2):
        history = fit(model, x, Y, epochs=1, batch_size=4)
        orders.append(history.loop.history.steps("loss"))
    assert not np.allclose(orders[0], orders[1])
    fit(model, view, Y[:20])
    treadle.evaluate(model, x, Y)
    treadle.predict(model, x)
    x[0] = view[0] = 1.0
    frozen = X.copy()
    frozen.flags.writeable = False
    fit(model, frozen, Y)
    assert not frozen.flags.writeable


def test_generators_continue_in_training_and_validation() -> None:
    def forever() -> Any:
        while True:
            yield from batches()

    more: dict[str, Any] = {"shuffle": False}  # otherwise Keras warns
    more |= {"steps_per_epoch": 3, "validation_steps": 1, "epochs": 3, "verbose": 0}
    expected = compiled().fit(forever(), validation_data=forever(), **more)
    found = treadle.fit(compiled(), forever(), validation_data=forever(), **more)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], 1e-6)
    assert len(found.history["val_loss"]) == 3


def test_class_weights_of_batches() -> None:
    model, plain = compiled(), compiled()
    y = (Y > 0).astype("float32")
    weights = {0: 1.0, 1: 5.0}
    source = treadle.data.as_source([(X[:20], y[:20]), (X[20:], y[20:])])
    found = fit(model, source, class_weight=weights)
    arguments = {"class_weight": weights, "batch_size": 20, "shuffle": False, "verbose": 0}
    expected = plain.fit(X, y, **arguments)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], 1e-6)


def test_a_finished_run_returns_its_history(tmp_path: Any) -> None:
    def run() -> Any:
        rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)
        return fit(epochs=2, directory=tmp_path / "run", callbacks=[rates])

    first, again = run(), run()
    assert again.history == first.history and again.epoch == first.epoch
    assert len(again.history["learning_rate"]) == 2  # which a callback has added
    assert again.loop.reason == "it was finished before"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 0.25}, "compiled.optimizer.learning_rate was 0.5, now 0.25"),
        ({"loss": "mae"}, "compiled.loss was 'mse', now 'mae'"),
        ({"loss_weights": [2.0]}, "compiled.loss_weights was None, now [2.0]"),
        ({"loss_weights": {"dense": 2.0}}, "compiled.loss_weights was None, now [['dense', 2.0]]"),
    ],
)
def test_a_model_compiled_otherwise_is_another_run(
    change: Any, message: str, tmp_path: Any
) -> None:
    def fitted(rate: float = 0.5, **how: Any) -> Any:
        model = compiled(optimizer=keras.optimizers.SGD(rate), **how)
        halved = keras.callbacks.LearningRateScheduler(lambda _, rate: 0.5 * rate)
        fit(model, directory=tmp_path, callbacks=[halved])
        return model

    trained = fitted()
    assert float(trained.optimizer.learning_rate) == 0.25
    file = tmp_path / "run.json"
    record = json.loads(file.read_text())
    assert record["configuration"]["compiled"]["optimizer"].pop("nesterov") is False
    file.write_bytes(encode_record(record))  # as a version of Keras without this argument has it
    restored = keras.models.clone_model(trained)
    restored.compile(keras.optimizers.SGD(0.125), "mse", metrics=["mae"])
    restored.optimizer.iterations.assign(10)  # as of a model that was loaded
    fit(restored, directory=tmp_path)
    fit(trained, directory=tmp_path)  # it is finished
    with pytest.raises(DirectoryError, match=re.escape(message)):
        fitted(**change)
    del record["configuration"]["compiled"]
    file.write_bytes(encode_record(record))  # as Treadle wrote it before
    fitted(**change)


def test_what_describes_an_optimizer(tmp_path: Any) -> None:
    class Equal(keras.optimizers.SGD):
        def __eq__(self, other: object) -> bool:
            return self is other

    def settings(optimizer: Any) -> Any:
        return identity(treadle.KerasTask(compiled(optimizer=optimizer)))["compiled"]["optimizer"]

    assert settings(Equal(0.1))["learning_rate"] == 0.1  # it has no hash
    assert settings(keras.optimizers.SGD(lambda: 0.1))["learning_rate"] == "lambda"
    model = compiled()
    task = treadle.KerasTask(model)
    model.compile(keras.optimizers.Adam(0.3), "mse")
    assert identity(task)["compiled"]["optimizer"]["learning_rate"] == 0.3


def test_a_finished_run_that_a_callback_stopped_says_so_again(tmp_path: Any) -> None:
    def run() -> Any:
        stopping = keras.callbacks.EarlyStopping("loss", mode="max", patience=1)
        return fit(epochs=9, directory=tmp_path / "run", callbacks=[stopping])

    first, again = run(), run()
    assert first.model.stop_training and again.model.stop_training
    assert again.epoch == first.epoch == [0, 1]


def test_an_attribute_that_no_checkpoint_can_hold_is_named_before_training(tmp_path: Any) -> None:
    class Keeping(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.best, self.seen, self.by_epoch = 1.0, {1, 2}, {3: "c"}

    found = fit(directory=tmp_path / "run", callbacks=[Keeping()]).loop.history["warning"]
    assert found == [
        "Keeping has attributes that a checkpoint cannot hold: seen (set), by_epoch (dict). After "
        "a resume, they begin as in a new run: use numbers, strings, arrays, or lists and dicts of "
        "these with strings as keys"
    ]
    with pytest.raises(KeyError):  # a run without a directory is never resumed
        fit(callbacks=[Keeping()]).loop.history["warning"]

    class Filling(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.by_epoch: dict[int, int] = {}

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.by_epoch[epoch] = 1

    later = fit(directory=tmp_path / "later", epochs=3, callbacks=[Filling()]).loop
    (warning,) = later.history["warning"]
    assert warning.startswith("Filling has attributes that a checkpoint cannot hold: by_epoch (dic")


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        pytest.param(
            [1, 3], [2], r"validate_every\.epochs was \[1, 3\], now \[2\]", marks=pytest.mark.long
        ),
        ([1, 2], 1, r"validate_every\.epochs was \[1, 2\], now None"),
        pytest.param(1, 2, r"validate_every\.amount was 1, now 2", marks=pytest.mark.long),
    ],
)
def test_other_epochs_of_validation_are_another_run(
    first: Any, then: Any, message: str, tmp_path: Any
) -> None:
    class Interrupting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    more: dict[str, Any] = {"validation_data": (X, Y), "epochs": 3, "directory": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        fit(validation_freq=first, callbacks=[Interrupting()], **more)
    with pytest.raises(DirectoryError, match=message):
        fit(validation_freq=then, **more)
    fit(validation_freq=first, **more)


@pytest.mark.parametrize("name", ["steps_per_epoch", "validation_steps"])
def test_numbers_of_batches_are_named(name: str) -> None:
    for count, found in ((0, "at least 1, not 0"), ("a", "a whole number, not 'a'")):
        with pytest.raises(ConfigurationError, match=f"^{name} must be {found}$"):
            fit(None, X, Y, validation_data=(X, Y), **{name: count})


def test_an_interrupted_call_resumes_in_the_same_process(tmp_path: Any) -> None:
    class Interrupting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    model, more = compiled(), {"batch_size": 8, "epochs": 4}
    with pytest.raises(KeyboardInterrupt):
        fit(model, directory=tmp_path / "run", callbacks=[Interrupting()], **more)
    resumed = fit(model, directory=tmp_path / "run", **more)
    whole = fit(compiled(), directory=tmp_path / "whole", **more)
    assert resumed.loop.progress.step == 20
    np.testing.assert_array_equal(
        resumed.loop.history.steps("loss"), whole.loop.history.steps("loss")
    )


def test_what_differs_from_fit_is_printed_at_the_start(tmp_path: Any, capsys: Any) -> None:
    model = compiled()
    fit(model, verbose=1)
    out = " ".join(capsys.readouterr().out.split())
    assert "shuffled data has Treadle's order: it depends on the seed and the epoch" in out
    model.steps_per_execution = 2
    fit(model, verbose=1, shuffle=False)
    out = " ".join(capsys.readouterr().out.split())
    assert "shuffled data" not in out
    assert "steps_per_execution=2 is ignored: the plan decides how many steps run" in out


def test_the_weights_of_the_run_win_without_a_seed(
    tmp_path: Any, capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(fitting, "global_random_seed", lambda: None)
    saving = treadle.hooks.Checkpoint(every="1 step")

    def fail(loop: Any) -> None:
        raise KeyboardInterrupt

    def run(*hooks: Any) -> Any:
        model = compiled()
        model.layers[0].kernel.assign(rng.normal(size=(4, 1)))
        return treadle.fit(model, X, Y, epochs=3, directory=tmp_path / "run", hooks=[*hooks])

    with pytest.raises(KeyboardInterrupt):
        run(saving, treadle.at("2 steps", fail))
    assert "replace those" not in capsys.readouterr().out
    run(saving)
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "the weights of the run replace those with which this program initialized the model" in out
    )


def test_a_run_is_read_by_load_run_and_reported(tmp_path: Any) -> None:
    history = fit(epochs=2, directory=tmp_path / "run", validation_data=(X, Y))
    run = treadle.load_run(tmp_path / "run")
    assert run.task == "KerasTask" and run.epoch == 2
    assert list(run.history["val_mae"]) == history.history["val_mae"]
    loaded = run.model()
    np.testing.assert_array_equal(loaded.get_weights()[0], history.model.get_weights()[0])
    report = CliRunner().invoke(cli.app, ["report", str(tmp_path / "run")])
    assert report.exit_code == 0 and (tmp_path / "run" / "report.html").exists()


def test_steps_of_python_may_change_python_values() -> None:
    class Counting(keras.Sequential):
        calls = 0

        def train_step(self, *arguments: Any) -> Any:
            self.calls += 1
            return super().train_step(*arguments)

    def counting(**more: Any) -> Any:
        model = Counting([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse", **more)
        return model

    model = counting(run_eagerly=True)
    fit(model, epochs=2)
    assert model.calls == 4  # the dry run is not counted
    with pytest.raises(treadle.errors.StepError, match="train_step changes Python values"):
        fit(counting(), epochs=2)


def test_gradients_that_a_step_keeps_are_refused() -> None:
    class Kept(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            loss = keras.ops.mean((self(x) - y) ** 2)
            loss.backward()
            return {"loss": loss}

    model = Kept([keras.Input((4,)), layers.Dense(1)])
    model.compile("sgd")
    message = r"train_step calls loss.backward\(\) before zero_grad\(\), so that gradients would be"
    with pytest.raises(treadle.errors.StepError, match=message):
        fit(model)


def test_a_step_runs_as_python_if_the_model_runs_eagerly() -> None:
    history = fit(compiled(run_eagerly=True))
    assert "eager" in history.loop.plan or "Python" in history.loop.plan


class Numbered(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches whose rows are their number."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return np.full((2, 4), index, "float32"), np.zeros((2, 1), "float32")


class Recording(keras.Sequential):
    """A model that returns the first number of each batch as its loss."""

    def compute_loss(self, x: Any = None, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(x, *args, **kwargs) * 0 + x[0, 0]


def test_the_batches_of_a_pydataset_are_shuffled_by_seed_and_epoch() -> None:
    def orders(**more: Any) -> list[list[float]]:
        keras.utils.set_random_seed(3)
        model = Recording([keras.Input((4,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        found = treadle.fit(model, Numbered(), epochs=2, verbose=0, **more)
        losses = found.loop.history.steps("loss").tolist()
        return [losses[:6], losses[6:]]

    first, second = orders()
    assert sorted(first) == sorted(second) == [0, 1, 2, 3, 4, 5]
    assert first != second and [first, second] == orders()
    assert orders(shuffle=False) == [[0, 1, 2, 3, 4, 5]] * 2


def test_results_that_are_vectors_become_numbers() -> None:
    def made() -> Any:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="softmax")])
        model.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
        return model

    labels = keras.utils.to_categorical(np.arange(40) % 3)
    how: Any = {"validation_data": (X, labels), "shuffle": False, "verbose": 0}
    history = treadle.fit(made(), X, labels, **how).history
    for name, (expected,) in made().fit(X, labels, **how).history.items():
        found = [v for n, (v,) in history.items() if n.startswith(name) and "val_" not in n[1:]]
        np.testing.assert_allclose(found, np.ravel(expected), atol=1e-6, err_msg=name)
    assert [n for n in history if "f1" in n] == [
        f"{prefix}f1_score_{i}" for prefix in ("", "val_") for i in range(3)
    ]
