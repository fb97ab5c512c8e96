"""Interventions in what `gradients` and `input_gradients` return."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from ...backends.base import active
from ...backends.step_context import context
from ...steps import gradients
from ..numbers import Array
from .recording import StepRecorder, user_line
from .spying import replaced


@dataclass(frozen=True)
class Call:
    """A call that differentiates.

    Attributes:
        paths: The variables; empty for inputs.
        shape: The shape of the only input; None for variables and for several inputs.
        inputs: The only input; None inside of an objective.
        value: What was differentiated, as an array; None inside of an objective.
        line: The line of the user's code.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...] | None
    inputs: Array | None
    value: Array | None
    line: str


@contextmanager
def gradient_calls(
    calls: list[Call], changed: int | None = None, change: Callable[[Any], Any] | None = None
) -> Generator[None]:
    """List the calls that differentiate in a step; change the gradients that one of them returns.

    Args:
        calls: The list.
        changed: The number of the call to change.
        change: Returns another gradient.
    """

    def spied(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(
            function: Any, names: Any, variables: Any, inputs: Any, *more: Any
        ) -> tuple[Any, Any]:
            result, found = original(function, names, variables, inputs, *more)
            if isinstance(context().recorder, StepRecorder):
                calls.append(_call(variables, inputs, result))
                if len(calls) - 1 == changed and change is not None:
                    found = keras.tree.map_structure(
                        lambda g: None if g is None else change(g), found
                    )
            return result, found

        return called

    with replaced(gradients, "_differentiate", spied):
        yield


def _call(variables: Any, inputs: Any, result: Any) -> Call:
    step = context()
    paths = tuple(step.path_of(variable) for variable in variables)
    if len(inputs) != 1:
        return Call(paths, None, None, None, user_line())
    outside = step.depth == 0
    values = [active().to_numpy(ops.stop_gradient(inputs[0]))] if outside else [None]
    scalar = result[0] if isinstance(result, tuple) and result else result
    if outside and ops.is_tensor(scalar):
        values.append(active().to_numpy(ops.stop_gradient(scalar)))
    shape = tuple(inputs[0].shape)
    return Call(paths, shape, values[0], values[1] if len(values) > 1 else None, user_line())
