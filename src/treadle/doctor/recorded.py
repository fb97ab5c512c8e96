"""The records of a past run: log, checkpoints and last step. Reading them does not need Keras."""

from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoints, SavedState
from ..checkpoint.run_files import recorded_run
from ..core.directory import CHECKPOINTS, LOG, progress_of
from ..core.logs import values_of
from ..errors import CheckpointError, ConfigurationError, DirectoryError, did_you_mean
from ..hooks.log_file import Log, Mark, read
from .conditions import Condition


class Recorded:
    """The records of a run.

    Attributes:
        facts: The content of `run.json`.
        recovered: A sentence if that file is lost and the content is that of a checkpoint, else "".
        calls: The arguments of each call of the loop.
        log: The logged values of each step; empty if the log is missing.
        checkpoints: The run's checkpoints.
        last: The number of the last step.

    Raises:
        DirectoryError: The directory holds no run, the run only called `loop.step`, or each of
            several processes read its own share of the data.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.facts, self.recovered = recorded_run(directory)
        self.calls: list[Any] = self.facts.get("calls", [])
        if not self.calls:
            raise DirectoryError(
                f"{directory} holds a run of loop.step(batch) alone: the source of its batches is "
                "unknown, so its steps cannot be run again"
            )
        shards = (self.facts.get("execution") or {}).get("shards", 1)
        if shards > 1:
            raise DirectoryError(
                f"{directory} holds a run of {shards} processes, each of which read its own share "
                "of the data (treadle.data.sharded): steps run again in one process, which cannot "
                "read their batches"
            )
        self.checkpoints = Checkpoints(directory / CHECKPOINTS)
        log = directory / LOG
        marks = Mark.all_of(self.checkpoints.hook_states())
        self.log = read(log, marks) if log.exists() else Log()
        self.last = max(self.log.last_step, progress_of(self.facts).step)

    def check_step(self, step: int) -> None:
        """Check that the run has a step.

        Raises:
            DirectoryError: The run has no such step.
        """
        if step > self.last:
            raise DirectoryError(
                f"there is no step {step} in {self._directory}: its steps are 1 to {self.last}"
            )

    def before(self, step: int) -> SavedState:
        """Return the newest checkpoint at or before a step.

        Raises:
            CheckpointError: There is no such checkpoint.
        """
        found = self.checkpoints.before(step)
        if found is None:
            raise CheckpointError(
                f"{self._directory} holds no checkpoint at or before step {step} to start from. "
                "Every run keeps the checkpoint of step 0: either the run has only just started, "
                "or its checkpoints folder was not copied with it"
            )
        return found

    def logged_step(self, condition: Condition) -> tuple[int, str] | None:
        """Return the first step of the log where a condition holds, and a sentence about it.

        Returns:
            None if the condition names a variable, whose values are in checkpoints.

        Raises:
            ConfigurationError: The condition holds for no step of the log.
        """
        names = condition.names
        if not all(name in self.log.names for name in names):
            return None
        parts = [part for part in self.log.parts if all(name in part.values for name in names)]
        for line in Log(parts).rows():
            if condition.holds(values := values_of(line)):
                step, shown = line["step"], ", ".join(f"{name} is {values[name]}" for name in names)
                return step, f"{condition.text}: first holds at step {step} of the log: {shown}"
        raise ConfigurationError(
            f"{condition.text!r} holds for none of the {len(self.log.steps)} steps in "
            f"{self._directory / LOG}"
        )

    def check_condition(self, condition: Condition) -> None:
        """Check that the first step where a condition holds can be searched for.

        Raises:
            ConfigurationError: The condition has an unknown name, mixes logged values with
                variables, holds from the start, or holds for no logged step.
            CheckpointError: There is no checkpoint to start from.
        """
        if self.logged_step(condition) is not None:
            return
        steps = self.checkpoints.steps()
        start = self.before(min(steps, default=0))
        known = (*self.log.names, *start.state)
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
                "variable: returned values are in the log, variables in checkpoints. Compare each "
                "with a number"
            )
        if condition.holds(start.state):
            raise ConfigurationError(
                f"{condition.text!r} holds already in the first checkpoint, after step {steps[0]}"
            )
