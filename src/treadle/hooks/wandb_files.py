"""Finds the last step in the files that Weights & Biases writes offline.

The package writes blocks of 32 KiB. If the process is killed, the block that is not full is lost,
which holds about a hundred steps. Only the files tell which steps they hold.

A file is a header of 7 bytes and a sequence of records in LevelDB's log format, see
https://github.com/google/leveldb/blob/main/doc/log_format.md. The package has no reader for it.
"""

import importlib
import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from ..core.folder import Folder

MAGIC, HEADER = b":W&B", 7  # bytes of the head of a file, and of a part of a record
BLOCK: Final = 1 << 15
TAIL: Final = 64 * BLOCK  # the last row is in here, unless it holds a text of 2 MiB
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4  # kinds of parts


def last_step(directory: Path, run: str) -> int | None:
    """Return the last step in the files of an offline run; 0 if they hold no step.

    Args:
        directory: The run directory.
        run: The id of the tracked run.

    Returns:
        The step, or None if there are no files, as for a run that is not offline.
    """
    if not re.fullmatch(r"[\w-]+", run):
        return None
    own = re.compile(rf"offline-run-[\d_]+-{run}")
    with Folder.open(directory) as opened:
        if not opened.is_folder("wandb"):
            return None
        with opened.subfolder("wandb") as folder:
            found = [x for x in folder.names() if own.fullmatch(x) and folder.is_folder(x)]
            for name in reversed(found):  # their names begin with the time
                with folder.subfolder(name) as written:
                    step = _last_step(written, f"run-{run}.wandb")
                if step:
                    return step
    return 0 if found else None


def _last_step(folder: Folder, name: str) -> int:
    if folder.size(name) is None:
        return 0
    with folder.opened(name) as (file, size):
        for start in dict.fromkeys((max(0, size - TAIL) // BLOCK * BLOCK, 0)):
            rows = [record.history for record in records(file, start) if record.HasField("history")]
            if rows:
                return max(_step(row) for row in rows)
    return 0


def _step(row: Any) -> int:
    """Return the step of a row; 0 if it holds none or is damaged, since training must go on."""
    values = {item.key or "/".join(item.nested_key): item.value_json for item in row.item}
    try:
        return int(json.loads(values["_step"]))
    except (KeyError, TypeError, ValueError):
        return 0


def records(file: BinaryIO, start: int = 0) -> Iterator[Any]:
    """Yield the complete records of a file up to a damaged one, as messages of the package.

    Args:
        file: The file.
        start: Where to start, at the beginning of a block; a record that begins before is left out.
    """
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    damage = importlib.import_module("google.protobuf.message").DecodeError
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        return
    file.seek(start or HEADER)
    parts: list[bytes] | None = None  # of a record that has begun
    while True:
        left = BLOCK - file.tell() % BLOCK
        if left < HEADER:  # the rest of the block is empty
            file.seek(left, 1)
        head = file.read(HEADER)
        if len(head) < HEADER:
            return
        _, length, kind = struct.unpack("<IHB", head)
        part = file.read(length)
        if len(part) < length:  # the process was killed here
            return
        if kind in (FULL, FIRST):
            parts = []
        if parts is None:
            continue
        parts.append(part)
        if kind in (FULL, LAST):
            try:
                record = message.FromString(b"".join(parts))
            except damage:
                return
            yield record
            parts = None
