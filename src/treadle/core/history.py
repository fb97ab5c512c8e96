"""The history of a run: every record, and the values of every step."""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import ConfigurationError, did_you_mean, require_package
from . import drawing, views
from .logs import Array, Record, StepLogs, column_of, plain, short

# Of a view in a notebook. `history.plot()` draws everything.
MOST_CHARTS, MOST_EPOCHS, MOST_COLUMNS = 6, 10, 20
SMOOTHED_OVER = 40  # the window of the moving mean is the number of steps divided by this

Line = tuple[Array, Array]


@dataclass(repr=False)
class History:
    """The history of a run: everything that it logged.

    Attributes:
        records: The records of epochs, validations and user logs, in order.

    Example:
        >>> from treadle.core.progress import Progress
        >>> history = History()
        >>> history.add(Record("epoch", Progress(step=2), {"loss": 0.5}))
        >>> history["loss"]
        [0.5]
    """

    records: list[Record] = field(default_factory=lambda: list[Record]())
    _chunks: list[StepLogs] = field(default_factory=lambda: list[StepLogs](), repr=False)

    def __repr__(self) -> str:
        """Return the numbers of steps and epochs, and all names."""
        names = list(dict.fromkeys([*self.step_names, *self.names()]))
        steps = sum(chunk.steps for chunk in self._chunks)
        epochs = len(self.epochs)
        counts = f"{steps:,} step{'s'[: steps != 1]}, {epochs:,} epoch{'s'[: epochs != 1]}"
        return f"History({counts}{': ' if names else ''}{', '.join(names)})"

    def _repr_html_(self) -> str:
        """Return the curves and the last epochs, which a notebook displays."""
        return views.block(repr(self), *html_parts(self))

    @property
    def history(self) -> dict[str, list[Any]]:
        """The values of the finished epochs by name, as in what Keras' `fit` returns."""
        epochs = self.epochs
        names = dict.fromkeys(name for values in epochs for name in values)
        return {name: [values[name] for values in epochs if name in values] for name in names}

    def add(self, record: Record) -> None:
        """Append a record."""
        self.records.append(record)

    def add_steps(self, logs: StepLogs) -> None:
        """Append the values of every step of a window."""
        self._chunks.append(logs)
        if len(self._chunks) >= 512:  # merged regularly, so that a long run is a few large arrays
            self._merge()

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values of `name` in all records, in order.

        Raises:
            KeyError: No record has this name; the message lists the names that exist.
        """
        found = [record.values[name] for record in self.records if name in record.values]
        if not found:
            raise KeyError(
                f"no record holds {name!r}; there are: {', '.join(self.names()) or 'none'}"
            )
        return found

    def names(self) -> list[str]:
        """Return the names in all records, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record.values))

    @property
    def epochs(self) -> list[dict[str, Any]]:
        """The values of each finished epoch, in order."""
        return [dict(record.values) for record in self.records if record.kind == "epoch"]

    @property
    def first_step(self) -> int | None:
        """The number of the first step whose values are stored, or None if there is none."""
        return self._chunks[0].first_step if self._chunks else None

    @property
    def step_names(self) -> list[str]:
        """The names of the values that the step returned."""
        return list(dict.fromkeys(name for chunk in self._chunks for name in chunk.values))

    @property
    def last(self) -> dict[str, Any]:
        """The latest number of every name in the records; strings and images are left out."""
        return {
            name: value
            for record in self.records
            for name, value in record.values.items()
            if not isinstance(value, str) and not getattr(value, "shape", ())
        }

    def steps(self, name: str) -> Array:
        """Return the value of `name` at every step: an array of shape (steps,).

        Raises:
            KeyError: The step did not return this name. Metrics have one value per epoch, which
                `history[name]` returns.
        """
        self._merge()
        if name not in self.step_names:
            known = ", ".join(self.step_names) or "nothing"
            message = f"the step returned no {name!r}; it returned: {known}"
            if name in self.names():
                message += (
                    f". {name!r} has one value for each epoch, validation or log, and none for "
                    f"single steps, like every metric: use history[{name!r}]"
                )
            raise KeyError(message)
        return self._chunks[0].values[name]

    def rows(self, after: int = 0) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield `(step, {name: value})` for every step after a step."""
        for chunk in self._chunks:
            if chunk.progress.step > after:
                yield from chunk.rows(after)

    def plot(self, *names: str) -> Any:
        """Plot the loss and the metrics over the steps, training next to validation.

        Values of every step are a faint line with a smoothed line on top, values of epochs and
        validations are points. A loss that spans more than two orders of magnitude has a
        logarithmic scale.

        Args:
            *names: What to plot; everything that epochs and validations recorded, if empty.
                `"loss"` includes `val_loss`.

        Returns:
            A Matplotlib figure, which a notebook displays; `figure.savefig("curves.png")` saves it.

        Raises:
            ConfigurationError: If Matplotlib is not installed, a name is unknown, or there is no
                number to plot.

        Example:
            >>> from treadle.core.progress import Progress
            >>> history = History()
            >>> history.add(Record("epoch", Progress(step=9), {"loss": 0.5, "val_loss": 0.6}))
            >>> figure = history.plot("loss")
            >>> len(figure.axes)
            1
        """
        require_package("matplotlib", "history.plot() needs Matplotlib, which")
        panels = panels_of(self, names)
        for name in names:
            if all(panel.name != name for panel in panels):
                known = [panel.name for panel in panels_of(self)]
                raise ConfigurationError(
                    f"history.plot({name!r}): the history has no number of this name."
                    f"{did_you_mean(name, known)}"
                )
        if not panels:
            raise ConfigurationError(
                "history.plot(): the history has no finite number of an epoch, a validation or a "
                "step: train first"
            )
        return drawing.draw_panels([panel for panel in panels if not names or panel.name in names])

    def to_pandas(self, rows: Literal["epochs", "steps", "records"] = "epochs") -> Any:
        """Return the history as a pandas data frame.

        Args:
            rows: `"epochs"`: a row for each finished epoch, by its number from 1. `"steps"`: a row
                for each step, by its number, with the values that the step returned. `"records"`: a
                row for each record, including validations and the logs of hooks, with its kind.
                A value named like one of the columns `kind`, `epoch`, `step` and `seconds` is in a
                column with an underscore: `step_`.

        Raises:
            ConfigurationError: If pandas is not installed, or `rows` is something else.
        """
        if rows not in ("epochs", "steps", "records"):
            raise ConfigurationError(f"rows must be 'epochs', 'steps' or 'records', not {rows!r}")
        require_package("pandas", "history.to_pandas() needs pandas, which")
        pandas: Any = importlib.import_module("pandas")
        if rows == "steps":
            values = {column_of(name): self.steps(name) for name in self.step_names}
            first, length = self.first_step or 1, len(next(iter(values.values()), ()))
            index = pandas.RangeIndex(first, first + length, name="step")
            return pandas.DataFrame(values, index=index)
        chosen = [record for record in self.records if rows == "records" or record.kind == "epoch"]
        table = [
            {
                **{"kind": record.kind, "epoch": record.progress.epoch + 1},
                **{"step": record.progress.step, "seconds": record.progress.seconds},
                **{column_of(name): value for name, value in record.values.items()},
            }
            for record in chosen
        ]
        columns = list(dict.fromkeys(name for row in table for name in row))
        found = pandas.DataFrame(table, columns=columns or ["kind", "epoch", "step", "seconds"])
        return found if rows == "records" else found.drop(columns="kind").set_index("epoch")

    def _merge(self) -> None:
        if len(self._chunks) < 2:
            return
        first, last = self._chunks[0], self._chunks[-1]

        names = dict.fromkeys(name for chunk in self._chunks for name in chunk.values)

        def joined(which: str, missing: float) -> dict[str, Array]:
            return {
                name: np.concatenate(
                    [
                        part[name]
                        if name in (part := getattr(chunk, which))
                        else np.full(chunk.steps, missing)
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


@dataclass
class Panel:
    """The data of one subplot.

    Attributes:
        name: The name of the value.
        noisy: The steps and the value at each; empty if steps do not return it.
        points: For each label, the value of each epoch or validation by step.
    """

    name: str
    noisy: Line
    points: dict[str, dict[int, float]] = field(default_factory=lambda: {})

    @property
    def smooth(self) -> Line:
        """The moving mean of the values returned by steps."""
        steps, values = self.noisy
        width = max(1, len(values) // SMOOTHED_OVER)
        if width == 1:
            return steps, values
        sums = np.cumsum(np.concatenate([[0.0], values]))
        middles = steps[width // 2 :][: len(values) - width + 1]
        return middles, (sums[width:] - sums[:-width]) / width

    def shown(self) -> Array:
        """Return the values that determine the axis limits, without outliers of single steps."""
        points = [value for line in self.points.values() for value in line.values()]
        parts = [self.smooth[1], np.asarray(points, float)]
        if len(self.noisy[1]):
            parts.append(np.percentile(self.noisy[1], [0.5, 99.5]))
        values = np.concatenate(parts)
        return values[np.isfinite(values)]


def panels_of(history: History, names: Sequence[str] = ()) -> list[Panel]:
    """Group the values of a history into subplots; the loss comes first.

    Args:
        history: The history.
        names: Values of steps to include, although no epoch or validation recorded them.
    """
    steps = {name: history.steps(name) for name in history.step_names}
    first_step = history.first_step or 1
    records = [record for record in history.records if record.kind in ("epoch", "validation")]
    recorded = list(dict.fromkeys(name for record in records for name in record.values))
    training = [name for name in recorded if not name.startswith("val_")]
    by_epoch = any(record.kind == "epoch" for record in records)
    found: dict[str, Panel] = {}
    for name in ["loss", *recorded, *(name for name in names if name in steps)]:
        base, _ = split_name(name, training)
        if base not in found:
            found[base] = Panel(base, _finite(steps.get(base, np.empty(0)), first_step))
    for record in records:
        for name, value in record.values.items():
            base, label = split_name(name, training)
            number = plain(value)
            # Within an epoch, the record of a validation has the means of an unfinished epoch.
            partial = label == "training" and by_epoch and record.kind == "validation"
            if not partial and isinstance(number, (int, float)):
                found[base].points.setdefault(label, {})[record.progress.step] = float(number)
    for panel in found.values():
        if len(panel.noisy[0]):
            panel.points.pop("training", None)  # the smoothed line shows the same
    return [panel for panel in found.values() if len(panel.shown())]


def split_name(name: str, training: Sequence[str]) -> tuple[str, str]:
    """Split a name into metric and data set: `val_extra_loss` is the loss on `extra`."""
    if not name.startswith("val_"):
        return name, "training"
    rest = name.removeprefix("val_")
    if rest not in training:
        for base in sorted(training, key=len, reverse=True):
            if rest.endswith(f"_{base}"):
                return base, f"validation, {rest.removesuffix(f'_{base}')}"
    return rest, "validation"


def _finite(values: Array, first_step: int) -> Line:
    """Return the steps with a finite value, and the values."""
    values = np.asarray(values, float)
    steps = first_step + np.arange(len(values))
    finite = np.isfinite(values)
    return steps[finite], values[finite]


def html_parts(history: History) -> list[str]:
    """Return a history as HTML for a notebook: curves, and a table of the last epochs."""
    panels = panels_of(history)
    epochs = [record for record in history.records if record.kind == "epoch"][-MOST_EPOCHS:]
    charts: list[str] = []
    for panel in panels[:MOST_CHARTS]:
        lines = [views.Curve("", *panel.noisy, faint=True), views.Curve("training", *panel.smooth)]
        lines = lines if len(panel.noisy[0]) else []
        lines += [
            views.Curve(label, np.array(list(points)), np.array(list(points.values())))
            for label, points in panel.points.items()
        ]
        charts.append(views.chart(panel.name, lines, "step"))
    names = list(dict.fromkeys(name for epoch in epochs for name in epoch.values))[:MOST_COLUMNS]
    rows = [
        [epoch.progress.epoch + 1, *(short(epoch.values.get(name, "")) for name in names)]
        for epoch in epochs
    ]
    found = [views.curves(charts), views.table(["epoch", *names], rows)]
    if len(panels) > MOST_CHARTS:
        found.append(views.paragraph(f"{len(panels) - MOST_CHARTS} more in history.plot()"))
    return found
