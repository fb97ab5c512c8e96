"""The programs of a step, one for each form of batch, and the choice of how they are executed."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..backends.base import Executor, active
from ..backends.plans import Plan, RefusedError
from ..backends.program import Program
from ..backends.ranges import storage
from ..backends.step_context import Effects, Limit, Ranges, StepContext
from ..backends.types import Variable
from ..backends.window import Window
from ..checkpoint.batch_forms import text_of
from ..core.logs import LOSS_SCALE, UNDONE
from ..core.options import COMPILERS, Options
from ..errors import StepError
from .derived import dependent, deriving
from .keras_control_flow import carrying
from .layer_statistics import MeasuredStep
from .loss_scale import undoing
from .measuring import fastest
from .planning import choose
from .results import joined
from .skipping import Step, skipping
from .spec import StepSpec
from .state import State


@dataclass
class MeasuredProgram:
    """A step that also returns statistics of its layers, and the executor that runs it."""

    step: MeasuredStep
    executor: Executor


@dataclass
class FormProgram:
    """The program of a step for batches of one form.

    Attributes:
        spec: The findings of the step's dry run.
        program: The step over the state at the time when the program was built.
        executor: The backend's executor that runs the program.
        chosen: Whether the executor's plan is chosen already.
        measured: The same step with statistics of its layers; None before the first measurement.
    """

    spec: StepSpec
    program: Program
    executor: Executor
    chosen: bool = False
    measured: MeasuredProgram | None = None


class ProgramBuilder:
    """Builds the programs of a step, and chooses the plans that execute them.

    Args:
        function: The step, which returns values and weights.
        options: Execution options.
        effects: What the step does besides computing and changing variables, and its name.

    Attributes:
        options: Execution options.
        recorded: The compilers that a resumed run used, by the text of the form; each is used for
            the first program of its form.
    """

    def __init__(self, function: Step, options: Options, effects: Effects) -> None:
        self._function, self.options, self._effects = function, options, effects
        self.recorded: dict[str, str] = {}
        self._measured: Plan | None = None

    def steps_as_python(self, compiler: str) -> int:
        """Return how many steps of a rare form run as Python; 0 if each is compiled at once.

        Args:
            compiler: The compiler of the other forms.
        """
        options = self.options
        free = options.execution == "auto" and options.jit is None and not options.checked
        free &= options.compiler in ("auto", compiler)
        return active().rare_steps.get(compiler, 0) if free else 0

    def start_over(self) -> None:
        """Discard the measured plan, because the step has changed."""
        self._measured = None

    def build(self, spec: StepSpec) -> FormProgram:
        """Return the program for a form of batch; its plan is not chosen yet.

        Args:
            spec: The findings of the dry run for this form.
        """
        eager = self.options.execution == "eager"
        program = self._program(spec, spec.state, eager)
        compiler = self.recorded.get(text_of(spec.form), "")
        executor = self.executor(program, eager, compiler)
        return FormProgram(spec, program, executor)

    def executor(self, program: Program, eager: bool, compiler: str = "") -> Executor:
        """Return an executor for a program, which may run it as Python.

        Args:
            program: The program.
            eager: Whether it runs as Python.
            compiler: The compiler to use instead of that of the options, unless it is empty.
        """
        options = replace(self.options, execution="eager") if eager else self.options
        if compiler in COMPILERS:
            options = replace(options, compiler=compiler)
        return active().executor(program, options)

    def choose_plan(self, made: FormProgram, window: Window, state: State, some: bool) -> bool:
        """Choose a plan for batches of one form and compile; return whether the step has loops.

        Args:
            made: The program, whose executor may be replaced.
            window: Batches of this form.
            state: The state of the task, which measuring restores.
            some: Whether programs for other forms run already, for messages.

        Raises:
            StepError: The options require a compiler, and none accepts the step.
        """
        measured = self._measured
        timed = self.options.execution == "measure" and not self._effects.acts
        if timed and measured is None:
            make = partial(self.executor, made.program)
            made.executor = fastest(make, made.executor, window, state)
            self._measured = made.executor.plan
            return False
        facts = made.executor.facts(window)
        if measured is not None and not measured.compiler:
            made.executor = self.executor(made.program, eager=True)
        while True:
            plan = choose(facts, self.options, self._effects.name, some=some)
            if measured is not None and measured.compiler in ("", *facts.compilers):
                plan = measured
            made.executor.plan = plan
            try:
                made.executor.compile(window)
                return facts.loops
            except RefusedError as refusal:
                if self.options.jit:
                    raise StepError(
                        f"{self._effects.name} cannot be compiled: {refusal}"
                    ) from refusal
                facts = facts.without(plan.compiler, str(refusal))

    def measured(self, made: FormProgram, state: State) -> MeasuredProgram:
        """Return a program that measures the layers in a step; it is compiled when it first runs.

        Args:
            made: The program of the step, whose plan is chosen.
            state: The state of the task.
        """
        if made.measured is None:
            step = MeasuredStep(made.program.function, state, made.spec.assigned)
            program, plan = replace(made.program, function=step), made.executor.plan
            # Few steps are measured, so Inductor would compile for longer than they run.
            executor = self.executor(program, eager=not plan.compiler, compiler="captured")
            if plan.compiler:  # one step at a time
                executor.plan = replace(plan, fused=False, largest=1)
            made.measured = MeasuredProgram(step, executor)
        return made.measured

    def run_as_python(self, made: FormProgram, state: State) -> None:
        """Replace a program by one that runs as Python, since no compiler accepts the step."""
        if self.options.execution == "eager":
            return
        plan = made.executor.plan
        made.program = self._program(made.spec, state, eager=True)
        made.executor = self.executor(made.program, eager=True)
        made.executor.plan = plan

    def _program(self, spec: StepSpec, state: State, eager: bool) -> Program:
        """Return the program of the step, wrapped so that non-finite updates are undone if needed.

        As Python, or with AutoGraph, the step can branch on values, and so change any variable.
        """
        seeds = {id(v) for v in state.seeds}  # never undone: the next step draws new numbers
        scale = {id(v) for v in state.loss_scale.variables} if state.loss_scale else set[int]()
        paths = state.variables if eager or spec.branches else spec.written
        kept_always = seeds | scale
        changed = [v for path in paths if id(v := state.variables[path]) not in kept_always]
        native, run = not spec.differentiates, self._function
        logged = dict.fromkeys(spec.metrics, 0.0)
        if state.loss_scale is not None and not native:
            joined({LOSS_SCALE: 0.0, UNDONE: 0.0}, logged, self._effects.name)
            run = undoing(run, state.loss_scale, changed, self._effects.name)
        elif state.loss_scale is None and self.options.skip_nonfinite:
            joined({UNDONE: 0.0}, logged, self._effects.name)
            counted = {id(v) for metric in state.metrics.values() for v in metric.variables}
            watched = [state.variables[path] for path in paths]
            watched = [v for v in watched if id(v) not in counted]
            run = skipping(run, changed, watched, self._effects.name)
        limits = spec.limits if self.options.checked else ()
        assigned = [state.variables[path] for path in (state.variables if eager else spec.assigned)]
        kept = [state.variables[path] for path in spec.written]
        if native:  # it may differentiate at the tensor itself, or change it in place
            kept = [v for v in kept if not v.trainable]
        options = self.options
        program = program_of(
            state, run, options, self._effects.name, native, limits, assigned, kept
        )
        return replace(program, effects=self._effects)


def program_of(
    state: State,
    function: Callable[..., Any],
    options: Options,
    name: str,
    native: bool,
    limits: Sequence[Limit] = (),
    assigned: Sequence[Variable] = (),
    kept: Iterable[Variable] = (),
) -> Program:
    """Return the `Program` of a function over a state, which a backend compiles.

    Args:
        state: The state.
        function: The function.
        options: Execution options.
        name: Its name, for messages.
        native: Whether it computes its own gradients.
        limits: The ranges of indices and labels that each call checks.
        assigned: The variables that it may assign.
        kept: Those of them of which a read is a value: see `backends.reads`.
    """
    function = deriving(function, state.derived, dependent(state.derived, assigned))
    kept_ids = frozenset(map(id, kept))
    stored = storage(limits)
    variables = [*state.variables.values(), *stored.values()]
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
            ranges=Ranges(state.name_of, variables=stored) if stored else None,
        )

    def run(batch: Any) -> Any:
        with carrying(), active().reads_of(kept_ids) if kept_ids else nullcontext():
            return function(batch)

    refuse = partial(state.refuse_hidden, name=name)
    return Program(run, variables, state.seeds, new_context, refuse, name, native, ranges=stored)
