"""The private parts of Keras that Treadle uses, each with the reason.

Keras promises nothing about names below `keras.src`. Treadle reads them only through this module,
and `tests/test_keras_internals.py` fails by name when one of them changes. The exceptions are parts
of Keras' own backends, which the backend of that name imports itself: moments of TensorFlow, and
the device, random numbers and Nadam of PyTorch.

Attributes of this module are imported when they are first used, since importing Keras fixes its
backend: `keras_internals.global_state` is the module `keras.src.backend.common.global_state`.
"""

import importlib
import re
import warnings
from typing import Any

from ..errors import BackendError, TreadleWarning

TESTED = (3, 15)
"""The newest version of Keras that the tests run with, as (major, minor)."""

# Name here: where it is in Keras, and why no public name serves.
INTERNALS: dict[str, tuple[str, str]] = {
    "get_stateless_scope": (
        "keras.src.backend.common.stateless_scope:get_stateless_scope",
        "scopes are nested: an inner one starts with the values of the outer one",
    ),
    "in_stateless_scope": (
        "keras.src.backend.common.stateless_scope:in_stateless_scope",
        "variables are read from a scope if there is one",
    ),
    "global_state": (
        "keras.src.backend.common.global_state",
        "the call context and the automatic names of layers are kept there",
    ),
    "KerasVariable": (
        "keras.src.backend.common:KerasVariable",
        "variables that a step creates while it is captured are recorded",
    ),
    "seed_generator": (
        "keras.src.random.seed_generator",
        "the global seed generator is part of the state of a run",
    ),
    "rng_utils": (
        "keras.src.utils.rng_utils",
        "seeding without importing TensorFlow, which `keras.utils.set_random_seed` does",
    ),
    "module_utils": (
        "keras.src.utils.module_utils",
        "keeps Keras from importing TensorFlow to serialize on another backend",
    ),
    "LossFunctionWrapper": (
        "keras.src.losses.losses:LossFunctionWrapper",
        "plain loss functions get sample weights and reduction, as under `compile`",
    ),
    "SerializableDict": (
        "keras.src.saving.serialization_lib:SerializableDict",
        "files saved by callbacks hold the configuration that `compile` would have stored",
    ),
}


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = resolve(*INTERNALS[name])
    globals()[name] = found  # later reads do not come here
    return found


def resolve(place: str, reason: str) -> Any:
    """Import a private part of Keras.

    Args:
        place: A module, or `module:name`.
        reason: What it is needed for.

    Raises:
        BackendError: This version of Keras does not have it.
    """
    module, _, name = place.partition(":")
    try:
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (ImportError, AttributeError) as error:
        import keras

        raise BackendError(
            f"Keras {keras.__version__} has no {place.replace(':', '.')}, which Treadle needs "
            f"({reason}): install a version that it was tested with, keras=={_newest()}.*"
        ) from error


def warn_if_untested(version: str) -> None:
    """Warn if this version of Keras is newer than the newest one that the tests run with."""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))  # also of 3.16rc1
    if numbers > TESTED:
        warnings.warn(
            f"Keras {version} is newer than the versions that Treadle was tested with (up to "
            f"{_newest()}): it may work differently",
            TreadleWarning,
            stacklevel=3,
        )


def _newest() -> str:
    return ".".join(map(str, TESTED))
