"""Writing the report: one HTML file with everything in it, which requests nothing from any host.

Names, settings and messages in a run directory may come from a stranger. So all data are JSON in a
block that browsers do not execute, in ASCII and without `<`, `>` and `&`; `report.js` shows every
text as text; and a content security policy allows only the two scripts and the two styles of this
package, by their hashes, and no connection.
"""

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from ..core import structures
from ..core.folder import Folder
from ..core.history import split_name
from ..core.terminal import clean
from ..errors import DirectoryError
from . import states
from .curves import MOST_POINTS
from .reading import read_run

FILE = "report.html"
MOST_RUNS = 50  # of a comparison; of more, those that started last
MOST_CHARTS = 60
MOST_BYTES = 6_000_000
MOST_DATA_BYTES = MOST_BYTES - 200_000  # without styles and scripts
# A point of a curve takes up to 20 bytes: 4 MB in all.
_ALL_POINTS = 200_000
_FEWEST_POINTS = 100
_IMAGE_BYTES = 900_000  # of all runs; base64 makes four bytes of three
_SHORT_TEXT = 100  # characters
_STYLES = ("uPlot.min.css", "report.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "report.js")


def write(directories: str | Path | Iterable[str | Path], path: str | Path | None = None) -> Path:
    """Write a report of one run, or a comparison of several, as one HTML file.

    The file has at most 6 MB and requests nothing from any host. The directories are only read, and
    nothing in them is executed.

    Args:
        directories: Run directories, or folders that hold some.
        path: The file; by default `report.html` in the run directory, or in the folder that holds
            all of them.

    Returns:
        The path of the file.

    Raises:
        DirectoryError: If there is no run, or the file cannot be written.

    Example:
        >>> import treadle
        >>> treadle.report.write("runs/none")
        Traceback (most recent call last):
        treadle.errors.DirectoryError: there is no folder runs/none: name a run directory, or a \
folder that holds some
    """
    roots = [directories] if isinstance(directories, (str, Path)) else list(directories)
    runs = run_directories([Path(root) for root in roots])
    path = default_path(runs) if path is None else Path(path)
    text = rendered(report_data(runs))
    with Folder.open(path.parent, create=True) as folder:
        folder.write(path.name, [text.encode()], len(text))
    return path


def run_directories(roots: Sequence[Path]) -> list[Path]:
    """Return the run directories among some folders and in them.

    Raises:
        DirectoryError: If one of the folders does not exist or holds no run.
    """
    found: list[Path] = []
    for root in roots:
        if not root.is_dir():
            raise DirectoryError(
                f"there is no folder {root}: name a run directory, or a folder that holds some"
            )
        inside = list(states.run_directories(root))
        if not inside:
            raise DirectoryError(
                f"{root} holds no run: name a run directory, or a folder that holds some"
            )
        # A search may be started in the directory of a run, but a run itself is one run.
        found += [root] if root in inside else inside
    if not found:
        raise DirectoryError("no run directory was given: name at least one")
    return list(dict.fromkeys(found))


def default_path(runs: Sequence[Path]) -> Path:
    """Return where the report of some runs is written by default."""
    if len(runs) == 1:
        return runs[0] / FILE
    return Path(os.path.commonpath([str(run.absolute()) for run in runs])) / FILE


def report_data(runs: Sequence[Path]) -> dict[str, Any]:
    """Read some runs into the data of a report, in JSON's types.

    Raises:
        DirectoryError: If the only run cannot be read.
    """
    left_out = 0
    if len(runs) > MOST_RUNS:
        left_out = len(runs) - MOST_RUNS
        known = {run: states.state_of(run).started for run in runs}
        newest = sorted(runs, key=lambda run: known[run])[-MOST_RUNS:]
        runs = [run for run in runs if run in newest]
    read = _read_all(runs)
    if len(read) == 1 and read[0]["state"] == "unreadable":
        raise DirectoryError(read[0]["why"])
    for run, name in zip(read, _labels(runs), strict=True):
        run["name"] = name
    charts = _charts(read)
    _drop_curves(read, charts[:MOST_CHARTS])
    left_out_charts = [chart["title"] for chart in charts[MOST_CHARTS:]]
    data: dict[str, Any] = {
        "title": read[0]["name"] if len(read) == 1 else f"{len(read)} runs",
        "version": metadata.version("treadle"),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": read,
        "runs_left_out": left_out,
        "charts": charts[:MOST_CHARTS],
        "charts_left_out": {"count": len(left_out_charts), "first": left_out_charts[:20]},
        "parts_left_out": [],
    }
    _fit(data)
    return data


# What is left out of a page that is too large, in this order.
_PARTS: dict[str, dict[str, Any]] = {
    "health": {"health": None},
    "images": {"images": []},
    "findings": {"findings": None, "sheet": []},
    "events": {"events": []},
    "settings": {"settings": {}},
    "overridden": {"overridden": []},
    "versions": {"versions": {}},
    "curves": {"curves": []},
    "values": {"best": {}, "last": {}},
    "times": {"clock": {"steps": [], "seconds": [], "epoch_steps": [], "epochs": []}},
}


def _fit(data: dict[str, Any]) -> None:
    """Leave out parts of extreme runs until the page is within its limit.

    If the page is still too large, the remaining texts, whose number is limited, are shortened.
    """
    for part, nothing in _PARTS.items():
        if len(harmless_json(data)) <= MOST_DATA_BYTES:
            return
        data["parts_left_out"].append(part)
        if part == "curves":
            data["charts"] = []
        for run in data["runs"]:
            run |= {name: value for name, value in nothing.items() if name in run}
    if len(harmless_json(data)) > MOST_DATA_BYTES:
        data["parts_left_out"].append("long texts")
        data |= structures.mapped(
            lambda leaf: clean(leaf, _SHORT_TEXT) if isinstance(leaf, str) else leaf, data
        )


def _read_all(runs: Sequence[Path]) -> list[dict[str, Any]]:
    """Read the runs, with as many points of each curve as fit into the file."""
    images = _IMAGE_BYTES // len(runs)
    points = MOST_POINTS if len(runs) == 1 else max(_FEWEST_POINTS, MOST_POINTS // len(runs))
    while True:
        read = [read_run(run, points, images) for run in runs]
        total = sum(len(c["x"]) for run in read for c in run.get("curves", ()))
        if total <= _ALL_POINTS or points <= _FEWEST_POINTS:
            break
        points = max(_FEWEST_POINTS, min(points // 2, points * _ALL_POINTS // total))
    if total > _ALL_POINTS:
        for run in read:
            run["curves"] = run.get("curves", [])[: _ALL_POINTS // _FEWEST_POINTS // len(runs)]
    return read


def _labels(runs: Sequence[Path]) -> list[str]:
    """Return short names of runs: their paths without what all have in common."""
    if len(runs) == 1:
        return [runs[0].absolute().name]
    paths = [run.absolute() for run in runs]
    common = os.path.commonpath([str(path.parent) for path in paths])
    return [str(path.relative_to(common)) for path in paths]


def _charts(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assign the curves to charts: training and validation of one name share a chart.

    Returns:
        The title of each chart, and its curves: the position of the run, the position of the curve
        in the run, and a label such as `training` or `validation, easy`.
    """
    charts: dict[str, list[tuple[int, int, str]]] = {"loss": []}
    for i, run in enumerate(runs):
        curves = run.get("curves", [])
        every_step = {curve["name"] for curve in curves if curve["kind"] == "steps"}
        training = [curve["name"] for curve in curves if not curve["name"].startswith("val_")]
        for j, curve in enumerate(curves):
            name, kind = curve["name"], curve["kind"]
            if kind == "epochs" and name in every_step:
                continue  # the smoothed curve of all steps shows the same
            base, label = (name, "training" if kind == "steps" else name)
            if kind == "epochs":
                base, label = split_name(name, training)
            charts.setdefault(base, []).append((i, j, label))
    rate = charts.pop("steps per second", [])
    ordered = {name: curves for name, curves in charts.items() if curves}
    if rate:
        ordered["steps per second"] = rate
    return [{"title": name, "curves": curves} for name, curves in ordered.items()]


def _drop_curves(runs: Sequence[dict[str, Any]], charts: Sequence[dict[str, Any]]) -> None:
    """Remove the points of curves that are in none of the charts; the others keep their places."""
    shown = {(i, j) for chart in charts for i, j, _ in chart["curves"]}
    for i, run in enumerate(runs):
        for j, curve in enumerate(run.get("curves", ())):
            if (i, j) not in shown:
                curve |= {name: [] for name in ("x", "y", "mx", "my") if name in curve}


def rendered(data: Any) -> str:
    """Return the page.

    Args:
        data: What `report_data` returned.
    """
    styles, scripts = (["\n" + _asset(name) for name in names] for names in (_STYLES, _SCRIPTS))
    policy = {
        "default-src": "'none'",
        "style-src": " ".join(map(_hash, styles)),
        "script-src": " ".join(map(_hash, scripts)),
        "img-src": "data:",
        "connect-src": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",  # scripts cannot parse a text as HTML
    }
    parts = {
        "policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "styles": "".join(f"<style>{text}</style>\n" for text in styles),
        "license": _asset("uPlot.LICENSE"),
        "data": harmless_json(data),
        "scripts": "".join(f"<script>{text}</script>\n" for text in scripts),
    }
    page = _asset("page.html")
    before, *rest = page.split("{{")
    # In one pass, so that a marker inside of a value stays as it is.
    return before + "".join(
        parts[name] + text for name, _, text in (piece.partition("}}") for piece in rest)
    )


def harmless_json(data: Any) -> str:
    r"""Return JSON that may stand inside of a `<script>` element, whatever texts it holds.

    Example:
        >>> harmless_json({"name": "</script><b>"})
        '{"name":"\\u003c/script\\u003e\\u003cb\\u003e"}'
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # in ASCII
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files(__package__ or "").joinpath("assets", name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
