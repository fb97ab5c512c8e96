"""The executor of steps on several processes of TensorFlow."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, cast

from ....core.options import Options
from ...base import Executor
from ...eager import EagerExecutor
from ...processes.group import Processes
from ...processes.shared import SharedExecutor
from ...program import Program
from ..windows import TensorFlowExecutor, device
from .engine import TensorFlowEngine


def shared_executor(
    program: Program,
    options: Options,
    around: Callable[[Program], AbstractContextManager[Any]],
    to_device: Callable[[Any], Any],
    to_numpy: Callable[[Any], Any],
    processes: Processes,
) -> SharedExecutor:
    """Return an executor of the graph of the step of this process, or one that runs it eagerly."""

    def make(shared: Program) -> Executor:
        if options.execution == "eager":
            return EagerExecutor(shared, around, to_device, to_numpy, device())
        return TensorFlowExecutor(shared, "XLA does not compile sums over processes")

    agreeing = cast(TensorFlowEngine, processes.engine).agreeing
    return SharedExecutor(program, make, around, to_device, processes, agreeing)
