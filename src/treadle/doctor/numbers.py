"""Summary statistics of arrays: norm, range, mean and non-finite entries."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import listed

Array = np.ndarray[Any, np.dtype[Any]]
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Numbers:
    """Summary statistics of an array.

    Attributes:
        path: The array's name.
        shape: Its shape.
        dtype: Its dtype.
        norm: The L2 norm of its finite entries.
        least: The smallest finite entry; None if there is none.
        most: The largest finite entry; None if there is none.
        mean: The mean of the finite entries; None if there is none.
        not_finite: How many entries are NaN or infinite.
        rows: The indices along the first axis of rows with such entries.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    norm: float
    least: float | None
    most: float | None
    mean: float | None
    not_finite: int
    rows: tuple[int, ...]

    @classmethod
    def of(cls, path: str, array: Array) -> "Numbers":
        """Compute the statistics of an array.

        Example:
            >>> Numbers.of("x", np.array([[3.0, 4.0], [np.nan, 0.0]])).rows
            (1,)
        """
        floats = as_floats(array)
        bad = ~np.isfinite(floats)
        good = floats[~bad]
        rows = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1)) if bad.ndim else []
        least, most, mean = (
            (float(x.item()) for x in (good.min(), good.max(), good.mean()))
            if good.size
            else (None, None, None)
        )
        return cls(
            *(path, tuple(array.shape), str(array.dtype), norm_of(good), least, most, mean),
            int(bad.sum()),
            tuple(int(row) for row in rows),
        )


def as_floats(value: Any) -> Array:
    """Convert numbers of any dtype, including bfloat16, to float64."""
    return np.asarray(value).astype(np.float64)


def norm_of(array: Array) -> float:
    """Return the L2 norm of a float64 array; NaN if an entry is NaN."""
    if not array.size:
        return 0.0
    largest = float(np.abs(array).max())  # scaling by it avoids overflow of the squares
    if largest == 0 or not np.isfinite(largest):
        return largest
    return largest * float(np.sqrt(np.square(array / largest).sum()))


def norm_of_all(arrays: Iterable[Array]) -> float:
    """Return the L2 norm of all entries of several arrays."""
    return norm_of(np.array([norm_of(as_floats(array)) for array in arrays]))


def apart(a: Array, b: Array) -> float:
    """Return the distance of two arrays, each divided by its norm: 0 if parallel, 2 if opposite.

    It is infinite if one is zero.
    """
    x, y = norm_of(a), norm_of(b)
    return norm_of(a / x - b / y) if x and y else float("inf")


def scalar(array: Any) -> float:
    """Return the first entry of an array, such as the value of a scalar."""
    return float(as_floats(array).reshape(-1)[0])


def shape_of(array: Any) -> str:
    """Return the shape of an array, as `32×4`."""
    return "×".join(map(str, array.shape)) or "scalar"


def is_float(array: Array) -> bool:
    """Return whether an array has a float dtype, such as bfloat16, which NumPy does not know."""
    return array.dtype.kind in "fV"


def farthest(
    these: Mapping[str, Array], those: Mapping[str, Array], whole: bool
) -> tuple[float, str]:
    """Return the largest relative difference of two sets of arrays, and the name of that array.

    Differences are relative to each entry of `those`, or with `whole` to the largest entry of its
    array. If only one of two entries is finite, their difference is infinite; NaN equals NaN.

    Example:
        >>> farthest({"a": np.array([1.0, 2.0])}, {"a": np.array([1.0, 1.0])}, whole=False)
        (1.0, 'a')
    """
    worst, where = 0.0, ""
    for name, array in those.items():
        a, b = as_floats(these[name]), as_floats(array)
        with np.errstate(invalid="ignore", divide="ignore"):
            equal = (a == b) | (np.isnan(a) & np.isnan(b))
            size = np.abs(b)
            if whole:
                size = np.max(size, initial=0.0, where=np.isfinite(size))
            relative = np.where(equal, 0.0, np.abs(a - b) / size)
        distance = float(np.nan_to_num(relative, nan=np.inf, posinf=np.inf).max(initial=0.0))
        if distance > worst:
            worst, where = distance, name
    return worst, where


def short_list(numbers: tuple[int, ...]) -> str:
    """Format integers as a list that is cut off after eight.

    Example:
        >>> short_list(tuple(range(12)))
        '0, 1, 2, 3, 4, 5, 6, 7 and 4 more'
    """
    return listed(numbers, _LISTED)
