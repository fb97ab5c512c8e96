"""Reading one run directory into the data of a report.

A directory may come from a stranger: files are read with the checks of their own readers, texts and
counts are limited, and the page shows every value as text (see `page`).
"""

import base64
import json
import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..checkpoint import Checkpoints
from ..checkpoint.run_files import fault_of
from ..core import schema
from ..core.directory import CHECKPOINTS, DOCTOR, HEALTH, LOG, RunFile, flattened, progress_of
from ..core.folder import FILE, Folder
from ..core.logs import Array, values_of
from ..core.progress import Costs
from ..core.terminal import clean
from ..doctor.sheets.sheet import SCHEMA
from ..errors import DirectoryError, TreadleError
from ..hooks.gradient_health import MEASURED, health_lines
from ..hooks.images import FOLDER as IMAGES
from ..hooks.log_file import Log, read
from .curves import reduced, thinned
from .images import MOST_IMAGE_BYTES, is_image, listed_images, read_image
from .states import RunStatus, recorded_run, state_of

MOST_CURVES = 400  # of a run
MOST_EVENTS = 300  # of a run; of more, the first ones
MOST_SETTINGS = 1000
MOST_VALUES = 300  # of the best and the last values, versions and differences of a run
LONGEST_TEXT = 2000  # characters of a message or a setting
LONGEST_NAME = 200
MOST_LAYERS = 300
MOST_CELLS = 20_000  # of a heat map
MEASURES = ("gradient", "ratio", "dead")
_COSTS = {field.name for field in fields(Costs)}
_SHOWN = ("started", "finished", "backend", "precision", "devices", "plan")


def read_run(directory: Path, points: int, image_bytes: int) -> dict[str, Any]:
    """Return the data of a run for the page, in JSON's types.

    A damaged run has the state `unreadable` and a reason, and nothing else.

    Args:
        directory: The run directory.
        points: The largest number of points of a curve.
        image_bytes: The largest size of all embedded images together.
    """
    state = state_of(directory)
    why = _text(state.reason)
    found: dict[str, Any] = {"directory": str(directory), "state": state.state, "why": why}
    if state.state == "unreadable":
        return found
    try:
        return found | _read(directory, state, points, image_bytes)
    except TreadleError as error:
        return found | {"state": "unreadable", "why": clean(error, LONGEST_TEXT)}


def _read(directory: Path, state: RunStatus, points: int, image_bytes: int) -> dict[str, Any]:
    run, _ = recorded_run(directory)
    with Folder.open(directory) as folder:
        log = read(directory / LOG) if folder.kind(LOG) is not None else Log()
        images, left_out, faults = _images(folder, log, image_bytes, run["id"])
        (findings, facts, fault), health = _doctor(folder), read_health(folder)
        faults = [(0, fault), *faults] if fault else faults
        listed = run.get("files", {}).get(HEALTH)
        if listed and (fault := fault_of(folder, HEALTH, listed)):
            health, faults = None, [(0, f"the health of layers is left out: {fault}"), *faults]
    progress = progress_of(run)
    last = max(state.step, log.last_step)
    seconds = max([progress.seconds, *(line["seconds"] for line in log.records[-1:])])
    return {
        **_facts(run, state),
        "steps": last,
        "epochs": state.epoch,
        "examples": progress.examples,
        "seconds": seconds,
        "clock": _clock(log, last, seconds),
        "curves": list(islice(_curves(run, log, points), MOST_CURVES)),
        "events": _events(directory, run, log, state, faults)[:MOST_EVENTS],
        "images": images,
        "images_left_out": left_out,
        "findings": findings,
        "sheet": facts,
        "health": health,
        "commands": _commands(directory, state, log, "recipe" in run["configuration"]),
    }


def _facts(run: RunFile, state: RunStatus) -> dict[str, Any]:
    """Return what `run.json` says about the run."""
    configuration = run["configuration"]
    best = {name: {"value": v, "epoch": epoch} for name, (v, epoch) in state.best.items()}
    others = {
        name: value
        for name, value in configuration.items()
        if name not in ("settings", "task", "recipe") and name not in state.settings
    }
    settings = {**flat(state.settings), **flat(others), **_call_facts(run)}
    return {
        "task": _text(configuration.get("task", "")),
        "source": _text(configuration.get("recipe", "")),
        **{name: _text(run.get(name) or "") for name in _SHOWN},
        "versions": {_name(k): _text(v) for k, v in _first(run.get("versions", {}))},
        "best": {_name(name): value for name, value in _first(best)},
        "last": {_name(k): v if math.isfinite(v) else str(v) for k, v in _first(state.last)},
        "costs": {k: v for k, v in run.get("costs", {}).items() if k in _COSTS},
        "settings": dict(list(settings.items())[:MOST_SETTINGS]),
        "overridden": [_text(text) for text in run.get("overridden", [])[:MOST_VALUES]],
    }


def _first(values: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    return islice(values.items(), MOST_VALUES)


def _call_facts(run: RunFile) -> dict[str, str]:
    """Return how long the last call of the loop trains, and on what."""
    calls = run.get("calls", [])
    if not calls:
        return {}
    call, data = calls[-1], calls[-1].get("train") or {}
    found = {f"fit.{name}": call.get(name) for name in ("epochs", "steps", "until")}
    return flat(found | {f"data.{name}": data.get(name) for name in ("examples", "fingerprint")})


def flat(values: Mapping[str, Any]) -> dict[str, str]:
    """Return nested settings by dotted name, as texts."""
    return {
        _name(name): _text(value if isinstance(value, str) else json.dumps(value, default=str))
        for name, value in flattened(values).items()
        if value is not None
    }


def _clock(log: Log, last: int, seconds: float) -> dict[str, list[float]]:
    """Return seconds and finished epochs at some steps, between which the page interpolates."""
    rows: dict[int, tuple[float, float | None]] = {0: (0.0, 0.0)}
    for line in log.records:
        epoch = float(line["epoch"]) if line["kind"] == "epoch" else None
        before = rows.get(line["step"], (0.0, None))[1]
        rows[line["step"]] = (line["seconds"], before if epoch is None else epoch)
    if last not in rows and seconds:
        rows[last] = (seconds, None)
    steps = sorted(rows)
    clock = [rows[step][0] for step in steps]
    epochs = [(step, rows[step][1]) for step in steps if rows[step][1] is not None]
    kept = thinned(len(steps))
    return {
        "steps": [steps[i] for i in kept],
        "seconds": [round(clock[i], 3) for i in kept],
        "epoch_steps": [epochs[i][0] for i in thinned(len(epochs))],
        "epochs": [float(epochs[i][1] or 0.0) for i in thinned(len(epochs))],
    }


def _curves(run: RunFile, log: Log, points: int) -> Iterator[dict[str, Any]]:
    yield from _step_curves(log, points)
    yield from _rate_curves(run, log)
    yield from _record_curves(log, points)


def _step_curves(log: Log, points: int) -> Iterator[dict[str, Any]]:
    """Yield the values that steps returned."""
    if not log.parts:
        return
    steps = log.steps
    for name in log.names:
        values, weights = log.column(name, steps)
        logged = weights > 0
        curve = reduced(steps[logged], values[logged], points)
        yield {"name": _name(name), "kind": "steps", **curve}


def _rate_curves(run: RunFile, log: Log) -> Iterator[dict[str, Any]]:
    """Yield the learning rates at epochs and validations, unless the run logged such a value."""
    if any(name.rpartition("/")[2] == "learning_rate" for name in log.names):
        return
    found = run.get("learning_rates", {})
    steps, rates = np.array(found.get("steps", ())), found.get("rates", {})
    for path, values in rates.items():
        name = "learning rate" if len(rates) == 1 else f"learning rate of {path}"
        numbers = np.array([np.nan if v is None else v for v in values], np.float64)
        yield {"name": _name(name), "kind": "rate", **reduced(steps, numbers)}


def _record_curves(log: Log, points: int) -> Iterator[dict[str, Any]]:
    """Yield the values of epochs and validations, and the logged numbers, and the throughput."""
    by_epoch = any(line["kind"] == "epoch" for line in log.records)
    found: dict[tuple[str, str], dict[int, float]] = {}
    for line in log.records:
        kind = "log" if line["kind"] == "log" else "epochs"
        for name, value in values_of(line).items():
            if isinstance(value, str):
                continue
            # A validation within an epoch records the means of the unfinished epoch.
            partial = (
                by_epoch
                and line["kind"] in ("validation", "partial")
                and not name.startswith("val_")
            )
            if not partial:
                found.setdefault((kind, name), {})[line["step"]] = float(value)
    for (kind, name), values in found.items():
        steps = sorted(values)
        numbers = np.array([values[step] for step in steps])
        yield {"name": _name(name), "kind": kind, **reduced(np.array(steps), numbers, points)}
    steps, rates = _throughput(log)
    if len(steps):
        yield {"name": "steps per second", "kind": "rate", **reduced(steps, rates, points)}


def _throughput(log: Log) -> tuple[Array, Array]:
    """Return steps per second between records, including validation, checkpoints and hooks."""
    ends = {line["step"]: line["seconds"] for line in log.records if line["kind"] != "log"}
    steps = np.array([0, *sorted(ends)], np.int64)
    seconds = np.array([0.0, *(ends[step] for step in sorted(ends))])
    lengths, counts = np.diff(seconds), np.diff(steps)
    kept = (lengths > 0) & (counts > 0)
    return steps[1:][kept], counts[kept] / lengths[kept]


def _events(
    directory: Path, run: RunFile, log: Log, state: RunStatus, faults: Sequence[tuple[int, str]]
) -> list[dict[str, Any]]:
    """Return what happened at steps: messages, checkpoints, excluded batches, faults, the end."""
    found: list[dict[str, Any]] = []

    def add(step: int, kind: str, text: str) -> None:
        found.append({"step": step, "kind": kind, "text": _text(text)})

    for line in log.records:
        for name, value in values_of(line).items():
            if isinstance(value, str) and not is_image(value):
                kind = "warning" if name == "warning" else "note"
                text = value if name in ("warning", "note") else f"{name}: {value}"
                add(line["step"], kind, text)
    for step in Checkpoints(directory / CHECKPOINTS).steps():
        add(step, "checkpoint", "checkpoint")
    for excluded in run.get("passed_over", []):
        where = f"epoch {excluded['epoch'] + 1}, batch {excluded['batch'] + 1}"
        text = f"rolled back, and excluded the batch of {where}: {excluded['why']}"
        add(excluded["step"] + 1, "rollback", text)
    for resumed in run.get("resumed", []):
        add(resumed["step"], "resume", f"resumed at {resumed['at']}")
    for step, fault in faults:
        add(step, "warning", fault)
    for name, step in _first_nonfinite(log).items():
        add(step, "warning", f"{name} is not finite for the first time")
    if state.state in ("failed", "interrupted"):
        add(state.step, "end", f"{state.state}: {state.reason}" if state.reason else state.state)
    elif state.reason:
        add(state.step, "end", state.reason)
    order = ("end", "warning", "rollback", "resume", "note", "checkpoint")
    # Of too many, messages are more useful than checkpoints.
    found.sort(key=lambda event: order.index(event["kind"]))
    return sorted(found[:MOST_EVENTS], key=lambda event: event["step"])


def _first_nonfinite(log: Log) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in log.parts:
        for name, values in part.values.items():
            if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
                step = int(part.steps[int(np.argmin(finite))])
                found[name] = min(step, found.get(name, step))
    return found


def _images(
    folder: Folder, log: Log, most_bytes: int, run: str
) -> tuple[list[dict[str, Any]], int, list[tuple[int, str]]]:
    """Return the logged images, the number of those that are left out, and what is wrong with some.

    If they are too large together, those of steps in between are left out.

    Args:
        folder: The run directory.
        log: The log.
        most_bytes: The largest size of all images together.
        run: The identifier of the run.
    """
    listed = listed_images(log.records)
    faults: list[tuple[int, str]] = []
    if not listed:
        return [], 0, []
    if not folder.is_folder(IMAGES):
        found_kind = folder.kind(IMAGES) or "none"
        fault = f"{folder.path / IMAGES}: expected a folder, but found {found_kind}"
        return [], len(listed), [(listed[0][1], fault)]
    names = list(dict.fromkeys(name for name, _, _ in listed))
    found: list[dict[str, Any]] = []
    left = most_bytes
    with folder.subfolder(IMAGES) as images:
        for name in names:
            of_name = [(step, file) for other, step, file in listed if other == name]
            sizes = [images.size(file) or 0 for _, file in of_name]
            fits = most_bytes // len(names) // max(1, *sizes)
            for index in thinned(len(of_name), max(1, fits)):
                step, file = of_name[index]
                if sizes[index] > min(MOST_IMAGE_BYTES, left):
                    continue
                left -= sizes[index]
                try:
                    data = read_image(images, file, run)
                except DirectoryError as error:
                    faults.append((step, str(error)))
                    continue
                source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
                found.append({"name": _name(name), "step": step, "source": source})
    return found, len(listed) - len(found), faults


_PARTS = ("code", "where", "seen", "why", "fix", "line")
_FACTS = ("group", "subject", "text", "mark")
_finding = schema.record(dict.fromkeys(_PARTS, schema.text), required=("code", "seen"))
_fact = schema.complete(dict.fromkeys(_FACTS, schema.text))
_sheet = schema.complete({"findings": schema.listed(_finding), "lines": schema.listed(_fact)})


def _doctor(folder: Folder) -> tuple[list[dict[str, str]] | None, list[list[str]], str]:
    """Return findings and facts of `treadle doctor --json`, if its output is in the directory.

    Returns:
        Findings, facts, and why the file was not read; empty if it was, or if there is none.
    """
    if folder.kind(DOCTOR) != FILE:
        return None, [], ""
    try:
        sheet = schema.parse(folder.read(DOCTOR, 8 << 20), 100_000)
        version = sheet.get("schema") if isinstance(sheet, dict) else None
        if version != SCHEMA:
            found = "no schema" if version is None else f"schema {schema.shown(version)}"
            raise ValueError(f"it has {found}, and this version of Treadle reads schema {SCHEMA}")
        _sheet(sheet, "")
    except ValueError as error:
        fault = (
            f"{DOCTOR} was not read, because it is not what treadle doctor --json of this version "
            f"writes: {error}. Remove it, or write it again"
        )
        return None, [], fault
    findings = [
        {key: _text(one[key]) for key in _PARTS if key in one}
        for one in sheet["findings"][:MOST_EVENTS]
    ]
    facts = [[_text(one[key]) for key in _FACTS] for one in sheet["lines"][:MOST_EVENTS]]
    return findings, facts, ""


def _commands(
    directory: Path, state: RunStatus, log: Log, is_of_command: bool
) -> list[dict[str, str]]:
    """Return the commands that resume, evaluate and inspect a run: of a command, or of a script."""
    folder = clean(directory, LONGEST_TEXT)
    path, found = shlex.quote(folder), dict[str, str]()
    step = min(_first_nonfinite(log).values(), default=state.step)
    if state.state in ("interrupted", "failed"):
        again = "start the same script again"
        found["resume"] = f"treadle resume {path}" if is_of_command else again
    elif is_of_command and state.state == "finished" and state.epoch:
        found["train for longer"] = f"treadle resume {path} --epochs {2 * state.epoch}"
    if step:
        in_python = f"print(treadle.doctor.replay(task, train, {folder!r}, step={step}))"
        replay = f"treadle replay {path} --step {step}" if is_of_command else in_python
        found[f"run step {step} again"] = replay
    if is_of_command:
        found["evaluate"] = f"treadle evaluate {path}"
    return [{"what": what, "command": command} for what, command in found.items()]


def _text(value: object) -> str:
    return clean(value, LONGEST_TEXT, lines=True)


def _name(value: str) -> str:
    return clean(value, LONGEST_NAME)


def read_health(folder: Folder) -> dict[str, Any] | None:
    """Return the health of each layer at the measured steps, in JSON's types.

    Lines that are incomplete or invalid are left out, such as the last one of a killed process.

    Returns:
        The layers in the order of the forward pass, the steps, for each measure a list by step of
        a list by layer, the verdicts, and notes; None if the run has no such file.
    """
    if folder.kind(HEALTH) != FILE:
        return None
    layers: list[dict[str, Any]] = []
    columns: dict[int, dict[str, Mapping[str, float | None]]] = {}
    verdicts: list[dict[str, Any]] = []
    notes: dict[str, None] = {}
    for line in health_lines(folder):
        if line["kind"] == "layers":
            layers = line["layers"][:MOST_LAYERS]
            notes |= dict.fromkeys(clean(note, 500) for note in line.get("notes", ()))
        elif line["kind"] == "verdict":
            named = [clean(path, 200) for path in line["layers"][:20]]
            text = clean(line["text"], 2000)
            verdicts.append({"step": line["step"], "kind": clean(line["verdict"], 40)})
            verdicts[-1] |= {"layers": named, "text": text}
        else:
            columns[line["step"]] = _column(line, [layer["path"] for layer in layers])
    if not layers or not columns:
        return None
    steps = sorted(columns)
    steps = [steps[i] for i in thinned(len(steps), max(20, MOST_CELLS // len(layers)))]
    paths = [layer["path"] for layer in layers]
    return {
        "layers": [
            {"path": clean(layer["path"], 200), "class": clean(layer.get("class", ""), 80)}
            for layer in layers
        ],
        "steps": steps,
        **{
            measure: [[columns[step][measure].get(path) for path in paths] for step in steps]
            for measure in MEASURES
        },
        "verdicts": verdicts[:200],
        "notes": list(notes)[:20],
    }


def _column(line: Mapping[str, Any], paths: list[str]) -> dict[str, Mapping[str, float | None]]:
    """Return the measures of a step by the path of the layer."""
    lists = {name: dict(zip(paths, map(_number, line[name]), strict=False)) for name in MEASURED}
    ratio: dict[str, float | None] = {}
    for path, update in lists["update"].items():
        weight = lists["weight"].get(path)
        if update is not None and weight:
            ratio[path] = _rounded(update / weight)
    return {"gradient": lists["gradient"], "ratio": ratio, "dead": lists["dead"]}


def _number(value: Any) -> float | None:
    """Return a finite number of at least 0; 1e300 for NaN and infinity, which are no less bad."""
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return 1e300
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return _rounded(abs(value))
    return None


def _rounded(value: float) -> float:
    return float(f"{min(value, 1e300):.4g}")
