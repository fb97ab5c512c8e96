"""Checks of a task against what Treadle promises for every task."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from ..core.options import Options
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
    """Check that it makes no difference how many steps run as one compiled call: not in one bit.

    The same task runs all batches once per partition, put back to its start before each. What it
    keeps anywhere else than in variables (a Python counter, a list of losses) is a difference too.

    Args:
        make_task: Makes a fresh task.
        batches: Some batches, at least three for the check to mean anything.
        options: How to execute.
        partitions: The sizes of windows to compare with single steps, as `run_steps` takes them:
            by default 2, then 3, 1, 3, 1 …, then all at once.

    Raises:
        AssertionError: Something differs; the message names the first step and value, or the first
            path, and both numbers.
        ConfigurationError: No batches, or a window of less than one step.

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
    """Check that the compiled step computes what the readable reference does, within rounding.

    Args:
        make_task: Makes a fresh task; Keras' seed is set before each call.
        batches: Some batches; few, since rounding grows from step to step.
        rtol: Allowed difference, relative to each returned value and to each variable's largest.
        atol: Allowed difference beside that.
        options: How to execute the compiled step.

    Raises:
        AssertionError: Something differs by more; the message names the first step and value, or
            the first path, and both numbers.
        ConfigurationError: No batches.

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
    """Check that some batches and one update do the same as one large batch, within rounding.

    What layers do with a batch as a whole (BatchNormalization), and what is random (Dropout), is a
    difference, as is anything beside the accumulator that each batch changes.

    Args:
        make_task: Makes a fresh task whose `treadle.Accumulator`s have this many steps.
        batches: Some batches, a multiple of `steps` of them; few, since rounding grows.
        steps: How many of them an update is made of.
        rtol: Allowed difference, relative to the largest number of each variable.
        atol: Allowed difference beside that.
        options: How to execute.

    Raises:
        AssertionError: A variable differs by more; the message names it and both numbers.
        ConfigurationError: No batches, or a number of them that is no multiple of `steps`.

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
            f"{len(batches)} batches are no multiple of steps={steps}: some would wait for others"
        )

    def joined(*parts: Any) -> Any:
        return None if parts[0] is None else np.concatenate(parts)

    groups = [batches[i : i + steps] for i in range(0, len(batches), steps)]
    large = [keras.tree.map_structure(joined, *group) for group in groups]
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
    keras.utils.set_random_seed(0)
    return make_task()
