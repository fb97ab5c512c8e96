"""What is chosen before a run: `setup` for what layers need to know, `Options` for execution."""

import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigurationError, did_you_mean, whole_number
from .backend_choice import choose_backend, choose_default_backend

EXECUTIONS = ("auto", "compiled", "eager", "measure")
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")


@dataclass(frozen=True, slots=True)
class Options:
    """How steps are executed; frozen, and recorded with the run.

    Attributes:
        execution: `"auto"`: compiled wherever the backend can; `"compiled"`: an error where it
            cannot; `"eager"`: the readable reference, slow; `"measure"`: run all that could be
            chosen for a moment, take the fastest, and tell what to write here to keep it.
        window: The most steps that run as one compiled call; None lets the plan decide. Results do
            not depend on it.
        fused: Several steps are one call (True), or each is one (False); None means the plan's
            rule.
        jit: Compile with XLA where that is a choice (TensorFlow); None means the plan's rule.
        data_on_device: Put the arrays of `treadle.data.from_arrays` on the device as a whole, and
            gather batches there; None means the plan's rule: up to 2 GiB. Results do not depend on
            it.
        preflight: Look for mistakes before the first step: variables that no attribute reaches,
            losses that reach nothing, steps that return nothing.
        checked: Check what each phase owns; costs a copy of what it does not.
        skip_nonfinite: Undo a training step after which a value or a variable is NaN or infinite,
            within the compiled step; costs a copy of what it changes. Set by
            `NonFinite(action="skip")`.

    Raises:
        ConfigurationError: A value that is not known.

    Example:
        >>> Options(window=8).window
        8
    """

    execution: Literal["auto", "compiled", "eager", "measure"] = "auto"
    window: int | None = None
    fused: bool | None = None
    jit: bool | None = None
    data_on_device: bool | None = None
    preflight: bool = True
    checked: bool = False
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.execution not in EXECUTIONS:
            raise ConfigurationError(
                f"unknown execution {self.execution!r}.{did_you_mean(self.execution, EXECUTIONS)}"
            )
        if self.window is not None:
            window = whole_number("window", self.window, ConfigurationError)
            object.__setattr__(self, "window", window)


def setup(
    seed: int | None = None,
    precision: str | None = None,
    backend: str | None = None,
    devices: Any = None,
) -> None:
    """Say what must be known before layers exist.

    Thin over Keras' own settings (`keras.utils.set_random_seed`, `keras.config.set_dtype_policy`,
    `KERAS_BACKEND`, `keras.distribution`), which work too. In a file that `treadle run` runs, what
    the command says with `--seed`, `--precision` and `--backend` takes the place of what stands
    here.

    Args:
        seed: Seeds initial weights, dropout, the order of the data, and Python's and NumPy's own
            generators; a whole number from 0.
        precision: A Keras dtype policy: `"float32"`, `"float64"`, `"mixed_bfloat16"` (layers
            compute in bfloat16 and keep float32 weights) or `"mixed_float16"` (losses are then
            scaled; see `LossScale`).
        backend: `"tensorflow"`, `"jax"` or `"torch"`; only before Keras is imported. Default:
            `KERAS_BACKEND`, else the only installed backend, else Keras' own configuration.
        devices: A `keras.distribution` object, set for all layers made afterwards.

    Raises:
        BackendError: The backend is unknown, not installed, or Keras already runs on another one.
        ConfigurationError: Layers exist already and would not notice, or a value is not known.

    Example:
        >>> import treadle
        >>> treadle.setup(seed=0)
    """
    if backend is not None:
        choose_backend(_overriding.get("backend", backend))
    if seed is not None:
        seed = whole_number("seed", _overriding.get("seed", seed), ConfigurationError, least=0)
    if precision is not None:
        precision = _overriding.get("precision", precision)
    if precision is not None and precision not in PRECISIONS:
        if f"mixed_{precision}" in PRECISIONS:
            raise ConfigurationError(
                f"precision {precision!r} would keep weights in {precision}, where most updates "
                f"are too small to change them: use 'mixed_{precision}', which keeps them in "
                "float32"
            )
        raise ConfigurationError(
            f"unknown precision {precision!r}.{did_you_mean(precision, PRECISIONS)}"
        )
    if backend is None:
        choose_default_backend()
    import keras

    built = _names_of_what_exists()
    for name, value in (("precision", precision), ("seed", seed), ("devices", devices)):
        if value is not None and built:
            raise ConfigurationError(
                f"setup({name}=…) must come before anything is built: {built} exists already and "
                f"would not notice. Move treadle.setup to the top of the script, or call "
                f"keras.backend.clear_session() first"
            )
    if seed is not None:
        _seed_everything(seed)
    if precision is not None:
        _refuse_other_precision(precision)
        keras.config.set_dtype_policy(precision)
    if devices is not None:
        keras.distribution.set_distribution(devices)


_overriding: dict[str, Any] = {}


@contextmanager
def overriding(
    seed: int | None = None, precision: str | None = None, backend: str | None = None
) -> Generator[None]:
    """Let `setup` take these values in place of what it is told, for as long as this is open.

    The command line's win over those of the file that it runs.

    Raises:
        ConfigurationError: At the end, where Keras' own functions have set something else.

    Example:
        >>> import treadle
        >>> with overriding(seed=3):
        ...     treadle.setup(seed=0)
        >>> run_seed()
        3
    """
    given = {"seed": seed, "precision": precision, "backend": backend}
    _overriding.update({name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        _overriding.clear()
    for name, found in (("seed", run_seed()), ("precision", precision_name())):
        if given[name] not in (None, found):
            raise ConfigurationError(
                f"--{name} {given[name]} has no effect, since the file itself sets the {name} "
                f"{found} with Keras' own function: write treadle.setup({name}={found!r}) there, "
                "which the command line can override"
            )


def backend_name() -> str:
    """Return the name of the backend that Keras runs on."""
    import keras

    return keras.config.backend()


def precision_name() -> str:
    """Return the dtype policy of layers that are made now: what `setup(precision=…)` sets."""
    import keras

    return keras.config.dtype_policy().name


def run_seed() -> int:
    """Return the seed from which data orders derive: what Keras was seeded with, else 0."""
    return global_random_seed() or 0


def _refuse_other_precision(precision: str) -> None:
    """Refuse a type that the backend would quietly replace by a smaller one (JAX and float64).

    Raises:
        ConfigurationError: It would.
    """
    from keras import ops
    from keras.backend import standardize_dtype

    wanted = precision.removeprefix("mixed_")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX tells what the error below tells
        found = standardize_dtype(ops.zeros((), dtype=wanted).dtype)
    if found != wanted:
        raise ConfigurationError(
            f"precision {precision!r} would be computed in {found} by this backend: on JAX, set "
            "JAX_ENABLE_X64=1 before it starts"
        )


def _seed_everything(seed: int) -> None:
    """Do what `keras.utils.set_random_seed` does, without importing TensorFlow for it.

    Keras seeds TensorFlow on every backend, and imports it where it is installed: 2 to 3 seconds.
    """
    import keras
    import numpy as np
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED

    if "tensorflow" in sys.modules:
        keras.utils.set_random_seed(seed)
        return
    global_state.set_global_attribute(GLOBAL_RANDOM_SEED, seed)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, None)
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def global_random_seed() -> int | None:
    """Return what `keras.utils.set_random_seed` was told, or None."""
    from keras.src.utils.rng_utils import get_random_seed

    return get_random_seed()


@contextmanager
def without_tensorflow() -> Generator[None]:
    """Keep Keras from importing TensorFlow where it serializes something on another backend.

    It would, where it is installed, to ask of each part whether it is of a type of TensorFlow's:
    some 4 seconds, and lines of TensorFlow's own. Where it is not imported, nothing is.
    """
    from keras.src.utils.module_utils import tensorflow

    known = vars(tensorflow)
    if "tensorflow" in sys.modules or "_available" not in known:
        yield
        return
    before, known["_available"] = known["_available"], False
    try:
        yield
    finally:
        known["_available"] = before


def _names_of_what_exists() -> str:
    """Return the name of some layer that was made already, or an empty text."""
    from keras.src.backend.common import global_state

    counters = global_state.get_global_attribute("object_name_uids", {}) or {}
    made = [name for name, count in counters.items() if count and name not in NOT_BUILT]
    return f"'{made[0]}'" if made else ""


# What Keras itself makes on import or for `keras.random`: no layer has drawn its weights yet.
NOT_BUILT = ("seed_generator", "variable")
