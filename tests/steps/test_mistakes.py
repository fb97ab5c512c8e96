"""What new users do wrong inside a step, and the messages they get."""

import random
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, Classifier, dense, head
from executions import EAGER
from keras import ops
from mistakes import ROWS, Does, arrays, source, told

import treadle
from treadle import data
from treadle.errors import ConfigurationError, GradientError, StepError
from treadle.hooks.log_file import read_log


@pytest.fixture(params=["auto", EAGER])
def options(request: pytest.FixtureRequest) -> treadle.Options:
    return treadle.Options(execution=request.param)


# What is kept in Python


@pytest.mark.parametrize(
    ("holder", "keep", "expected"),
    [
        (
            [],
            lambda held, loss: held.append(1),
            r"train_step changes Python values \(held changed from a list of \d to a list of \d\), "
            r"which a compiled step does only while it is traced: store changing values in a "
            r"keras\.Variable",
        ),
        (
            {"start": 0},
            lambda held, loss: held.update({f"key{len(held)}": 0}),
            r"train_step changes Python values \(held changed from a dict of \d \(start, key1.*\) "
            r"to a dict of \d \(start, key1.*\)\), which .*",
        ),
        (
            [],
            lambda held, loss: held.append(loss),
            r"a tensor of train_step was stored in held, but it has no value outside of a compiled "
            r"step: return it from the step, which logs it, or assign it to a keras\.Variable that "
            r"is an attribute of the task",
        ),
        (
            {"last": None},
            lambda held, loss: held.update(last=loss),
            r"a tensor of train_step was stored in held(/last)?, but .*",
        ),
    ],
    ids=["number-in-list", "key-in-dict", "tensor-in-list", "tensor-in-dict"],
)
def test_tensors_that_a_step_puts_into_containers(
    options: treadle.Options, holder: Any, keep: Any, expected: str
) -> None:
    task = Does(lambda task, batch, loss: keep(task.held, loss), held=type(holder)(holder))
    assert re.fullmatch(expected, told(StepError, task, options))


def test_a_tensor_kept_in_an_attribute(options: treadle.Options) -> None:
    task = Does(lambda task, batch, loss: setattr(task, "last", loss), last=None)
    assert told(StepError, task, options).startswith("a tensor of train_step was stored in last, ")


def test_containers_that_hooks_fill_are_constants() -> None:
    task = Does(lambda task, batch, loss: None, seen=[])
    hooks = [treadle.at("2 steps", lambda loop: loop.task.seen.append(1))]
    with treadle.Loop(task, hooks=hooks, console=False) as loop:
        history = loop.fit(source(), epochs=1)
    assert history["note"] == ["recompiled because seen changed from a list of 0 to a list of 1"]


@pytest.mark.parametrize(
    ("draw", "which"),
    [
        (lambda task: random.random(), "Python's random"),
        (lambda task: np.random.normal(), "numpy.random"),
        (lambda task: task.rng.normal(), "rng"),
        (lambda task: task.old.normal(), "old"),
        (lambda task: task.python.random(), "python"),
    ],
)
def test_random_numbers_that_are_not_of_keras(
    options: treadle.Options, draw: Callable[[Any], float], which: str
) -> None:
    task = Does(
        lambda task, batch, loss: draw(task),
        rng=np.random.default_rng(0),
        old=np.random.RandomState(0),
        python=random.Random(0),
    )
    assert told(StepError, task, options) == (
        f"train_step draws from {which}, which a compiled step does only while it is traced, so "
        "that all steps would get the same number: use keras.random with a "
        "keras.random.SeedGenerator that the task holds, or draw where batches are made"
    )


def test_random_numbers_of_keras_and_of_sources_are_fine(options: treadle.Options) -> None:
    def batches() -> Any:
        for _ in range(3):
            yield tuple(part[np.random.permutation(ROWS)[:8]] for part in arrays())

    class Dropping(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), keras.layers.Dropout(0.5), head()])  # not built

    with treadle.Loop(Dropping(), options=options, console=False) as loop:
        loop.fit(batches, epochs=1)
    assert loop.progress.step == 3


# Losses and gradients


def test_an_objective_that_does_not_return_the_loss_first(options: treadle.Options) -> None:
    class Swapped(Does):
        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                logits = self.model(x)
                return logits, self.loss(y, logits)

            (loss, logits), grads = treadle.gradients(objective, self.model.trainable_variables)
            self.accuracy.update_state(y, logits)
            self.optimizer.apply(grads, self.model.trainable_variables)
            return {"loss": loss}

    assert told(GradientError, Swapped(print), options) == (
        f"the loss must be a scalar, but has shape (8, {CLASSES}): return the loss first, as "
        "(loss, anything)"
    )


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_one_gradient_for_each_variable(options: treadle.Options, optimizer: Any) -> None:
    class Forgetful(Does):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            variables = self.model.trainable_variables
            loss, grads = treadle.gradients(lambda: self.loss(y, self.model(x)), variables)
            self.action(self.optimizer, grads, self.model.trainable_variables)
            return {"loss": loss}

    def task(action: Any) -> Any:
        made = Forgetful(action)
        made.optimizer = optimizer(0.1)
        made.model = keras.Sequential([dense(), head()])  # not built: no gradients at first
        return made

    kind = optimizer.__name__
    fewer = told(StepError, task(lambda o, g, v: o.apply(g[:-1], v)), options)
    assert fewer == (
        f"train_step applies 3 gradients to 4 variables by optimizer ({kind}), so there is "
        "none for model/layers/1/bias: pass one gradient for each variable, in the same order"
    )
    more = told(StepError, task(lambda o, g, v: o.apply(g, v[:-1])), options)
    assert more == (
        f"train_step applies 4 gradients to 3 variables by optimizer ({kind}): pass one gradient "
        "for each variable, in the same order"
    )


# Hooks


def logged(value: Any) -> Any:
    """The history and the log's lines of a run whose hook returns this, and whose user logs it."""

    def hook(loop: Any) -> Any:
        return value(loop) if callable(value) else value

    task = Does(lambda task, batch, loss: None)
    with treadle.Loop(task, hooks=[treadle.at("2 steps", hook)], console=False) as loop:
        return loop.fit(source(), epochs=1)


def test_scalars_and_texts_of_any_library_are_logged(tmp_path: Any) -> None:
    def hook(loop: Any) -> Any:
        weight = loop.task.model.trainable_variables[0]
        return {
            "text": "half way",
            "yes": True,
            "numpy": np.float32(0.5),
            "array": np.array(3),
            "tensor": ops.convert_to_tensor(weight)[0, 0],  # requires a gradient on PyTorch
            "variable": loop.task.optimizer.iterations,
        }

    task = Does(lambda task, batch, loss: None)
    hooks = [treadle.at("2 steps", hook)]
    with treadle.Loop(task, tmp_path, hooks=hooks, console=False) as loop:
        loop.fit(source(), epochs=1)
    record = next(r for r in loop.history.records if r.kind == "log")
    kinds = {name: type(value) for name, value in record.values.items()}
    assert kinds == dict(text=str, yes=bool, numpy=float, array=int, tensor=float, variable=int)
    assert record.values["variable"] == 2
    _, records = read_log(tmp_path / "log.jsonl")
    assert {name: records[0][name] for name in kinds} == record.values


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (
            {"rates": np.zeros(3)},
            "the hook hook logs 'rates', of shape (3,): only scalars, texts and images can be "
            "logged. Reduce it, for example with keras.ops.mean, make it a treadle.Image, or keep "
            "it out",
        ),
        (
            {"nothing": None},
            "the hook hook logs 'nothing', a NoneType: only scalars, texts and images can be "
            "logged. Reduce it, for example with keras.ops.mean, make it a treadle.Image, or keep "
            "it out",
        ),
        (
            "half way",
            "the hook hook returned 'half way' without a name, so it cannot be logged: return a "
            "dict such as {'name': value}, or nothing",
        ),
    ],
)
def test_invalid_return_values_of_hooks(value: Any, expected: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        logged(value)
    assert str(caught.value) == expected
    assert caught.value.__notes__[0].startswith("in hook, after step 2, epoch 1, batch 2")


def test_tensors_returned_by_expressions_as_hooks_are_ignored() -> None:
    history = logged(lambda loop: loop.task.optimizer.iterations.assign(7))
    assert history.names() == ["loss", "accuracy"]


def test_invalid_values_for_loop_log() -> None:
    task = Does(lambda task, batch, loss: None)
    with (
        treadle.Loop(task, console=False) as loop,
        pytest.raises(ConfigurationError, match=r"^loop\.log logs 'a', of shape \(2,\): only"),
    ):
        loop.log({"a": np.zeros(2)})
    assert loop.history.records == []


# Supervised


@pytest.mark.parametrize(
    ("loss", "like"),
    [
        (keras.losses.SparseCategoricalCrossentropy(), "sparse_categorical_accuracy"),
        ("sparse_categorical_crossentropy", "sparse_categorical_accuracy"),
        ("categorical_crossentropy", "categorical_accuracy"),
        (keras.losses.BinaryCrossentropy(), "binary_accuracy"),
    ],
)
@pytest.mark.parametrize("name", ["accuracy", "acc"])
def test_accuracy_is_the_one_that_fits_the_loss(loss: Any, like: str, name: str) -> None:
    binary = like == "binary_accuracy"
    units, activation = (1, "sigmoid") if binary else (CLASSES, "softmax")
    model = keras.Sequential([keras.layers.Dense(units, activation=activation)])
    task = treadle.Supervised(model, loss, "adam", [name, like])
    x, y = arrays()
    if binary:
        y = (y > 0).astype("float32")[:, None]
    elif like == "categorical_accuracy":
        y = np.eye(CLASSES, dtype="float32")[y]
    with treadle.Loop(task, console=False) as loop:
        history = loop.fit(data.from_arrays(x, y, batch_size=8), epochs=2)
    assert history[name] == history[like]
    assert 0 < history[name][0] < 1


def test_accuracy_of_binary_logits_has_a_threshold_of_0() -> None:
    model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    task = treadle.Supervised(model, loss, keras.optimizers.SGD(0.0), {"hits": "accuracy"})
    x = np.array([[0.2], [0.4], [-0.1], [0.7]], "float32")  # 0.2 and 0.4 are more likely than not
    y = np.array([[1], [0], [0], [1]], "float32")
    with treadle.Loop(task, console=False) as loop:
        assert loop.evaluate([(x, y)])["hits"] == 0.75
