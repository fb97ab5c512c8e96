"""The private parts of a framework that Treadle uses are there, and are what they were."""

import importlib
from collections.abc import Callable
from typing import Any

import keras
import pytest
from registers import LINKS, difference, missing

BACKEND = keras.config.backend()
patches: Any = importlib.import_module(f"treadle.backends.{BACKEND}.patches")


def layer() -> list[Any]:
    made = keras.layers.Dense(1)
    made.build((None, 2))
    return [made]


def of_torch() -> dict[str, Callable[[], list[Any]]]:
    import torch

    def collected() -> list[Any]:
        for made in (layers := layer()):
            made.torch_params  # noqa: B018 - Keras collects the parameters
        return layers

    return {
        "OpOverload": lambda: [torch.ops.aten.add.Tensor],
        "torch.ops.aten": lambda: [torch.ops.aten],
        "Tensor": lambda: [torch.zeros(1)],
        "UntypedStorage and Generator": lambda: [
            torch.zeros(1).untyped_storage(),
            torch.Generator(),
        ],
        "Layer": collected,
    }


def of_tensorflow() -> dict[str, Callable[[], list[Any]]]:
    import tensorflow as tf

    data = tf.data.Dataset.range(3)
    function = tf.function(lambda x: x)
    return {
        "ConcreteFunction": lambda: [function.get_concrete_function(tf.TensorSpec([]))],
        "tf.function": lambda: [function],
        "tf.train.ExponentialMovingAverage": lambda: [tf.train.ExponentialMovingAverage(0.9)],
        "tf.data.Dataset": lambda: [data, data.map(lambda x: x)],
        "tf.data iterator": lambda: [iter(data)],
        "shuffled tf.data.Dataset": lambda: [data.shuffle(2, seed=1)],
        "random tf.data.Dataset": lambda: [tf.data.Dataset.random(seed=1)],
        "parallel tf.data.Dataset": lambda: [
            data.map(lambda x: x, num_parallel_calls=2, deterministic=False)
        ],
    }


def of_jax() -> dict[str, Callable[[], list[Any]]]:
    return {"Variable": lambda: [keras.Variable(1.0)]}


EXAMPLES = {"jax": of_jax, "tensorflow": of_tensorflow, "torch": of_torch}[BACKEND]()


@pytest.mark.parametrize("name", patches.INTERNALS)
def test_a_private_part_has_the_members_and_parameters_that_its_entry_lists(name: str) -> None:
    assert not difference(patches.INTERNALS[name])


@pytest.mark.parametrize("name", [name for name in patches.ATTRIBUTES if name != "_self_"])
def test_objects_have_the_private_attributes_that_are_listed(name: str) -> None:
    attribute = patches.ATTRIBUTES[name]
    assert not missing(name, attribute, EXAMPLES[attribute.owner]())


def test_every_entry_links_to_its_source() -> None:
    for register in (patches.INTERNALS, patches.ATTRIBUTES):
        for name, entry in register.items():
            assert entry.reason and entry.upstream.startswith(LINKS), name


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own attributes")
def test_tensorflow_marks_its_own_attributes_by_a_prefix() -> None:
    import tensorflow as tf

    module = tf.Module()
    module.parts = [tf.Variable(1.0)]
    own = [name for name in vars(module) if name.startswith("_self_")]
    assert own, "attributes of a tf.Module without the prefix _self_ become part of the state"


@pytest.mark.skipif(BACKEND != "tensorflow", reason="patched on TensorFlow")
def test_the_patch_of_moments_is_still_needed() -> None:
    """If this fails, TensorFlow or Keras is repaired: remove the patch."""
    import tensorflow as tf
    from keras.src.backend.tensorflow import nn

    def second_derivative() -> float:
        x = tf.constant([1.0, 2.0, 4.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                variance = nn._compute_moments(x, [0], keepdims=False)[1]
            gradient = inner.gradient(variance, x)
        return float(outer.jacobian(gradient, x)[0, 0])

    right = 2 / 3 * (1 - 1 / 3)
    with patches.true_moments():
        assert second_derivative() == pytest.approx(right)
    assert second_derivative() != pytest.approx(right)
