"""Building compiled Keras models, as the trainers of JAX and PyTorch do before the first step."""

from typing import Any

import keras
import numpy as np

from ..core import structures
from ..core.float64 import CONVERTED
from ..core.keras_internals import INTERNALS


def build_model(model: Any, batch: Any, required: bool = False) -> None:
    """Create the variables of a model, its metrics and its optimizer from the shapes of a batch.

    Without this method of Keras, PyTorch creates them in the dry run of the step; JAX cannot train.

    Args:
        model: A compiled model.
        batch: A batch of NumPy arrays.
        required: Raise an error if the installed version of Keras does not have the method.

    Raises:
        BackendError: It does not, and it is required.
    """
    internal = INTERNALS["symbolic_build"]
    build = internal.resolve() if required else internal.get()
    if build is not None:
        build(model, data_batch=structures.mapped(_as_converted, batch))


def _as_converted(leaf: Any) -> Any:
    """Return a leaf with the dtype that it has in a step."""
    wide = isinstance(leaf, np.ndarray) and leaf.dtype in CONVERTED
    return leaf.astype(keras.config.floatx()) if wide else leaf
