"""Averages of weights kept by optimizers (`use_ema=True`), assigned when training ends."""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import keras

from ..backends.base import active
from .derived import assigned
from .state import State


class Averages:
    """Sets weights to their averages when training ends, like Keras' `fit`.

    Only optimizers that updated weights since training began are used, because the averages of the
    others are out of date.

    Attributes:
        begun: The number of updates of each averaging optimizer when training began, by path. It is
            saved in checkpoints, so that a resumed run ends with the same weights.
    """

    def __init__(self) -> None:
        self.begun: dict[str, int] = {}

    @staticmethod
    def exist(state: State) -> bool:
        """Return whether an optimizer that averages weights has updated them."""
        return any(_updates(optimizer) for _, optimizer, _ in _averaging(state))

    def begin(self, state: State) -> None:
        """Record how many updates each optimizer made before training."""
        self.begun = {path: _updates(optimizer) for path, optimizer, _ in _averaging(state)}

    def restore(self, begun: Mapping[str, int]) -> None:
        """Restore the counts of a checkpoint."""
        self.begun = dict(begun)

    def finish(self, state: State, swapped: Collection[Any] = ()) -> list[str]:
        """Set weights to their averages. Does nothing if no optimizer averages weights.

        Args:
            state: The variables of the task.
            swapped: Optimizers for which a callback has swapped averages and weights, so that the
                weights are the averages already. Their slots are set to the weights.

        Returns:
            Warnings about variables that several optimizers average.
        """
        backend = active()
        owners: dict[str, str] = {}
        warnings: list[str] = []
        for path, optimizer, outer in _averaging(state):
            updates = _updates(optimizer)
            if not updates or updates == self.begun.get(path):
                continue
            done = any(outer is other for other in swapped)
            averages = optimizer._model_variables_moving_average
            for variable, average in zip(optimizer._trainable_variables, averages, strict=True):
                if average is None:
                    continue
                name = state.path_of(variable)
                if name in owners:
                    warnings.append(
                        f"{owners[name]} and {path} both average {name} (use_ema=True): training "
                        f"ends with the average of {path}, which comes last in the task"
                    )
                owners[name] = path
                source, target = (variable, average) if done else (average, variable)
                # A copy, since `fit` on JAX donates buffers, which variables must not share.
                backend.write(target, keras.ops.copy(backend.keep(source)))
                assigned([target])
        return warnings


def _averaging(state: State) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the optimizer and the outer optimizer of all built ones that average.

    The outer optimizer is the `keras.optimizers.MultiOptimizer` or the `LossScaleOptimizer` that
    contains the optimizer, or the optimizer itself.
    """
    for path, outer in state.optimizers.items():
        parts = [x for value in vars(outer).values() if isinstance(value, list) for x in value]
        parts = [x for x in parts if isinstance(x, keras.optimizers.Optimizer)]
        named = {f"{path}/inner_optimizers/{i}": part for i, part in enumerate(parts)}
        if (scaled := getattr(outer, "inner_optimizer", None)) is not None:
            named = {f"{path}/inner_optimizer": scaled}
        for name, part in (named or {path: outer}).items():
            if part.use_ema and part.built:
                yield name, part, outer


def _updates(optimizer: Any) -> int:
    count = optimizer.iterations  # not a variable if the optimizer accumulates gradients
    is_variable = isinstance(count, keras.Variable)
    return int(active().read(count) if is_variable else keras.ops.convert_to_numpy(count))
