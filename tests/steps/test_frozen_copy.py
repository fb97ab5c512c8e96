"""Frozen copies of models that have no configuration, and of those that have one."""

from collections import OrderedDict, defaultdict, deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile
from keras import layers, ops

import treadle
from treadle.errors import StepError

X = np.random.default_rng(0).normal(5.0, 3.0, (8, 6)).astype("float32")


class Block(layers.Layer):
    """Holds variables in every kind of container, and functions that refer to them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = layers.Dense(width, kernel_regularizer="l2", kernel_constraint="non_neg")
        self.drop = layers.Dropout(0.5, seed=1)
        self.parts: Any = [layers.Dense(width), OrderedDict(b=layers.Dense(width))]
        self.table = ops.ones(width)
        self.numbers, self.plain = np.ones(width, "float32"), {"power": 1.0}
        self.function = lambda x: self.dense(x)
        self.bound = self.dense.call
        held = SimpleNamespace(dense=layers.Dense(width))
        held.dense.build((None, width))
        self.last = held.dense  # which Keras finds
        self.held = (held, deque([held.dense]), defaultdict(list, a=[held.dense]))
        self.partly = partial(ops.multiply, ops.ones(width))
        self.own: Any = None

    def build(self, shape: Any) -> None:
        self.own = self.add_weight(shape=(shape[-1],), initializer="ones", name="own")

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.drop(self.function(x), training=training) * self.own
        x = self.parts[1]["b"](self.parts[0](x)) * self.table + ops.multiply(x, self.numbers)
        held, several, named = self.held
        return self.partly(held.dense(x) + several[0](x) + named["a"][0](x)) * self.plain["power"]


class Net(keras.Model):
    """A subclassed model without a configuration, around a functional one."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.norm = layers.Normalization()
        self.norm.build((None, 6))
        self.first = self.again = Block(6)
        self.batch_norm = layers.BatchNormalization()
        self.inner = inner

    def call(self, x: Any, training: bool = False) -> Any:
        x = self.again(self.first(self.norm(x), training=training), training=training)
        return self.inner(self.batch_norm(x, training=training))


def net(depth: int = 2) -> Any:
    inputs = keras.Input((6,))
    x = inputs
    for _ in range(depth):
        x = layers.Dense(6, "tanh")(x)
    model = Net(keras.Model(inputs, Block(6)(x)))
    model(X[:1])
    return model


def outputs(model: Any) -> Any:
    return keras.ops.convert_to_numpy(model(X))


def assert_independent(model: Any, copy: Any) -> None:
    """Check that models share neither variables nor layers, and compute the same."""
    assert not {id(v) for v in model.variables} & {id(v) for v in copy.variables}
    assert not {id(x) for x in model._flatten_layers()} & {id(x) for x in copy._flatten_layers()}
    assert [v.path for v in model.variables] == [v.path for v in copy.variables]
    assert copy.trainable_variables == [] and model.trainable_variables
    np.testing.assert_array_equal(outputs(copy), outputs(model))
    before = outputs(copy)
    for variable in model.variables:
        if "float" in variable.dtype:
            variable.assign(variable * 0.5 + 0.1)
    np.testing.assert_array_equal(outputs(copy), before)
    treadle.blend(copy, model, 1.0)
    for variable, other in zip(model.weights, copy.weights, strict=True):
        np.testing.assert_allclose(other.numpy(), variable.numpy(), rtol=1e-5, atol=1e-7)


def test_a_model_without_a_configuration_is_copied() -> None:
    model = net(depth=120)  # deeper than Python recurses
    model.norm.adapt(X)
    model.compile("adam", "mse", metrics=["mae"])
    copy = treadle.frozen_copy(model)
    assert copy.first is copy.again and copy.first is not model.first
    assert copy.first.held[0].dense is copy.first.last is copy.first.held[1][0]
    assert copy.first.table is not model.first.table
    assert (copy.optimizer, copy.compiled) == (None, False)
    assert_independent(model, copy)


@long_to_compile
def test_a_copy_trains_is_saved_and_is_copied_again() -> None:
    keras.utils.set_random_seed(0)
    model = net()
    copy = treadle.frozen_copy(treadle.frozen_copy(model))
    copy.trainable = True
    assert len(copy.trainable_variables) == len(model.trainable_variables)

    def step(copy: Any, optimizer: Any, batch: Any) -> Any:
        return treadle.minimize(lambda: ops.mean(copy(batch) ** 2), copy, optimizer)

    optimizer = keras.optimizers.SGD(1e-4)
    before = outputs(model)
    with treadle.Loop(treadle.task(step, copy=copy, optimizer=optimizer), console=False) as loop:
        history = loop.fit([X] * 2, epochs=1)
    losses = history.steps("loss")
    assert losses[1] < losses[0] == pytest.approx(float((before**2).mean()), rel=1e-4)
    np.testing.assert_array_equal(outputs(model), before)
    inner = treadle.frozen_copy(copy.inner)  # functional, with a layer without a configuration
    np.testing.assert_array_equal(outputs(inner), outputs(copy.inner))
    assert len(inner._nodes) == len(inner.operations) == 4


class Wrapper(keras.Model):
    """Its configuration holds the live layer, which both models would share."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self.part = part
        self.built = True

    def get_config(self) -> Any:
        return {"part": self.part}

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> Any:
        return cls(config["part"])

    def call(self, x: Any) -> Any:
        return self.part(x)


def test_a_configuration_that_shares_layers_is_not_used() -> None:
    part = layers.Dense(2)
    part.build((None, 6))
    model = Wrapper(part)
    assert_independent(model, treadle.frozen_copy(model))


def test_models_and_layers_are_copied_by_their_configuration() -> None:
    inputs, layer = keras.Input((6,)), layers.Dense(2)
    layer.build((None, 6))
    sequential = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    for model in (layer, sequential, keras.Model(inputs, layers.Dense(2)(inputs))):
        copy = treadle.frozen_copy(model)
        assert type(copy) is type(model)
        assert_independent(model, copy)


def test_arrays_of_a_copy_from_a_configuration_are_its_own() -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    copy = treadle.frozen_copy(model)
    model.compile("sgd", "mse")
    before = outputs(copy)
    model.fit(X, X[:, :2], verbose=0)  # JAX donates the arrays of variables
    np.testing.assert_array_equal(outputs(copy), before)


class Odd:
    """An object that cannot be created without an argument."""

    def __new__(cls, value: Any) -> "Odd":
        made = super().__new__(cls)
        made.value = value
        return made

    value: Any


def test_an_object_that_cannot_be_copied_is_named() -> None:
    model = net()
    model.odd = Odd(1)
    message = (
        f"frozen_copy cannot make {model.name!r} from a configuration, nor copy the Odd that it "
        "holds, whose __new__ needs arguments: write get_config for Net, or create a second Net "
        "and call treadle.blend(second, first, 1.0)"
    )
    with pytest.raises(StepError) as error:
        treadle.frozen_copy(model)
    assert str(error.value).splitlines()[0] == message


def test_a_layer_with_lora_keeps_its_alpha():
    dense = layers.Dense(3)
    model = keras.Sequential([keras.Input((4,)), dense])
    dense.enable_lora(2, lora_alpha=16)
    dense.lora_kernel_b.assign(np.ones((2, 3)))
    x = np.ones((1, 4), "float32")
    expected = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(treadle.frozen_copy(model)(x)), expected
    )


def test_an_adapted_lookup_keeps_its_vocabulary():
    lookup = layers.IntegerLookup()
    lookup.adapt(np.array([3, 5, 7]))
    model = keras.Sequential([keras.Input((1,), dtype="int32"), lookup])
    x = np.array([[5]], "int32")
    expected = keras.ops.convert_to_numpy(model(x))
    np.testing.assert_array_equal(
        keras.ops.convert_to_numpy(treadle.frozen_copy(model)(x)), expected
    )
