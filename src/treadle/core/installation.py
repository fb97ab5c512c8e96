"""Facts about the installation and the machine, for bug reports. Imports no framework."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from ..errors import BackendError
from . import process_settings
from .process_settings import (
    BACKENDS,
    choice_of_import,
    cores,
    default_backend,
    installed_backends,
    keras_configuration,
)

# Extras that only developers of Treadle install.
_DEVELOPMENT = ("bench", "dev", "docs")
# The beginnings of the names of environment variables that change how programs run.
_PREFIXES = (
    *("CUDA", "GLOO", "HIP", "JAX", "KERAS", "MASTER", "MKL", "NCCL", "NVIDIA", "OMP", "OMPI"),
    *("OPENBLAS", "PJRT", "PYTORCH", "ROCR", "SLURM", "TF", "TORCH", "TORCHINDUCTOR", "TREADLE"),
    "XLA",
)
_NAMES = (
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "LOCAL_RANK", "MALLOC_ARENA_MAX", "NPROC", "PYTHONHASHSEED"),
    *("PYTHONOPTIMIZE", "PYTHONPATH", "RANK", "WORLD_SIZE", "XDG_CACHE_HOME", "XDG_STATE_HOME"),
)
_SECRET = re.compile("TOKEN|KEY|SECRET|PASS|CREDENTIAL|JWT|AUTH", re.IGNORECASE)
_TERRAFORM = re.compile(
    "TF_(CLI|LOG|REATTACH|REGISTRY|TOKEN|VAR)_|"
    "TF_(DATA_DIR|INPUT|IN_AUTOMATION|LOG|PLUGIN_CACHE_DIR|WORKSPACE)$"
)
_USER_OF_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # with a password, perhaps
_CPU = Path("/proc/cpuinfo")
_GPUS = Path("/proc/driver/nvidia/gpus")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")


def describe() -> dict[str, Any]:
    """Return the facts that a bug report needs, in JSON's types.

    The values of environment variables that may be secret are hidden, and the home directory is
    written as `~`. Packages that are not installed have the version None.

    Example:
        >>> sorted(describe())[:4]
        ['backend', 'backends', 'compile_cache', 'environment']
    """
    required, extras = _requirements()
    return {
        "location": shortened(Path(__file__).parents[1]),
        "python": f"{platform.python_version()} ({shortened(Path(sys.executable))})",
        "platform": platform.platform(),
        "machine": {
            "processor": _processor(),
            "cores": cores(),
            "memory_gib": _memory(),
            "nvidia_gpus": list(_nvidia_gpus()),
        },
        "backend": chosen_backend(),
        "backends": {name: package_version(name) for name in BACKENDS},
        "packages": {name: package_version(name) for name in required},
        "extras": extras,
        "keras_configuration": keras_configuration(),
        "compile_cache": shortened(process_settings.compile_cache_folder()),
        "environment": _variables(os.environ),
    }


def package_version(name: str) -> str | None:
    """Return the version of a package, without importing it; None if it is not installed.

    Example:
        >>> package_version("no-such-package") is None
        True
    """
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
    # Some packages are distributed under several names, as tensorflow-cpu.
    if name not in BACKENDS or name not in installed_backends():
        return None
    others = metadata.packages_distributions().get(name, ())
    return next((f"{metadata.version(other)} ({other})" for other in others), "unknown")


def _requirements() -> tuple[tuple[str, ...], dict[str, dict[str, str | None]]]:
    """Return the packages that Treadle requires, and those of its extras with versions."""
    required: list[str] = []
    extras: dict[str, dict[str, str | None]] = {}
    try:
        lines = metadata.requires("treadle") or []
    except metadata.PackageNotFoundError:  # run from its sources
        lines = []
    for line in lines:
        named = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == ['\"]([\w-]+)", line)
        if named is None:
            continue
        if extra is None:
            required.append(named[0])
        elif extra[1] not in (*BACKENDS, *_DEVELOPMENT):
            extras.setdefault(extra[1], {})[named[0]] = package_version(named[0])
    return tuple(required), extras


def chosen_backend() -> dict[str, str | None]:
    """Return the `name` of the default backend, the `origin` of the choice, and an `error` or None.

    Example:
        >>> sorted(chosen_backend())
        ['error', 'name', 'origin']
    """
    try:
        name = default_backend()
    except BackendError as error:
        return {"name": None, "origin": None, "error": str(error)}
    if os.environ.get("KERAS_BACKEND") and choice_of_import() is None:
        origin = "KERAS_BACKEND"
    elif installed_backends() == (name,):
        origin = "the only one that is installed"
    elif keras_configuration().get("backend") == name:
        origin = "Keras' configuration file"
    else:
        origin = "the default of Keras"
    error = None
    if name not in installed_backends():
        error = f"{name} is not installed" if name in BACKENDS else f"{name} is no backend of Keras"
    return {"name": name, "origin": origin, "error": error}


def _processor() -> str:
    try:
        lines = _CPU.read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def _memory() -> float | None:
    """Return the GiB of memory that this process may use, or None if that is unknown."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        return None
    with suppress(OSError, ValueError):  # the text is `max` if there is no limit
        found = min(found, int(_MEMORY_LIMIT.read_text()))  # of a container
    return round(found / 2**30, 1)


def _nvidia_gpus() -> Iterator[str]:
    """Yield the models of NVIDIA's GPUs, as the driver lists them on Linux."""
    for path in sorted(_GPUS.glob("*/information")):
        try:
            text = path.read_text()
        except OSError:
            continue
        model = re.search(r"^Model:\s*(.+)$", text, re.MULTILINE)
        yield model[1] if model else path.parent.name


def _variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how programs run, without secrets."""
    found: dict[str, str] = {}
    for name, value in sorted(variables.items()):
        if name == "KERAS_BACKEND" and choice_of_import() is not None:
            continue  # set by `import treadle`, not by the user
        is_known = name in _NAMES or name.startswith(tuple(f"{prefix}_" for prefix in _PREFIXES))
        if is_known and not _TERRAFORM.match(name):
            public = _USER_OF_ADDRESS.sub("(hidden)", shortened(value))
            found[name] = "(hidden)" if _SECRET.search(name) else public
    return found


def shortened(value: Any) -> Any:
    """Return a text or a path with `~` for the home directory; None stays None."""
    if value is None:
        return None
    home = os.path.expanduser("~")
    if home in ("~", "/"):
        return str(value)
    # A part of another path, as /data/root/x for the home directory /root, is none.
    return re.sub(rf"(?<![\w.-]){re.escape(home)}(?![\w.-])", "~", str(value))
