"""Branches and loops on JAX: the values of variables that they assign are inputs and outputs."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from ..base import Step
from ..scope import Scope, assign_all, with_values
from ..types import Branch, Condition, IndexedBody, LoopBody, Tensor, Variable
from .pure import Pure, stateful


class JaxControlFlow:
    """The branches and loops of a step: those of `jax.lax`."""

    def cond(self, predicate: Tensor, then: Branch, otherwise: Branch) -> list[Tensor]:
        """Run `lax.cond` over the values that either branch assigns."""
        predicate = jnp.asarray(predicate, dtype=bool)
        if not isinstance(predicate, Tracer):
            return then() if predicate else otherwise()
        return _branches((then, otherwise), lambda both: jax.lax.cond(predicate, *both))

    def switch(self, index: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
        """Run `lax.switch` over the values that any branch assigns."""
        index = jnp.clip(jnp.asarray(index, "int32"), 0, len(branches) - 1)
        if not isinstance(index, Tracer):
            return branches[int(index)]()
        return _branches(branches, lambda each: jax.lax.switch(index, each))

    def scan(
        self,
        function: Step,
        carry: list[Tensor],
        inputs: list[Tensor],
        count: int,
        reverse: bool = False,
        unroll: int | bool = 1,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run `lax.scan`, carrying the values that the function assigns."""

        def body(state: Any, inputs: Any) -> Any:
            carry, values = state
            (carry, found), values = with_values(changed, values, lambda: function(carry, inputs))
            return (carry, values), found

        with stateful():
            rows = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in inputs]
            changed = _changed_by(function, carry, rows)
            (carry, values), found = jax.lax.scan(
                body, (carry, _now(changed)), inputs, count, reverse, unroll
            )
            assign_all(changed, values)
        return carry, found

    def while_loop(
        self, condition: Condition, body: LoopBody, values: list[Tensor], maximum: int | None
    ) -> list[Tensor]:
        """Run `lax.while_loop`, carrying the values that the body assigns."""

        def another(state: Any) -> Any:
            number, values, held = state
            more, _ = with_values(changed, held, lambda: condition(values))
            more = jnp.asarray(more, dtype=bool)
            return more if maximum is None else more & (number < maximum)

        def once(state: Any) -> Any:
            number, values, held = state
            return number + 1, *with_values(changed, held, lambda: body(values))

        with stateful():
            changed = _changed_by(body, values)
            start = jnp.int32(0), values, _now(changed)
            _, values, held = jax.lax.while_loop(another, once, start)
            assign_all(changed, held)
        return values

    def fori_loop(
        self, lower: Any, upper: Any, body: IndexedBody, values: list[Tensor]
    ) -> list[Tensor]:
        """Run `lax.fori_loop`, carrying the values that the body assigns."""

        def once(i: Any, state: Any) -> Any:
            values, held = state
            return with_values(changed, held, lambda: body(i, values))

        with stateful():
            changed = _changed_by(body, jnp.asarray(lower), values)
            values, held = jax.lax.fori_loop(lower, upper, once, (values, _now(changed)))
            assign_all(changed, held)
        return values


def _branches(branches: Sequence[Branch], choose: Any) -> list[Tensor]:
    """Run one of several branches.

    Args:
        branches: Functions that return tensors of the same shapes and dtypes.
        choose: A function that runs one of pure branches.
    """
    with stateful():
        pures = [Pure((), False) for _ in branches]
        shapes = [
            jax.eval_shape(lambda pure=pure, branch=branch: pure((), lambda: (None, branch())))
            for pure, branch in zip(pures, branches, strict=True)
        ]
        changed = list({key: v for pure in pures for key, v in pure.changed.items()}.values())
        for other in shapes[1:]:
            _same_form(shapes[0][1][0], other[1][0])
        # A branch has no values of its own to begin with: it reads those around it.
        tensors, values = choose(
            [partial(with_values, changed, None, branch) for branch in branches]
        )
        assign_all(changed, values)
    return tensors


def _changed_by(function: Callable[..., Any], *arguments: Any) -> list[Variable]:
    """Return the variables that a function assigns."""
    pure = Pure((), False)
    jax.eval_shape(lambda *given: pure((), lambda: (None, function(*given))), *arguments)
    return list(pure.changed.values())


def _now(variables: Sequence[Variable]) -> list[Tensor]:
    with Scope() as scope:  # `value` would be cast in a layer of another dtype
        return [jnp.asarray(scope.get_current_value(v)) for v in variables]


def _same_form(one: Sequence[Any], other: Sequence[Any]) -> None:
    """Reject branches whose results differ in shape, or in a dtype that JAX does not promote."""

    def agree(x: Any, y: Any) -> bool:
        return x.shape == y.shape and (x.dtype == y.dtype or x.weak_type or y.weak_type)

    if len(one) != len(other) or not all(map(agree, one, other)):
        forms = [[(x.shape, x.dtype) for x in branch] for branch in (one, other)]
        raise TypeError(
            f"both branches of cond must return the same structure, shapes and dtypes: the first "
            f"returned {forms[0]}, the second {forms[1]}"
        )
