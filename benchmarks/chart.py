"""The chart of docs/benchmarks.md: speed, divided by that of the fastest loop by hand and `fit`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import BACKENDS, DOCS, write_section
from .page import WORKLOADS, against, fastest, ordered

NAMES = {"jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}
PEERS = {"hand": ("fastest loop by hand", "#9aa7b5"), "fit": ("fastest fit", "#2563a8")}


def write(kept: Mapping[str, Any]) -> None:
    """Write the chart of the page, and the table of the peers that are faster."""
    kept = ordered(kept)
    draw(kept, DOCS / "images/speed.svg")
    write_section(DOCS / "benchmarks.md", "bench speed --write: behind", behind(kept))


def ratios(kept: Mapping[str, Any], backend: str) -> list[tuple[str, str, str, float]]:
    """Return program, kind of peer, its name, and Treadle's speed as a multiple of its speed."""
    found: list[tuple[str, str, str, float]] = []
    for program in WORKLOADS:
        result = kept.get(f"speed {program} {backend}")
        for kind in PEERS if result else ():
            if name := fastest(result, {kind}):
                found.append((program, kind, name, against(result, name).median))
    return found


def behind(kept: Mapping[str, Any]) -> list[str]:
    """Return a table of the peers that are faster than Treadle."""
    rows = [
        (value, f"| {program} | {NAMES[backend]} | {name} | {value:.2f} |")
        for backend in BACKENDS
        for program, _, name, value in ratios(kept, backend)
        if round(value, 2) < 1
    ]
    if not rows:
        return ["No loop by hand and no `fit` is faster.", ""]
    return [
        "## Where Treadle is slower",
        "",
        "| program | backend | compared with | Treadle's speed by it |",
        "| --- | --- | --- | --- |",
        *(line for _, line in sorted(rows)),
        "",
    ]


def draw(kept: Mapping[str, Any], path: Path) -> None:
    """Write the chart as SVG; the same results give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = {backend: found for backend in BACKENDS if (found := ratios(kept, backend))}
    heights = [len(found) for found in panels.values()]
    with matplotlib.rc_context({"svg.hashsalt": "treadle", "svg.fonttype": "none"}):
        figure = Figure(figsize=(7, 0.24 * sum(heights) + 1.2 * len(panels)), layout="tight")
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for axes, (backend, found) in zip(grid[:, 0], panels.items(), strict=True):
            _draw_backend(axes, NAMES[backend], found)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _draw_backend(axes: Any, title: str, found: list[tuple[str, str, str, float]]) -> None:
    places: list[float] = []
    for number, (program, *_) in enumerate(found):
        same = number > 0 and found[number - 1][0] == program
        places.append(places[-1] + 1 if same else (places[-1] + 1.6 if places else 0))
    labelled: dict[str, float] = {}
    for place, (program, kind, name, value) in zip(places, found, strict=True):
        label, color = PEERS[kind]
        axes.barh(place, value - 1, left=1, height=0.9, color=color, label=label)
        axes.annotate(
            f"{value:.2f}  {name}",
            (max(value, 1), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
        labelled.setdefault(program, place)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.axvline(1, color="#333333", linewidth=1)
    axes.set_yticks(list(labelled.values()), list(labelled), fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(0.6, 20)
    axes.set_xticks([0.7, 1, 2, 4, 8], ["0.7", "1", "2", "4", "8"], fontsize=8)
    axes.minorticks_off()
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), fontsize=7, frameon=False, loc="lower right")
