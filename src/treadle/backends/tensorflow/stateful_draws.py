"""TensorFlow's own random functions, drawn in steps from a seed that is part of the state.

The operations of `tf.random.normal`, `tf.nn.dropout` and `tf.image.random_flip_left_right` count
their calls inside of the kernel, where no checkpoint finds the count. In a step they are replaced
by the stateless operations of the same distributions. Their seeds come from Keras' global
generator, as those of `keras.random` without a seed: it is saved, restored and carried by branches
and loops like every variable.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from inspect import signature
from typing import Any, Final

import tensorflow as tf

from ...core.internals import wrapped
from ...core.keras_internals import in_stateless_scope, rng_utils, seed_generator
from ...errors import StepError
from ..processes.rows import rows
from ..step_context import context
from .patches import INTERNALS, traced_again

Draw = Callable[..., Any]
_global_seed: Any = INTERNALS["global_seed"].resolve()


def _normal(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_normal(shape, seed, dtype=dtype)


def _truncated(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_truncated_normal(shape, seed, dtype=dtype)


def _uniform(seed: Any, shape: Any, dtype: Any) -> Any:
    return tf.random.stateless_uniform(shape, seed, dtype=dtype)


def _integers(seed: Any, shape: Any, minval: Any, maxval: Any) -> Any:
    minval = tf.convert_to_tensor(minval)
    return tf.random.stateless_uniform(shape, seed, minval, maxval, minval.dtype)


def _categories(seed: Any, logits: Any, num_samples: Any, output_dtype: Any = tf.int64) -> Any:
    return tf.random.stateless_categorical(logits, num_samples, seed, output_dtype)


def _gamma(seed: Any, shape: Any, alpha: Any) -> Any:
    alpha = tf.convert_to_tensor(alpha)
    return tf.random.stateless_gamma(_each(shape, alpha), seed, alpha, dtype=alpha.dtype)


def _poisson(seed: Any, shape: Any, rate: Any, dtype: Any = tf.int64) -> Any:
    _refuse_rows()
    rate = tf.convert_to_tensor(rate)
    return tf.random.stateless_poisson(_each(shape, rate), seed, rate, dtype)


def _shuffled(seed: Any, value: Any) -> Any:
    _refuse_rows()
    order = tf.argsort(tf.random.stateless_uniform(tf.shape(value)[:1], seed))
    return tf.gather(value, order)


LARGEST: Final = 2**31 - 1

DRAWS: Final[Mapping[str, Draw]] = {
    "random_standard_normal": _normal,
    "truncated_normal": _truncated,
    "random_uniform": _uniform,
    "random_uniform_int": _integers,
    "multinomial": _categories,
    "random_gamma": _gamma,
    "random_poisson_v2": _poisson,
    "random_shuffle": _shuffled,
}
"""What draws in the place of a function of the register, from a seed and its other arguments."""


@contextmanager
def step_functions() -> Generator[None]:
    """Make functions of TensorFlow do in this context what a step needs.

    A `tf.function` is a part of the step, and random functions draw from its state.
    """
    with traced_again(), wrapped(_REPLACEMENTS):
        yield


def _replaced(draw: Draw) -> Draw:
    """Return a function that draws with `draw` while a step runs.

    In a dry run the original draws in addition: variables that are created there get the initial
    values that they would get without Treadle.
    """

    def function(original: Draw, *args: Any, **kwargs: Any) -> Any:
        if not _can_advance():
            return original(*args, **kwargs)
        given = dict(signature(original).bind(*args, **kwargs).arguments)
        given.pop("name", None)
        seeds = [max(0, given.pop(name, None) or 0) for name in ("seed", "seed2")]
        drawn, build = draw(_next(*seeds), **given), context().build
        if build is None:
            return drawn
        build.effects.paused = True
        try:
            return original(*args, **kwargs)
        finally:
            build.effects.paused = False

    return function


def _own_seeds(original: Draw, op_seed: Any) -> Any:
    """Return the seeds that the user has set.

    TensorFlow's own seeds count the operations before, so that no two draw the same numbers. They
    are negative: what draws in the place of an operation ignores them.
    """
    seed, found = _global_seed(), original(op_seed)
    if seed is None or context().build is not None:
        return found
    return seed % LARGEST or LARGEST, -found[1] if op_seed is None else op_seed % LARGEST


def _next(seed: int, own_seed: int) -> Any:
    """Return the seed of the next draw.

    Args:
        seed: The global seed that the user has set for TensorFlow, or 0.
        own_seed: The seed of the operation, or 0.
    """
    generator = seed_generator.global_seed_generator()
    drawn = generator.next()
    if seed:
        chosen = (seed * 1_000_003 + own_seed) % LARGEST
        if rng_utils.get_random_seed() is None:  # Keras' seed is another one in each process
            first = getattr(generator.state, "_value", generator.state)[0]
            chosen = chosen - tf.cast(first, drawn.dtype)  # the rest selects a random stream
        drawn += tf.stack([tf.cast(chosen, drawn.dtype), tf.zeros([], drawn.dtype)])
    return tf.cast(tf.math.floormod(drawn, LARGEST - 1), tf.int32)


def _each(shape: Any, parameter: Any) -> Any:
    """Return the shape of numbers of a shape for each parameter of a distribution."""
    return tf.concat([shape, tf.shape(parameter)], 0)


def _can_advance() -> bool:
    """Return whether the next seed can be stored here.

    It cannot in a function of `tf.vectorized_map`, and in loops of TensorFlow where variables have
    the values of a scope, as in `predict_step`: these leave no loop.
    """
    if tf.executing_eagerly():
        return True
    graph = tf.compat.v1.get_default_graph()
    if "loop_body" in graph.get_name_scope().split("/"):
        return False
    held = seed_generator.global_seed_generator().state.value if in_stateless_scope() else None
    return getattr(held, "graph", graph) is graph


def _refuse_rows() -> None:
    """Reject a draw that several processes cannot divide.

    Raises:
        StepError: They share a batch.
    """
    if rows() is not None:
        raise StepError(
            "the step draws with a function of tf.random that several processes cannot divide: "
            "draw with keras.random, or train with one process"
        )


_REPLACEMENTS: Final = {
    INTERNALS["get_seed"]: _own_seeds,
    **{INTERNALS[f"own.{name}"]: _replaced(draw) for name, draw in DRAWS.items()},
}
