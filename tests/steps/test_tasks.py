"""Tasks: classes, plain functions made into one, the ready one, and what steps may return."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from treadle.errors import ConfigurationError, StepError
from treadle.steps.helpers import weighted
from treadle.steps.results import step_outputs
from treadle.steps.supervised import Supervised
from treadle.steps.task import FunctionTask, has_eval_step
from treadle.testing import run_steps

X = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
Y = np.array([0, 1, 1, 0], "int32")


def model() -> Any:
    return keras.Sequential([keras.layers.Dense(2)])


# Task


class Empty(treadle.Task):
    pass


class Lightning(treadle.Task):
    def training_step(self, batch: Any, index: int) -> None:
        pass

    def validation_step(self, batch: Any, index: int) -> None:
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda task: task.train_step(X),
            "Empty has no train_step: write `def train_step(self, batch):` in a class that "
            "inherits from treadle.Task, or pass a function to treadle.task(train_step, model=…)",
        ),
        (
            lambda task: task.eval_step(X),
            "Empty has no eval_step: write `def eval_step(self, batch):` to evaluate or validate",
        ),
        (
            lambda task: task.predict_step(X),
            "Empty has neither a predict_step nor a model: write predict_step",
        ),
        (
            lambda task: task.datasets(),
            "Empty has no datasets: write `def datasets(self)` returning "
            "treadle.Datasets(train=…, validation=…), or call loop.fit(train) or "
            "treadle.doctor.inspect(task, train) in your script",
        ),
    ],
)
def test_missing_methods_are_reported(call: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        call(Empty())
    assert str(caught.value) == message


def test_what_functions_use_has_a_name() -> None:
    expected = (
        "treadle.task takes functions, and what they use by name: write "
        "treadle.task(train_step, eval_step, model=model, optimizer=optimizer)"
    )
    model = keras.layers.Dense(1)
    for unnamed in ((print, print, model), (print, [model])):
        with pytest.raises(ConfigurationError) as caught:
            treadle.task(*unnamed)
        assert str(caught.value) == expected


def test_steps_with_the_names_of_other_libraries_are_found() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Lightning().train_step(X)
    assert str(caught.value) == (
        "Lightning has no train_step, but a training_step: rename it, let it take one batch, and "
        "update the model in it with treadle.minimize(objective, self.model, self.optimizer); "
        "optimizers are attributes of the task, and configure_optimizers is not called"
    )
    with pytest.raises(ConfigurationError) as caught:
        Lightning().eval_step(X)
    assert str(caught.value) == (
        "Lightning has no eval_step, but a validation_step: rename it, and let it take one batch"
    )


@pytest.mark.parametrize("batch", [X, (X, Y), [X, Y]])
def test_predictions_are_the_models(batch: Any) -> None:
    task = Empty()
    task.model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dropout(0.9)])
    np.testing.assert_array_equal(
        ops.convert_to_numpy(task.predict_step(batch)), ops.convert_to_numpy(task.model(X))
    )


def test_datasets_are_a_value() -> None:
    found = treadle.Datasets(train=1)
    assert (found.train, found.validation, found.test) == (1, None, None)


# Functions


def taken(train_step: Any, batch: Any, **state: Any) -> Any:
    return treadle.task(train_step, **state).train_step(batch)


def test_parameters_named_like_states_get_them_and_the_rest_the_batch() -> None:
    assert taken(lambda batch: batch, (1, 2)) == (1, 2)
    assert taken(lambda x, y: (x, y), (1, 2)) == (1, 2)
    assert taken(lambda x, y: (x, y), [1, 2]) == (1, 2)
    assert taken(lambda x, y: (x, y), {"y": 2, "x": 1}) == (1, 2)
    assert taken(lambda scale, x, y: (scale, x, y), (1, 2), scale=3) == (3, 1, 2)
    assert taken(lambda x, scale, y: (scale, x, y), (1, 2), scale=3) == (3, 1, 2)
    assert taken(lambda batch, scale: (batch, scale), (1, 2), scale=3, unused=4) == ((1, 2), 3)
    assert taken(lambda batch, training=True: (batch, training), 5) == (5, True)
    assert taken(lambda batch, **rest: (batch, rest), 5, a=1) == (5, {})


def test_a_decorated_function_is_unwrapped() -> None:
    class Decorated:
        def python_function(self, batch: Any) -> Any:
            return "python", batch

        def __call__(self, batch: Any) -> Any:
            raise AssertionError("the loop compiles, not the decorator")

    assert taken(Decorated(), 5) == ("python", 5)


def test_states_are_attributes() -> None:
    task = treadle.task(lambda batch: batch, scale=3, net=None)
    assert task.scale == 3  # type: ignore[attr-defined]
    assert isinstance(task, FunctionTask)


@pytest.mark.parametrize(
    ("step", "batch", "message"),
    [
        (
            lambda x, y: x,
            (1, 2, 3),
            "takes ['x', 'y'] from a batch, but the batch has 3 parts: change its parameters, or "
            "pass states by name to treadle.task",
        ),
        (
            lambda x, y: x,
            5,
            "takes ['x', 'y'] from a batch, but the batch has 1 part: change its parameters, or "
            "pass states by name to treadle.task",
        ),
        (
            lambda x, y: x,
            {"image": 1, "label": 2},
            "takes ['x', 'y'] from a batch, but the batch has names ['image', 'label']: change its "
            "parameters, or pass states by name to treadle.task",
        ),
    ],
)
def test_a_batch_that_does_not_fit_the_parameters(step: Any, batch: Any, message: str) -> None:
    with pytest.raises(StepError) as caught:
        taken(step, batch)
    assert str(caught.value) == f"<lambda> {message}"


def test_a_function_without_room_for_the_batch() -> None:
    def train_step(net: Any) -> Any:
        return net

    with pytest.raises(ConfigurationError) as caught:
        treadle.task(train_step, net=1)
    assert str(caught.value) == (
        "train_step has no parameter left for the batch: all of ['net'] are names of states"
    )


@pytest.mark.parametrize("name", ["datasets", "predict_step"])
def test_names_that_no_state_can_have(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{name}' cannot be the name of a state"):
        treadle.task(lambda batch: batch, **{name: 1})


def test_evaluation_is_optional() -> None:
    without = treadle.task(lambda batch: batch)
    assert not has_eval_step(without)
    with pytest.raises(ConfigurationError) as caught:
        without.eval_step(1)
    assert str(caught.value) == (
        "this task has no eval_step: treadle.task(train_step, eval_step, …) takes one"
    )
    assert treadle.task(lambda batch: 1, lambda batch: 2).eval_step(0) == 2
    assert has_eval_step(treadle.task(lambda batch: 1, lambda batch: 2))
    assert not has_eval_step(Empty())
    assert has_eval_step(Supervised(model(), "mse", "sgd"))


# Supervised


def by_hand(logits: Any, weight: Any = None) -> float:
    losses = -np.log(np.exp(logits)[range(4), Y] / np.exp(logits).sum(axis=-1))
    return float(np.mean(losses if weight is None else losses * weight))


def test_names_of_losses_optimizers_and_metrics() -> None:
    task = Supervised(model(), "mse", "adam", ["mae", keras.metrics.MeanSquaredError(name="other")])
    assert isinstance(task.loss, keras.Loss)
    assert isinstance(task.optimizer, keras.optimizers.Adam)
    task.eval_step((X, np.ones((4, 2), "float32")))
    assert list(task.metrics) == ["mae", "other"]


def test_regularization_counts_and_metrics_are_updated() -> None:
    net = keras.Sequential([keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5))])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = Supervised(net, loss, keras.optimizers.SGD(0.0), {"hit": "sparse_categorical_accuracy"})
    trace = run_steps(task, [(X, Y)])
    kernel = trace.state["model/layers/0/kernel"]
    expected = by_hand(X @ kernel) + 0.5 * (kernel**2).sum()
    assert trace.values["loss"][0] == pytest.approx(expected, rel=1e-5)
    assert trace.state["metrics/hit/count"] == 4
    assert trace.state["metrics/hit/total"] == (np.argmax(X @ kernel, axis=-1) == Y).sum()


# What steps return


def test_results_are_read() -> None:
    one = ops.ones(())
    assert step_outputs(None, "train_step") == ({}, {})
    assert list(step_outputs(one, "train_step")[0]) == ["loss"]
    assert list(step_outputs(1.5, "train_step")[0]) == ["loss"]
    values, weights = step_outputs({"a": one, "b": weighted(one, 7), 3: np.float32(2)}, "step")
    assert list(values) == ["a", "b", "3"]
    assert list(weights) == ["b"]
    assert float(weights["b"]) == 7


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_widened(dtype: str) -> None:
    values, _ = step_outputs({"loss": ops.ones((), dtype)}, "train_step")
    assert keras.backend.standardize_dtype(values["loss"].dtype) == "float32"
