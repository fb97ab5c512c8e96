"""The dry run of a step: it runs until it creates no variable, and mistakes are found."""

import pickle
import random
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from operator import is_
from typing import Any

import keras
import numpy as np

from ..backends.base import active
from ..backends.ranges import raise_used, watched
from ..backends.step_context import Build, Effects, Ranges, StepContext
from ..backends.types import Variable
from ..core.keras_internals import multi_optimizers
from ..core.user_code import attributes_of
from ..errors import ConfigurationError, StateError, StepError
from .derived import deriving, exclude
from .discovery import refuse_scaling
from .keras_control_flow import carrying
from .optimizers import build_optimizers
from .state import State
from .task import adapter

MAX_BUILD_RUNS = 8
Held = Mapping[tuple[int, str], tuple[Any, list[Any]]]  # see `State.held_arrays`


def build(
    task: Any,
    function: Callable[[Any], Any],
    batch: Any,
    name: str,
    check: bool = True,
    settled: frozenset[int] = frozenset(),
    effects: Effects | None = None,
) -> tuple[State, Build]:
    """Run a step abstractly until it creates no new variables; its updates are discarded.

    Optimizers are built with the variables passed to their `apply`. The returned state contains
    all variables that the step reads or changes.

    Args:
        task: The task, whose attributes hold the state.
        function: The step, a function of a batch.
        batch: A real batch of NumPy arrays.
        name: The step's name, for messages.
        check: Reject variables and optimizers that are not reachable from the task's attributes,
            random numbers that are not drawn by `keras.random`, and indices and labels that are out
            of range.
        settled: Ids of the variables that the step already uses for batches of another form.
        effects: Where to record what the step does besides computing and changing variables.

    Returns:
        The state, and what the last run recorded.

    Raises:
        DataError: An index or a label of the batch is out of range.
        StateError: The step uses a variable or an optimizer that is not reachable from the task's
            attributes, or creates new variables in each run.
    """
    enters_branches = False
    for run in range(MAX_BUILD_RUNS):
        state = State.discover(task)
        if run == 0:
            _reject_distribution(state, built=False)
        drawn, held = _random_states(task), state.held_arrays()
        unbuilt = {id(layer) for layer in state.layers if not layer.built}
        found = Build(
            settled=settled, effects=effects or Effects(name), enters_branches=enters_branches
        )
        try:
            _run_abstractly(function, batch, state, found, name, check)
        except Exception:
            # A native step may fail because of variables that it has just created. Now that they
            # exist, it is run again.
            if not _differ(state, State.discover(task)):
                raise
            continue
        after = State.discover(task)
        if check:
            _check_optimizers(after, found, name)
        if not adapter(task).scales_losses:
            _refuse_scaling(after, found)
        applied = [(optimizer, variables) for optimizer, variables, _ in found.applied]
        if build_optimizers(task, applied, name) or _differ(state, after):
            continue
        if found.skips_branches and not enters_branches and _has_unbuilt(after, name):
            enters_branches = True
            continue
        _check_gradients(after, found, name)
        if found.applied:
            _reject_distribution(after, built=True)
        if check:
            _check_variables(after, found, name)
            _check_random(drawn, _random_states(task), name)
        if _exclude_replaced(held, after.held_arrays(), unbuilt):
            after = State.discover(task)
        return after, found
    raise StateError(
        f"{name} makes new variables each time it is called: make layers, metrics and optimizers "
        "in __init__ and keep them as attributes"
    )


def _run_abstractly(
    function: Callable[[Any], Any], batch: Any, state: State, found: Build, name: str, check: bool
) -> None:
    """Run a step once, and add what it does to `found`."""
    ranges = Ranges(state.name_of, raises=check)
    step = StepContext(
        build=found,
        layers=state.layers,
        variables=state.variables,
        path_of=state.path_of,
        ranges=ranges,
    )

    function = deriving(function, state.derived, ())

    def run(batch: Any) -> Any:
        with watched(ranges), carrying():
            return function(batch)

    with _recorded_apply(found):
        scope = active().abstract_run(run, batch, step)
    raise_used(ranges, f"{name}, first batch")
    found.limits = tuple(ranges.limits)
    found.read |= scope.foreign
    found.written |= scope.assigned


def _reject_distribution(state: State, built: bool) -> None:
    """Reject variables, or a context, that are distributed over devices as no loop can train.

    Raises:
        ConfigurationError: The backend found such a distribution.
    """
    seeds = {id(v) for v in state.seeds}  # Keras may have created its own at any time
    variables = [v for v in state.variables.values() if id(v) not in seeds]
    found = active().refused_distribution(variables, built)
    if found is not None:
        what = "training" if found.variable is None else state.path_of(found.variable)
        raise ConfigurationError(f"{what} {found.fault}: {found.remedy}")


def _differ(before: State, after: State) -> bool:
    """Return whether a run of the step has created variables or layers."""
    return [id(v) for v in before.variables.values()] != [
        id(v) for v in after.variables.values()
    ] or len(before.layers) != len(after.layers)


def _has_unbuilt(state: State, name: str) -> bool:
    """Return whether a training step has left an object of Keras without its variables."""
    metrics = map(_is_built, state.metrics.values())
    built = (x.built for x in (*state.layers, *state.all_optimizers.values()))
    return name == "train_step" and not all([*metrics, *built])


def _is_built(metric: Any) -> bool:
    """Return whether a metric has its variables, which some create when they are first updated."""
    late = (keras.metrics.AUC, keras.metrics.FBetaScore, keras.metrics.R2Score)
    # R2Score creates one of them at once.
    return bool(getattr(metric, "built", not isinstance(metric, late) or len(metric.variables) > 1))


def _exclude_replaced(before: Held, after: Held, unbuilt: set[int]) -> bool:
    """Exclude arrays of layers that a run of the step has replaced from the constants.

    Some layers store outputs as attributes, such as attention scores, which no step reads.

    Returns:
        Whether there are such arrays.
    """
    found = False
    for (key, name), (holder, now) in after.items():
        _, old = before.get((key, name), (None, []))
        same = len(old) == len(now) and all(map(is_, old, now))
        if not same and (key not in unbuilt or (key, name) in before):
            exclude(holder, name)
            found = True
    return found


def _refuse_scaling(state: State, found: Build) -> None:
    """Reject optimizers that the step applies and that scale their loss themselves."""
    paths = {id(optimizer): path for path, optimizer in state.all_optimizers.items()}
    for optimizer, _, _ in found.applied:
        refuse_scaling(paths.get(id(optimizer)) or str(optimizer.name), optimizer)


def _check_optimizers(state: State, found: Build, name: str) -> None:
    reached = {id(optimizer) for optimizer in state.all_optimizers.values()}
    for optimizer, _, _ in found.applied:
        if id(optimizer) not in reached:
            used = state.name_in_steps(lambda thing, wanted=optimizer: thing is wanted)
            raise StateError(
                f"{name} applies the optimizer {optimizer.name!r} ({type(optimizer).__name__}), "
                "which no attribute of the task reaches, so it would be neither saved nor compiled "
                f"in: keep {used or 'it'} as an attribute, or pass it to "
                f"treadle.task(…, {used or 'optimizer'}={used or 'optimizer'})"
            )


def _check_variables(state: State, found: Build, name: str) -> None:
    state.refuse_hidden(
        [v for v in {**found.read, **found.written}.values() if v not in state], name
    )


def _check_gradients(state: State, found: Build, name: str) -> None:
    """Reject a call of `apply` with fewer or more gradients than variables.

    Keras would pair them without an error until one of the two lists ends.
    """
    for optimizer, variables, gradients in found.applied:
        if variables and gradients != len(variables):
            names = {id(optimizer): path for path, optimizer in state.all_optimizers.items()}
            paths = ", ".join(state.path_of(v) for v in variables[gradients:][:5])
            raise StepError(
                f"{name} applies {gradients} gradients to {len(variables)} variables by "
                f"{names.get(id(optimizer), optimizer.name)} ({type(optimizer).__name__})"
                f"{f', so there is none for {paths}' if paths else ''}: pass one gradient for "
                "each variable, in the same order"
            )


def _random_states(task: Any) -> dict[str, bytes]:
    """Return the states of Python's and NumPy's global generators, and of those of the task."""
    states: dict[str, Any] = {
        "Python's random": random.getstate(),
        "numpy.random": np.random.get_state(legacy=False),
    }
    for path, value in attributes_of(task).items():
        if isinstance(value, np.random.Generator):
            states[path] = value.bit_generator.state
        elif isinstance(value, np.random.RandomState):
            states[path] = value.get_state(legacy=False)
        elif isinstance(value, random.Random):
            states[path] = value.getstate()
    return {name: pickle.dumps(state) for name, state in states.items()}  # arrays of several kinds


def _check_random(before: dict[str, bytes], after: dict[str, bytes], name: str) -> None:
    """Reject random numbers that a compiled step would draw only once, while it is traced."""
    drawn = [which for which in after if before.get(which) != after[which]]
    if drawn:
        raise StepError(
            f"{name} draws from {' and '.join(drawn)}, which a compiled step does only while it is "
            "traced, so that all steps would get the same number: use keras.random with a "
            "keras.random.SeedGenerator that the task holds, or draw where batches are made"
        )


@contextmanager
def _recorded_apply(found: Build) -> Generator[None]:
    """Replace `apply` of all optimizers by a function that records its arguments.

    It also records which variables the original reads and assigns, and which optimizers that one
    applies in turn. In an abstract run, variables are not changed, and gradients are zeros.
    """
    base: Any = keras.optimizers.Optimizer
    running: list[Any] = []

    def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
        def apply(self: Any, grads: Any, trainable_variables: Any = None, **more: Any) -> Any:
            if any(self is other for other in running):  # `super().apply` of the same optimizer
                return original(self, grads, trainable_variables, **more)
            grads = list(grads)
            known = self._trainable_variables if self.built else []
            given = list(known if trainable_variables is None else trainable_variables)
            found.applied.append((self, given, len(grads)))
            if not self.built or len(grads) != len(given):
                return None  # it is built before the next run, or rejected
            variables = None if trainable_variables is None else given
            if _treats_all_alike(self):
                grads, variables = _examples(grads, given)
            running.append(self)
            try:
                if running[1:]:
                    return original(self, grads, variables, **more)
                # What fails or warns here does so in the step too, where errors are explained.
                with suppress(Exception), warnings.catch_warnings(action="ignore"):
                    scope = active().abstract_update(
                        lambda grads: original(self, grads, variables, **more), grads
                    )
                    found.read |= scope.foreign
                    found.written |= scope.assigned
            finally:
                running.pop()
            return None

        return apply

    own = {kind: kind.__dict__.get("apply") for kind in _all_subclasses(base)}
    for kind, original in own.items():
        if original is not None or kind is base:
            kind.apply = recorded(original or super(base, base).apply)
    try:
        yield
    finally:
        for kind, original in own.items():
            if original is not None:
                kind.apply = original
            elif kind is base:
                del kind.apply


def _treats_all_alike(optimizer: Any) -> bool:
    """Return whether an optimizer is one of Keras that treats all variables alike."""
    several = isinstance(optimizer, multi_optimizers())
    return type(optimizer).__module__.startswith("keras.") and not several


def _examples(grads: list[Any], variables: list[Variable]) -> tuple[list[Any], list[Variable]]:
    """Return a gradient with its variable, and those of all variables with constraints.

    To trace the update of each variable takes seconds for a hundred layers.
    """
    pairs = [(g, v) for g, v in zip(grads, variables, strict=True) if g is not None]
    pairs = pairs[:1] + [pair for pair in pairs[1:] if getattr(pair[1], "constraint", None)]
    return [g for g, _ in pairs], [v for _, v in pairs]


def _all_subclasses(base: Any) -> set[Any]:
    return {base}.union(*(_all_subclasses(kind) for kind in base.__subclasses__()))
