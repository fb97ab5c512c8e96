"""Processes that write a checkpoint together, one after another in this process."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.faults import Quick
from treadle.checkpoint import Checkpoints, SavedState
from treadle.checkpoint.format import temporary_name
from treadle.core import processes
from treadle.core.processes import ProcessGroup
from treadle.core.split_arrays import Grid, OwnParts


class Members(ProcessGroup):
    """A group of which this process is each member in turn; what the others report is kept."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.told: dict[str, dict[int, Any]] = {}
        self.faults: list[Any] = []

    def exchange(self, value: Any, at: str) -> list[Any]:
        return [value, *self.faults]

    def report(self, value: Any, about: str) -> None:
        self.told.setdefault(about, {})[self.rank] = json.loads(json.dumps(value))

    def reports(self, about: str) -> list[Any]:
        return [value for _, value in sorted(self.told.pop(about).items())]


def cut(array: Any, starts: Any, owners: Any, rank: int) -> OwnParts:
    """The parts of an array that a process writes."""
    grid = Grid(array.shape, starts)
    own = {i: array[r] for i, r in enumerate(grid.regions()) if owners[i] == rank}
    return OwnParts(grid, array.dtype, tuple(owners), own)


def save_in_parts(
    folder: Path,
    saved: SavedState,
    cuts: Mapping[str, tuple[Any, Any]],
    monkeypatch: Any,
    size: int = 2,
    systems: Mapping[int, Any] | None = None,
    chief: Checkpoints | None = None,
) -> Checkpoints:
    """Save a checkpoint of which some arrays are cut into parts; returns what the chief uses.

    Args:
        cuts: Where an array is cut, and the process that writes each part, by path.
        systems: The file systems of processes.
    """
    group, temporary = Members(size), temporary_name(saved.progress.step)
    chief = chief or Checkpoints(folder, system=(systems or {}).get(0, Quick()))
    with monkeypatch.context() as patched:
        patched.setattr(processes, "_group", group)
        for group.rank in reversed(range(size)):
            parts = {
                path: cut(np.asarray(saved.state[path]), *cuts[path], group.rank) for path in cuts
            }
            mine = replace(saved, state={**saved.state, **parts})
            writer = Checkpoints(folder, system=(systems or {}).get(group.rank, Quick()))
            if group.rank:
                writer.save_parts(mine, temporary)
                writer.wait()
            else:
                assert chief.save(mine, temporary)
                chief.settle()
    return chief
