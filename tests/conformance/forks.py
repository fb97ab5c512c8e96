"""Processes that start at once: forks of one that has imported a framework, and done nothing yet.

Importing takes ten times as long as what is to be tested, and is the same each time.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from treadle.checkpoint import Checkpoints
from treadle.core.folder import PARTIAL

PATIENCE = 600.0  # seconds: only what hangs takes as long


class Forks:
    """A program that calls `serve`, and runs as often as it is wanted.

    Args:
        program: The file.
        backend: What Keras runs on.
        arguments: Of the program itself.
    """

    def __init__(self, program: Path, backend: str, *arguments: str) -> None:
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"}
        self._server = subprocess.Popen(
            [sys.executable, str(program), *arguments],
            env={**os.environ, **quiet, "KERAS_BACKEND": backend},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._count = 0

    def start(self, output: Path, **arguments: Any) -> "Fork":
        """Run it once more; what it prints goes to a file."""
        output.write_text("")
        return Fork(self, self.ask(output=str(output), arguments=arguments), output)

    def ask(self, **request: Any) -> int:
        """Send a request, and return the answer."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(f"{json.dumps(request, default=str)}\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError("the program that forks ended: run it by hand to see why")
        return json.loads(answer)

    def close(self) -> None:
        """End the program."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(PATIENCE)
        self._server.stdout.close()


class Fork:
    """One run of the program.

    Attributes:
        pid: Its process.
        code: Its exit code, the negative number of the signal where one killed it; None before.
    """

    def __init__(self, forks: Forks, pid: int, output: Path) -> None:
        self.pid, self.code = pid, None
        self._forks, self._output = forks, output

    @property
    def printed(self) -> list[str]:
        """The whole lines that it has printed so far."""
        return self._output.read_text(errors="replace").split("\n")[:-1]

    def ended(self) -> bool:
        if self.code is None:
            self.code = self._forks.ask(poll=self.pid)
        return self.code is not None

    def reach(self, line: str) -> bool:
        """Wait until it prints a line; False where it ended without."""
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            over = self.ended()
            if line in self.printed:
                return True
            if over:
                return False
            time.sleep(0.002)
        self.kill()
        raise TimeoutError(f"no {line!r} in {PATIENCE:.0f} s; there were {self.printed[-5:]}")

    def kill(self, after: float = 0.0) -> bool:
        """Kill it after so many seconds; returns whether it still ran."""
        until = time.monotonic() + after
        while time.monotonic() < until and not self.ended():
            time.sleep(min(0.05, max(0.0, until - time.monotonic())))
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def wait(self) -> int:
        """Return its exit code, when it has ended."""
        until = time.monotonic() + PATIENCE
        while not self.ended():
            if time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                raise TimeoutError(f"it did not end; it printed {self.printed[-5:]}")
            time.sleep(0.005)
        assert self.code is not None
        return self.code

    def result(self) -> Any:
        """Return what it printed last, which is JSON, when it has ended well."""
        if self.wait() != 0:
            text = "\n".join(self.printed[-40:])
            raise RuntimeError(f"it ended with {self.code}:\n{text}")
        return json.loads(self.printed[-1])


def serve() -> dict[str, Any] | None:
    """Fork as often as is asked for on standard input.

    Returns:
        The arguments, in each forked process; None in this one, when there is nothing more to do.
    """
    for line in iter(sys.stdin.readline, ""):
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if not answer:
                _redirect(request["output"])
                return request["arguments"]
        print(json.dumps(answer), flush=True)
    return None


def _redirect(output: str) -> None:
    """Give a forked process an output of its own, and no input."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for descriptor, number in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(descriptor, number)


def killed_at_random(
    forks: Forks, root: Path, kills: int, seed: int = 0, in_a_row: int = 10
) -> dict[str, Any]:
    """Kill runs at random instants, of all that a process does from its first to its last line.

    Args:
        forks: Of the drill.
        root: A folder for the runs.
        kills: How many processes to kill.
        seed: Of the instants.
        in_a_row: How many at most in one run, which then runs to its end.

    Returns:
        How many `kills` there were; how many of them in runs that ended the `same` as one that was
        never killed, with the same files but for times; `runs`, and what came of those that
        `differ`; kills that left a torn save (`in_saves`); `damaged` checkpoints that were found
        under the name of a whole one.
    """
    from tests.directories.compared import contents  # late: the programs that fork cannot import it

    # Steps of some duration, and a save with each: a good part of the kills hits one.
    random, how = Random(seed), {"pace": 0.01, "every": "1 step"}
    process = forks.start(root / "never.txt", directory=root / "never", **how)
    started = time.monotonic()  # only now: the first time, a framework was imported
    expected = process.result()
    lasts = time.monotonic() - started
    files = contents(root / "never")
    found: dict[str, Any] = {"kills": 0, "same": 0, "runs": 0}
    found |= {"in_saves": 0, "damaged": 0, "differ": []}
    while found["kills"] < kills:
        found["runs"] += 1
        directory, killed = root / f"run-{found['runs']}", 0
        folder = directory / "checkpoints"
        for life in range(in_a_row + 1):
            output = root / f"run-{found['runs']}-{life}.txt"
            process = forks.start(output, directory=directory, **how)
            last = life == in_a_row or found["kills"] + killed == kills
            if last or not process.kill(after=random.uniform(0, lasts)):
                break
            killed += 1
            found["in_saves"] += any(folder.rglob(f"{PARTIAL}*"))
            saved = Checkpoints(folder)
            saved.latest()
            found["damaged"] += len(saved.rejected)
        result = process.result()
        same = result == expected and contents(directory) == files
        found["kills"] += killed
        found["same"] += killed if same else 0
        if not same:
            found["differ"].append({"kills": killed, "expected": expected, "found": result})
        if same:
            shutil.rmtree(directory)
    return found
