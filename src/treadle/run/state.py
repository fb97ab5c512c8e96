"""The complete state of a run: what a checkpoint holds, and its encoding.

Saving, resuming, rolling back and replaying write a `RunState` or restore one. `Run.capture`
collects it. A new field needs a line in `RunState`, with a default, in `_fields`, in the exceptions
of `_loop`, since older checkpoints lack it, in `Run.capture`, and where it is restored:
`Run.restore_progress`, `Run._restore_end` for a finished run, or `Resume.restore`.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, cast

from ..checkpoint import SavedState
from ..checkpoint.batch_forms import MissingClassError, zeros
from ..core import schema
from ..core.directory import EXECUTION, PROGRESS
from ..core.progress import Progress


def _sum(value: Any, name: str) -> None:
    """Check that a value is a sum and a weight."""
    parts = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    if len(parts) != 2 or not all(type(part) in (int, float) for part in parts):
        raise ValueError(f"{name} is {schema.shown(value)}; expected a sum and a weight")


def _validation(value: Any, name: str) -> None:
    """Check that a value is a step and the results of its validation."""
    if not isinstance(value, list | tuple) or len(cast("Sequence[Any]", value)) != 2:
        raise ValueError(f"{name} is {schema.shown(value)}; expected a step and its results")
    step, results = cast("Sequence[Any]", value)
    schema.whole(-1)(step, f"{name}[0]")  # -1 before the first validation
    schema.mapping(schema.number)(results, f"{name}[1]")


def _change(value: Any, name: str) -> None:
    """Check that a value is what a Python value was, and what it is."""
    schema.listed(schema.text)(value, name)
    if len(value) != 2:
        raise ValueError(f"{name} is {schema.shown(value)}; expected an old and a new value")


def _form(value: Any, name: str) -> None:
    """Check that a value is the form of a batch."""
    try:
        with suppress(MissingClassError):  # whoever reads the checkpoint need not have the task
            zeros(value)
    except (TypeError, ValueError) as error:  # TypeError: a list as the key of a dict
        raise ValueError(f"{name}: {error}") from error


_named, _count = schema.mapping(schema.anything), schema.whole()
_sums = schema.mapping(_sum)
_rare_forms = schema.record(
    {
        "compiler": schema.text,
        "as_python": schema.flag,
        "compiled": schema.listed(schema.text),
        "counts": schema.mapping(_count),
        "sizes": schema.mapping(schema.listed(schema.listed(schema.optional(_count)))),
        "agreed": schema.mapping(schema.flag),
    }
)
_fields: Mapping[str, schema.Check] = {
    "execution": schema.optional(EXECUTION),
    "call": schema.whole(-1),
    "begun": PROGRESS,
    "ended_by": schema.optional(schema.text),
    "random": _named,
    "trigger_check": PROGRESS,
    "last_recorded_step": _count,
    "function_calls": _count,
    "validation": schema.optional(_validation),
    "means": schema.record(
        {
            "epoch": _sums,
            "since_last_logs": _sums,
            "metrics": schema.listed(schema.text),
            "returned": schema.mapping(schema.number),
        },
        required=("epoch", "since_last_logs"),
    ),
    "python_values": _named,
    "recompile": schema.mapping(_change),
    "forms": schema.mapping(schema.listed(schema.optional(_form))),
    "weight_checksums": schema.optional(
        schema.record({"checksums": _named, "steps": _count}, required=("checksums", "steps"))
    ),
    "averaging_updates": schema.mapping(_count),
    "compiler": schema.optional(schema.text),
    "compilers": schema.mapping(schema.text),
    "rare_forms": _rare_forms,
    "rare_eval_forms": _rare_forms,
    "stores": schema.listed(_named),
    "epoch_source": schema.optional(
        schema.record(
            {
                "described": _named,
                "began": _count,
                "earlier": schema.listed(schema.optional(_count)),
                "since": _count,
            },
            required=("described", "began", "earlier", "since"),
        )
    ),
}
_loop = schema.record(_fields, required=tuple(_fields.keys() - {"rare_forms", "rare_eval_forms"}))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Everything that a run needs to continue with the same bits, at the end of a window.

    Attributes:
        progress: The progress of the run.
        arrays: Every variable by path; see `SavedState.state`.
        fixed: The paths of variables that no step changes.
        position: The position of the source, if `progress` does not determine it.
        hooks: The state of each hook.
        about: The description of the run and its environment; see `SavedState.about`.
        execution: How the steps are executed, by `Execution.facts`; None before the first step.
        call: The number of the call that trains, from 0; -1 if only `loop.step` was called.
        begun: The progress when that call began.
        ended_by: The reason why the call ended permanently, or None.
        random: The states of the global random generators.
        trigger_check: The progress at which triggers were last checked.
        last_recorded_step: The step of the newest record that is not a user log.
        function_calls: The number of calls of `loop.call`.
        validation: The step and the results of the newest validation, or None.
        means: The sums of the training means.
        python_values: The Python values of the task that changed during the run.
        recompile: How values changed, by path, for which the step was not yet compiled.
        forms: The batch forms for which variables were created, by the name of the step.
        weight_checksums: Checksums of the weights, if none has changed yet.
        averaging_updates: The number of updates of each averaging optimizer when training began.
        compiler: The compiler of the train step for new batch forms; None if there is no choice.
        compilers: The compilers of the train step, by the text of the batch form.
        rare_forms: How often forms of batch came that are not compiled so far; see `RareForms`.
        rare_eval_forms: The same of the evaluation.
        epoch_source: The source of the current epoch; see `EpochSource`.
        stores: The contents of tables and the like that the train step changes, in order.
        path: The folder of the checkpoint that it was read from.
    """

    progress: Progress
    arrays: Mapping[str, Any]
    fixed: frozenset[str] = frozenset()
    position: Mapping[str, Any] | None = None
    hooks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    execution: Mapping[str, Any] | None = None
    call: int
    begun: Progress
    ended_by: str | None
    random: Mapping[str, Any]
    trigger_check: Progress
    last_recorded_step: int
    function_calls: int
    validation: Sequence[Any] | None
    means: Mapping[str, Any]
    python_values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recompile: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    forms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weight_checksums: Mapping[str, Any] | None = None
    averaging_updates: Mapping[str, int] = field(default_factory=dict[str, int])
    compiler: str | None = None
    compilers: Mapping[str, str] = field(default_factory=dict[str, str])
    rare_forms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    rare_eval_forms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    epoch_source: Mapping[str, Any] | None = None
    stores: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    path: Path = field(default_factory=Path, compare=False)

    def checkpoint(self) -> SavedState:
        """Return the state as a checkpoint, in the types that checkpoints store."""
        found = {name: getattr(self, name) for name in _fields}
        return SavedState(
            progress=self.progress,
            state=self.arrays,
            fixed=self.fixed,
            loop={k: asdict(x) if isinstance(x, Progress) else x for k, x in found.items()},
            source=self.position,
            hooks=self.hooks,
            about=self.about,
            path=self.path,
        )

    @classmethod
    def of(cls, found: SavedState) -> "RunState":
        """Return the state that a checkpoint holds.

        Example:
            >>> start = Progress()
            >>> state = RunState(progress=Progress(step=4), arrays={}, call=0, begun=start,
            ...     ended_by=None, random={}, validation=None,
            ...     means={"epoch": {}, "since_last_logs": {}},
            ...     trigger_check=Progress(step=4), last_recorded_step=0, function_calls=0)
            >>> state.checkpoint().loop["trigger_check"]["step"]
            4
            >>> RunState.of(state.checkpoint()) == state
            True

        Raises:
            CheckpointError: If a value is missing, or has another type.
        """
        saved = found.loop
        try:
            _loop(saved, "loop")
        except ValueError as error:
            raise found.damaged(str(error)) from error
        values = {name: saved[name] for name in _fields if name in saved}
        for name in ("begun", "trigger_check"):
            values[name] = Progress(**{n: values[name][n] for n in Progress.__slots__})
        return cls(
            progress=found.progress,
            arrays=found.state,
            fixed=found.fixed,
            position=found.source,
            hooks=found.hooks,
            about=found.about,
            path=found.path,
            **values,
        )
