"""Versions of Keras, each unpacked into a folder of its own, which comes before the installed one.

The folders are kept below `TREADLE_TESTS_KERAS`, or else the user's cache folder. Keras is pure
Python: a version has 1 to 2 MB to download and 16 MB unpacked, and needs no environment.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

STABLE = ("3.9.0", "3.10.0", "3.11.3", "3.12.4", "3.13.2", "3.14.1")
"""The lowest version of the bounds, and one of each later series: each is downloaded once."""

NEWEST, NIGHTLY = "newest", "nightly"
"""What these names mean changes, so they are looked up again after a day."""

SECONDS = {NEWEST: 86_400, NIGHTLY: 86_400}
PATIENCE = 15  # seconds for an answer of the package index


class Unreachable(Exception):
    """The package index cannot be reached, and the version is not in the cache folder."""


class Unknown(Exception):
    """The package index has no such version."""


def cache_folder() -> Path:
    """Return the folder of the versions."""
    if own := os.environ.get("TREADLE_TESTS_KERAS"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "treadle-keras")


def unpacked(versions: Iterable[str]) -> dict[str, Path | Exception]:
    """Unpack versions, all at once.

    Args:
        versions: Versions as `3.12.4` or `3.12`, the newest one of the series, `newest` or
            `nightly`.

    Returns:
        The folder of each, or the reason why there is none.
    """
    chosen = list(dict.fromkeys(versions))
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(chosen, pool.map(_found, chosen), strict=True))


def version_of(folder: Path) -> str:
    """Return the version that a folder holds, without the date of a nightly build."""
    name = folder.name.removeprefix("keras-")
    return f"{name.partition('.dev')[0]}.dev" if ".dev" in name else name


def _found(version: str) -> Path | Exception:
    """Return the folder of a version, which is downloaded if it is missing or its name has aged."""
    folder = cache_folder()
    pinned = folder / f"keras-{version}"
    if pinned.is_dir():
        return pinned
    note = folder / f"{version}.txt"  # which version the name meant, and when
    known = _noted(note)
    if known and time.time() - note.stat().st_mtime < SECONDS.get(version, 30 * 86_400):
        return known
    try:
        found = _download(version)
    except Unreachable as error:
        return known or error
    except Unknown as error:
        return error
    if found != pinned:
        note.write_text(found.name)
    return found


def _noted(note: Path) -> Path | None:
    with suppress(OSError):
        found = note.with_name(note.read_text())
        return found if found.is_dir() else None
    return None


def _download(version: str) -> Path:
    """Unpack a version into a temporary folder, and give the folder the name of the version."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="partial-") as partial:
        command = [
            *(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"),
            *("--no-deps", "--no-compile", "--only-binary=:all:", "--retries=1"),
            *(f"--timeout={PATIENCE}", "--target", f"{partial}/keras", _requirement(version)),
        ]
        # Without the user's settings for installing, such as `PIP_USER`; those of the index stay.
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise _failure(version, done.stderr)
        unpacked = Path(partial, "keras")
        (about,) = unpacked.glob("keras*.dist-info")
        target = folder / f"keras-{about.name.partition('-')[2].removesuffix('.dist-info')}"
        with suppress(OSError):  # another process has unpacked it at the same time
            unpacked.rename(target)
        return target


def _requirement(version: str) -> str:
    if version == NIGHTLY:
        return "keras-nightly"
    if version == NEWEST:
        return "keras"
    return f"keras=={version}.*" if version.count(".") == 1 else f"keras=={version}"


def _failure(version: str, errors: str) -> Exception:
    # pip lists the versions that it knows, which may include some of a folder on this machine.
    if (
        "Retrying (" in errors
        or "(from versions: none)" in errors
        or "No module named pip" in errors
    ):
        return Unreachable(f"the package index cannot be reached for Keras {version}")
    if "from versions:" in errors:
        return Unknown(f"the package index has no Keras {version}")
    return Unknown(f"pip cannot unpack Keras {version}: {errors.strip()[-1000:]}")
