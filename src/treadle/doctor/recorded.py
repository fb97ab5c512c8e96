"""What a past run has recorded: log, checkpoints, last step. Read without Keras."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint, Checkpoints
from ..core.directory import CHECKPOINTS, LOG, read_run
from ..errors import CheckpointError, ConfigurationError, DirectoryError, did_you_mean
from ..hooks.lines import OWN, read_log
from .conditions import Condition


class Recorded:
    """The record of a run.

    Args:
        directory: Of the run.

    Attributes:
        facts: What `run.json` holds.
        calls: What each call of the loop was asked for.
        log: The logged values of each step.
        checkpoints: Its checkpoints.
        last: The number of its last step.

    Raises:
        DirectoryError: It holds no run, or one of `loop.step` alone.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.facts = read_run(directory)
        self.calls: list[Any] = self.facts.get("calls", [])
        if not self.calls:
            raise DirectoryError(
                f"{directory} holds a run of loop.step(batch) alone: where its batches came from "
                "is not known, so they cannot be drawn again"
            )
        self.checkpoints = Checkpoints(directory / CHECKPOINTS)
        log = directory / LOG
        steps = read_log(log)[0] if log.exists() else []
        self.log: dict[int, Mapping[str, Any]] = {line["step"]: line for line in steps}
        self.last: int = max([*self.log, (self.facts.get("progress") or {}).get("step", 0)])

    def check_step(self, step: int) -> None:
        """Check that the run has a step.

        Raises:
            DirectoryError: It has not.
        """
        if step > self.last:
            raise DirectoryError(
                f"there is no step {step} in {self._directory}: its steps are 1 to {self.last}"
            )

    def before(self, step: int) -> Checkpoint:
        """Return the newest checkpoint at or before a step.

        Raises:
            CheckpointError: There is none.
        """
        found = self.checkpoints.before(step)
        if found is None:
            raise CheckpointError(
                f"{self._directory} holds no checkpoint at or before step {step}, so no step can "
                "be reached: a run keeps that of step 0, unless it has only just begun, or its "
                "folder of checkpoints was left behind"
            )
        return found

    def logged_step(self, condition: Condition) -> tuple[int, str] | None:
        """Return the first step of the log where a condition holds, and how it was found.

        Returns:
            None where the condition names a variable, whose values are in checkpoints.

        Raises:
            ConfigurationError: It holds of no step of the log.
        """
        if not all(name in self._logged() for name in condition.names):
            return None
        for step, line in sorted(self.log.items()):
            if all(name in line for name in condition.names) and condition.holds(line):
                shown = ", ".join(f"{name} is {line[name]}" for name in condition.names)
                return step, f"{condition.text}: the first step of the log is {step}: {shown}"
        raise ConfigurationError(
            f"{condition.text!r} holds of none of the {len(self.log)} steps in "
            f"{self._directory / LOG}"
        )

    def check_condition(self, condition: Condition) -> None:
        """Check that a step can be looked for where a condition begins to hold.

        Raises:
            ConfigurationError: It names something unknown, mixes logged values with variables,
                holds from the start, or holds of no logged step.
            CheckpointError: There is no checkpoint to begin with.
        """
        if self.logged_step(condition) is not None:
            return
        steps = self.checkpoints.steps()
        start = self.before(min(steps, default=0))
        known = (*self._logged(), *start.state)
        unknown = [name for name in condition.names if name not in known]
        if unknown:
            raise ConfigurationError(
                f"{condition.text!r} names {unknown[0]!r}, which is neither a value that steps "
                f"returned nor the path of a variable.{did_you_mean(unknown[0], known)}"
            )
        of_steps = [name for name in condition.names if name not in start.state]
        if of_steps:
            raise ConfigurationError(
                f"{condition.text!r} compares {of_steps[0]!r}, which steps returned, with a "
                "variable: the one is in the log, the other in checkpoints. Compare each with a "
                "number"
            )
        if condition.holds(start.state):
            raise ConfigurationError(
                f"{condition.text!r} holds already in the first checkpoint, after step {steps[0]}"
            )

    def _logged(self) -> list[str]:
        """Return the names of all values that steps logged."""
        names = dict.fromkeys(name for line in self.log.values() for name in line)
        return [name for name in names if name not in OWN]
