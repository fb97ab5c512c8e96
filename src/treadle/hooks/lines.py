"""The hooks `JSONLines`, which logs every step and record, and `CSV`, which logs every epoch.

When a run resumes, lines of steps after its checkpoint are removed, so that no step appears twice.
Epochs are counted from 1, as in messages. If the name of a value is also a column of the log, an
underscore is appended to it. Values that are neither numbers nor strings are omitted, except
images: for these, the line contains the path of the file that `Images` writes, relative to the run
directory.
"""

import csv
import hashlib
import io
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import isfinite, isnan
from operator import index
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..core import schema
from ..core.directory import LOG
from ..core.folder import Folder
from ..core.hook import Hook, LoopView
from ..core.logs import Array, Record, StepLogs
from ..core.schema import shown
from ..core.values import Plain, plain
from ..errors import ConfigurationError, DataError, DirectoryError
from .images import paths
from .log_file import BLOCK
from .log_file import read_log as read_log

Hash = Any  # `hashlib` does not export the class of its objects
OWN = ("kind", "epoch", "step", "seconds")
MOST_BYTES = 64 << 20  # of a table of epochs
ADVICE = (
    ". Restore a copy of the file, or move it away: the run then resumes, and writes the later "
    "epochs into a new one"
)


class JSONLines(Hook):
    """Writes the values of every step, and every record, as one line of strict JSON each.

    A step: `{"step": 12, "loss": 0.5}`. A record: `{"kind": "epoch", "epoch": 1, "step": 12,
    "seconds": 0.8, "loss": 0.7}`. Numbers are read back exactly. JSON has no NaN and infinity, so
    they are written as the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Each window is one
    write, which is flushed to the operating system before the next window runs.

    Args:
        path: The file; by default `log.jsonl` in the run directory.

    Raises:
        ConfigurationError: At the start, if no path is given and the run has no directory.

    Example:
        >>> import treadle
        >>> log = treadle.hooks.JSONLines("log.jsonl")
    """

    chief_only = True

    def __init__(self, path: str | Path | None = None) -> None:
        self._path = None if path is None else Path(path).absolute()
        self._folder: Folder | None = None
        self._file: BinaryIO | None = None
        self._size: int | None = None
        self._hash: Hash = hashlib.sha256()

    def path_in(self, directory: Path) -> Path:
        """Return the path of the log for a run in this directory."""
        return directory / LOG if self._path is None else self._path

    def start(self, loop: LoopView) -> None:
        """Open the file, after removing lines of later steps."""
        path = _resolved(self._path, loop, LOG, self)
        size, self._size = self._size, None
        self._folder = Folder.open(path.parent, create=True)
        self._file = self._folder.append_to(path.name)
        self._hash = cut_after(self._folder, self._file, loop.progress.step, size)

    def state(self) -> dict[str, Any]:
        """Flush the file to disk and return its size and SHA-256."""
        if self._file is None or self._folder is None:
            return {}
        self._folder.flush(self._file)
        return {"size": self._file.tell(), "sha256": self._hash.hexdigest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Truncate the file to the saved size when the run resumes."""
        self._size = _count(state, "size")

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write the steps of a window."""
        # Formatting with a template takes a quarter of the time of json.dumps for each step.
        template = _template(tuple(logs.values))
        numbers = range(logs.first_step, logs.first_step + logs.steps)
        columns = [_texts(array) for array in logs.values.values()]
        self._write("".join(map(template.__mod__, zip(numbers, *columns, strict=True))))

    def record(self, loop: LoopView, record: Record) -> None:
        """Write a record."""
        files = paths(record) if loop.directory is not None else {}
        values = _plain_values({**record.values, **files})
        at = record.progress
        head = {"kind": record.kind, "epoch": at.epoch + 1, "step": at.step, "seconds": at.seconds}
        numbers = {name: strict(value) for name, value in values.items()}
        self._write(json.dumps(head | numbers, allow_nan=False) + "\n")

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Flush the file to disk and close it."""
        file, folder = self._file, self._folder
        self._file = self._folder = None
        if file is not None and folder is not None:
            with folder, file:
                folder.flush(file)

    def _write(self, text: str) -> None:
        if self._file is not None and self._folder is not None:
            content = text.encode()
            self._folder.append(self._file, content)
            self._hash.update(content)


class CSV(Hook):
    """Writes a row for every epoch: its number, its last step, the elapsed seconds and its values.

    The first epoch determines the columns. A value that first occurs in a later epoch adds a
    column: the file is rewritten, and the column is empty in earlier rows.

    Args:
        path: The file; by default `epochs.csv` in the run directory.

    Raises:
        ConfigurationError: At the start, if no path is given and the run has no directory, or if
            the file contains a different table.
        DataError: At the start, if the file is damaged.

    Example:
        >>> import treadle
        >>> epochs = treadle.hooks.CSV("epochs.csv")
    """

    chief_only = True

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = None if path is None else Path(path).absolute()
        self._path: Path | None = None
        self._unsynced = False
        self._kept: int | None = None
        self._expected: Sequence[int] = ()  # the checksums of the rows in the checkpoint
        self._checksums: list[int] = []
        self._rows: list[dict[str, str]] = []
        self._columns: list[str] = []

    def start(self, loop: LoopView) -> None:
        """Read the rows of earlier epochs from the file."""
        self._path = _resolved(self._given, loop, "epochs.csv", self)
        self._rows, self._columns, self._checksums = [], [], []
        kept, self._kept = self._kept, None
        expected, self._expected = self._expected, ()
        with Folder.open(self._path.parent, create=True) as folder:
            if folder.kind(self._path.name) is not None:
                self._read(folder, self._path.name, loop.progress.step, kept, expected)
            elif kept:
                lost = f"{self._path} is missing, so the rows of earlier epochs are lost"
                loop.log({"warning": f"{lost}. The weights are not affected"})

    def state(self) -> dict[str, Any]:
        """Flush the file to disk and return the number of rows, and the checksum of each."""
        if self._path is not None and self._unsynced:
            with Folder.open(self._path.parent) as folder:
                folder.flush_file(self._path.name)
            self._unsynced = False
        return {"rows": len(self._rows), "checksums": np.array(self._checksums, np.uint32)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Keep the saved number of rows when the run resumes, and compare them."""
        self._kept = _count(state, "rows")
        self._expected = [index(x) for x in state["checksums"]]

    def record(self, loop: LoopView, record: Record) -> None:
        """Write the row of an epoch."""
        if record.kind != "epoch" or self._path is None:
            return
        at = record.progress
        head = {"epoch": at.epoch + 1, "step": at.step, "seconds": at.seconds}
        row = {name: str(value) for name, value in (head | _plain_values(record.values)).items()}
        self._rows.append(row)
        self._checksums.append(_checksum(row))
        new = [name for name in row if name not in self._columns]
        self._columns += new
        with Folder.open(self._path.parent) as folder:
            if new:
                self._rewrite(folder, self._path.name)
            else:
                with folder.append_to(self._path.name) as file:
                    folder.append(file, _csv([row], self._columns))
                self._unsynced = True

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Flush the file to disk."""
        if not isinstance(error, DirectoryError):  # the directory is missing, or of another process
            self.state()
        self._path = None

    def _read(
        self, folder: Folder, name: str, step: int, kept: int | None, expected: Sequence[int]
    ) -> None:
        path, content = folder.path / name, folder.read(name, MOST_BYTES)
        end = content.rfind(b"\n") + 1  # a killed process may leave an incomplete row
        try:
            whole = content[:end].decode()
        except UnicodeDecodeError as error:
            number = content.count(b"\n", 0, error.start) + 1
            raise _not_a_row(path, number, "it is not a text in UTF-8") from error
        reader = csv.DictReader(io.StringIO(whole, newline=""))
        try:
            columns, rows = list(reader.fieldnames or []), list(reader)
        except csv.Error as error:
            raise _not_a_row(path, reader.line_num + 1, str(error)) from error
        if whole and columns[:3] != ["epoch", "step", "seconds"]:
            raise ConfigurationError(
                f"{path} is not a table of epochs: its first columns are not epoch, step and "
                "seconds. Choose another path, or move it away"
            )
        # Rows of later epochs are removed, and may be damaged.
        for number, row in enumerate(rows[:kept], 2):
            if not re.fullmatch("[0-9]{1,18}", row["step"] or ""):
                why = f"its step is {shown(row['step'])}; expected a whole number"
                raise _not_a_row(path, number, why)
            if None in row:
                raise _not_a_row(
                    path, number, f"it has more values than the {len(columns)} columns"
                )
        _compare(path, rows[:kept], expected)
        self._rows = [row for row in rows[:kept] if int(row["step"]) <= step]
        self._checksums = [_checksum(row) for row in self._rows]
        if not self._rows:
            folder.remove_file(name)
            return
        self._columns = columns
        if end < len(content) or len(self._rows) < len(rows):
            self._rewrite(folder, name)

    def _rewrite(self, folder: Folder, name: str) -> None:
        header = dict(zip(self._columns, self._columns, strict=True))
        folder.write(name, [_csv([header, *self._rows], self._columns)])


def _count(state: Mapping[str, Any], name: str) -> int:
    """Return a number in the state of a hook.

    Raises:
        LookupError: If it is missing.
        ValueError: If it is not a whole number of at least 0.
    """
    schema.whole()(state[name], name)
    return state[name]


def _checksum(row: Mapping[str, str]) -> int:
    """Return the CRC-32 of a row.

    Empty cells do not count: a later epoch may add columns. Nor do seconds: checkpoints of equal
    runs are equal.
    """
    cells = [cell for cell in row.items() if cell[1] and cell[0] != "seconds"]
    return zlib.crc32(json.dumps(cells).encode())


def _compare(path: Path, rows: Sequence[Mapping[str, str]], expected: Sequence[int]) -> None:
    """Compare rows with the checksums in a checkpoint.

    Raises:
        DataError: If a row is missing or differs.
    """
    for number, (row, checksum) in enumerate(zip(rows, expected, strict=False), 2):
        found = _checksum(row)
        if found != checksum:
            raise DataError(
                f"line {number} of {path}, or the name of a column, was changed after the "
                f"checkpoint: the row has the checksum {found:08x}, and the run wrote one with "
                f"{checksum:08x}{ADVICE}"
            )
    if len(rows) < len(expected):
        raise DataError(
            f"{path} is damaged: it has {len(rows):,} rows, and at the checkpoint it had "
            f"{len(expected):,}{ADVICE}"
        )


def _not_a_row(path: Path, number: int, why: str) -> DataError:
    return DataError(f"line {number} of {path} is not a row of an epoch: {why}{ADVICE}")


def _resolved(path: Path | None, loop: LoopView, default: str, hook: Hook) -> Path:
    if path is None and loop.directory is None:
        kind = type(hook).__name__
        raise ConfigurationError(
            f"{kind}() writes {default} into the run directory, but this run has none: pass "
            f"{kind}('{default}'), or a directory to the loop"
        )
    return path if path is not None else Path(loop.directory or "") / default


def cut_after(folder: Folder, log: BinaryIO, step: int, size: int | None = None) -> Hash:
    """Remove content beyond `size`, lines of steps after `step`, and an incomplete last line.

    Returns:
        The SHA-256 of what is left, to be updated with what is written.
    """
    found, data = hashlib.sha256(), b""
    with folder.opened(Path(log.name).name) as (file, length):
        end = _end_of_step(file, length if size is None else min(size, length), step)
        file.seek(0)
        while file.tell() < end and (data := file.read(min(BLOCK, end - file.tell()))):
            found.update(data)
    if end < length:
        folder.truncate(log, end)
    if data and not data.endswith(b"\n"):
        folder.append(log, b"\n")
        found.update(b"\n")
    return found


def _end_of_step(file: BinaryIO, end: int, step: int) -> int:
    """Return the end of the last line of a step up to `step`, searching from `end` backwards."""
    data, begin = b"", end  # the bytes from `begin` to `end`; steps increase towards the end
    while end > 0:
        newline = data.rfind(b"\n", 0, max(0, end - begin - 1))
        if newline < 0 and begin > 0:
            size = min(BLOCK, begin)
            begin -= size
            file.seek(begin)
            data = file.read(size) + data[: end - begin - size]
            continue
        parsed = _parsed(data[newline + 1 : end - begin])
        if parsed is not None and parsed.get("step", 0) <= step:
            break
        end = begin + newline + 1
    return end


def _parsed(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, or None if the line is incomplete or not an object."""
    try:
        parsed = json.loads(text)
    except ValueError:  # includes UnicodeDecodeError
        return None
    return parsed if isinstance(parsed, dict) else None


@cache
def _template(names: tuple[str, ...]) -> str:
    """Return the format of the line of a step with values of these names."""
    keys = [json.dumps(_own(name)).replace("%", "%%") for name in names]
    return '{"step": %d' + "".join(f", {key}: %s" for key in keys) + "}\n"


def _own(name: str) -> str:
    return f"{name}_" if name in OWN else name


def _texts(array: Array) -> list[str]:
    """Convert each number to strict JSON."""
    if array.dtype.kind in "iu" or (array.dtype.kind == "f" and np.isfinite(array).all()):
        return list(map(repr, array.tolist()))
    return [json.dumps(strict(value)) for value in array.tolist()]


def strict(value: Plain) -> Plain:
    """Return a value as strict JSON, which has no NaN and infinity: these as strings."""
    if not isinstance(value, float) or isfinite(value):
        return value
    return "NaN" if isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _plain_values(values: Mapping[str, Any]) -> dict[str, Plain]:
    found = {_own(name): plain(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value is not None}


def _csv(rows: Iterable[Mapping[str, str]], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
