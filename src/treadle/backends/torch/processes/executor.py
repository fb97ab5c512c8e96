"""The executor of steps on several processes of PyTorch."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ....core.options import Options
from ...base import Executor
from ...eager import EagerExecutor
from ...processes.agreement import AT
from ...processes.group import Processes
from ...processes.shared import SharedExecutor
from ...program import Program
from ..capture.proof import Captured
from ..capture.trials import device
from ..capture.windows import CaptureExecutor


def shared_executor(
    program: Program,
    options: Options,
    around: Callable[[Program], AbstractContextManager[Any]],
    to_device: Callable[[Any], Any],
    to_numpy: Callable[[Any], Any],
    processes: Processes,
) -> SharedExecutor:
    """Return an executor that captures the step of this process, or runs it eagerly."""

    def agreed(captured: Captured | str) -> Captured | str:
        """Return the captured step, or why it cannot be captured in one of the processes."""
        reason = captured if isinstance(captured, str) else ""
        for rank, text in enumerate(processes.group.exchange(reason, AT)):
            if text:
                return captured if captured == text else f"in process {rank}, {text}"
        return captured

    def make(shared: Program) -> Executor:
        if options.execution == "eager":
            return EagerExecutor(shared, around, to_device, to_numpy, device())
        return CaptureExecutor(shared, options, around, to_device, agreed)

    # Trials of a captured step run alone, since processes may need different numbers of them.
    return SharedExecutor(program, make, around, to_device, processes, processes.alone)
