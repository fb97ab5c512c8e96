"""Programs: steps ready to be compiled."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from keras import ops

from .scope import Scope
from .step_context import Effects, Limit, StepContext
from .types import Variable


@dataclass
class Program:
    """A step ready to be compiled: a function of a batch over a state.

    Attributes:
        function: `function(batch)`: returns values, explicit weights and violations.
        variables: The state, in order.
        seeds: The variables that are states of seed generators.
        new_context: A function that creates the context of one step from its number.
        refuse_hidden: A function that raises an error for variables that are not in the state.
        name: The step's name, for messages.
        native: Whether the step is written with the framework itself and computes its own
            gradients.
        number: The number of programs that the step has for batches of other shapes.
        effects: What the step does besides computing and changing variables.
        ranges: Where the step stores indices and labels that are out of range; part of `variables`.
    """

    function: Callable[..., Any]
    variables: Sequence[Variable]
    seeds: Sequence[Variable]
    new_context: Callable[[Any], StepContext]
    refuse_hidden: Callable[[Sequence[Variable]], None]
    name: str
    native: bool = False
    number: int = 0
    effects: Effects = field(default_factory=Effects)
    ranges: Mapping[Limit, Variable] = field(default_factory=lambda: {})


def scope_of_call(program: Program, stream: Any) -> Scope:
    """Return a scope in which every seed generator draws from the selected random stream."""
    offset = ops.cast(stream, "int32") * 7919 + 1
    return Scope(
        (seed, seed + ops.cast(ops.stack([offset, ops.zeros_like(offset)]), seed.dtype))
        for seed in program.seeds
    )
