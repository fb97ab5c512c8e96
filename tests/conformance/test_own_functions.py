"""A `tf.function` that a step is or calls becomes a part of it, with AutoGraph as it declares."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, FEATURES, Classifier, batches, dense
from executions import long_to_compile
from keras import layers, ops

import treadle
from treadle.errors import GradientError, StepError
from treadle.testing import Trace, agree, run_steps

pytestmark = pytest.mark.skipif(keras.config.backend() != "tensorflow", reason="of TensorFlow")

BATCHES = [*zip(*batches(5), strict=True)]


class Plain(Classifier):
    def __init__(self) -> None:
        super().__init__(
            [dense(), layers.Dropout(0.3, seed=1), layers.Dense(CLASSES)], keras.optimizers.Adam()
        )

    def update(self, x: Any, y: Any) -> Any:
        return super().train_step((x, y))["loss"] + ops.cast(treadle.step(), "float32")

    def train_step(self, batch: Any) -> Any:
        return {"loss": self.update(*batch)}


class Traced(Plain):
    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        self.update = tf.function(self.update)


class Branching(Plain):
    """Branches by a value, which TensorFlow converts in a `tf.function`."""

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        def update(x: Any, y: Any) -> Any:
            if ops.sum(y) < 0:  # never, which TensorFlow does not know
                x = -x
            return Plain.update(self, x, y)

        self.update = tf.function(update)


class Declared(Plain):
    """Declares tensors for numbers, and returns a number."""

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        def scaled(x: Any, factor: Any) -> Any:
            return x * tf.cast(factor, factor.dtype)

        number = tf.TensorSpec([], tf.float32)
        self.scaled = tf.function(scaled, [tf.TensorSpec([None, FEATURES]), number])
        self.one = tf.function(lambda: 1.0)

    def update(self, x: Any, y: Any) -> Any:
        return super().update(self.scaled(x, 2), y) * ops.cast(self.one(), self.one().dtype)


class Doubled(Plain):
    def update(self, x: Any, y: Any) -> Any:
        return super().update(2 * x, y)


class TracedModel(Plain):
    """Calls a model of Keras by a function, which draws a new mask in each step."""

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        called = tf.function(self.model)
        self.call = lambda x: called(x, training=True)

    def update(self, x: Any, y: Any) -> Any:
        ops.sum(self.call(x))  # a draw of the Dropout
        return super().update(x, y)


class PlainModel(TracedModel):
    def __init__(self) -> None:
        super().__init__()
        self.call = lambda x: self.model(x, training=True)


def trained(make: type[Plain], execution: Any, data: Any = BATCHES) -> Trace:
    return run_steps(make(), data, treadle.Options(execution=execution), (3, 1, 1), start=0)


@long_to_compile
@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_a_step_trains_in_a_function_of_its_own(execution: Any) -> None:
    expected, found = (trained(make, execution) for make in (Plain, Traced))
    assert "model/layers/0/kernel" in found.changed
    agree(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("execution", ["eager", pytest.param("auto", marks=pytest.mark.long)])
@pytest.mark.parametrize("make, same", [(Declared, Doubled), (TracedModel, PlainModel)])
def test_a_function_gets_and_returns_tensors_and_draws_anew(
    make: type[Plain], same: type[Plain], execution: Any
) -> None:
    agree(trained(make, execution), trained(same, execution), rtol=0, atol=0)


@pytest.mark.long
def test_branches_of_a_function_are_those_of_a_graph() -> None:
    agree(trained(Branching, "auto"), trained(Plain, "auto"))


@pytest.mark.long
def test_a_step_calls_a_function_of_a_saved_model(tmp_path: Path) -> None:
    import tensorflow as tf

    module = tf.Module()
    module.halved = tf.function(lambda x: x / 2, input_signature=[tf.TensorSpec([None, FEATURES])])
    tf.saved_model.save(module, str(tmp_path))
    halved = tf.saved_model.load(str(tmp_path)).halved

    class Halved(Plain):
        def train_step(self, batch: Any) -> Any:
            return super().train_step((halved(batch[0]), batch[1]))

    halves = [(x / 2, y) for x, y in BATCHES]
    agree(trained(Halved, "auto"), trained(Plain, "auto", halves), rtol=0, atol=0)


# Steps that are a `tf.function`

SIGNATURE = [4], "float32"
ROWS = [np.full((4,), value, "float32") for value in (0.0, 1.0, 0.0, 2.0)]


def as_declared(**how: Any) -> Callable[[Any], Any]:
    import tensorflow as tf

    if "input_signature" in how:
        how["input_signature"] = [tf.TensorSpec(*how["input_signature"])]
    return tf.function(**how)


def square(x: Any) -> Any:
    if ops.mean(x) > 1.5:  # AutoGraph also converts the functions that a step calls
        return x**2
    return x


def learn(w: Any, optimizer: Any, x: Any) -> Any:
    """Branches, loops, and trains in a branch, by values of tensors."""
    total = ops.zeros(())
    for i in ops.arange(3):
        total += ops.cast(i, "float32")
    while total > 2.5:
        total -= 1.0
    if ops.mean(x) > 0.5:
        loss = treadle.minimize(lambda: ops.mean((w - square(x)) ** 2) * total, [w], optimizer)
    else:
        loss = ops.mean(x - 1.0)
    return {"loss": treadle.weighted(loss, 4), "total": total}


def variable_and_optimizer() -> tuple[Any, Any]:
    w, optimizer = keras.Variable(1.0), keras.optimizers.Adam(0.1)
    optimizer.build([w])  # the first batch does not take the branch that trains
    return w, optimizer


def of_class(decorate: Callable[[Any], Any]) -> Any:
    class Learns(treadle.Task):
        def __init__(self) -> None:
            self.w, self.optimizer = variable_and_optimizer()

        @decorate
        def train_step(self, x: Any) -> Any:
            return learn(self.w, self.optimizer, x)

    return Learns()


def of_function(decorate: Callable[[Any], Any]) -> Any:
    """The step closes over its state."""
    w, optimizer = variable_and_optimizer()

    @decorate
    def step(x: Any) -> Any:
        return learn(w, optimizer, x)

    return treadle.task(step, w=w, optimizer=optimizer)


def of_arguments(decorate: Callable[[Any], Any]) -> Any:
    """The step takes its state as arguments, which a traced function could not."""
    w, optimizer = variable_and_optimizer()
    return treadle.task(decorate(learn), w=w, optimizer=optimizer)


def run(task: Any, execution: Any = "auto") -> Trace:
    return run_steps(task, ROWS, treadle.Options(execution=execution), (4,))


@pytest.mark.parametrize("execution", ["auto", "eager"])
@pytest.mark.parametrize(
    ("make", "how"),
    [
        (of_class, {}),
        (of_function, {"input_signature": SIGNATURE, "reduce_retracing": True}),
        (of_arguments, {"jit_compile": True}),
    ],
)
def test_a_step_keeps_autograph(make: Any, how: dict[str, Any], execution: Any) -> None:
    found = run(make(as_declared(**how)), execution)
    assert (found.plan == "eager") == (execution == "eager")
    agree(found, run(make(lambda function: function), "eager"), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.values["loss"][[0, 2]], [-1, -1])
    assert found.values["total"].tolist() == [2.0] * 4


def test_without_autograph_a_step_cannot_branch_by_values() -> None:
    import tensorflow as tf

    task = of_function(as_declared(autograph=False))
    with (
        treadle.Loop(task, console=False) as loop,
        pytest.raises(tf.errors.OperatorNotAllowedInGraphError) as caught,
    ):
        loop.fit(ROWS, epochs=1)
    assert any("compute with keras.ops" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("make", [of_class, of_function])
def test_a_batch_that_the_signature_excludes_is_an_error(make: Any) -> None:
    message = (
        r"the input_signature of (train_)?step declares x as int32 of shape \(4,\), but it is "
        r"float32 of shape \(4,\): change the signature, or the data"
    )
    with pytest.raises(StepError, match=message):
        run(make(as_declared(input_signature=([4], "int32"))))


def test_an_error_of_treadle_in_converted_code_keeps_its_text() -> None:
    """AutoGraph would replace it by a copy with another text."""
    w, calls = keras.Variable(1.0), list[int]()

    @as_declared()
    def step(x: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:  # not in the dry run, which is not converted
            treadle.gradients(lambda: ops.mean(x), [w])
        return ops.mean(x) + w

    with pytest.raises(GradientError) as caught:
        run(treadle.task(step, w=w))
    assert str(caught.value).startswith("no gradient for w: the loss does not depend on it")


@pytest.mark.parametrize("execution", ["auto", pytest.param("eager", marks=pytest.mark.long)])
def test_a_branch_that_the_first_batch_did_not_take_is_undone_too(execution: Any) -> None:
    w, v = keras.Variable(1.0), keras.Variable(1.0)

    @as_declared()
    def step(x: Any) -> Any:
        if ops.mean(x) > 0.5:
            v.assign(ops.sqrt(-ops.mean(x)))
        else:
            w.assign(w + 1.0)
        return ops.mean(x)

    hooks = [treadle.hooks.NonFinite("skip")]
    options = treadle.Options(execution=execution)
    task = treadle.task(step, w=w, v=v)
    with treadle.Loop(task, hooks=hooks, options=options, console=False) as loop:
        loop.fit(ROWS, epochs=1)
    assert (w.numpy(), v.numpy()) == (3.0, 1.0)


def test_a_branch_that_the_first_batch_did_not_take_builds_its_optimizer() -> None:
    w, optimizer = keras.Variable(1.0), keras.optimizers.Adam(0.1)
    run(treadle.task(as_declared()(learn), w=w, optimizer=optimizer))
    assert optimizer.built
    assert w.numpy() != 1.0
