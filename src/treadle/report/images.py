"""The logged images of a run: those that its log lists, as PNG files in the folder `images`."""

import re
from collections.abc import Iterable

from ..core.folder import Folder
from ..core.images import png_fault
from ..core.logs import values_of
from ..errors import DirectoryError
from ..hooks.images import FOLDER, source_of
from ..hooks.log_file import Line

MOST_IMAGE_BYTES = 1 << 20  # of one image
_IMAGE = re.compile(rf"{FOLDER}/([\w.%-]{{1,200}}-\d{{1,16}}\.png)")  # as `Images` names files


def listed_images(records: Iterable[Line]) -> list[tuple[str, int, str]]:
    """Return the name, the step and the file of each image that the records of a log list.

    Example:
        >>> listed_images([{"kind": "log", "step": 9, "samples": "images/samples-9.png"}])
        [('samples', 9, 'samples-9.png')]
    """
    return [
        (name, line["step"], match[1])
        for line in records
        for name, value in values_of(line).items()
        if isinstance(value, str) and (match := _IMAGE.fullmatch(value))
    ]


def is_image(value: str) -> bool:
    """Return whether a logged text is the path of an image."""
    return _IMAGE.fullmatch(value) is not None


def read_image(images: Folder, file: str, run: str) -> bytes:
    """Return the content of an image in the folder of the images.

    Raises:
        DirectoryError: If the file is missing, too large or damaged, or of another run.
    """
    data = images.read(file, MOST_IMAGE_BYTES)
    fault = png_fault(data, source_of(run, file))
    if fault:
        raise DirectoryError(
            f"{images.path / file} is not the image that the run logged: {fault}. Restore a copy "
            "of it"
        )
    return data
