"""Profiling on JAX: files for TensorBoard, and the same events as a Perfetto trace."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from ..traces import TraceEvent, newest, write_trace


@contextmanager
def tracing(directory: Path) -> Generator[None]:
    """Profile the code in this context, and write the traces to a directory."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # otherwise every call of every Python function is traced
    jax.profiler.start_trace(str(directory), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
    data = jax.profiler.ProfileData.from_file(str(newest(directory, "*.xplane.pb")))
    write_trace(_spans(data), directory)


def _spans(data: Any) -> Iterator[TraceEvent]:
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                begin, duration = event.start_ns / 1e3, event.duration_ns / 1e3
                yield TraceEvent(plane.name, line.name, event.name, begin, duration)
