"""TensorFlow on several processes, which TensorFlow's own servers connect.

TensorFlow matches the parts of a collective operation by keys, which are numbers: of the group of
processes, and of the operation. They must be the same in all processes, so the number of an
operation follows from the step's trace that it is in, its shape and type, and how many of these
came before it. Each operation takes the same resource, so that TensorFlow orders them in a graph,
also in branches and loops, as Python has called them: in the same order in all processes.
"""

import socket
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import tensorflow as tf

from ...backends.base import Backend, Executor
from ...backends.program import Program
from ...backends.tensorflow.backend import around, executor
from ...backends.tensorflow.operations import replaced
from ...backends.tensorflow.patches import INTERNALS, FuncGraph
from ...backends.tensorflow.windows import undone
from ...backends.types import Tensor, Variable
from ...core.internals import wrapped
from ...core.options import Options
from ...core.processes import ProcessGroup
from ...errors import ConfigurationError, StepError
from ..dividing.agreement import AT
from ..dividing.backend import DividedBackend
from ..environment import free_port
from .replacements import DRAWS, REPLACEMENTS

GROUP: Final = 1_000_000
"""The key of the group; TensorFlow's own strategies count from 1."""

TIMEOUT: Final = 600.0
"""The seconds to wait for another process in an operation; by default, TensorFlow waits forever."""
INTER_OP_THREADS: Final = 8
"""By default, there are as many as cores: on a machine with two, operations that wait for another
process may leave none to what they wait for."""

tf.no_gradient("CollectiveReduceV2")  # `differentiable` gives the gradient


class TensorFlowGroup(DividedBackend):
    """The backend for Keras on TensorFlow on several processes."""

    def __init__(self, own: Backend, group: ProcessGroup) -> None:
        super().__init__(own, group)
        self._order = tf.Variable(tf.zeros([]), trainable=False)
        self._keys: dict[Any, int] = {}
        self._traces, self._counts = 0, Counter[Any]()
        self._traced: list[str] = []
        self._runs_as_python = False
        self._assigned: set[int] = set()

    def made(self, program: Program, options: Options) -> Executor:
        """Return the executor of the graph loop, or the eager one."""
        return executor(program, options, self.own, "XLA does not compile sums over processes")

    def around(self, program: Program) -> AbstractContextManager[Any]:
        """Return the context in which a step runs eagerly."""
        return around(program)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of the tensors of all processes, which has the same bits in all."""
        form = 0 if tf.executing_eagerly() else self._traces, x.dtype.name, tuple(x.shape)
        self._counts[form] += 1
        key = self._keys.setdefault((form, self._counts[form]), len(self._keys) + 1)
        if not tf.executing_eagerly():
            self._traced.append(f"{key} {x.dtype.name} {tuple(x.shape)}")
        return tf.raw_ops.CollectiveReduceV2(
            input=x,
            group_size=self.size,
            group_key=GROUP,
            instance_key=key,
            ordering_token=[self._token()],
            merge_op="Add",
            final_op="Id",
            timeout_seconds=TIMEOUT,
        )

    def from_first(self, x: Tensor) -> Tensor:
        """Return the tensor of process 0, from a sum in which the bytes of all others are 0."""
        is_bool = x.dtype == tf.bool
        raw = tf.cast(x, tf.uint8) if is_bool else tf.bitcast(x, tf.uint8)
        sent = tf.cast(raw, tf.int32)
        sent = self.sum(sent if self.rank == 0 else tf.zeros_like(sent))
        raw = tf.cast(sent, tf.uint8)
        return tf.cast(raw, tf.bool) if is_bool else tf.bitcast(raw, x.dtype)

    def recorded(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call a function.

        Raises:
            StepError: A step that runs as Python calls it while TensorFlow traces a function.
        """
        if self._runs_as_python and not tf.executing_eagerly():
            raise StepError(
                "the step sums over processes inside of a concrete function, which TensorFlow "
                "traces once, for other rows or without the sums. Call the function without "
                "get_concrete_function: Treadle compiles the whole step"
            )
        return function(x)

    def differentiable(self, forward: Callable[[Tensor], Tensor], is_idle: bool, x: Tensor) -> Any:
        """Return a sum over all processes: what flows back is summed as well."""

        @tf.custom_gradient
        def total(x: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
            def gradient(upstream: Tensor) -> Tensor:
                # All processes take part, those without rows too: their graphs are the same.
                found = self.differentiable(forward, is_idle, upstream)
                return tf.zeros_like(found) if is_idle else found

            return forward(x), gradient

        return total(x)

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """Return consecutive parts of a flat tensor."""
        return tf.split(x, sizes)

    def begin_step(self) -> None:
        """Number the operations of the step from 1, and those of each graph separately."""
        self._counts.clear()
        self._runs_as_python = tf.executing_eagerly()
        if not tf.executing_eagerly():
            self._traces += 1

    @contextmanager
    def preparing(self) -> Generator[None]:
        """Check that graphs which are traced in this context communicate in the same way.

        Raises:
            StepError: They do not, and would wait for one another.
        """
        self._traced = []
        yield
        mine, self._traced = self._traced, []
        if not mine:
            return
        for rank, others in enumerate(self.group.exchange(mine, AT)):
            if others != mine:
                raise StepError(
                    f"the step that was traced in process {rank} sums {len(others)} messages, and "
                    f"that of process {self.rank} {len(mine)} or others: what a step "
                    "computes must not depend on the process"
                )

    @contextmanager
    def patched(self) -> Generator[None]:
        """Run a step such that what depends on the whole batch goes through `OwnRows`."""
        functions = {**REPLACEMENTS, INTERNALS["assign"]: self._assign}
        with wrapped(functions, required=True), replaced(DRAWS, required=True):
            yield

    def undone(self, program: Program) -> AbstractContextManager[Any]:
        """Restore every variable of a program afterwards."""
        return undone(program)

    def watched(self, variables: Iterable[Variable]) -> Callable[[Variable], bool]:
        """Return a function that knows which variables were assigned in `patched`."""
        assigned = self._assigned = set[int]()
        return lambda variable: id(variable) in assigned

    def _token(self) -> Tensor:
        """Return the resource that orders operations, as a tensor of the step's own graph.

        The gradient of a loop cannot use a resource that no graph around it has.
        """
        if tf.executing_eagerly():
            return self._order.handle
        graph = tf.compat.v1.get_default_graph()
        while isinstance(graph.outer_graph, FuncGraph):
            graph = graph.outer_graph
        handle = self._order.handle
        if not any(outer is handle for outer, _ in graph.captures):
            with graph.as_default():
                tf.identity(handle)
        return next(inner for outer, inner in graph.captures if outer is handle)

    def _assign(self, original: Callable[..., Any], variable: Variable, value: Any) -> Any:
        self._assigned.add(id(variable))
        return original(variable, value)


def connect(group: ProcessGroup, address: str, own: Backend) -> TensorFlowGroup:
    """Connect this process to the others with TensorFlow's own servers.

    Args:
        group: The processes.
        address: The host and port where process 0 can be reached, as `host:port`.
        own: The backend of one process.

    Raises:
        ConfigurationError: TensorFlow has already started, or its server cannot.
    """
    host = address.rpartition(":")[0]
    here = f"{host if group.rank == 0 else _own_address(host)}:{free_port()}"
    addresses = group.exchange(here, "connecting TensorFlow")
    cluster = tf.train.ClusterSpec({"worker": addresses})
    context = INTERNALS["eager_context"].resolve()()
    try:
        devices = tf.config.list_physical_devices("GPU")
        if group.local_size > 1 and len(devices) > 1:  # unless each process sees only one
            tf.config.set_visible_devices(devices[group.local_rank % len(devices)], "GPU")
        if tf.config.threading.get_inter_op_parallelism_threads() == 0:
            tf.config.threading.set_inter_op_parallelism_threads(INTER_OP_THREADS)
        context.configure_collective_ops(
            collective_leader="/job:worker/replica:0/task:0",
            device_filters=(f"/job:worker/task:{group.rank}",),
        )
    except RuntimeError as error:
        raise ConfigurationError(
            "treadle.setup joins the other processes, and must come before TensorFlow computes "
            "anything: move it to the top of the script"
        ) from error
    server = tf.train.ServerDef(
        cluster=cluster.as_cluster_def(),
        default_session_config=context.config,
        job_name="worker",
        task_index=group.rank,
        protocol="grpc",
    )
    try:
        context.enable_collective_ops(server)
        context.ensure_initialized()
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"process {group.rank} of {group.size} cannot connect to the others at {here} with "
            f"TensorFlow: {error}. Check that the machines can reach one another"
        ) from error
    return TensorFlowGroup(own, group)


def _own_address(host: str) -> str:
    """Return the address of this machine on the way to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
