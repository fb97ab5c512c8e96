"""`setup`: seed, precision, backend and devices of a process, before any layer is created."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, SupportsIndex

from ..core import keras_internals, process_settings
from ..core.options import device_count, precision_name, run_seed
from ..core.process_settings import choose_backend, choose_default_backend
from ..core.processes import process_group
from ..errors import ConfigurationError, did_you_mean, whole_number
from .environment import found_launcher, found_place, is_in_ray
from .ray_train import ray_place

if TYPE_CHECKING:
    from ..backends.base import Backend

PRECISIONS = ("float32", "float64", "mixed_bfloat16", "mixed_float16")


def setup(
    seed: int | None = None,
    precision: str | None = None,
    backend: str | None = None,
    devices: Any = None,
    compile_cache: bool | None = None,
    deterministic: bool = False,
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
            with loss scaling; see `LossScale`). `"float64"` changes the whole process: it sets
            Keras' `floatx`, lets Keras' functions keep float64, and enables JAX's 64-bit mode;
            batches of float32 become float64. Another precision sets all of that back.
        backend: `"tensorflow"`, `"jax"` or `"torch"`; only before Keras is imported. Default:
            `KERAS_BACKEND`, else the only installed backend, else Keras' own configuration.
        devices: The number of devices to train on, or a `keras.distribution` object; several on
            JAX only. A number splits each batch among the first so many devices
            (`keras.distribution.DataParallel`). Results are those of one device, within rounding.
        compile_cache: False to compile every program again, instead of keeping compiled programs
            in the user's cache directory for later processes (JAX only). Default: True, unless the
            environment variable `TREADLE_COMPILE_CACHE` is `off`.
        deterministic: True to compute the same bits again on an accelerator, by algorithms that
            may be slower; recorded with the run, and required when it resumes. A CPU does that
            anyway. On JAX, this must be set before Keras is imported.

    Raises:
        BackendError: The backend is unknown, not installed, or Keras already runs on another one.
        ConfigurationError: Layers exist already and would not be affected, a value is unknown, or
            there are fewer devices. In a notebook, a cell may set the seed again, and the same
            values.

    Example:
        >>> import treadle
        >>> treadle.setup(seed=0)
    """
    late = deterministic and process_settings.prepare_environment()
    if compile_cache is not None:
        if not isinstance(compile_cache, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigurationError(
                f"compile_cache is True or False, not {compile_cache!r}: the environment variable "
                f"{process_settings.COMPILE_CACHE} names another folder"
            )
        process_settings.keep_compiled(compile_cache)
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
    if process_group().size == 1 and _joined():
        seed = seed if seed is not None else run_seed()  # all must draw the same numbers
    if devices is not None:
        devices = _checked_devices(_overriding.get("devices", devices))
    for name, value in (("precision", precision), ("seed", seed), ("devices", devices)):
        if value is not None and built and not _is_again(name, value):
            raise ConfigurationError(
                f"setup({name}=…) must come before anything is built: {built} exists already and "
                f"would not be affected. Move treadle.setup to the top of the script, or call "
                f"keras.backend.clear_session() first"
            )
    if seed is not None:
        from ..core.randomness import seed_everything  # late: commands import this without NumPy

        seed_everything(seed)
    if precision is not None:
        from ..core import float64  # imports NumPy, which `treadle --help` does not need

        wide = precision == "float64"
        if wide != float64.is_on():
            _backend().use_float64(wide)
        float64.switch(wide)
        keras.config.set_dtype_policy(precision)
    if devices == 1:
        keras.distribution.set_distribution(None)
    elif devices is not None:
        _backend().distribute(devices)
    if deterministic:
        _backend().use_deterministic_algorithms(late)
        process_settings.switched_on()


def _joined() -> bool:
    """Join the other processes, if this is one of several, and return whether it is."""
    process_group().launcher, process_group().in_thread = found_launcher(), is_in_ray()
    place = ray_place() or found_place()
    if place is None:
        return False
    from .joining import join_processes  # late: it imports NumPy

    join_processes(place, _backend())
    process_group().launcher, process_group().in_thread = place.launcher, is_in_ray()
    return True


def _is_again(name: str, value: Any) -> bool:
    """Return whether a notebook runs a cell again, which sets the seed or changes nothing.

    The cells below make their layers again. Layers of the earlier time keep their weights.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return shell() is not None and (name == "seed" or value == _CURRENT[name]())


def _backend() -> "Backend":
    from ..backends.base import active  # late: it imports Keras

    return active()


_overriding: dict[str, Any] = {}
_CURRENT = {"seed": run_seed, "precision": precision_name, "devices": device_count}


@contextmanager
def overriding(
    seed: int | None = None,
    precision: str | None = None,
    backend: str | None = None,
    devices: int | None = None,
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
    given = {"seed": seed, "precision": precision, "backend": backend, "devices": devices}
    _overriding.update({name: value for name, value in given.items() if value is not None})
    try:
        yield
    finally:
        _overriding.clear()
    for name, current in _CURRENT.items():
        if given[name] is not None and given[name] != (found := current()):
            raise ConfigurationError(
                f"--{name} {given[name]} has no effect, since the file itself sets the {name} "
                f"{found} with Keras' own function: write treadle.setup({name}={found!r}) there, "
                "which the command line can override"
            )


def _checked_devices(devices: Any) -> Any:
    """Return a number of devices, or a distribution, after checking its type.

    Raises:
        ConfigurationError: It is neither, or the number is less than 1.
    """
    import keras

    kinds = keras.distribution.DataParallel, keras.distribution.ModelParallel
    if isinstance(devices, kinds):
        return devices
    if isinstance(devices, bool) or not isinstance(devices, SupportsIndex):
        raise ConfigurationError(
            "devices is the number of devices to train on, or a keras.distribution.DataParallel or "
            f"ModelParallel, not {devices!r}"
        )
    return whole_number("devices", devices, ConfigurationError)


def _existing_layer() -> str:
    """Return the name of a layer that exists already, or an empty string."""
    counters = keras_internals.global_state.get_global_attribute("object_name_uids", {}) or {}
    made = [name for name, count in counters.items() if count and name not in NOT_BUILT]
    return f"'{made[0]}'" if made else ""


# Keras itself creates these, on import or for `keras.random`. They do not show that a layer exists.
NOT_BUILT = ("seed_generator", "variable")
