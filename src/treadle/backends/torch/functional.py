"""Differentiation inside of `torch.vmap` and `torch.func`, where autograd itself sees no graph."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...core import structures
from ..recomputing import no_assignments
from ..scope import Scope, hand_losses, hand_outward
from ..step_context import deeper
from ..types import Losses, Tensor, Variable, Weighted, unweighted


def differentiated(
    function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
    variables: Sequence[Variable],
    inputs: Sequence[Tensor],
    groups: Mapping[str, Sequence[int]],
) -> tuple[Any, dict[str, list[Tensor | None]]]:
    """Differentiate inside of a level of `torch.func`; see `Transformations.differentiate`.

    `torch.func.vjp` opens the level. Its own gradients are not used: they are zeros for what a loss
    does not depend on.
    """
    count = len(variables)
    met: list[Any] = []

    def objective(*leaves: Tensor) -> Any:
        with deeper(), Scope(zip(variables, leaves[:count], strict=True), True) as scope:
            weighted, result = function(leaves[count:])
        losses = {name: unweighted(loss) for name, loss in weighted.items()}
        # A level outside of this one may differentiate again.
        gradients = gradients_of(losses, leaves, groups, again=True)
        changed = [value for _, value in scope.changed().values()]
        met[:] = [scope, result, gradients]
        return losses[next(iter(groups))], _tensors([result, gradients, changed, scope.losses])

    values = [*(v.value for v in variables), *inputs]
    opened: Any = torch.func.vjp(objective, *values, has_aux=True)
    aux = opened[2]
    scope, result, gradients = met
    old = scope.changed()
    outside = [result, gradients, [value for _, value in old.values()], scope.losses]
    result, gradients, changed, losses = _with_tensors(outside, aux)
    pairs = zip(old.items(), changed, strict=True)
    hand_outward({key: (variable, value) for (key, (variable, _)), value in pairs})
    scope.losses[:] = losses
    hand_losses(scope)
    return result, gradients


def gradients_of(
    losses: Mapping[str, Tensor],
    leaves: Sequence[Tensor],
    groups: Mapping[str, Sequence[int]],
    again: bool,
) -> dict[str, list[Tensor | None]]:
    """Differentiate each loss by its group of leaves; None for those that it does not depend on.

    Args:
        losses: The losses by name.
        leaves: The tensors that they are differentiated by.
        groups: The positions in `leaves`, by the name of the loss.
        again: Whether the gradients may be differentiated too, so that the graph is kept.
    """
    gradients: dict[str, list[Tensor | None]] = {}
    with no_assignments():
        for number, (name, group) in enumerate(groups.items(), 1):
            chosen = [leaves[i] for i in group]
            gradients[name] = [None] * len(chosen)
            if losses[name].requires_grad:
                gradients[name] = list(
                    torch.autograd.grad(
                        losses[name],
                        chosen,
                        allow_unused=True,
                        retain_graph=again or number < len(groups),
                        create_graph=again,
                    )
                )
    return gradients


def _tensors(structure: Any) -> list[Tensor]:
    """Return the tensors of a structure, in order."""
    found: list[Tensor] = []

    def keep(x: Any) -> Any:
        found.append(x)
        return x

    _mapped(keep, structure)
    return found


def _with_tensors(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the structure with other tensors."""
    following = iter(tensors)
    return _mapped(lambda _: next(following), structure)


def _mapped(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, Weighted):
            return Weighted(leaf(x.value), leaf(x.weight))
        return function(x) if isinstance(x, torch.Tensor) else x

    return structures.mapped(leaf, structure)
