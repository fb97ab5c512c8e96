"""What travels from a source to an executor: some batches of equal form, stacked."""

from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive batches of equal structure, shapes and dtypes, stacked along a new first axis.

    Attributes:
        batches: The batch's own structure (tuple, dict, nested …), each leaf an array of shape
            (count, …batch's own shape); None leaves stay None.
        count: How many batches there are.
        examples: Examples in each of them: the first leaf's leading dimension, 1 for scalars.
    """

    batches: Any
    count: int
    examples: int


def row(batches: Any, index: int) -> Any:
    """Return one batch of a window; None leaves stay None."""
    return keras.tree.map_structure(lambda x: None if x is None else x[index], batches)
