"""The files of a run directory, and the record of the run in `run.json`. Imports no framework.

The record may come from another version or another user, or be damaged. What is read here has the
declared types and lies within bounds; nothing in it is a reason to run code.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Required, TypedDict, cast

from ..errors import DirectoryError
from . import schema
from .folder import Folder
from .progress import Progress

RUN = "run.json"
LOG = "log.jsonl"
HEALTH = "health.jsonl"
STATE = "state.safetensors"
CHECKPOINTS = "checkpoints"
MODEL = ".keras"  # the suffix of models, after the name of an attribute of the task
DOCTOR = "doctor.json"  # of `treadle run --preflight`, or what `treadle doctor --json` printed

MOST_BYTES = 64 << 20
MOST_VALUES = 2_000_000
MOST_STEPS = 10**12  # more than a process can train in a century, also of epochs
MOST_SEED = (1 << 32) - 1  # NumPy accepts no larger seed
MOST_DEVICES = 1 << 16  # a command divides a CPU into as many as a record demands
FORMAT = 1
# What a run needs to resume; checkpoints hold a copy. They are saved before the run ends, so how it
# ended is left out.
RESUMED = (
    *("format", "configuration", "code", "calls", "backend", "precision", "seed", "options"),
    *("plan", "execution", "versions", "started", "overridden", "passed_over"),
)
# What says that a run is finished.
OF_THE_END = ("finished", "files", "checkpoint")
LONGEST_COPY = 1 << 20  # bytes; each checkpoint holds one, in a file of at most 8 MiB


class LostRecordError(DirectoryError):
    """`run.json` is missing or damaged. A checkpoint may hold a copy of the record.

    Attributes:
        fault: What is wrong with the file, as a clause.
        missing: Whether there is no such file.
    """

    def __init__(self, message: str, fault: str, missing: bool = False) -> None:
        super().__init__(message)
        self.fault, self.missing = fault, missing


class UnknownRecordError(ValueError):
    """The file is valid, but this version of Treadle does not support its format."""


class Excluded(TypedDict):
    """A batch that a rollback excluded: its position, the previous step, and the reason."""

    epoch: int
    batch: int
    step: int
    why: str


class ResumeEntry(TypedDict):
    """When a process resumed the run: the step from which, and the time."""

    step: int
    at: str


class RunFile(TypedDict, total=False):
    """The content of `run.json`. Everything but `configuration`, `id` and `sha256` may be missing.

    Attributes:
        format: The version of the format.
        id: The random identifier of the run, which its checkpoints and images hold too.
        configuration: The settings that identify the run.
        code: Short hashes of the user's code by qualified name.
        calls: The arguments of each call of the loop.
        backend: The name of the backend.
        precision: The name of the precision.
        seed: The seed.
        devices: The devices that steps run on.
        launcher: What started the processes, such as Ray Train; missing if nothing is known.
        options: The execution options.
        plan: How steps are executed, as a sentence for people.
        execution: How steps are executed, as fields.
        versions: The versions of packages.
        started: The time of the first step.
        finished: The time when the run was finished; None before.
        reason: The reason why the last call ended.
        error: The error that ended the run, or None.
        progress: The progress at the end.
        costs: The time spent on other things than training, of all processes that ended.
        learning_rates: Some steps, and the learning rate of each optimizer at them, by its path.
        resumed: When other processes resumed the run.
        overridden: Differences of configurations that an override allowed.
        switched_off: What the installed versions lack, and what is lost by that.
        passed_over: The batches that rollbacks excluded.
        files: The size and the SHA-256 of each final file of a finished run; None for a file that
            the run did not write.
        checkpoint: The SHA-256 of the manifest of the newest checkpoint of a finished run.
        sha256: The SHA-256 of everything else, see `encode_record`.
    """

    format: int
    id: Required[str]
    configuration: Required[dict[str, Any]]
    code: dict[str, str]
    calls: list[dict[str, Any]]
    backend: str
    precision: str
    seed: int
    devices: str
    launcher: str
    options: dict[str, Any]
    plan: str
    execution: dict[str, Any] | None
    versions: dict[str, str]
    started: str
    finished: str | None
    reason: str | None
    error: str | None
    progress: dict[str, Any]
    costs: dict[str, Any]
    resumed: list[ResumeEntry]
    learning_rates: dict[str, Any]
    overridden: list[str]
    switched_off: list[str]
    passed_over: list[Excluded]
    files: dict[str, Any]
    checkpoint: str | None
    sha256: str


def _path(value: Any, name: str) -> None:
    schema.text(value, name)
    if "\0" in value or len(value) > 4096 or not value:
        raise ValueError(f"{name} is {schema.shown(value)}; expected a path")


def _format(value: Any, name: str) -> None:
    if value != FORMAT:
        raise UnknownRecordError(
            f"its format is {schema.shown(value)}, and this version of Treadle reads format "
            f"{FORMAT}: use the version that wrote it"
        )


_steps, _text, _texts = schema.whole(0, MOST_STEPS), schema.text, schema.mapping(schema.text)
_amount, _optional = schema.amount, schema.optional
_how_long = {
    "epochs": _optional(schema.whole(1, schema.MOST)),
    "steps": _optional(schema.whole(1, schema.MOST)),
    "until": _optional(_text),
}
PROGRESS = schema.complete(
    {"step": _steps, "epoch": _steps, "batch": _steps, "examples": schema.whole()}
    | {"seconds": _amount}
)
# How steps were executed, which decides their bits; see `backends.plans.Execution`.
EXECUTION = schema.complete(
    {"compiler": _text, "fused": schema.flag, "resident": schema.flag, "shards": schema.whole(1)}
)
# Of a run of a command. A script may add settings of any names and types.
_of_command = schema.record(
    {
        "task": _text,
        "recipe": _path,
        "settings": schema.mapping(schema.anything),
        "epochs": _optional(schema.whole(1, MOST_STEPS)),
        "steps": _optional(schema.whole(1, MOST_STEPS)),
        "until": _optional(_text),
        "seed": schema.whole(0, MOST_SEED),
        "backend": _text,
        "precision": _text,
        "execution": _text,
        "deterministic": schema.flag,
        "devices": schema.whole(1, MOST_DEVICES),
        "compiler": _text,
        "data_dir": _optional(_path),
        "weights_from": _optional(_path),
    },
    required=("settings", "seed", "backend", "precision", "execution"),
)
_span = schema.record(
    {"amount": _amount, "of": _text, "epochs": _optional(schema.listed(_steps)), "first": _steps},
    required=("amount", "of"),
)
_call = schema.record(
    _how_long | {"train": _optional(schema.mapping(schema.anything)), "validate_every": _span}
)
_excluded = schema.complete({"epoch": _steps, "batch": _steps, "step": _steps, "why": _text})
_rates = schema.record(
    {"steps": schema.listed(_steps), "rates": schema.mapping(schema.listed(_optional(_amount)))}
)


def learning_rates(value: Any, name: str) -> None:
    """Check that a value holds steps, and a learning rate of each optimizer for each of them."""
    _rates(value, name)
    count = len(value.get("steps", ()))
    for path, rates in value.get("rates", {}).items():
        if len(rates) != count:
            raise ValueError(f"{name}.rates.{path} has {len(rates)} values for {count} steps")


_file = schema.complete({"size": schema.whole(), "sha256": schema.text})
_resume = schema.complete({"step": _steps, "at": _text})
_options = schema.record(
    {
        "execution": _text,
        "compiler": _text,
        "window": _optional(schema.whole(1)),
        **dict.fromkeys(("fused", "jit", "data_on_device"), _optional(schema.flag)),
        **dict.fromkeys(("preflight", "checked", "skip_nonfinite"), schema.flag),
    }
)
_run = schema.record(
    {
        "format": _format,
        **dict.fromkeys(("id", "sha256"), _text),
        "configuration": schema.mapping(schema.anything),
        "code": _texts,
        "calls": schema.listed(_call),
        "backend": _text,
        "precision": _text,
        "seed": schema.whole(0, MOST_SEED),
        "devices": _text,
        "launcher": _text,
        "options": _options,
        "plan": _text,
        "execution": schema.optional(EXECUTION),
        "versions": _texts,
        "started": _optional(_text),
        "finished": _optional(_text),
        "reason": _optional(_text),
        "error": _optional(_text),
        "progress": PROGRESS,
        "costs": schema.mapping(_amount),
        "learning_rates": learning_rates,
        "resumed": schema.listed(_resume),
        "overridden": schema.listed(_text),
        "switched_off": schema.listed(_text),
        "passed_over": schema.listed(_excluded),
        "files": schema.mapping(_optional(_file)),
        "checkpoint": _optional(_text),
    },
    required=("configuration",),
)


def decode_record(data: bytes) -> RunFile:
    """Return the content of `run.json` after checking it.

    Raises:
        ValueError: If it is not JSON, or a value has another type or is out of bounds.

    Example:
        >>> found = decode_record(encode_record({"id": "0a", "configuration": {"backend": "jax"}}))
        >>> found["configuration"]
        {'backend': 'jax'}
    """
    found = schema.parse(data, MOST_VALUES)
    check_record(found)
    for name in ("id", "sha256"):
        if name not in found:
            raise ValueError(f"{name} is missing")
    if found["sha256"] != _sha256(found):
        raise ValueError("its SHA-256 is not the one in it")
    return found


def encode_record(run: Mapping[str, Any]) -> bytes:
    """Return the text of `run.json`, with the SHA-256 of its content.

    Example:
        >>> found = decode_record(encode_record({"id": "0a", "configuration": {"seed": 3}}))
        >>> found["configuration"]
        {'seed': 3}
    """
    content = json.loads(json.dumps(run, default=str))  # as it is read again
    content["sha256"] = _sha256(content)
    return (json.dumps(content, indent=2) + "\n").encode()


def _sha256(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record without the one in it, whatever its white space is."""
    text = json.dumps({name: value for name, value in content.items() if name != "sha256"})
    return hashlib.sha256(text.encode()).hexdigest()


def check_record(found: Any) -> None:
    """Check a parsed `run.json`, or its copy in a checkpoint.

    Raises:
        ValueError: If a value has another type or is out of bounds.
    """
    _run(found, "")
    run = cast(RunFile, found)
    if "recipe" in run["configuration"]:
        _of_command(run["configuration"], "configuration")
    for name in ("progress", "files"):
        if run.get("finished") and name not in run:
            raise ValueError(f"{name} is missing, although the run is finished")


def copy_of(run: RunFile) -> dict[str, Any]:
    """Return the part of a record that the run needs to resume, to be kept in checkpoints.

    Empty if it is longer than `LONGEST_COPY`.

    Example:
        >>> copy_of({"configuration": {"seed": 3}, "finished": "2026-01-01"})
        {'configuration': {'seed': 3}}
    """
    kept = {name: run[name] for name in RESUMED if name in run}
    text = json.dumps(kept, default=str)
    return json.loads(text) if len(text) <= LONGEST_COPY else {}


def progress_of(run: RunFile) -> Progress:
    """Return the progress at the end of the recorded run; that of step 0 if none is recorded."""
    found = run.get("progress", {})
    return Progress(**{name: found[name] for name in Progress.__slots__ if name in found})


def flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted name.

    Example:
        >>> flattened({"task": "Line", "settings": {"units": 4}})
        {'task': 'Line', 'settings.units': 4}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def read_run(path: Path) -> RunFile:
    """Return the checked content of a run directory's `run.json`.

    Raises:
        LostRecordError: The file is missing or damaged.
        DirectoryError: There is no such directory, the file is not a regular file, or another
            version of Treadle wrote it.
    """
    if not path.is_dir():
        raise DirectoryError(f"{path} holds no run: there is no such folder")
    with Folder.open(path) as folder:
        if folder.kind(RUN) is None:
            raise LostRecordError(
                f"{path} holds no run: there is no {RUN} in it", "is missing", missing=True
            )
        data = folder.read(RUN, MOST_BYTES)
    try:
        return decode_record(data)
    except ValueError as error:
        message = f"{path / RUN} is damaged, or is not the record of a run: {error}"
        message = f"{message}. Restore a copy of it"
        if isinstance(error, UnknownRecordError):
            raise DirectoryError(message) from error
        raise LostRecordError(message, f"is damaged ({error})") from error


def why_unfinished(record: RunFile) -> str:
    """Return in brackets the error that ended an unfinished run; empty if none was recorded.

    Example:
        >>> why_unfinished({"configuration": {}, "error": "KeyboardInterrupt",
        ...     "progress": {"step": 12}})
        ' (KeyboardInterrupt after step 12)'
    """
    error = record.get("error")
    return f" ({error} after step {progress_of(record).step})" if error else ""


def canonical(value: Any) -> str:
    """Return a value of JSON types as a text that is equal for equal values, also for NaN.

    Example:
        >>> canonical({"b": float("nan"), "a": 1}) == canonical({"a": 1, "b": float("nan")})
        True
    """
    return json.dumps(value, sort_keys=True, default=str)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describe the values in which two configurations differ."""
    found: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")  # type: ignore[arg-type]
        elif before != after and canonical(before) != canonical(after):  # NaN differs from itself
            found.append(f"{prefix}{key} was {before!r}, now {after!r}")
    return found


def in_both(found: Any, other: Any) -> Any:
    """Return the part of a description that another description has too, under the same names."""
    if not isinstance(found, dict) or not isinstance(other, dict):
        return found
    return {name: in_both(part, other[name]) for name, part in found.items() if name in other}


def joined(recorded: Any, now: Any) -> Any:
    """Return a description with what another one says under further names."""
    if not isinstance(recorded, dict) or not isinstance(now, dict):
        return now
    both = {name: joined(recorded[name], part) for name, part in now.items() if name in recorded}
    return {**recorded, **now, **both}
