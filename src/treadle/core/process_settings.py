"""What a process has set before a framework starts, mostly in its environment.

That is the Keras backend, the number of cores, the folder of compiled programs, and whether
algorithms on accelerators are deterministic. Imports no framework.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from ..errors import BackendError, did_you_mean

BACKENDS = ("tensorflow", "jax", "torch")


def installed_backends() -> tuple[str, ...]:
    """Return the backends that can be imported, without importing them."""
    found: list[str] = []
    for name in BACKENDS:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:  # a folder of this name has no origin
            found.append(name)
    return tuple(found)


def keras_configuration() -> dict[str, Any]:
    """Return the settings in Keras' own configuration file; empty if there are none."""
    home = os.environ.get("KERAS_HOME") or Path.home() / ".keras"
    try:
        content = json.loads(Path(home, "keras.json").read_text())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], content) if isinstance(content, dict) else {}


def configured_backend() -> str:
    """Return the backend in Keras' own configuration file, or Keras' default."""
    name = keras_configuration().get("backend")
    return name if isinstance(name, str) else "tensorflow"


def default_backend() -> str:
    """Return the backend to use if no option specifies one.

    This is `KERAS_BACKEND`, else the only installed backend, else the one in Keras' configuration.

    Raises:
        BackendError: No backend is installed, or several are, but not the one in Keras'
            configuration.
    """
    named = os.environ.get("KERAS_BACKEND")
    if named:
        return named
    installed = installed_backends()
    if len(installed) == 1:
        return installed[0]
    configured = configured_backend()
    if configured in installed or configured not in BACKENDS:
        return configured
    if not installed:
        raise BackendError("no backend is installed: pip install jax, or tensorflow, or torch")
    raise BackendError(
        f"Keras is configured for {configured!r}, which is not installed; installed are "
        f"{' and '.join(installed)}. Choose one: set KERAS_BACKEND={installed[0]}, call "
        f"treadle.setup(backend={installed[0]!r}) before importing keras, or pass --backend "
        f"{installed[0]} to the treadle command"
    )


def choose_backend(name: str) -> None:
    """Make Keras use a backend, unless Keras is already imported with another one.

    Raises:
        BackendError: The backend is unknown or not installed, or Keras already runs on another one.
    """
    if name not in BACKENDS:
        raise BackendError(f"unknown backend {name!r}.{did_you_mean(name, BACKENDS)}")
    installed = installed_backends()
    if name not in installed:
        raise BackendError(
            f"the backend {name!r} is not installed: pip install {name} "
            f"(installed: {', '.join(installed) or 'none'})"
        )
    if "keras" in sys.modules:
        import keras

        current = keras.config.backend()
        if current != name:
            raise BackendError(
                f"Keras already runs on {current!r}, and cannot change to {name!r} in this "
                f"process: call treadle.setup(backend={name!r}) before importing keras, or set "
                f"KERAS_BACKEND={name}"
            )
    os.environ["KERAS_BACKEND"] = name


def choose_default_backend() -> None:
    """Choose the default backend, unless Keras is already imported.

    Raises:
        BackendError: There is no default backend, or it is not installed.
    """
    if "keras" not in sys.modules:
        choose_backend(default_backend())


def choose_only_backend() -> None:
    """Choose the backend if exactly one is installed and `KERAS_BACKEND` is not set.

    `import treadle` calls this, so that a later `import keras` works even if Keras is configured
    for a backend that is not installed.
    """
    global _choice_of_import
    if "keras" in sys.modules or os.environ.get("KERAS_BACKEND"):
        return
    installed = installed_backends()
    if len(installed) == 1:
        os.environ["KERAS_BACKEND"] = _choice_of_import = installed[0]


_choice_of_import: str | None = None


def choice_of_import() -> str | None:
    """Return the backend that `import treadle` has chosen, if no other was chosen since."""
    chosen = os.environ.get("KERAS_BACKEND")
    return chosen if chosen is not None and chosen == _choice_of_import else None


def cores() -> int:
    """Return the number of cores this process may run on, or all cores if that is unknown.

    Example:
        >>> cores() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


COMPILE_CACHE = "TREADLE_COMPILE_CACHE"
_OFF = ("off", "0", "false", "no")


when_switched: Callable[[bool], None] = lambda on: None  # noqa: E731 - replaced by the backend
"""Lets the framework of this process keep programs from now on, or not."""


def compile_cache_folder() -> Path | None:
    """Return the folder of compiled programs, or None if they are not kept.

    This is `TREADLE_COMPILE_CACHE`, else `treadle` in the user's cache directory.

    Example:
        >>> from pytest import MonkeyPatch
        >>> with MonkeyPatch.context() as patch:
        ...     patch.setenv("TREADLE_COMPILE_CACHE", "off")
        ...     compile_cache_folder()
    """
    named = os.environ.get(COMPILE_CACHE, "").strip()
    if named.lower() in _OFF:
        return None
    try:
        if named:
            return Path(named).expanduser().absolute()
        cache = os.environ.get("XDG_CACHE_HOME", "")
        # The specification of XDG ignores relative paths.
        base = Path(cache) if os.path.isabs(cache) else Path.home() / ".cache"
        return base / "treadle"
    except (RuntimeError, OSError):  # a user without a home directory
        return None


def keep_compiled(on: bool) -> None:
    """Keep compiled programs from now on, or not; processes started later do the same."""
    if not on:
        os.environ[COMPILE_CACHE] = "off"
        when_switched(False)
    elif os.environ.get(COMPILE_CACHE, "").strip().lower() in _OFF:
        os.environ.pop(COMPILE_CACHE, None)
        when_switched(True)


# https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS, _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_XLA_FLAG = "--xla_gpu_deterministic_ops=true"

_deterministic = _too_late = False


def is_deterministic() -> bool:
    """Return whether `treadle.setup(deterministic=True)` succeeded in this process."""
    return _deterministic


def switched_on() -> None:
    """Note that the framework uses deterministic algorithms."""
    global _deterministic
    _deterministic = True


def prepare_environment() -> bool:
    """Set what frameworks read when they start on a GPU, and return whether that came too late.

    It is too late for a framework that has already started.
    """
    global _too_late
    os.environ.setdefault(_CUBLAS, _WORKSPACE)
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_XLA_FLAG}".strip()
        _too_late = "keras" in sys.modules or "jax" in sys.modules
    return _too_late
