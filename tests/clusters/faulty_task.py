"""The task of examples/clusters, slowed down, in which processes may be killed.

It takes the place of `task.py`; the example's own file is next to it, as `original.py`. Each file
`DIRECTORY.fault-00`, `-01` and so on holds a fault that happens once, one for each start:
`step 13 1` kills process 1 at step 13, and `seconds 2.5` the first process that has run the task
for so long. The file `any.fault-00` next to the directory holds for all directories there.
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import original  # pyright: ignore[reportMissingImports]

import treadle
from treadle.core.processes import process_group

SECONDS = {"step": 0.05, "seconds": 0.15}  # of each step


def die(fault: Path) -> None:
    """Kill this process, unless another one was faster."""
    try:
        fault.rename(fault.with_name(f"{fault.name}-done"))
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def next_fault(directory: Path) -> tuple[Path, list[str]]:
    """Return the next fault of a run, and its words."""
    for name in (directory.name, "any"):
        found = sorted(directory.parent.glob(f"{name}.fault-[0-9][0-9]"))
        if found:
            return found[0], found[0].read_text().split()
    return directory, ["step", "", ""]


def train(directory: str, hooks: Any = (), **settings: Any) -> Any:
    """Train as the example does, with a checkpoint after every tenth step."""
    fault, words = next_fault(Path(directory))

    def pace(loop: Any) -> None:
        time.sleep(SECONDS[words[0]])
        if words == ["step", str(loop.progress.step), str(process_group().rank)]:
            die(fault)

    if words[0] == "seconds":
        timer = threading.Timer(float(words[1]), die, [fault])
        timer.daemon = True
        timer.start()
    saving = treadle.hooks.Checkpoint(every="10 steps")
    return original.train(
        directory, hooks=[*hooks, treadle.every("1 step", pace), saving], **settings
    )


if __name__ == "__main__":
    train(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
