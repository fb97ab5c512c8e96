"""Profiling on TensorFlow: files for TensorBoard, and the same events as a Perfetto trace."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

from ..traces import TraceEvent, newest, write_trace
from .patches import xplane_pb2


@contextmanager
def tracing(directory: Path) -> Generator[None]:
    """Profile the code in this context, and write the traces to a directory."""
    tf.profiler.experimental.start(str(directory))
    try:
        yield
    finally:
        tf.profiler.experimental.stop()
    space = xplane_pb2.XSpace.FromString(newest(directory, "*.xplane.pb").read_bytes())
    write_trace(_spans(space), directory)


def _spans(space: Any) -> Iterator[TraceEvent]:
    for plane in space.planes:
        for line in plane.lines:
            thread = line.display_name or line.name or str(line.id)
            for event in line.events:
                about = plane.event_metadata[event.metadata_id]
                begin = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                name = about.display_name or about.name
                yield TraceEvent(plane.name, thread, name, begin, event.duration_ps / 1e6)
