"""Names for the values of all frameworks, scalars with weights, and the outputs of a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..core import structures

Variable = Any  # a keras.Variable, or the framework's own variable in a native task
Tensor = Any

# The functions that branches and loops of a step call; loops pass on a list of tensors.
Branch = Callable[[], list[Tensor]]
Condition = Callable[[list[Tensor]], Tensor]
LoopBody = Callable[[list[Tensor]], list[Tensor]]
IndexedBody = Callable[[Tensor, list[Tensor]], list[Tensor]]


@dataclass(frozen=True, slots=True)
class Weighted:
    """A scalar and its weight in means; made by `treadle.weighted`."""

    value: Tensor
    weight: Tensor


structures.OPAQUE.add(Weighted)

Losses = dict[str, Tensor | Weighted]


def unweighted(x: Any) -> Any:
    """Return the value of a weighted scalar, and anything else as it is."""
    return x.value if isinstance(x, Weighted) else x


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outputs of one step, as tensors.

    Attributes:
        values: A scalar per name.
        weights: A scalar per name, for values made by `weighted`.
        broken: A boolean scalar per violation message, true if the violation happened.
    """

    values: Mapping[str, Tensor]
    weights: Mapping[str, Tensor]
    broken: Mapping[str, Tensor]
