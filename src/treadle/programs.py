"""A task's step made ready to run: built, checked, and handed to the backend."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .backends.base import Executor, Outputs, Program, StepContext, Variable, active, context
from .backends.plans import Plan, RefusedError
from .backends.window import Window
from .building import build
from .constants import tensor_kept, told
from .errors import ConfigurationError, StepError
from .logs import LOSS_SCALE, UNDONE
from .loss_scale import LossScale, undoing
from .measuring import fastest
from .options import Options
from .plan import choose, places
from .skipping import Step, skipping
from .state import State
from .tasks import step_outputs


class Prepared:
    """A step over a state, ready to run.

    Attributes:
        state: All that the task reaches, after building.
        plan: How it runs; None before the first window.
        compile_seconds: What tracing and compiling took so far.
        compiling: It is compiling now; read by the thread that shows progress.
        written: Paths of the variables that the step may change.
        metrics: Names of the metrics that the step updates.
        differentiates: Whether the step computes gradients by Treadle.
    """

    def __init__(
        self, task: Any, step: Callable[[Any], Any], batch: Any, options: Options, name: str
    ) -> None:
        names: list[list[str]] = []
        known = 0

        def function(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
            nonlocal known
            values, weights = step_outputs(step(batch), name)
            found = len(context().variables)
            if context().build is not None and found != known:
                # A name may be a path, and the variables are still being found.
                known = found
                names.clear()
            _same_names(names, list(values), name)
            return values, weights

        self.state, found = build(task, function, batch, name, options.preflight)
        self._name = name
        self._constants = self.state.constants()
        self._settled = False
        changed = set(found.written)
        for optimizer, variables, _ in found.applied:
            changed |= {id(v) for v in [*variables, *optimizer.variables]}
        native_variable = active().is_native_variable  # whose changes nobody sees
        self.written = [
            path
            for path, v in self.state.variables.items()
            if id(v) in changed or native_variable(v)
        ]
        self.metrics = [
            name
            for name, metric in self.state.metrics.items()
            if any(id(v) in found.written for v in metric.variables)
        ]
        self.returns = names[0]
        self.changes_something = bool(found.written or found.applied)
        self.differentiates = found.differentiated
        native = not found.differentiated
        run: Step = function
        if self.state.loss_scale is not None:
            _refuse_unscaled(self.state, native and bool(found.applied), name)
            if not native:
                run = self._undoing(function, self.state.loss_scale)
        elif options.skip_nonfinite:
            run = self._skipping(function)
        program = program_of(self.state, run, options, name, native)
        self._program, self._options, self._on_device = program, options, False
        self._executor = self._make(eager=options.execution == "eager")
        self.plan: Plan | None = None
        self.compile_seconds = 0.0
        self.compiling = False

    def _compile_by_rule(self, window: Window) -> None:
        """Choose a plan and compile; where the compiler refuses, choose again without it."""
        facts = self._executor.facts(window)
        while True:
            self._executor.plan = plan = choose(facts, self._options, self._name)
            try:
                self._executor.compile(window)
                return
            except RefusedError as refusal:
                if self._options.jit:
                    raise StepError(f"{self._name} cannot be compiled: {refusal}") from refusal
                facts = facts.without(plan.compiler, str(refusal))

    def _make(self, eager: bool) -> Executor:
        options = replace(self._options, execution="eager") if eager else self._options
        return active().executor(self._program, options)

    @property
    def programs(self) -> int:
        """How many programs were compiled."""
        return self._executor.programs

    @property
    def largest(self) -> int:
        """The most steps that may run as one call."""
        return self.plan.largest if self.plan else 1

    @property
    def whole(self) -> bool:
        """A window that fails has changed nothing."""
        return self._executor.whole

    def told_plan(self) -> str:
        """Return how it runs, and where the data lies, in one line."""
        if self.plan is None or not self.plan.compiler:
            return str(self.plan or "")
        return f"{self.plan}, data {'on the device' if self._on_device else 'streamed'}"

    def placed(self, window: Window) -> Window:
        """Return a window as it is best run: rows of what is on the device, or gathered here."""
        compiled = self.plan is None or self.plan.compiler
        if window.rows is None or (compiled and places(window.rows.nbytes, self._options)):
            return window
        return window.streamed()

    def run(self, window: Window, first_step: int) -> Outputs:
        """Begin to run a window, which is `placed`; the first of its form is compiled before."""
        self.compiling = True
        try:
            self._compile(window)
        finally:
            self.compiling = False
        return self._executor.run(window, first_step)

    def _compile(self, window: Window) -> None:
        started = time.monotonic()
        if self.plan is None:
            if self._options.execution == "measure":
                self._executor = fastest(self._make, self._executor, window, self.state)
            else:
                self._compile_by_rule(window)
            self._on_device = window.rows is not None
            compiled = True
        else:
            compiled = False
        if self._executor.compile(window) or compiled:
            self.compile_seconds += time.monotonic() - started
        self.plan = self._executor.plan

    def _undoing(self, function: Step, scale: LossScale) -> Step:
        """Return a step that is undone where its gradients overflow; see `loss_scale`."""
        joined({LOSS_SCALE: 0.0, UNDONE: 0.0}, dict.fromkeys(self.metrics, 0.0), self._name)
        seeds = {id(v) for v in self.state.seeds}  # an undone step's random numbers are used up
        changed = [self.state.variables[path] for path in self.written]
        self.written += [self.state.path_of(v) for v in scale.variables]
        return undoing(function, scale, [v for v in changed if id(v) not in seeds], self._name)

    def _skipping(self, function: Step) -> Step:
        """Return a step that is undone where something is not finite after it; see `skipping`."""
        joined({UNDONE: 0.0}, dict.fromkeys(self.metrics, 0.0), self._name)
        seeds = {id(v) for v in self.state.seeds}
        counted = {id(v) for metric in self.state.metrics.values() for v in metric.variables}
        changed = [self.state.variables[path] for path in self.written]
        watched = [v for v in changed if id(v) not in counted]
        return skipping(function, [v for v in changed if id(v) not in seeds], watched, self._name)

    def require_results(self) -> None:
        """Refuse a step of which nothing would be known.

        Raises:
            StepError: It returned nothing and updated no metric, or a name is both.
        """
        if not self.returns and not self.metrics:
            raise StepError(
                f"{self._name} returned nothing, and no metric of the task changed: return a dict "
                "of scalars such as {'loss': loss}, or update a metric that the task holds"
            )
        joined(dict.fromkeys(self.returns, 0.0), dict.fromkeys(self.metrics, 0.0), self._name)

    def changed_constants(self) -> list[str]:
        """Return which Python values of the task changed since the step was built, and how."""
        return [told(path, old, new) for path, (old, new) in self._changed().items()]

    def _changed(self) -> dict[str, tuple[Any, Any]]:
        now = self.state.constants()
        return {p: (old, now[p]) for p, old in self._constants.items() if now[p] != old}

    def refuse_moving_constants(self) -> None:
        """Refuse, after its first run, a step that changes Python values itself.

        Raises:
            StepError: It does: a compiled step would do so once and never again.
        """
        if self._settled:
            return
        self._settled = True
        changed = self._changed()
        for path, (_, new) in changed.items():
            if tensor_kept(new):
                raise StepError(
                    f"a tensor of {self._name} was kept in {path}, where it means nothing once the "
                    "step is compiled: return it from the step, which logs it, or assign it to a "
                    "keras.Variable that the task holds"
                )
        if changed:
            raise StepError(
                f"{self._name} changes Python values ({'; '.join(self.changed_constants())}), "
                "which a compiled step does only while it is traced: keep what changes in a "
                "keras.Variable"
            )


def _refuse_unscaled(state: State, unscaled: bool, name: str) -> None:
    """Refuse what loss scaling cannot save: weights in float16, and losses that it never sees.

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
    """Return both under their names.

    Raises:
        StepError: A name stands for two things.
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
    """Return a function over a state as what backends compile."""
    variables = list(state.variables.values())
    scale = state.loss_scale
    nobodys = frozenset(
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
            owned_by_nobody=nobodys,
            loss_scale=scale,
        )

    return Program(function, variables, state.seeds, new_context, name, native)


def _same_names(seen: list[list[str]], names: list[str], step: str) -> None:
    """Hold a step to the names that it returned first.

    Raises:
        StepError: It returned others.
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
