"""PyTorch's profiler, which writes traces for Perfetto by itself."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from torch.profiler import profile

from ..traces import TRACE


@contextmanager
def tracing(directory: Path) -> Generator[None]:
    """Let the profiler watch meanwhile, and leave what it saw in a directory."""
    directory.mkdir(parents=True, exist_ok=True)
    with profile() as profiler:
        yield
    profiler.export_chrome_trace(str(directory / TRACE))
