"""The results of a step: scalars by name, and the weights with which they are averaged."""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
from keras import ops

from ..backends.base import active
from ..backends.types import Weighted
from ..errors import StepError

NUMBERS = ("bool", "int", "uint", "float", "bfloat")


def step_outputs(result: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Convert a step's return value to scalars by name, and weights of the weighted ones by name.

    Raises:
        StepError: The step returned anything but a dict of scalars, one scalar, or nothing.
    """
    if result is None:
        return {}, {}
    if not isinstance(result, Mapping):
        if isinstance(result, (tuple, list, str)):
            many = isinstance(result, (tuple, list)) and len(result) > 1
            raise StepError(
                f"{name} must return a dict of scalars, one scalar (its loss) or nothing; it "
                f"returned a {type(result).__name__}"
                + (": name its parts, as in return {'loss': loss, 'norm': norm}" if many else "")
            )
        result = {"loss": result}
    values: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for key, value in result.items():
        if str(key) in values:
            raise StepError(f"{name} returned two values with the name {str(key)!r}: rename one")
        if isinstance(value, Weighted):
            weights[str(key)] = _scalar(value.weight, f"the weight of {key!r}", name)
            value = value.value
        values[str(key)] = _scalar(value, repr(str(key)), name)
    return values, weights


def _scalar(value: Any, what: str, name: str) -> Any:
    try:
        tensor = ops.convert_to_tensor(value)
    except OverflowError as error:
        raise StepError(
            f"{name} returned {what}, the integer {value}, which this backend's integers cannot "
            "hold: return a float, such as float(value)"
        ) from error
    except (TypeError, ValueError) as error:
        raise StepError(
            f"{name} returned {what} of type {type(value).__name__}: only scalars can be logged"
        ) from error
    if getattr(tensor.shape, "rank", 0) is None:  # TensorFlow checks it in each step
        tensor = ops.reshape(tensor, ())
    if tuple(tensor.shape) != ():
        raise StepError(
            f"{name} returned {what} of shape {tuple(tensor.shape)}: only scalars can be logged; "
            "reduce it, for example with ops.mean, or keep it out"
        )
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if not dtype.startswith(NUMBERS):
        raise StepError(
            f"{name} returned {what} of dtype {dtype}: only real numbers can be logged; return "
            "parts of it, for example ops.real(value) and ops.imag(value)"
        )
    # Half precision is too imprecise for averaging.
    return ops.cast(tensor, "float32") if dtype in ("float16", "bfloat16") else tensor


def check_same_names(first: Sequence[str], names: Sequence[str], step: str) -> None:
    """Check that a step returns the same names as in its first call.

    Raises:
        StepError: It returns other names.
    """
    if set(first) == set(names):
        return
    missing = sorted(set(first) - set(names))
    new = sorted(set(names) - set(first))
    raise StepError(
        f"{step} returned other names than before: "
        f"{f'missing {missing}' if missing else ''}{', ' if missing and new else ''}"
        f"{f'new {new}' if new else ''}. Return the same names from every step"
    )


def scalars(name: str, tensor: Any) -> dict[str, float]:
    """Return a result as a scalar; a vector as several, whose names have an index."""
    values = active().to_numpy(tensor)
    if values.ndim == 0:
        return {name: float(values)}
    return {f"{name}_{i}": float(v) for i, v in enumerate(values.ravel())}


def joined(means: Mapping[str, float], metrics: Mapping[str, float], step: str) -> dict[str, float]:
    """Merge a step's means and its metrics into one dict.

    Raises:
        StepError: A value and a metric have the same name.
    """
    remedy = (
        "leave it out of the returned values, since the metric is logged under its name, or rename "
        "it"
    )
    return merged(means, metrics, step, "a metric of the task", remedy)


def merged(
    first: Mapping[str, float],
    second: Mapping[str, float],
    of_first: str,
    of_second: str,
    remedy: str = "rename one of them",
) -> dict[str, float]:
    """Merge named values of two origins.

    Args:
        first: The values of one origin.
        second: The values of the other one.
        of_first: The origin of the first values, for the message.
        of_second: The origin of the others.
        remedy: What to do about a name that both have.

    Raises:
        StepError: A value of each has the same name.
    """
    both = sorted(set(first) & set(second))
    if both:
        raise StepError(
            f"{of_first} returns {both[0]!r}, and {of_second} has this name as well: {remedy}"
        )
    return {**first, **second}
