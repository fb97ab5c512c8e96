"""Undoing, inside the compiled step, a step whose outcome is not a number."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops
from keras.backend import standardize_dtype

from ..backends.base import Tensor, Variable
from ..backends.window import examples_of
from ..core.logs import UNDONE
from ..errors import StepError

Step = Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]


def skipping(
    step: Step, changed: Sequence[Variable], watched: Sequence[Variable], name: str
) -> Step:
    """Return a step that is undone whole where a value or a variable is not finite after it.

    What it returned is logged all the same, beside `undone`, and counts in no mean.

    Args:
        step: A function of a batch that returns values and weights.
        changed: What it may change, states of seed generators apart: these go on.
        watched: Those of them that must stay finite.
        name: The step's name, for messages.
    """

    def guarded(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        before = [ops.copy(ops.convert_to_tensor(variable)) for variable in changed]
        values, weights = step(batch)
        if UNDONE in values:
            raise StepError(
                f"{name} returned {UNDONE!r}, which is what skipped steps log under this name: "
                "rename it"
            )
        # It may have returned a variable's own value, which is about to change.
        values = {key: ops.copy(value) for key, value in values.items()}
        looked_at = [*values.values(), *(ops.convert_to_tensor(v) for v in watched)]
        undone = ops.logical_not(_all_finite(looked_at))
        for variable, old in zip(changed, before, strict=True):
            variable.assign(ops.where(undone, old, ops.convert_to_tensor(variable)))
        return counted_unless(undone, values, weights, batch)

    return guarded


def counted_unless(
    undone: Tensor, values: Mapping[str, Tensor], weights: Mapping[str, Tensor], batch: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return values and `undone`, and weights with which undone values count in no mean."""
    examples = ops.cast(examples_of(batch), "float32")
    return (
        {**values, UNDONE: ops.cast(undone, "float32")},
        {
            **{key: _unless(undone, weights.get(key, examples)) for key in values},
            UNDONE: examples,
        },
    )


def _all_finite(tensors: Sequence[Tensor]) -> Tensor:
    floats = [x for x in tensors if "float" in standardize_dtype(x.dtype)]
    # A sum is finite unless a term is not (or it is beyond float32, which is as bad): one pass.
    sums = [ops.sum(ops.cast(ops.sum(x), "float32")) for x in floats]
    return ops.isfinite(ops.sum(ops.stack(sums))) if sums else ops.convert_to_tensor(True)


def _unless(undone: Tensor, weight: Any) -> Tensor:
    weight = ops.convert_to_tensor(weight)
    return ops.where(undone, ops.zeros_like(weight), weight)
