"""What is known of a step that was visited again."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..arrays import write_arrays
from ..data.leaves import flattened, named
from .looking import Look
from .numbers import Array, Numbers, change, farthest
from .visiting import Moment


@dataclass(frozen=True, slots=True)
class Agreement:
    """How the steps that were run again compare with the log.

    Attributes:
        first: The first of these steps.
        last: The last, which is the one visited.
        compared: How many numbers of the log were compared.
        difference: The first that differs, in words; empty where all are equal bit for bit.
        reasons: Why that may be.
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
        """Say it in a sentence."""
        single = self.first == self.last
        steps = f"step {self.last}" if single else f"steps {self.first} to {self.last}"
        if not self.compared:
            return f"re-ran {steps}: the log holds no value of them to compare with"
        if not self.difference:
            return f"re-ran {steps}, compiled: equal to the log bit for bit"
        why = "; ".join(self.reasons)
        return f"re-ran {steps}: NOT equal to the log: {self.difference}. It may be that {why}"


@dataclass(frozen=True, slots=True)
class Variable:
    """What a step did to a variable.

    Attributes:
        path: Its path.
        value: As it was before the step.
        gradient: The last that `treadle.gradients` returned for it, or None.
        update: What the step added to it.
    """

    path: str
    value: Numbers
    gradient: Numbers | None
    update: Numbers


@dataclass(frozen=True)
class Replay:
    """A step of a past run, visited again; `print` shows it.

    Attributes:
        directory: Of the run.
        step: The step's number, from 1.
        epoch: Its epoch, from 1.
        batch_number: The number of its batch in the epoch, from 1.
        checkpoint: The step of the checkpoint that it was reached from.
        backend: Keras' backend.
        plan: How the step ran compiled.
        found_by: The condition that led to this step, and how; empty where it was given.
        agreement: How the steps run again compare with the log.
        values: What the step returned, compiled: equal to the log where `agreement.exact`.
        eager_values: What it returned when it ran eagerly.
        eager_distance: The largest relative difference between both, of any value, or of any
            variable after the step (relative to its largest number); infinite where one holds NaN
            and the other does not.
        eager_where: Where that is.
        batch: The batch, one entry for each of its arrays.
        rows: Which rows of the data set it is, where the source is arrays.
        layers: What layers returned, in order.
        kinds: The classes of layers, by path.
        variables: What became of each variable of a float type.
        origin: The first place that is not finite, in a sentence.
        notes: What could not be had, in sentences.
        arrays: All of it: `batch/…`, `activations/…`, `before/…`, `gradients/…`, `updates/…`.
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
        """Return all but the arrays, in JSON's types; NaN and infinity stay what they are."""
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
        """Write the arrays as `.npz`, for `numpy.load`, or `treadle.arrays.read_arrays`.

        Raises:
            OSError: The file cannot be written.
        """
        write_arrays(path, self.arrays)

    def __str__(self) -> str:
        """Return the tables as a text of 120 columns."""
        from .showing import text_of

        return text_of(self)


def batch_numbers(moment: Moment) -> tuple[Numbers, ...]:
    """Return what the batch of a step is, by the names that messages use."""
    return tuple(
        Numbers.of(named(path), leaf)
        for path, leaf in flattened(moment.window.batch(0))
        if leaf is not None
    )


def variables_of(moment: Moment, look: Look) -> tuple[Variable, ...]:
    """Return what became of each variable of a float type."""
    gradients = {path.partition("#")[0]: gradient for path, gradient in look.gradients.items()}
    return tuple(
        Variable(
            path,
            Numbers.of(path, before),
            Numbers.of(path, gradients[path]) if path in gradients else None,
            Numbers.of(path, change(before, look.after[path])),
        )
        for path, before in moment.state.items()
        if before.dtype.kind in "fV"  # V: bfloat16 and the other narrow floats
    )


def arrays_of(moment: Moment, look: Look) -> dict[str, Array]:
    """Return all arrays of a step by kind and path."""
    leaves = [x for x in flattened(moment.window.batch(0)) if x[1] is not None]
    batch = {"/".join(map(str, path)) or "0": leaf for path, leaf in leaves}
    updates = {p: change(x, look.after[p]) for p, x in moment.state.items() if x.dtype.kind in "fV"}
    kinds = {
        "batch": batch,
        "before": moment.state,
        "activations": look.activations,
        "gradients": look.gradients,
        "updates": updates,
    }
    found = {f"{kind}/{path}": x for kind, part in kinds.items() for path, x in part.items()}
    if moment.rows is not None:
        found["rows"] = moment.window.rows.indices[0]  # type: ignore[union-attr]
    return found


def eager_distance(
    compiled: Mapping[str, Array], after: Mapping[str, Array], look: Look
) -> tuple[float, str]:
    """Return how far the eager step is from the compiled one, and where it is farthest."""
    by_value = farthest(look.values, compiled, whole=False)
    by_variable = farthest(look.after, after, whole=True)
    return max(by_value, by_variable, key=lambda found: found[0])


def layer_of(path: str) -> str:
    """Return the path of a layer from that of one of its outputs.

    Example:
        >>> layer_of("model/layers/0#2"), layer_of("model/layers/1['mean']")
        ('model/layers/0', 'model/layers/1')
    """
    return path.partition("#")[0].partition("[")[0]
