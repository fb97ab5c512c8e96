"""The `treadle report` command: writes a report of runs, or serves it while they go on."""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigurationError
from . import output
from .commands import EPILOG_WITHOUT_RUN, app
from .help import Command
from .output import reporting_errors
from .parameters import PRINTED, WHERE

Directories = Annotated[
    list[Path],
    typer.Argument(metavar="FOLDER…", help="Run directories, or folders that hold some."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        help="The file to write; default: report.html in the run directory or, of several runs, "
        "in the folder that holds all of them.",
        show_default=False,
        rich_help_panel=WHERE,
    ),
]
Open = Annotated[
    bool, typer.Option("--open", help="Open the report in a browser.", rich_help_panel=PRINTED)
]
Serve = Annotated[
    bool,
    typer.Option(
        "--serve",
        help="Serve the report on this machine until Ctrl-C, and refresh it while runs go on.",
        rich_help_panel=PRINTED,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        min=0,
        max=65535,
        metavar="N",
        help="The port of --serve; default: one that is free.",
        show_default=False,
        rich_help_panel=PRINTED,
    ),
]


@app.command(cls=Command, epilog=EPILOG_WITHOUT_RUN)
def report(
    directories: Directories,
    out: Out = None,
    open_: Open = False,
    serve: Serve = False,
    port: Port = 0,
) -> None:
    """Write a report of one run, or a comparison of several, as one HTML file.

    The file shows curves, settings, time, events and images, and requests nothing from any host.
    The folders are only read, and no file in them is executed.

    Examples:
      treadle report runs/mine --open
      treadle report runs/first runs/second -o comparison.html
      treadle report runs/digits-tune
      treadle report runs --serve
    """
    with reporting_errors():
        if serve and out is not None:
            raise ConfigurationError("--serve writes no file: leave out --out")
        if port and not serve:
            raise ConfigurationError("--port is the port of --serve: add --serve")
        if serve:
            _serve(directories, port, open_)
            return
        from ..report import page  # late: it imports NumPy

        path = page.write(directories, out)
        output.print_line(f"report: {path}")
        if open_:
            show(path.absolute().as_uri())


def _serve(directories: list[Path], port: int, open_: bool) -> None:
    from ..report.server import ReportServer  # late: it imports NumPy

    with ReportServer(directories, port) as server:
        output.print_line(f"report: {server.url} (on this machine only; Ctrl-C ends it)")
        if open_:
            show(server.url)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            output.note("the server has ended")


def show(address: str) -> None:
    """Open an address in the user's browser.

    Raises:
        ConfigurationError: If there is no browser.
    """
    if not webbrowser.open(address):
        raise ConfigurationError(f"no browser could be started: open {address} yourself")
