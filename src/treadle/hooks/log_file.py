"""Reading `log.jsonl`: as a whole in columns, its end while a run writes it, and cutting it.

A log of a million steps must open within a second. So lines are parsed in blocks, each as one list,
and become arrays at once; a dict for each line would take hundreds of megabytes.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import merge
from math import inf, nan
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from ..core import schema
from ..core.folder import Folder
from ..core.logs import HEAD, Array, column_of, columns_of, name_of
from ..errors import DataError

BLOCK = 1 << 18  # bytes that are parsed at once: larger blocks leave the cache of the processor
LONGEST_LINE = 16 << 20
MOST_FORMS = 1000  # different sets of names; each takes arrays of its own
MOST_STEPS = 10**15
MOST_VALUES = 100_000  # of a line
NON_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
ADVICE = ". Restore a copy of the file, or move it away to continue without the earlier values"

Line = dict[str, Any]  # as in the file: `core.logs.values_of` returns the values by name

_step = schema.complete({"step": schema.whole(0, MOST_STEPS)})
_older = {
    "kind": schema.text,
    "epoch": schema.whole(1, MOST_STEPS),
    "step": schema.whole(0, MOST_STEPS),
    "seconds": schema.amount,
}
_older_record = schema.complete(_older)
_record = schema.complete(
    {**_older, "batch": schema.whole(0, MOST_STEPS), "examples": schema.whole()}
)


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


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Steps that logged the same names with the same types.

    Attributes:
        steps: The number of each step.
        values: By name, the value of each step.
    """

    steps: Array
    values: Mapping[str, Array]

    @property
    def form(self) -> tuple[tuple[str, str], ...]:
        """The names and the dtypes."""
        return tuple((name, column.dtype.str) for name, column in self.values.items())

    def row(self, index: int) -> Line:
        """Return the line of a step: its number and its values."""
        found = {column_of(name): column[index].item() for name, column in self.values.items()}
        return {"step": int(self.steps[index]), **found}

    def rows(self) -> Iterator[Line]:
        """Yield the line of each step."""
        return map(self.row, range(len(self.steps)))


@dataclass(frozen=True, eq=False)
class Log:
    """The content of a log.

    Attributes:
        parts: The steps, in one part for each set of names and types.
        records: The records, in order.
        lines: The number of lines.
    """

    parts: Sequence[Columns] = ()
    records: Sequence[Line] = ()
    lines: int = 0

    @property
    def steps(self) -> Array:
        """The numbers of all steps, sorted."""
        return np.sort(np.concatenate([np.zeros(0, np.int64), *(p.steps for p in self.parts)]))

    @property
    def last_step(self) -> int:
        """The number of the last step; 0 if there is none."""
        return max((int(part.steps[-1]) for part in self.parts), default=0)

    @property
    def names(self) -> list[str]:
        """The names that steps logged."""
        return list(dict.fromkeys(name for part in self.parts for name in part.values))

    def rows(self) -> Iterator[Line]:
        """Yield the line of each step, as a dict, in the order of the steps."""
        return merge(*(part.rows() for part in self.parts), key=itemgetter("step"))

    def row(self, step: int) -> Line:
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
            kept = int(np.searchsorted(part.steps, step, side="right"))
            if kept:
                values = {name: column[:kept] for name, column in part.values.items()}
                parts.append(Columns(part.steps[:kept], values))
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


def parse_line(text: bytes) -> Line:
    """Parse and check one line.

    Raises:
        ValueError: If it is not a line of a log.
    """
    return _checked(schema.parse(text, MOST_VALUES))


def _checked(line: Any) -> Line:
    schema.mapping(schema.anything)(line, "")
    is_record = "kind" in line
    check = (_record if columns_of(line) == HEAD else _older_record) if is_record else _step
    check(line, "")
    return {name: _value(name, value, is_record) for name, value in line.items()}


def _value(name: str, value: Any, is_record: bool) -> Any:
    if isinstance(value, str):
        if value in NON_FINITE:
            return NON_FINITE[value]
        if is_record:
            return value
    elif type(value) in (bool, int, float):
        low, high = (-inf, inf) if type(value) is float else (-(1 << 63) - 1, 1 << 64)
        if low < value < high:
            return value
    raise ValueError(f"{schema.shown(name)} is {schema.shown(value)}; expected a number")


def _parse_block(block: bytes, after: int) -> tuple[list[Columns], list[Line]]:
    """Parse complete lines at once.

    Args:
        block: The lines.
        after: The number of the last step before them.

    Returns:
        The steps, in one part for each set of names, and the records.

    Raises:
        ValueError: If a line is invalid.
    """
    if len(block) > 4 * BLOCK and block.count(b",") > MOST_VALUES:
        raise ValueError("a line has too many values")
    records: list[Line] = []
    try:
        lines = json.loads(b"[" + block[:-1].replace(b"\n", b",\n") + b"]")
        if len(lines) != block.count(b"\n"):  # inside a text, JSON accepts no newline
            raise ValueError("a line is not one object")
        if b'"kind"' in block:
            records = [_checked(line) for line in lines if "kind" in line]
            lines = [line for line in lines if "kind" not in line]
        numbers = [line["step"] for line in lines]
        found = _grouped(lines) if lines else []
    except (RecursionError, TypeError, LookupError) as error:
        raise ValueError("a line is not a step") from error
    if any(part.steps.dtype != np.int64 or part.steps[-1] > MOST_STEPS for part in found):
        raise ValueError("the number of a step is invalid")
    if (np.diff([after, *numbers]) <= 0).any():
        raise ValueError("steps do not increase")
    return found, records


def _grouped(lines: list[Line]) -> list[Columns]:
    """Return lines of steps as columns, one part for each set of names."""
    names = list(lines[0])
    if sum(map(len, lines)) == len(names) * len(lines):
        with suppress(LookupError):  # some lines have other names
            found = {name: _column([line[name] for line in lines]) for name in names}
            steps = found.pop("step")
            return [Columns(steps, {name_of(name): column for name, column in found.items()})]
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line), []).append(line)
    return [part for group in groups.values() for part in _grouped(group)]


def _column(values: list[Any]) -> Array:
    """Return the values of one name as an array: numbers of several types become floats.

    Raises:
        ValueError: If one is no number, or too large.
    """
    if len(set(map(type, values))) == 1:
        found = np.array(values)
        if found.dtype.kind in "biu" or (found.dtype.kind == "f" and np.isfinite(found).all()):
            return found
    # Texts stand for numbers that are not finite; `1e400`, which is read as infinity, is refused.
    return np.array([_value("", value, False) for value in values], np.float64)


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
    with Folder.open(path.parent, error=DataError) as folder, folder.opened(path.name) as (file, _):
        log = _Reader(path).read(file, size)
        file.seek(0)
        _compare(path, file, marks)
    return log


class _Reader:
    """Reads a log block by block."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = self._last = 0
        self._groups: dict[Any, list[Columns]] = {}
        self._records: list[Line] = []

    def read(self, file: BinaryIO, size: int | None) -> Log:
        """Return the content."""
        rest, left = b"", inf if size is None else size
        while data := file.read(min(BLOCK, left)):  # type: ignore[arg-type]
            left -= len(data)
            rest += data
            end = rest.rfind(b"\n") + 1
            self._take(rest[:end], is_end=not file.peek(1))  # type: ignore[attr-defined]
            rest = rest[end:]
            if len(rest) > LONGEST_LINE:
                raise self._wrong(self._lines + 1, f"it has more than {LONGEST_LINE:,} bytes")
        self._take(rest and rest + b"\n", is_end=True)
        parts = [
            Columns(
                np.concatenate([part.steps for part in group]),
                {n: np.concatenate([part.values[n] for part in group]) for n in group[0].values},
            )
            for group in self._groups.values()
        ]
        return Log(parts, self._records, self._lines)

    def _take(self, block: bytes, is_end: bool) -> None:
        """Add complete lines.

        The last line of the file may be invalid: a killed process leaves it incomplete, and a power
        loss other bytes in its place.
        """
        try:
            parts, records = _parse_block(block, self._last) if block else ([], [])
        except ValueError:
            middle = block.find(b"\n", len(block) // 2, -1) + 1 or block.rfind(b"\n", 0, -1) + 1
            if middle:
                self._take(block[:middle], is_end=False)
                self._take(block[middle:], is_end)
            elif not is_end:
                raise self._wrong(self._lines + 1, self._fault(block)) from None
            return
        for part in parts:
            self._groups.setdefault(part.form, []).append(part)
            self._last = max(self._last, int(part.steps[-1]))
        self._records += records
        self._lines += block.count(b"\n")
        if len(self._groups) > MOST_FORMS:
            raise DataError(
                f"{self._path} holds more than {MOST_FORMS:,} different sets of names, so it is "
                "not the log of a run"
            )

    def _fault(self, text: bytes) -> str:
        """Return what is wrong with an invalid line."""
        try:
            return f"step {parse_line(text[:-1])['step']} follows step {self._last}"
        except ValueError as error:
            return str(error)

    def _wrong(self, line: int, why: str) -> DataError:
        return DataError(f"line {line:,} of {self._path} is not a line of a log: {why}{ADVICE}")


def _compare(path: Path, file: BinaryIO, marks: Iterable[Mark]) -> None:
    """Compare a file with what checkpoints note about it.

    Raises:
        DataError: If it is shorter, or differs. The message names the lines.
    """
    found, size, lines, same = hashlib.sha256(), 0, 0, 0
    for mark in sorted(marks, key=lambda mark: mark.size):
        while data := file.read(min(BLOCK, mark.size - size)):
            found.update(data)
            size, lines = size + len(data), lines + data.count(b"\n")
        why = f"it has {size:,} bytes in {lines:,} lines"
        why += f", and at step {mark.step} it had {mark.size:,}"
        if size == mark.size:
            if not size or found.hexdigest() == mark.sha256:
                same = lines
                continue
            where = f"one of the lines {same + 1:,} to {max(lines, 1):,}"
            why = f"{where} was changed after the checkpoint of step {mark.step}"
        raise DataError(f"{path} is damaged: {why}{ADVICE}")


def read_log(path: str | Path, size: int | None = None) -> tuple[list[Line], list[Line]]:
    """Read a log written by `JSONLines`.

    Args:
        path: The file. An incomplete last line, left by a killed process, is skipped.
        size: The number of bytes to read; None for the whole file.

    Returns:
        The lines of steps and of records, in order, with their columns as in the file. `"NaN"` and
        `"Infinity"` are converted back to numbers.

    Raises:
        DataError: If a line other than the last is invalid.

    Example:
        >>> _ = Path("log.jsonl").write_text('{"step": 1, "loss": 0.5}')
        >>> read_log("log.jsonl")
        ([{'step': 1, 'loss': 0.5}], [])
    """
    log = read(Path(path), size=size)
    return list(log.rows()), list(log.records)
