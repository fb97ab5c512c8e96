"""Compiled steps: a task's step, built, planned and compiled for each form of batch, and run."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from weakref import ref

from ..backends.base import Outputs, active, repeats_exactly
from ..backends.plans import Execution, Plan
from ..backends.ranges import raise_stored
from ..backends.step_context import Effects
from ..backends.window import Following, Rows, Window, form_of
from ..checkpoint.batch_forms import described, text_of
from ..core.options import COMPILERS, Options, device_count
from ..core.randomness import random_states, set_random_states
from ..errors import StepError
from .constants import Changed, change_texts, refuse_moving
from .derived import assigned, dependent
from .helpers import raise_violations
from .layer_statistics import MeasuredOutputs, StepStatistics
from .planning import places, summary
from .programs import FormProgram, ProgramBuilder
from .python_values import undone
from .rare_forms import RareForms, name_of
from .rare_programs import RarePrograms
from .results import check_same_names, joined, step_outputs
from .snapshot import Snapshot
from .spec import StepSpec, build_step
from .task import adapter


class CompiledStep:
    """A task's step with its state, built, checked and ready to run.

    The step is built, checked and compiled separately for each form of batch (structure, shapes and
    dtypes), since it may use, change and create other variables for batches of another form. The
    attributes describe the forms so far together.

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
        effects: What the step does besides computing and changing variables.
        left_out: Paths of values, used by name, that changed while steps ran.

    Args:
        task: The task, whose attributes hold the state.
        step: A function of a batch.
        batch: A batch of the first form, of NumPy arrays.
        options: Execution options.
        name: The step's name, for messages.
        late: Treat the first form as a later one, because another step of the task ran before.
        compilers: The compilers that a resumed run used, by the text of the form.
        rare_forms: Counts the steps of forms that are rare; None to compile each form at once.
    """

    def __init__(
        self,
        task: Any,
        step: Callable[[Any], Any],
        batch: Any,
        options: Options,
        name: str,
        late: bool = False,
        compilers: Mapping[str, str] | None = None,
        rare_forms: RareForms | None = None,
    ) -> None:
        self._task, self._step = task, step
        # A task that asks for steps in Python may change Python values in them.
        asks_for_python = adapter(task).default_options().execution == "eager"
        self._changes_python = asks_for_python and options.execution == "eager"
        self.effects = Effects(name)
        self.left_out: list[str] = []
        self._builder = ProgramBuilder(self._function, options, self.effects)
        self._builder.recorded = dict(compilers or {})
        self._rare: RarePrograms | None = None
        if rare_forms is not None and active().rare_steps:
            self._rare = RarePrograms(rare_forms, self._builder)
        self._programs: dict[Hashable, FormProgram] = {}
        self._compiled: set[Hashable] = set()
        self._placed: Callable[[], Any] = lambda: None
        self._latest: StepSpec
        self._snapshot: Snapshot
        self._dropped = 0
        self._changes_derived = False
        self._late = late
        self._on_device = self._settled = self.compiling = self.differentiates = False
        self.plan: Plan | None = None
        self.compile_seconds = 0.0
        self.written: list[str] = []
        self.returns: Sequence[str] = []
        self.metrics: list[str] = []
        self.assigned: set[str] = set()
        self.applied: set[int] = set()
        self.forms: list[Any] = []
        self.initial: dict[str, Any] = {}
        self.prepare(batch)

    def knows(self, window: Window) -> bool:
        """Return whether the step is built for batches of this form."""
        made = self._programs.get(window.form)
        return made is not None and made.spec.is_current()

    def rare_steps(self, window: Window) -> int:
        """Return how many steps of this form run before it is compiled."""
        rare, made = self._rare, self._programs.get(window.form)
        if rare is None or not rare.forms.compiler or (made is not None and made.chosen):
            return 0
        return rare.left(described(window.batch(0)) if made is None else made.spec.form)

    def recount(self) -> None:
        """Look again which forms are rare, after the counts of an earlier step were restored."""
        compiled = self._rare.forms.compiled if self._rare is not None else ()
        for made in self._programs.values():
            made.chosen &= name_of(made.spec.form) in compiled
        self._compiled.clear()

    def _made(self, window: Window) -> FormProgram:
        """Return the program that runs a window, with another executor for a rare form."""
        made = self._programs[window.form]
        if self._rare is None or not self.rare_steps(window):
            return made
        return replace(made, executor=self._rare.executor(made, window))

    def changes(self, window: Window) -> tuple[Sequence[str], Sequence[str]]:
        """Return what the step may change for batches of this form, which must be compiled.

        Returns:
            The paths of the variables, and the names of the metrics.
        """
        made = self._programs[window.form]
        # As Python, the step can branch on values, and so change any variable.
        python = not self._made(window).executor.plan.compiler
        return list(self.state.variables) if python else made.spec.written, made.spec.metrics

    def prepare(self, batch: Any) -> None:
        """Build and check the step for the form of this batch, unless that is already done."""
        form = form_of(batch)
        made = self._programs.get(form)
        if made is not None and made.spec.is_current():
            return
        with undone(self._task) if self._changes_python else nullcontext():
            spec = build_step(
                self._task,
                self._step,
                batch,
                self.effects.name,
                preflight=self._builder.options.preflight,
                earlier=self.state if self._programs else None,
                late=self._late,
                effects=self.effects,
            )
        if self._programs:
            check_same_names(self.returns, spec.returns, self.effects.name)
        else:
            self.returns = spec.returns
        self._add(spec)
        if made is not None:
            self._dropped += made.executor.programs
        self._compiled.clear()
        self._programs[form] = self._builder.build(spec)
        rare = self._rare
        if rare is not None and rare.forms.compiler and rare.is_undecided(self._programs[form]):
            rare.decide(self._programs[form], batch, self.state)
        python = self._builder.options.execution == "eager"
        self._add_written(self.state.variables if python else spec.written)

    def _add(self, spec: StepSpec) -> None:
        """Add the findings for a form of batch to those for earlier forms."""
        self._latest, self.state, self._settled = spec, spec.state, False
        self._snapshot = spec.state.snapshot()
        self.differentiates |= spec.differentiates
        self.assigned |= set(spec.assigned)
        self.applied |= {id(optimizer) for optimizer, _ in spec.applied}
        self.initial |= spec.initial
        if (spec.initial or not self._late) and spec.form not in self.forms:
            self.forms.append(spec.form)
        self._late = True
        self.add_metrics(spec.metrics)

    def _add_written(self, paths: Iterable[str]) -> None:
        known = {*self.written, *paths}
        self.written = [path for path in self.state.variables if path in known]
        changed = [self.state.variables[path] for path in self.written]
        self._changes_derived = bool(dependent(self.state.derived, changed))

    def add_metrics(self, names: Iterable[str]) -> None:
        """Add names to the metrics that the step updates."""
        known = {*self.metrics, *names}
        self.metrics = [name for name in self.state.metrics if name in known]

    def start_over(self) -> None:
        """Discard all programs, because Python values that are constants in them have changed."""
        self._dropped = self.programs
        if self._rare is not None:
            self._rare.start_over()
        self._programs.clear()
        self._compiled.clear()
        self._builder.start_over()
        self.plan = None

    def _function(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the step, and check that it returns the same names as in its dry run."""
        values, weights = step_outputs(self._step(batch), self.effects.name)
        check_same_names(self.returns, list(values), self.effects.name)
        return values, weights

    @property
    def names(self) -> list[str]:
        """The names of the values that the step returns, and of the metrics that it updates."""
        own = adapter(self._task).metrics_of_epoch() is not None  # the step returns their results
        return [*self.returns] if own else [*self.returns, *self.metrics]

    @property
    def programs(self) -> int:
        """The number of programs compiled so far."""
        found = self._dropped
        for made in self._programs.values():
            found += made.executor.programs
        if self._rare is not None and self._rare.shared and self._rare.shared.executor:
            found += self._rare.shared.executor.programs
        return found

    @property
    def compilers(self) -> dict[str, str]:
        """The compilers of the programs, by the text of the form, where options choose them."""
        found = dict(self._builder.recorded)
        for made in self._programs.values():
            form, compiler = text_of(made.spec.form), made.executor.plan.compiler
            if made.chosen and form and compiler in COMPILERS:
                found[form] = compiler
        return found

    @property
    def largest(self) -> int:
        """The largest number of steps per window."""
        return self.plan.largest if self.plan else 1

    def is_whole(self, window: Window) -> bool:
        """Return whether a failing window of this form leaves all variables unchanged."""
        made = self._programs.get(window.form)
        return made is not None and made.executor.whole

    def execution(self, shards: int) -> Execution | None:
        """Return how the step is executed and where the data is stored; None before the first run.

        Args:
            shards: Among how many processes the reading of the data is divided.
        """
        if self.plan is None:
            return None
        return Execution(self.plan, self._on_device, device_count(), shards, repeats_exactly())

    def placed(self, window: Window) -> Window:
        """Return a window with its data where it runs fastest.

        That is either row indices into data on the device, or batches gathered in main memory.
        """
        if window.rows is None:
            return window
        made = self._programs.get(window.form)
        plan = self.plan if made is None or not made.chosen else made.executor.plan
        compiled = plan is None or plan.compiler
        if compiled and (window.rows.owner is self._placed() or self._places(window.rows)):
            return window
        return window.streamed()

    def _places(self, rows: Rows) -> bool:
        """Return whether a data set is copied to the device, and keep that it is."""
        if not places(rows.nbytes, self._builder.options):
            return False
        self._placed = ref(rows.owner)
        return True

    def transferred(self, window: Window) -> Window:
        """Return a window `placed`, and start to copy it to the device if its form is known."""
        window = self.placed(window)
        made = self._programs.get(window.form)
        if made is not None and made.chosen:
            made.executor.transfer(window)
        return window

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Outputs:
        """Start to run a window, which must be `placed`; compile it if its form is new.

        Args:
            window: The batches.
            first_step: The number of steps before them.
            background: Whether the calling thread has other work meanwhile.
            following: A function that returns the next batches, whose steps may run too.
        """
        # Most steps are of a kind that ran before: then nothing is looked for, nor the time taken.
        key = window.form, window.count, None if window.rows is None else id(window.rows.owner)
        if key not in self._compiled:
            self.compile(window)
            if self.rare_steps(window):
                executor = self._made(window).executor
                outputs = executor.run(window, first_step, background=False)
                self._count_rare(window, executor.plan)
                return outputs
            self._compiled.add(key)
        executor = self._programs[window.form].executor
        return executor.run(window, first_step, background, following)

    def _count_rare(self, window: Window, plan: Plan) -> None:
        """Count the steps of a window whose form is rare, which ran by a plan."""
        if self._rare is None or not self.rare_steps(window):
            return
        plan = self._rare.ran(self._programs[window.form].spec.form, window.count, plan)
        if self.plan is not None:
            self.plan = summary(self.plan, plan)

    def run_measured(self, window: Window, first_step: int) -> MeasuredOutputs:
        """Run a window as Python, and measure the layers in its first step.

        Args:
            window: The batches.
            first_step: The number of steps before them.
        """
        measured = self._builder.measured(self._made(window), self.state)
        outputs = measured.executor.run(window, first_step, background=False)
        self._count_rare(window, measured.executor.plan)
        return MeasuredOutputs(outputs, measured.step, first_step + 1)

    def measure(self, window: Window, first_step: int) -> StepStatistics:
        """Measure the layers in the first step of a window that is about to run compiled.

        The step runs in addition; afterwards the state and all random states are restored.

        Args:
            window: The batches, which must be `placed`.
            first_step: The number of steps before them.
        """
        made = self._programs[window.form]
        if self.rare_steps(window):
            made = replace(made, executor=self._builder.executor(made.program, eager=True))
        one = window.split(1)[0] if window.count > 1 else window
        metrics = {id(v) for name in made.spec.metrics for v in self.state.metrics[name].variables}
        changed = [*made.spec.written, *map(self.state.path_of, self.state.seeds)]
        changed += [path for path, v in self.state.variables.items() if id(v) in metrics]
        kept, random = self.state.keep(list(dict.fromkeys(changed))), random_states()
        self.compiling = made.measured is None
        try:
            started = time.monotonic()
            measured = self._builder.measured(made, self.state)
            with active().own_random():
                if measured.executor.compile(one):
                    self.compile_seconds += time.monotonic() - started
                values, _, _ = measured.executor.run(one, first_step, background=False).fetch()
            return measured.step.split(values, first_step + 1)[1]
        finally:
            self.compiling = False
            self.state.put_back(kept)
            set_random_states(random)

    def runs_python(self, window: Window) -> bool | None:
        """Return whether a compiled step calls Python; None if all of it runs as Python.

        Args:
            window: Batches of a form that is compiled.
        """
        executor = self._made(window).executor
        return executor.calls_python if executor.plan.compiler else None

    def compile(self, window: Window) -> bool:
        """Compile the program for windows of this form; return whether the form is new."""
        self.compiling = True
        try:
            return self._compile(window)
        finally:
            self.compiling = False

    def _compile(self, window: Window) -> bool:
        made, rare = self._programs.get(window.form), self._rare
        # It may have been built earlier, such as in steps that a rollback has undone.
        if (
            made is not None
            and rare is not None
            and rare.forms.compiler
            and rare.is_undecided(made)
        ):
            del self._programs[window.form]
            made = None
        if made is None or not made.spec.is_current():
            self.prepare(window.batch(0))
            made = self._programs[window.form]
        started, new, loops = time.monotonic(), not made.chosen, False
        if self.rare_steps(window):
            return False
        if new:
            made.program.number = sum(other.chosen for other in self._programs.values())
            some = self.plan is not None
            loops = self._builder.choose_plan(made, window, self.state, some)
            made.chosen = True
            # If a Python value changes later, the step is compiled as in the run that was resumed.
            self._builder.recorded.pop(text_of(made.spec.form), None)
            self._on_device |= window.rows is not None
            if not made.executor.plan.compiler:
                self._builder.run_as_python(made, self.state)
                self._add_written(self.state.variables)
        if made.executor.compile(window) or new:
            self.compile_seconds += time.monotonic() - started
            self.plan = summary(self.plan, made.executor.plan)
        if self._rare is not None:
            self._rare.compiled(made.spec.form, made.executor.plan.compiler, loops)
        return new

    def raise_violations(self, messages: Sequence[str]) -> None:
        """Raise an error for the violations that steps with `Options(checked=True)` found.

        Raises:
            DataError: An index or a label was out of range.
            OwnershipError: A phase changed a variable that it does not own.
        """
        self.raise_out_of_range(messages)
        raise_violations(messages)

    def raise_out_of_range(self, messages: Sequence[str]) -> None:
        """Raise an error for an index or a label that was out of range.

        Raises:
            DataError: There was one.
        """
        which = "step" if self.effects.name == "train_step" else "batch"
        for made in self._programs.values() if messages else ():
            raise_stored(made.program.ranges, f"{self.effects.name}, {which} {{}}")

    def require_results(self) -> None:
        """Check that the step returns a value or updates a metric, so that there is a result.

        Raises:
            StepError: It does neither, or a value has the same name as a metric.
        """
        if not self.returns and not self.metrics:
            raise StepError(
                f"{self.effects.name} returned nothing, and no metric of the task changed: return "
                "a dict of scalars such as {'loss': loss}, or update a metric that the task holds"
            )
        if adapter(self._task).metrics_of_epoch() is None:  # else the step returns their results
            joined(
                dict.fromkeys(self.returns, 0.0),
                dict.fromkeys(self.metrics, 0.0),
                self.effects.name,
            )

    def changed_constants(self) -> Changed:
        """Return which Python values of the task changed since the step was built, and how."""
        if self._changes_python or self._snapshot.is_current():
            return {}
        changed = self._latest.changed_constants()
        if not changed:  # other objects with equal values
            self._snapshot = self.state.snapshot()
        return change_texts(changed)

    def finish_window(self) -> None:
        """Compute derived state from variables that the step has changed.

        After the first run, also check that the step does not change Python values itself.

        Raises:
            StepError: It changes some: a compiled step would do so only while it is traced.
        """
        if self._changes_derived:
            assigned(self.state.variables[path] for path in self.written)
        if not self._settled and not self._changes_python:
            self._settled = True
            self.left_out += self._latest.leave_out_own_changes()
            refuse_moving(self._latest.changed_constants(), self.effects.name)
