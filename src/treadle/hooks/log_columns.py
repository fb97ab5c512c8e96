"""Parsing lines of a log in blocks: equal lines at once into arrays, all others one by one.

A log of a million steps must open within a second. `json.loads` of each line takes several seconds,
and a dict for each line takes hundreds of megabytes.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Any, cast

import numpy as np

from ..core import schema
from ..core.logs import Array

NON_FINITE = {"NaN": nan, "Infinity": inf, "-Infinity": -inf}
MOST_STEPS = 10**15
_MOST_VALUES = 100_000  # in a line
_RECORD = b'{"kind"'

# A key as it is written, without a quotation mark in it.
_KEY = re.compile(rb'[{ ]"((?:[^"\\]|\\[^"])*)": ')
_OF_NUMBERS = b"0123456789+-.eE"
# Bytes that stand for the names, which are not of ASCII, as a log is.
_FIRST_CODE, _MOST_KEYS = 128, 128
_TO_COMMAS = bytes(byte if byte < _FIRST_CODE else ord(",") for byte in range(256))

_head = schema.record(
    {
        "kind": schema.text,
        "epoch": schema.whole(1, MOST_STEPS),
        "step": schema.whole(0, MOST_STEPS),
        "seconds": schema.amount,
    },
    required=("kind", "epoch", "step", "seconds"),
)


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Steps that logged the same names with the same types.

    Attributes:
        steps: The number of each step.
        values: By name, the value of each step.
    """

    steps: Array
    values: Mapping[str, Array]

    def row(self, index: int) -> dict[str, Any]:
        """Return the line of a step: its number and its values."""
        found = {name: column[index].item() for name, column in self.values.items()}
        return {"step": int(self.steps[index]), **found}

    @property
    def form(self) -> tuple[tuple[str, str], ...]:
        """The names and the dtypes."""
        return tuple((name, column.dtype.str) for name, column in self.values.items())

    @staticmethod
    def joined(parts: "list[Columns]") -> "Columns":
        """Concatenate columns of the same form."""
        if len(parts) == 1:
            return parts[0]
        values = {n: np.concatenate([part.values[n] for part in parts]) for n in parts[0].values}
        return Columns(np.concatenate([part.steps for part in parts]), values)


class LineError(ValueError):
    """A line is not one of a log.

    Attributes:
        index: The position of the line in its block, from 0.
    """

    def __init__(self, index: int, why: str) -> None:
        super().__init__(why)
        self.index = index


def parse_block(block: bytes, after: int = 0) -> tuple[list[Columns], list[dict[str, Any]]]:
    """Parse complete lines.

    Args:
        block: Lines, each of which ends with a newline.
        after: The number of the last step before the block.

    Returns:
        The steps, and the records.

    Raises:
        LineError: If a line is not one of a log.
    """
    steps, others = _without_records(block)
    if not steps:
        return [], [_record(line, block) for line in others]
    found = _equal_lines(steps)
    if found is None or found.steps[0] <= after or (np.diff(found.steps) <= 0).any():
        return _each_line(block, after)
    return [found], [_record(line, block) for line in others]


def parse_line(text: bytes) -> dict[str, Any]:
    """Parse and check one line.

    Raises:
        ValueError: If it is not a line of a log.
    """
    found = schema.parse(text, _MOST_VALUES)
    schema.mapping(schema.anything)(found, "")
    line = cast(dict[str, Any], found)
    is_record = "kind" in line
    if is_record:
        _head(line, "")
    else:
        schema.record({"step": schema.whole(0, MOST_STEPS)}, required=("step",))(line, "")
    return {name: _value(name, value, is_record) for name, value in line.items()}


def _value(name: str, value: Any, is_record: bool) -> Any:
    if isinstance(value, str):
        if value in NON_FINITE:
            return NON_FINITE[value]
        if is_record:
            return value
    elif type(value) is float:
        if isfinite(value):
            return value
        raise ValueError(f"{schema.shown(name)} is too large for a number")
    elif type(value) in (bool, int) and -(1 << 63) <= value < 1 << 64:
        return value
    raise ValueError(f"{schema.shown(name)} is {schema.shown(value)}; expected a number")


def _without_records(block: bytes) -> tuple[bytes, list[bytes]]:
    """Return a block without its records, and the lines of the records."""
    at = 0 if block.startswith(_RECORD) else block.find(b"\n" + _RECORD) + 1
    if not at and not block.startswith(_RECORD):
        return block, []
    kept, records, begin = [], [], 0
    while True:
        end = block.index(b"\n", at) + 1
        kept.append(block[begin:at])
        records.append(block[at:end])
        begin = end
        if not block.startswith(_RECORD, end):
            end = block.find(b"\n" + _RECORD, end) + 1
            if not end:
                break
        at = end
    kept.append(block[begin:])
    return b"".join(kept), records


def _record(line: bytes, block: bytes) -> dict[str, Any]:
    try:
        return parse_line(line)
    except ValueError as error:
        raise LineError(block[: block.index(line)].count(b"\n"), str(error)) from error


def _each_line(block: bytes, after: int) -> tuple[list[Columns], list[dict[str, Any]]]:
    """Parse lines one by one, and group the steps by their names and types."""
    groups: dict[tuple[tuple[str, str], ...], list[dict[str, Any]]] = {}
    records: list[dict[str, Any]] = []
    for index, text in enumerate(block.splitlines()):
        try:
            line = parse_line(text)
        except ValueError as error:
            raise LineError(index, str(error)) from error
        if "kind" in line:
            records.append(line)
        else:
            if line["step"] <= after:
                raise LineError(index, f"step {line['step']} follows step {after}")
            after = line["step"]
            form = tuple((name, _kind(value)) for name, value in line.items())
            groups.setdefault(form, []).append(line)
    return [_columns(form, lines) for form, lines in groups.items()], records


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "?"
    return "d" if isinstance(value, float) else "q" if value < 1 << 63 else "Q"


def _columns(form: Iterable[tuple[str, str]], lines: list[dict[str, Any]]) -> Columns:
    found = {n: np.array([line[n] for line in lines], kind) for n, kind in form}
    steps = found.pop("step")
    return Columns(steps, found)


def _equal_lines(block: bytes) -> Columns | None:
    """Parse lines of steps with the same names in the same order.

    Everything between two numbers is replaced by one byte that stands for a name. What is left
    besides numbers must be these bytes in the order of the first line, so that each number belongs
    to its name. All numbers are then parsed at once, as one list.

    Returns:
        None if the lines are not equal, or one of them is invalid.
    """
    keys = _KEY.findall(block[: block.index(b"\n")])
    try:
        names = [json.loads(b'"' + key + b'"') for key in keys]
    except ValueError:
        return None
    if not names or names[0] != "step" or not len(set(names)) == len(names) <= _MOST_KEYS:
        return None
    begin, end, lines = b'{"step": ', b"}\n", block.count(b"\n")
    if not (block.startswith(begin) and block.endswith(end)):
        return None
    text = block[len(begin) : -len(end)]
    length, codes = len(text), bytes(range(_FIRST_CODE + 1, _FIRST_CODE + len(keys)))
    separators = {_FIRST_CODE: end + begin}
    separators |= {code: b', "%b": ' % key for code, key in zip(codes, keys[1:], strict=True)}
    for code, separator in separators.items():
        text = text.replace(separator, bytes([code]))
        length -= (len(separator) - 1) * (lines - (code == _FIRST_CODE))
    between = text.translate(None, _OF_NUMBERS)
    expected = (codes + bytes([_FIRST_CODE])) * lines
    # The length differs if a byte of a separator was in the file itself.
    if len(text) != length or _without_words(between) != expected[:-1]:
        return None
    try:
        values = json.loads(b"[" + text.translate(_TO_COMMAS) + b"]")
        columns = [_column(values[i :: len(keys)]) for i in range(len(keys))]
    except (ValueError, OverflowError):
        return None
    steps = columns[0]
    if steps.dtype != np.int64 or steps[0] < 0 or steps[-1] > MOST_STEPS:
        return None
    return Columns(steps, dict(zip(names[1:], columns[1:], strict=True)))


def _without_words(between: bytes) -> bytes:
    """Remove the texts that stand for numbers that are not finite; "-" is already removed."""
    return (
        between.replace(b'"NaN"', b"").replace(b'"Infinity"', b"") if b'"' in between else between
    )


def _column(values: list[Any]) -> Array:
    """Convert the values of one name, which are all whole, or none of them.

    Raises:
        ValueError, OverflowError: If they are not, or one is too large.
    """
    kinds = set(map(type, values))
    if kinds == {int}:
        return np.array(values, np.int64)
    if int in kinds:
        raise ValueError
    infinite = 0
    if str in kinds:
        infinite = sum(value in ("Infinity", "-Infinity") for value in values)
        values = [NON_FINITE[value] if isinstance(value, str) else value for value in values]
    found = np.array(values, np.float64)
    if np.isinf(found).sum() != infinite:
        raise ValueError
    return found


def sorted_rows(parts: Iterable[Columns]) -> Iterator[dict[str, Any]]:
    """Yield the lines of steps in the order of the steps."""
    parts = list(parts)
    if not parts:
        return
    steps = np.concatenate([part.steps for part in parts])
    owners = np.repeat(np.arange(len(parts)), [len(part.steps) for part in parts])
    places = np.concatenate([np.arange(len(part.steps)) for part in parts])
    for i in np.argsort(steps, kind="stable"):
        yield parts[owners[i]].row(int(places[i]))
