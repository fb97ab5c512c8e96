"""Compiled steps: building, checking, planning and running a task's step on the backend."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..backends.base import (
    Build,
    Executor,
    Outputs,
    Program,
    StepContext,
    Variable,
    active,
    context,
)
from ..backends.plans import Plan, RefusedError
from ..backends.window import Window, form_of
from ..core.logs import LOSS_SCALE, UNDONE
from ..core.options import Options
from ..errors import ConfigurationError, StepError
from .batch_forms import described
from .building import build
from .constants import tensor_kept, told
from .loss_scale import undoing
from .measuring import fastest
from .planning import choose, places
from .skipping import Step, skipping
from .state import State
from .task import step_outputs


class Prepared:
    """A task's step with its state, built, checked and ready to run.

    The step is built, checked and compiled separately for each form of batch (structure, shapes and
    dtypes), since it may use, change and create other variables for batches of another form.

    Attributes:
        state: The variables reachable from the task, after building.
        plan: How the step is executed; None before the first window.
        compile_seconds: Seconds spent on tracing and compiling so far.
        compiling: Whether the step is compiling now; read by the thread that shows progress.
        written: Paths of the variables that the step may change: all if it runs as Python.
        assigned: Paths of the variables that its dry runs assigned, or that an optimizer updates.
        applied: Ids of the optimizers that it applies.
        metrics: Names of the metrics that the step updates.
        differentiates: Whether the step computes gradients with Treadle's functions.
        returns: Names of the values that the step returns.
        forms: Descriptions of the first form and of the forms that created variables, in order.
        initial: The initial values of the variables that later forms created, by path.

    Args:
        task: The task, whose attributes hold the state.
        step: A function of a batch.
        batch: A batch of the first form, of NumPy arrays.
        options: Execution options.
        name: The step's name, for messages.
        late: Treat the first form as a later one, because another step of the task ran before.
    """

    def __init__(
        self,
        task: Any,
        step: Callable[[Any], Any],
        batch: Any,
        options: Options,
        name: str,
        late: bool = False,
    ) -> None:
        self._task, self._step, self._options, self._name = task, step, options, name
        self._programs: dict[Hashable, _FormProgram] = {}
        self._dropped = 0
        self._measured: Plan | None = None
        self._names: list[list[str]] = []
        self._on_device = self._settled = False
        self._late = late
        self.state = State.discover(task)
        self.plan: Plan | None = None
        self.compile_seconds = 0.0
        self.written: list[str] = []
        self.metrics: list[str] = []
        self.assigned: set[str] = set()
        self.applied: set[int] = set()
        self.forms: list[Any] = []
        self.initial: dict[str, Any] = {}
        self.changes_something = self.differentiates = self.compiling = False
        self.prepare(batch)

    @property
    def returns(self) -> list[str]:
        """Names of the values that the step returns."""
        return self._names[0] if self._names else []

    def knows(self, window: Window) -> bool:
        """Return whether the step is built for batches of this form."""
        made = self._programs.get(window.form)
        return made is not None and made.is_current()

    def changes(self, window: Window) -> tuple[Sequence[str], Sequence[str]]:
        """Return what the step may change for batches of this form, which must be compiled.

        Returns:
            The paths of the variables, and the names of the metrics.
        """
        made = self._programs[window.form]
        # As Python, the step can branch on values, and so change any variable.
        python = not made.executor.plan.compiler
        return list(self.state.variables) if python else made.written, made.metrics

    def prepare(self, batch: Any) -> None:
        """Build and check the step for the form of this batch, unless that is already done."""
        form = form_of(batch)
        made = self._programs.get(form)
        if made is not None and made.is_current():
            return
        before = State.discover(self._task)
        settled = frozenset(map(id, self.state.variables.values()) if self._programs else ())
        preflight = self._options.preflight
        state, found = build(self._task, self._function, batch, self._name, preflight, settled)
        _check_same_names(self._names, found.names, self._name)
        self.state, self._constants, self._settled = state, state.constants(), False
        self.changes_something |= bool(found.written or found.applied)
        self.differentiates |= found.differentiated
        written = _written(state, found)
        self.assigned |= set(written)
        self.applied |= {id(optimizer) for optimizer, _, _ in found.applied}
        new = [path for path in state.variables if path not in before.variables]
        if self._late:
            self.initial |= {path: active().read(state.variables[path]) for path in new}
        description = described(batch)
        if (new or not self._late) and description not in self.forms:
            self.forms.append(description)
        self._late = True
        metrics = _updated(state, found)
        self.add_metrics(metrics)
        native = not found.differentiated
        if state.loss_scale is not None:
            _reject_unscaled(state, native and bool(found.applied), self._name)
            if not native:
                written += [state.path_of(v) for v in state.loss_scale.variables]
        if made is not None:
            self._dropped += made.executor.programs
        eager = self._options.execution == "eager"
        program = self._program(written, native, eager)
        self._programs[form] = _FormProgram(
            program,
            self._make(program, eager),
            written,
            metrics,
            {id(o): (o, len(o.variables)) for o, _, _ in found.applied},
        )
        self._add_written(state.variables if eager else written)

    def _program(self, written: Sequence[str], native: bool, eager: bool) -> Program:
        """Return the program of the step, wrapped so that non-finite updates are undone if needed.

        Args:
            written: The paths of the variables that the step changes, according to its dry run.
            native: Whether the step differentiates without Treadle's functions.
            eager: Whether it runs as Python, where it can branch on values and change any variable.
        """
        state = self.state
        seeds = {id(v) for v in state.seeds}  # never undone: the next step draws new numbers
        scale = {id(v) for v in state.loss_scale.variables} if state.loss_scale else set[int]()
        changed = [state.variables[path] for path in (state.variables if eager else written)]
        changed = [v for v in changed if id(v) not in seeds | scale]
        run: Step = self._function
        metrics = dict.fromkeys(self.metrics, 0.0)
        if state.loss_scale is not None and not native:
            joined({LOSS_SCALE: 0.0, UNDONE: 0.0}, metrics, self._name)
            run = undoing(run, state.loss_scale, changed, self._name)
        elif state.loss_scale is None and self._options.skip_nonfinite:
            joined({UNDONE: 0.0}, metrics, self._name)
            counted = {id(v) for metric in state.metrics.values() for v in metric.variables}
            watched = [state.variables[path] for path in written]
            watched = [v for v in watched if id(v) not in counted]
            run = skipping(run, changed, watched, self._name)
        program = program_of(state, run, self._options, self._name, native)
        program.number = len(self._programs)
        return program

    def _add_written(self, paths: Iterable[str]) -> None:
        known = {*self.written, *paths}
        self.written = [path for path in self.state.variables if path in known]

    def add_metrics(self, names: Iterable[str]) -> None:
        """Add names to the metrics that the step updates."""
        known = {*self.metrics, *names}
        self.metrics = [name for name in self.state.metrics if name in known]

    def start_over(self) -> None:
        """Discard all programs, because Python values that are constants in them have changed."""
        self._dropped = self.programs
        self._programs.clear()
        self._names.clear()
        self.plan = self._measured = None

    def _function(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        values, weights = step_outputs(self._step(batch), self._name)
        found = context().build
        if found is None:
            _check_same_names(self._names, list(values), self._name)
        else:  # while variables are still being created, names may differ between runs
            found.names = list(values)
        return values, weights

    def _make(self, program: Program, eager: bool) -> Executor:
        options = replace(self._options, execution="eager") if eager else self._options
        return active().executor(program, options)

    def _choose_plan(self, made: "_FormProgram", window: Window) -> None:
        """Choose a plan for batches of one form and compile."""
        measured = self._measured
        if self._options.execution == "measure" and measured is None:
            make = partial(self._make, made.program)
            made.executor = fastest(make, made.executor, window, self.state)
            self._measured = made.executor.plan
            return
        facts = made.executor.facts(window)
        if measured is not None and not measured.compiler:
            made.executor = self._make(made.program, eager=True)
        while True:
            plan = choose(facts, self._options, self._name, some=self.plan is not None)
            if measured is not None and measured.compiler in ("", *facts.compilers):
                plan = measured
            made.executor.plan = plan
            try:
                made.executor.compile(window)
                return
            except RefusedError as refusal:
                if self._options.jit:
                    raise StepError(f"{self._name} cannot be compiled: {refusal}") from refusal
                facts = facts.without(plan.compiler, str(refusal))

    def _run_as_python(self, made: "_FormProgram") -> None:
        """Replace the program by one that runs as Python, since no compiler accepts the step."""
        if self._options.execution == "eager":
            return
        plan = made.executor.plan
        made.program = self._program(made.written, made.program.native, eager=True)
        made.executor = self._make(made.program, eager=True)
        made.executor.plan = plan
        self._add_written(self.state.variables)

    @property
    def programs(self) -> int:
        """The number of programs compiled so far."""
        return self._dropped + sum(made.executor.programs for made in self._programs.values())

    @property
    def largest(self) -> int:
        """The largest number of steps per window."""
        return self.plan.largest if self.plan else 1

    def is_whole(self, window: Window) -> bool:
        """Return whether a failing window of this form leaves all variables unchanged."""
        made = self._programs.get(window.form)
        return made is not None and made.executor.whole

    def plan_text(self) -> str:
        """Describe in one line how the step is executed and where the data is stored."""
        if self.plan is None or not self.plan.compiler:
            return str(self.plan or "")
        return f"{self.plan}, data {'on the device' if self._on_device else 'streamed'}"

    def placed(self, window: Window) -> Window:
        """Return a window with its data where it runs fastest.

        That is either row indices into data on the device, or batches gathered in main memory.
        """
        if window.rows is None:
            return window
        made = self._programs.get(window.form)
        plan = self.plan if made is None or not made.chosen else made.executor.plan
        compiled = plan is None or plan.compiler
        if compiled and places(window.rows.nbytes, self._options):
            return window
        return window.streamed()

    def run(self, window: Window, first_step: int) -> Outputs:
        """Start to run a window, which must be `placed`; compile it if its form is new."""
        self.compile(window)
        return self._programs[window.form].executor.run(window, first_step)

    def compile(self, window: Window) -> bool:
        """Compile the program for windows of this form; return whether the form is new."""
        self.compiling = True
        try:
            return self._compile(window)
        finally:
            self.compiling = False

    def _compile(self, window: Window) -> bool:
        made = self._programs.get(window.form)
        if made is None or not made.is_current():
            self.prepare(window.batch(0))
            made = self._programs[window.form]
        started, new = time.monotonic(), not made.chosen
        if new:
            self._choose_plan(made, window)
            made.chosen = True
            self._on_device |= window.rows is not None
            if not made.executor.plan.compiler:
                self._run_as_python(made)
        if made.executor.compile(window) or new:
            self.compile_seconds += time.monotonic() - started
            self.plan = _summary(self.plan, made.executor.plan)
        return new

    def require_results(self) -> None:
        """Check that the step returns a value or updates a metric, so that there is a result.

        Raises:
            StepError: It does neither, or a value has the same name as a metric.
        """
        if not self.returns and not self.metrics:
            raise StepError(
                f"{self._name} returned nothing, and no metric of the task changed: return a dict "
                "of scalars such as {'loss': loss}, or update a metric that the task holds"
            )
        joined(dict.fromkeys(self.returns, 0.0), dict.fromkeys(self.metrics, 0.0), self._name)

    def changed_constants(self) -> list[str]:
        """Describe which Python values of the task changed since the step was built."""
        return [told(path, old, new) for path, (old, new) in self._changed().items()]

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        now = self.state.constants()
        return {p: (old, now[p]) for p, old in self._constants.items() if now[p] != old}

    def refuse_moving_constants(self) -> None:
        """Check, after its first run, that the step does not change Python values itself.

        Raises:
            StepError: It changes some: a compiled step would do so only while it is traced.
        """
        if self._settled:
            return
        self._settled = True
        changed = self._changed()
        for path, (_, new) in changed.items():
            if tensor_kept(new):
                raise StepError(
                    f"a tensor of {self._name} was stored in {path}, but it has no value outside "
                    "of a compiled step: return it from the step, which logs it, or assign it to a "
                    "keras.Variable that is an attribute of the task"
                )
        if changed:
            raise StepError(
                f"{self._name} changes Python values ({'; '.join(self.changed_constants())}), "
                "which a compiled step does only while it is traced: store changing values in a "
                "keras.Variable"
            )


@dataclass
class _FormProgram:
    """The program of a step for batches of one form.

    Attributes:
        program: The step over the state at the time when the program was built.
        executor: The backend's executor that runs the program.
        written: The paths of the variables that the step changes, according to its dry run.
        metrics: The names of the metrics that the step updates.
        optimizers: The optimizers that the step applies, with the number of their variables, by id.
        chosen: Whether the executor's plan is chosen already.
    """

    program: Program
    executor: Executor
    written: Sequence[str]
    metrics: Sequence[str]
    optimizers: Mapping[int, tuple[Any, int]]
    chosen: bool = False

    def is_current(self) -> bool:
        """Return whether its optimizers still have the variables for which it was built.

        An optimizer is built again if a batch of a later form adds variables to it.
        """
        return all(len(o.variables) == count for o, count in self.optimizers.values())


def _written(state: State, found: Build) -> list[str]:
    """Return the paths of the variables that a step may change."""
    changed = set(found.written)
    for optimizer, variables, _ in found.applied:
        changed |= {id(v) for v in [*variables, *optimizer.variables]}
    native_variable = active().is_native_variable  # changes of these cannot be tracked
    return [p for p, v in state.variables.items() if id(v) in changed or native_variable(v)]


def _updated(state: State, found: Build) -> list[str]:
    """Return the names of the metrics that a step updates."""
    return [
        name
        for name, metric in state.metrics.items()
        if any(id(v) in found.written for v in metric.variables)
    ]


def _summary(first: Plan | None, plan: Plan) -> Plan:
    """Return the plan of the first form of batch, with a remark if other forms run differently."""
    if first is None:
        return plan
    if (plan.compiler, plan.fused) == (first.compiler, first.fused):
        return first
    how = str(replace(plan, why="")) if plan.compiler else "as Python"
    remark = f"{how} for some batches: {plan.why}" if plan.why else f"{how} for some batches"
    if remark in first.why:
        return first
    return replace(first, why=f"{first.why}; {remark}" if first.why else remark)


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


def joined(means: Mapping[str, float], metrics: Mapping[str, float], step: str) -> dict[str, float]:
    """Merge a step's means and its metrics into one dict.

    Raises:
        StepError: A value and a metric have the same name.
    """
    both = sorted(set(means) & set(metrics))
    if both:
        raise StepError(
            f"{step} returns {both[0]!r}, and a metric of the task has this name as well: rename "
            "one of them"
        )
    return {**means, **metrics}


def program_of(
    state: State, function: Callable[..., Any], options: Options, name: str, native: bool
) -> Program:
    """Return the `Program` of a function over a state, which a backend compiles."""
    variables = list(state.variables.values())
    scale = state.loss_scale
    unowned = frozenset(
        id(v)
        for v in [
            *state.seeds,
            *(v for m in state.metrics.values() for v in m.variables),
            *(scale.variables if scale is not None else ()),
        ]
    )
    paths: Mapping[str, Variable] = state.variables

    def new_context(number: Any) -> StepContext:
        return StepContext(
            number=number,
            layers=state.layers,
            variables=paths,
            path_of=state.path_of,
            checked=options.checked,
            unowned=unowned,
            loss_scale=scale,
        )

    return Program(function, variables, state.seeds, new_context, name, native)


def _check_same_names(seen: list[list[str]], names: list[str], step: str) -> None:
    """Check that a step returns the same names in every call.

    Raises:
        StepError: It returned other names than in its first call.
    """
    if not seen:
        seen.append(names)
    elif set(seen[0]) != set(names):
        missing = sorted(set(seen[0]) - set(names))
        new = sorted(set(names) - set(seen[0]))
        raise StepError(
            f"{step} returned other names than before: "
            f"{f'missing {missing}' if missing else ''}{', ' if missing and new else ''}"
            f"{f'new {new}' if new else ''}. Return the same names from every step"
        )
