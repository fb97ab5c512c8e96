"""Pure functions: what a function does to variables and losses becomes a part of its results."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from ...core import structures
from ...core.keras_internals import stateless_scope
from ..scope import Scope, hand_outward
from ..step_context import context
from ..types import Tensor, Variable, Weighted
from .patches import keras_random


def _is_tensor(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))


class Split:
    """Splits a structure into its tensors and all other leaves, and joins them again.

    Containers of a class that is registered with JAX are taken apart too.
    """

    def __init__(self, structure: Any) -> None:
        self._outline = structures.outline(structure)
        leaves, self._treedef = jax.tree.flatten(structures.flatten(structure))
        self.tensors = [x for x in leaves if _is_tensor(x)]
        self._rest = [None if _is_tensor(x) else (x,) for x in leaves]

    def joined(self, tensors: Sequence[Any]) -> Any:
        """Return the structure with these tensors."""
        following = iter(tensors)
        leaves = [next(following) if x is None else x[0] for x in self._rest]
        return structures.pack(self._outline, self._treedef.unflatten(leaves))


class Pure:
    """Makes a function pure: its effects on variables and losses become outputs.

    A `Scope` collects the effects. Outputs that are not tensors are stored outside of the trace.
    """

    def __init__(self, variables: Sequence[Variable], differentiated: bool) -> None:
        self._variables = variables
        self._differentiated = differentiated
        self.split: Split
        self.changed: dict[int, Variable]
        self.layers_of_losses: list[list[Any]]

    def __call__(
        self, values: Sequence[Tensor], function: Callable[[], tuple[Any, Any]]
    ) -> tuple[Any, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Return `(first, (tensors of the second, changed values, add_loss losses))`."""
        pairs = zip(self._variables, values, strict=True)
        with Scope(pairs, differentiated=self._differentiated) as scope:
            first, second = function()
        self.split = Split(second)
        changed = scope.changed()
        self.changed = {key: variable for key, (variable, _) in changed.items()}
        layers = context().layers
        self.layers_of_losses = [
            [layer for layer in layers if id(loss) in layer._loss_ids] for loss in scope.losses
        ]
        return first, (self.split.tensors, [value for _, value in changed.values()], scope.losses)

    def release(self, aux: tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]) -> Any:
        """Apply the effects to the enclosing scope, and return the function's result."""
        tensors, values, losses = aux
        hand_outward(
            {
                key: (variable, value)
                for (key, variable), value in zip(self.changed.items(), values, strict=True)
            }
        )
        outer = stateless_scope()
        if outer is not None:
            outer.losses[:] = losses
            for loss, layers in zip(losses, self.layers_of_losses, strict=True):
                for layer in layers:
                    layer._loss_ids.add(id(loss))
        return self.split.joined(tensors)


jax.tree_util.register_dataclass(Weighted, ["value", "weight"], [])


@contextmanager
def stateful() -> Generator[None]:
    """Ensure that a scope collects assignments; outside of a step, apply them at the end."""
    if stateless_scope() is not None:
        yield
        return
    with keras_random():
        with Scope() as scope:
            yield
        hand_outward(scope.changed())
