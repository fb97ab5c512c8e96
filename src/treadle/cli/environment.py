"""Keras setup for commands: chooses the backend, then imports Keras without framework log lines."""

import gc
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..core.process_settings import choose_backend, default_backend, installed_backends
from ..core.terminal import Waiting
from ..distribute import found_place
from ..distribute.setup import overriding
from ..distribute.setup import setup as set_up
from ..errors import BackendError, DataError
from ..recipes import Recipe, make

if TYPE_CHECKING:  # importing it would import Keras
    from ..recipes._loading import Made

_VIRTUAL = "--xla_force_host_platform_device_count"

# Log lines that TensorFlow's C++ code writes at each start, as the CPU instructions that it uses.
CHATTER = re.compile(rb"[IW]\d{4} \d\d:\d\d:|WARNING: All log messages before|To enable the follow")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How Keras is set up for a task.

    Attributes:
        backend: The backend given by the user, or None. It takes precedence over KERAS_BACKEND and
            Keras' configuration file.
        precision: For `treadle.setup`.
        seed: For `treadle.setup`; None means 0, unless the task's file calls `setup` itself.
        data_dir: The folder with data sets, or None for the default.
        deterministic: For `treadle.setup`.
        devices: For `treadle.setup`; a CPU is divided into so many virtual devices of JAX.
        quiet: Do not show progress, such as while Keras is imported, which takes seconds.
    """

    backend: str | None = None
    precision: str | None = None
    seed: int | None = None
    data_dir: Path | None = None
    deterministic: bool = False
    devices: int | None = None
    quiet: bool = False

    @classmethod
    def of(cls, options: object, **changes: Any) -> "Setup":
        """Create a setup from the options of a command, with changes."""
        names = [field.name for field in fields(cls) if hasattr(options, field.name)]
        return cls(**{**{name: getattr(options, name) for name in names}, **changes})


def prepare(setup: Setup, only: str | None = None) -> None:
    """Choose the backend, import Keras, and set it up.

    Args:
        setup: How Keras is set up.
        only: The only backend that the task supports, or None for any.

    Raises:
        BackendError: If the backend is unknown, not installed, not supported by the task, or if
            Keras is already imported with another backend.
        ConfigurationError: If the precision is unknown, or there are fewer devices.
        DataError: If the data folder does not exist.
    """
    if setup.data_dir is not None:
        os.environ["TREADLE_DATA"] = str(checked_folder(setup.data_dir))
    chosen = choose(setup.backend, only)
    choose_backend(chosen)
    place, devices = found_place(), setup.devices
    if chosen == "jax" and devices is not None:
        _divide_cpu(devices if place is None else devices // place.size)
    quiet = setup.quiet or "keras" in sys.modules or (place is not None and place.rank > 0)
    with _importing(chosen, quiet), _quiet_start(), _without_unused(chosen):
        set_up(
            seed=setup.seed or 0,
            precision=setup.precision,
            deterministic=setup.deterministic,
            devices=devices,
        )
        import_module("treadle.loop")  # takes a second or two, so it is part of the progress line


def make_task(recipe: Recipe, settings: Mapping[str, Any], setup: Setup) -> "Made":
    """Import Keras, set it up, and make a task.

    Raises:
        TreadleError: If an option is invalid, or the task cannot be made.
    """
    prepare(setup, recipe.backend)
    given = setup.seed, setup.precision, setup.backend, setup.devices
    with showing("making the task", setup.quiet), overriding(*given):
        return make(recipe, settings)


def _divide_cpu(devices: int) -> None:
    """Let JAX divide a CPU into virtual devices, unless the user has chosen their number.

    JAX reads the variable when it starts. It uses the CPU only if there is no accelerator.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if devices > 1 and _VIRTUAL not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_VIRTUAL}={devices}".strip()


def checked_folder(data_dir: Path) -> Path:
    """Return the absolute path of a folder with data sets.

    Raises:
        DataError: If the folder does not exist.
    """
    if not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir}: there is no such folder")
    return data_dir.absolute()


def choose(backend: str | None, only: str | None) -> str:
    """Return the backend to run on.

    Args:
        backend: The backend given by the user, or None.
        only: The only backend that the task supports, or None for any.

    Raises:
        BackendError: If no backend is installed, the task's only backend is not installed, or the
            user chose a backend that the task does not support.
    """
    if only is None:
        return backend or default_backend()
    installed = installed_backends()
    if only not in installed:
        raise BackendError(
            f"this task runs on {only} only, which is not installed: pip install "
            f"{only} (installed: {', '.join(installed) or 'none'})"
        )
    requested = backend or os.environ.get("KERAS_BACKEND")
    if requested and requested != only:
        origin = "--backend" if backend else "KERAS_BACKEND"
        raise BackendError(
            f"this task runs on {only} only, but {origin} is {requested}: use --backend {only}"
        )
    return only


@contextmanager
def _importing(backend: str, quiet: bool) -> Generator[None]:
    """Show on standard error that Keras is being imported, with the elapsed time."""
    if quiet:
        yield
        return
    from rich.console import Console  # late: it takes a tenth of a second

    sys.stderr.flush()
    with (
        os.fdopen(os.dup(2), "w") as file,  # a copy: standard error is redirected meanwhile
        # Libraries may keep a reference to sys.stderr during import, so it is not replaced.
        Waiting(f"importing keras and {backend}", Console(file=file), prints=False),
    ):
        yield


def showing(text: str, quiet: bool, at_once: bool = False) -> Waiting:
    """Show on standard error what a command is doing, with the elapsed time.

    Args:
        text: The activity, as "making the task".
        quiet: Show nothing.
        at_once: If standard error is not a terminal, print a line at the start too, not only after
            30 seconds.
    """
    from rich.console import Console

    return Waiting(text, Console(stderr=True), quiet=quiet, at_once=at_once)


# Keras and TensorFlow import these if they can, for features that few programs use. Each takes more
# than half a second.
_SELDOM_USED = ("jax", "matplotlib", "matplotlib.pyplot")


@contextmanager
def _without_unused(backend: str) -> Generator[None]:
    """Import Keras without JAX on another backend, without Matplotlib, and without a collector.

    Programs can import both later. Keras' function for plots keeps a module that imports Matplotlib
    when it is used.
    """
    if "keras" in sys.modules:
        yield
        return
    # Imports leave little garbage, and to look for it takes a tenth of their time.
    collects = gc.isenabled()
    gc.disable()
    names = [name for name in _SELDOM_USED if name != backend and name not in sys.modules]
    # None: to import it raises an ImportError
    has_plots = find_spec("matplotlib") is not None
    hidden: dict[str, Any] = {
        name: _Later(name) if name != "jax" and has_plots else None for name in names
    }
    sys.modules.update(hidden)
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name)
        gc.freeze()  # nor is there any among the imported modules later
        if collects:
            gc.enable()


class _Later(ModuleType):
    """A stand-in for a module, which is imported when an attribute is first read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)  # for those who ask whether it is installed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or sys.modules.get(self.__name__) is self:  # still hidden
            raise AttributeError(name)
        return getattr(import_module(self.__name__), name)


@contextmanager
def _quiet_start() -> Generator[None]:
    """Filter TensorFlow's start-up log lines from standard error, unless the user set a log level.

    Setting TF_CPP_MIN_LOG_LEVEL is not enough: TensorFlow ignores it while it is being imported.
    """
    if "TF_CPP_MIN_LOG_LEVEL" in os.environ or "tensorflow" in sys.modules:
        yield
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.stderr.flush()
    stderr = os.dup(2)
    with TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if not CHATTER.match(line):
                    os.write(2, line)
