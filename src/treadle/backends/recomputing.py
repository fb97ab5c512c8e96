"""What is computed again in the backward pass: with the values of the first time."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

from keras import ops
from keras.src.backend.common.stateless_scope import get_stateless_scope

from ..errors import StepError
from .base import Scope, Tensor, Variable, context, hand_outward


class Recomputed:
    """A function that is run a second time as it was run the first time.

    What the first run assigns is kept until `release`. In later runs the variables have the values
    from before it, so that a Dropout drops the same units, and assignments are forgotten.

    Args:
        function: Takes tensors; returns a structure of them.

    Attributes:
        held: Variables, and their values, that scopes around the first run hold.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        outer = get_stateless_scope()
        self.held = outer.held() if isinstance(outer, Scope) else []
        self._function = function
        self._before: list[tuple[Variable, Tensor]] = []
        self._changed: dict[int, tuple[Variable, Tensor]] | None = None

    def __call__(self, inputs: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> Any:
        """Run the function.

        Args:
            inputs: What it takes.
            values: What stands for the values of `held`, which differentiation may need explicitly.
        """
        held = self.held
        if values is not None:
            held = [(variable, x) for (variable, _), x in zip(held, values, strict=True)]
        with Scope([*held, *self._before]) as scope:
            result = self._function(*inputs)
        if self._changed is None:
            self._changed = scope.changed()
            self._before = [(v, ops.copy(v.value)) for v, _ in self._changed.values()]
        return result

    def release(self) -> None:
        """Assign for good what the first run assigned."""
        hand_outward(self._changed or {})


def without_losses(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse a function, to be run inside a scope, that hands a loss to `add_loss`.

    Raises:
        StepError: When it is run.
    """

    def run(*inputs: Any) -> Any:
        scope = get_stateless_scope()
        before = len(scope.losses)
        result = function(*inputs)
        if len(scope.losses) > before:
            raise StepError(
                "a layer inside of treadle.remat handed a loss to add_loss, which would have no "
                "gradient: leave that layer (one with an activity regularizer, for example) "
                "outside, or return its loss from the function"
            )
        return result

    return run


@contextmanager
def no_assignments() -> Generator[None]:
    """Refuse assignments in the backward pass, which only what is computed again there makes.

    Raises:
        StepError: A variable was assigned: its gradients would be those of another function.
    """
    with Scope() as scope:
        yield
    for variable in scope.assigned.values():
        raise StepError(
            f"{context().path_of(variable)} was changed in the backward pass, by a function that "
            "is computed again there: keras.remat lets a Dropout draw other numbers then, and "
            "BatchNormalization move its averages twice, so gradients are wrong. Use treadle.remat "
            "in its place"
        )
