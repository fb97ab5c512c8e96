"""Branches and loops on TensorFlow: graphs assign variables; a scope's values are carried."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from ...core.keras_internals import stateless_scope
from ..base import Step
from ..scope import Scope, assign_all, with_values
from ..step_context import context
from ..types import Branch, Condition, IndexedBody, LoopBody, Tensor, Variable
from .patches import FuncGraph


class TensorFlowControlFlow:
    """The branches and loops of a step: Python's if it runs eagerly, else those of graphs."""

    def cond(self, predicate: Tensor, then: Branch, otherwise: Branch) -> list[Tensor]:
        """Run `tf.cond`; inside a scope, it also returns the values that either branch assigns."""
        if not _is_symbolic(predicate):
            return then() if bool(predicate) else otherwise()
        predicate = tf.cast(tf.convert_to_tensor(predicate), tf.bool)
        return _branches((then, otherwise), lambda both: tf.cond(predicate, *both))

    def switch(self, index: Tensor, branches: Sequence[Branch]) -> list[Tensor]:
        """Run `tf.switch_case`; inside a scope, it also returns the values that are assigned."""
        index = tf.clip_by_value(tf.cast(index, tf.int32), 0, len(branches) - 1)
        if not _is_symbolic(index):
            return branches[int(index)]()
        return _branches(branches, lambda each: tf.switch_case(index, each))

    def scan(
        self,
        function: Step,
        carry: list[Tensor],
        inputs: list[Tensor],
        count: int,
        reverse: bool = False,
        unroll: int | bool = 1,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run a loop that keeps results in arrays; `tf.map_fn` if nothing is carried.

        Nested differentiation, where variables have the values of a scope, gets a Python loop.
        """
        order = range(count)[::-1] if reverse else range(count)
        if count and (
            tf.executing_eagerly() or (stateless_scope() is not None and context().depth)
        ):
            found: dict[int, list[Tensor]] = {}
            for i in order:
                carry, found[i] = function(carry, [x[i] for x in inputs])
            return carry, [tf.stack(x) for x in zip(*map(found.get, range(count)), strict=True)]
        # A trace that only gives the shapes. A scope keeps its values out of an outer one; without
        # that, the graph keeps them: Keras' optimizers cannot assign what a scope has assigned.
        outer = nullcontext() if stateless_scope() is None else Scope()
        with FuncGraph("shapes").as_default(), outer:
            rows = [tf.zeros(x.shape[1:], x.dtype) for x in inputs]
            first = function(carry, rows)[1]
        shapes = [tf.TensorSpec.from_tensor(tf.convert_to_tensor(x)) for x in first]
        if inputs and shapes and not (carry or reverse or stateless_scope() is not None):
            return [], tf.map_fn(
                lambda rows: function([], rows)[1],
                inputs,
                fn_output_signature=shapes,
                parallel_iterations=1,
            )
        arrays = [_array(x[:1].shape[1:], x.dtype, count).unstack(x) for x in inputs]
        buffers = [_array(x.shape, x.dtype, count) for x in shapes]
        kept = len(carry)

        def body(i: Tensor, values: list[Any]) -> list[Any]:
            carry, buffers = (
                values[: len(values) - len(shapes)],
                values[len(values) - len(shapes) :],
            )
            row = count - 1 - i if reverse else i
            carry, found = function(carry, [x.read(row) for x in arrays])
            return [*carry, *(b.write(row, x) for b, x in zip(buffers, found, strict=True))]

        values = self.fori_loop(0, count, body, [*carry, *buffers])
        return values[:kept], [x.stack() for x in values[kept:]]

    def while_loop(
        self, condition: Condition, body: LoopBody, values: list[Tensor], maximum: int | None
    ) -> list[Tensor]:
        """Run `tf.while_loop`; inside a scope, it carries the values that the body assigns."""
        if tf.executing_eagerly():
            number = 0
            while (maximum is None or number < maximum) and bool(condition(values)):
                values, number = body(values), number + 1
            return values
        if stateless_scope() is not None:
            return _carrying(condition, body, values, maximum)
        return _loop(condition, body, values, maximum)

    def fori_loop(
        self, lower: Any, upper: Any, body: IndexedBody, values: list[Tensor]
    ) -> list[Tensor]:
        """Run `while_loop` over the numbers."""
        static = isinstance(lower, int) and isinstance(upper, int)
        found = self.while_loop(
            lambda values: tf.less(values[0], tf.cast(upper, values[0].dtype)),
            lambda values: [values[0] + 1, *body(values[0], values[1:])],
            [tf.convert_to_tensor(lower), *values],
            max(0, upper - lower) if static else None,
        )
        return found[1:]


def _is_symbolic(x: Any) -> bool:
    """Return whether this is a tensor of a graph, which has no value."""
    return tf.is_tensor(x) and not hasattr(x, "numpy")


def _array(shape: Any, dtype: Any, count: int) -> Any:
    return tf.TensorArray(dtype, size=count, element_shape=shape, clear_after_read=False)


def _branches(branches: Sequence[Branch], choose: Any) -> list[Tensor]:
    """Run one of several branches, with the values of a scope that any of them assigns.

    Args:
        branches: Functions that return tensors of the same shapes and dtypes.
        choose: A function that runs one of them in the graph.
    """
    if stateless_scope() is None:
        return choose(list(branches))
    changed = [v for branch in branches for v in _assigned_by(branch)]
    changed = list({id(v): v for v in changed}.values())
    result, values = choose([partial(with_values, changed, None, branch) for branch in branches])
    assign_all(changed, values)
    return result


def _loop(condition: Any, body: Any, values: list[Any], maximum: int | None) -> list[Any]:
    """Run a loop of the graph, one iteration after another, as they may assign variables."""
    return tf.while_loop(
        lambda *values: tf.cast(condition(list(values)), tf.bool),
        lambda *values: body(list(values)),
        values,
        maximum_iterations=maximum,
        parallel_iterations=1,
    )


def _carrying(condition: Any, body: Any, values: list[Any], maximum: int | None) -> list[Any]:
    """Run a loop of the graph that carries the values of a scope that the body assigns."""
    changed, count = _assigned_by(lambda: body(values)), len(values)

    def another(values: list[Any]) -> Tensor:
        return with_values(changed, values[count:], lambda: condition(values[:count]))[0]

    def once(values: list[Any]) -> list[Any]:
        found, held = with_values(changed, values[count:], lambda: body(values[:count]))
        return [*found, *held]

    with Scope() as scope:
        held = [tf.convert_to_tensor(scope.get_current_value(v)) for v in changed]
    values = _loop(another, once, [*values, *held], maximum)
    assign_all(changed, values[count:])
    return values[:count]


def _assigned_by(function: Callable[[], Any]) -> list[Variable]:
    """Return the variables that a function assigns, by tracing it in a separate graph."""
    with FuncGraph("assigned").as_default(), Scope() as scope:
        function()
    return list(scope.assigned.values())
