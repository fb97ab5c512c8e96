"""Loss scaling, which keeps small gradients from underflowing if layers compute in float16.

float16 cannot represent numbers between 0 and 6e-8, and many gradients lie there. So every loss is
multiplied by a scale before it is differentiated, and its gradients are divided by that scale
afterwards, in float32 (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). If the scale is
too large, gradients overflow: then the step is undone and the scale halved.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from ..backends.types import Tensor, Variable
from ..core.logs import LOSS_SCALE, UNDONE
from ..errors import ConfigurationError, StateError
from .skipping import Step, undone_if


class LossScale:
    """A dynamic loss scale: the factor by which losses are multiplied before differentiation.

    A task whose layers compute in float16 gets one automatically, as its attribute `loss_scale`. To
    start with another scale, assign your own `LossScale` to this attribute.

    Args:
        initial: The initial scale. If it is too large, a few steps are undone; if it is too small,
            it takes many steps to grow.
        growth_steps: The scale is doubled after this many consecutive steps with finite gradients.

    Attributes:
        scale: The scale, a float32 variable.
        finite_steps: The number of consecutive steps with finite gradients, an int32 variable; -1
            within a step that has non-finite gradients.

    Raises:
        ConfigurationError: The scale or the number of steps is not positive.

    Example:
        >>> import treadle
        >>> scale = treadle.LossScale(initial=2.0**10, growth_steps=500)
        >>> float(scale.scale.numpy())
        1024.0
    """

    holds_state = True

    def __init__(self, initial: float = 2.0**15, growth_steps: int = 2000) -> None:
        if not initial > 0 or growth_steps < 1:
            raise ConfigurationError(
                f"LossScale needs a positive scale and at least 1 step between growths, not "
                f"initial={initial!r}, growth_steps={growth_steps!r}"
            )
        self.initial, self.growth_steps = initial, growth_steps
        kind: dict[str, Any] = {"trainable": False, "autocast": False}
        self.scale = keras.Variable(initial, dtype="float32", name="scale", **kind)
        self.finite_steps = keras.Variable(0, dtype="int32", name="finite_steps", **kind)

    @classmethod
    def of(cls, task: Any) -> "LossScale":
        """Return a task's loss scale; create it, as the task's attribute, if there is none.

        Raises:
            StateError: The attribute is not a `LossScale`.
        """
        found = vars(task).get(LOSS_SCALE)
        if found is None:
            # Not by setattr, which a frozen dataclass rejects.
            found = vars(task)[LOSS_SCALE] = cls()
        if not isinstance(found, cls):
            raise StateError(
                f"the task's layers compute in float16, so its attribute {LOSS_SCALE!r} must be a "
                f"treadle.LossScale, but it is {found!r}: rename yours"
            )
        return found

    @property
    def variables(self) -> list[Variable]:
        """The variables `scale` and `finite_steps`."""
        return [self.scale, self.finite_steps]

    def factor(self, nested: bool) -> Tensor:
        """Return the factor by which to multiply a loss.

        Within another objective it is the square root of the scale: what flows back through an
        inner gradient is multiplied by the scale and divided by the root, so the inner and the
        outer gradients are scaled by the same factor.
        """
        scale = ops.convert_to_tensor(self.scale)
        return ops.sqrt(scale) if nested else scale

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Set `finite_steps` to -1 if any gradient is not finite."""
        if gradients:
            # A sum is finite only if all terms are (an overflow of float32 is treated the same), so
            # one pass over each gradient is enough.
            sums = [ops.cast(ops.sum(_wide(g)), "float32") for g in gradients]
            finite = ops.isfinite(ops.sum(ops.stack(sums)))
            # In a variable, since this may run inside a branch, a mapped function or an objective.
            self.finite_steps.assign(
                ops.where(finite, ops.convert_to_tensor(self.finite_steps), -1)
            )

    def end_step(self) -> Tensor:
        """Update the scale after a step and return whether the step must be undone."""
        before = ops.convert_to_tensor(self.finite_steps)
        scale = ops.convert_to_tensor(self.scale)
        undone = ops.less(before, 0)
        doubled = scale * 2
        grows = ops.logical_and(before + 1 >= self.growth_steps, ops.isfinite(doubled))
        self.scale.assign(ops.where(undone, scale * 0.5, ops.where(grows, doubled, scale)))
        self.finite_steps.assign(ops.where(ops.logical_or(undone, grows), 0, before + 1))
        return undone


def scaled(loss: Tensor, factor: Tensor) -> Tensor:
    """Return the scaled loss, with at least 32 bits: scaled losses easily overflow float16."""
    loss = _wide(loss)
    return loss * ops.cast(factor, loss.dtype)


def unscaled(gradient: Tensor, factor: Tensor, dtype: Any) -> Tensor:
    """Return the unscaled gradient, cast to `dtype`."""
    gradient = _wide(gradient)
    # Not multiplied by the inverse, which could underflow.
    return ops.cast(gradient / ops.cast(factor, gradient.dtype), dtype)


def undoing(step: Step, scale: LossScale, changed: Sequence[Variable], name: str) -> Step:
    """Wrap a step so that all its updates are undone if any of its gradients is not finite.

    An undone step only reduces the scale. Its values are returned, but with weight zero, so they do
    not count in any mean.

    Args:
        step: A function of a batch that returns values and weights.
        scale: The loss scale of its task.
        changed: The variables that the step may change, except the states of seed generators, which
            are not undone.
        name: The step's name, for messages.
    """
    guarded = undone_if(
        lambda _: scale.end_step(), step, changed, name, "loss scaling", (LOSS_SCALE, UNDONE)
    )

    def with_scale(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        used = ops.copy(ops.convert_to_tensor(scale.scale))
        values, weights = guarded(batch)
        return {**values, LOSS_SCALE: used}, {**weights, LOSS_SCALE: weights[UNDONE]}

    return with_scale


def _wide(tensor: Tensor) -> Tensor:
    narrow = keras.backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16")
    return ops.cast(tensor, "float32") if narrow else tensor
