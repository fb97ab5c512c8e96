"""The end of a log that a run writes: its newest lines, its records, and what to cut off."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..core.folder import Folder
from ..errors import DataError
from .log_file import ADVICE, BLOCK, LONGEST_LINE, Line, parse_line

RECORD = b'\n{"kind"'  # of all lines, only records begin like this
Hash = Any  # `hashlib` does not export the class of its objects


def read_records(path: Path) -> tuple[list[Line], int]:
    """Read the records of a log, without parsing its steps.

    Returns:
        The records, and the number of the last step; 0 if there is no step.

    Raises:
        DataError: If the file is not a regular file, or a record or the last line is invalid.
    """
    found: list[Line] = []
    # Blocks are searched, which is ten times as fast as reading lines. A block begins with the end
    # of the line before it.
    rest, lines, last = b"\n", 0, None
    with Folder.open(path.parent, error=DataError) as folder, folder.opened(path.name) as (file, _):
        while len(rest) <= LONGEST_LINE and (data := file.read(BLOCK)):
            block = rest + data
            end = block.rindex(b"\n")
            begin, before = block.find(RECORD, 0, end), 0
            while begin >= 0:
                lines, before = lines + block.count(b"\n", before, begin + 1), begin + 1
                stop = block.index(b"\n", before)
                found.append(_parsed(block[before:stop], path, f"line {lines:,}"))
                begin = block.find(RECORD, stop, end)
            lines += block.count(b"\n", before, end)
            if end:
                last = block[block.rindex(b"\n", 0, end) + 1 : end]
            rest = block[end:]
    return found, _parsed(last, path, "the last line")["step"] if last is not None else 0


class LogTail:
    """Reads the lines that were added to a log since the last call.

    Args:
        path: The log. It need not exist yet.
        last: The number of lines of the first call.
    """

    def __init__(self, path: Path, last: int) -> None:
        self._path, self._last = path, last
        self._at: int | None = None  # the first byte that was not read
        self._file = 0  # the inode

    def lines(self) -> Iterator[Line]:
        """Yield the complete lines since the last call; none if there is no log.

        If the log was replaced, its last lines are yielded. If it became shorter, because a run
        resumed from an earlier step, reading continues at its end.

        Raises:
            DataError: If the file is not a regular file, or a line is invalid.
        """
        path = self._path
        if not path.parent.is_dir():
            return
        with Folder.open(path.parent, error=DataError) as folder:
            if folder.kind(path.name) is None:
                return
            with folder.opened(path.name) as (file, size):
                inode = os.fstat(file.fileno()).st_ino
                if self._at is None or inode != self._file:
                    self._file, self._at = inode, _start(file, size, self._last)
                self._at = min(self._at, size)
                file.seek(self._at)
                while self._at < size and (text := file.readline(LONGEST_LINE)):
                    if not text.endswith(b"\n"):
                        if len(text) < LONGEST_LINE:
                            return  # incomplete
                        raise DataError(
                            f"a line of {path} is not a line of a log: it has more than "
                            f"{LONGEST_LINE:,} bytes{ADVICE}"
                        )
                    self._at += len(text)
                    yield _parsed(text, path, "a line")


def _start(file: BinaryIO, size: int, lines: int) -> int:
    """Return the position of the first byte of the last complete lines.

    It is an earlier one if a line is longer than any line of a log.
    """
    end, left, gap = size, lines + 1, 0  # line ends that are to be found, and bytes without one
    while end > 0 and gap <= LONGEST_LINE:
        begin = max(0, end - BLOCK)
        file.seek(begin)
        data = file.read(end - begin)
        found = data.count(b"\n")
        if found >= left:
            place = len(data)
            for _ in range(left):
                place = data.rindex(b"\n", 0, place)
            return begin + place + 1
        left -= found
        end, gap = begin, 0 if found else gap + len(data)
    return end


def _parsed(text: bytes, path: Path, where: str) -> Line:
    try:
        return parse_line(text)
    except ValueError as error:
        raise DataError(f"{where} of {path} is not a line of a log: {error}{ADVICE}") from error


def cut_after(folder: Folder, log: BinaryIO, step: int, size: int | None = None) -> Hash:
    """Remove what follows a checkpoint from a file of JSON lines, and an incomplete last line.

    Args:
        folder: The folder of the file.
        log: The file, opened by `append_to`.
        step: The step of the checkpoint.
        size: The size that the file had then. None if that is unknown: lines of steps after `step`
            are removed.

    Returns:
        The SHA-256 of what is left, to be updated with what is written.
    """
    kept, unknown, end = hashlib.sha256(), b"", 0
    with folder.opened(Path(log.name).name) as (file, length):
        if size is not None:
            while end < size and (data := file.read(min(BLOCK, size - end))):
                kept.update(data)
                end += len(data)
        for text in file if size is None else ():
            try:
                parsed = json.loads(text)
                if parsed["step"] > step:
                    break
            except (ValueError, TypeError, LookupError):
                unknown += text  # of no known step
            else:
                if text.endswith(b"\n"):
                    kept.update(unknown + text)
                    end, unknown = end + len(unknown + text), b""
    if end < length:
        folder.truncate(log, end)
    return kept
