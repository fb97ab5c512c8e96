"""What is computed again in the backward pass: with the values of the first time."""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from keras import ops
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope

from ..errors import StepError
from .base import Scope, Tensor, Variable, context, hand_outward

# What Keras knows of the layers around a call: whether they train, and in which type they compute.
_SURROUNDINGS = ("current_call_ctx", "autocast_scope")


class Recomputed:
    """A function that is run a second time as it was run the first time.

    What the first run assigns is kept until `release`. In later runs the variables have the values
    from before it, so that a Dropout drops the same units, assignments are forgotten, and layers
    find themselves within the layers that were around the first run.

    Args:
        function: Takes tensors; returns a structure of them.

    Attributes:
        held: Variables, and their values, that scopes around the first run hold.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        outer = get_stateless_scope()
        self.held = outer.held() if isinstance(outer, Scope) else []
        self._function = function
        self._around = {
            name: copy.copy(global_state.get_global_attribute(name)) for name in _SURROUNDINGS
        }
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
        first = self._changed is None
        with (
            nullcontext() if first else self.surroundings(),
            Scope([*held, *self._before]) as scope,
        ):
            result = self._function(*inputs)
        if first:
            self._changed = scope.changed()
            self._before = [(v, ops.copy(v.value)) for v, _ in self._changed.values()]
        return result

    @contextmanager
    def surroundings(self) -> Generator[None]:
        """Let layers find around them what was around the first run."""
        now = {name: global_state.get_global_attribute(name) for name in self._around}
        for name, value in self._around.items():
            global_state.set_global_attribute(name, copy.copy(value))
        try:
            yield
        finally:
            for name, value in now.items():
                global_state.set_global_attribute(name, value)

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
    """Refuse assignments in a backward pass: only what is computed again there makes any.

    Raises:
        StepError: A variable was assigned.
    """
    with Scope() as scope:
        yield
    for variable in scope.assigned.values():
        raise StepError(
            f"{context().path_of(variable)} was changed in the backward pass, by a function that "
            "is computed again there: it draws other numbers then, or moves averages twice, so "
            f"gradients are wrong. {_INSTEAD}"
        )


@contextmanager
def no_layers() -> Generator[None]:
    """Refuse layers that are called in a backward pass, where nothing tells them that they train.

    Raises:
        StepError: One was called.
    """
    around = global_state.get_global_attribute("current_call_ctx")
    global_state.set_global_attribute("current_call_ctx", _Nothing())
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", around)


class _Nothing:
    """Stands for the layers around a layer that is called in the backward pass."""

    entry_layer = None

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}

    def set_value(self, name: str, value: Any) -> None:
        """Keep what a layer was told by its caller, for the layers within it."""
        self._told[name] = value

    def get_value(self, name: str, default: Any = None) -> Any:
        """Return what the layers around were told.

        Raises:
            StepError: Nobody knows.
        """
        if name in self._told:
            return self._told[name]
        raise StepError(
            "a layer was called in the backward pass, by a function that is computed again there: "
            f"it does not know any more what the layers around it were told ({name}), so a Dropout "
            f"may not drop, and gradients are wrong. {_INSTEAD}"
        )


_INSTEAD = "Use treadle.remat in the place of keras.remat"
