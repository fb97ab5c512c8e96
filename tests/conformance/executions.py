"""What runs on PyTorch by default, and on TensorFlow and JAX with `--all` or not at all."""

from collections.abc import Iterable
from typing import Any

import keras
import pytest

# XLA takes seconds to compile a step.
if keras.config.backend() == "torch":
    long_to_compile = pytest.mark.skipif(False, reason="PyTorch compiles nothing")
else:
    long_to_compile = pytest.mark.long

# XLA compiles the operations of an eager step one by one, which takes as long as the whole step.
EAGER = pytest.param("eager", marks=long_to_compile)
EXECUTIONS = pytest.mark.parametrize("execution", ["auto", EAGER])

once = pytest.mark.skipif(keras.config.backend() != "torch", reason="the backend does not matter")

# Where eager steps take most of the time; test_matrix.py runs its cases eagerly on each backend.
EAGER_ONCE = pytest.mark.parametrize("execution", ["auto", pytest.param("eager", marks=once)])


def some(values: Iterable[Any], every: int = 3) -> list[Any]:
    """Return parameters: one in `every` runs by default, the others are long."""
    return [
        pytest.param(value, marks=pytest.mark.long if i % every else ())
        for i, value in enumerate(values)
    ]
