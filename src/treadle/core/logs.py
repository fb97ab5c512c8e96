"""What steps returned: every step's values, their weighted means, and the history of a run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import ConfigurationError
from .images import Image
from .progress import Progress

Plain = bool | int | float | str
PLAIN = (bool, int, float, str)
Array = np.ndarray[Any, np.dtype[Any]]

# What steps log beside their own values where their losses are scaled: by what, and 1.0 where the
# step was undone.
LOSS_SCALE, UNDONE = "loss_scale", "undone"


@dataclass(frozen=True, slots=True)
class StepLogs:
    """What the steps of one window returned, fetched from the device in one go.

    Attributes:
        first_step: The number of the window's first step; the first step of a run is step 1.
        values: Per name an array of shape (steps,).
        weights: Per name an array of shape (steps,): by what each value counts in a mean.
        examples: Examples in each batch of the window.
        progress: Where the run stands after the window.
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

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield `(step, {name: value})` for every step of the window."""
        columns = {name: array.tolist() for name, array in self.values.items()}
        for offset in range(self.steps):
            yield self.first_step + offset, {n: column[offset] for n, column in columns.items()}


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the log: what is known at one moment of the run.

    Attributes:
        kind: `"epoch"`, `"validation"` or `"log"` (the user's own).
        progress: Where the run stood.
        values: Name to number, text or image.
    """

    kind: str
    progress: Progress
    values: Mapping[str, Any]


class Logs(dict[str, float]):
    """What a user's own `for` gets: means of what the step returned since it last looked.

    A name is NaN where no step since then counts, as where `NonFinite("skip")` undid them all.
    Metrics are there too; they are computed when asked for, since that waits for the device.

    Attributes:
        progress: Where the run stands.
        step: The step that the state is exactly at.

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
        """The step that the state is exactly at."""
        return self.progress.step

    def __missing__(self, name: str) -> float:
        """Compute the metrics when one of them is asked for."""
        for key, value in self._metrics().items():
            self.setdefault(key, value)
        if name not in self:
            raise KeyError(f"no {name!r} in the logs; there are: {', '.join(self) or 'none'}")
        return self[name]


class Means:
    """Running means of a step's values, weighted by examples unless the step says otherwise.

    Sums are kept in float64 in the order of the steps, so that a mean does not depend on how many
    steps ran in one compiled call.

    Example:
        >>> means = Means()
        >>> means.add({"loss": np.array([1.0, 4.0])}, {"loss": np.array([2.0, 1.0])})
        >>> means.result()
        {'loss': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, values: Mapping[str, Array], weights: Mapping[str, Array]) -> None:
        """Add the values of some steps, each array of shape (steps,)."""
        for name, array in values.items():
            total, weight = self._sums.get(name, (0.0, 0.0))
            for value, by in zip(array.tolist(), weights[name].tolist(), strict=True):
                if by:  # what counts nothing may be NaN
                    total += value * by
                    weight += by
            self._sums[name] = total, weight

    def state(self) -> dict[str, list[float]]:
        """Return the sums, for another process to go on with."""
        return {name: [total, weight] for name, (total, weight) in self._sums.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Take back what `state` returned."""
        self._sums = {name: (total, weight) for name, (total, weight) in state.items()}

    def result(self, empty: float | None = None) -> dict[str, float]:
        """Return the means so far.

        Args:
            empty: The mean of a name whose weights are all zero; None leaves the name out.
        """
        means = {
            n: total / weight if weight else empty for n, (total, weight) in self._sums.items()
        }
        return {name: mean for name, mean in means.items() if mean is not None}


@dataclass(repr=False)
class History:
    """All that a run has logged.

    Attributes:
        records: The records of epochs, validations and user logs, in order.

    Example:
        >>> history = History()
        >>> history.add(Record("epoch", Progress(step=2), {"loss": 0.5}))
        >>> history["loss"]
        [0.5]
    """

    records: list[Record] = field(default_factory=lambda: list[Record]())
    _chunks: list[StepLogs] = field(default_factory=lambda: list[StepLogs](), repr=False)

    def __repr__(self) -> str:
        """Say how much is here, and under which names."""
        names = list(dict.fromkeys([*self.step_names, *self.names()]))
        steps = sum(chunk.steps for chunk in self._chunks)
        epochs = len(self.epochs)
        counts = f"{steps:,} step{'s'[: steps != 1]}, {epochs:,} epoch{'s'[: epochs != 1]}"
        return f"History({counts}{': ' if names else ''}{', '.join(names)})"

    def add(self, record: Record) -> None:
        """Append a record."""
        self.records.append(record)

    def add_steps(self, logs: StepLogs) -> None:
        """Append every step's values of a window."""
        self._chunks.append(logs)
        if len(self._chunks) >= 512:  # merged now and then: a long run is some arrays, not a list
            self._merge()

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values that records hold under `name`, in order.

        Raises:
            KeyError: No record holds this name; the message lists those that exist.
        """
        found = [record.values[name] for record in self.records if name in record.values]
        if not found:
            raise KeyError(
                f"no record holds {name!r}; there are: {', '.join(self.names()) or 'none'}"
            )
        return found

    def names(self) -> list[str]:
        """Return every name that some record holds, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record.values))

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The values of each finished epoch, in order."""
        return [dict(record.values) for record in self.records if record.kind == "epoch"]

    @property
    def first_step(self) -> int | None:
        """The number of the first step whose values are here, or None before one."""
        return self._chunks[0].first_step if self._chunks else None

    @property
    def step_names(self) -> list[str]:
        """The names of what the step returned."""
        return list(dict.fromkeys(name for chunk in self._chunks for name in chunk.values))

    @property
    def last(self) -> dict[str, Any]:
        """The newest number under every name that was ever recorded; no texts, no images."""
        return {
            name: value
            for record in self.records
            for name, value in record.values.items()
            if not isinstance(value, str) and not getattr(value, "shape", ())
        }

    def steps(self, name: str) -> Array:
        """Return every step's value of what it returned as `name`: an array of shape (steps,).

        Raises:
            KeyError: The step returned nothing of this name. Metrics have one value per epoch,
                which `history[name]` returns.
        """
        self._merge()
        if name not in self.step_names:
            known = ", ".join(self.step_names) or "nothing"
            message = f"the step returned no {name!r}; it returned: {known}"
            if name in self.names():
                message += (
                    f". {name!r} has one value for each epoch, validation or log, and none for a "
                    f"single step, as every metric: use history[{name!r}]"
                )
            raise KeyError(message)
        return self._chunks[0].values[name]

    def _merge(self) -> None:
        if len(self._chunks) < 2:
            return
        first, last = self._chunks[0], self._chunks[-1]

        names = dict.fromkeys(name for chunk in self._chunks for name in chunk.values)

        def joined(which: str, missing: float) -> dict[str, Array]:
            return {
                name: np.concatenate(
                    [
                        getattr(chunk, which).get(name, np.full(chunk.steps, missing))
                        for chunk in self._chunks
                    ]
                )
                for name in names
            }

        merged = StepLogs(
            first.first_step,
            joined("values", np.nan),
            joined("weights", 0.0),
            last.examples,
            last.progress,
        )
        self._chunks[:] = [merged]


def plain(value: Any) -> Plain | None:
    """Return a scalar of any library as Python's own; None for what is no number and no text.

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
    """Return what is to be logged as plain Python values, tensors as numbers, pictures as they are.

    Args:
        values: Name to a scalar of any library (a tensor, also one that requires a gradient), a
            text or an `Image`.
        who: Who logs it, for the message.

    Raises:
        ConfigurationError: A value is neither a scalar nor a text nor an image.

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
    """Return a tensor without dimensions as a number, and None for everything else."""
    if getattr(value, "shape", None) is None or len(value.shape) != 0:
        return None
    from keras import ops  # late: importing it chooses the backend

    return plain(ops.convert_to_numpy(value))
