"""Interventions in what `gradients` and `input_gradients` return."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

from ...backends.step_context import context
from ...steps import gradients
from .recording import Info, StepRecorder, user_line
from .spying import replaced

CALL: Final = "differentiation"
"""The event of a call: its number, the paths of its variables, its inputs and what it returned."""


@contextmanager
def gradient_calls(
    changed: int | None = None, change: Callable[[Any], Any] | None = None
) -> Generator[None]:
    """Record the calls that differentiate in a step; change the gradients that one returns.

    On JAX an objective is traced before it runs, so some numbers are of calls without an event.

    Args:
        changed: The number of the call to change.
        change: Returns another gradient.
    """
    count = 0

    def spied(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(
            function: Any, names: Any, variables: Any, inputs: Any, *more: Any
        ) -> tuple[Any, Any]:
            nonlocal count
            result, found = original(function, names, variables, inputs, *more)
            recorder = context().recorder
            if isinstance(recorder, StepRecorder):
                path_of = context().path_of
                facts = {"number": count, "paths": [path_of(v) for v in variables]}
                value = result[0] if isinstance(result, tuple) else result
                recorder.add(
                    CALL, Info("", CALL, user_line(), more=facts), inputs=inputs, value=value
                )
                if change is not None and count == changed:
                    found = {name: _mapped(change, part) for name, part in found.items()}
                count += 1
            return result, found

        return called

    with replaced(gradients, "_differentiate", spied):
        yield


def _mapped(change: Callable[[Any], Any], part: Any) -> list[Any]:
    return [None if gradient is None else change(gradient) for gradient in part]
