"""`setup` does what Keras' own settings do, and refuses what would go unnoticed."""

import random
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.errors import ConfigurationError


@pytest.fixture(autouse=True)
def clean() -> Any:
    keras.backend.clear_session()
    yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()


def draws() -> list[Any]:
    weights = keras.initializers.GlorotUniform()((2, 2))
    noise = keras.random.normal((3,))
    drawn = [random.random(), np.random.rand(), *map(keras.ops.convert_to_numpy, (noise, weights))]
    if keras.config.backend() == "torch":
        import torch

        drawn.append(torch.rand(2).numpy())
    return drawn


def test_a_seed_seeds_what_keras_seeds() -> None:
    treadle.setup(seed=3)
    ours = draws()
    keras.utils.set_random_seed(3)
    for a, b in zip(ours, draws(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_precision_sets_the_policy_of_layers_made_afterwards() -> None:
    for dtype in ("float16", "bfloat16"):
        keras.backend.clear_session()
        treadle.setup(precision=f"mixed_{dtype}")
        layer = keras.layers.Dense(1)
        assert (layer.compute_dtype, layer.variable_dtype) == (dtype, "float32")


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"would keep weights in float16.*'mixed_float16'"):
        treadle.setup(precision="float16")
    with pytest.raises(ConfigurationError, match=r"^seed must be a whole number, not 1\.5$"):
        treadle.setup(seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"^seed must be at least 0, not -1$"):
        treadle.setup(seed=-1)
