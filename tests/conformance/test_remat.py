"""Gradient checkpointing: what is computed again is the same, and changes nothing twice."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from executions import EAGER_ONCE, long_to_compile
from keras import ops
from keras_versions import needs_keras

import treadle
from treadle.errors import StepError

pytestmark = long_to_compile
BACKEND = keras.config.backend()
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = np.ones((8, 1), "float32")
MIDDLES: dict[str, Callable[[], Any]] = {
    "no state": lambda: keras.layers.Activation("relu"),
    "dropout": lambda: keras.layers.Dropout(0.5),
    "dropout with a seed": lambda: keras.layers.Dropout(0.5, seed=7),
    "averages": keras.layers.BatchNormalization,
}


class Deep(treadle.Task):
    """Dense layers around one in the middle; what is before the head is computed again."""

    def __init__(self, middle: Callable[[], Any], wrap: Callable[..., Any]) -> None:
        self.body = [keras.layers.Dense(16, "tanh"), middle(), keras.layers.Dense(16, "tanh")]
        self.head = keras.layers.Dense(1)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.wrap = wrap

    def hidden(self, x: Any, training: bool = False) -> Any:
        first, middle, last = self.body
        return {"hidden": last(middle(first(x), training=training))}

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            found = self.wrap(self.hidden)(x, training=True)["hidden"]
            return ops.mean((self.head(found) - y) ** 2)

        layers = [*self.body, self.head]  # unbuilt in the first run
        variables = [variable for layer in layers for variable in layer.trainable_variables]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


OFTEN = ("dropout with a seed", "averages")


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def remat_of_keras(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, training: keras.remat(lambda x: function(x, training))(x)


def trained(task: treadle.Task, execution: Any = "auto") -> tuple[Any, dict[str, Any]]:
    options = treadle.Options(execution=execution)
    with treadle.Loop(task, console=False, options=options) as loop:
        losses = loop.fit([(X, Y)] * 5, epochs=1).steps("loss")
        return losses, loop.state.arrays()


@EAGER_ONCE
@pytest.mark.parametrize(
    "middle",
    [
        pytest.param(make, id=name, marks=() if name in OFTEN else long_to_compile)
        for name, make in MIDDLES.items()
    ],
)
def test_training_is_the_same(middle: Callable[[], Any], execution: str) -> None:
    results: list[tuple[Any, dict[str, Any]]] = []
    for wrap in (plain, treadle.remat):
        keras.utils.set_random_seed(0)
        results.append(trained(Deep(middle, wrap), execution))
    (losses, state), (again, state_again) = results
    np.testing.assert_allclose(again, losses, rtol=1e-5)
    assert losses[-1] < losses[0] and state.keys() == state_again.keys()
    for path, value in state.items():
        np.testing.assert_allclose(state_again[path], value, rtol=1e-4, atol=1e-6, err_msg=path)


def test_activations_are_computed_again() -> None:
    calls: list[Any] = []
    kernel = keras.Variable(np.ones((3, 3), "float32"))

    def function(x: Any) -> Any:
        calls.append(x)
        return ops.tanh(ops.matmul(x, kernel))

    counts: list[int] = []
    for wrap in (plain, treadle.remat):
        calls.clear()
        treadle.gradients(lambda wrap=wrap: ops.sum(wrap(function)(ops.array(X))), [kernel])
        counts.append(len(calls))
    # JAX traces a function once, and computes the trace again.
    assert counts[1] == counts[0] if BACKEND == "jax" else counts[1] > counts[0]


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere nothing lives in Python")
@pytest.mark.parametrize("wrap", [plain, treadle.remat])
def test_activations_inside_are_released(wrap: Callable[..., Any]) -> None:
    layers = [keras.layers.Dense(4, "tanh") for _ in range(3)]
    for layer in layers:
        layer.build((None, 4))
    variables = [variable for layer in layers for variable in layer.trainable_variables]
    within: list[weakref.ref[Any]] = []

    def function(x: Any) -> Any:
        for layer in layers:
            x = layer(x)
            within.append(weakref.ref(x))
        return x * 2.0

    def alive() -> int:
        return sum(tensor() is not None for tensor in within)

    def objective() -> Any:
        result = wrap(function)(ops.ones((2, 4)))
        assert alive() == (2 if wrap is plain else 0)  # what is doubled is not needed
        return ops.sum(result)

    gc.disable()  # Keras' tracebacks are cycles
    try:
        of_a_layer = weakref.ref(layers[0](ops.ones((2, 4))))
        if of_a_layer() is not None:
            pytest.skip(f"Keras {keras.__version__} keeps what layers return in cycles")
        treadle.gradients(objective, variables)
        assert alive() == 0
        assert len(within) == (3 if wrap is plain else 6)
    finally:
        gc.enable()


@pytest.mark.skipif(BACKEND != "torch", reason="elsewhere the first run has no values")
def test_a_first_run_for_shapes_keeps_nothing() -> None:
    seen: list[bool] = []

    class Looked(Deep):
        def train_step(self, batch: Any) -> Any:
            def objective() -> Any:
                found = self.head(self.hidden(batch[0])["hidden"])
                seen.append(found.requires_grad)
                return ops.mean(found)

            layers = [*self.body, self.head]
            variables = [variable for layer in layers for variable in layer.trainable_variables]
            return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    trained(Looked(MIDDLES["no state"], plain), "eager")
    assert not seen[0] and seen[-1]


def test_gradients_reach_inputs_variables_and_values_that_stand_in_for_them() -> None:
    kernel = keras.Variable(np.full((3, 1), 0.5, "float32"))

    def function(x: Any) -> Any:
        return ops.sum(ops.tanh(ops.matmul(x, kernel)))

    def penalty(wrap: Callable[..., Any]) -> Any:
        """Differentiate what holds the gradient at an input, at a value that is substituted."""

        def objective() -> Any:
            with treadle.substituted([kernel], [kernel * 2.0]):
                _, (slope,) = treadle.input_gradients(wrap(function), ops.array(X))
            return ops.sum(slope**2)

        loss, (gradient,) = treadle.gradients(objective, [kernel])
        return ops.convert_to_numpy(loss), ops.convert_to_numpy(gradient)

    for ours, theirs in zip(penalty(treadle.remat), penalty(plain), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_layer_used_twice_draws_twice() -> None:
    dropout, kernel = keras.layers.Dropout(0.5, seed=0), keras.Variable(np.ones((64,), "float32"))

    def function(x: Any) -> Any:
        return dropout(x * kernel, training=True)

    def objective() -> Any:
        run = treadle.remat(function)
        first, second = run(ops.ones((64,))), run(ops.ones((64,)))
        return ops.sum(first * first + 3 * second), (first, second)

    (_, (first, second)), (gradient,) = treadle.gradients(objective, [kernel])
    first, second = (ops.convert_to_numpy(x) for x in (first, second))
    assert (first != second).any()  # 0 or 2 each
    np.testing.assert_allclose(ops.convert_to_numpy(gradient), 2 * first * first + 3 * second)


class Within(keras.layers.Layer):
    """Computes again what takes its training mode and dtype from this layer's call alone."""

    def __init__(self, wrap: Callable[..., Any]) -> None:
        super().__init__()
        self.wrap = wrap
        self.dropout = keras.layers.Dropout(0.5, seed=3)
        self.scale = self.add_weight(shape=(64,), initializer="ones")

    def call(self, x: Any) -> Any:
        return self.wrap(self.inner)(x)

    def inner(self, x: Any) -> Any:
        return ops.tanh(self.dropout(x * self.scale))


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_recomputing_has_the_training_mode_and_dtype_of_the_enclosing_layer(policy: str) -> None:
    needs_keras("3.10", "training=True for a layer whose call has no such argument")
    found: list[Any] = []
    keras.config.set_dtype_policy(policy)
    try:
        for wrap in (plain, treadle.remat):
            layer = Within(wrap)

            def objective(layer: Within = layer) -> Any:
                return ops.sum(ops.cast(layer(ops.ones((4, 64)), training=True), "float32"))

            _, (gradient,) = treadle.gradients(objective, layer)
            found.append(ops.convert_to_numpy(gradient))
    finally:
        keras.config.set_dtype_policy("float32")
    assert (found[0] == 0).any()  # dropped
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_one_within_another() -> None:
    dropout, kernel = keras.layers.Dropout(0.5, seed=0), keras.Variable(np.ones((64,), "float32"))

    def function(x: Any) -> Any:
        return treadle.remat(lambda x: dropout(ops.tanh(x * kernel), training=True))(x) * kernel

    def objective() -> Any:
        dropped = treadle.remat(function)(ops.ones((64,)))
        return ops.sum(dropped), dropped

    (_, dropped), (gradient,) = treadle.gradients(objective, [kernel])
    kept = ops.convert_to_numpy(dropped) > 0
    slope = 2 * (np.tanh(1) + 1 - np.tanh(1) ** 2)
    assert 0 < kept.sum() < 64
    np.testing.assert_allclose(ops.convert_to_numpy(gradient), kept * slope, rtol=1e-5)


def test_add_loss_within_is_refused() -> None:
    layer = keras.layers.Dense(2, activity_regularizer="l2")
    layer.build((None, 3))
    with pytest.raises(
        StepError, match=r"inside of treadle\.remat passed a loss to add_loss, which would have no "
    ):
        treadle.gradients(lambda: ops.sum(treadle.remat(layer)(ops.array(X))), layer)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere the framework itself refuses it")
def test_layers_that_keras_computes_again_are_refused() -> None:
    with pytest.raises(
        StepError,
        match=r"a layer was called in the backward pass, .* argument 'training' of the .* "
        r"may not drop, and gradients are wrong\. Use treadle\.remat instead of keras\.remat",
    ):
        trained(Deep(MIDDLES["averages"], remat_of_keras))


@pytest.mark.skipif(BACKEND != "torch", reason="TensorFlow's layers were refused; JAX's escape")
def test_averages_that_keras_moves_again_are_refused() -> None:
    with pytest.raises(
        StepError, match=r"body/1/moving_mean was changed in the backward pass, .* averages twice"
    ):
        trained(Deep(MIDDLES["averages"], remat_of_keras))


def test_layers_that_keras_computes_again_may_be_told() -> None:
    body = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, "tanh")])

    def loss(wrap: Callable[..., Any]) -> Any:
        return ops.sum(wrap(lambda x: body(x, training=True))(ops.array(X)))

    gradients = [treadle.gradients(lambda w=w: loss(w), body)[1] for w in (plain, keras.remat)]
    for one, other in zip(*gradients, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(one), ops.convert_to_numpy(other))


@pytest.mark.skipif(BACKEND == "jax", reason="it is an error of JAX's: a tracer escapes")
def test_numbers_that_keras_draws_again_are_refused() -> None:
    class Noisy(treadle.Task):
        def __init__(self) -> None:
            self.kernel = keras.Variable(np.ones((3,), "float32"))
            self.seeds = keras.random.SeedGenerator(0)
            self.optimizer = keras.optimizers.SGD(0.1)

        def train_step(self, batch: Any) -> Any:
            def noisy(x: Any) -> Any:
                return x * self.kernel * keras.random.normal((8, 3), seed=self.seeds)

            def objective() -> Any:
                return ops.sum(keras.remat(noisy)(batch[0]) ** 2)

            return {"loss": treadle.minimize(objective, [self.kernel], self.optimizer)}

    with pytest.raises(
        StepError,
        match=r"seeds/state was changed in the backward pass, by a function that is recomputed "
        r"there: it draws different random numbers .* Use treadle\.remat instead of keras\.remat",
    ):
        trained(Noisy())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere it has its gradient")
def test_functions_that_tensorflow_would_not_differentiate_are_refused() -> None:
    class Outside(Deep):
        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                first = self.body[0](x)
                found = treadle.remat(lambda: self.head(first))()
                return ops.mean((found - y) ** 2)

            variables = [*self.body[0].trainable_variables, *self.head.trainable_variables]
            return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    with pytest.raises(
        StepError,
        match=r"treadle\.remat computes with a tensor of shape \(8, 16\) that was made outside of "
        r"it, which on TensorFlow would get no gradient: pass it as an argument",
    ):
        trained(Outside(MIDDLES["no state"], plain))
