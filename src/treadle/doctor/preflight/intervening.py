"""Interventions: a step runs again, and outermost calls of layers return something else."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import keras
import numpy as np
from keras import ops

from ...core import structures
from ...core.keras_internals import INTERNALS, get_keras_mask, set_keras_mask
from ..numbers import Array, as_floats
from .recording import LAYER, OBJECTIVE, Event
from .spying import OuterCalls
from .trials import Trial

Change = Callable[[str, Any], Any]
"""Returns another tensor in place of an output, given its name among the event's arrays."""

MOST_CALLS: Final = 8
"""How many outermost calls of layers are changed, the last ones of a step."""


@contextmanager
def changed_outputs(changes: Mapping[int, Change]) -> Generator[None]:
    """Change the float tensors that outermost calls of layers return, by the number of the call.

    Masks that Keras attaches to outputs are kept. A context is for one step, since it counts calls.
    """
    layer_call = INTERNALS["layer_call"]
    original = layer_call.resolve()
    outer = OuterCalls()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with outer.entered() as number:
            outputs = original(self, *args, **kwargs)
        change = None if number is None else changes.get(number)
        return outputs if change is None else _changed(outputs, change)

    with layer_call.replaced(called):
        yield


def _changed(outputs: Any, change: Change) -> Any:
    values: list[Any] = []
    for keys, value in structures.with_paths(outputs):
        if ops.is_tensor(value) and keras.backend.is_float_dtype(value.dtype):
            new, mask = change(name_of(keys), value), get_keras_mask(value)
            if mask is not None and new is not value:
                set_keras_mask(new, mask)
            value = new
        values.append(value)
    return structures.pack(outputs, values)


def name_of(keys: Sequence[Any]) -> str:
    """Return the name of an output among the arrays of its event."""
    return f"outputs{structures.text_of(tuple(keys))}"


def held(event: Event) -> Change:
    """Return a change to the values that a call returned before, without gradients."""

    def change(name: str, value: Any) -> Any:
        return value if name not in event.arrays else constant(event[name], value)

    return change


def constant(array: Array, like: Any) -> Any:
    """Return an array as a tensor whose gradient is zero, which `gradients` does not refuse."""
    zeros = ops.nan_to_num(ops.zeros_like(like) * like)  # NaN where a changed step overflows
    return ops.cast(ops.convert_to_tensor(array), like.dtype) + zeros


def outer_calls(trial: Trial) -> dict[int, Event]:
    """Return the outermost calls of layers of a step that returned float arrays, by number."""
    return {
        event.info.more["outer"]: event
        for event in trial.of(LAYER)
        if event.info.more["outer"] is not None and floats_of(event)
    }


def floats_of(event: Event) -> dict[str, Array]:
    """Return the float arrays that a call of a layer returned, by name."""
    return {
        name: array
        for name, array in event.arrays.items()
        if name.startswith("outputs") and "float" in str(array.dtype)
    }


def losses_of(trial: Trial) -> list[float]:
    """Return the losses that a step differentiates, or of a native step the ones it returns."""
    found = [event["loss"] for event in trial.of(OBJECTIVE)]
    if not found:
        found = [x for name, x in trial.values.items() if "loss" in name.lower() and x.size == 1]
    return [float(as_floats(x).reshape(())) for x in found]


def noise_like(array: Array, seed: int = 0) -> Array:
    """Return noise of the size of an array's entries, or of size 1 if they are all zero."""
    x = as_floats(array)
    size = float(np.sqrt(np.mean(x * x))) if x.size and x.any() else 1.0
    return size * np.random.default_rng(seed).normal(size=x.shape)
