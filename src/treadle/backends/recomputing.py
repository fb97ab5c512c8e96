"""Rematerialization: recomputing a function in the backward pass with its original values."""

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from keras import ops

from ..core.keras_internals import global_state, stateless_scope
from ..errors import StepError
from .scope import Scope, hand_outward
from .step_context import context
from .types import Tensor, Variable

# Keras' state of the enclosing layer calls: their call arguments (training) and autocast dtype.
_SURROUNDINGS = ("current_call_ctx", "autocast_scope")


class Recomputed:
    """A function whose later runs repeat the first one.

    Assignments of the first run are stored until `release`. In later runs the variables have the
    values from before the first run, so that a Dropout drops the same units; assignments are
    discarded; and layers see the same enclosing layers as in the first run.

    Args:
        function: A function of tensors that returns a structure of tensors.

    Attributes:
        held: `(variable, value)` pairs of the scopes around the first run.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        outer = stateless_scope()
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
            inputs: Its arguments.
            values: Values to use instead of those of `held`, if the differentiation needs them as
                explicit inputs.
        """
        held = self.held
        if values is not None:
            held = [(variable, x) for (variable, _), x in zip(held, values, strict=True)]
        first = self._changed is None
        with (
            nullcontext() if first else self.surroundings(),
            _SameAgain([*held, *self._before]) as scope,
        ):
            result = self._function(*inputs)
        if first:
            self._changed = scope.changed()
            self._before = [(v, ops.copy(v.value)) for v, _ in self._changed.values()]
        return result

    @contextmanager
    def surroundings(self) -> Generator[None]:
        """Restore the enclosing layers of the first run, as Keras sees them."""
        now = {name: global_state.get_global_attribute(name) for name in self._around}
        for name, value in self._around.items():
            global_state.set_global_attribute(name, copy.copy(value))
        try:
            yield
        finally:
            for name, value in now.items():
                global_state.set_global_attribute(name, value)

    def release(self) -> None:
        """Apply the assignments of the first run."""
        hand_outward(self._changed or {})


class _SameAgain(Scope):
    """A scope whose assignments do the same again in the backward pass, without outer scopes."""

    def _leaf(self, variable: Variable) -> None:
        """Return None: assigned values get the gradient of the weight when they are released."""


def without_losses(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function, to be run inside a scope, so that it raises if a layer calls `add_loss`.

    Raises:
        StepError: When the wrapped function is run.
    """

    def run(*inputs: Any) -> Any:
        scope = stateless_scope()
        before = len(scope.losses)
        result = function(*inputs)
        if len(scope.losses) > before:
            raise StepError(
                "a layer inside of treadle.remat passed a loss to add_loss, which would have no "
                "gradient: move that layer (one with an activity regularizer, for example) "
                "outside, or return its loss from the function"
            )
        return result

    return run


@contextmanager
def no_assignments() -> Generator[None]:
    """Reject assignments in a backward pass, which only a recomputed function can make.

    Raises:
        StepError: A variable was assigned.
    """
    with Scope() as scope:
        yield
    for variable in scope.assigned.values():
        raise StepError(
            f"{context().path_of(variable)} was changed in the backward pass, by a function that "
            "is recomputed there: it draws different random numbers or updates moving averages "
            f"twice, so gradients are wrong. {_INSTEAD}"
        )


@contextmanager
def no_layers() -> Generator[None]:
    """Reject layer calls in a backward pass, where layers do not get the `training` argument.

    Raises:
        StepError: A layer was called.
    """
    around = global_state.get_global_attribute("current_call_ctx")
    global_state.set_global_attribute("current_call_ctx", _UnknownCall())
    try:
        yield
    finally:
        global_state.set_global_attribute("current_call_ctx", around)


class _UnknownCall:
    """Replaces Keras' call context of the enclosing layers during the backward pass."""

    entry_layer = None

    def __init__(self) -> None:
        self._arguments: dict[str, Any] = {}

    def set_value(self, name: str, value: Any) -> None:
        """Store a call argument of a layer, for the layers inside it."""
        self._arguments[name] = value

    def get_value(self, name: str, default: Any = None) -> Any:
        """Return a call argument of the enclosing layers.

        Raises:
            StepError: It is unknown.
        """
        if name in self._arguments:
            return self._arguments[name]
        raise StepError(
            "a layer was called in the backward pass, by a function that is recomputed there: the "
            f"argument {name!r} of the enclosing layers is no longer known, so a Dropout may not "
            f"drop, and gradients are wrong. {_INSTEAD}"
        )

    @property
    def training(self) -> Any:
        """Whether the enclosing layers train, which Keras 3.9 reads and sets here."""
        return self.get_value("training")

    @training.setter
    def training(self, value: Any) -> None:
        self.set_value("training", value)


_INSTEAD = "Use treadle.remat instead of keras.remat"
