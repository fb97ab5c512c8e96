"""Replaying a step of a past run, and searching for the first step where a condition holds."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..backends.base import active
from ..backends.plans import XLA
from ..checkpoint import SavedState
from ..core.directory import differences
from ..core.hook import Hook
from ..core.identity import identity, in_json_types
from ..core.logs import LOSS_SCALE, UNDONE, values_of
from ..core.options import Options
from ..core.tracebacks import shortened
from ..core.triggers import Scheduled
from ..core.user_code import changed_code, code_of
from ..errors import ConfigurationError, DirectoryError, whole_number
from ..hooks.run_record import passed_over
from ..run.circumstances import changes
from ..run.state import RunState
from ..steps.planning import as_recorded
from ..steps.python_values import PythonValues
from ..steps.state import State
from .conditions import Condition, parse
from .findings import Agreement, Replay, arrays_of, batch_numbers, origin_of, variables_of
from .inspection import inspect_step
from .numbers import Numbers, farthest
from .recorded import Recorded
from .visiting import Sources, Visit


def replay(
    task: Any,
    train: Any,
    directory: str | Path,
    step: int | None = None,
    *,
    bisect: str | None = None,
    validation: Any = None,
    hooks: Sequence[Hook | Scheduled] = (),
) -> Replay:
    """Re-run a step of a past run, and inspect every value that it computed.

    Starting at the newest checkpoint before the step, the run's steps are repeated, compiled, and
    their values are compared with the log. The step itself then runs once more uncompiled, and its
    activations and gradients are recorded. The run directory is only read.

    Args:
        task: The task, created as for the run, after the same `treadle.setup`. It keeps the state
            after the step.
        train: The run's training source. If several calls of the loop had different sources, a dict
            of sources by the number of the call, from 0.
        directory: The run directory.
        step: The number of the step, from 1, as in the log.
        bisect: A condition, given instead of `step`: the first step after which it holds is
            replayed. `"loss > 5"` or `"isnan(loss)"` is searched in the log. A condition on a
            variable's path, such as `"norm(model/layers/0/kernel) > 10"`, is searched by bisection
            of the checkpoints, then step by step. If such a condition holds in several intervals,
            the start of one of them is found.
        validation: The run's validation data; only needed if hooks use the results.
        hooks: The run's own hooks, if they change training. Treadle's hooks that write or show
            something are excluded; the others get a temporary folder as `loop.directory`.

    Returns:
        The report; print it to see its tables.

    Raises:
        ConfigurationError: Neither or both of `step` and `bisect` are given, or one is invalid.
        DirectoryError: The directory holds no such run or step, or the run of another task or of
            other data.
        CheckpointError: The run has no readable checkpoint.

    Example:
        >>> import keras, numpy as np, treadle
        >>> def line():
        ...     treadle.setup(seed=0)
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     return treadle.Supervised(model, "mse", "sgd")
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> keras.backend.clear_session()
        >>> with treadle.Loop(line(), "runs/line", console=False) as loop:
        ...     history = loop.fit(data, epochs=4)
        >>> keras.backend.clear_session()
        >>> found = treadle.doctor.replay(line(), data, "runs/line", step=5)
        >>> print(found.agreement)
        re-ran steps 1 to 5, compiled: equal to the log bit for bit
    """
    _check_choice(step, bisect)
    with shortened(), TemporaryDirectory() as place:
        run = _Run(task, train, Path(directory), validation, hooks, Path(place))
        return run.visit(*run.chosen(step, bisect))


def _check_choice(step: int | None, bisect: str | None) -> None:
    if (step is None) == (bisect is None):
        raise ConfigurationError(
            "specify the step: either its number, such as step=120, or a condition, such as "
            "bisect='loss > 5'"
        )


class _Run:
    """A past run, with the task and sources needed to repeat its steps."""

    def __init__(
        self,
        task: Any,
        train: Any,
        directory: Path,
        validation: Any,
        hooks: Sequence[Hook | Scheduled],
        place: Path,
    ) -> None:
        self._task, self._directory, self._hooks, self._place = task, directory, hooks, place
        self._constants = PythonValues(task)
        self._recorded = past = Recorded(directory)
        self._facts = facts = past.facts
        # Runs of the command line also record their settings, which must agree too.
        configuration = facts["configuration"]
        more = {"settings": configuration.get("settings")} if "recipe" in configuration else {}
        known = {**identity(task), **more}
        recorded = {name: configuration.get(name) for name in known}
        found = differences(recorded, in_json_types(known))
        if found:
            raise DirectoryError(
                f"{directory} holds the run of another task: {'; '.join(found)}. Create the task "
                "as for the run, after the same treadle.setup, on the same backend"
            )
        left = [line["step"] for line in past.log.records if line["kind"] == "partial"]
        self._sources = Sources(train, validation, past.calls, directory, left)
        self._log, self._last = past.log, past.last
        forms = [part.values for part in past.log.parts]
        skips = any(UNDONE in names and LOSS_SCALE not in names for names in forms)
        self._options = replace(_options(facts), skip_nonfinite=skips)

    def chosen(self, step: int | None, bisect: str | None) -> tuple[int, str]:
        """Return the step to replay, and how a condition has found it."""
        if bisect is not None:
            return self._first_step(parse(bisect))
        return whole_number("step", step, ConfigurationError), ""

    def _first_step(self, condition: Condition) -> tuple[int, str]:
        """Return the first step after which a condition holds, and a sentence about it."""
        self._recorded.check_condition(condition)
        logged = self._recorded.logged_step(condition)
        if logged is not None:
            return logged
        steps = self._recorded.checkpoints.steps()
        index = bisect_left(
            steps, True, lo=1, key=lambda step: condition.holds(self._recorded.before(step).state)
        )
        parts = [(steps[index - 1], steps[index] if index < len(steps) else self._last)]
        if index == len(steps):  # it holds in no checkpoint, but may have held between any two
            parts.append((steps[0], steps[-1]))
        for begin, end in parts:
            found = self._search(condition, begin, end)
            if found is not None:
                return found
        raise ConfigurationError(
            f"{condition.text!r} holds after none of the {self._last} steps of the run"
        )

    def _search(self, condition: Condition, begin: int, end: int) -> tuple[int, str] | None:
        """Run from a checkpoint up to a step, and check the condition after every step."""

        def holds(state: State) -> bool:
            read = active().read
            return condition.holds({n: read(state.variables[n]) for n in condition.names})

        # One step further: a hook may change the state between the end and the next step.
        visit = self._visit(self._recorded.before(begin), min(end + 1, self._last), holds)
        visit.go(self._sources)
        if visit.met is None:
            return None
        when = "before" if visit.loop.progress.step < visit.met else "after"
        return visit.met, f"{condition.text}: first holds {when} step {visit.met}"

    def visit(self, step: int, found_by: str) -> Replay:
        """Run up to a step, compare with the log, and inspect the step."""
        self._recorded.check_step(step)
        found = self._recorded.before(step - 1)
        visit = self._visit(found, step)
        visit.go(self._sources)
        inputs = visit.inputs
        if inputs is None:
            raise DirectoryError(
                f"the run ended after step {visit.loop.progress.step}, before step {step}: "
                f"{visit.loop.reason or 'its calls of the loop were finished'}"
            )
        agreement = self._compared(found, visit)
        inspection = inspect_step(self._task, inputs, self._options)
        compiled = {name: np.asarray(x) for name, x in visit.values[step].items()}
        distance, where = max(
            farthest(inspection.values, compiled, whole=False),
            farthest(inspection.after, visit.after, whole=True),
            key=lambda found: found[0],
        )
        batch, variables = batch_numbers(inputs), variables_of(inputs, inspection)
        layers = tuple(Numbers.of(path, x) for path, x in inspection.activations.items())
        meant = frozenset(found.hooks.get("NonFinite", {}).get("meant", ()))
        State.discover(self._task).assign(visit.after)
        rows = inputs.rows
        notes = {
            self._recorded.recovered: bool(self._recorded.recovered),
            "this step differentiates without treadle.gradients, so its gradients cannot be seen, "
            "only its updates": not inspection.gradients,
            "the batch's rows in the data set are unknown: the source does not read arrays": rows
            is None,
        }
        return Replay(
            directory=str(self._directory),
            step=step,
            epoch=inputs.progress.epoch + 1,
            batch_number=inputs.progress.batch + 1,
            checkpoint=found.progress.step,
            backend=active().name,
            plan=visit.loop.plan,
            found_by=found_by,
            agreement=agreement,
            values=visit.values[step],
            eager_values={name: float(x) for name, x in inspection.values.items()},
            eager_distance=distance,
            eager_where=where,
            batch=batch,
            rows=None if rows is None else tuple(rows),
            layers=layers,
            kinds=inspection.layers,
            variables=variables,
            origin=origin_of(
                *(inputs, inspection, batch, layers),
                [v for v in variables if v.path not in meant],  # not finite on purpose
            ),
            notes=tuple(note for note, is_true in notes.items() if is_true),
            arrays=arrays_of(inputs, inspection),
        )

    def _visit(self, found: SavedState, last: int, watch: Any = None) -> Visit:
        return Visit(
            *(self._task, found, self._directory, self._place, self._hooks, self._options),
            *(self._constants, passed_over(self._facts), last, watch),
        )

    def _compared(self, found: SavedState, visit: Visit) -> Agreement:
        compared, difference = 0, ""
        for step, values in sorted(visit.values.items()):
            logged = values_of(self._log.row(step))
            for name, value in values.items():
                if name not in logged:
                    continue
                compared += 1
                if not difference and repr(logged[name]) != repr(value):  # compares every bit
                    difference = (
                        f"{name} of step {step} is {value!r}, and {logged[name]!r} in the log"
                    )
        first, last = min(visit.values), max(visit.values)
        reasons = self._reasons(found, visit) if difference else ()
        return Agreement(first, last, compared, difference, reasons)

    def _reasons(self, found: SavedState, visit: Visit) -> tuple[str, ...]:
        """Return possible causes of a difference between the replayed steps and the log."""
        saved = RunState.of(found)
        executed = saved.execution or self._facts.get("execution")  # unknown before the first step
        reasons = changes({**found.about, "execution": executed}, visit.executed)
        source: Any = self._sources.of(max(saved.call, 0))
        if source.inexact:
            reasons.append(source.inexact)
        code = changed_code(self._facts.get("code", {}), code_of(self._task))
        reasons += [code] if code else []
        overridden = self._facts.get("overridden", [])
        reasons += [f"the run was resumed with another configuration: {x}" for x in overridden]
        if not reasons:
            reasons.append(
                "a hook, or the script's own code between the steps, changed something: pass the "
                "run's hooks as hooks=[…]"
            )
        return tuple(reasons)


def _options(facts: Mapping[str, Any]) -> Options:
    """Return the run's execution options; with "measure", those that the measurement chose."""
    recorded = {k: v for k, v in facts.get("options", {}).items() if k in Options.__slots__}
    options, executed = Options(**recorded), facts.get("execution")
    options = as_recorded(options, recorded, executed)
    if options.execution != "measure" or executed is None:
        return options
    if not executed["compiler"]:
        return replace(options, execution="eager")
    fused, jit = executed["fused"], executed["compiler"] == XLA
    return replace(options, execution="compiled", fused=fused, jit=jit)
