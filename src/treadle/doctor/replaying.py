"""Visiting a step of a past run: `replay`, and finding the step where something begins."""

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from ..backends.base import active
from ..checkpoint import Checkpoint
from ..core.directory import differences
from ..core.hook import Hook
from ..core.identity import changed_code, code_of, identity
from ..core.logs import LOSS_SCALE, UNDONE
from ..core.options import Options
from ..core.tracebacks import shortened
from ..core.triggers import Scheduled
from ..errors import ConfigurationError, DirectoryError, whole_number
from ..hooks.lines import OWN
from ..run.resume import circumstances
from ..steps.saved_constants import SavedConstants
from ..steps.state import State
from .conditions import Condition, parse
from .findings import Agreement, Replay, arrays_of, batch_numbers, eager_distance, variables_of
from .looking import look_into
from .numbers import Numbers
from .origin import Origin
from .recorded import Recorded
from .visiting import Moment, Sources, Visit


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
    """Go back to a step of a past run, and look at everything that it computed.

    From the newest checkpoint before it, the steps are run again as they were, compiled, and their
    values compared with the log. The step itself then runs once more uncompiled, with every
    activation and gradient kept. The run's directory is only read.

    Args:
        task: The task, made as for the run, after the same `treadle.setup`. It is left as it was
            after the step.
        train: What the run trained on; where several calls of the loop had several sources, a dict
            of them by the number of the call, from 0.
        directory: Of the run.
        step: The number of the step, from 1, as logs have it.
        bisect: A condition instead: the first step is taken after which it holds. `"loss > 5"` or
            `"isnan(loss)"` looks into the log; with the path of a variable, as
            `"norm(model/layers/0/kernel) > 10"`, into checkpoints and then at every step from the
            last one that does not hold it (of a condition that comes and goes, one of its
            beginnings is found).
        validation: What it validated on: only hooks that look at the results need it.
        hooks: The run's own hooks, where they change how it trains. Those of Treadle's that write
            or show are left out; the others have a folder of their own as `loop.directory`.

    Returns:
        What was found; `print` shows it.

    Raises:
        ConfigurationError: Not one of step and condition is given, or one that cannot be.
        DirectoryError: The directory holds no such run or step, or the run of another task or of
            other data.
        CheckpointError: It has no checkpoint that can be read.

    Example:
        report = treadle.doctor.replay(Digits(), train, "runs/digits", step=120)
        print(report)
    """
    if (step is None) == (bisect is None):
        raise ConfigurationError(
            "say which step: either its number, as step=120, or what to look for, as "
            "bisect='loss > 5'"
        )
    with shortened(), TemporaryDirectory() as place:
        run = _Run(task, train, Path(directory), validation, hooks, Path(place))
        if bisect is not None:
            step, found_by = run.first_step(parse(bisect))
        else:
            step, found_by = whole_number("step", step, ConfigurationError), ""
        return run.visit(step, found_by)


class _Run:
    """A past run, and what it takes to make its steps again."""

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
        self._constants = SavedConstants(task)
        self._recorded = past = Recorded(directory)
        self._facts = facts = past.facts
        # A run of the command line has settings of its own there; the rest of both must agree.
        known = {**identity(task), "settings": facts["configuration"].get("settings")}
        if "recipe" not in facts["configuration"]:
            known = identity(task)
        recorded = {name: facts["configuration"].get(name) for name in known}
        found = differences(recorded, _in_json(known))
        if found:
            raise DirectoryError(
                f"{directory} holds the run of another task: {'; '.join(found)}. Make the task as "
                "for the run, after the same treadle.setup, on the same backend"
            )
        self._sources = Sources(train, validation, past.calls, directory)
        self._log, self._last = past.log, past.last
        steps = self._log.values()
        skips = any(UNDONE in line and LOSS_SCALE not in line for line in steps)
        self._options = replace(_options(facts), skip_nonfinite=skips)

    def first_step(self, condition: Condition) -> tuple[int, str]:
        """Return the first step after which a condition holds, and how it was found."""
        self._recorded.check_condition(condition)
        logged = self._recorded.logged_step(condition)
        if logged is not None:
            return logged
        steps = self._recorded.checkpoints.steps()
        index = bisect_left(
            steps, True, lo=1, key=lambda step: condition.holds(self._recorded.before(step).state)
        )
        parts = [(steps[index - 1], steps[index] if index < len(steps) else self._last)]
        if index == len(steps):  # none holds it: if it came and went, that may have been anywhere
            parts.append((steps[0], steps[-1]))
        for begin, end in parts:
            found = self._search(condition, begin, end)
            if found is not None:
                return found
        raise ConfigurationError(
            f"{condition.text!r} holds after none of the {self._last} steps of the run"
        )

    def _search(self, condition: Condition, begin: int, end: int) -> tuple[int, str] | None:
        """Run from a checkpoint up to a step, and look at every one of them."""

        def holds(state: State) -> bool:
            read = active().read
            return condition.holds({n: read(state.variables[n]) for n in condition.names})

        # One further: it may be made so between the end and the step that follows, if one does.
        visit = self._visit(self._recorded.before(begin), min(end + 1, self._last), holds)
        visit.go(self._sources)
        if visit.met is None:
            return None
        between = visit.progress.step < visit.met
        how = "already before it began" if between else "after it"
        return visit.met, f"{condition.text}: the first step is {visit.met}: it holds {how}"

    def visit(self, step: int, found_by: str) -> Replay:
        """Run up to a step, compare, and look into it."""
        self._recorded.check_step(step)
        found = self._recorded.before(step - 1)
        visit = self._visit(found, step)
        visit.go(self._sources)
        moment = visit.moment
        if moment is None:
            raise DirectoryError(
                f"the run came to an end after step {visit.progress.step}, before step {step}: "
                f"{visit.reason or 'the calls of the loop were over'}"
            )
        agreement = self._compared(found, visit)
        look = look_into(self._task, moment, self._options)
        compiled = {name: np.asarray(x) for name, x in visit.values[step].items()}
        distance, where = eager_distance(compiled, visit.after, look)
        batch, variables = batch_numbers(moment), variables_of(moment, look)
        layers = tuple(Numbers.of(path, x) for path, x in look.activations.items())
        meant = frozenset(found.hooks.get("NonFinite", {}).get("meant", ()))
        State.discover(self._task).assign(visit.after)
        rows = moment.rows
        return Replay(
            directory=str(self._directory),
            step=step,
            epoch=moment.progress.epoch + 1,
            batch_number=moment.progress.batch + 1,
            checkpoint=found.progress.step,
            backend=active().name,
            plan=visit.plan,
            found_by=found_by,
            agreement=agreement,
            values=visit.values[step],
            eager_values={name: float(x) for name, x in look.values.items()},
            eager_distance=distance,
            eager_where=where,
            batch=batch,
            rows=None if rows is None else tuple(rows),
            layers=layers,
            kinds=look.layers,
            variables=variables,
            origin=Origin(moment, look, meant, batch, layers, variables).told(),
            notes=_notes(moment, bool(look.gradients)),
            arrays=arrays_of(moment, look),
        )

    def _visit(self, found: Checkpoint, last: int, watch: Any = None) -> Visit:
        task, run, place = self._task, self._directory, self._place
        return Visit(
            task, found, run, place, self._hooks, self._options, self._constants, last, watch
        )

    def _compared(self, found: Checkpoint, visit: Visit) -> Agreement:
        compared, difference = 0, ""
        for step, values in sorted(visit.values.items()):
            line = self._log.get(step, {})
            for name, value in values.items():
                name = f"{name}_" if name in OWN else name
                if name not in line:
                    continue
                compared += 1
                if not difference and repr(line[name]) != repr(value):  # every bit counts
                    difference = (
                        f"{name} of step {step} is {value!r}, and {line[name]!r} in the log"
                    )
        first, last = min(visit.values), max(visit.values)
        reasons = self._reasons(found, visit) if difference else ()
        return Agreement(first, last, compared, difference, reasons)

    def _reasons(self, found: Checkpoint, visit: Visit) -> tuple[str, ...]:
        """Return why steps that were run again may differ from the log."""
        now = {**circumstances(), "plan": visit.plan}
        before = {name: found.about.get(name) for name in now}
        # The plan is not known before the first step.
        before["plan"] = before["plan"] or self._facts.get("plan")
        reasons = differences(before, now)
        source: Any = self._sources.of(max(found.loop["call"], 0))
        if source.inexact:
            reasons.append(source.inexact)
        code = changed_code(self._facts.get("code", {}), code_of(self._task))
        reasons += [code] if code else []
        overridden = self._facts.get("overridden", [])
        reasons += [f"the run went on with another configuration: {x}" for x in overridden]
        if not reasons:
            reasons.append(
                "a hook, or the script's own code between the steps, changed something: pass the "
                "run's hooks as hooks=[…]"
            )
        return tuple(reasons)


def _notes(moment: Moment, differentiated: bool) -> tuple[str, ...]:
    notes: list[str] = []
    if not differentiated:
        notes.append(
            "this step differentiates without treadle.gradients, so its gradients cannot be seen; "
            "updates are"
        )
    if moment.rows is None:
        notes.append("which rows of the data the batch holds is known of arrays only")
    return tuple(notes)


def _options(facts: Mapping[str, Any]) -> Options:
    """Return how the run executed its steps; where that was measured, what was chosen."""
    recorded = {k: v for k, v in facts.get("options", {}).items() if k in Options.__slots__}
    options, plan = Options(**recorded), str(facts.get("plan", ""))
    if options.execution != "measure":
        return options
    if plan.startswith("eager"):
        return replace(options, execution="eager")
    fused, jit = plan.startswith("windows"), ", XLA" in plan
    return replace(options, execution="compiled", fused=fused, jit=jit)


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(values), default=str))
