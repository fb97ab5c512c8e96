"""The command line: parses options, calls the public API and prints results.

Features that scripts need are implemented in the other packages, not here.

| exit code | when |
| --- | --- |
| 0 | done, or already finished |
| 1 | an error while training; one raised by the task's own code is printed with its traceback |
| 1 | `certify` found an inexact check, or could not run a check |
| 1 | `doctor` found an error in the task |
| 1 | `export` wrote nothing, since the file fails or computes something else than `predict` |
| 1 | `tune` ended without a completed trial |
| 2 | wrong usage, configuration, backend, data or directory |
| 3 | the time limit was reached before all epochs or steps were done; the run can be resumed |
| that of the process | `launch`: a process failed; 128 plus its number if a signal ended it |
| 130 | interrupted, and saved |
| 143 | terminated, and saved |

Keras and the backend's framework are imported only after the arguments have been parsed.
"""

from importlib import import_module

from .commands import app

# Each registers its commands with `app`, in the order of `treadle --help`.
for _module in (
    "running",
    "inspecting",
    "certifying",
    "describing",
    "doctoring",
    "exporting",
    "launching",
    "rates",
    "reporting",
    "tuning",
    "watching",
):
    import_module(f".{_module}", __package__)

__all__ = ["app", "main"]


def main() -> None:
    """Run the `treadle` command."""
    app()
