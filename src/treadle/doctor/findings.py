"""The report on a replayed step, and the origin of its first non-finite number."""

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from ..checkpoint.arrays import write_arrays
from ..core.logs import short
from ..core.structures import with_paths
from ..core.terminal import clean, printable
from ..data.leaves import named
from .inspection import StepInspection
from .numbers import Array, Numbers, shape_of, short_list
from .visiting import StepInputs

WIDTH = 120
BAD = "bold red"
_IN_NOTEBOOK = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'


@dataclass(frozen=True, slots=True)
class Agreement:
    """The comparison of the replayed steps with the log.

    Attributes:
        first: The first of these steps.
        last: The last one, which is the inspected step.
        compared: How many numbers of the log were compared.
        difference: The first difference, as a sentence; empty if all are equal bit for bit.
        reasons: Possible causes of the difference.
    """

    first: int
    last: int
    compared: int
    difference: str
    reasons: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every number is equal to the log bit for bit."""
        return self.compared > 0 and not self.difference

    def __str__(self) -> str:
        """Describe the comparison in a sentence."""
        single = self.first == self.last
        steps = f"step {self.last}" if single else f"steps {self.first} to {self.last}"
        if not self.compared:
            return f"re-ran {steps}: the log has no values of them to compare with"
        if not self.difference:
            return f"re-ran {steps}, compiled: equal to the log bit for bit"
        why = "; ".join(self.reasons)
        return f"re-ran {steps}: NOT equal to the log: {self.difference}. Possible causes: {why}"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable's value, gradient and update in a step.

    Attributes:
        path: The variable's path.
        value: Its value before the step.
        gradient: The last gradient that `treadle.gradients` returned for it, or None.
        update: The change that the step made.
    """

    path: str
    value: Numbers
    gradient: Numbers | None
    update: Numbers


@dataclass(frozen=True)
class Replay:
    """The report on a replayed step of a past run; print it to see its tables.

    Attributes:
        directory: The run directory.
        step: The step's number, from 1.
        epoch: Its epoch, from 1.
        batch_number: The number of its batch in the epoch, from 1.
        checkpoint: The step of the checkpoint that the replay started from.
        backend: The Keras backend.
        plan: How the compiled step was executed.
        found_by: The condition that selected this step, as a sentence; empty if the step was given.
        agreement: The comparison of the replayed steps with the log.
        values: The values that the compiled step returned; equal to the log if `agreement.exact`.
        eager_values: The values that the eager step returned.
        eager_distance: The largest relative difference between the compiled and the eager step, of
            any returned value, or of any variable after the step (relative to its largest entry).
            Infinite if a number is NaN in only one of them.
        eager_where: The value or variable with that difference.
        batch: Statistics of the batch, one entry per array.
        rows: The batch's rows in the data set; None if the source does not read arrays.
        layers: Statistics of the layers' outputs, in the order of the calls.
        kinds: The classes of layers, by path.
        variables: Value, gradient and update of each variable of a float dtype.
        origin: The origin of the first non-finite number, as a sentence.
        notes: Sentences about information that is missing.
        arrays: All arrays: `batch/…`, `activations/…`, `before/…`, `gradients/…`, `updates/…`.

    Example:
        >>> import keras, numpy as np, treadle
        >>> def line():
        ...     treadle.setup(seed=0)
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     return treadle.Supervised(model, "mse", "sgd")
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> keras.backend.clear_session()
        >>> with treadle.Loop(line(), "runs/plane", console=False) as loop:
        ...     history = loop.fit(data, epochs=4)
        >>> keras.backend.clear_session()
        >>> found = treadle.doctor.replay(line(), data, "runs/plane", step=5)
        >>> found.epoch, len(found.rows), float(history.steps("loss")[4] - found.values["loss"])
        (3, 4, 0.0)
        >>> found.arrays["gradients/model/layers/0/kernel"].shape
        (2, 1)
    """

    directory: str
    step: int
    epoch: int
    batch_number: int
    checkpoint: int
    backend: str
    plan: str
    found_by: str
    agreement: Agreement
    values: Mapping[str, float]
    eager_values: Mapping[str, float]
    eager_distance: float
    eager_where: str
    batch: tuple[Numbers, ...]
    rows: tuple[int, ...] | None
    layers: tuple[Numbers, ...]
    kinds: Mapping[str, str]
    variables: tuple[Variable, ...]
    origin: str
    notes: tuple[str, ...]
    arrays: Mapping[str, Array] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return all attributes except the arrays in JSON's types; NaN and infinity stay floats."""
        found = {k: v for k, v in vars(self).items() if k not in ("arrays", "kinds")}
        agreement = asdict(self.agreement) | {"exact": self.agreement.exact}
        return found | {
            "agreement": agreement,
            "values": dict(self.values),
            "eager_values": dict(self.eager_values),
            "batch": [asdict(numbers) for numbers in self.batch],
            "layers": [
                {"class": self.kinds.get(layer_of(x.path)), **asdict(x)} for x in self.layers
            ],
            "variables": [asdict(variable) for variable in self.variables],
        }

    def save(self, path: str | Path) -> None:
        """Save the arrays as `.safetensors`, which `treadle.checkpoint.arrays.read_arrays` reads.

        Raises:
            StateError: The name of the file does not end in `.safetensors`.
            DirectoryError: The file cannot be written.
        """
        write_arrays(path, self.arrays)

    def __str__(self) -> str:
        """Return the tables as text, 120 columns wide."""
        console = Console(file=io.StringIO(), width=WIDTH, no_color=True, record=True)
        console.print(*parts(self), sep="\n")
        return console.export_text().rstrip("\n")

    def _repr_html_(self) -> str:
        """Return the tables, which a notebook displays."""
        console = Console(file=io.StringIO(), width=WIDTH, record=True, force_jupyter=False)
        console.print(*parts(self), sep="\n")
        return console.export_html(code_format=_IN_NOTEBOOK, inline_styles=True)


def batch_numbers(inputs: StepInputs) -> tuple[Numbers, ...]:
    """Return statistics of each array of a step's batch, with the names that messages use."""
    return tuple(Numbers.of(named(path), leaf) for path, leaf in with_paths(inputs.window.batch(0)))


def variables_of(inputs: StepInputs, inspection: StepInspection) -> tuple[Variable, ...]:
    """Return value, gradient and update of each variable of a float dtype."""
    gradients = {path.partition("#")[0]: x for path, x in inspection.gradients.items()}
    return tuple(
        Variable(
            path,
            Numbers.of(path, inputs.state[path]),
            Numbers.of(path, gradients[path]) if path in gradients else None,
            Numbers.of(path, update),
        )
        for path, update in inspection.updates.items()
    )


def arrays_of(inputs: StepInputs, inspection: StepInspection) -> dict[str, Array]:
    """Return all arrays of a step by kind and path."""
    leaves = with_paths(inputs.window.batch(0))
    kinds = {
        "batch": {"/".join(map(str, path)) or "0": leaf for path, leaf in leaves},
        "before": inputs.state,
        "activations": inspection.activations,
        "gradients": inspection.gradients,
        "updates": inspection.updates,
    }
    found = {f"{kind}/{path}": x for kind, part in kinds.items() for path, x in part.items()}
    if inputs.window.rows is not None:
        found["rows"] = inputs.window.rows.indices[0]
    return found


def layer_of(path: str) -> str:
    """Return the path of a layer from that of one of its outputs.

    Example:
        >>> layer_of("model/layers/0#2"), layer_of("model/layers/1['mean']")
        ('model/layers/0', 'model/layers/1')
    """
    return path.partition("#")[0].partition("[")[0]


def origin_of(
    inputs: StepInputs,
    inspection: StepInspection,
    batch: Sequence[Numbers],
    layers: Sequence[Numbers],
    variables: Sequence[Variable],
) -> str:
    """Describe the first non-finite number, in the order in which a step computes its values.

    Only `variables` that are meant to be finite are given.
    """
    found, step = "first non-finite value:", inputs.step
    if bad := _first([v.value for v in variables]):
        found += f" {_count(bad)}, before step {step} began"
        if inputs.changed is not None and bad.path in inputs.changed:
            return (
                f"{found}, but not when step {step - 1} ended: a hook or the script set it between "
                "the two steps"
            )
        return (
            f"{found}: an earlier step set it. --bisect 'not isfinite({bad.path})' finds that step"
        )
    if bad := _first(batch):
        return f"{found} {_count(bad)} of the batch{_rows(bad, inputs)}"
    if bad := _first(layers):
        kind = inspection.layers.get(layer_of(bad.path), "a layer")
        return (
            f"{found} {_count(bad, 'the output of ')} ({kind}){_rows(bad, inputs)}, while its "
            "variables, the batch and the layers before it are finite"
        )
    if bad := _first([Numbers.of(name, x) for name, x in inspection.values.items()]):
        return (
            f"{found} {bad.path}, which train_step returned, while all activations are finite: "
            "check how it is computed from them"
        )
    if bad := _first([v.gradient for v in variables]):
        return (
            f"{found} {_count(bad, 'the gradient of ')}, while the loss is finite: look for a "
            "root, a norm or a power at zero, or a where whose other branch is not finite"
        )
    if bad := _first([v.update for v in variables]):
        return (
            f"{found} {_count(bad, 'the update of ')}, while its gradient is finite: check the "
            "optimizer, and the step's other assignments"
        )
    return "all values are finite: batch, activations, returned values, gradients, updates"


def _first(arrays: Sequence[Numbers | None]) -> Numbers | None:
    """Return the first array with non-finite entries, or None."""
    return next((x for x in arrays if x is not None and x.not_finite), None)


def _count(bad: Numbers, what: str = "") -> str:
    return f"{bad.not_finite} of {prod(bad.shape)} numbers of {what}{bad.path}"


def _rows(bad: Numbers, inputs: StepInputs) -> str:
    """Return the rows of an array that has one for each example, also as rows of the data set."""
    if not bad.rows or bad.shape[:1] != (inputs.window.examples,):
        return ""
    found = f", row{'s' if len(bad.rows) > 1 else ''} {short_list(bad.rows)}"
    of_data = inputs.rows
    if of_data is None:
        return found
    return f"{found} (of the data set: {short_list(tuple(of_data[row] for row in bad.rows))})"


def show(found: Replay) -> None:
    """Print the tables, in color on a terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(*parts(found), sep="\n")


def parts(found: Replay) -> Iterator[RenderableType]:
    """Yield the parts of the printed report, in order."""
    if found.found_by:
        yield _plain(found.found_by)
    yield _plain(
        f"step {found.step} (epoch {found.epoch}, batch {found.batch_number}) of "
        f"{found.directory}, from the checkpoint of step {found.checkpoint}, on {found.backend}"
    )
    yield _plain(str(found.agreement), "" if not found.agreement.difference else BAD)
    values = "  ".join(f"{name} {short(value)}" for name, value in found.values.items())
    yield _plain(f"compiled: {values}" if values else "compiled: the step returned no values")
    yield _plain(f"eagerly: {_distance(found)}")
    for note in found.notes:
        yield _plain(f"note: {note}")
    tables = [_batch(found), _layers(found) if found.layers else None, _variables(found)]
    for table in tables:
        if table is not None:
            yield _plain("")
            yield table
    yield _plain("")
    yield _plain(found.origin, "" if found.origin.startswith("all") else BAD)


def _distance(found: Replay) -> str:
    if found.eager_distance == 0:
        return "the same bits"
    where = found.eager_where
    if found.eager_distance == float("inf"):
        return (
            f"{where} differs: a number is not finite in only one of the two, or is zero when "
            "compiled and nonzero when eager"
        )
    return f"equal within {found.eager_distance:.1e} (largest difference: {where})"


def _batch(found: Replay) -> Table:
    table = _table("batch", "shape", "dtype", "min", "max", "mean", "not finite", "rows")
    for x in found.batch:
        ranges = (_number(x.least), _number(x.most), _number(x.mean))
        _row(
            table, x.not_finite, x.path, shape_of(x), x.dtype, *ranges, _bad(x), short_list(x.rows)
        )
    if found.rows is not None:
        table.caption = f"rows of the data set: {short_list(found.rows)}"
        table.caption_justify = "left"
    return table


def _layers(found: Replay) -> Table:
    table = _table("layer", "class", "shape", "activation", "not finite", "rows")
    for x in found.layers:
        kind, norm = found.kinds.get(layer_of(x.path), ""), _norm(x)
        rows = short_list(x.rows)
        _row(table, x.not_finite, x.path, kind, shape_of(x), norm, _bad(x), rows)
    return table


def _variables(found: Replay) -> Table:
    table = _table("variable", "shape", "value", "gradient", "update", "not finite")
    for v in found.variables:
        three = {"value": v.value, "gradient": v.gradient, "update": v.update}
        norms = [_norm(x) if x is not None else "" for x in three.values()]
        bad = [f"{name} {x.not_finite}" for name, x in three.items() if x and x.not_finite]
        _row(table, len(bad), v.path, shape_of(v.value), *norms, ", ".join(bad))
    return table


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for column in columns:
        left = column in ("class", "shape", "dtype", "rows") or (
            column == "not finite" and first == "variable"
        )
        # On a narrow terminal, paths are broken, and numbers are not.
        whole = column not in ("class", "rows", "not finite")
        justify = "left" if left else "right"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=whole)
    return table


def _row(table: Table, bad: int, *cells: str) -> None:
    table.add_row(*(Text(clean(cell)) for cell in cells), style=BAD if bad else "")


def _plain(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)


def _bad(x: Numbers) -> str:
    return str(x.not_finite) if x.not_finite else ""


def _norm(x: Numbers) -> str:
    """Format the norm; a dash if there are no finite numbers."""
    return short(x.norm, fixed=True) if x.least is not None else "–"


def _number(value: float | None) -> str:
    return "" if value is None else short(value, fixed=True)
