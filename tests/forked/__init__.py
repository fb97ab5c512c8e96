"""A Python that starts at once: each process is a fork of one that has already imported Keras.

Importing Keras and its backend takes 3 to 6 processor seconds, most of the time of a test that
starts a process. `python()` is an executable that takes the place of `sys.executable` in such
tests, and in what the processes start themselves:

    subprocess.run([python(), "-c", "import treadle; …"], env={**os.environ, "FAULT": "…"})

The executable is a real process, which passes its arguments, environment, working directory and
standard streams to a server, forwards signals to the forked process, and ends as that does: with
the same exit code, or by the same signal. If it is killed, the forked process is killed as well.
There is one server for each set of interpreter options (each process filters warnings for itself)
and of environment variables that a library reads when it is imported. It imports Keras, and the
modules that the variable FORKED_IMPORTS names. The first process starts it, and it ends when no
process has come for a while.

Tests of the import itself (the choice of the backend, the time until the first output, what is not
imported) use `sys.executable`, and so do tests on an accelerator, which a fork cannot use.
"""

import os
import sys
import tempfile
from functools import cache
from pathlib import Path


@cache
def python() -> str:
    """Return the path of the executable; the command `treadle`, next to it, runs on it.

    The folder is removed when this process ends.
    """
    if os.environ.get("TREADLE_TESTS_FORK") == "off":
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="treadle-")
    _KEPT.append(folder)
    executable = Path(folder.name, "python")
    client = Path(__file__).parent
    # Neither the site module nor the user's variables: it only passes on what it is given.
    executable.write_text(
        f"#!{sys.executable} -IS\n"
        f"import sys\nsys.path.append({str(client)!r})\n"
        f"from client import main\nmain({folder.name!r}, {sys.executable!r})\n"
    )
    command = executable.with_name("treadle")
    command.write_text(f'#!/bin/sh\nexec {executable} -m treadle "$@"\n')
    for file in (executable, command):
        file.chmod(0o755)
    return str(executable)


def processor_seconds() -> float:
    """Return how long the forked processes computed, which no parent of theirs counts."""
    return sum(float(file.read_text()) for x in _KEPT for file in Path(x.name).glob("*.seconds"))


# A temporary folder is removed with its object.
_KEPT: list[tempfile.TemporaryDirectory[str]] = []
