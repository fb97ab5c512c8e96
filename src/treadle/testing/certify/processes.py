"""The three processes of a certificate, and the file of lines that each writes.

`python -m treadle.testing.certify.processes FILE` is one of them: its JSON file names the function
that creates the task and the part to run. That function sets the backend, so nothing here imports
Keras before it is called.
"""

import importlib
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from ... import errors
from ...errors import ConfigurationError, TreadleError
from .comparing import Entry, Written

GPUS: Final = ("/dev/nvidia0", "/dev/kfd")
"""GPU device files. If one exists, processes run one at a time, as each may take all GPU memory."""
PRINTED: Final = 12
LINES, OUTCOME = "lines.jsonl", "outcome.json"
PARTS: Final = ("straight", "killed", "resumed")


@dataclass(frozen=True)
class Maker:
    """A function that creates the task and its data in another process.

    Attributes:
        function: `module:name` of a function that sets the backend and returns a `Subject`.
        arguments: Its arguments, in JSON's types.
        name: The name used in messages.
    """

    function: str
    arguments: Mapping[str, Any]
    name: str


def run_all(maker: Maker, steps: int | None, only_resume: bool) -> tuple[Written, Written, Written]:
    """Return what the straight, the killed and the resumed process have written.

    The processes differ in hash seeds and in the time at which they run. If the second one was not
    killed, since it failed or finished before, there is no third one.

    Raises:
        TreadleError: The task cannot be created.
    """
    with TemporaryDirectory(prefix="treadle-certify-") as temporary:
        asked = {
            "maker": maker.function,
            "arguments": dict(maker.arguments),
            "steps": steps,
            "only_resume": only_resume,
            "path": [entry for entry in sys.path if entry],
        }
        run = partial(_run, maker.name, asked, Path(temporary))

        def interrupted() -> tuple[Written, Written]:
            killed = run("interrupted", "killed")
            resumed = Written() if killed.outcome else run("interrupted", "resumed")
            return killed, resumed

        at_once = 1 if any(Path(gpu).exists() for gpu in GPUS) else 2
        with ThreadPoolExecutor(at_once) as pool:
            first = pool.submit(run, "straight", "straight")
            second = pool.submit(interrupted)
            return first.result(), *second.result()


def _run(name: str, asked: Mapping[str, Any], folder: Path, directory: str, part: str) -> Written:
    """Run one part in a separate process, and read what it has written."""
    place, run = folder / part, folder / directory
    place.mkdir()
    order, outcome = place / "order.json", place / OUTCOME
    order.write_text(json.dumps({**asked, "directory": str(run), "part": part}))
    # A file, since a process that the task has started may keep the output open.
    with (place / "output.txt").open("w+b") as output:
        code = subprocess.run(
            [sys.executable, "-m", __name__, str(order)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONHASHSEED": str(1 + PARTS.index(part))},
        ).returncode
        output.seek(0)
        printed = "\n".join(output.read().decode(errors="replace").splitlines()[-PRINTED:])
    found: dict[str, Any] = json.loads(outcome.read_text()) if outcome.exists() else {}
    if code and not found:
        raise ConfigurationError(
            f"the process that examined {name} ended with code {code}:\n{printed}"
        )
    if found and not found["made"]:
        raise _unmade(name, found["error"], printed)
    lines = place / LINES
    written = lines.read_text().splitlines() if lines.exists() else []
    return Written([Entry(*json.loads(line)) for line in written], found)


def _unmade(name: str, error: Mapping[str, Any], printed: str) -> TreadleError:
    """Return the error that creating the task raised: there is nothing to check."""
    kind = getattr(errors, error["type"], None)
    if isinstance(kind, type) and issubclass(kind, TreadleError):
        return kind(error["message"])
    return ConfigurationError(
        f"{name} cannot be made: {error['type']}: {error['message']}\n{printed}"
    )


def main(order: Path) -> None:
    """Run the part that an order file describes, and write the outcome next to it."""
    asked: dict[str, Any] = json.loads(order.read_text())
    sys.path[:0] = [folder for folder in asked["path"] if folder not in sys.path]
    outcome: dict[str, Any] = {"error": None, "made": False}
    try:
        module, _, name = asked["maker"].partition(":")
        subject = getattr(importlib.import_module(module), name)(**asked["arguments"])
        from .drill import run  # late: it imports Keras

        outcome["made"] = True
        with (order.parent / LINES).open("w") as lines:
            more = asked["part"], asked["steps"], asked["only_resume"]
            outcome |= run(subject, Path(asked["directory"]), lines, *more)
    except Exception as error:  # including the user's own errors: they are part of the result
        traceback.print_exception(error)
        outcome["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "notes": list(getattr(error, "__notes__", ())),
        }
    (order.parent / OUTCOME).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
