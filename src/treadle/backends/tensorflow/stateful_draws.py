"""TensorFlow's own random functions, drawn in steps from a seed that is part of the state.

The operations of `tf.random.normal`, `tf.nn.dropout` and `tf.image.random_flip_left_right` count
their calls inside of the kernel, where no checkpoint finds the count. In a step they are replaced
by the stateless operations of the same distributions. Their seeds come from Keras' global
generator, as those of `keras.random` without a seed: it is saved, restored and carried by branches
and loops like every variable.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import tensorflow as tf

from ...core.internals import wrapped
from ...core.keras_internals import global_seed_generator, random_seed, stateless_scope
from ..step_context import context
from .operations import replaced
from .patches import INTERNALS, traced_again

Draw = Callable[..., Any]


def _of_shape(draw: Draw) -> Draw:
    return lambda seed, shape, dtype: draw(shape, seed, dtype=dtype)


def _integers(seed: Any, shape: Any, minval: Any, maxval: Any) -> Any:
    minval = tf.convert_to_tensor(minval)
    return tf.random.stateless_uniform(shape, seed, minval, maxval, minval.dtype)


def _categories(seed: Any, logits: Any, num_samples: Any, output_dtype: Any = tf.int64) -> Any:
    return tf.random.stateless_categorical(logits, num_samples, seed, output_dtype)


def _gamma(seed: Any, shape: Any, alpha: Any) -> Any:
    alpha = tf.convert_to_tensor(alpha)
    return tf.random.stateless_gamma(_each(shape, alpha), seed, alpha, dtype=alpha.dtype)


def _poisson(seed: Any, shape: Any, rate: Any, dtype: Any = tf.int64) -> Any:
    rate = tf.convert_to_tensor(rate)
    return tf.random.stateless_poisson(_each(shape, rate), seed, rate, dtype)


def _shuffled(seed: Any, value: Any) -> Any:
    order = tf.argsort(tf.random.stateless_uniform(tf.shape(value)[:1], seed))
    return tf.gather(value, order)


LARGEST: Final = 2**31 - 1

COUNTING: Final = frozenset(
    {
        *("RandomStandardNormal", "TruncatedNormal", "RandomUniform", "RandomUniformInt"),
        *("Multinomial", "RandomGamma", "RandomPoisson", "RandomPoissonV2", "RandomShuffle"),
        *("ParameterizedTruncatedNormal", "SampleDistortedBoundingBoxV2", "NonDeterministicInts"),
        *("UniformCandidateSampler", "LogUniformCandidateSampler", "AllCandidateSampler"),
        *("LearnedUnigramCandidateSampler", "FixedUnigramCandidateSampler"),
        *("FractionalMaxPool", "FractionalAvgPool"),
    }
)
"""Operations that draw, and count their calls in the kernel."""

DRAWS: Final[Mapping[str, Draw]] = {
    "RandomStandardNormal": _of_shape(tf.random.stateless_normal),
    "TruncatedNormal": _of_shape(tf.random.stateless_truncated_normal),
    "RandomUniform": _of_shape(tf.random.stateless_uniform),
    "RandomUniformInt": _integers,
    "Multinomial": _categories,
    "RandomGamma": _gamma,
    "RandomPoissonV2": _poisson,
    "RandomShuffle": _shuffled,
}
"""What draws in the place of an operation, from a seed and its other arguments."""


@contextmanager
def step_functions() -> Generator[None]:
    """Make functions of TensorFlow do in this context what a step needs.

    A `tf.function` is a part of the step, and random functions draw from its state.
    """
    with traced_again(), wrapped({INTERNALS["get_seed"]: _own_seeds}), replaced(_REPLACEMENTS):
        yield


def is_counted(op: str) -> bool:
    """Return whether an operation that draws counts its calls, here in a step."""
    return op in COUNTING and not (op in DRAWS and _can_advance())


def _replaced(draw: Draw) -> Draw:
    """Return a function that draws with `draw` while a step runs.

    In a dry run the original draws in addition: variables that are created there get the initial
    values that they would get without Treadle.
    """

    def function(original: Draw, seed: Any = None, seed2: Any = None, **given: Any) -> Any:
        if not _can_advance():
            return original(seed=seed, seed2=seed2, **given)
        drawn, build = draw(_next(max(0, seed or 0), max(0, seed2 or 0)), **given), context().build
        if build is None:
            return drawn
        build.effects.paused = True
        try:
            return original(seed=seed, seed2=seed2, **given)
        finally:
            build.effects.paused = False

    return function


def _own_seeds(original: Draw, op_seed: Any) -> Any:
    """Return the seeds that the user has set.

    TensorFlow's own seeds count the operations before, so that no two draw the same numbers. They
    are negative: what draws in the place of an operation ignores them.
    """
    found = original(op_seed)
    if found[0] is None or context().build is not None:
        return found
    return found[0] or LARGEST, -found[1] if op_seed is None else op_seed % LARGEST


def _next(seed: int, own_seed: int) -> Any:
    """Return the seed of the next draw.

    Args:
        seed: The global seed that the user has set for TensorFlow, or 0.
        own_seed: The seed of the operation, or 0.
    """
    generator = global_seed_generator()
    drawn = generator.next()
    if seed:
        chosen = (seed * 1_000_003 + own_seed) % LARGEST
        if random_seed() is None:  # Keras' seed is another one in each process
            first = getattr(generator.state, "_value", generator.state)[0]
            chosen = chosen - tf.cast(first, drawn.dtype)  # the rest selects a random stream
        drawn += tf.stack([tf.cast(chosen, drawn.dtype), tf.zeros([], drawn.dtype)])
    return tf.cast(tf.math.floormod(drawn, LARGEST - 1), tf.int32)


def _each(shape: Any, parameter: Any) -> Any:
    """Return the shape of numbers of a shape for each parameter of a distribution."""
    return tf.concat([shape, tf.shape(parameter, getattr(shape, "dtype", tf.int32))], 0)


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
    held = global_seed_generator().state.value if stateless_scope() else None
    return getattr(held, "graph", graph) is graph


_REPLACEMENTS: Final = {op: _replaced(draw) for op, draw in DRAWS.items()}
