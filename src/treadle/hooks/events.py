"""Writing TensorBoard event files: records of protocol buffers with checksums.

TensorBoard's own writer is not used: it imports TensorFlow if it is installed, and it computes
checksums byte by byte in Python, which can take longer than a training step. Here the records of
many steps are computed as rows of one NumPy array.
"""

import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from time import time
from typing import Any

import numpy as np

from ..core.logs import Array

PATTERN = "events.out.tfevents.*"
VERSION = "brain.Event:2"
_POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits reversed
_MASK_DELTA = 0xA282EAD8


class EventFile:
    """A new event file, which readers process after the existing files of the directory.

    Args:
        directory: The directory; created if it does not exist.
        first_step: The next step. Readers discard what they have read of this step and later ones
            from files that have since been removed or truncated.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto import event_pb2

        directory.mkdir(parents=True, exist_ok=True)
        # Readers process the files of a directory in the order of their names.
        names = (path.name.removeprefix(PATTERN[:-1]) for path in directory.glob(PATTERN))
        stamps = [int(x) + 1 for x in (name.partition(".")[0] for name in names) if x.isdecimal()]
        stamp = max([int(time()), *stamps])
        name = f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}"
        self.path = directory / name
        self._file = self.path.open("xb")
        self._write(event_pb2.Event(wall_time=time(), file_version=VERSION))
        if first_step > 1:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._write(event_pb2.Event(wall_time=time(), step=first_step, session_log=start))

    def add(self, step: int, seconds: float, values: Sequence[Any]) -> None:
        """Write an event with the given `Summary.Value` messages, a step and a wall time."""
        from tensorboard.compat.proto import event_pb2, summary_pb2

        summary = summary_pb2.Summary(value=values)
        self._write(event_pb2.Event(wall_time=seconds, step=step, summary=summary))

    def add_scalars(
        self, names: Sequence[str], steps: Array, seconds: Array, values: Array
    ) -> None:
        """Write one event per step; see `scalar_records`."""
        self._file.write(scalar_records(names, steps, seconds, values))

    def size(self) -> int:
        """Flush the file to disk and return its size."""
        self.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def flush(self) -> None:
        """Flush written data to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, event: Any) -> None:
        self._file.write(framed(event.SerializeToString()))


def framed(data: bytes) -> bytes:
    """Return a record: length, checksum of the length, data, checksum of the data.

    Example:
        >>> framed(b"123456789")[-4:].hex()
        'e5b08ac7'
    """
    length = struct.pack("<Q", len(data))
    return b"%b%b%b%b" % (length, _checked(length), data, _checked(data))


def scalar_records(tags: Sequence[str], steps: Array, seconds: Array, values: Array) -> bytes:
    """Return the records for the scalar values of many steps.

    Args:
        tags: The name of each column of `values`.
        steps: The step numbers, increasing: int64 of shape (n,).
        seconds: The wall time of each step in Unix time: float64 of shape (n,).
        values: The values, of shape (n, len(tags)).

    Example:
        >>> one = scalar_records(["loss"], np.array([1]), np.zeros(1), np.zeros((1, 1)))
        >>> both = scalar_records(["loss"], np.array([1, 300]), np.zeros(2), np.zeros((2, 1)))
        >>> both.startswith(one), len(one), len(both)
        (True, 42, 85)
    """
    # As a varint, a step number takes one byte per seven bits.
    groups = np.searchsorted(1 << (7 * np.arange(1, 10, dtype=np.int64)), steps, side="right") + 1
    parts = [
        _records_of_one_length(tags, int(n), *(x[groups == n] for x in (steps, seconds, values)))
        for n in np.unique(groups)
    ]
    return b"".join(parts)


def _records_of_one_length(
    tags: Sequence[str], groups: int, steps: Array, seconds: Array, values: Array
) -> bytes:
    """Return records of steps whose numbers are encoded in the same number of bytes.

    An Event is `wall_time` (field 1, double), `step` (2, varint) and `summary` (5), which is
    repeated `value` (1): `tag` (1, string) and `simple_value` (2, float).
    """
    summary, floats = b"", list[int]()
    for tag in tags:
        name = tag.encode()
        value = b"\x0a" + _varint(len(name)) + name + b"\x15" + bytes(4)
        summary += b"\x0a" + _varint(len(value)) + value
        floats.append(len(summary) - 4)
    head = b"\x09" + bytes(8) + b"\x10" + bytes(groups) + b"\x2a" + _varint(len(summary))
    length = struct.pack("<Q", len(head) + len(summary))
    frame = length + _checked(length)
    template = np.frombuffer(frame + head + summary + bytes(4), np.uint8)
    rows = np.tile(template, (len(steps), 1))
    begin, number = len(frame), len(frame) + 10
    rows[:, begin + 1 : begin + 9] = _bytes_of(seconds, "<f8")
    for i in range(groups):
        rows[:, number + i] = (steps >> (7 * i)) & 127 | (128 if i < groups - 1 else 0)
    for column, offset in enumerate(floats):
        at = begin + len(head) + offset
        rows[:, at : at + 4] = _bytes_of(values[:, column], "<f4")
    rows[:, -4:] = _bytes_of(_masked(_crcs(rows[:, begin:-4])), "<u4")
    return rows.tobytes()


def _bytes_of(values: Array, dtype: str) -> Array:
    """Return the bytes of each number as a row."""
    with np.errstate(over="ignore"):  # values beyond the range of float32 become infinite
        return np.ascontiguousarray(values.astype(dtype))[:, None].view(np.uint8)


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def _crc_table() -> Array:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE = _crc_table()
_TABLE_LIST: list[int] = _TABLE.tolist()


def _crcs(rows: Array) -> Array:
    """Return the CRC-32C of each row of bytes."""
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in np.ascontiguousarray(rows.T):
        crc = _TABLE[(crc ^ column) & 255] ^ (crc >> 8)
    return ~crc


def _masked(crc: Array) -> Array:
    return ((crc >> 15) | (crc << 17)) + np.uint32(_MASK_DELTA)


def _checked(data: bytes) -> bytes:
    """Return the masked CRC-32C checksum of `data`."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE_LIST[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF
    return struct.pack("<I", masked)
