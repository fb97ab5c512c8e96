"""Scopes, in which variables take other values temporarily."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
from keras import ops

from ..core.keras_internals import stateless_scope
from .step_context import context
from .types import Tensor, Variable

_add_loss: Any = keras.Layer.add_loss  # the original: step inspection patches the method


class Scope(keras.StatelessScope):
    """A stateless scope: variables take its values, and assignments stay inside it.

    Scopes nest: a value that a scope does not hold is looked up in the enclosing scope, and finally
    in the variable itself. Nested `keras.StatelessScope`s do not do this.

    Attributes:
        assigned: Variables that were assigned inside, by id.
        foreign: Variables that were read but are in no scope, by id: they would be constants of a
            compiled step.
        losses: The losses that layers passed to `add_loss`, here or in the enclosing scope.
    """

    def __init__(
        self, values: Iterable[tuple[Variable, Tensor]] = (), differentiated: bool = False
    ) -> None:
        super().__init__(collect_losses=True)
        pairs = list(values)
        self._holds = {id(variable): variable for variable, _ in pairs}  # keeps the ids alive
        self.state_mapping = {id(variable): value for variable, value in pairs}
        self._given = dict(self.state_mapping)
        self._differentiated = differentiated
        self.assigned: dict[int, Variable] = {}
        self.foreign: dict[int, Variable] = {}

    def __enter__(self) -> "Scope":
        """Make this the current scope."""
        super().__enter__()
        if self.original_scope is not None:
            self.losses = list(self.original_scope.losses)
        return self

    def get_current_value(self, variable: Variable) -> Any:
        """Return the innermost value of a variable.

        None if it is created in this scope: Keras initializes it at the scope's end, and takes a
        value of its initializer until then.
        """
        value = self._held(variable)
        if value is not None:
            return value
        self.foreign[id(variable)] = variable
        return variable._value

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Store an assigned value.

        A variable that is being differentiated keeps its gradient if the objective assigns it, as
        spectral normalization does: the loss is then differentiated at the new value, as with
        in-place assignments.
        """
        variable, value = update
        value = ops.stop_gradient(value)  # in-place assignments carry no gradient either
        leaf = self._leaf(variable)
        if leaf is not None:
            value = value + (leaf - ops.stop_gradient(leaf))
        own = variable._value
        if own is not None and value.dtype != own.dtype:  # in mixed precision, before Keras 3.13
            value = ops.cast(value, keras.backend.standardize_dtype(own.dtype))
        self._holds[id(variable)] = variable
        self.assigned[id(variable)] = variable
        self.state_mapping[id(variable)] = value

    def note(self, inner: "Scope") -> None:
        """Count what an inner scope read and assigned as read and assigned here, unchanged."""
        self.foreign |= inner.foreign
        for key, variable in inner.assigned.items():
            self.state_mapping[key] = self.get_current_value(variable)
            self._holds[key] = self.assigned[key] = variable

    def changed(self) -> dict[int, tuple[Variable, Tensor]]:
        """Return `{id: (variable, value)}` of the variables that were assigned inside."""
        return {key: (v, self.state_mapping[key]) for key, v in self.assigned.items()}

    def held(self) -> list[tuple[Variable, Tensor]]:
        """Return all `(variable, value)` pairs of this scope and the enclosing ones."""
        outer = self.original_scope
        found = {id(v): (v, x) for v, x in outer.held()} if isinstance(outer, Scope) else {}
        found |= {key: (v, self.state_mapping[key]) for key, v in self._holds.items()}
        return list(found.values())

    def _held(self, variable: Variable) -> Tensor | None:
        value = self.state_mapping.get(id(variable))
        outer = self.original_scope
        if value is None and isinstance(outer, Scope):
            return outer._held(variable)
        if value is None and outer is not None:  # Keras' own, as in `stateless_call`
            return outer.get_current_value(variable)
        return value

    def _leaf(self, variable: Variable) -> Tensor | None:
        """Return the value at which this scope or an enclosing one differentiates a variable."""
        given, outer = self._given.get(id(variable)), self.original_scope
        if self._differentiated and given is not None:
            return given
        leaf = outer._leaf(variable) if isinstance(outer, Scope) else None
        return leaf if leaf is None or given is None else given


class DirectScope(Scope):
    """A scope that only records: variables have their own values, and assignments change these.

    Args:
        keep: Copies the value of a variable when it is first used.

    Attributes:
        kept: The variables that were used, each with its copy.
    """

    def __init__(self, keep: Callable[[Variable], Any] | None = None) -> None:
        super().__init__()
        self._keep = keep
        self.kept: list[tuple[Variable, Any]] = []

    def add_update(self, update: tuple[Variable, Tensor]) -> None:
        """Assign a value to the variable itself."""
        variable, value = update
        self._held(variable)
        self.assigned[id(variable)] = variable
        if variable._value is not None:  # else it is created in this scope
            variable._direct_assign(value)

    def _held(self, variable: Variable) -> None:
        new = id(variable) not in self.foreign and variable._value is not None
        self.foreign[id(variable)] = variable
        if new and self._keep is not None:
            self.kept.append((variable, self._keep(variable)))


def with_values(
    variables: Sequence[Variable], values: Sequence[Tensor] | None, function: Callable[[], Any]
) -> tuple[Any, list[Tensor]]:
    """Call a function where variables have these values, or those around if None.

    Returns:
        What it returned, and the values of the variables afterwards.
    """
    with Scope(zip(variables, values, strict=True) if values is not None else ()) as scope:
        found = function()
        return found, [ops.convert_to_tensor(scope.get_current_value(v)) for v in variables]


def assign_all(variables: Sequence[Variable], values: Sequence[Tensor]) -> None:
    """Assign each variable its value."""
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)


def tried(function: Callable[[], Any]) -> tuple[Any, Scope]:
    """Call a function in a dry run, and discard what it assigns, which is only noted.

    Returns:
        What it returned, and its scope, which knows what it read and assigned.
    """
    with Scope() as scope:
        result = function()
    outer = stateless_scope()
    if isinstance(outer, Scope):
        outer.note(scope)
    return result, scope


def restored(function: Callable[[], Any], variables: Any) -> DirectScope:
    """Call a function, and give variables back the values that they had before.

    Args:
        function: The function.
        variables: The backend, which copies and writes values.

    Returns:
        The scope of the call, which knows the variables that were read and assigned.
    """
    with DirectScope(variables.keep) as scope:
        try:
            function()
        finally:
            for variable, value in scope.kept:
                variables.write(variable, value)
    return scope


def hand_outward(changed: Mapping[int, tuple[Variable, Tensor]], keep: Iterable[int] = ()) -> None:
    """Assign an inner scope's changes in the enclosing scope or to the variables, except `keep`."""
    kept = set(keep)
    for key, (variable, value) in changed.items():
        if key not in kept:
            variable.assign(value)


def hand_losses(inner: Scope) -> None:
    """Pass the `add_loss` losses of an inner scope to the enclosing one, or to their layers."""
    outer = stateless_scope()
    if outer is not None:
        outer.losses[:] = inner.losses
        return
    for loss in inner.losses:
        for layer in context().layers:
            if id(loss) in layer._loss_ids:
                _add_loss(layer, loss)
