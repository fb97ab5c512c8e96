"""64-bit floats in the whole process, which `setup(precision="float64")` switches on.

Keras' dtype policy only applies to layers. Losses, metrics and optimizers take `floatx`, and on JAX
and PyTorch Keras' own functions (`matmul`, `maximum`, `var`, `tanh`) round float64 to float32, as
JAX does without its 64-bit mode.
"""

from typing import Any, Final

import numpy as np

from . import keras_internals

_NARROW, _WIDE = np.dtype("float32"), np.dtype("float64")

CONVERTED: Final[set[np.dtype[Any]]] = {_WIDE}
"""The dtypes of arrays that become tensors of Keras' float type; with 64-bit floats, float32 too,
since TensorFlow multiplies no tensors of two dtypes."""

_replaced: dict[str, Any] = {}  # what Keras had in the places of the replacements


def is_on() -> bool:
    """Return whether Keras keeps 64-bit floats."""
    return _NARROW in CONVERTED


def wide() -> str:
    """Return the dtype in which Treadle computes what is not to be half precision."""
    return "float64" if is_on() else "float32"


def switch(on: bool) -> None:
    """Set Keras' `floatx`, and let its functions keep float64, or not."""
    import keras

    parts: Any = None
    if on != is_on():  # first, since a version of Keras may lack them
        parts = keras_internals.promotion, keras_internals.backend_numpy
    keras.config.set_floatx("float64" if on else "float32")
    if parts is None:
        return
    promotion, numpy = parts
    if on:
        CONVERTED.add(_NARROW)
        _replaced.update(float64=promotion.BIT64_TO_BIT32_DTYPE["float64"], mean=numpy.mean)
        promotion.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
        numpy.mean = _mean
    else:
        CONVERTED.remove(_NARROW)
        promotion.BIT64_TO_BIT32_DTYPE["float64"] = _replaced.pop("float64")
        numpy.mean = _replaced.pop("mean")


def _mean(x: Any, axis: Any = None, keepdims: bool = False) -> Any:
    """Compute Keras' mean, which is float32 for integers and booleans, such as hits."""
    from keras import backend, ops

    x = ops.convert_to_tensor(x)
    if backend.is_int_dtype(x.dtype) or backend.standardize_dtype(x.dtype) == "bool":
        x = ops.cast(x, "float64")
    return _replaced["mean"](x, axis=axis, keepdims=keepdims)
