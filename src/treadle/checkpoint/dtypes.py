"""The names under which files store dtypes of numbers."""

import re
from typing import Any

import ml_dtypes  # NumPy's names of bfloat16 and the like; comes with Keras
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
DType = np.dtype[Any]

# Dtypes that NumPy lacks, by name.
FOREIGN: dict[str, DType] = {
    np.dtype(kind).name: np.dtype(kind)
    for kind in vars(ml_dtypes).values()
    if isinstance(kind, type) and issubclass(kind, np.generic)
}
_NUMBERS = re.compile("[<>|][biufc][0-9]{1,2}")


def name_of(dtype: DType) -> str | None:
    """Return the name under which a dtype is stored, or None if it is not numeric.

    Example:
        >>> name_of(np.dtype("float32")), name_of(np.dtype(ml_dtypes.bfloat16))
        ('<f4', 'bfloat16')
        >>> name_of(np.dtype(object))
    """
    if dtype.name in FOREIGN:
        return dtype.name
    return dtype.str if _NUMBERS.fullmatch(dtype.str) else None


def dtype_named(name: str) -> DType:
    """Return the dtype for a name returned by `name_of`.

    Raises:
        ValueError: If the name is not of a numeric dtype. Files can thus never create object
            arrays.
    """
    try:
        return FOREIGN[name] if name in FOREIGN else np.dtype(_NUMBERS.fullmatch(name)[0])  # type: ignore[index]
    except TypeError as error:
        raise ValueError(f"{name[:40]!a} is not a numeric dtype") from error


def dtype_called(name: str) -> DType:
    """Return the dtype that a framework calls `float32`, `bfloat16` and so on.

    Example:
        >>> dtype_called("bfloat16").itemsize
        2
    """
    return FOREIGN.get(name) or np.dtype(name)
