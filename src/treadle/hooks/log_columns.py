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
# Non-finite numbers, and the letters that stand for them while a block is parsed.
_LETTERS = ((b': "NaN"', b": N"), (b': "Infinity"', b": P"), (b': "-Infinity"', b": M"))
_VALUES = {b"N": b"nan", b"P": b"inf", b"M": b"-inf"}
_OF_NUMBERS = b"0123456789+-.eENPM"
_TO_SPACES = bytes(byte if byte in _OF_NUMBERS else ord(" ") for byte in range(256))
_IS_FLOAT = np.zeros(256, bool)
_IS_FLOAT[list(b".eENPM")] = True
_SPACE, _QUOTE, _NEWLINE = b' "\n'

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

    Every byte outside of the numbers is compared with what `JSONLines` writes, so that each number
    belongs to its name.

    Returns:
        None if the lines are not equal, or one of them is invalid.
    """
    keys = _KEY.findall(block[: block.index(b"\n")])
    if not keys or keys[0] != b"step":
        return None
    names = [json.loads(b'"' + key + b'"') for key in keys][1:]
    if len({"step", *names}) < len(keys):
        return None
    places = _places(block, keys)
    if places is None:
        for text, letter in _LETTERS:
            block = block.replace(text, letter)
        places = _places(block, keys)
    if places is None:
        return None
    starts, ends = places
    bytes_ = np.frombuffer(block, np.uint8).copy()
    try:
        steps = _steps(bytes_, starts[0], ends[0])
        _blank(bytes_, keys, starts, ends)
        text = bytes_.tobytes().translate(_TO_SPACES)
        tokens, count = text.split(), len(names)
        if len(tokens) != len(steps) * count or steps.max() > MOST_STEPS:
            return None
        if text.count(b".") == len(tokens):  # one in each number, or some are invalid
            columns = [_floats(tokens[i::count]) for i in range(count)]
        else:
            marks = np.append(np.flatnonzero(_IS_FLOAT[np.frombuffer(text, np.uint8)]), len(text))
            is_float = marks[np.searchsorted(marks, starts[1:])] < ends[1:]
            columns = [_mixed(tokens[i::count], is_float[i]) for i in range(count)]
    except (ValueError, OverflowError):
        return None
    return Columns(steps, dict(zip(names, columns, strict=True)))


def _places(block: bytes, keys: list[bytes]) -> tuple[Array, Array] | None:
    """Find the numbers of equal lines.

    Returns:
        The starts and the ends of the numbers of each key. None if a line differs from the others.
    """
    bytes_ = np.frombuffer(block, np.uint8)
    newlines = np.flatnonzero(bytes_ == _NEWLINE)
    quotes = np.flatnonzero(bytes_ == _QUOTE)
    lines, count = len(newlines), len(keys)
    if len(quotes) != 2 * count * lines:
        return None
    opened, closed = np.ascontiguousarray(quotes.reshape(lines, count, 2).transpose(2, 1, 0))
    begins = np.concatenate([[0], newlines[:-1] + 1])
    starts, ends = closed + 3, np.concatenate([opened[1:] - 2, [newlines - 1]])
    if not (starts < ends).all() or not np.array_equal(opened[0], begins + 1):
        return None
    expected = [(begins, b"{"), (ends[-1], b"}"), *((end, b", ") for end in ends[:-1])]
    for key, one, other in zip(keys, opened, closed, strict=True):
        if not (other - one == len(key) + 1).all():
            return None
        expected += [(one + 1, key), (other + 1, b": ")]
    for place, text in expected:
        for offset, byte in enumerate(text):
            if not (bytes_[place + offset] == byte).all():
                return None
    # There are no other bytes than numbers between them.
    most = lines * (1 + 2 * count + sum(map(_others, [text for _, text in expected])))
    return (starts, ends) if _others(block) == most else None


def _others(text: bytes) -> int:
    """Return the number of bytes that are not of numbers."""
    return len(text.translate(None, _OF_NUMBERS))


def _blank(bytes_: Array, keys: list[bytes], starts: Array, ends: Array) -> None:
    """Overwrite the steps, and what could be of a number in the keys."""
    for key, start in zip(keys, starts, strict=True):
        for offset, byte in enumerate(key):
            if byte in _OF_NUMBERS:
                bytes_[start - 3 - len(key) + offset] = _SPACE
    for offset in range(int((ends[0] - starts[0]).max())):
        bytes_[np.minimum(starts[0] + offset, ends[0])] = _SPACE


def _steps(bytes_: Array, starts: Array, ends: Array) -> Array:
    """Parse the numbers of steps.

    Raises:
        ValueError: If one is not a whole number of at least 0, or too large.
    """
    width = int((ends - starts).max())
    if width > 16:
        raise ValueError
    found = np.zeros(len(starts), np.int64)
    for offset in range(width):
        at = starts + offset
        digits = bytes_[np.minimum(at, ends)] - np.uint8(ord("0"))
        inside = at < ends
        if (digits[inside] > 9).any():
            raise ValueError
        found = np.where(inside, 10 * found + digits, found)
    return found


def _mixed(tokens: list[bytes], is_float: Array) -> Array:
    """Parse the numbers of one name, which are all whole, or none of them.

    Raises:
        ValueError, OverflowError: If they are not, or one is no number or too large.
    """
    if not is_float.any():
        return np.fromiter(map(int, tokens), np.int64, len(tokens))
    if not is_float.all():
        raise ValueError
    infinite = 0
    for i, token in enumerate(tokens):
        if token in _VALUES:
            tokens[i] = _VALUES[token]
            infinite += token != b"N"
    return _floats(tokens, infinite)


def _floats(tokens: list[bytes], infinite: int = 0) -> Array:
    """Parse floats, of which a known number is infinite.

    Raises:
        ValueError: If one is not a float, or too large.
    """
    found = np.fromiter(map(float, tokens), np.float64, len(tokens))
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
