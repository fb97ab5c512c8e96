"""Reading the health of layers that the hook `GradientHealth` records, as rows of heat maps."""

import math
from collections.abc import Mapping
from typing import Any

from ..core.directory import HEALTH
from ..core.folder import FILE, Folder
from ..core.terminal import clean
from ..hooks.gradient_health import MEASURED, health_lines
from .curves import thinned

MOST_LAYERS = 300
MOST_CELLS = 20_000  # of a heat map
MEASURES = ("gradient", "ratio", "dead")


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
