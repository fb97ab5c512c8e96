"""Checks that a task keeps Treadle's guarantees."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core import structures
from ..core.options import Options
from ..core.randomness import seed_everything
from ..errors import ConfigurationError, whole_number
from .running import Batches, Runner, first_of, run_steps
from .trace import Tolerance, compare

MakeTask = Callable[[], Any]


def fused_equals_unfused(
    make_task: MakeTask,
    batches: Batches,
    options: Options | None = None,
    partitions: Sequence[Sequence[int]] | None = None,
) -> None:
    """Check that the results are bit-for-bit equal, however many steps run as one compiled call.

    One task runs all batches once per partition; its variables are reset before each run. State
    that the task keeps outside of variables (a Python counter, a list of losses) is not reset and
    shows up as a difference.

    Args:
        make_task: Creates a fresh task.
        batches: The batches; use at least three, so that window sizes can differ.
        options: Execution options.
        partitions: The window sizes to compare with single steps, in the form that `run_steps`
            takes: by default 2, then 3, 1, 3, 1 …, then all batches at once.

    Raises:
        AssertionError: Something differs. The message names the first step and value, or the first
            variable's path, and both numbers.
        ConfigurationError: There are no batches, or a window has less than one step.

    Example:
        >>> import keras, numpy as np, treadle
        >>> def make_task():
        ...     return treadle.Supervised(keras.Sequential([keras.layers.Dense(1)]), "mse", "adam")
        >>> batches = [(np.ones((2, 3), "float32"), np.zeros((2, 1), "float32"))] * 3
        >>> fused_equals_unfused(make_task, batches)
    """
    runner = Runner(_made(make_task), first_of(batches), options)
    partitions = partitions or ((2,), (3, 1), (len(batches),))
    traces = runner.run_in_each(batches, [(1,), *partitions])
    single = next(traces)[1]
    for sizes, trace in traces:
        compare(
            trace,
            single,
            f"in windows of {', '.join(map(str, sizes))}",
            "in single steps",
            tolerance=None,
        )


def compiled_equals_eager(
    make_task: MakeTask,
    batches: Batches,
    rtol: float = 1e-4,
    atol: float = 1e-6,
    options: Options | None = None,
) -> None:
    """Check that the compiled step computes the same as the eager step, within rounding.

    Args:
        make_task: Creates a fresh task; Keras' seed is set before each call.
        batches: The batches. Use few, since rounding errors grow from step to step.
        rtol: The relative tolerance: relative to each returned value, and to the largest entry of
            each variable.
        atol: The absolute tolerance, added to the relative one.
        options: Execution options of the compiled step.

    Raises:
        AssertionError: A difference exceeds the tolerance. The message names the first step and
            value, or the first variable's path, and both numbers.
        ConfigurationError: There are no batches.

    Example:
        >>> import keras, numpy as np, treadle
        >>> def make_task():
        ...     return treadle.Supervised(keras.Sequential([keras.layers.Dense(1)]), "mse", "sgd")
        >>> batches = [(np.ones((2, 3), "float32"), np.zeros((2, 1), "float32"))] * 3
        >>> compiled_equals_eager(make_task, batches)
    """
    eager = Options(execution="eager", checked=True)
    reference = run_steps(_made(make_task), batches, eager)
    compiled = run_steps(_made(make_task), batches, options)
    compare(compiled, reference, "compiled", "run eagerly", Tolerance(rtol, atol))


def accumulated_equals_large_batch(
    make_task: Callable[[int], Any],
    batches: Batches,
    steps: int,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    options: Options | None = None,
) -> None:
    """Check that accumulating gradients over batches equals one large batch, within rounding.

    Layers that depend on the whole batch (BatchNormalization) and random layers (Dropout) make a
    difference, as does any state other than the accumulator that each batch changes.

    Args:
        make_task: Creates a fresh task whose `treadle.Accumulator`s have this many steps.
        batches: The batches; their number is a multiple of `steps`. Use few, since rounding errors
            grow from step to step.
        steps: The number of batches per update.
        rtol: The relative tolerance, relative to the largest entry of each variable.
        atol: The absolute tolerance, added to the relative one.
        options: Execution options.

    Raises:
        AssertionError: A difference exceeds the tolerance. The message names the variable and both
            numbers.
        ConfigurationError: There are no batches, or their number is not a multiple of `steps`.

    Example:
        >>> import keras, numpy as np, treadle
        >>> class Line(treadle.Task):
        ...     def __init__(self, steps):
        ...         self.w, self.optimizer = keras.Variable(1.0), keras.optimizers.Adam(0.1)
        ...         self.accumulator = treadle.Accumulator(steps)
        ...     def train_step(self, x):
        ...         loss, grads = treadle.gradients(lambda: keras.ops.mean(x * self.w), [self.w])
        ...         self.accumulator.add(grads, lambda mean: self.optimizer.apply(mean, [self.w]))
        ...         return {"loss": loss}
        >>> batches = [np.ones(3, "float32"), np.full(1, 5.0, "float32")]
        >>> accumulated_equals_large_batch(Line, batches, steps=2)
    """
    steps = whole_number("steps", steps, ConfigurationError)
    first_of(batches)
    if len(batches) % steps:
        raise ConfigurationError(
            f"{len(batches)} batches are not a multiple of steps={steps}: the last update would be "
            "incomplete"
        )

    groups = [batches[i : i + steps] for i in range(0, len(batches), steps)]
    large = [structures.mapped(lambda *x: np.concatenate(x), *group) for group in groups]
    one_by_one = run_steps(_made(lambda: make_task(steps)), batches, options)
    at_once = run_steps(_made(lambda: make_task(1)), large, options)
    compare(
        replace(one_by_one, values={}, weights={}),
        replace(at_once, values={}, weights={}),
        f"in {steps} batches",
        "in one",
        Tolerance(rtol, atol),
    )


def _made(make_task: MakeTask) -> Any:
    seed_everything(0)
    return make_task()
