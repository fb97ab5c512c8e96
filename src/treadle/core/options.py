"""Settings of a run: `setup` for seed, precision and backend, `Options` for execution."""

import random
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigurationError, did_you_mean, whole_number
from . import compile_cache as compiled_programs
from . import keras_internals
from .backend_choice import choose_backend, choose_default_backend

EXECUTIONS = ("auto", "compiled", "eager", "measure")
PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")


@dataclass(frozen=True, slots=True)
class Options:
    """Execution options of the steps; immutable, and recorded with the run.

    Attributes:
        execution: `"auto"`: compile if the backend can, else run as Python. `"compiled"`: compile,
            and raise an error if the backend cannot. `"eager"`: run as Python, which is slow but
            easy to debug. `"measure"`: time all possible plans briefly, use the fastest, and report
            the options that select it directly.
        window: The largest number of steps per window; None lets the plan decide. Results do not
            depend on it.
        fused: True to run the steps of a window as one compiled call, False to run each step as its
            own call; None lets the plan decide.
        jit: Compile with XLA if the backend has a choice (TensorFlow); None lets the plan decide.
        data_on_device: Copy the arrays of `treadle.data.from_arrays` to the device as a whole, and
            gather batches there; None does so up to 2 GiB. Results do not depend on it.
        preflight: Check for mistakes before the first step: variables that are not reachable from
            the task's attributes, losses that do not depend on any variable, steps that return
            nothing.
        checked: Check that each phase changes only what it owns; costs a copy of all other
            variables.
        skip_nonfinite: Undo, within the compiled step, a training step after which a value or a
            variable is NaN or infinite; costs a copy of the variables it changes. Set by
            `NonFinite(action="skip")`.

    Raises:
        ConfigurationError: A value is unknown or invalid.

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
        """Check the options."""
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
    compile_cache: bool | None = None,
) -> None:
    """Set seed, precision, backend and devices, before any layer is created.

    This is a thin wrapper of Keras' own settings (`keras.utils.set_random_seed`,
    `keras.config.set_dtype_policy`, `KERAS_BACKEND`, `keras.distribution`), which can also be used
    directly. In a file run by `treadle run`, the command's `--seed`, `--precision` and `--backend`
    override the arguments given here.

    Args:
        seed: Seeds initial weights, dropout, the order of the data, and the global generators of
            Python and NumPy; a whole number of at least 0.
        precision: A Keras dtype policy: `"float32"`, `"float64"`, `"mixed_bfloat16"` (layers
            compute in bfloat16 and keep float32 weights) or `"mixed_float16"` (the same in float16,
            with loss scaling; see `LossScale`).
        backend: `"tensorflow"`, `"jax"` or `"torch"`; only before Keras is imported. Default:
            `KERAS_BACKEND`, else the only installed backend, else Keras' own configuration.
        devices: A `keras.distribution` object, set for all layers created afterwards.
        compile_cache: False to compile every program again, instead of keeping compiled programs
            in the user's cache directory for later processes (JAX only). Default: True, unless the
            environment variable `TREADLE_COMPILE_CACHE` is `off`.

    Raises:
        BackendError: The backend is unknown, not installed, or Keras already runs on another one.
        ConfigurationError: Layers exist already and would not be affected, or a value is unknown.

    Example:
        >>> import treadle
        >>> treadle.setup(seed=0)
    """
    if compile_cache is not None:
        if not isinstance(compile_cache, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"compile_cache is True or False, not {compile_cache!r}: the environment variable "
                f"{compiled_programs.VARIABLE} names another folder"
            )
        compiled_programs.switch(compile_cache)
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

    built = _existing_layer()
    for name, value in (("precision", precision), ("seed", seed), ("devices", devices)):
        if value is not None and built:
            raise ConfigurationError(
                f"setup({name}=…) must come before anything is built: {built} exists already and "
                f"would not be affected. Move treadle.setup to the top of the script, or call "
                f"keras.backend.clear_session() first"
            )
    if seed is not None:
        _seed_everything(seed)
    if precision is not None:
        _check_precision(precision)
        keras.config.set_dtype_policy(precision)
    if devices is not None:
        keras.distribution.set_distribution(devices)


_overriding: dict[str, Any] = {}


@contextmanager
def overriding(
    seed: int | None = None, precision: str | None = None, backend: str | None = None
) -> Generator[None]:
    """Override the arguments of `setup`, as a context manager.

    The command line uses this for a file that it runs.

    Raises:
        ConfigurationError: At the end: the file set another value with Keras' own functions.

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
    """Return the name of Keras' global dtype policy, which `setup(precision=…)` sets."""
    import keras

    return keras.config.dtype_policy().name


def run_seed() -> int:
    """Return the seed of the run, which determines the order of the data: Keras' seed, else 0."""
    return global_random_seed() or 0


def _check_precision(precision: str) -> None:
    """Check that the backend supports a precision; JAX may silently replace float64 by float32.

    Raises:
        ConfigurationError: The backend would compute with another dtype.
    """
    from keras import ops
    from keras.backend import standardize_dtype

    wanted = precision.removeprefix("mixed_")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of what the error below reports
        found = standardize_dtype(ops.zeros((), dtype=wanted).dtype)
    if found != wanted:
        raise ConfigurationError(
            f"precision {precision!r} would be computed in {found} by this backend: on JAX, set "
            "JAX_ENABLE_X64=1 before it starts"
        )


def _seed_everything(seed: int) -> None:
    """Do what `keras.utils.set_random_seed` does, without importing TensorFlow.

    Keras seeds TensorFlow on every backend. If TensorFlow is installed, importing it takes 2 to 3
    seconds.
    """
    import keras
    import numpy as np

    if "tensorflow" in sys.modules:
        keras.utils.set_random_seed(seed)
        return
    store = keras_internals.global_state.set_global_attribute
    store(keras_internals.rng_utils.GLOBAL_RANDOM_SEED, seed)
    store(keras_internals.seed_generator.GLOBAL_SEED_GENERATOR, None)
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def global_random_seed() -> int | None:
    """Return the seed passed to `keras.utils.set_random_seed`, or None."""
    return keras_internals.rng_utils.get_random_seed()


@contextmanager
def without_tensorflow() -> Generator[None]:
    """Keep Keras from importing TensorFlow for serialization on another backend.

    If TensorFlow is installed, Keras imports it to check objects against TensorFlow's types. That
    takes about 4 seconds and prints TensorFlow's log lines. As long as TensorFlow is not imported,
    no object can be of its types.
    """
    known = vars(keras_internals.module_utils.tensorflow)
    if "tensorflow" in sys.modules or "_available" not in known:
        yield
        return
    before, known["_available"] = known["_available"], False
    try:
        yield
    finally:
        known["_available"] = before


def _existing_layer() -> str:
    """Return the name of a layer that exists already, or an empty string."""
    counters = keras_internals.global_state.get_global_attribute("object_name_uids", {}) or {}
    made = [name for name, count in counters.items() if count and name not in NOT_BUILT]
    return f"'{made[0]}'" if made else ""


# Keras itself creates these, on import or for `keras.random`. They do not show that a layer exists.
NOT_BUILT = ("seed_generator", "variable")
