"""The private parts of JAX that Treadle uses, and its patch of Keras on JAX.

`tests/conformance/test_patches.py` fails by name when one of the entries changes.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ...core.internals import KERAS, Attribute, Internal
from ...core.keras_internals import global_state, seed_generator

INTERNALS: dict[str, Internal] = {
    "global_seed_generator": Internal(
        "keras.src.random.seed_generator:global_seed_generator",
        "patched: Keras rejects unseeded random numbers while JAX traces, as the state of its "
        "generator would become a constant",
        "https://github.com/keras-team/keras/issues/18426",
        "()",
    ),
    "get_file_cache": Internal(
        "jax._src.compilation_cache:get_file_cache",
        "patched: JAX's files of compiled programs are not written atomically and not checksummed",
        "https://github.com/jax-ml/jax/blob/main/jax/_src/compilation_cache.py",
        "(path)",
    ),
    "jaxpr_as_fun": Internal(
        "jax.extend.core:jaxpr_as_fun",
        "a step is traced once, and its jaxpr is run in every program that is compiled of it",
        "https://github.com/jax-ml/jax/blob/main/jax/extend/core/__init__.py",
        "(closed_jaxpr, *args)",
    ),
    "JaxVariable": Internal(
        "keras.src.backend.jax.core:JaxVariable",
        "patched in `ahead.py`: variables get the values of steps when one of them is read",
        f"{KERAS}/backend/jax/core.py",
    ),
    "Var": Internal(
        "jax.extend.core:Var",
        "distinguishes variables of a jaxpr from its literals, to find what a loss depends on",
        "https://github.com/jax-ml/jax/blob/main/jax/extend/core/__init__.py",
    ),
}

ATTRIBUTES: dict[str, Attribute] = {
    "_value": Attribute(
        "Variable",
        "the only place of a variable's array: it is missing until the array is wanted",
        f"{KERAS}/backend/common/variables.py",
    ),
    "_direct_assign": Attribute(
        "Variable",
        "sets a value without the checks and casts of `assign`, which take longer than a step",
        f"{KERAS}/backend/jax/core.py",
    ),
}

jaxpr_as_fun: Any = INTERNALS["jaxpr_as_fun"].resolve()
JaxVariable: Any = INTERNALS["JaxVariable"].resolve()
Var: Any = INTERNALS["Var"].resolve()


@contextmanager
def keras_random() -> Generator[None]:
    """Allow unseeded `keras.random` calls while JAX traces.

    Keras raises an error, since its global generator would become a constant. Here the generator's
    state is part of the step's state, so it does not.
    """
    generator = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None:
        generator = seed_generator.global_seed_generator()
    with INTERNALS["global_seed_generator"].replaced(lambda: generator):
        yield
