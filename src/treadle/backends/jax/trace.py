"""JAX's profiler: its own files for TensorBoard, and the same as a trace for Perfetto."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from ..traces import Span, newest, write_trace


@contextmanager
def tracing(directory: Path) -> Generator[None]:
    """Let the profiler watch meanwhile, and leave what it saw in a directory."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every call of every Python function
    jax.profiler.start_trace(str(directory), profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
    data = jax.profiler.ProfileData.from_file(str(newest(directory, "*.xplane.pb")))
    write_trace(_spans(data), directory)


def _spans(data: Any) -> Iterator[Span]:
    for plane in data.planes:
        for line in plane.lines:
            for event in line.events:
                begin, duration = event.start_ns / 1e3, event.duration_ns / 1e3
                yield Span(plane.name, line.name, event.name, begin, duration)
