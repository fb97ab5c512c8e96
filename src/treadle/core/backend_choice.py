"""Choosing the Keras backend of the process before Keras is imported. Imports no framework."""

import json
import os
import sys
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
        raise BackendError(
            "no backend is installed: pip install 'treadle[tensorflow]', 'treadle[jax]' or "
            "'treadle[torch]'"
        )
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
            f"the backend {name!r} is not installed: pip install 'treadle[{name}]' "
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
