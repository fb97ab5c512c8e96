"""Helpers for steps: the step number, weighted values, phases, blending, frozen copies."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from ..backends.base import active
from ..backends.step_context import context, is_running
from ..backends.types import Tensor, Variable, Weighted
from ..core import keras_internals, structures
from ..errors import OwnershipError, StepError
from .copying import copied
from .derived import assigned_in
from .gradients import listed


def step() -> Tensor:
    """Return the running step's number, an int32 scalar tensor: 0 in the first step of a run.

    Pass it to schedules, for example those in `keras.optimizers.schedules`.

    Example:
        >>> import treadle
        >>> int(treadle.step())
        0
    """
    return ops.convert_to_tensor(context().number, dtype="int32")


def weighted(value: Tensor, weight: Tensor) -> Weighted:
    """Attach a weight to a scalar, in place of the number of examples.

    Return it from a step, to weight the mean over steps. Or return it from an objective as the
    loss: in several processes, the loss and its gradients are then the mean over the items of all
    processes, as in one process. `gradients` and `minimize` return the weighted loss, which the
    step may return as it is.

    Args:
        value: A scalar: the mean over the items that `weight` counts, for example a loss per token.
            It must be finite if there are none.
        weight: A scalar: the number of items. In several processes of PyTorch or TensorFlow,
            those in the rows of this process.

    Example:
        >>> import treadle
        >>> treadle.weighted(2.0, 7).weight
        7
    """
    return Weighted(value, weight)


def gathered(x: Tensor) -> Tensor:
    """Return a tensor with the rows of the whole batch, for losses that combine examples.

    In several processes of PyTorch or TensorFlow, each one computes its rows of a batch. A
    contrastive loss compares each example with all others: compute it from gathered embeddings, in
    all processes alike. Gradients flow back to the process that computed the row. Elsewhere a step
    has the whole batch, and the tensor itself is returned.

    Args:
        x: A tensor with one row for each example, or several such tensors concatenated; or a
            structure of such tensors.

    Raises:
        StepError: The tensor has no rows of the batch.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> treadle.gathered(ops.ones((4, 2))).shape[0]
        4
    """
    if context().build is not None:
        return x
    return structures.mapped(active().gathered, x)


@contextmanager
def phase(name: str, owns: Sequence[Any]) -> Generator[None]:
    """Declare which variables a part of a step may change, as a context manager.

    With `Options(checked=True)`, a change of any other variable is an error that names the phase
    and the variable. Otherwise the declaration is not checked and costs nothing. Metrics and the
    states of seed generators are unowned and may always change.

    Args:
        name: The phase's name, for the message.
        owns: Models, layers, optimizers or variables.

    Raises:
        OwnershipError: After the step: a variable that the phase does not own has changed.
        StepError: The phase is inside an objective, `cond` or `for_each`.

    Example:
        >>> import keras, treadle
        >>> critic = keras.Variable(1.0)
        >>> with treadle.phase("critic", owns=[critic]):
        ...     _ = critic.assign(2.0)
    """
    step = context()
    if step.inside:
        raise StepError(
            f"phase {name!r} is inside an objective, a branch or a mapped function, where changes "
            "of other variables cannot be detected: put it around the whole call of gradients, "
            "minimize, cond or for_each"
        )
    if not step.checked or step.build is not None:
        yield
        return
    owned = {id(v) for thing in owns for v in _all_variables(thing)} | step.unowned
    watched = [(path, v) for path, v in step.variables.items() if id(v) not in owned]
    # Copies, since variables may be changed in place.
    before = [ops.copy(ops.convert_to_tensor(v)) for _, v in watched]
    yield
    for (path, variable), old in zip(watched, before, strict=True):
        new = ops.convert_to_tensor(variable)
        # NaN before and after counts as unchanged.
        numbers = ops.logical_or(ops.equal(new, new), ops.equal(old, old))
        changed = ops.any(ops.logical_and(ops.not_equal(new, old), numbers))
        message = f"phase {name!r} changed {path}, which it does not own"
        step.violations.append((message, changed))


def raise_violations(messages: Sequence[str]) -> None:
    """Raise an error for the violations that `phase` found.

    Raises:
        OwnershipError: There is at least one message.
    """
    if messages:
        raise OwnershipError(
            "; ".join(dict.fromkeys(messages))
            + ": add it to owns=[…], or freeze it with trainable = False"
        )


def blend(target: Any, source: Any, amount: float | Tensor) -> None:
    """Move a model's weights towards those of another: `target += amount * (source - target)`.

    For momentum encoders, target networks and averages of weights (Polyak averaging). Integer and
    boolean variables are copied.

    Args:
        target: A model or a list of variables; it is updated.
        source: A model or a list of variables of the same shapes.
        amount: From 0 (no change) to 1 (a copy).

    Raises:
        StepError: The numbers or the shapes of their variables differ.

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
        elif not is_running():
            new = ops.copy(new)  # on JAX, `fit` and `predict` donate the arrays of variables
        slow.assign(new)
    # A step computes derived state itself.
    if not (is_running() or keras_internals.stateless_scope() is not None):
        assigned_in(target)


def frozen_copy(model: Any) -> Any:
    """Return a non-trainable copy of a built model with the same weights.

    For target networks, momentum encoders and teachers. Update the copy with `blend`. The copy has
    no optimizer and shares no variable with the model. It is made from the model's configuration,
    or, if that does not create an equal model, by copying the object with all that it holds.

    Args:
        model: A built Keras model or layer.

    Raises:
        StepError: The model is not built, so it has no weights to copy; or it has no configuration
            and holds an object that cannot be copied.

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
    copy = copied(model)
    copy.trainable = False
    assigned_in(copy)
    return copy


def _weights(thing: Any) -> list[Variable]:
    return list(thing.weights) if hasattr(thing, "weights") else listed(thing)


def _all_variables(thing: Any) -> list[Variable]:
    """Return all variables of a model, layer, optimizer, metric, list or single variable."""
    if isinstance(thing, (list, tuple)):
        return [v for part in thing for v in _all_variables(part)]
    if isinstance(thing, keras.Variable) or not hasattr(thing, "variables"):
        return [thing]
    return list(thing.variables)
