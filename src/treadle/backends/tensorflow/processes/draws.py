"""Random draws of several processes: each takes its rows of what one process would draw.

All processes draw the numbers for the whole batch, from a seed that is equal in all of them. Draws
that do not depend on the number of rows are equal in all processes.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import tensorflow as tf
from keras import ops

from ....errors import StepError
from ...processes.rows import Rows, rows, seen

Call = Callable[..., Any]


def of_shape(original: Call, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw numbers of a shape."""
    mine, whole = _whole(_static(shape))
    if mine is None or whole is None:
        return original(shape, *args, **kwargs)
    return mine.rows_of(original(list(whole), *args, **kwargs))


def of_gamma(original: Call, shape: Any, *, alpha: Any, **kwargs: Any) -> Any:
    """Draw from gamma distributions, each with its own parameter."""
    mine, whole = _whole(_static(shape))
    if mine is None or whole is None:
        return original(shape, alpha=alpha, **kwargs)
    alpha = tf.broadcast_to(alpha, shape)
    return mine.rows_of(original(list(whole), alpha=mine.padded(alpha, 1), **kwargs))


def of_binomial(original: Call, *, shape: Any, counts: Any, probs: Any, **kwargs: Any) -> Any:
    """Draw from binomial distributions, each with its own parameters."""
    mine, whole = _whole(_static(shape))
    if mine is None or whole is None:
        return original(shape=shape, counts=counts, probs=probs, **kwargs)
    given = {"counts": (counts, 1), "probs": (probs, 0.5)}
    padded = {
        name: mine.padded(tf.broadcast_to(x, shape), value) for name, (x, value) in given.items()
    }
    return mine.rows_of(original(shape=list(whole), **padded, **kwargs))


def of_logits(original: Call, logits: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw categories, for each row of logits."""
    logits = ops.convert_to_tensor(logits)
    mine, whole = _whole(tuple(logits.shape))
    if mine is None or whole is None:
        return original(logits, *args, **kwargs)
    return mine.rows_of(original(mine.padded(logits, 0), *args, **kwargs))


def shuffled(original: Call, x: Any, axis: int = 0, seed: Any = None) -> Any:
    """Shuffle a tensor, unless it has the rows of a batch.

    Raises:
        StepError: Its elements are rows, of which the new places depend on all others.
    """
    mine, whole = _whole((x.shape[axis],))
    if mine is not None and whole is not None and whole[0] != x.shape[axis]:
        raise StepError(_TOGETHER.format("keras.random.shuffle", mine.examples))
    return original(x, axis, seed)


_TOGETHER: Final = (
    "{} draws for the {} rows of a batch together, which several processes cannot divide: draw "
    "uniform or normal numbers, or train with one process"
)

REPLACEMENTS: Final[Mapping[str, Call]] = {
    "uniform": of_shape,
    "normal": of_shape,
    "full_int": of_shape,
    "uniform_int": of_shape,
    "truncated_normal": of_shape,
    "gamma": of_gamma,
    "binomial": of_binomial,
    "multinomial": of_logits,
    "shuffle": shuffled,
}
"""What replaces a function of the register while a step runs."""


def _static(shape: Any) -> tuple[int, ...]:
    """Return a shape as numbers.

    Raises:
        StepError: It is not known before the step runs.
    """
    if isinstance(shape, (list, tuple)):  # of numbers and tensors
        shape = tf.convert_to_tensor(shape, tf.int32)
    found = tf.get_static_value(shape)
    if found is None:
        raise StepError(
            "the shape of a random draw depends on values, so that several processes cannot divide "
            "it: draw for a shape that follows from the shapes of the batch"
        )
    return tuple(int(size) for size in found)


def _whole(shape: tuple[int, ...]) -> tuple[Rows | None, tuple[int, ...] | None]:
    """Return the rows of this process if it takes them of a draw, and the shape of all of it."""
    mine, noted = rows(), seen()
    if noted is not None:
        noted.draws.add(shape)
    if mine is None:
        return None, None
    return mine, mine.whole_shape(shape, mine.seen.draws, "a random draw")
