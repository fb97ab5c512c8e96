"""Keras made ready: its backend chosen, then imported and set up without chatter."""

import os
import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile

from ..core.backend_choice import choose_backend, default_backend, installed_backends
from ..core.options import setup
from ..core.terminal import Waiting
from ..errors import BackendError, DataError

# What TensorFlow's C++ part says at each start: which instructions it was compiled for, and so on.
CHATTER = re.compile(rb"[IW]\d{4} \d\d:\d\d:|WARNING: All log messages before|To enable the follow")


def prepare(
    backend: str | None,
    only: str | None,
    data_dir: Path | None,
    seed: int | None,
    precision: str | None,
    quiet: bool = False,
) -> None:
    """Choose the backend, import Keras, and set it up.

    Args:
        backend: What was asked for, which wins over KERAS_BACKEND and Keras' own configuration.
        only: The one backend that the task can run on, or None.
        data_dir: The folder that data sets are looked for in, or None.
        seed: For `treadle.setup`; 0 if not given, until the task's file says otherwise.
        precision: For `treadle.setup`.
        quiet: Do not show that Keras is being imported, which takes seconds.

    Raises:
        BackendError: The backend is unknown, not installed, loaded already as another one, or not
            what the task runs on.
        ConfigurationError: The precision is not known.
        DataError: There is no such folder.
    """
    if data_dir is not None:
        os.environ["TREADLE_DATA"] = str(checked_folder(data_dir))
    chosen = choose(backend, only)
    choose_backend(chosen)
    with _importing(chosen, quiet or "keras" in sys.modules), _quiet_start():
        setup(seed=seed or 0, precision=precision)
        import_module("treadle.loop")  # all that a command needs: this takes a second or two


def checked_folder(data_dir: Path) -> Path:
    """Return the whole path of a folder with data sets.

    Raises:
        DataError: There is no such folder.
    """
    if not data_dir.is_dir():
        raise DataError(f"--data-dir {data_dir}: there is no such folder")
    return data_dir.absolute()


def choose(backend: str | None, only: str | None) -> str:
    """Return the backend to run on.

    Args:
        backend: The one that was asked for, or None.
        only: The one backend that the task can run on, or None.

    Raises:
        BackendError: None is installed, the task's only one is not, or another one was asked for.
    """
    if only is None:
        return backend or default_backend()
    installed = installed_backends()
    if only not in installed:
        raise BackendError(
            f"this task runs on {only} only, which is not installed: pip install "
            f"'treadle[{only}]' (installed: {', '.join(installed) or 'none'})"
        )
    asked = backend or os.environ.get("KERAS_BACKEND")
    if asked and asked != only:
        origin = "--backend" if backend else "KERAS_BACKEND"
        raise BackendError(
            f"this task runs on {only} only, and {origin} says {asked}: use --backend {only}"
        )
    return only


@contextmanager
def _importing(backend: str, quiet: bool) -> Generator[None]:
    """Show on standard error that Keras is being imported, and for how long."""
    if quiet:
        yield
        return
    from rich.console import Console  # late: it takes a tenth of a second

    sys.stderr.flush()
    with (
        os.fdopen(os.dup(2), "w") as file,  # standard error itself is caught meanwhile
        # Libraries may keep sys.stderr as it is now, so it stays what it is.
        Waiting(f"importing keras and {backend}", Console(file=file), prints=False),
    ):
        yield


def showing(text: str, quiet: bool, at_once: bool = False) -> Waiting:
    """Show on standard error what a command is doing, and for how long.

    Args:
        text: What it is doing.
        quiet: Show nothing.
        at_once: Where standard error is no terminal, print a line at the start as well, not only
            after 30 seconds.
    """
    from rich.console import Console

    return Waiting(text, Console(stderr=True), quiet=quiet, at_once=at_once)


@contextmanager
def _quiet_start() -> Generator[None]:
    """Leave chatter out of what is written to standard error, unless the user has set its level.

    The level is not enough: while TensorFlow is imported, its logging does not look at it yet.
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
