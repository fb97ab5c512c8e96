"""What tests do about older versions of Keras: skip what they lack, and repair what is compared."""

from contextlib import nullcontext
from typing import Any

import keras
import pytest


def needs_keras(version: str, what: str) -> None:
    """Skip the test if the installed Keras is older than a version, which is the first with this.

    Args:
        version: As `3.15`.
        what: What the version has, for the reason.
    """
    if _is_before(version):
        pytest.skip(f"{what} needs Keras {version}, this is {keras.__version__}")


def seed_as_newer_versions(patch: pytest.MonkeyPatch) -> None:
    """Let `keras.utils.set_random_seed` reset the global seed generator.

    Before Keras 3.13 it does not, and two runs with the same seed draw other unseeded numbers.
    """
    if not _is_before("3.13"):
        return
    original: Any = keras.utils.set_random_seed
    store: Any = keras.src.backend.common.global_state.set_global_attribute

    def set_random_seed(seed: int) -> None:
        original(seed)
        store("global_seed_generator", None)

    patch.setattr(keras.utils, "set_random_seed", set_random_seed)


def keep_fit_on_jax(patch: pytest.MonkeyPatch) -> None:
    """Let `fit` of Keras 3.9 work with the installed JAX, with whose results tests compare.

    It calls `jax.spmd_mode`, which JAX has removed, and which only several processes need.
    """
    if keras.config.backend() != "jax" or not _is_before("3.10"):
        return
    import jax

    if not hasattr(jax, "spmd_mode"):
        patch.setattr(jax, "spmd_mode", lambda mode: nullcontext(), raising=False)


def _is_before(version: str) -> bool:
    return _numbers(keras.__version__) < _numbers(version)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(x) for x in version.split(".")[:2])
