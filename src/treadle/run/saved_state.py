"""The state of the loop that checkpoints store, and its encoding."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from ..checkpoint import Checkpoint
from ..checkpoint.batch_forms import MissingClassError, zeros
from ..core import schema
from ..core.progress import Progress
from ..core.run_file import PROGRESS


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
_fields: Mapping[str, schema.Check] = {
    "call": schema.whole(-1),
    "begun": PROGRESS,
    "reason": schema.optional(schema.text),
    "random": _named,
    "trigger_check": PROGRESS,
    "last_recorded_step": _count,
    "function_calls": _count,
    "validation": schema.optional(_validation),
    "means": schema.record(
        {"epoch": _sums, "look": _sums, "metrics": schema.listed(schema.text)},
        required=("epoch", "look"),
    ),
    "constants": _named,
    "recompile": schema.mapping(_change),
    "forms": schema.mapping(schema.listed(schema.optional(_form))),
    "weights": schema.optional(
        schema.record({"checksums": _named, "steps": _count}, required=("checksums", "steps"))
    ),
    "averages": schema.mapping(_count),
    "compiler": schema.optional(schema.text),
    "compilers": schema.mapping(schema.text),
    "stores": schema.listed(_named),
    "source": schema.optional(
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
_loop = schema.record(_fields, required=tuple(_fields))


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """What a loop needs to resume, besides variables, the data position and the state of hooks.

    Attributes:
        call: The number of the call that trains, from 0; -1 if only `loop.step` was called.
        begun: The progress when that call began.
        reason: The reason why the call ended permanently, or None.
        random: The states of the global random generators.
        trigger_check: The progress at which triggers were last checked.
        last_recorded_step: The step of the newest record that is not a user log.
        function_calls: The number of calls of `loop.call`.
        validation: The step and the results of the newest validation, or None.
        means: The sums of the training means.
        constants: The Python values of the task that changed during the run.
        recompile: How values changed, by path, for which the step was not yet compiled.
        forms: The batch forms for which variables were created, by the name of the step.
        weights: Checksums of the weights, if none has changed yet.
        averages: The number of updates of each averaging optimizer when training began.
        compiler: The compiler of the train step for new batch forms; None if there is no choice.
        compilers: The compilers of the train step, by the text of the batch form.
        source: The source of the current epoch; see `EpochSource`.
        stores: The contents of tables and the like that the train step changes, in order.
    """

    call: int
    begun: Progress
    reason: str | None
    random: Mapping[str, Any]
    trigger_check: Progress
    last_recorded_step: int
    function_calls: int
    validation: Sequence[Any] | None
    means: Mapping[str, Any]
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])
    recompile: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    forms: Mapping[str, Any] = field(default_factory=dict[str, Any])
    weights: Mapping[str, Any] | None = None
    averages: Mapping[str, int] = field(default_factory=dict[str, int])
    compiler: str | None = None
    compilers: Mapping[str, str] = field(default_factory=dict[str, str])
    source: Mapping[str, Any] | None = None
    stores: Sequence[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])

    def encode(self) -> dict[str, Any]:
        """Return the state in the types that checkpoints store."""
        found = {name: getattr(self, name) for name in _fields}
        return {
            key: asdict(value) if isinstance(value, Progress) else value
            for key, value in found.items()
        }

    @classmethod
    def decode(cls, found: Checkpoint) -> "LoopState":
        """Return the state that a checkpoint stores.

        Example:
            >>> start = Progress()
            >>> state = LoopState(call=0, begun=start, reason=None, random={}, validation=None,
            ...     means={"epoch": {}, "look": {}}, trigger_check=Progress(step=4),
            ...     last_recorded_step=0, function_calls=0)
            >>> state.encode()["trigger_check"]["step"]
            4
            >>> LoopState.decode(Checkpoint(start, {}, loop=state.encode())) == state
            True

        Raises:
            CheckpointError: If a value is missing, or has another type.
        """
        saved = found.loop
        try:
            _loop(saved, "loop")
        except ValueError as error:
            raise found.damaged(str(error)) from error
        values = {name: saved[name] for name in _fields}
        for name in ("begun", "trigger_check"):
            values[name] = Progress(**{n: values[name][n] for n in Progress.__slots__})
        return cls(**values)
