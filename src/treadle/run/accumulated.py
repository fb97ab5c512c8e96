"""Notes in the log on accumulated gradients that make no update."""

from ..backends.base import active
from .run import Run


def note_skipped_groups(run: Run) -> None:
    """Log how many groups of batches had weights that sum to 0, unless it is logged already."""
    for path, accumulator in run.known_state.accumulators.items():
        count = int(active().read(accumulator.skipped))
        of_groups = "1 group" if count == 1 else f"{count:,} groups"
        text = (
            f"{path} has skipped {of_groups} of {accumulator.steps} batches whose weights sum to "
            "0: they made no update"
        )
        if count and all(record.values.get("note") != text for record in run.history.records):
            run.record("log", {"note": text})


def note_unfilled_groups(run: Run) -> None:
    """Log how many batches of a call that ends fill no group, so that they made no update."""
    if run.current.kind == "step" or run.current.unfinished:  # a later step continues the group
        return
    for path, accumulator in run.known_state.accumulators.items():
        count = int(active().read(accumulator.filled))
        if count:
            of_batches = "1 batch" if count == 1 else f"{count} batches"
            text = (
                f"{path} holds the gradients of {of_batches}, and makes an update for each "
                f"{accumulator.steps}: they were not applied. The next call continues the group; "
                "Accumulator.apply, in a hook at the end of each epoch, makes an update of them"
            )
            run.record("log", {"note": text})
