"""The private parts of JAX that Treadle uses, and its patch of Keras on JAX.

`tests/conformance/test_patches.py` fails by name when one of the entries changes.
"""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import keras

from ...core.internals import Attributes, Internal
from ...core.keras_internals import global_seed_generator

INTERNALS: dict[str, Internal] = {
    "global_seed_generator": Internal(
        ("keras.src.random.seed_generator:global_seed_generator",),
        "patched: Keras rejects unseeded random numbers while JAX traces, as the state of its "
        "generator would become a constant: https://github.com/keras-team/keras/issues/18426",
        ("()",),
    ),
    "get_opaque_trace_state": Internal(
        ("jax.extend.core:get_opaque_trace_state", "jax.core:get_opaque_trace_state"),
        "identifies a trace",
        ("(convention=None)", "(convention)"),
    ),
    "dce_jaxpr": Internal(
        ("jax.interpreters.partial_eval:dce_jaxpr",),
        "what the indices and labels of a step depend on, without the rest of the step",
        ("(jaxpr, used_outputs, instantiate=False)",),
        lost="indices and labels out of range are not checked",
    ),
    **{
        f"random_{name}": Internal(
            (f"jax.random:{name}",),
            "patched: devices divide the random numbers of a batch, and what depends on them",
            loses="speed",
            lost="each of several devices draws all numbers of a batch",
        )
        for name in ("bernoulli", "normal", "randint", "truncated_normal", "uniform")
    },
    "jaxpr_as_fun": Internal(
        ("jax.extend.core:jaxpr_as_fun",),
        "a step is traced once, and its jaxpr, or a part of it, is run in every program",
        ("(closed_jaxpr, *args)",),
    ),
}

ATTRIBUTES: dict[str, Attributes] = {
    "Variable": Attributes(
        ("_layout",),
        "keras.src.backend",
        "the layout on several devices with which a variable was created",
    )
}

get_opaque_trace_state: Any = partial(
    INTERNALS["get_opaque_trace_state"].resolve(),
    convention="nnx",  # any of its two: before JAX 0.6 it has no default
)
jaxpr_as_fun: Any = INTERNALS["jaxpr_as_fun"].resolve()


_ENFORCES: Final = "_enforce_jax_state_sharding"


@contextmanager
def free_layouts() -> Generator[None]:
    """Let the steps of compiled models leave the layouts of their state alone.

    Before Keras 3.12, they constrain the state to layouts that only `fit` of Keras records. Newer
    versions have no such method, and nothing is patched there.
    """
    kind: Any = keras.Model
    original = getattr(kind, _ENFORCES, None)
    if original is None:
        yield
        return

    def unchanged(
        model: Any,
        trainable_variables: Any = None,
        non_trainable_variables: Any = None,
        optimizer_variables: Any = None,
        metrics_variables: Any = None,
    ) -> tuple[Any, ...]:
        return trainable_variables, non_trainable_variables, optimizer_variables, metrics_variables

    holder = next(x for x in kind.__mro__ if _ENFORCES in vars(x))
    setattr(holder, _ENFORCES, unchanged)
    try:
        yield
    finally:
        setattr(holder, _ENFORCES, original)


def keras_random() -> AbstractContextManager[Any]:
    """Allow unseeded `keras.random` calls while JAX traces.

    Keras raises an error, since its global generator would become a constant. Here the generator's
    state is part of the step's state, so it does not.
    """
    generator = global_seed_generator()
    return INTERNALS["global_seed_generator"].replaced(lambda: generator)
