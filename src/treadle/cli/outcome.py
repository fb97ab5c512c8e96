"""What `treadle run` and `treadle resume` print at their end."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..core.directory import read_run
from ..report.states import best_values
from . import output

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..core.history import History
    from ..loop import Loop


def print_outcome(
    directory: Path, loop: "Loop", history: "History", changed: str, quiet: bool, as_json: bool
) -> None:
    """Print the last and best values of a run, and the names of its files.

    Args:
        directory: The run directory.
        loop: The loop that trained.
        history: All logged values.
        changed: A sentence on what changed in the task's code since the run, or an empty text.
        quiet: Whether no progress was shown.
        as_json: Whether to print one JSON object and nothing else.
    """
    from ..core.values import short  # late: it imports NumPy

    before = loop.reason == "it was finished before"
    if loop.unfinished:
        output.note(f"time limit reached: resume with treadle resume {directory}")
    if before and quiet and changed:
        output.note(f"warning: {changed}")
    files = sorted(path.name for path in directory.iterdir() if path.is_file())
    last, epochs = history.last, [each for each in history.records if each.kind == "epoch"]
    best = best_values({each.progress.epoch + 1: each.values for each in epochs})
    if as_json:
        facts = read_run(directory)
        output.print_json(
            {
                "directory": str(directory),
                "files": files,
                "finished_before": before,
                "unfinished": loop.unfinished,
                **{name: facts.get(name) for name in ("backend", "plan", "reason", "progress")},
                "last": last,
                "best": {name: {"value": v, "epoch": epoch} for name, (v, epoch) in best.items()},
            }
        )
        return
    if before and quiet:
        output.print_line(f"the run in {directory} is already finished; nothing was done")
    width = max(map(len, last), default=0)
    for name, value in last.items():
        line = f"{name.ljust(width)}  {short(value)}"
        if name in best and best[name][0] != value:
            line += f"  (best {short(best[name][0])} in epoch {best[name][1]})"
        output.print_line(line)
    output.print_line(f"{directory}: {', '.join(files)}")
