"""`Supervised` logs what `compile` and `fit` of Keras log, for every form of losses and metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops
from keras_versions import needs_keras

import treadle
from treadle import data
from treadle.errors import ConfigurationError, StepError

ROWS, BATCH = 22, 8  # the last batch of an epoch is a short one
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 4)).astype("float32")
A = RNG.normal(size=(ROWS, 3)).astype("float32")
B = RNG.normal(size=(ROWS, 1)).astype("float32")
CLASSES = RNG.integers(0, 3, ROWS).astype("int32")
BITS = (B > 0).astype("float32")
WEIGHTS, OTHERS = (RNG.uniform(0.5, 2, ROWS).astype("float32") for _ in range(2))
TOKENS = np.where(np.arange(5) < RNG.integers(1, 6, (ROWS, 1)), RNG.integers(1, 9, (ROWS, 5)), 0)
TOKENS = TOKENS.astype("int32")
NEXT = RNG.integers(0, 3, (ROWS, 5)).astype("int32")
PER_TOKEN = RNG.uniform(0.5, 2, (ROWS, 5)).astype("float32")
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(units: int, name: str | None = None, **options: Any) -> Any:
    return layers.Dense(units, name=name, **options)


def functional(outputs: Callable[[Any, Any], Any]) -> Any:
    inputs = keras.Input((4,))
    return keras.Model(inputs, outputs(dense(3, "a")(inputs), dense(1, "b")(inputs)))


class Own(keras.Model):  # type: ignore[misc]
    """A model without names of outputs."""

    def __init__(self, outputs: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.outputs_of = outputs
        self.a, self.b = dense(3), dense(1)

    def call(self, x: Any) -> Any:
        return self.outputs_of(self.a(x), self.b(x))


class Penalized(keras.Model):  # type: ignore[misc]
    """A model that adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.a = dense(3, kernel_regularizer="l2")

    def call(self, x: Any) -> Any:
        outputs = self.a(x)
        self.add_loss(ops.mean(ops.square(outputs)))
        return outputs


def one(**options: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), dense(3, "a", **options)])


def unbuilt() -> Any:
    return keras.Sequential([dense(3, "a")])


def masked() -> Any:
    embedding = layers.Embedding(9, 6, mask_zero=True)
    return keras.Sequential([embedding, layers.LSTM(4, return_sequences=True), dense(3, "a")])


def pair() -> Any:
    return functional(lambda a, b: [a, b])


def named() -> Any:
    return functional(lambda a, b: {"a": a, "b": b})


def renamed() -> Any:
    return functional(lambda a, b: {"second": a, "first": b})


def nested() -> Any:
    return functional(lambda a, b: {"o": {"a": a, "b": b}})


def single_in_dict() -> Any:
    return functional(lambda a, b: {"a": a})


def own_pair() -> Any:
    return Own(lambda a, b: [a, b])


def own_named() -> Any:
    return Own(lambda a, b: {"z": a, "b": b})


def squared(y: Any, outputs: Any) -> Any:
    return ops.mean(ops.square(y - outputs), axis=-1)


def largest(y: Any, outputs: Any) -> Any:
    return ops.max(ops.abs(y - outputs), axis=-1)


class Scaled(keras.losses.Loss):  # type: ignore[misc]
    """A loss with a scalar for each batch."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return 3 * ops.mean(ops.abs(y_true - y_pred))


@dataclass
class Form:
    """A model, data and arguments of `compile`."""

    model: Callable[[], Any]
    y: Any
    loss: Any
    arguments: Callable[[], dict[str, Any]] = field(default=dict)
    weight: Any = None
    x: Any = field(default_factory=lambda: X)
    long: bool = True


mae = keras.metrics.MeanAbsoluteError
FORMS = {
    "one loss": Form(one, A, "mse", lambda: {"metrics": ["mae", mae(name="own"), squared]}),
    "a function, weights": Form(
        one, A, squared, lambda: {"metrics": ["mae"], "weighted_metrics": ["mae", mae()]}, WEIGHTS
    ),
    "an object": Form(one, A, keras.losses.Huber(0.3), lambda: {"metrics": [mae()]}),
    "a loss with one value": Form(one, A, Scaled()),
    "a class name": Form(one, A, "MeanSquaredError", lambda: {"metrics": ["MeanSquaredError"]}),
    "regularized": Form(lambda: one(kernel_regularizer="l2"), A, "mse", weight=WEIGHTS),
    "unbuilt": Form(unbuilt, A, "mse", lambda: {"metrics": ["mae"]}),
    "accuracy of classes": Form(one, CLASSES, LOGITS, lambda: {"metrics": ["accuracy"]}),
    "accuracy of a regression": Form(one, A, "mse", lambda: {"metrics": ["accuracy"]}),
    "crossentropy by shape": Form(
        lambda: one(activation="softmax"), CLASSES, "crossentropy", lambda: {"metrics": ["acc"]}
    ),
    "weight of one loss": Form(one, A, "mse", lambda: {"loss_weights": 0.25}),
    "no loss": Form(Penalized, None, None, long=False),
    "no loss, labels": Form(Penalized, A, None, lambda: {"metrics": ["mae"]}),
    "a loss and an added one": Form(Penalized, A, "mse"),
    "one loss for two outputs": Form(pair, (A, B), "mse", lambda: {"metrics": [["mae"], []]}),
    "a list of losses": Form(
        pair,
        (A, B),
        ["mse", largest],
        lambda: {
            "loss_weights": [0.5, 2.0],
            "metrics": [["mae", mae(name="own")], ["mse"]],
            "weighted_metrics": [[], ["mae"]],
        },
        (WEIGHTS, OTHERS),
        long=False,
    ),
    "one of two losses in a list": Form(pair, (A, B), ["mse", None]),
    "names of a list": Form(
        pair, (A, B), {"a": "mse", "b": "mae"}, lambda: {"metrics": {"b": [mae()], "a": "mse"}}
    ),
    "one of two losses by name": Form(pair, (A, B), {"a": None, "b": "mae"}),
    "a dict of labels": Form(pair, {"b": B, "a": A}, ["mse", "mae"]),
    "a tuple of losses": Form(lambda: functional(lambda a, b: (a, b)), (A, B), ("mse", "mae")),
    "dict outputs": Form(
        named,
        {"a": CLASSES, "b": BITS},
        {"a": LOGITS, "b": "mse"},
        lambda: {"metrics": {"a": ["accuracy"], "b": "mae"}, "loss_weights": {"a": 1.0, "b": 0.3}},
        long=False,
    ),
    "dict outputs, one loss": Form(named, {"a": A, "b": B}, "mse"),
    "some of dict outputs": Form(
        named, {"a": A, "b": B}, {"b": "mse"}, lambda: {"metrics": {"a": ["mae"]}}
    ),
    "dict outputs, weights": Form(
        named,
        {"a": A, "b": B},
        {"a": "mse", "b": "mae"},
        lambda: {"weighted_metrics": {"a": ["mae"], "b": ["mae", "mse"]}, "metrics": {"a": "mae"}},
        {"a": WEIGHTS, "b": OTHERS},
    ),
    "other keys than names": Form(
        renamed,
        {"second": A, "first": B},
        {"second": "mse", "first": "mae"},
        lambda: {"metrics": {"first": ["mae"], "second": ["mse"]}},
    ),
    "one output in a dict": Form(
        single_in_dict, {"a": A}, {"a": "mse"}, lambda: {"metrics": {"a": ["mae"]}}
    ),
    "nested outputs": Form(
        nested,
        {"o": {"a": A, "b": B}},
        {"o": {"a": "mse", "b": "mae"}},
        lambda: {"metrics": {"o": {"a": ["mae"], "b": ["mse"]}}},
        long=False,
    ),
    "own model, two outputs": Form(
        own_pair, (A, B), ["mse", "mae"], lambda: {"metrics": [["mae"], ["mae"]]}
    ),
    "own model, one loss": Form(own_pair, (A, B), "mse", weight=WEIGHTS, long=False),
    "own model, dict outputs": Form(
        own_named,
        {"b": B, "z": A},
        {"z": "mse", "b": "mae"},
        lambda: {"metrics": {"b": ["mae"], "z": ["mse", "mae"]}},
    ),
    "a mask": Form(masked, NEXT, LOGITS, lambda: {"weighted_metrics": ["accuracy"]}, x=TOKENS),
    "a mask and weights": Form(
        masked, NEXT, LOGITS, lambda: {"weighted_metrics": ["accuracy"]}, PER_TOKEN, TOKENS
    ),
}


def fresh(form: Form) -> Any:
    keras.utils.set_random_seed(3)
    model = form.model()
    if not model.built:
        model(form.x[:1])
    return model


def under_fit(form: Form) -> tuple[dict[str, Any], list[Any]]:
    model = fresh(form)
    # Without a graph, whose unknown batch size keeps Keras from weighting the means of losses.
    model.compile(keras.optimizers.SGD(0.1), form.loss, **form.arguments(), run_eagerly=True)
    given = {"batch_size": BATCH, "epochs": 2, "shuffle": False, "verbose": 0}
    validation = None if form.y is None else (form.x, form.y, form.weight)
    found = model.fit(
        form.x, form.y, sample_weight=form.weight, validation_data=validation, **given
    )
    return found.history, model.get_weights()


def source(form: Form) -> Any:
    parts = [x for x in (form.x, form.y, form.weight) if x is not None]
    return data.from_arrays(*parts, batch_size=BATCH, shuffle=False)


def new_task(form: Form, model: Any = None) -> treadle.Supervised:
    model = fresh(form) if model is None else model
    return treadle.Supervised(model, form.loss, keras.optimizers.SGD(0.1), **form.arguments())


def under_treadle(form: Form, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    task = new_task(form)
    validation = None if form.y is None else source(form)
    with treadle.Loop(task, options=treadle.Options(**options), console=False) as loop:
        history = loop.fit(source(form), validation, epochs=2)
    return {name: history[name] for name in history.epochs[0]}, task.model.get_weights()


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.long] if form.long else []) for n, form in FORMS.items()],
)
def test_logs_and_weights_are_those_of_fit(name: str) -> None:
    form, backend = FORMS[name], keras.config.backend()
    if name == "a mask and weights" and backend == "torch":
        pytest.skip("fit is wrong: the loss multiplies the weights by the mask in place")
    expected, weights = under_fit(form)
    assert "loss" in expected
    for execution in ("auto", "eager") if form.long else ("auto",):
        found, ours = under_treadle(form, execution=execution)
        if form.model is masked and backend == "jax":  # in `fit`, training metrics lose the mask
            expected["accuracy"] = found["accuracy"]
        same(found, expected)
        for one_of, other in zip(ours, weights, strict=True):
            np.testing.assert_allclose(one_of, other, rtol=1e-5, atol=1e-6)


def test_masks_reach_the_metrics_of_training() -> None:
    needs_keras("3.12", "a mask for metrics without sample weights")
    task = new_task(FORMS["a mask"])
    task.optimizer.learning_rate = 0.0
    with treadle.Loop(task, options=treadle.Options(jit=False), console=False) as loop:
        loop.fit(source(FORMS["a mask"]), epochs=1)
    outputs = ops.convert_to_numpy(task.model(TOKENS)).argmax(-1)
    assert loop.history["accuracy"] == [pytest.approx((outputs == NEXT)[TOKENS > 0].mean())]


def test_one_loss_counts_once_for_each_output() -> None:
    task = treadle.Supervised(own_pair(), "mse", keras.optimizers.SGD(1.0))
    task.model(X)
    x, y = np.zeros((1, 4), "float32"), (np.full((1, 3), 2.0), np.full((1, 1), 2.0))
    logs = task.train_step((x, y))
    assert float(ops.convert_to_numpy(logs["loss"])) == 8.0  # the biases are zero
    np.testing.assert_allclose(task.model.b.bias.numpy(), [4.0])
    np.testing.assert_allclose(task.model.a.bias.numpy(), [4 / 3] * 3, rtol=1e-6)


class Growing(keras.losses.Loss):  # type: ignore[misc]
    """A loss that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = keras.Variable(0.0, trainable=False)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        self.calls.assign_add(1.0)
        return self.calls * ops.mean(ops.square(y_true - y_pred), axis=-1)


@pytest.mark.long
def test_losses_and_metrics_with_state_are_saved_and_resumed(tmp_path: Path) -> None:
    arguments: Any = {
        "metrics": {"a": ["mae"]},
        "weighted_metrics": {"b": [mae(name="error")]},
        "loss_weights": {"b": 0.5, "a": 1.0},
    }
    y, weight = {"a": A, "b": B}, {"a": WEIGHTS, "b": OTHERS}
    batches = data.from_arrays(X, y, weight, batch_size=BATCH)

    def run(directory: Path, die: bool) -> Any:
        def leave(loop: Any) -> None:
            if die:
                loop.save()
                raise OSError("killed")

        keras.utils.set_random_seed(3)
        losses = {"a": Growing(), "b": "mae"}
        task = treadle.Supervised(named(), losses, keras.optimizers.Adam(0.1), **arguments)
        hooks, options = [treadle.at("5 steps", leave)], treadle.Options(jit=False)
        loop = treadle.Loop(task, directory, hooks, options, console=False)
        if not directory.joinpath("checkpoints").exists():
            loop.evaluate(batches)  # which makes the metrics
        loop.fit(batches, batches, epochs=3)
        return loop

    expected = run(tmp_path / "whole", False)
    assert float(expected.task.loss["a"].calls.numpy()) == 9.0
    assert {"loss/a/calls", "metrics/a_loss/total", "metrics/b_error/count"} <= {
        *expected.state.variables
    }
    assert set(expected.history.epochs[0]) >= {"loss", "a_loss", "b_loss", "a_mae", "b_error"}
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "killed", True)
    found = run(tmp_path / "killed", False)
    for path, value in expected.state.arrays().items():
        np.testing.assert_array_equal(found.state.arrays()[path], value, err_msg=path)
    assert found.history.epochs == expected.history.epochs
    again = run(tmp_path / "killed", False)  # finished: metrics are not made before they are used
    assert again.reason == "it was finished before"


def test_a_run_computes_before_a_batch_has_made_the_metrics(tmp_path: Path) -> None:
    form, found = FORMS["one loss"], []
    for again in (False, True):
        task = new_task(form)
        with treadle.Loop(task, tmp_path, console=False) as loop:
            if again:  # the variables of metrics and optimizers do not exist yet
                found.append(loop.call(task.model, X).tolist())
                assert not task.metrics
            loop.fit(source(form), epochs=1)
            found.append(loop.call(task.model, X).tolist())
            found.append(loop.evaluate(source(form)))
    assert loop.reason == "it was finished before"
    outputs, measured, called, *same_again = found
    assert same_again == [outputs, measured]
    np.testing.assert_allclose(called, outputs)
    assert measured.keys() == {"loss", "mae", "own", "squared"}


# What does not fit is an error


@pytest.mark.parametrize(
    ("model", "loss", "arguments", "message"),
    [
        (
            pair,
            {"a": "mse", "c": "mae"},
            {},
            "loss={'a': 'mse', 'c': 'mae'} does not fit the model, whose outputs are ['a', 'b'] "
            "(Expected keys ['a', 'b'] in loss dict, but found loss.keys()=['a', 'c']): pass the "
            "structure of the outputs, as `compile` of Keras takes it",
        ),
        (
            pair,
            ["mse", "mae", "mse"],
            {},
            "loss=['mse', 'mae', 'mse'] does not fit the model, whose outputs are ['a', 'b'] (its "
            "length is 3, and there are 2 outputs. None stands for an output without a loss): pass "
            "the structure of the outputs, as `compile` of Keras takes it",
        ),
        (
            one,
            "mean_squered_error",
            {},
            "loss='mean_squered_error' does not fit the model (Could not interpret loss "
            "identifier: mean_squered_error): pass the structure of the outputs, as `compile` of "
            "Keras takes it",
        ),
        (
            pair,
            "mse",
            {"metrics": ["mae"]},
            "metrics=['mae'] does not fit the model, whose outputs are ['a', 'b'] (",
        ),
        (
            named,
            "mse",
            {"weighted_metrics": {"c": ["mae"]}},
            "weighted_metrics={'c': ['mae']} does not fit the model, whose outputs are ['a', "
            "'b'] (",
        ),
        (
            one,
            "mse",
            {"metrics": "mae"},
            "metrics='mae' does not fit the model (Expected `metrics` argument to be a list, "
            "tuple, or dict. Received instead: metrics=mae of type <class 'str'>): pass the "
            "structure of the outputs, as `compile` of Keras takes it",
        ),
        (
            pair,
            ["mse", "mae"],
            {"loss_weights": [1.0, 2.0, 3.0]},
            "loss_weights=[1.0, 2.0, 3.0] does not fit the model, whose outputs are ['a', 'b'] "
            "(`loss_weights` must match the number of losses, got 2 losses and 3 weights): pass "
            "the structure of the outputs, as `compile` of Keras takes it",
        ),
        (lambda: None, "mse", {}, "model=None is no Keras model: pass a keras.Model"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(
    model: Any, loss: Any, arguments: Any, message: str
) -> None:
    with pytest.raises(ConfigurationError) as caught:
        treadle.Supervised(model(), loss, "sgd", **arguments)
    found = str(caught.value)
    assert found.startswith(message) if message.endswith("(") else found == message


@pytest.mark.parametrize(
    ("model", "loss", "metrics", "message"),
    [
        (
            one,
            "mse",
            (),
            "the loss failed on a batch without labels (x alone): give batches (x, y), or pass "
            "loss=None",
        ),
        (
            Penalized,
            None,
            ["mae"],
            "the metrics failed on a batch without labels (x alone): give batches (x, y), or pass "
            "no metrics",
        ),
        (
            one,
            None,
            (),
            "Supervised has nothing to minimize: no output has a loss, and no layer of the model "
            "adds one (add_loss, or a regularizer). Pass a loss",
        ),
    ],
)
def test_what_a_batch_lacks_is_explained(model: Any, loss: Any, metrics: Any, message: str) -> None:
    task = treadle.Supervised(model(), loss, "sgd", metrics)
    with treadle.Loop(task, console=False) as loop, pytest.raises(StepError) as caught:
        loop.fit(data.from_arrays(X, batch_size=BATCH), steps=1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("model", "y", "loss", "metrics", "message"),
    [
        (
            own_named,
            {"b": B, "z": A},
            {"q": "mse"},
            (),
            "loss={'q': 'mse'} does not fit the batch and the model (The path: ('q',) in the "
            "`loss` argument, can't be found in",
        ),
        (
            own_named,
            {"b": B, "z": A},
            ["mse"],
            (),
            "loss=['mse'] does not fit the batch and the model (its length is 1, and there are 2 "
            "outputs. None stands for an output without a loss): pass the structure of",
        ),
        (
            own_pair,
            (A, B),
            "mse",
            ["mae"],
            "metrics=['mae'] does not fit the batch and the model (",
        ),
    ],
)
def test_what_does_not_fit_the_first_batch_is_explained(
    model: Any, y: Any, loss: Any, metrics: Any, message: str
) -> None:
    task = treadle.Supervised(model(), loss, "sgd", metrics)
    task.model(X)
    with treadle.Loop(task, console=False) as loop, pytest.raises(ConfigurationError) as caught:
        loop.fit(data.from_arrays(X, y, batch_size=BATCH), steps=1)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("step", ["train_step", "eval_step"])
def test_labels_for_some_of_the_outputs_are_explained(step: str) -> None:
    task = treadle.Supervised(pair(), ["mse", "mae"], "sgd", [["mae"], ["mae"]])
    with pytest.raises(StepError) as caught:
        getattr(task, step)((X, A))
    assert str(caught.value) == (
        "the batch has labels for 1 output, and the model has 2 outputs: give labels in the "
        "structure of the outputs"
    )


@pytest.mark.parametrize(("name", "value"), [("loss", keras.losses.Huber()), ("metrics", {})])
def test_a_loss_that_replaces_the_compiled_one_is_refused(name: str, value: Any) -> None:
    task = treadle.Supervised(one(), "mse", "sgd")
    setattr(task, name, value)
    with pytest.raises(ConfigurationError) as caught:
        task.eval_step((X, A))
    assert str(caught.value) == (
        f"Supervised.{name} was replaced, which changes nothing in the compiled losses and "
        f"metrics: pass {name} to __init__"
    )


def test_a_first_batch_that_fails_leaves_nothing_undone() -> None:
    task = treadle.Supervised(pair(), "mse", "sgd", [["mae"], []])
    for _ in range(2):
        with pytest.raises(Exception, match=r"7"):  # of the backend's own kind
            task.eval_step((X, (A, np.ones((7, 1)))))
    task.eval_step((X, (A, B)))
    assert task.metrics.keys() == {"a_loss", "b_loss", "a_mae"}


def test_the_metrics_of_a_single_output_have_the_names_of_a_dict() -> None:
    metrics = {"z": mae(), "b": "mse", "acc": "accuracy"}
    task = treadle.Supervised(one(), "mse", "sgd", metrics, weighted_metrics={"w": "mae"})
    task.eval_step((X, A, WEIGHTS))
    assert {name: metric.name for name, metric in task.metrics.items()} == {
        "acc": "accuracy", "b": "mse", "z": "mean_absolute_error", "w": "mae"
    }  # fmt: skip
