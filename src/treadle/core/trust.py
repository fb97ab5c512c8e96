"""The user's memory of the runs that they started: which script and data folder each one uses.

`run.json` names a script and a data folder, but a run directory may come from another person. So
each command that starts a run also notes both in the user's state folder, which a run directory
cannot change. `treadle resume`, `evaluate` and `replay` compare the two.
"""

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DirectoryError
from .folder import Folder

LONGEST_SCRIPT = 64 << 20
_LONGEST_NOTE = 1 << 20


@dataclass(frozen=True)
class Remembered:
    """What the user started a run with.

    Attributes:
        directory: The resolved path of the run directory.
        recipe: The name of a recipe, or `FILE.py:Task` with the absolute path of the script.
        sha256: The SHA-256 of the script; None for a recipe.
        data_dir: The folder with data sets, or None.
    """

    directory: str
    recipe: str
    sha256: str | None
    data_dir: str | None


def state_folder() -> Path:
    """Return the folder with the user's notes: `treadle/runs` in the state folder of XDG.

    Example:
        >>> from pytest import MonkeyPatch
        >>> with MonkeyPatch.context() as patch:
        ...     patch.setenv("XDG_STATE_HOME", "/home/me/state")
        ...     state_folder().as_posix()
        '/home/me/state/treadle/runs'
    """
    base = os.environ.get("XDG_STATE_HOME", "")
    # The specification of XDG ignores relative paths.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "treadle" / "runs"


def remember(directory: Path, recipe: str, data_dir: str | None) -> None:
    """Note that the user started the run in a directory with this task and data folder.

    Args:
        directory: The run directory.
        recipe: The name of a recipe, or `FILE.py:Task` with the absolute path of the script.
        data_dir: The folder with data sets, or None.

    Raises:
        DirectoryError: If the note cannot be written.
    """
    script = script_of(recipe)
    note = Remembered(
        str(directory.resolve()), recipe, None if script is None else digest(script), data_dir
    )
    if remembered(directory) == note:
        return
    try:
        folder = state_folder()
    except RuntimeError as error:
        raise DirectoryError(f"cannot find the home folder: {error}") from error
    with Folder.open(folder, create=True) as opened:
        opened.write(_name(directory), [json.dumps(asdict(note), indent=2).encode()])


def remembered(directory: Path) -> Remembered | None:
    """Return what the user started the run in a directory with; None if there is no valid note."""
    try:
        with Folder.open(state_folder()) as folder:
            note: Any = json.loads(folder.read(_name(directory), _LONGEST_NOTE))
        found = Remembered(**note)
    except (DirectoryError, RuntimeError, ValueError, TypeError):
        return None
    return found if found.directory == str(directory.resolve()) else None


def script_of(recipe: str) -> Path | None:
    """Return the file of `FILE.py` or `FILE.py:Task`; None for the name of a recipe.

    Example:
        >>> script_of("digits"), script_of("/a/mine.py:Mine").as_posix()
        (None, '/a/mine.py')
    """
    file, colon, _ = recipe.rpartition(":")
    if not colon or not file.endswith(".py"):
        file = recipe
    return Path(file).expanduser().absolute() if file.endswith(".py") else None


def digest(script: Path) -> str | None:
    """Return the SHA-256 of a script; None if it is no regular file that can be read."""
    try:
        # Not blocking: there may be a pipe.
        opened = os.open(script, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(opened, "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode) or found.st_size > LONGEST_SCRIPT:
                return None
            return hashlib.sha256(file.read(LONGEST_SCRIPT)).hexdigest()
    except (OSError, ValueError):  # ValueError: a null character in the path
        return None


def may_be_edited(script: Path, directory: Path) -> bool:
    """Return whether only the user can have changed a script that they started a run with.

    A script inside the run directory may have been replaced together with it, and one that belongs
    to another user was replaced by that user.
    """
    try:
        path = script.resolve()
        owner = path.stat().st_uid
    except OSError:
        return False
    if path.is_relative_to(directory.resolve()):
        return False
    return not hasattr(os, "geteuid") or owner in (os.geteuid(), 0)


def _name(directory: Path) -> str:
    path = str(directory.resolve()).encode(errors="surrogateescape")
    return f"{hashlib.sha256(path).hexdigest()}.json"
