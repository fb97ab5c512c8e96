"""Undoing steps with non-finite results, inside the compiled step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from keras import ops
from keras.backend import standardize_dtype

from ..backends.types import Tensor, Variable
from ..backends.window import examples_of
from ..core.float64 import wide
from ..core.logs import UNDONE
from ..errors import StepError

Step = Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]


def skipping(
    step: Step, changed: Sequence[Variable], watched: Sequence[Variable], name: str
) -> Step:
    """Wrap a step so that all its updates are undone if a value or a variable is not finite.

    The values of an undone step are logged, in addition to `undone`, but do not count in any mean.

    Args:
        step: A function of a batch that returns values and weights.
        changed: The variables that the step may change, except the states of seed generators, which
            are not undone.
        watched: The variables among them that must be finite.
        name: The step's name, for messages.
    """

    def is_undone(values: Mapping[str, Tensor]) -> Tensor:
        checked = [*values.values(), *(ops.convert_to_tensor(v) for v in watched)]
        return ops.logical_not(_all_finite(checked))

    return undone_if(is_undone, step, changed, name, "skipping steps")


def undone_if(
    is_undone: Callable[[Mapping[str, Tensor]], Tensor],
    step: Step,
    changed: Sequence[Variable],
    name: str,
    feature: str,
    reserved: Sequence[str] = (UNDONE,),
) -> Step:
    """Wrap a step so that all its updates are undone if a function of its values returns true.

    The wrapped step adds `undone` to the values, and weights are zero if the step was undone.
    `feature` is what logs the `reserved` values, for the message if the step returns one of them.
    """

    def guarded(batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        before = [ops.copy(ops.convert_to_tensor(variable)) for variable in changed]
        values, weights = step(batch)
        if found := next((own for own in reserved if own in values), None):
            raise StepError(
                f"{name} returned {found!r}, but {feature} logs a value of its own under this "
                "name: rename yours"
            )
        # Copied, since the step may have returned a variable's buffer, which is about to change.
        values = {key: ops.copy(value) for key, value in values.items()}
        undone = is_undone(values)
        for variable, old in zip(changed, before, strict=True):
            variable.assign(ops.where(undone, old, ops.convert_to_tensor(variable)))
        examples = ops.cast(examples_of(batch), "float32")
        counted = {key: _unless(undone, weights.get(key, examples)) for key in values}
        values[UNDONE] = ops.cast(undone, "float32")
        return values, {**counted, UNDONE: examples}

    return guarded


def _all_finite(tensors: Sequence[Tensor]) -> Tensor:
    floats = [x for x in tensors if "float" in standardize_dtype(x.dtype)]
    # A sum is finite only if all terms are (an overflow is treated the same), so one
    # pass is enough.
    sums = [ops.sum(ops.cast(ops.sum(x), wide())) for x in floats]
    return ops.isfinite(ops.sum(ops.stack(sums))) if sums else ops.convert_to_tensor(True)


def _unless(undone: Tensor, weight: Any) -> Tensor:
    weight = ops.convert_to_tensor(weight)
    return ops.where(undone, ops.zeros_like(weight), weight)
