"""Gradient accumulation: one optimizer update for the gradients of several batches."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from ..backends.base import active
from ..backends.step_context import context
from ..backends.types import Tensor, Variable
from ..core import structures
from ..core.float64 import wide
from ..errors import ConfigurationError, StepError, whole_number
from .control_flow import cond
from .derived import exclude


class Accumulator:
    """Accumulates gradients over several batches and applies their mean in one update.

    The mean is weighted by the number of examples. Everything that belongs to an update (clipping,
    weight decay, learning rate schedule, averages of weights) happens once per update. So four
    batches of 16 have the same effect as one batch of 64, unless a layer computes statistics over
    the batch, as BatchNormalization does. `treadle.step()` counts batches, the optimizer's
    `iterations` count updates.

    Keep one accumulator in the task for each optimizer that accumulates. Accumulated gradients are
    part of the state: they are saved and restored, and carry over from one epoch, and from one call
    of the loop, to the next. At the end of a call, a note in the log gives the number of batches
    that fill no group; `apply` makes an update of them.

    A group of batches whose weights sum to 0 has no mean, and makes no update. A note in the log
    gives the number of these groups.

    Args:
        steps: The number of calls of `add` per update.

    Attributes:
        steps: The number of calls of `add` per update.
        filled: The number of calls since the last group, an int32 variable.
        weight: The sum of their weights, a float variable.
        skipped: The number of groups whose weights summed to 0, an int32 variable.
        sums: The weighted sums of their gradients, one variable for each gradient, with at least 32
            bits; created by the first call of `add`.

    Raises:
        ConfigurationError: `steps` is not a whole number of at least 1.

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
        self.weight = _zeros((), wide(), "weight")
        self.skipped = _zeros((), "int32", "skipped")
        self.sums: list[Variable] = []
        self._dtypes: Any = None  # in the structure of the gradients
        exclude(self, "_dtypes")

    @property
    def variables(self) -> list[Variable]:
        """All variables of the accumulator, for `treadle.phase`."""
        return [self.filled, self.weight, self.skipped, *self.sums]

    def add(
        self, grads: Any, update: Callable[[Any], Any], weight: float | Tensor | None = None
    ) -> Tensor:
        """Add the gradients of one batch, and call `update` if it is the last one of an update.

        Args:
            grads: The gradients of a mean over the batch, as returned by `treadle.gradients`: a
                list of tensors, or a dict of such lists.
            update: Called with the weighted mean of the gradients, in the same structure and
                dtypes. It may do everything that a branch of `treadle.cond` may. Its return value
                is ignored.
            weight: The weight of the gradients in the mean: the number of examples, or tokens, over
                which their loss is averaged. Default: the number of examples in the batch of the
                running step, or 1 outside of a step. In several processes of PyTorch or TensorFlow,
                a tensor is summed over them, and a number is taken as that of the whole batch.
                Gradients of weight 0 do not count, even if they are NaN.

        Returns:
            Whether `update` was called, a boolean scalar tensor.

        Raises:
            StepError: The shapes of the gradients differ from those of earlier calls.
        """
        found = [ops.convert_to_tensor(g) for g in structures.flatten(grads)]
        self._build(found)
        if ops.is_tensor(weight) and context().build is None:
            weight = active().total(weight)
        share = ops.cast(context().examples if weight is None else weight, self.weight.dtype)
        total = ops.convert_to_tensor(self.weight) + share
        pairs = zip(self.sums, found, strict=True)
        terms = [ops.cast(share, s.dtype) * ops.cast(g, s.dtype) for s, g in pairs]
        if weight is not None:  # a weight of 0 times NaN is NaN
            terms = [ops.where(share == 0, ops.zeros_like(term), term) for term in terms]
        sums = [ops.convert_to_tensor(s) + term for s, term in zip(self.sums, terms, strict=True)]
        filled = ops.convert_to_tensor(self.filled) + 1
        self._dtypes = structures.pack(grads, [_dtype(g) for g in found])
        is_full = filled >= self.steps
        return self._update_if(is_full, update, [filled, total, *sums], weight is not None)

    def apply(self, update: Callable[[Any], Any]) -> Tensor:
        """Call `update` with the mean of the batches since the last update, if there are any.

        Call it where a group of batches ends early: in a hook or the body of a `for` loop at the
        end of an epoch, or in a step.

        Args:
            update: As for `add`.

        Returns:
            Whether `update` was called, a boolean scalar tensor.

        Example:
            >>> import keras, treadle
            >>> w, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.5)
            >>> accumulator = treadle.Accumulator(steps=4)
            >>> update = lambda mean: optimizer.apply(mean, [w])
            >>> _, grads = treadle.gradients(lambda: 3.0 * w, [w])
            >>> _ = accumulator.add(grads, update)
            >>> print(bool(accumulator.apply(update)), float(w.numpy()))
            True -0.5
        """
        if not self.sums:  # nothing was ever added
            return ops.convert_to_tensor(False)
        values = [ops.convert_to_tensor(v) for v in (self.filled, self.weight, *self.sums)]
        return self._update_if(values[0] > 0, update, values, has_weights=True)

    def _update_if(
        self, is_full: Tensor, update: Callable[[Any], Any], values: list[Any], has_weights: bool
    ) -> Tensor:
        """Update and begin a new group if this one is full; else store the values of the group.

        Args:
            is_full: Whether this is the end of a group.
            update: As for `add`.
            values: The values of the group: `filled`, `weight` and `sums`.
            has_weights: Whether the weights may sum to 0.

        Returns:
            Whether `update` was called.
        """
        variables = [self.filled, self.weight, *self.sums]
        _, total, *sums = values
        updates = ops.logical_and(is_full, total != 0) if has_weights else is_full

        def update_and_empty() -> None:
            dtypes = structures.flatten(self._dtypes)
            means = [
                ops.cast(s / ops.cast(total, s.dtype), dtype)
                for s, dtype in zip(sums, dtypes, strict=True)
            ]
            update(structures.pack(self._dtypes, means))
            for variable in variables:
                variable.assign(ops.zeros(variable.shape, variable.dtype))

        def wait() -> None:
            for variable, value in zip(variables, values, strict=True):
                kept = ops.where(is_full, ops.zeros_like(value), value) if has_weights else value
                variable.assign(kept)
            if has_weights:
                self.skipped.assign(self.skipped + ops.cast(is_full, "int32"))

        cond(updates, update_and_empty, wait)
        return updates

    def _build(self, grads: Sequence[Tensor]) -> None:
        """Create the sums; in a dry run, create them again if the gradients have changed.

        Raises:
            StepError: The existing sums have other shapes, and compiled steps already use them.
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
        if self.sums:  # the counts belong to the discarded sums
            self.filled, self.weight = (_zeros((), "int32", "filled"), _zeros((), wide(), "weight"))
        self.sums[:] = [_zeros(tuple(g.shape), _wide(g), "sum", _layout_for(g)) for g in grads]


def _dtype(tensor: Tensor) -> str:
    return keras.backend.standardize_dtype(tensor.dtype)


def _wide(tensor: Tensor) -> str:
    """Return a dtype with enough precision to sum many tensors like this one."""
    dtype = _dtype(tensor)
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def _layout_for(gradient: Tensor) -> Any:
    """Return the layout on several devices of the variables that a gradient can belong to.

    Returns:
        The layout of the trainable variables of its shape; None, which is Keras' default, if they
        have different ones.
    """
    shape = tuple(gradient.shape)
    built = (v for layer in context().layers for v in layer.trainable_variables)  # in this run
    layouts = [
        variable._layout
        for variable in (*context().variables.values(), *built)
        if variable.trainable and tuple(variable.shape) == shape and hasattr(variable, "_layout")
    ]
    axes = {None if layout is None else layout.axes for layout in layouts}
    return layouts[0] if len(axes) == 1 else None


def _zeros(shape: tuple[int, ...], dtype: str, name: str, layout: Any = None) -> Variable:
    return keras.Variable(
        "zeros",
        shape=shape,
        dtype=dtype,
        trainable=False,
        autocast=False,
        name=name,
        **({} if layout is None else {"layout": layout}),  # which Keras has since 3.10
    )
