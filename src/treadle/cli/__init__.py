"""The command line: it parses, calls and prints; nothing is decided here that a script needs.

| exit code | when |
| --- | --- |
| 0 | done, or it was finished before |
| 1 | an error while training; an exception of the task's own comes with its traceback |
| 1 | `certify` found something that is not exact, or could not check it |
| 1 | `tune` ended, and no trial came to its end |
| 2 | wrong usage, configuration, backend, data or directory |
| 3 | its time was up before its epochs or steps were done; it can be resumed |
| 130 | interrupted, and saved |
| 143 | terminated, and saved |

Until a command has been understood, neither Keras nor a framework is imported.
"""

from . import certifying as certifying  # defines a command
from . import rates as rates  # defines two
from . import tuning as tuning
from .commands import app

__all__ = ["app", "main"]


def main() -> None:
    """Run `treadle`."""
    app()
