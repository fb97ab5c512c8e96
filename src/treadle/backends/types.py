"""Names for the values of all frameworks, and scalars with weights."""

from collections.abc import Callable
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
