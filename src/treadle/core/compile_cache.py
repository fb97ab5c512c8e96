"""The folder in which compiled programs are kept for later processes, and the switch for it."""

import os
from pathlib import Path

VARIABLE = "TREADLE_COMPILE_CACHE"
_OFF = ("off", "0", "false", "no")


def folder() -> Path | None:
    """Return the folder of compiled programs, or None if they are not kept.

    This is `TREADLE_COMPILE_CACHE`, else `treadle` in the user's cache directory.

    Example:
        >>> from pytest import MonkeyPatch
        >>> with MonkeyPatch.context() as patch:
        ...     patch.setenv("TREADLE_COMPILE_CACHE", "off")
        ...     folder()
    """
    named = os.environ.get(VARIABLE, "").strip()
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


def switch(on: bool) -> None:
    """Keep compiled programs from now on, or not; processes started later do the same."""
    if not on:
        os.environ[VARIABLE] = "off"
    elif os.environ.get(VARIABLE, "").strip().lower() in _OFF:
        os.environ.pop(VARIABLE, None)
