"""The `treadle report` command: writes a report of runs."""

import webbrowser
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from . import output
from .commands import command
from .options import PRINTED, WHERE, argument, flag, option


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Options of `treadle report`."""

    directories: list[Path] = argument(
        metavar="FOLDER…", help="Run directories, or folders that hold some."
    )
    out: Path | None = option(
        "The file to write; default: report.html in the run directory or, of several runs, "
        "in the folder that holds all of them.",
        "FILE",
        WHERE,
        "--out",
        "-o",
    )
    open_: bool = flag("Open the report in a browser.", PRINTED)


@command()
def report(options: ReportOptions) -> None:
    """Write a report of one run, or a comparison of several, as one HTML file.

    The file shows curves, settings, time, events and images, and requests nothing from any host.
    The folders are only read, and no file in them is executed.

    Examples:
      treadle report runs/mine --open
      treadle report runs/first runs/second -o comparison.html
      treadle report runs/digits-tune
    """
    from ..report import page  # late: it imports NumPy

    path = page.write(options.directories, options.out)
    output.print_line(f"report: {path}")
    if options.open_:
        show(path.absolute().as_uri())


def show(address: str) -> None:
    """Open an address in the user's browser.

    Raises:
        ConfigurationError: If there is no browser.
    """
    if not webbrowser.open(address):
        raise ConfigurationError(f"no browser could be started: open {address} yourself")
