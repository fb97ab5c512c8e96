"""Traces: the results of some steps, as NumPy arrays that can be compared and saved."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint.arrays import read_arrays, write_arrays
from ..errors import StateError

Array = np.ndarray[Any, np.dtype[Any]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

# In the file of a trace, an array is called `<part>/<its name>`; another one describes the rest.
PARTS, ABOUT = ("values", "weights", "start", "state"), "about"


@dataclass(frozen=True, slots=True)
class Trace:
    """The results of some steps of a task.

    Attributes:
        values: The values that the steps returned: an array of shape (steps,) per name.
        weights: The weights of values made by `treadle.weighted`: an array of shape (steps,) per
            name.
        start: Every variable before the first step, by path.
        state: Every variable after the last step, by path.
        backend: The Keras backend.
        plan: How the steps were executed, in one line.

    Example:
        >>> loss, zero, one = np.array([1.0, 0.5]), np.zeros(2), np.ones(2)
        >>> start, end = {"w": zero, "b": zero}, {"w": one, "b": zero}
        >>> trace = Trace({"loss": loss}, {}, start, end, "jax", "")
        >>> trace.values["loss"].tolist(), trace.changed
        ([1.0, 0.5], {'w'})
    """

    values: Mapping[str, Array]
    weights: Mapping[str, Array]
    start: Mapping[str, Array]
    state: Mapping[str, Array]
    backend: str
    plan: str

    @property
    def changed(self) -> set[str]:
        """The paths of the variables that the steps changed in at least one bit."""
        return {path for path, end in self.state.items() if not same_bits(self.start[path], end)}


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The allowed difference of two numbers: `atol + rtol * size`.

    For the values of steps, the size is that of each number. For variables, it is that of the
    variable's largest entry, since small entries carry the rounding errors of large ones.
    """

    rtol: float
    atol: float

    def exceeded(self, a: Array, b: Array, whole: bool) -> Array:
        """Return a mask of where two arrays of equal shape differ by more; NaN equals NaN."""
        a, b = a.astype(np.float64), b.astype(np.float64)
        size = np.abs(b)
        if whole:
            size = np.max(size, initial=0.0, where=np.isfinite(size))
        close = np.isclose(a, b, rtol=0, atol=0, equal_nan=True)  # equal infinities as well
        with np.errstate(invalid="ignore"):
            return ~(close | (np.abs(a - b) <= self.atol + self.rtol * size))


def agree(a: Trace, b: Trace, rtol: float = 1e-4, atol: float = 1e-6, state: bool = True) -> None:
    """Check that two traces agree within rounding, for example those of two backends.

    Floats may differ by `atol + rtol * size`, where the size is that of each value that a step
    returned, or that of the largest entry of each variable. Integers and booleans must be equal;
    their dtypes may differ.

    Args:
        a: A trace.
        b: The reference trace.
        rtol: The relative tolerance, relative to `b`.
        atol: The absolute tolerance, added to the relative one.
        state: Whether to compare the final variables too. Switch it off for long runs on two
            backends: rounding errors grow from step to step, most of all in optimizers that divide
            by small numbers.

    Raises:
        AssertionError: They do not agree. The message names the first step, or path, and both
            numbers.

    Example:
        >>> import numpy as np
        >>> a = Trace({"loss": np.array([1.0, 0.5])}, {}, {}, {}, "jax", "")
        >>> b = Trace({"loss": np.array([1.0, 0.6])}, {}, {}, {}, "torch", "")
        >>> agree(a, b)
        Traceback (most recent call last):
        ...
        AssertionError: step 2: loss is 0.5 on jax, but 0.6 on torch
    """
    compare(a, b, f"on {a.backend}", f"on {b.backend}", Tolerance(rtol, atol), state)


def compare(
    a: Trace, b: Trace, on_a: str, on_b: str, tolerance: Tolerance | None, state: bool = True
) -> None:
    """Raise an `AssertionError` for the first difference; without a tolerance, every bit counts."""
    _same_names("the steps return", list(a.values), list(b.values), on_a, on_b)
    found: list[tuple[int, str, Array, Array]] = []
    for kind, these, those in (("", a.values, b.values), ("the weight of ", a.weights, b.weights)):
        for name in these:
            where = _differences(these[name], those[name], tolerance, whole=False)
            if where is None:
                raise AssertionError(
                    f"{kind}{name} is {_form(these[name])} {on_a}, but {_form(those[name])} {on_b}"
                )
            if where.any():
                i = int(np.argmax(where))
                found.append((i, kind + name, these[name][i], those[name][i]))
    if found:
        i, name, this, that = min(found, key=lambda difference: difference[0])
        raise AssertionError(f"step {i + 1}: {name} is {this} {on_a}, but {that} {on_b}")
    if not state:
        return
    _same_names("the state holds", list(a.state), list(b.state), on_a, on_b)
    steps = max((len(x) for x in a.values.values()), default=None)
    after = f"after {steps} steps" if steps else "after the last step"
    for path, this in a.state.items():
        that = b.state[path]
        where = _differences(this, that, tolerance, whole=True)
        if where is None:
            raise AssertionError(f"{path} is {_form(this)} {on_a}, but {_form(that)} {on_b}")
        if where.any():
            at = np.unravel_index(int(np.argmax(where)), where.shape)
            entry = f"[{', '.join(map(str, at))}]" if at else ""
            more = f" ({where.sum()} of its {where.size} numbers differ)" if where.size > 1 else ""
            raise AssertionError(
                f"{after}: {path}{entry} is {this[at]} {on_a}, but {that[at]} {on_b}{more}"
            )


def same_bits(a: Array, b: Array) -> bool:
    """Return whether two arrays are equal in shape, dtype and every bit."""
    return a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes()


def differing_bits(a: Array, b: Array) -> Mask | None:
    """Return a mask of the numbers that differ in a bit; None if shapes or dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return None
    if same_bits(a, b):
        return np.zeros(a.shape, bool)
    return (_bytes_of(a) != _bytes_of(b)).any(axis=1).reshape(a.shape)


def _bytes_of(array: Array) -> Array:
    """Return the bytes of each number, of shape (size, itemsize)."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)


def save_trace(trace: Trace, path: str | Path) -> None:
    """Save a trace to a `.safetensors` file, for comparison in a process on another backend.

    Args:
        trace: The return value of `run_steps`.
        path: The file, whose name ends in `.safetensors`.

    Raises:
        StateError: The file has another name.
        DirectoryError: The file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> file = Path(tempfile.mkdtemp()) / "trace.safetensors"
        >>> loss = np.array([1.0, 0.5], "float32")
        >>> save_trace(Trace({"loss": loss}, {}, {}, {}, "jax", ""), file)
        >>> load_trace(file).values["loss"].tolist()
        [1.0, 0.5]
    """
    arrays: dict[str, Array] = {}
    about: dict[str, Any] = {"backend": trace.backend, "plan": trace.plan}
    for part in PARTS:
        found: Mapping[str, Array] = getattr(trace, part)
        about[part] = list(found)  # the order, which the file does not keep
        arrays |= {f"{part}/{name}": array for name, array in found.items()}
    write_arrays(path, {ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8), **arrays})


def load_trace(path: str | Path) -> Trace:
    """Load a trace saved by `save_trace`; nothing in the file is executed.

    Args:
        path: The file.

    Returns:
        The trace.

    Raises:
        FileNotFoundError: There is no such file.
        StateError: The file does not hold a trace.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> file = Path(tempfile.mkdtemp()) / "trace.safetensors"
        >>> save_trace(Trace({}, {}, {}, {"w": np.ones(2)}, "torch", "eager"), file)
        >>> load_trace(file).state["w"].tolist(), load_trace(file).backend
        ([1.0, 1.0], 'torch')
    """
    arrays = read_arrays(path)
    try:
        about: dict[str, Any] = json.loads(arrays[ABOUT].tobytes())
        parts = {part: {n: arrays[f"{part}/{n}"] for n in about[part]} for part in PARTS}
        return Trace(**parts, backend=about["backend"], plan=about["plan"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"{path} holds arrays, but no trace ({type(error).__name__}: {error}). Name a file "
            "that treadle.testing.save_trace wrote"
        ) from error


def _differences(a: Array, b: Array, tolerance: Tolerance | None, whole: bool) -> Mask | None:
    """Return a mask of where two arrays differ, or None if their shapes or dtypes differ."""
    if tolerance is None:
        return differing_bits(a, b)
    if a.shape != b.shape or _exact(a) != _exact(b):
        return None
    return a != b if _exact(a) else tolerance.exceeded(a, b, whole)


def _exact(array: Array) -> bool:
    return array.dtype.kind in "biu"


def _form(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _same_names(what: str, a: list[str], b: list[str], on_a: str, on_b: str) -> None:
    only_a, only_b = [x for x in a if x not in b], [x for x in b if x not in a]
    if only_a or only_b:
        parts = [
            f"only {on}: {', '.join(only)}" for on, only in ((on_a, only_a), (on_b, only_b)) if only
        ]
        raise AssertionError(f"{what} different names: {'; '.join(parts)}")
