"""Finding the running line of user code."""

import inspect
from functools import cache
from linecache import getline
from pathlib import Path

import keras
import torch

_LIBRARIES = tuple(  # the standard library is the folder of `inspect`, with site-packages inside
    str(Path(file).parent)
    for file in (torch.__file__, keras.__file__, inspect.__file__, str(Path(__file__).parents[2]))
    if file
)


def place() -> str:
    """Return file, number and text of the innermost line of user code, or an empty string."""
    frame = inspect.currentframe()
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return ""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{line}: {getline(file, line).strip()}"


@cache
def _is_library(file: str) -> bool:
    inside = file.startswith(_LIBRARIES) and "/recipes/" not in file
    return inside or file.startswith("<")
