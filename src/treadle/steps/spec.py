"""Dry runs of a step, which find what it changes and returns for batches of one form."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..backends.base import active
from ..backends.step_context import Build, Effects, Limit
from ..checkpoint.batch_forms import described
from ..errors import ConfigurationError
from .building import build
from .results import step_outputs
from .state import State
from .task import adapter


@dataclass(frozen=True)
class StepSpec:
    """The findings of a step's dry run for batches of one form (structure, shapes and dtypes).

    Attributes:
        state: The variables reachable from the task, after the dry run.
        constants: The fingerprints of the task's Python values, which a program takes as constants.
        assigned: Paths of the variables that the step assigns, or that its optimizers update.
        written: The same, and those of the loss scale, which is updated around the step.
        applied: The optimizers that it applies, each with the number of its variables.
        metrics: Names of the metrics that it updates.
        returns: Names of the values that it returns.
        differentiates: Whether it computes gradients with Treadle's functions.
        branches: Whether it may assign other variables too, by the values of a batch.
        form: A description of the form of batch; None if a checkpoint cannot store it.
        limits: The ranges of the indices and labels that it uses.
        dry_values: The values that its runs returned, where the backend compares them.
        initial: The initial values of the variables that the dry run created, by path; empty for
            the first form, whose variables every run of the task creates.
    """

    state: State
    constants: dict[str, Any]
    assigned: Sequence[str]
    written: Sequence[str]
    applied: Sequence[tuple[Any, int]]
    metrics: Sequence[str]
    returns: Sequence[str]
    differentiates: bool
    branches: bool
    form: Any
    limits: Sequence[Limit]
    dry_values: Sequence[Mapping[str, Any]]
    initial: Mapping[str, Any]

    def is_current(self) -> bool:
        """Return whether the optimizers still have the variables that they had in the dry run.

        An optimizer is built again if a batch of a later form adds variables to it.
        """
        # A loop, since this runs in every step, and a generator makes a call for each optimizer.
        for optimizer, count in self.applied:  # noqa: SIM110
            if len(optimizer.variables) != count:
                return False
        return True

    def leave_out_own_changes(self) -> list[str]:
        """Leave out values used by name that changed while the step ran; return their paths."""
        found = self.state.leave_out(self.changed_constants())
        for path in found:
            del self.constants[path]
        return found

    def changed_constants(self) -> dict[str, tuple[Any, Any]]:
        """Return the old and the new fingerprints of Python values that changed, by path."""
        now = self.state.constants()
        return {p: (old, now[p]) for p, old in self.constants.items() if now[p] != old}


def build_step(
    task: Any,
    step: Callable[[Any], Any],
    batch: Any,
    name: str,
    *,
    preflight: bool = True,
    earlier: State | None = None,
    late: bool = False,
    effects: Effects | None = None,
) -> StepSpec:
    """Build the variables that a step needs for a form of batch, and find what it changes.

    Args:
        task: The task, whose attributes hold the state.
        step: A function of a batch.
        batch: A batch of the form, of NumPy arrays.
        name: The step's name, for messages.
        preflight: Whether to check the step; see `building.build`.
        earlier: The state that programs of other forms already use; its variables must stay.
        late: Whether a step of the task was built before.
        effects: Where to record what the step does besides computing and changing variables.

    Raises:
        ConfigurationError: The step trains in float16 in a way that loss scaling cannot handle.
        StateError, StepError: As for `building.build` and `results.step_outputs`.
    """
    adapter(task).build_for(batch)
    before = State.discover(task)
    constants = before.constants()
    returned: list[Mapping[str, Any]] = []

    def dry(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        values, weights = step_outputs(step(batch), name)
        returned.append(values)
        return values, weights

    settled = frozenset(map(id, earlier.variables.values()) if earlier is not None else ())
    state, found = _built(task, dry, batch, name, preflight, settled, effects)
    state.add_constants({}, constants)
    applied = {id(optimizer): optimizer for optimizer, _, _ in found.applied}
    assigned = _assigned(state, found, applied)
    scaled = [] if state.loss_scale is None else _loss_scale_paths(state, found, name)
    new = [path for path in state.variables if path not in before.variables] if late else []
    return StepSpec(
        state=state,
        constants=state.constants(),
        assigned=assigned,
        written=[*assigned, *scaled],
        applied=[(optimizer, len(optimizer.variables)) for optimizer in applied.values()],
        metrics=_updated(state, found),
        returns=tuple(returned[-1]),  # names may differ while variables are being created
        differentiates=found.differentiated,
        branches=found.branches,
        form=described(batch),
        limits=found.limits,
        dry_values=returned if active().opens_sizes else (),
        initial={path: active().read(state.variables[path]) for path in new},
    )


def _built(task: Any, function: Any, batch: Any, *settings: Any) -> tuple[State, Build]:
    """Return what `build` returns: for fewer rows of the batch where the backend says so."""
    try:
        return build(task, function, batch, *settings)
    except Exception as error:
        fewer = active().fewer_rows(batch, error)
        if fewer is None:
            raise
    # Now the error no longer keeps what the step has computed.
    return build(task, function, fewer, *settings)


def _assigned(state: State, found: Build, applied: Container[int]) -> list[str]:
    """Return the paths of the variables that a step assigns or that its optimizers update."""
    changed = set(found.written)
    for optimizer, variables, _ in found.applied:
        changed |= {id(v) for v in [*variables, *optimizer.variables]}
    inside = tuple(f"{p}/" for p, x in state.all_optimizers.items() if id(x) in applied)
    native_variable = active().is_native_variable  # changes of these cannot be tracked
    return [
        path
        for path, v in state.variables.items()
        if id(v) in changed or path.startswith(inside) or native_variable(v)
    ]


def _updated(state: State, found: Build) -> list[str]:
    """Return the names of the metrics that a step updates."""
    return [
        name
        for name, metric in state.metrics.items()
        if any(id(v) in found.written for v in metric.variables)
    ]


def _loss_scale_paths(state: State, found: Build, name: str) -> list[str]:
    """Return the paths of the loss scale's variables if the step's losses are scaled.

    Raises:
        ConfigurationError: Loss scaling cannot handle the step.
    """
    _reject_unscaled(state, bool(found.applied) and not found.differentiated, name)
    if not found.differentiated:
        return []
    return [state.path_of(v) for v in state.loss_scale.variables]  # type: ignore[union-attr]


def _reject_unscaled(state: State, unscaled: bool, name: str) -> None:
    """Reject what loss scaling cannot handle: weights in float16, and losses it cannot scale.

    Raises:
        ConfigurationError: A layer trains weights in float16, or a step that differentiates by
            itself trains a layer that computes in it.
    """
    for layer in state.layers:
        narrow = layer.compute_dtype == "float16"
        if narrow and any(v.trainable and v.dtype == "float16" for v in layer._trainable_variables):
            raise ConfigurationError(
                f"the layer {layer.name!r} keeps its weights in float16, where most updates are "
                "too small to change them: use mixed_float16, which keeps them in float32"
            )
        if narrow and unscaled:
            raise ConfigurationError(
                f"the layer {layer.name!r} computes in float16, where small gradients become zero "
                f"unless losses are scaled, and {name} differentiates without Treadle, which "
                "therefore cannot scale them: use treadle.gradients, or mixed_bfloat16"
            )
