"""How many steps run as one compiled call: never across an event.

A window ends where somebody looks at the state: at an event that is due, at the end of a call, and
at the end of an epoch (there the source ends it). Results do not depend on it: all window sizes of
one executor agree bit for bit.
"""

from collections.abc import Iterable

from .errors import ConfigurationError
from .progress import Progress
from .when import Span, When

# A window of streamed batches is stacked in memory: this bounds it.
LARGEST_BYTES = 64 * 2**20


def window_size(
    most: int,
    progress: Progress,
    events: Iterable[When],
    last_step: int | None,
    examples: int,
    batch_bytes: int,
) -> int:
    """Return how many steps the next window may have.

    Args:
        most: The executor's own limit.
        progress: Where the run stands.
        events: What state is looked at by.
        last_step: The step at which the call ends, or None.
        examples: Examples in a batch.
        batch_bytes: Bytes of a batch.

    Example:
        >>> window_size(64, Progress(step=190), [When(Span.parse("200 steps"))], None, 32, 100)
        10
    """
    size = min(most, max(1, LARGEST_BYTES // max(1, batch_bytes)))
    for event in events:
        until = event.steps_until(progress, examples)
        if until is not None:
            size = min(size, until)
    if last_step is not None:
        size = min(size, last_step - progress.step)
    return max(1, size)


def check_end(epochs: int | None, steps: int | None, until: str | None) -> None:
    """Refuse a call that would never end, or not begin.

    Raises:
        ConfigurationError: No end is given, or one that is not positive.
    """
    if epochs is None and steps is None and until is None:
        raise ConfigurationError("fit needs an end: epochs=…, steps=… or until='30 min'")
    for name, count in (("epochs", epochs), ("steps", steps)):
        if count is not None and count < 1:
            raise ConfigurationError(f"{name} must be at least 1, not {count}")
    if until is not None and Span.parse(until).of != "seconds":
        raise ConfigurationError(f"until={until!r} must be a time, for example '30 min'")
