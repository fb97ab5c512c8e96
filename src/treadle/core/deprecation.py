"""Warnings about old public names."""

import sys
import warnings


def warn_renamed(old: str, new: str) -> None:
    """Warn that a public name was renamed.

    The warning is attributed to the first caller outside Treadle: Python hides deprecation warnings
    in libraries, and shows those in a script once for each line.
    """
    frame = sys._getframe(1)  # type: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(
        ("treadle.", "importlib.")
    ):
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} was renamed to {new}: use the new name",
        DeprecationWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )
