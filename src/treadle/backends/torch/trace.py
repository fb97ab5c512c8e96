"""Profiling on PyTorch, whose profiler writes Perfetto traces itself."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from ..traces import TRACE


@contextmanager
def tracing(directory: Path) -> Generator[None]:
    """Profile the code in this context, and write the trace to a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with profile() as profiler:
        yield
    profiler.export_chrome_trace(str(directory / TRACE))
