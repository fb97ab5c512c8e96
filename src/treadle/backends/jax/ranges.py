"""The indices and labels of a first batch on JAX, where a dry run is only traced."""

from collections.abc import Sequence
from typing import Any

import jax

from ..step_context import Limit
from ..types import Tensor
from .patches import ClosedJaxpr, dce_jaxpr, jaxpr_as_fun
from .windows import primitives

LARGE = ("dot_general", "conv_general_dilated", "scan", "while", "sort", "pure_callback")
"""Primitives that take long, or do something else than compute."""


def computed(
    used: Sequence[tuple[Limit, Tensor]], closed: Any, batch: Sequence[Any]
) -> list[tuple[Limit, Any]]:
    """Compute the smallest and the largest integers that a traced step uses.

    Those that depend on a matrix product, a convolution or a loop are left out, since computing
    them takes as long as compiling the step. Such integers are a model's own predictions. What the
    step prints or calls is left out too, since a dry run must have no effects.

    Args:
        used: The limits, each with a tensor of the trace.
        closed: The jaxpr of the trace, whose first outputs are these tensors.
        batch: The arrays of the batch, on the device.
    """
    outputs = len(closed.jaxpr.outvars)
    jaxpr = closed.jaxpr.replace(eqns=[e for e in closed.jaxpr.eqns if e.outvars or not e.effects])
    chosen: list[int] = []
    for i in range(len(used)):
        part, _ = dce_jaxpr(jaxpr, [j == i for j in range(outputs)])
        if not part.effects and not primitives(part).intersection(LARGE):
            chosen.append(i)
    part, needed = dce_jaxpr(jaxpr, [j in chosen for j in range(outputs)])
    inputs = [x for x, is_needed in zip(batch, needed, strict=True) if is_needed]
    run = jax.jit(jaxpr_as_fun(ClosedJaxpr(part, closed.consts)))
    found = jax.device_get(run(*inputs)) if chosen else []
    return [(used[i][0], ends) for i, ends in zip(chosen, found, strict=True)]
