"""The logged images of a run: those that its log lists, as PNG files in the folder `images`."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..hooks.images import FOLDER

MOST_IMAGE_BYTES = 1 << 20  # of one image
_PNG = b"\x89PNG\r\n\x1a\n"
_IMAGE = re.compile(rf"{FOLDER}/([\w.-]{{1,200}}-\d{{1,16}}\.png)")  # as `Images` names files


def listed_images(records: Iterable[Mapping[str, Any]]) -> list[tuple[str, int, str]]:
    """Return the name, the step and the file of each image that the records of a log list.

    Example:
        >>> listed_images([{"kind": "log", "step": 9, "samples": "images/samples-9.png"}])
        [('samples', 9, 'samples-9.png')]
    """
    return [
        (name, line["step"], match[1])
        for line in records
        for name, value in line.items()
        if isinstance(value, str) and (match := _IMAGE.fullmatch(value))
    ]


def is_image(value: str) -> bool:
    """Return whether a logged text is the path of an image."""
    return _IMAGE.fullmatch(value) is not None


def is_png(data: bytes) -> bool:
    """Return whether the content of a file begins like a PNG file."""
    return data.startswith(_PNG)
