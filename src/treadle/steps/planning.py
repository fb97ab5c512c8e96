"""Execution plans: how a step is compiled, and how many steps run as one window.

A fixed rule (`choose`) selects the kind of program, without timing: equal seeds must give equal
runs, and different kinds of programs round differently. The number of steps in a window and the
location of the data do not change any result, so these may depend on measured times.

A window ends wherever the state may be read: at a scheduled event, at the end of a call, and at the
end of an epoch (where the source ends it).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..backends.plans import XLA, Facts, Plan
from ..backends.window import CAPACITIES, Window
from ..core.options import COMPILERS, Options
from ..core.progress import Progress
from ..core.triggers import Span, When
from ..errors import ConfigurationError, StepError

# The overhead of a window (reading, logs, hooks) is about as long as 3 of the fastest steps.
LARGEST_WINDOW = 256
# As Python, steps run one by one. A window avoids waiting for the device after each of them.
LARGEST_EAGER_WINDOW = 16
# The target duration of a window, so that progress is updated and timed events are on time.
WINDOW_SECONDS = 0.5
# A window of streamed batches is stacked in memory, up to this size. Larger windows do not fit into
# the processor's cache and are not faster.
STREAMED_BYTES = 16 * 2**20
# Data sets up to this size are copied to the device as a whole.
DEVICE_BYTES = 2 * 2**30


def choose(facts: Facts, options: Options, name: str = "train_step", some: bool = False) -> Plan:
    """Choose the plan for a step by a fixed rule.

    Steps are fused into windows and compiled by XLA, with these exceptions:

    - On a CPU, XLA runs convolutions 4 times slower inside a loop than outside: on JAX, steps with
      convolutions run as single steps. On TensorFlow they run as graphs, unless XLA is faster: for
      steps in float32 with gradients of normalizations, which it fuses, and without those of
      maximum pooling and of depthwise convolutions, for which it takes several times as long.
    - On a CPU, a step that XLA compiles inside a loop needs more memory for its intermediate
      results. Steps with large variables, which take long, run as single steps on JAX.
    - A step that XLA cannot compile runs as a graph; a step that no compiler accepts runs as
      Python.

    Options override the rule, and `Options(execution="measure")` times all possible plans on the
    step itself.

    Args:
        facts: The facts about the step.
        options: The execution options.
        name: The step's name, for messages.
        some: Whether batches of another form have a plan already.

    Raises:
        StepError: The options ask for a compiled step, and it cannot be compiled.

    Example:
        >>> print(choose(Facts("cpu", ("XLA", "graph")), Options()))
        windows of up to 256, XLA
        >>> print(choose(Facts("cpu", ("XLA",), slow="convolves"), Options()))
        single steps, XLA (XLA convolves slower in a loop on a CPU)
        >>> print(choose(Facts("cpu", ("XLA",), large=True), Options()))
        single steps, XLA (a loop takes more memory for such large variables)
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
        elif facts.device == "cpu" and facts.slow:
            compiler, why = facts.compilers[-1], f"XLA {facts.slow} slower on a CPU"
    largest = options.window or LARGEST_WINDOW
    if options.fused is not None:
        return Plan(compiler, options.fused, largest, why)
    if compiler == XLA and facts.device == "cpu" and facts.slow:
        return Plan(compiler, False, largest, f"XLA {facts.slow} slower in a loop on a CPU")
    if compiler == XLA and facts.device == "cpu" and facts.large:
        return Plan(compiler, False, largest, "a loop takes more memory for such large variables")
    return Plan(compiler, True, largest, why)


def as_recorded(
    options: Options, before: Mapping[str, Any], execution: Mapping[str, Any] | None
) -> Options:
    """Return options that choose the compiler of a recorded run, on which its bits depend.

    The run may have fallen back to another compiler than its options name, or have chosen one by
    its number of steps. If the options name another compiler than they did then, they decide.

    Args:
        options: The options.
        before: The recorded options.
        execution: The recorded execution; see `Execution.facts`. None if there is none.

    Example:
        >>> ran = {"compiler": "captured", "fused": True, "resident": True, "shards": 1}
        >>> as_recorded(Options(compiler="inductor"), {"compiler": "inductor"}, ran).compiler
        'captured'
    """
    compiler = execution["compiler"] if execution else ""
    if options.compiler != before.get("compiler", "auto") or compiler not in COMPILERS:
        return options
    return replace(options, compiler=compiler)


def candidates(facts: Facts) -> list[Plan]:
    """Return all possible plans for a step.

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


def summary(first: Plan | None, plan: Plan) -> Plan:
    """Return the plan of the first form of batch, with a remark if other forms run differently.

    Example:
        >>> print(summary(Plan("XLA", True, 256), Plan("", False, 16, "the step reads a value")))
        windows of up to 256, XLA (as Python for some batches: the step reads a value)
    """
    if first is None:
        return plan
    if (plan.compiler, plan.fused) == (first.compiler, first.fused):
        return first
    how = str(replace(plan, why="")) if plan.compiler else "as Python"
    remark = f"{how} for some batches: {plan.why}" if plan.why else f"{how} for some batches"
    if remark in first.why:
        return first
    return replace(first, why=f"{first.why}; {remark}" if first.why else remark)


def places(nbytes: int, options: Options) -> bool:
    """Return whether a data set of this size is copied to the device as a whole."""
    return nbytes <= DEVICE_BYTES if options.data_on_device is None else options.data_on_device


class Pace:
    """Adapts the number of steps per window to its time and memory, starting with one step.

    Args:
        fixed: The size from `Options(window=…)`, or None.

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
        """Update the size after a window that took this many seconds."""
        if self._fixed:
            return
        share = window.count * WINDOW_SECONDS / max(seconds, 1e-9)
        if nbytes := window.stacked_bytes:
            share = min(share, window.count * STREAMED_BYTES / nbytes)
            # Programs have fixed lengths: choose one that is filled without padding.
            share = max((size for size in CAPACITIES if size <= share < largest), default=share)
        self.size = max(1, min(largest, int(share), 4 * self.size))


def window_size(
    most: int, progress: Progress, events: Iterable[When], last_step: int | None, examples: int
) -> int:
    """Return the number of steps of the next window.

    Args:
        most: The largest useful number.
        progress: The progress of the run.
        events: The schedules of all hooks that read the state.
        last_step: The step at which the call ends, or None.
        examples: The number of examples in a batch.

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
    """Check that a call of `fit` has an end, and that a time is valid.

    Raises:
        ConfigurationError: No end is given, or `until` is no time.
    """
    if epochs is None and steps is None and until is None:
        raise ConfigurationError("fit needs an end: epochs=…, steps=… or until='30 min'")
    if until is not None and Span.parse(until).of != "seconds":
        raise ConfigurationError(f"until={until!r} must be a time, for example '30 min'")
