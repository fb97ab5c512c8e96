"""The hooks `JSONLines`, which logs every step and record, and `CSV`, which logs every epoch.

When a run resumes, lines of steps after its checkpoint are removed, so that no step appears twice.
Epochs are counted from 1, as in messages. If the name of a value is also a column of the file, an
underscore is appended to it (see `column_of`), which reading removes. Values that are neither
numbers nor strings are omitted, except images: for these, the line contains the path of the file
that `Images` writes, relative to the run directory.
"""

import csv
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from functools import cache
from math import isfinite, isnan
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ..core import schema
from ..core.directory import LOG
from ..core.folder import Folder
from ..core.hook import Hook, LoopView
from ..core.logs import COLUMNS, HEAD, Array, Plain, Record, StepLogs, column_of, plain
from ..errors import ConfigurationError, DirectoryError
from .images import paths
from .log_tail import Hash, cut_after

_HEAD = b"epoch,step,seconds"  # of a table of epochs


class JSONLines(Hook):
    """Writes the values of every step, and every record, as one line of strict JSON each.

    A step: `{"step": 12, "loss": 0.5}`. A record: `{"kind": "epoch", "epoch": 1, "step": 12,
    "batch": 12, "examples": 384, "seconds": 0.8, "loss": 0.7}`. Numbers are read back exactly. JSON
    has no NaN and infinity, so they are written as the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`. Each window is one write, which is flushed to the operating system before the
    next window runs.

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
        # The size at a checkpoint, or path, step and size when the last call ended.
        self._left: int | tuple[Path, int, int] | None = None
        self._hash: Hash = hashlib.sha256()

    def path_in(self, directory: Path) -> Path:
        """Return the path of the log for a run in this directory."""
        return directory / LOG if self._path is None else self._path

    def start(self, loop: LoopView) -> None:
        """Open the file, after removing lines of later steps."""
        path = resolved(self._path, loop, LOG, self, f"'{LOG}'")
        left, self._left = self._left, None
        self._folder = Folder.open(path.parent, create=True)
        self._file = self._folder.append_to(path.name)
        step, size = loop.progress.step, self._file.tell()
        known = left if isinstance(left, int) else None
        if left == (path, step, size):  # all of it is of earlier calls: nothing is parsed
            known = size
        self._hash = cut_after(self._folder, self._file, step, known)

    def state(self) -> dict[str, Any]:
        """Flush the file to disk and return its size and SHA-256."""
        if self._file is None or self._folder is None:
            return {}
        self._folder.flush(self._file)
        return {"size": self._file.tell(), "sha256": self._hash.hexdigest()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Truncate the file to the saved size when the run resumes."""
        schema.whole()(state["size"], "size")
        self._left = state["size"]

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write the steps of a window."""
        # Formatting with a template takes a quarter of the time of json.dumps for each step.
        template = _template(tuple(logs.values))
        numbers = range(logs.first_step, logs.first_step + logs.steps)
        columns = [_texts(array) for array in logs.values.values()]
        self._write("".join(map(template.__mod__, zip(numbers, *columns, strict=True))))

    def record(self, loop: LoopView, record: Record) -> None:
        """Write a record."""
        at = record.progress
        where = (record.kind, at.epoch + 1, at.step, at.batch, at.examples, at.seconds)
        line = dict(zip(HEAD, where, strict=True)) | _values(loop, record, HEAD)
        strict_line = {name: strict(value) for name, value in line.items()}
        self._write(json.dumps(strict_line, allow_nan=False) + "\n")

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Flush the file to disk and close it."""
        file, folder = self._file, self._folder
        self._file = self._folder = None
        if file is not None and folder is not None:
            with folder, file:
                folder.flush(file)
                size = file.tell()
                file.seek(max(size - 1, 0))
                if error is None and file.read() in (b"", b"\n"):  # else a write failed halfway
                    self._left = folder.path / Path(file.name).name, loop.progress.step, size

    def _write(self, text: str) -> None:
        if self._file is not None and self._folder is not None:
            content = text.encode()
            self._folder.append(self._file, content)
            self._hash.update(content)


class CSV(Hook):
    """Writes a row for every epoch: its number, its last step, the elapsed seconds and its values.

    The rows are the epochs of the history, from which a resumed run writes the table again. A value
    that first occurs in a later epoch adds a column, which is empty in earlier rows.

    Args:
        path: The file; by default `epochs.csv` in the run directory.

    Raises:
        ConfigurationError: At the start, if no path is given and the run has no directory, or if
            the file contains a different table.

    Example:
        >>> import treadle
        >>> epochs = treadle.hooks.CSV("epochs.csv")
    """

    chief_only = True

    def __init__(self, path: str | Path | None = None) -> None:
        self._given = None if path is None else Path(path).absolute()
        self._path: Path | None = None
        self._columns: list[str] = []

    def start(self, loop: LoopView) -> None:
        """Write the rows of earlier epochs."""
        path = self._path = resolved(self._given, loop, "epochs.csv", self, "'epochs.csv'")
        self._columns = []
        has_rows = any(record.kind == "epoch" for record in loop.history.records)
        with Folder.open(path.parent, create=True) as folder:
            exists = folder.kind(path.name) is not None
            if exists:
                _check_table(folder, path.name)
            if has_rows:
                self._write(folder, loop)
            elif exists and loop.progress.epoch:
                folder.rename(path.name, f"{path.name}.old")
                lost = f"{path} is now {path.name}.old: the history lacks the epochs in it"
                loop.log({"warning": f"{lost}. The weights are not affected"})
            elif exists:
                folder.remove_file(path.name)

    def record(self, loop: LoopView, record: Record) -> None:
        """Write the row of an epoch."""
        if record.kind != "epoch" or self._path is None:
            return
        row = _row(loop, record)
        with Folder.open(self._path.parent) as folder:
            if any(name not in self._columns for name in row):
                self._write(folder, loop)
            else:
                with folder.append_to(self._path.name) as file:
                    folder.append(file, _csv([row], self._columns))

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Flush the file to disk."""
        path, self._path = self._path, None
        # A DirectoryError: the directory is missing, or belongs to another process.
        if path is not None and self._columns and not isinstance(error, DirectoryError):
            with Folder.open(path.parent) as folder:
                folder.flush_file(path.name)

    def _write(self, folder: Folder, loop: LoopView) -> None:
        assert self._path is not None
        rows = [_row(loop, record) for record in loop.history.records if record.kind == "epoch"]
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        header = dict(zip(self._columns, self._columns, strict=True))
        folder.write(self._path.name, [_csv([header, *rows], self._columns)])


def _check_table(folder: Folder, name: str) -> None:
    """Check that a file is a table of epochs, which may be replaced.

    Raises:
        ConfigurationError: It is another one.
    """
    with folder.opened(name) as (file, _):
        head = file.read(len(_HEAD))
    if head and head != _HEAD:
        raise ConfigurationError(
            f"{folder.path / name} is not a table of epochs: its first columns are not epoch, step "
            "and seconds. Choose another path, or move it away"
        )


def resolved(path: Path | None, loop: LoopView, default: str, hook: Hook, example: str) -> Path:
    """Return the path that a hook was given, or else that of `default` in the run directory.

    Raises:
        ConfigurationError: There is neither. The message has an example of the argument.
    """
    if path is not None:
        return path
    if loop.directory is None:
        kind = type(hook).__name__
        raise ConfigurationError(
            f"{kind}() writes {default} into the run directory, but this run has none: pass "
            f"{kind}({example}), or a directory to the loop"
        )
    return loop.directory / default


@cache
def _template(names: tuple[str, ...]) -> str:
    """Return the format of the line of a step with values of these names."""
    keys = [json.dumps(column_of(name)).replace("%", "%%") for name in names]
    return '{"step": %d' + "".join(f", {key}: %s" for key in keys) + "}\n"


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


def _row(loop: LoopView, record: Record) -> dict[str, Plain]:
    """Return the columns of an epoch: its number, step and seconds, and its values."""
    at = record.progress
    head = {"epoch": at.epoch + 1, "step": at.step, "seconds": at.seconds}
    return head | _values(loop, record, COLUMNS)


def _values(loop: LoopView, record: Record, columns: tuple[str, ...]) -> dict[str, Plain]:
    """Return the values of a record by column; other columns are `columns`."""
    files = paths(record) if loop.directory is not None else {}
    values = {n: plain(value) for n, value in {**record.values, **files}.items()}
    return {column_of(n, columns): value for n, value in values.items() if value is not None}


def _csv(rows: Iterable[Mapping[str, Plain]], columns: list[str]) -> bytes:
    text = io.StringIO()
    csv.DictWriter(text, columns, restval="", lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
