"""Hooks that end a run by an exception, as the end of its process would: a loop sees no difference.

The next process is a new task and a new loop.
"""

from typing import Any

import treadle


def killed(loop: Any) -> None:
    """End the run: for `treadle.at`."""
    raise OSError("killed")


class Dying(treadle.Hook):
    def __init__(self, at: int | None, error: BaseException | None = None) -> None:
        self.at, self.error = at, error or OSError("killed")

    def steps(self, loop: Any, logs: Any) -> None:
        if self.at is not None and loop.progress.step >= self.at:
            raise self.error


class DyingAtTheEnd(treadle.Hook):
    """When all steps are done and saved."""

    def end(self, loop: Any, error: BaseException | None) -> None:
        if error is None:
            raise OSError("killed")


class Saving(treadle.hooks.Checkpoint):
    """Waits for each checkpoint, so that a run resumes from the last one that was due."""

    def save(self, loop: Any, wait: bool = False, begins: bool = False) -> bool:
        return super().save(loop, wait=True, begins=begins)
