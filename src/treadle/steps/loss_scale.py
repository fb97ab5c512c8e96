"""Loss scaling: what keeps small gradients alive where layers compute in float16.

float16 has nothing between 0 and 6e-8, and many gradients lie there. So every loss is multiplied by
a scale before it is differentiated, and its gradients are divided by that scale, in float32,
afterwards (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740). Where the scale is too
large, gradients overflow; the step is then undone, and the scale halved.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from ..backends.base import Tensor, Variable
from ..core.logs import LOSS_SCALE, UNDONE
from ..errors import ConfigurationError, StateError, StepError
from .skipping import Step, counted_unless


class LossScale:
    """The factor by which losses are multiplied while they are differentiated.

    A task whose layers compute in float16 gets one by itself, as its attribute `loss_scale`. Give
    it one of your own to begin elsewhere.

    Args:
        initial: The first scale. One that is too large costs a few undone steps; one that is too
            small is found out slowly.
        growth_steps: The scale is doubled after so many steps in a row with finite gradients.

    Attributes:
        scale: The scale, a float32 variable.
        finite_steps: Steps in a row with finite gradients, an int32 variable; -1 within a step that
            has others.

    Raises:
        ConfigurationError: A scale or a number of steps that is not positive.

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
        """Return a task's scale; one is made, and kept as its attribute, where it has none.

        Raises:
            StateError: The attribute is something else.
        """
        found = vars(task).get(LOSS_SCALE)
        if found is None:
            # A frozen dataclass would refuse setattr.
            found = vars(task)[LOSS_SCALE] = cls()
        if not isinstance(found, cls):
            raise StateError(
                f"the task's layers compute in float16, so its attribute {LOSS_SCALE!r} must be a "
                f"treadle.LossScale, but it is {found!r}: rename yours"
            )
        return found

    @property
    def variables(self) -> list[Variable]:
        """Both variables."""
        return [self.scale, self.finite_steps]

    def factor(self, nested: bool) -> Tensor:
        """Return by what to multiply a loss.

        Within another objective it is the root of the scale: what flows back through an inner
        gradient was multiplied by the scale and divided by the root, so both are lifted alike.
        """
        scale = ops.convert_to_tensor(self.scale)
        return ops.sqrt(scale) if nested else scale

    def look(self, gradients: Sequence[Tensor]) -> None:
        """Take note of gradients: of one that is not finite, until the step ends."""
        if gradients:
            # A sum is finite unless a term is not (or it is beyond float32, which is as bad): one
            # pass over each gradient.
            sums = [ops.cast(ops.sum(_wide(g)), "float32") for g in gradients]
            finite = ops.isfinite(ops.sum(ops.stack(sums)))
            # A variable, since gradients may be inside a branch, a mapped function or an objective.
            self.finite_steps.assign(
                ops.where(finite, ops.convert_to_tensor(self.finite_steps), -1)
            )

    def end_step(self) -> Tensor:
        """Adapt the scale to what was seen in a step; tells whether the step must be undone."""
        before = ops.convert_to_tensor(self.finite_steps)
        scale = ops.convert_to_tensor(self.scale)
        undone = ops.less(before, 0)
        doubled = scale * 2
        grows = ops.logical_and(before + 1 >= self.growth_steps, ops.isfinite(doubled))
        self.scale.assign(ops.where(undone, scale * 0.5, ops.where(grows, doubled, scale)))
        self.finite_steps.assign(ops.where(ops.logical_or(undone, grows), 0, before + 1))
        return undone


def scaled(loss: Tensor, factor: Tensor) -> Tensor:
    """Return a loss to differentiate, of 32 bits at least: a scaled one soon overflows 16."""
    loss = _wide(loss)
    return loss * ops.cast(factor, loss.dtype)


def unscaled(gradient: Tensor, factor: Tensor, dtype: Any) -> Tensor:
    """Return the true gradient, of this dtype."""
    gradient = _wide(gradient)
    # Divided, not multiplied by the inverse, which could be too small to be a number.
    return ops.cast(gradient / ops.cast(factor, gradient.dtype), dtype)


def undoing(step: Step, scale: LossScale, changed: Sequence[Variable], name: str) -> Step:
    """Return a step that is undone whole where some gradient in it was not finite.

    An undone step leaves behind a smaller scale and what it returned, which then counts in no mean.

    Args:
        step: A function of a batch that returns values and weights.
        scale: The scale of its task.
        changed: What it may change, states of seed generators apart: these go on.
        name: The step's name, for messages.
    """

    def guarded(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        before = [ops.copy(ops.convert_to_tensor(variable)) for variable in changed]
        used = ops.copy(ops.convert_to_tensor(scale.scale))
        values, weights = step(batch)
        _refuse_own_names(values, name)
        # It may have returned a variable's own value, which is about to change.
        values = {key: ops.copy(value) for key, value in values.items()}
        undone = scale.end_step()
        for variable, old in zip(changed, before, strict=True):
            variable.assign(ops.where(undone, old, ops.convert_to_tensor(variable)))
        values, weights = counted_unless(undone, values, weights, batch)
        return {**values, LOSS_SCALE: used}, {**weights, LOSS_SCALE: weights[UNDONE]}

    return guarded


def _wide(tensor: Tensor) -> Tensor:
    narrow = keras.backend.standardize_dtype(tensor.dtype) in ("float16", "bfloat16")
    return ops.cast(tensor, "float32") if narrow else tensor


def _refuse_own_names(values: Mapping[str, Any], name: str) -> None:
    for own in (LOSS_SCALE, UNDONE):
        if own in values:
            raise StepError(
                f"{name} returned {own!r}, which is what loss scaling logs under this name: rename "
                "it"
            )
