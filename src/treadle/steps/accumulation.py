"""Gradient accumulation: the gradients of several batches, one update, as of one large batch."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from ..backends.base import Tensor, Variable, context
from ..errors import ConfigurationError, StepError, whole_number
from .gradients import cond


class Accumulator:
    """Adds up gradients, and hands their mean to one update when there are enough of them.

    The mean is weighted by examples, and all that belongs to an update happens in it and nowhere
    else: clipping, weight decay, the schedule, averages of weights. So four batches of 16 do what
    one of 64 does, as long as no layer looks at a batch as a whole (BatchNormalization does).
    `treadle.step()` counts batches, the optimizer's `iterations` count updates.

    A task holds one for each optimizer that accumulates. What waits for its update is part of the
    state: it is saved and restored, and goes on from one epoch to the next.

    Args:
        steps: How many calls of `add` make an update.

    Attributes:
        steps: How many calls of `add` make an update.
        filled: How many of them wait for it, an int32 variable.
        weight: What they weigh together, a float32 variable.
        sums: Their gradients times their weights, a variable for each gradient, of 32 bits at
            least; made by the first call of `add`.

    Raises:
        ConfigurationError: `steps` is no whole number from 1.

    Example:
        >>> import keras, treadle
        >>> w, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.5)
        >>> accumulator = treadle.Accumulator(steps=2)
        >>> for slope, examples in [(1.0, 3), (5.0, 1)]:
        ...     _, grads = treadle.gradients(lambda: slope * w, [w])
        ...     updated = accumulator.add(
        ...         grads, lambda mean: optimizer.apply(mean, [w]), weight=examples
        ...     )
        ...     print(bool(updated), float(w.numpy()))  # 1 - 0.5 * (3 * 1 + 1 * 5) / 4
        False 1.0
        True 0.0
    """

    holds_state = is_accumulator = True

    def __init__(self, steps: int) -> None:
        self.steps = whole_number("steps", steps, ConfigurationError)
        self.filled = _zeros((), "int32", "filled")
        self.weight = _zeros((), "float32", "weight")
        self.sums: list[Variable] = []

    @property
    def variables(self) -> list[Variable]:
        """All variables, for `treadle.phase`."""
        return [self.filled, self.weight, *self.sums]

    def add(
        self, grads: Any, update: Callable[[Any], Any], weight: float | Tensor | None = None
    ) -> Tensor:
        """Add gradients; if they were the last that an update waits for, update.

        Args:
            grads: What `treadle.gradients` returned, of the mean over the batch: a list of tensors,
                or a dict of such lists.
            update: Called with their weighted mean, in the same structure and dtypes; it may do all
                that a branch of `treadle.cond` may. What it returns is dropped.
            weight: What the gradients count by: how many examples, or tokens, their loss is the
                mean of. By default the examples in the batch of the running step; outside of one 1.

        Returns:
            Whether it updated, a boolean scalar tensor.

        Raises:
            StepError: The gradients are of other shapes than before.
        """
        found = [ops.convert_to_tensor(g) for g in keras.tree.flatten(grads)]
        self._build(found)
        share = ops.cast(context().examples if weight is None else weight, "float32")
        total = ops.convert_to_tensor(self.weight) + share
        sums = [
            ops.convert_to_tensor(s) + ops.cast(share, s.dtype) * ops.cast(g, s.dtype)
            for s, g in zip(self.sums, found, strict=True)
        ]
        filled = ops.convert_to_tensor(self.filled) + 1
        full = filled >= self.steps

        def update_and_empty() -> None:
            mean = [
                ops.cast(s / ops.cast(total, s.dtype), g.dtype)
                for s, g in zip(sums, found, strict=True)
            ]
            update(keras.tree.pack_sequence_as(grads, mean))
            for variable in self.variables:
                variable.assign(ops.zeros(variable.shape, variable.dtype))

        def wait() -> None:
            for variable, value in zip(self.variables, [filled, total, *sums], strict=True):
                variable.assign(value)

        cond(full, update_and_empty, wait)
        return full

    def _build(self, grads: Sequence[Tensor]) -> None:
        """Make the sums; in a dry run, again if there are more gradients now.

        Raises:
            StepError: The sums are of other shapes, and steps already add to them.
        """
        given, held = [tuple(g.shape) for g in grads], [tuple(s.shape) for s in self.sums]
        if given == held:
            return
        build = context().build
        if self.sums and (build is None or id(self.sums[0]) in build.settled):
            raise StepError(
                f"an Accumulator began with {len(held)} gradients of shapes {held}, and was now "
                f"given {len(given)} of shapes {given}: use one for each list of variables"
            )
        if self.sums:  # what was added to them belongs to another update
            self.filled, self.weight = (
                _zeros((), "int32", "filled"),
                _zeros((), "float32", "weight"),
            )
        self.sums[:] = [_zeros(tuple(g.shape), _wide(g), "sum") for g in grads]


def _wide(tensor: Tensor) -> str:
    """Return a dtype in which many tensors like this one can be added up."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _zeros(shape: tuple[int, ...], dtype: str, name: str) -> Variable:
    return keras.Variable(
        "zeros", shape=shape, dtype=dtype, trainable=False, autocast=False, name=name
    )
