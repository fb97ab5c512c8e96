"""Reading `log.jsonl` in columns, and comparing it with what checkpoints note about it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ..core.folder import Folder
from ..core.logs import Array
from ..errors import DataError
from .log_columns import Columns, LineError, parse_block, parse_line, sorted_rows

BLOCK = 1 << 20  # bytes that are parsed at once
LONGEST_LINE = 16 << 20
MOST_FORMS = 1000  # different sets of names; each takes arrays of its own
ADVICE = ". Restore a copy of the file, or move it away to continue without the earlier values"


@dataclass(frozen=True, slots=True)
class Mark:
    """What a checkpoint notes about a log: the length and the hash of its content so far.

    Attributes:
        step: The step of the checkpoint.
        size: The number of bytes.
        sha256: Their SHA-256.
    """

    step: int
    size: int
    sha256: str

    @classmethod
    def all_of(cls, hooks: Mapping[int, Mapping[str, Any]]) -> "list[Mark]":
        """Return the marks in the states of hooks at some steps.

        Example:
            >>> Mark.all_of({0: {}, 12: {"JSONLines": {"size": 300, "sha256": "0a…"}}})
            [Mark(step=12, size=300, sha256='0a…')]
        """
        found: list[Mark] = []
        for step, states in hooks.items():
            state = states.get("JSONLines")
            if isinstance(state, Mapping):
                size, digest = (cast(Mapping[str, Any], state).get(n) for n in ("size", "sha256"))
                if type(size) is int and size >= 0 and isinstance(digest, str):
                    found.append(cls(step, size, digest))
        return found


@dataclass(frozen=True, eq=False)
class Log:
    """The content of a log.

    Attributes:
        parts: The steps, in one part for each set of names.
        records: The records, in order.
        lines: The number of lines.
    """

    parts: Sequence[Columns] = ()
    records: Sequence[dict[str, Any]] = ()
    lines: int = 0

    @property
    def steps(self) -> Array:
        """The numbers of all steps, sorted."""
        if len(self.parts) == 1:
            return self.parts[0].steps
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(p.steps for p in self.parts)]))

    @property
    def last_step(self) -> int:
        """The number of the last step; 0 if there is none."""
        return max((int(part.steps[-1]) for part in self.parts), default=0)

    @property
    def names(self) -> list[str]:
        """The names that steps logged."""
        return list(dict.fromkeys(name for part in self.parts for name in part.values))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the line of each step, as a dict."""
        return sorted_rows(self.parts)

    def row(self, step: int) -> dict[str, Any]:
        """Return the line of a step; empty if there is none."""
        for part in self.parts:
            index = int(np.searchsorted(part.steps, step))
            if index < len(part.steps) and part.steps[index] == step:
                return part.row(index)
        return {}

    def up_to(self, step: int) -> "Log":
        """Return the log without later steps."""
        parts: list[Columns] = []
        for part in self.parts:
            kept = part.steps <= step
            if kept.all():
                parts.append(part)
            elif kept.any():
                values = {name: column[kept] for name, column in part.values.items()}
                parts.append(Columns(part.steps[kept], values))
        return Log(parts, [line for line in self.records if line["step"] <= step], self.lines)

    def column(self, name: str, steps: Array) -> tuple[Array, Array]:
        """Return the values of a name at each step, and 1.0 where it was logged.

        Where it was not, the value is NaN, and the second array holds 0.0.

        Args:
            name: The name.
            steps: The numbers of all steps, as the attribute `steps` returns them.
        """
        found = [part for part in self.parts if name in part.values]
        if len(self.parts) == 1:
            return found[0].values[name], np.ones(len(steps))
        columns = [part.values[name] for part in found]
        if sum(map(len, columns)) < len(steps):
            columns.append(np.zeros(0))  # NaN is a float
        values = np.full(len(steps), np.nan).astype(np.result_type(*columns))
        weights = np.zeros(len(steps))
        for part in found:
            places = np.searchsorted(steps, part.steps)
            values[places], weights[places] = part.values[name], 1.0
        return values, weights


def read(path: Path, marks: Iterable[Mark] = (), size: int | None = None) -> Log:
    """Read a log in columns.

    Args:
        path: The file. An incomplete last line, left by a killed process, is skipped.
        marks: What checkpoints note about the file.
        size: The number of bytes to read; None for the whole file.

    Raises:
        DataError: If the file is not a regular one, if a line other than the last is invalid, or if
            the file differs from what a checkpoint notes. The message names the line.
    """
    with (
        Folder.open(path.parent, error=DataError) as folder,
        folder.opened(path.name) as (file, _),
    ):
        return _Reader(path, file, marks).read(size)


class _Reader:
    """Reads a log block by block, and compares it with the marks on the way."""

    def __init__(self, path: Path, file: BinaryIO, marks: Iterable[Mark]) -> None:
        self._path, self._file = path, file
        self._marks = sorted((m for m in marks if m.size), key=lambda mark: mark.size)
        self._hash, self._read = hashlib.sha256(), 0
        self._lines, self._vouched, self._last = 0, 0, 0
        self._groups: dict[Any, list[Columns]] = {}
        self._records: list[dict[str, Any]] = []

    def read(self, size: int | None) -> Log:
        """Return the content."""
        rest = b""
        while data := self._file.read(self._next(size)):
            if self._marks:
                self._hash.update(data)
            self._read += len(data)
            rest += data
            at_mark = bool(self._marks) and self._marks[0].size == self._read
            end = rest.rfind(b"\n") + 1
            self._take(rest[:end], not at_mark)
            rest = rest[end:]
            if at_mark:
                self._compare(rest)
            if len(rest) > LONGEST_LINE:
                raise self._wrong(self._lines + 1, f"it has more than {LONGEST_LINE:,} bytes")
        if self._marks:
            raise self._damaged(
                f"it has {self._read:,} bytes in {self._lines:,} lines, and at step "
                f"{self._marks[-1].step} it had {self._marks[-1].size:,}"
            )
        self._take_last(rest)
        parts = [Columns.joined(group) for group in self._groups.values()]
        return Log(parts, self._records, self._lines)

    def _next(self, size: int | None) -> int:
        """Return the number of bytes to read next: up to the next mark, or to the end."""
        ends = [] if size is None else [size]
        ends += [mark.size for mark in self._marks[:1]]
        return max(0, min([BLOCK, *(end - self._read for end in ends)]))

    def _take(self, block: bytes, may_be_last: bool) -> None:
        if not block:
            return
        try:
            columns, records = parse_block(block, self._last)
        except LineError as error:
            last = block.count(b"\n") - 1
            if not (error.index == last and may_be_last and not self._file.peek(1)):  # type: ignore[attr-defined]
                raise self._wrong(self._lines + error.index + 1, str(error)) from error
            # The end of the file: a power loss may leave other bytes in the place of a line.
            block = block[: block[:-1].rfind(b"\n") + 1]
            columns, records = parse_block(block, self._last) if block else ([], [])
        for part in columns:
            self._groups.setdefault(part.form, []).append(part)
            self._last = max(self._last, int(part.steps[-1]))
        if len(self._groups) > MOST_FORMS:
            raise DataError(
                f"{self._path} holds more than {MOST_FORMS:,} different sets of names, so it is "
                "not the log of a run"
            )
        self._records += records
        self._lines += block.count(b"\n")

    def _take_last(self, text: bytes) -> None:
        """Take a line without an end, unless it is incomplete."""
        try:
            parse_line(text)
        except ValueError:
            return
        self._take(text + b"\n", may_be_last=False)

    def _compare(self, rest: bytes) -> None:
        mark = self._marks.pop(0)
        if rest or mark.sha256 != self._hash.hexdigest():
            where = f"one of the lines {self._vouched + 1:,} to {max(self._lines, 1):,}"
            raise self._damaged(f"{where} was changed after the checkpoint of step {mark.step}")
        self._vouched = self._lines

    def _wrong(self, line: int, why: str) -> DataError:
        return DataError(f"line {line:,} of {self._path} is not a line of a log: {why}{ADVICE}")

    def _damaged(self, why: str) -> DataError:
        return DataError(f"{self._path} is damaged: {why}{ADVICE}")


def read_log(
    path: str | Path, size: int | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Read a log written by `JSONLines`.

    Args:
        path: The file. An incomplete last line, left by a killed process, is skipped.
        size: The number of bytes to read; None for the whole file.

    Returns:
        Steps and records, in order; `"NaN"` and `"Infinity"` are converted back to numbers.

    Raises:
        DataError: If a line other than the last is invalid.

    Example:
        >>> _ = Path("log.jsonl").write_text('{"step": 1, "loss": 0.5}')
        >>> read_log("log.jsonl")
        ([{'step': 1, 'loss': 0.5}], [])
    """
    log = read(Path(path), size=size)
    return list(log.rows()), list(log.records)
