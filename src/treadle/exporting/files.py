"""The place of an exported file: it is written in a temporary folder and then renamed."""

import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import ConfigurationError
from .formats import Format

_NAMES_WEIGHTS, _WEIGHTS = ".xml", ".bin"  # the two files of OpenVINO
_GRAPH: Final = "saved_model.pb"


def check_free(form: Format, path: Path, overwrite: bool) -> None:
    """Check that a file may be written, before anything is computed.

    Raises:
        ConfigurationError: Something else is there.
    """
    for place in _places(path):
        if os.path.lexists(place) and not overwrite:
            raise ConfigurationError(
                f"{place} exists: choose another path, or replace it with overwrite=True (--force)"
            )
        alike = place.is_file() if form.suffix else (place / _GRAPH).is_file()
        if place.is_symlink() or (place.exists() and not alike):
            raise ConfigurationError(
                f"{place} is not a file in the format {form.name}, so it is not replaced: choose "
                "another path"
            )


def _places(path: Path) -> list[Path]:
    """Return the path of an exported file, and that of the file with its weights if it has one."""
    return [path, path.with_suffix(_WEIGHTS)] if path.suffix == _NAMES_WEIGHTS else [path]


@contextmanager
def temporary_folder(path: Path) -> Generator[Path]:
    """Yield a new folder next to a path, which is removed at the end.

    Raises:
        ConfigurationError: The folder of the path cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ConfigurationError(
            f"cannot write in {path.parent}: {error.strerror or error}. Choose another path"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def install(written: Path, path: Path) -> None:
    """Move what was written to its place; it replaces an earlier file or folder.

    Args:
        written: The file or folder, alone in a temporary folder but for files that belong to it.
        path: Its place.

    Raises:
        ConfigurationError: A further file, as for weights of more than 2 GB, would replace one that
            belongs to something else.
    """
    if written.is_dir():
        if path.exists():
            os.replace(path, written.parent / "replaced")  # is removed with the temporary folder
        os.replace(written, path)
        return
    further = {path.with_name(file.name) for file in written.parent.iterdir()} - {*_places(path)}
    taken = [place for place in sorted(further) if os.path.lexists(place)]
    if taken and not os.path.lexists(path):
        raise ConfigurationError(
            f"{taken[0]} exists, and the exported file would replace it: choose another path, or "
            "move it away"
        )
    # The file that names the others is last, so that it is never there without them.
    for file in sorted(written.parent.iterdir(), key=lambda file: file == written):
        os.replace(file, path.with_name(file.name))


def size_of(path: Path) -> int:
    """Return the number of bytes of an exported file, with the files that belong to it."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in _places(path))
