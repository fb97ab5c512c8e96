"""Windows on TensorFlow: a step is traced once, and a window is a graph loop over it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from ...core import structures
from ...core.float64 import CONVERTED
from ...errors import StateError
from ..background import Done, Results, Running, start
from ..eager import run_step
from ..plans import XLA, Facts, Plan, RefusedError
from ..program import Program
from ..window import CAPACITIES, Following, Rows, Window, capacity, padded
from .effects import ACTING, observed
from .patches import is_op_determinism_enabled, open_shapes_read
from .stateful_draws import step_functions
from .xla_draws import like_kernels, other_numbers

GRAPH = "graph"
CONVOLUTIONS = ("Conv2D", "Conv3D", "DepthwiseConv2d")
POOLS = {"MaxPoolGrad", "MaxPool3DGrad"}
FLOAT32 = tf.float32.as_datatype_enum
LOOPS = {"While", "StatelessWhile"}
CHECKS = {"Assert", "CheckNumerics", "CheckNumericsV2", "PrintV2", "Print"}

placed: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
"""Data sets on the device, by owner; each is copied there once."""


class TensorFlowExecutor:
    """Runs each window, or each step, as one graph; all batches have equal shapes.

    XLA compiles whole windows. For steps with convolutions on a CPU it compiles only the step, and
    the loop stays a TensorFlow graph: inside an XLA loop, a convolution takes up to 50 times as
    long.

    Args:
        program: The step.
        refusal: Why XLA must not compile it, as a clause; empty if it may.
        sizes: The shapes of a batch's arrays, with None for open sizes; by default all are fixed.
    """

    def __init__(
        self,
        program: Program,
        refusal: str = "",
        sizes: Sequence[Sequence[int | None]] | None = None,
    ) -> None:
        self._program, self._refusal, self._sizes = program, refusal, sizes
        self.plan = Plan(GRAPH, fused=True, largest=1)
        self.whole = False
        self._traced: _TracedStep | None = None
        self._traced_for_xla: _TracedStep | None = None
        self._compiled: dict[Any, tuple[_TracedStep, Callable[..., Any]]] = {}
        self._known = {id(getattr(v, "_value", v)) for v in program.variables}
        self._convolves: bool | None = None  # None: unknown
        self._ready: tuple[Window, int | None, tuple[list[Any], Any]] | None = None

    @property
    def calls_python(self) -> bool:
        """Whether the step acts, such as by `tf.py_function`, `tf.print` or a queue."""
        return self._traced is not None and bool(self._traced.operations() & ACTING)

    @property
    def programs(self) -> int:
        """The number of compiled programs."""
        return len(self._compiled)

    def facts(self, window: Window) -> Facts:
        """Trace the step, and return the facts about its operations."""
        step = self._step(window)
        found = step.operations()
        loops = bool(found & LOOPS)
        facts = Facts(device(), (XLA, GRAPH), step.slow(), loops=loops, reads_sizes=step.reads)
        if self._refusal:
            return facts.without(XLA, self._refusal)
        checks = sorted(found & CHECKS)
        if checks:
            return facts.without(XLA, f"XLA drops {checks[0]}")
        layers = [x.name for x in self._program.new_context(0).layers if not x.supports_jit]
        if layers:
            return facts.without(XLA, f"the layer {layers[0]} does not support XLA")
        if is_op_determinism_enabled() and facts.device != "cpu":  # whose sums have an order
            return facts.without(XLA, "TensorFlow's op determinism is enabled")
        return facts

    def compile(self, window: Window) -> bool:
        """Build the graph, and run it for zero steps, so that TensorFlow optimizes it.

        XLA compiles a single step only when it runs, so one step is run and then undone.
        """
        length = self._length(window)
        key = self._key(window, length)
        if key in self._compiled:
            return False
        step = self._step(window)
        make = self._window_function if self.plan.fused else self._single_function
        function = make(step, window.rows is not None, length)
        none, one = _constant(0), _constant(1)
        try:
            if self._by_step(window):
                with undone(self._program):
                    function(*self._inputs(window, length), one, none)
            elif self.plan.fused:
                function(*self._inputs(window, length), none, none)
            elif self.plan.compiler == XLA:
                with undone(self._program):
                    function(*_one(window, 0), none)
        except (tf.errors.InvalidArgumentError, tf.errors.UnimplementedError) as error:
            if self.plan.compiler != XLA:
                raise
            raise RefusedError(f"XLA: {str(error).strip().splitlines()[0]}") from error
        self._compiled[key] = step, function
        return True

    def transfer(self, window: Window) -> None:
        """Create the tensors of a streamed window, which copies them to an accelerator."""
        if on_accelerator() and window.rows is None and self.plan.fused:
            length = self._length(window)
            self._ready = window, length, self._inputs(window, length)

    def run(
        self,
        window: Window,
        first_step: int,
        background: bool = True,
        following: Following | None = None,
    ) -> Running | Done:
        """Run the window in one call, or in one call per batch."""
        length = self._length(window)
        key = self._key(window, length)
        if key not in self._compiled:
            self.compile(window)
        step, function = self._compiled[key]

        def run() -> Results:
            if not self.plan.fused:
                return step.fetched(self._run_singly(function, window, first_step))
            count, (arrays, chosen) = window.count, self._inputs(window, length)
            results = function(arrays, chosen, _constant(count), tf.constant(first_step))
            return step.fetched([x.numpy()[:count] for x in results])

        return start(run, background=background)

    def _run_singly(self, function: Any, window: Window, first_step: int) -> list[Any]:
        outputs: list[Any] = []
        for i in range(window.count):
            outputs.append(function(*_one(window, i), tf.constant(first_step + i)))
        return [np.stack([x.numpy() for x in column]) for column in zip(*outputs, strict=True)]

    def _key(self, window: Window, length: int | None) -> Any:
        return self.plan.compiler, self.plan.fused, length, window.rows is not None

    def _step(self, window: Window) -> "_TracedStep":
        """Return the traced step; for XLA a second trace if it draws random numbers.

        Raises:
            RefusedError: It draws some that XLA would not draw as TensorFlow's kernels do.
        """
        if self._traced is None:
            batch = tensors(window.batch(0))
            self._traced = _TracedStep(self._program, batch, self._known, False, self._sizes)
        if self.plan.compiler != XLA or not self._traced.draws:
            return self._traced
        if self._traced_for_xla is None:
            batch = tensors(window.batch(0))
            traced = _TracedStep(self._program, batch, self._known, for_xla=True)
            other = sorted(traced.operations() & other_numbers())
            if other:
                raise RefusedError(f"XLA draws other numbers for {other[0]}")
            self._traced_for_xla = traced
        return self._traced_for_xla

    def _inputs(self, window: Window, length: int | None) -> tuple[list[Any], Any]:
        """Return the tensors to take batches from, and the row indices of each batch."""
        ready = self._ready
        if ready is not None and ready[0] is window and ready[1] == length:
            self._ready = None
            return ready[2]
        if window.rows is not None:
            rows = window.rows.indices
            return _on_device(window.rows), tf.constant(padded(rows, length or len(rows)))
        held = window.batches
        if length is not None:
            held = structures.mapped(lambda x: padded(x, length), held)
        return structures.flatten(tensors(held)), _constant((), tf.int64)

    def _length(self, window: Window) -> int | None:
        """Return the static number of results that XLA needs; None if it is dynamic."""
        if self.plan.compiler != XLA or not self.plan.fused or self._by_step(window):
            return None
        sizes = CAPACITIES if window.rows is None else ()  # rows are small: one program for all
        return capacity(window.count, self.plan.largest, sizes)

    def _by_step(self, window: Window) -> bool:
        """Return whether XLA compiles only the step, and not the loop."""
        if self._convolves is None:
            self._convolves = self._step(window).convolves
        return (
            self.plan.compiler == XLA and self.plan.fused and self._convolves and device() == "cpu"
        )

    def _window_function(self, step: "_TracedStep", resident: bool, static: int | None) -> Any:
        whole = self.plan.compiler == XLA and static is not None
        run = step if whole or self.plan.compiler != XLA else step.compiled()

        @tf.autograph.experimental.do_not_convert
        def window(arrays: Sequence[Any], chosen: Any, count: Any, first_step: Any) -> Any:
            length = count if static is None else static
            buffers = [
                tf.TensorArray(spec.dtype, size=length, element_shape=spec.shape)
                for spec in step.outputs
            ]

            def body(i: Any, buffers: Any) -> Any:
                outputs = run(_batch(arrays, chosen, i, resident), first_step + i)
                return i + 1, [b.write(i, x) for b, x in zip(buffers, outputs, strict=True)]

            _, buffers = tf.while_loop(
                lambda i, _: i < count, body, (0, buffers), parallel_iterations=1
            )
            return [buffer.stack() for buffer in buffers]

        if resident:
            rows = tf.TensorSpec([static, step.examples], tf.int64)
            return _concrete(window, whole, step.whole, rows, numbers=2)
        stacked = [tf.TensorSpec([static, *x.shape], x.dtype) for x in step.inputs]
        return _concrete(window, whole, stacked, tf.TensorSpec([0], tf.int64), numbers=2)

    def _single_function(self, step: "_TracedStep", resident: bool, static: int | None) -> Any:
        @tf.autograph.experimental.do_not_convert
        def single(arrays: Sequence[Any], chosen: Any, number: Any) -> Any:
            return step([tf.gather(x, chosen) for x in arrays] if resident else arrays, number)

        chosen = tf.TensorSpec([step.examples if resident else 0], tf.int64)
        xla, arrays = self.plan.compiler == XLA, step.whole if resident else step.inputs
        return _concrete(single, xla, arrays, chosen, numbers=1)


class _TracedStep:
    """A step as a traced function of a flat batch and its number; user code runs once."""

    def __init__(
        self,
        program: Program,
        batch: Any,
        known: set[int],
        for_xla: bool,
        sizes: Sequence[Sequence[int | None]] | None = None,
    ) -> None:
        self._names: tuple[list[str], list[str], list[str]] = ([], [], [])
        structure = structures.outline(batch)

        @tf.autograph.experimental.do_not_convert
        def step(flat: Sequence[Any], number: Any) -> list[Any]:
            result = run_step(program, structures.pack(structure, flat), number)
            parts = (result.values, result.weights, result.broken)
            self._names = tuple(list(part) for part in parts)  # type: ignore[assignment]
            return [tf.convert_to_tensor(x) for part in parts for x in part.values()]

        flat = structures.flatten(batch)
        self.examples = flat[0].shape[0] if flat and flat[0].shape.rank else None
        self.inputs = [tf.TensorSpec(x.shape, x.dtype) for x in flat]
        if sizes is not None:
            pairs = zip(sizes, self.inputs, strict=True)
            self.inputs = [tf.TensorSpec(shape, x.dtype) for shape, x in pairs]
        self.whole = [tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in flat if x.shape.rank]
        traced = tf.function(step, autograph=False)
        acts = observed(program.effects)
        xla = like_kernels() if for_xla else nullcontext()
        opened = nullcontext() if sizes is None else open_shapes_read()
        with step_functions(), acts, xla, opened as read:
            self._function = traced.get_concrete_function(self.inputs, tf.TensorSpec([], tf.int32))
        self.outputs = list(self._function.structured_outputs)
        self.reads = bool(read)
        hidden = [v for v in self._function.graph.variables if id(v) not in known]
        if any(v.name.startswith(("cond/", "while/")) for v in hidden):
            raise StateError(
                f"{program.name} creates {', '.join(v.name for v in hidden[:5])} in a branch that "
                "the first batch did not take: create variables before the first step"
            )
        program.refuse_hidden(hidden)

    def __call__(self, flat: Sequence[Any], number: Any) -> list[Any]:
        return self._function(flat, number)

    def compiled(self) -> Callable[[Sequence[Any], Any], list[Any]]:
        """Return the step as a function that XLA compiles separately."""

        @tf.autograph.experimental.do_not_convert
        def step(flat: Sequence[Any], number: Any) -> list[Any]:
            return self(flat, number)

        return tf.function(step, jit_compile=True, autograph=False)

    @property
    def convolves(self) -> bool:
        """Whether the step has convolutions."""
        return any(name.startswith(CONVOLUTIONS) for name in self.operations())

    def slow(self) -> str:
        """Return what XLA does slower than a graph on a CPU, as a verb; empty if nothing.

        Most of its convolutions and their gradients take about as long, and it gains by fusing the
        gradients of normalizations. It takes several times as long for gradients of maximum pooling
        and of depthwise convolutions, for narrow floats, and for convolutions in loops of the step.
        """
        found, outside = self.operations(), self._function.graph.as_graph_def().node
        nodes = [x for x in self._nodes() if x.op.startswith(CONVOLUTIONS)]
        if nodes and found & POOLS:
            return "pools"
        gains = "RsqrtGrad" in found and any("BackpropFilter" in x.op for x in nodes)
        gains &= len(nodes) == sum(x.op.startswith(CONVOLUTIONS) for x in outside)
        for node in nodes:
            gains &= node.attr["T"].type == FLOAT32 and not node.op.startswith("Depthwise")
        return "convolves" if nodes and not gains else ""

    def operations(self) -> set[str]:
        """Return the names of the step's operations."""
        return {node.op for node in self._nodes()}

    def _nodes(self) -> list[Any]:
        graph = self._function.graph.as_graph_def()
        return [*graph.node, *(node for f in graph.library.function for node in f.node_def)]

    @property
    def draws(self) -> bool:
        """Whether the step draws random numbers."""
        return any("Random" in x or x in other_numbers() for x in self.operations())

    def fetched(self, columns: Sequence[Any]) -> Results:
        """Return values and explicit weights by name, in order, and the violations."""
        following = iter(columns)
        # Names come first, so that `zip` ends before it takes a column too many.
        values, weights, broken = [dict(zip(x, following, strict=False)) for x in self._names]
        return values, weights, [message for message, flags in broken.items() if flags.any()]


def _concrete(function: Any, xla: bool, arrays: Any, chosen: Any, numbers: int) -> Any:
    scalars = [tf.TensorSpec([], tf.int32)] * numbers
    compiled = tf.function(function, jit_compile=True if xla else None, autograph=False)
    concrete = compiled.get_concrete_function(arrays, chosen, *scalars)
    captured: list[Any] = concrete.captured_inputs

    def call(arrays: Sequence[Any], chosen: Any, *numbers: Any) -> list[Any]:
        return concrete._call_flat([*arrays, chosen, *numbers], captured)

    return call


@contextmanager
def undone(program: Program) -> Generator[None]:
    """Restore every variable of a program afterwards."""
    variables = [getattr(v, "_value", v) for v in program.variables]
    kept = [tf.identity(variable) for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)


def device() -> str:
    """Return TensorFlow's default device: `"gpu"` or `"cpu"`."""
    return "gpu" if tf.config.list_logical_devices("GPU") else "cpu"


def on_accelerator() -> bool:
    """Return whether a window is copied to the device while another one runs."""
    return device() != "cpu"


def tensors(batch: Any) -> Any:
    """Convert a structure of arrays to tensors; float64 becomes Keras' float type, None stays."""

    def tensor(x: Any) -> Any:
        if tf.is_tensor(x):
            return x
        array = np.asarray(x)
        if array.dtype in CONVERTED:
            array = array.astype(keras.config.floatx())
        return tf.constant(array)  # as `convert_to_tensor`, with half the calls of Python

    return structures.mapped(tensor, batch)


def array(tensor: Any) -> Any:
    """Return a tensor as a NumPy array; NumPy cannot convert a single bfloat16 itself."""
    return np.asarray(tensor.numpy() if tf.is_tensor(tensor) and not tensor.shape.rank else tensor)


@cache
def _constant(value: Any, dtype: Any = None) -> Any:
    """Return a constant as a tensor, which is kept: to make one takes 15 calls of Python."""
    with tf.init_scope():
        return tf.constant(value, dtype)


def _on_device(rows: Rows) -> list[Any]:
    if rows.owner not in placed:
        placed[rows.owner] = structures.flatten(tensors(rows.arrays))
    return placed[rows.owner]


def _one(window: Window, index: int) -> tuple[list[Any], Any]:
    """Return the tensors to take one batch from, and its row indices."""
    if window.rows is None:
        return structures.flatten(tensors(window.batch(index))), _constant((), tf.int64)
    return _on_device(window.rows), tf.constant(window.rows.indices[index])


def _batch(arrays: Sequence[Any], chosen: Any, i: Any, resident: bool) -> list[Any]:
    """Return batch `i` inside a graph: rows of the data set, or one of the stacked batches."""
    if not resident:
        return [x[i] for x in arrays]
    rows = chosen[i]
    return [tf.gather(x, rows) for x in arrays]
