"""Logged values: those of every step, their weighted means, records, and their formatting."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import floor, isfinite, log10
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from .images import Image
from .progress import Progress

Plain = bool | int | float | str
PLAIN = (bool, int, float, str)
Array = np.ndarray[Any, np.dtype[Any]]

# The columns of a file of logged values that are no values: where each was logged.
COLUMNS = ("kind", "epoch", "step", "seconds")

# The first columns of a record. Logs that were written before Treadle recorded the batch and the
# examples do not begin with them, and may hold values of these names.
HEAD = ("kind", "epoch", "step", "batch", "examples", "seconds")

# Names under which steps with loss scaling log the scale, and 1.0 if the step was undone.
LOSS_SCALE, UNDONE = "loss_scale", "undone"


@dataclass(frozen=True, slots=True)
class StepLogs:
    """The values returned by the steps of one window, fetched from the device together.

    Attributes:
        first_step: The number of the window's first step; the first step of a run is step 1.
        values: By name, an array of shape (steps,).
        weights: By name, an array of shape (steps,): the weight of each value in a mean.
        examples: The number of examples in each batch of the window.
        progress: The progress of the run after the window.
    """

    first_step: int
    values: Mapping[str, Array]
    weights: Mapping[str, Array]
    examples: int
    progress: Progress

    @property
    def steps(self) -> int:
        """The number of steps in the window."""
        return self.progress.step - self.first_step + 1

    def rows(self, after: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield `(step, {name: value})` for every step of the window after a step."""
        first = max(self.first_step, after + 1)
        columns = {n: array[first - self.first_step :].tolist() for n, array in self.values.items()}
        for offset in range(self.progress.step + 1 - first):
            yield first + offset, {n: column[offset] for n, column in columns.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """A log record: values logged at one step of the run.

    Attributes:
        kind: `"epoch"`, `"partial"` (an epoch that ended early, since training continued with
            another source), `"validation"` or `"log"` (logged by the user).
        progress: The progress of the run at this step.
        values: Name to number, string or image.
    """

    kind: str
    progress: Progress
    values: Mapping[str, Any]


class Logs(dict[str, float]):
    """Logs yielded to a user's `for` loop: means of the step's values since the previous logs.

    A mean is NaN if no step counts, for example because `NonFinite("skip")` undid them all. Metrics
    are included, but only computed on access, because that waits for the device.

    Attributes:
        progress: The progress of the run.
        step: The number of the last finished step; the state is exactly that after this step.

    Example:
        >>> logs = Logs({"loss": 0.5}, Progress(step=3), lambda: {"accuracy": 0.9})
        >>> logs["loss"], logs["accuracy"], logs.step
        (0.5, 0.9, 3)
    """

    def __init__(
        self,
        values: Mapping[str, float],
        progress: Progress,
        metrics: Callable[[], Mapping[str, float]],
    ) -> None:
        super().__init__(values)
        self.progress = progress
        self._metrics = metrics

    @property
    def step(self) -> int:
        """The number of the last finished step; the state is exactly that after this step."""
        return self.progress.step

    def __missing__(self, name: str) -> float:
        """Compute the metrics on the first access of one of them."""
        for key, value in self._metrics().items():
            self.setdefault(key, value)
        if name not in self:
            raise KeyError(f"no {name!r} in the logs; there are: {', '.join(self) or 'none'}")
        return self[name]


class Means:
    """Running means of a step's values, weighted by examples unless the step returns weights.

    Values are summed in float64 in the order of the steps, so that a mean does not depend on the
    number of steps per window.

    Example:
        >>> means = Means()
        >>> means.add({"loss": np.array([1.0, 4.0])}, {"loss": np.array([2.0, 1.0])})
        >>> means.result()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
        """Add the values of several steps, as arrays of shape (steps,)."""
        for name, array in values.items():
            total, weight = self._sums.get(name, (0.0, 0.0))
            for value, by in zip(array.tolist(), weights[name].tolist(), strict=True):
                if by:  # a value of weight zero may be NaN
                    total += value * by
                    weight += by
            self._sums[name] = total, weight

    def state(self) -> dict[str, list[float]]:
        """Return the sums and weights, to be saved in a checkpoint."""
        return {name: [total, weight] for name, (total, weight) in self._sums.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the sums and weights from what `state` returned."""
        self._sums = {name: (total, weight) for name, (total, weight) in state.items()}

    def result(self, empty: float | None = None) -> dict[str, float]:
        """Return the means so far.

        Args:
            empty: The mean to return for a name whose weights are all zero; None leaves it out.
        """
        means = {
            n: total / weight if weight else empty for n, (total, weight) in self._sums.items()
        }
        return {name: mean for name, mean in means.items() if mean is not None}


def column_of(name: str, columns: Collection[str] = COLUMNS) -> str:
    """Return the column of a value in a file: its name, which gets an underscore if it is taken.

    Args:
        name: The name of the value.
        columns: The other columns of the file.

    Example:
        >>> column_of("loss"), column_of("step"), column_of("step_")
        ('loss', 'step_', 'step__')
    """
    return f"{name}_" if name.rstrip("_") in columns else name


def name_of(column: str, columns: Collection[str] = COLUMNS) -> str:
    """Return the name of the value in a column: the inverse of `column_of`.

    Example:
        >>> name_of("loss"), name_of("step_"), name_of("loss_")
        ('loss', 'step', 'loss_')
    """
    is_renamed = column.endswith("_") and column.rstrip("_") in columns
    return column[:-1] if is_renamed else column


def columns_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of a line that are no values."""
    return HEAD if tuple(islice(line, len(HEAD))) == HEAD else COLUMNS


def values_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a line by name.

    Example:
        >>> values_of({"step": 1, "loss": 0.5, "step_": 0.1})
        {'loss': 0.5, 'step': 0.1}
    """
    columns = columns_of(line)
    return {name_of(n, columns): value for n, value in line.items() if n not in columns}


def record_of(line: Mapping[str, Any]) -> Record:
    """Return the record in a line."""
    at = Progress(
        line["step"],
        line["epoch"] - 1,
        *((line["batch"], line["examples"]) if columns_of(line) == HEAD else (0, 0)),
        line["seconds"],
    )
    return Record(line["kind"], at, values_of(line))


def plain(value: Any) -> Plain | None:
    """Convert a scalar of any library to a Python value; None if it is no number and no string.

    Example:
        >>> plain(np.float32(0.5)), plain("a text"), plain(np.zeros((8, 8)))
        (0.5, 'a text', None)
    """
    if type(value) in (bool, int, float, str):
        return value
    if not isinstance(value, (bool, int, float, str)):
        shape = getattr(value, "shape", None)
        if shape is None or len(shape) != 0:
            return None
    array = np.asarray(value)
    if array.dtype.kind == "b":
        return bool(array)
    if array.dtype.kind in "iu":
        return int(array)
    if array.dtype.kind in "fV":  # V: bfloat16 and the other narrow floats
        return float(array)
    return str(value) if array.dtype.kind == "U" else None


def loggable(values: Mapping[str, Any], who: str) -> dict[str, Plain | Image]:
    """Convert values to be logged: scalars and tensors to Python values; images stay as they are.

    Args:
        values: Name to a scalar of any library (including tensors that require gradients), a
            string or an `Image`.
        who: The name of the hook or function that logs the values, for the message.

    Raises:
        ConfigurationError: A value is neither a scalar nor a string nor an image.

    Example:
        >>> loggable({"rate": np.float32(0.5), "note": "halved"}, "halve")
        {'rate': 0.5, 'note': 'halved'}
    """
    found: dict[str, Plain | Image] = {}
    for name, value in values.items():
        if isinstance(value, Image):
            found[str(name)] = value
            continue
        scalar = plain(value) if isinstance(value, (*PLAIN, np.generic)) else _scalar(value)
        if scalar is None:
            shape = getattr(value, "shape", None)
            of = f"of shape {tuple(shape)}" if shape is not None else f"a {type(value).__name__}"
            raise ConfigurationError(
                f"{who} logs {str(name)!r}, {of}: only scalars, texts and images can be logged. "
                "Reduce it, for example with keras.ops.mean, make it a treadle.Image, or keep it "
                "out"
            )
        found[str(name)] = scalar
    return found


def _scalar(value: Any) -> Plain | None:
    """Convert a tensor without dimensions to a number; None for everything else."""
    if getattr(value, "shape", None) is None or len(value.shape) != 0:
        return None
    from keras import ops  # late: importing it chooses the backend

    return plain(ops.convert_to_numpy(value))


def short(value: Any, fixed: bool = False) -> str:
    """Format a value with about four significant digits.

    Args:
        value: Any value; if it is neither a number nor a string, its type and shape are returned.
        fixed: Keep trailing zeros, so that columns of numbers are aligned.

    Example:
        >>> short(0.512), short(0.512, fixed=True), short(12800), short(1.5e-7), short(1234.5)
        ('0.512', '0.5120', '12,800', '1.5e-07', '1,234')
    """
    number = plain(value)
    if number is None:
        shape = getattr(value, "shape", None)
        of = f" {'x'.join(map(str, shape))}" if shape is not None else ""
        return f"<{type(value).__name__}{of}>"
    if isinstance(number, (bool, str)):
        return str(number)
    if isinstance(number, int):
        return f"{number:,}"
    return _short_float(number, fixed)


def _short_float(number: float, fixed: bool) -> str:
    if not isfinite(number):
        return str(number)
    size = abs(number)
    if size != 0 and not 1e-4 <= size < 1e9:
        return f"{number:.3e}" if fixed else f"{number:.4g}"
    decimals = 3 - floor(log10(size)) if size != 0 else 3
    text = f"{number:,.{max(0, decimals)}f}"
    return text.rstrip("0").rstrip(".") if "." in text and not fixed else text


def line(values: Mapping[str, Any]) -> str:
    """Format named values as a line: `loss 0.512  samples 12,800`; strings follow a colon."""
    parts: list[str] = []
    for name, value in values.items():
        text = short(value)
        if not isinstance(value, str):
            parts.append(f"{name} {text}")
        else:
            parts.append(f"{name}:\n{text}" if "\n" in text else f"{name}: {text}")
    return "  ".join(parts)


def brief(seconds: float) -> str:
    """Format a number of seconds, with two decimals below ten seconds.

    Example:
        >>> brief(0.0416), brief(31.24)
        ('0.04', '31.2')
    """
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:,.1f}"


def clock(seconds: float) -> str:
    """Format a duration as `1:02:03` or `2:03`.

    Example:
        >>> clock(3723.4), clock(123)
        ('1:02:03', '2:03')
    """
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
