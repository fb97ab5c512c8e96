"""Pictures that were logged, as files."""

import os
import re
from pathlib import Path

from ..core.hook import Hook, LoopView
from ..core.images import Image
from ..core.logs import Record

FOLDER = "images"


class Images(Hook):
    """Writes each `treadle.Image` that is logged as a PNG file into the run directory.

    A picture that was logged as `samples` at step 469 is `images/samples-469.png`; the log holds
    this path in its place. One of the same name at the same step takes its place.

    Example:
        >>> import treadle
        >>> images = treadle.hooks.Images()  # there by itself where a run has a directory
    """

    def record(self, loop: LoopView, record: Record) -> None:
        """Write what pictures there are."""
        if loop.directory is None:
            return
        for name, path in paths(record).items():
            file = loop.directory / path
            file.parent.mkdir(exist_ok=True)
            temporary = file.with_name(f"{file.name}.partial")
            temporary.write_bytes(record.values[name].png())
            os.replace(temporary, file)


def paths(record: Record) -> dict[str, str]:
    """Return where in a run directory the pictures of a record lie, by name.

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
    """Remove the pictures of a run that is to begin anew."""
    for file in (directory / FOLDER).glob("*-*.png"):
        file.unlink()


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]", "_", name)
