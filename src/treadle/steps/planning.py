"""How a step runs, and how many steps run as one compiled call: never across an event.

Which kind of program runs is decided by a rule (`choose`), not by a race: equal seeds must give
equal runs, and programs of different kinds round differently. How many steps a window has, and
where the data lies, change no bit: all windows of one plan agree, so these may follow the clock.

A window ends where somebody looks at the state: at an event that is due, at the end of a call, and
at the end of an epoch (there the source ends it).
"""

from collections.abc import Iterable

from ..backends.plans import XLA, Facts, Plan
from ..backends.window import CAPACITIES, Window
from ..core.options import Options
from ..core.progress import Progress
from ..core.triggers import Span, When
from ..errors import ConfigurationError, StepError

# What surrounds a window (reading, logs, hooks) takes about as long as 3 of the fastest steps.
LARGEST_WINDOW = 256
# Python runs these steps one by one: waiting for each would only hinder the device.
LARGEST_EAGER_WINDOW = 16
# A window takes about this long at most, so that progress is seen and timed events are in time.
WINDOW_SECONDS = 0.5
# A window of streamed batches is stacked in memory: this bounds it. Larger ones, which do not fit
# into the processor's cache, are no faster.
STREAMED_BYTES = 16 * 2**20
# Data sets up to this size are put on the device as a whole.
DEVICE_BYTES = 2 * 2**30


def choose(facts: Facts, options: Options, name: str = "train_step", some: bool = False) -> Plan:
    """Return the plan for a step: the written rule.

    Steps are fused to windows and compiled by XLA, except:

    - On a CPU, XLA runs convolutions slower than TensorFlow's graphs, and those inside a loop 4
      times slower than outside of one: graphs where there is a choice, else single steps.
    - A step that XLA refuses is a graph; one that nothing compiles runs as Python.

    Options that say otherwise win, and `Options(execution="measure")` times all that could have
    been chosen on the step itself.

    Args:
        facts: What is known of the step.
        options: What was asked for.
        name: The step's name, for messages.
        some: Other batches have a plan already, and these are of another form.

    Raises:
        StepError: The options ask for a compiled step, and it cannot be compiled.

    Example:
        >>> print(choose(Facts("cpu", ("XLA", "graph")), Options()))
        windows of up to 256, XLA
        >>> print(choose(Facts("cpu", ("XLA",), convolves=True), Options()))
        single steps, XLA (XLA convolves slower in a loop on a CPU)
    """
    if not facts.compilers and options.execution == "compiled":
        which = " for some of its batches" if some else ""
        raise StepError(
            f"{name} cannot be compiled{which}: {facts.refusal or 'the backend has no compiler'}. "
            "Let it run as Python with Options(execution='auto')"
        )
    if not facts.compilers or options.execution == "eager":
        return Plan("", False, options.window or LARGEST_EAGER_WINDOW, facts.refusal)
    compiler, why = facts.compilers[0], facts.refusal
    if len(facts.compilers) > 1:  # a choice
        if options.jit is not None:
            compiler = XLA if options.jit else facts.compilers[-1]
        elif facts.device == "cpu" and facts.convolves:
            compiler, why = facts.compilers[-1], "XLA convolves slower on a CPU"
    largest = options.window or LARGEST_WINDOW
    if options.fused is not None:
        return Plan(compiler, options.fused, largest, why)
    if compiler == XLA and facts.device == "cpu" and facts.convolves:
        return Plan(compiler, False, largest, "XLA convolves slower in a loop on a CPU")
    return Plan(compiler, True, largest, why)


def candidates(facts: Facts) -> list[Plan]:
    """Return every plan that a step could have, the rule's choice or not.

    Example:
        >>> for plan in candidates(Facts("cpu", ("XLA", "graph"))):
        ...     print(plan)
        windows of up to 256, XLA
        single steps, XLA
        windows of up to 256, graph
        single steps, graph
        eager
    """
    compiled = [
        Plan(compiler, fused, LARGEST_WINDOW)
        for compiler in facts.compilers
        for fused in (True, False)
    ]
    return [*compiled, Plan("", False, LARGEST_EAGER_WINDOW)]


def places(nbytes: int, options: Options) -> bool:
    """Say whether a data set of this size is put on the device as a whole."""
    return nbytes <= DEVICE_BYTES if options.data_on_device is None else options.data_on_device


class Pace:
    """How many steps a window has for its time and memory; begins with one step, then grows.

    Args:
        fixed: The size that the user asked for, or None.

    Example:
        >>> import numpy as np
        >>> from treadle.backends.window import Window
        >>> pace = Pace(None)
        >>> pace.ran(Window(np.zeros((1, 2)), 1, 2), seconds=0.001, largest=256)
        >>> pace.size
        4
    """

    def __init__(self, fixed: int | None) -> None:
        self._fixed = fixed is not None
        self.size = fixed or 1

    def ran(self, window: Window, seconds: float, largest: int) -> None:
        """Take note of how long a window took."""
        if self._fixed:
            return
        share = window.count * WINDOW_SECONDS / max(seconds, 1e-9)
        if window.stacked_bytes:
            share = min(share, window.count * STREAMED_BYTES / window.stacked_bytes)
            # Programs of fixed lengths are filled where that is possible, and not padded.
            share = max((size for size in CAPACITIES if size <= share < largest), default=share)
        self.size = max(1, min(largest, int(share), 4 * self.size))


def window_size(
    most: int,
    progress: Progress,
    events: Iterable[When],
    last_step: int | None,
    examples: int,
) -> int:
    """Return how many steps the next window may have.

    Args:
        most: The most that are useful.
        progress: Where the run stands.
        events: What state is looked at by.
        last_step: The step at which the call ends, or None.
        examples: Examples in a batch.

    Example:
        >>> window_size(64, Progress(step=190), [When(Span.parse("200 steps"))], None, 32)
        10
    """
    size = most
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
