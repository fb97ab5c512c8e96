"""Reading the end of `log.jsonl` while a run writes it."""

import os
from pathlib import Path
from typing import Any, BinaryIO

from ..core.folder import Folder
from ..errors import DataError
from .log_columns import parse_line
from .log_file import ADVICE, LONGEST_LINE

_CHUNK = 1 << 16
_RECORD = b'{"kind"'


def records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Read the records of a log, without parsing its steps.

    Returns:
        The records, and the number of the last step; 0 if there is no step.

    Raises:
        DataError: If the file is not a regular file, or a record or the last line is invalid.
    """
    found: list[dict[str, Any]] = []
    last = b""
    with _opened(path) as folder, folder.opened(path.name) as (file, _):
        for number, text in enumerate(iter(lambda: file.readline(LONGEST_LINE), b""), start=1):
            if not text.endswith(b"\n"):
                break  # incomplete, or longer than any line
            last = text
            if text.startswith(_RECORD):
                found.append(_parsed(text, path, f"line {number:,}"))
    step = _parsed(last, path, "the last line")["step"] if last else 0
    return found, step


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

    def lines(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call; empty if there is no log.

        If the log was replaced, its last lines are returned. If it became shorter, because a run
        resumed from an earlier step, reading continues at its end.

        Raises:
            DataError: If the file is not a regular file, or a line is invalid.
        """
        if not self._path.parent.is_dir():
            return []
        with _opened(self._path) as folder:
            if folder.kind(self._path.name) is None:
                return []
            with folder.opened(self._path.name) as (file, size):
                inode = os.fstat(file.fileno()).st_ino
                if self._at is None or inode != self._file:
                    self._file, self._at = inode, _start(file, size, self._last)
                file.seek(min(self._at, size))
                data = file.read(size - file.tell())
        whole = data[: data.rfind(b"\n") + 1]
        self._at = min(self._at, size) + len(whole)
        return [_parsed(text, self._path, "a line") for text in whole.splitlines()]


def _opened(path: Path) -> Folder:
    return Folder.open(path.parent, error=DataError)


def _start(file: BinaryIO, size: int, lines: int) -> int:
    """Return the position of the first byte of the last complete lines."""
    end, data = size, b""
    while end > 0 and data.count(b"\n") <= lines and len(data) <= LONGEST_LINE:
        begin = max(0, end - _CHUNK)
        file.seek(begin)
        data = file.read(end - begin) + data
        end = begin
    whole = data[: data.rfind(b"\n") + 1]
    ends = whole.split(b"\n")[:-1]
    return end + len(whole) - sum(len(text) + 1 for text in ends[-lines:] if lines)


def _parsed(text: bytes, path: Path, where: str) -> dict[str, Any]:
    try:
        return parse_line(text)
    except ValueError as error:
        raise DataError(f"{where} of {path} is not a line of a log: {error}{ADVICE}") from error
