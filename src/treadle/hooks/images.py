"""The `Images` hook, which saves logged images as PNG files."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..core.directory import LOG
from ..core.file_names import file_name
from ..core.folder import FILE, Folder
from ..core.hook import Hook, LoopView
from ..core.images import Image
from ..core.logs import Record
from ..errors import DirectoryError

FOLDER = "images"
LONGEST = 1 << 20  # bytes of a line of a log that may list images
_LISTED = re.compile(rf"{FOLDER}/([^/]+-\d+\.png)")


class Images(Hook):
    """Saves each logged `treadle.Image` as a PNG file in the run directory.

    An image logged as `samples` at step 469 is saved as `images/samples-469.png`; the log contains
    this path. Characters that not all file systems allow are percent-encoded, and long names end in
    a hash, so that each name has a file of its own. An image logged later with the same name at the
    same step overwrites the file.

    Example:
        >>> import treadle
        >>> images = treadle.hooks.Images()  # a default hook of runs with a directory
    """

    chief_only = True
    run = ""
    """The identifier of the run, which the files hold too: see `source_of`."""

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._unsynced: set[str] = set()

    def record(self, loop: LoopView, record: Record) -> None:
        """Save the images of a record."""
        if loop.directory is None:
            return
        for name, path in paths(record).items():
            file = Path(path).name
            self._directory = loop.directory
            with _folder(loop.directory, create=True) as folder:
                # Synced to disk with the next checkpoint: training does not wait for each image.
                content = record.values[name].png(source_of(self.run, file))
                folder.write(file, [content], sync=False)
            self._unsynced.add(file)

    def state(self) -> dict[str, Any]:
        """Sync the images written since the last checkpoint to disk."""
        if self._unsynced and self._directory is not None:
            with _folder(self._directory) as folder:
                for file in self._unsynced:
                    folder.flush_file(file)
                folder.sync()
            self._unsynced.clear()
        return {}

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Sync the last images to disk."""
        if not isinstance(error, DirectoryError):
            self.state()


def paths(record: Record) -> dict[str, str]:
    """Return the paths of a record's images in the run directory, by name.

    Example:
        >>> import numpy as np
        >>> from treadle.core.progress import Progress
        >>> paths(Record("log", Progress(step=9), {"a/b": Image(np.eye(8)), "loss": 0.5}))
        {'a/b': 'images/a%2fb-9.png'}
    """
    return {
        name: f"{FOLDER}/{file_name(name)}-{record.progress.step}.png"
        for name, value in record.values.items()
        if isinstance(value, Image)
    }


def source_of(run: str, file: str) -> str:
    """Return the text that the file of an image holds; "" for a run without an identifier."""
    return f"treadle {run} {file}" if run else ""


def remove(directory: Folder) -> None:
    """Remove the images of a run that starts from scratch.

    Only images that its log lists are removed: others are the user's.
    """
    if not directory.is_folder(FOLDER) or directory.kind(LOG) != FILE:
        return
    with directory.opened(LOG) as (log, _):
        listed = {name for line in _lines(log) for name in _in(line)}
    with directory.subfolder(FOLDER) as folder:
        for name in listed:
            folder.remove_file(name)
        is_empty = not folder.names()
    if is_empty:
        directory.remove_empty_folder(FOLDER)


def _lines(log: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a log, up to one that is too long: a damaged file may have terabytes."""
    while line := log.readline(LONGEST):
        yield line
        if len(line) == LONGEST:
            return


def _in(line: bytes) -> Iterator[str]:
    """Yield the names of the images that a line of a log lists."""
    if f'"{FOLDER}/'.encode() in line:
        with suppress(ValueError, RecursionError):
            record = json.loads(line)
            values = cast(dict[str, Any], record).values() if isinstance(record, dict) else ()
            for value in values:
                if isinstance(value, str) and (match := _LISTED.fullmatch(value)):
                    yield match[1]


def _folder(directory: Path, create: bool = False) -> Folder:
    """Open the folder of the images of a run."""
    with Folder.open(directory) as opened:
        # Creating a folder syncs the directory, which is needed only once.
        return opened.subfolder(FOLDER, create and not opened.is_folder(FOLDER))
