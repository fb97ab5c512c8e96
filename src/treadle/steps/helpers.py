"""The rest of what a step calls: its number, weighted values, phases, and weights that follow."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from ..backends.base import Tensor, Variable, context
from ..core.options import without_tensorflow
from ..errors import OwnershipError, StepError
from .gradients import listed


def step() -> Tensor:
    """Return the running step's number, an int32 scalar tensor: 0 in the first step of a run.

    For schedules of anything: `keras.schedules`-like objects take it as it is.

    Example:
        >>> import treadle
        >>> int(treadle.step())
        0
    """
    return ops.convert_to_tensor(context().number, dtype="int32")


@dataclass(frozen=True, slots=True)
class Weighted:
    """A scalar and what it counts by in a mean; made by `weighted`."""

    value: Tensor
    weight: Tensor


def weighted(value: Tensor, weight: Tensor) -> Weighted:
    """Return a scalar from a step whose mean is weighted by something else than examples.

    Args:
        value: A scalar: the mean over what `weight` counts, a loss per token for example.
        weight: A scalar: how many there were.

    Example:
        >>> import treadle
        >>> treadle.weighted(2.0, 7).weight
        7
    """
    return Weighted(value, weight)


@contextmanager
def phase(name: str, owns: Sequence[Any]) -> Generator[None]:
    """Promise that a part of a step changes only what it owns.

    With `Options(checked=True)` a change of anything else is an error that names the phase and the
    variable; otherwise the promise costs nothing. Metrics and the states of seed generators belong
    to nobody and may always change.

    Args:
        name: For the message.
        owns: Models, layers, optimizers or variables.

    Raises:
        OwnershipError: When the step has run: a variable not owned has changed.
        StepError: It stands inside an objective, `cond` or `for_each`.

    Example:
        >>> import keras, treadle
        >>> critic = keras.Variable(1.0)
        >>> with treadle.phase("critic", owns=[critic]):
        ...     _ = critic.assign(2.0)
    """
    step = context()
    if step.inside:
        raise StepError(
            f"phase {name!r} stands inside an objective, a branch or a mapped function, where it "
            "cannot see what else changes: put it around the whole gradients, minimize, cond or "
            "for_each"
        )
    if not step.checked or step.build is not None:
        yield
        return
    owned = {id(v) for thing in owns for v in _all_variables(thing)} | step.owned_by_nobody
    watched = [(path, v) for path, v in step.variables.items() if id(v) not in owned]
    # `* 1` would round nothing but costs a copy, which a variable changed in place needs.
    before = [ops.copy(ops.convert_to_tensor(v)) for _, v in watched]
    yield
    for (path, variable), old in zip(watched, before, strict=True):
        new = ops.convert_to_tensor(variable)
        # What is NaN and stays so has not changed.
        numbers = ops.logical_or(ops.equal(new, new), ops.equal(old, old))
        changed = ops.any(ops.logical_and(ops.not_equal(new, old), numbers))
        message = f"phase {name!r} changed {path}, which it does not own"
        step.violations.append((message, changed))


def raise_violations(messages: Sequence[str]) -> None:
    """Raise what `phase` found.

    Raises:
        OwnershipError: There is a message.
    """
    if messages:
        raise OwnershipError(
            "; ".join(dict.fromkeys(messages))
            + ": add it to owns=[…], or freeze it with trainable = False"
        )


def blend(target: Any, source: Any, amount: float | Tensor) -> None:
    """Move a model's variables towards another's: `target += amount * (source - target)`.

    For momentum encoders, target networks and averages of weights (Polyak averaging). Variables of
    whole numbers are copied.

    Args:
        target: A model or a list of variables, changed.
        source: A model or a list of variables of the same shapes.
        amount: From 0 (nothing) to 1 (a copy).

    Raises:
        StepError: The two have other variables.

    Example:
        >>> import keras, treadle
        >>> slow, fast = keras.Variable(0.0), keras.Variable(1.0)
        >>> treadle.blend([slow], [fast], 0.25)
        >>> float(slow.numpy())
        0.25
    """
    into, out_of = _weights(target), _weights(source)
    if context().build is not None and len(into) != len(out_of):
        return  # not yet built
    if [tuple(v.shape) for v in into] != [tuple(v.shape) for v in out_of]:
        raise StepError(
            f"blend needs equal variables on both sides: the target has {len(into)} with shapes "
            f"{[tuple(v.shape) for v in into]}, the source {len(out_of)} with "
            f"{[tuple(v.shape) for v in out_of]}"
        )
    for slow, fast in zip(into, out_of, strict=True):
        new = ops.convert_to_tensor(fast)
        if "float" in slow.dtype:
            old = ops.convert_to_tensor(slow)
            new = old + ops.cast(amount, slow.dtype) * (ops.cast(new, slow.dtype) - old)
        slow.assign(new)


def frozen_copy(model: Any) -> Any:
    """Return a copy of a built model with the same weights that is not trainable.

    For target networks, momentum encoders and teachers; `blend` moves it.

    Args:
        model: A built Keras model or layer.

    Raises:
        StepError: The model is not built, so it has no weights to copy.

    Example:
        >>> import keras, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> treadle.frozen_copy(model).trainable_variables
        []
    """
    if not model.built:
        raise StepError(
            f"frozen_copy needs a built model, and {model.name!r} is not: give it an Input, or "
            "call it once on data of the right shape"
        )
    with without_tensorflow():
        copy = (
            keras.models.clone_model(model)
            if isinstance(model, keras.Model)
            else type(model).from_config(model.get_config())
        )
    if not copy.built:
        copy.build_from_config(model.get_build_config() or {})
    for old, new in zip(_weights(model), _weights(copy), strict=True):
        new.assign(old)
    copy.trainable = False
    return copy


def _weights(thing: Any) -> list[Variable]:
    return list(thing.weights) if hasattr(thing, "weights") else listed(thing)


def _all_variables(thing: Any) -> list[Variable]:
    """Return every variable of a model, layer, optimizer, metric, list, or the variable itself."""
    if isinstance(thing, (list, tuple)):
        return [v for part in thing for v in _all_variables(part)]
    if isinstance(thing, keras.Variable) or not hasattr(thing, "variables"):
        return [thing]
    return list(thing.variables)
