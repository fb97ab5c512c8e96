"""Reads the files of TensorFlow's profiler without the package xprof.

They are protocol buffers, `tsl/profiler/protobuf/xplane.proto`. TensorFlow has no public class of
these messages, so their fields are read by number here; numbers of fields never change.
"""

from collections.abc import Iterator
from typing import Any

from ..traces import TraceEvent


def spans(data: bytes) -> Iterator[TraceEvent]:
    """Yield the events of a file."""
    for plane in _fields(data).get(1, ()):
        fields = _fields(plane)
        process, names = _text(fields, 2), dict[int, str]()
        for entry in map(_fields, fields.get(4, ())):
            about = _fields(entry[2][0])
            names[_number(entry, 1)] = _text(about, 4) or _text(about, 2)
        for line in map(_fields, fields.get(3, ())):
            thread = _text(line, 11) or _text(line, 2) or str(_number(line, 1))
            start = _number(line, 3) / 1e3  # nanoseconds; those of events are picoseconds
            for event in map(_fields, line.get(4, ())):
                begin, duration = start + _number(event, 2) / 1e6, _number(event, 3) / 1e6
                yield TraceEvent(process, thread, names[_number(event, 1)], begin, duration)


def _fields(message: bytes) -> dict[int, list[Any]]:
    """Return the values of each field of a message: integers, and bytes of texts and messages."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
        else:
            size = {1: 8, 5: 4}.get(kind, 0)  # of numbers with a fixed size
            if not size:
                size, at = _varint(message, at)
            value, at = message[at : at + size], at + size
        found.setdefault(key >> 3, []).append(value)
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """Return an integer, in groups of seven bits, and the position behind it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _number(fields: dict[int, list[Any]], field: int) -> int:
    return fields[field][-1] if field in fields else 0


def _text(fields: dict[int, list[Any]], field: int) -> str:
    return fields[field][-1].decode() if field in fields else ""
