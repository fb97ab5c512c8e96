"""The option `--preflight` of `treadle run`: an examination before training."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import treadle

from ..core.directory import DOCTOR
from ..core.folder import Folder
from ..core.processes import process_group
from ..core.terminal import clean
from ..errors import ConfigurationError
from . import environment, output

if TYPE_CHECKING:  # importing them imports NumPy and Keras
    from ..doctor import Report
    from ..recipes._loading import Made


def preflight(made: "Made", lasts: Mapping[str, Any], quiet: bool) -> "Report":
    """Examine a task, and print the errors and warnings that are found.

    Args:
        made: The task. Its data are made a second time: what is read here is read again later.
        lasts: How long the run lasts, by name.
        quiet: Print nothing but errors and warnings.

    Raises:
        ConfigurationError: There are errors, or several processes train.
    """
    if process_group().size > 1:
        raise ConfigurationError(
            "--preflight examines a task in one process: run treadle doctor with the same task and "
            "settings before, and leave the option out here"
        )
    with environment.showing("looking for mistakes", quiet):
        data = made.datasets()
        length = treadle.data.as_source(data.train).length
        epochs = lasts.get("epochs")
        planned = epochs * length if epochs and length else None
        report = treadle.doctor.examine(made.task, data, steps=lasts.get("steps") or planned)
    grave = [finding for finding in report.findings if finding.severity != "note"]
    for finding in grave:
        for line in finding.lines():
            output.print_line(clean(line))
    if not quiet:
        output.print_line(clean(report.lines()[-1]))
    if report.errors:
        codes = ", ".join(sorted({repr(finding.code) for finding in report.errors}))
        raise ConfigurationError(
            f"{report.task} was not trained, because of mistakes that are listed above. Mend them, "
            "or, where one is intended, add its code to the task: doctor_ignore = "
            f"[{codes}]"
        )
    return report


def keep(report: "Report", directory: Path) -> None:
    """Write a report to a run directory, where `treadle report` finds it."""
    text = json.dumps(report.facts(), indent=1) + "\n"
    with Folder.open(directory) as folder:
        folder.write(DOCTOR, [text.encode()], len(text))
