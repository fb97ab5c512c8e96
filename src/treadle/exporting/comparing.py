"""Differences between the outputs of an exported file and those of `predict`."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from ..errors import ExportError

TOLERANCE: Final = 1e-4
TOLERANCE_OF_HALF: Final = 1e-2
"""For tasks that compute in float16 or bfloat16."""


def largest_difference(expected: Sequence[Any], found: Sequence[Any], batch_size: int) -> float:
    """Return the largest `difference` of an output.

    Args:
        expected: The outputs of `predict`, as arrays.
        found: The outputs of the file.
        batch_size: For messages.

    Raises:
        ExportError: The number of outputs, their shapes or their dtypes differ.

    Example:
        >>> largest_difference([np.array([200.0, 1.0])], [np.array([198.0, 1.0])], 2)
        0.01
    """
    shapes = [np.shape(x) for x in expected], [np.shape(x) for x in found]
    if shapes[0] != shapes[1]:
        raise ExportError(
            f"for a batch of {batch_size}, the exported file returns arrays of shape "
            f"{_joined(shapes[1])}, but predict returns {_joined(shapes[0])}: predict_step may "
            "depend on the batch size as a Python number, which a file fixes"
        )
    dtypes = [np.asarray(x).dtype for x in expected], [np.asarray(x).dtype for x in found]
    if dtypes[0] != dtypes[1]:
        raise ExportError(
            f"the exported file returns arrays of dtype {_joined(dtypes[1])}, but predict returns "
            f"{_joined(dtypes[0])}: cast them in predict_step to dtypes that the format has "
            "(keras.ops.cast), or use another format"
        )
    return max(
        (difference(_float(x), _float(y)) for x, y in zip(expected, found, strict=True)),
        default=0.0,
    )


def difference(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    """Return the largest difference of two float arrays, relative to the largest value above 1.

    Values that are both NaN, or infinities of equal sign, do not differ.
    """
    finite = np.isfinite(expected)
    same = (expected == found) | (np.isnan(expected) & np.isnan(found))
    if not np.array_equal(finite, np.isfinite(found)) or not same[~finite].all():
        return float("inf")
    scale = np.max(np.abs(expected[finite]), initial=1.0)
    return float(np.max(np.abs(expected[finite] - found[finite]), initial=0.0) / scale)


def _float(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array).astype("float64")


def _joined(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values)) or "nothing"
