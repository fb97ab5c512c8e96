"""Progress and costs of a run, as small immutable values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: The number of calls of `train_step` so far.
        epoch: The number of the current epoch, from 0. While hooks run at the end of an epoch, it
            is still the number of that epoch.
        batch: The number of batches of this epoch trained on so far.
        examples: The number of examples trained on so far. Those of a batch are the rows of its
            first array that is no scalar.
        seconds: Seconds spent inside the loop so far, including validation and hooks.

    Example:
        >>> Progress(step=3).advanced(steps=2, examples=128).step
        5
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    examples: int = 0
    seconds: float = 0.0

    def advanced(self, steps: int, examples: int) -> "Progress":
        """Return the progress after `steps` more steps, with `examples` more examples in total."""
        step, batch, total = self.step + steps, self.batch + steps, self.examples + examples
        return Progress(step, self.epoch, batch, total, self.seconds)

    def at_epoch(self, epoch: int) -> "Progress":
        """Return the progress at the first batch of `epoch`."""
        return Progress(self.step, epoch, 0, self.examples, self.seconds)

    def after_seconds(self, seconds: float) -> "Progress":
        """Return the same progress with its clock set to `seconds`."""
        return Progress(self.step, self.epoch, self.batch, self.examples, seconds)

    def __str__(self) -> str:
        """Describe what is done, as messages do after "after": `step 12, epoch 1, batch 4`.

        All numbers count from 1. Between two epochs: `step 12 and 1 epoch`.
        """
        if self.batch:
            return f"step {self.step}, epoch {self.epoch + 1}, batch {self.batch}"
        epochs = f"{self.epoch} epoch{'s' if self.epoch > 1 else ''}"
        return f"step {self.step}{f' and {epochs}' if self.epoch else ''}"

    def following(self, count: int = 1) -> str:
        """Describe the steps that come next: `step 13 (epoch 1, batch 5)`.

        Example:
            >>> Progress(step=12, batch=4).following(3)
            'steps 13 to 15 (epoch 1, batches 5 to 7)'
        """
        epoch, step, batch = self.epoch + 1, self.step + 1, self.batch + 1
        if count == 1:
            return f"step {step} (epoch {epoch}, batch {batch})"
        steps, batches = self.step + count, self.batch + count
        return f"steps {step} to {steps} (epoch {epoch}, batches {batch} to {batches})"


@dataclass(frozen=True, slots=True)
class Costs:
    """The time that a run spent on other things than training.

    Attributes:
        programs: The number of compiled programs.
        compiling: Seconds spent tracing and compiling them.
        waiting: Seconds spent waiting for data.
        validating: Seconds spent on validation, without compiling it.
        saving: Seconds for which training waited while a checkpoint was captured.
    """

    programs: int = 0
    compiling: float = 0.0
    waiting: float = 0.0
    validating: float = 0.0
    saving: float = 0.0
