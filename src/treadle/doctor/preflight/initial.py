"""Whether layers hold the values that their initializers gave them."""

from typing import Any, Final

import numpy as np
from keras import ops

KERNELS: Final = {
    "kernel": "kernel_initializer",
    "_kernel": "kernel_initializer",
    "depthwise_kernel": "depthwise_initializer",
    "embeddings": "embeddings_initializer",
    "_embeddings": "embeddings_initializer",
}
"""The attributes of Keras' layers that hold a random variable, with those of its initializer."""


def has_initial_value(layer: Any) -> bool:
    """Return whether a kernel or embedding is what its initializer returns, so not loaded.

    Keras' initializers return the same random numbers each time that they are called. A layer that
    was loaded or copied has an initializer with another seed.
    """
    for name, initializer_name in KERNELS.items():
        variable, initializer = vars(layer).get(name), getattr(layer, initializer_name, None)
        if variable is None or initializer is None or not callable(initializer):
            continue
        if isinstance(getattr(initializer, "seed", None), int):
            value = ops.convert_to_numpy(variable.value)
            again = ops.convert_to_numpy(initializer(tuple(value.shape), dtype=str(variable.dtype)))
            if np.allclose(value, again, rtol=1e-5, atol=1e-7):
                return True
    return False
