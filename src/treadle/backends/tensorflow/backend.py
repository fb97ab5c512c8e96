"""The TensorFlow backend: a step is traced once, and a window is a graph loop over it."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...core.keras_internals import stateless_scope
from ...core.options import Options
from ...core.process_settings import cores
from ...errors import StepError
from .. import hints
from ..base import Backend, Caller, Executor, RefusedDistribution
from ..eager import EagerExecutor
from ..plans import XLA
from ..program import Program
from ..recomputing import Recomputed, no_assignments, no_layers
from ..scope import DirectScope, Scope, hand_losses, hand_outward, restored
from ..step_context import StepContext, deeper, running
from ..traces import newest, write_trace
from ..types import Losses, Tensor, Variable, unweighted
from .calls import GraphCaller
from .control_flow import TensorFlowControlFlow
from .effects import dry_run
from .patches import AutoTrackable, FuncGraph, true_moments, values_read, wide_floats
from .profile import spans
from .stateful_draws import step_functions
from .windows import GRAPH, TensorFlowExecutor, array, device, placed, tensors


class TensorFlowBackend(TensorFlowControlFlow, Backend):
    """The backend for Keras on TensorFlow."""

    name = "tensorflow"
    bfloat16_pays = True  # it was measured to be 1.5 times as fast
    # XLA compiles a small step in the time of 30 of its steps as Python, a graph in that of 10.
    rare_steps: Mapping[str, int] = {XLA: 32, GRAPH: 32}
    opens_sizes = True

    def is_native_variable(self, thing: Any) -> bool:
        """Return whether this is a bare `tf.Variable`."""
        return isinstance(thing, tf.Variable)

    def native_children(self, thing: Any) -> Mapping[str, Any] | None:
        """Return the attributes of a `tf.Module` or another object that TensorFlow tracks."""
        if isinstance(thing, tf.train.ExponentialMovingAverage):
            return {"averages": next(x for x in vars(thing).values() if isinstance(x, dict))}
        if not isinstance(thing, AutoTrackable):
            return None
        bookkeeping = "_self_"  # TensorFlow's own attributes, which list all others again
        return {k: v for k, v in vars(thing).items() if not k.startswith(bookkeeping)}

    def differentiate(
        self,
        function: Callable[[Sequence[Tensor]], tuple[Losses, Any]],
        variables: Sequence[Variable],
        inputs: Sequence[Tensor],
        groups: Mapping[str, Sequence[int]],
    ) -> tuple[Any, dict[str, list[Tensor | None]]]:
        """Differentiate with a `GradientTape` over the variables, or over their scope's values."""
        scoped = stateless_scope() is not None
        with (
            tf.GradientTape(persistent=len(groups) > 1, watch_accessed_variables=False) as tape,
            deeper() as nested,
        ):
            if scoped:  # values in a scope are tensors: copy them, to differentiate at the copies
                sources = [tf.identity(v.value) for v in variables]
                leaves = Scope(zip(variables, sources, strict=True), differentiated=True)
            else:
                sources = [getattr(v, "_value", v) for v in variables]
                leaves = None
            inputs = [tf.identity(x) for x in inputs]
            for source in [*sources, *inputs]:
                tape.watch(source)
            with leaves or nullcontext(), true_moments() if nested else nullcontext():
                weighted, result = function(inputs)
                losses = {name: unweighted(loss) for name, loss in weighted.items()}
        if leaves is not None:
            hand_outward(leaves.changed())
            hand_losses(leaves)
        gradients: dict[str, list[Tensor | None]] = {}
        for name, group in groups.items():
            chosen = [[*sources, *inputs][i] for i in group]
            with no_assignments(), no_layers():
                found: list[Any] = tape.gradient(losses[name], chosen)
            # Embeddings give IndexedSlices; every optimizer and clipping supports dense gradients.
            gradients[name] = [None if g is None else tf.convert_to_tensor(g) for g in found]
        return result, gradients

    def reads_of(self, written: frozenset[int]) -> AbstractContextManager[Any]:
        """Return a context in which these variables are read as tensors."""
        return values_read(written)

    def place(self) -> Any:
        """Return the graph that is being built."""
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def remat(
        self, function: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
    ) -> list[Tensor]:
        """Run `tf.recompute_grad`, which only differentiates by inputs and variables."""
        again = Recomputed(function)
        values = [tf.convert_to_tensor(value) for _, value in again.held]
        with again.surroundings():
            _refuse_others(function, [*values, *inputs])

        @tf.recompute_grad
        def run(*tensors: Tensor) -> Any:
            return again(tensors[len(values) :], tensors[: len(values)])

        result = run(*values, *inputs)
        again.release()
        return result

    def abstract_run(self, function: Callable[[Any], Any], batch: Any, step: StepContext) -> Scope:
        """Run a real batch eagerly in a scope; native variables are restored afterwards.

        At an operation that acts, and whose result the step needs, it is traced instead.
        """
        made: list[tuple[tf.Variable, Any]] = []

        def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            variable = next_creator(**kwargs)
            with tf.init_scope():
                made.append((variable, tf.identity(variable)))
            return variable

        before = [
            (v, tf.identity(v)) for v in step.variables.values() if isinstance(v, tf.Variable)
        ]
        try:
            with step_functions(), tf.variable_creator_scope(creator):
                scope, read = dry_run(function, tensors(batch), step)
        finally:
            for variable, value in [*before, *made]:
                variable.assign(value)
        if step.build is not None and step.build.enters_branches:
            scope.note(_traced(function, batch, step))
        elif step.build is not None:
            step.build.skips_branches = True
        updated = step.build.read if step.build is not None else {}
        keras_own = {
            id(v._value)
            for v in (*scope.foreign.values(), *step.variables.values(), *updated.values())
            if isinstance(v, keras.Variable)
        }
        for variable in read:
            if id(variable) not in keras_own:
                scope.foreign[id(variable)] = variable
        return scope

    def abstract_update(
        self, function: Callable[[Sequence[Any]], Any], tensors: Sequence[Any]
    ) -> Scope:
        """Trace the call; if that fails, run it and restore the variables."""
        try:
            with FuncGraph("update").as_default(), DirectScope() as scope:
                function(tensors)
        except Exception:
            scope = restored(lambda: function(tensors), self)
        return scope

    def build_model(self, model: Any, batch: Any) -> None:
        """Do nothing: Keras' `fit` builds a model where it traces the step, as the dry run does."""

    def model_step(self, model: Any, name: str, batch: Any) -> Any:
        """Call the model's step, which changes variables in place.

        The size of the batch is hidden from the step, as in `fit`: otherwise Keras would average
        the losses of several outputs over examples.
        """
        loss = getattr(model, "_compile_loss", None)
        if loss is not None and loss.metrics and not tf.executing_eagerly():
            batch = tf.nest.map_structure(_of_unknown_size, batch)
        return getattr(model, name)(batch)

    def executor(self, program: Program, options: Options) -> Executor:
        """Return the executor of the graph loop, or the eager one."""
        return executor(program, options, self)

    def open_executor(
        self, program: Program, sizes: Sequence[Sequence[int | None]]
    ) -> Executor | None:
        """Return the executor of the graph loop, for batches that differ in sizes."""
        return TensorFlowExecutor(program, sizes=sizes)

    def caller(
        self, program: Program, reads: Sequence[Variable] | None = None, soon: bool = True
    ) -> Caller:
        """Compile a function; its assignments are discarded."""
        return GraphCaller(program)

    def explain(self, error: Exception) -> str:
        """Explain errors of tracing, and extract the cause from a graph's long error message."""
        text = str(error)
        if isinstance(error, tf.errors.OperatorNotAllowedInGraphError):
            return hints.CONDITION if "bool" in text else hints.NUMBER
        if _TWO_DTYPES.search(text):
            return hints.DTYPES
        if isinstance(error, tf.errors.OpError):
            outside = "is not in [0," in text or "Received a label value of" in text
            return ". ".join(filter(None, [_sentence(text), hints.OUT_OF_RANGE if outside else ""]))
        if isinstance(error, NotImplementedError) and "Cannot convert a symbolic" in text:
            return hints.numpy_called(error)
        if isinstance(error, TypeError) and "SymbolicTensor" in text:
            return hints.NUMBER
        if isinstance(error, AttributeError) and error.name in ("numpy", "item", "tolist"):
            return hints.VALUE
        return hints.common(error, self.name)

    def refused_distribution(
        self, variables: Sequence[Variable], built: bool
    ) -> RefusedDistribution | None:
        """Refuse an active strategy, or one that a variable was created under."""
        remedy = (
            "create the task, and train, outside of strategy.scope(). Several devices train "
            "with treadle.setup(devices=…) on JAX, or in several processes (treadle launch)"
        )
        if tf.distribute.has_strategy():
            kind = _kind(tf.distribute.get_strategy())
            return RefusedDistribution(f"runs under tf.distribute.{kind}, {_ONE}", remedy)
        for variable in variables:
            value = getattr(variable, "_value", variable)
            if isinstance(value, tf.distribute.DistributedValues):
                kind = _kind(getattr(value, "distribute_strategy", None))
                fault = f"was created under tf.distribute.{kind}, {_ONE}"
                return RefusedDistribution(fault, remedy, variable)
        return None

    def computes_on(self) -> dict[str, Any]:
        """Return the devices and the number of threads."""
        gpus = len(tf.config.list_logical_devices("GPU"))
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        devices = f"{gpus} × gpu" if gpus else "cpu"
        return {"devices": devices, "threads": threads or cores()}

    def use_deterministic_algorithms(self, late: bool) -> None:
        """Switch TensorFlow's deterministic operators on; operators without one raise an error."""
        tf.config.experimental.enable_op_determinism()

    def use_float64(self, on: bool) -> None:
        """Let Keras convert Python's floats to float64, which TensorFlow rounds to float32."""
        placed.clear()
        wide_floats(on)

    @contextmanager
    def trace(self, directory: Path) -> Generator[None]:
        """Let TensorFlow's profiler record, and write its events as a Perfetto trace too."""
        tf.profiler.experimental.start(str(directory))
        try:
            yield
        finally:
            tf.profiler.experimental.stop()
        file = newest(directory, "*.xplane.pb")
        write_trace(spans(file.read_bytes()), directory)

    def read(self, variable: Variable) -> Any:
        """Return a copy of a variable's value as a NumPy array."""
        return np.asarray(getattr(variable, "_value", variable).numpy())  # numpy() copies

    def stage(self, variable: Variable, buffer: Any) -> Any:
        """Copy a variable's value into a buffer."""
        value = array(getattr(variable, "_value", variable).value())
        if buffer is None:
            return np.array(value)
        np.copyto(buffer, value)
        return buffer

    def write(self, variable: Variable, value: Any) -> None:
        """Set a variable."""
        target = getattr(variable, "_value", variable)
        target.assign(tf.cast(value, target.dtype))

    def keep(self, variable: Variable) -> Any:
        """Return a copy of a variable's value."""
        return tf.identity(getattr(variable, "_value", variable))

    def finite(self, variables: Sequence[Variable]) -> Sequence[bool]:
        """Check each variable, and fetch all results at once; on a CPU with NumPy, for speed."""
        values = [getattr(v, "_value", v).value() for v in variables]
        if device() == "cpu":
            return [bool(np.isfinite(array(x)).all()) for x in values]
        found = [tf.reduce_all(tf.math.is_finite(x)) for x in values]
        return tf.stack(found).numpy().tolist() if values else []

    def to_numpy(self, tensor: Any) -> Any:
        """Return a tensor as a NumPy array."""
        return array(tensor)

    def to_device(self, array: Any) -> Tensor:
        """Convert an array to a tensor; float64 becomes Keras' float type."""
        return tensors(array)


_ONE = "but a loop trains on one device"
_TWO_DTYPES = re.compile(
    r"was expected to be a \w+ tensor but is a \w+ tensor|that does not match type \w+ of argument"
)


def _of_unknown_size(leaf: Any) -> Any:
    """Return a tensor whose first dimension is unknown while a step is traced."""
    if not isinstance(leaf, tf.Tensor) or not leaf.shape.rank:
        return leaf
    return tf.compat.v1.placeholder_with_default(leaf, [None, *leaf.shape[1:]])


def _kind(strategy: Any) -> str:
    return "Strategy" if strategy is None else type(strategy).__name__


def _traced(function: Callable[[Any], Any], batch: Any, step: StepContext) -> Scope:
    """Trace a step with all of its branches; the variables that it creates have values."""

    def creator(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        with tf.init_scope():
            return next_creator(**kwargs)

    scope, unchecked = Scope(), replace(step, ranges=None)  # which reads the values of indices
    with (
        suppress(Exception),  # what cannot be traced is explained when the step is compiled
        FuncGraph("branches").as_default(),
        tf.variable_creator_scope(creator),
        step_functions(),
        running(unchecked),
        scope,
    ):
        function(tensors(batch))
    return scope


def _refuse_others(function: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Reject a function that uses a tensor of the step that is not passed as an argument.

    Raises:
        StepError: It uses such a tensor, which would get no gradient.
    """
    if tf.executing_eagerly():
        return  # constants are tensors too then, so captured tensors cannot be told apart
    with FuncGraph("remat") as graph, graph.as_default(), Scope():
        function(*inputs)
    passed = {id(x) for x in inputs}
    for tensor, _ in graph.captures:
        made = not tensor.dtype.is_floating or getattr(tensor, "op", None) is None
        if not made and id(tensor) not in passed and tensor.op.type != "Const":
            raise StepError(
                f"the function of treadle.remat computes with a tensor of shape {tensor.shape} "
                "that was made outside of it, which on TensorFlow would get no gradient: pass it "
                "as an argument"
            )


def _sentence(message: str) -> str:
    """Return the cause at the end of a message that starts with the nodes' definitions."""
    head = message.partition("\n\t [[")[0].rstrip()
    last = head.rpartition("\n")[2].strip()
    return f"TensorFlow reports: {last}" if last != message.strip() else ""


def executor(program: Program, options: Options, backend: Backend, refusal: str = "") -> Executor:
    """Return the executor of the graph loop, or the eager one.

    Args:
        program: The step.
        options: The options of the loop.
        backend: Converts arrays and tensors.
        refusal: Why XLA must not compile the step, as a clause; empty if it may.
    """
    if options.execution == "eager":
        return EagerExecutor(program, around, backend.to_device, backend.to_numpy, device())
    return TensorFlowExecutor(program, refusal)


def around(program: Program) -> AbstractContextManager[Any]:
    """Return the context of an eager step: a `tf.function` that it calls is Python, as it is."""
    return step_functions()


BACKEND = TensorFlowBackend()
