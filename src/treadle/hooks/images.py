"""The `Images` hook, which saves logged images as PNG files."""

import os
import re
from pathlib import Path

from ..core.hook import Hook, LoopView
from ..core.images import Image
from ..core.logs import Record

FOLDER = "images"


class Images(Hook):
    """Saves each logged `treadle.Image` as a PNG file in the run directory.

    An image logged as `samples` at step 469 is saved as `images/samples-469.png`; the log contains
    this path. An image logged later with the same name at the same step overwrites the file.

    Example:
        >>> import treadle
        >>> images = treadle.hooks.Images()  # a default hook of runs with a directory
    """

    def record(self, loop: LoopView, record: Record) -> None:
        """Save the images of a record."""
        if loop.directory is None:
            return
        for name, path in paths(record).items():
            file = loop.directory / path
            file.parent.mkdir(exist_ok=True)
            temporary = file.with_name(f"{file.name}.partial")
            temporary.write_bytes(record.values[name].png())
            os.replace(temporary, file)


def paths(record: Record) -> dict[str, str]:
    """Return the paths of a record's images in the run directory, by name.

    Example:
        >>> import numpy as np
        >>> from treadle.core.progress import Progress
        >>> paths(Record("log", Progress(step=9), {"a/b": Image(np.eye(8)), "loss": 0.5}))
        {'a/b': 'images/a_b-9.png'}
    """
    return {
        name: f"{FOLDER}/{_file_name(name)}-{record.progress.step}.png"
        for name, value in record.values.items()
        if isinstance(value, Image)
    }


def remove(directory: Path) -> None:
    """Remove the saved images of a run that starts from scratch."""
    for file in (directory / FOLDER).glob("*-*.png"):
        file.unlink()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
