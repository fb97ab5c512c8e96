"""What a step of TensorFlow does besides computing, and state that it keeps in no variable.

A dry run must not act: it prints nothing, writes no summary, takes no element of an iterator and
calls no environment behind `tf.numpy_function`. It runs eagerly, as long as its operations only
compute. Operations without a result that act are left out. At the first one with a result, and at
the first one that changes a table, the dry run starts again as a trace, in which no operation runs:
a trace finds the tables of all branches in the same order for each batch, by which they are saved.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import numpy as np
import tensorflow as tf

from ...core import structures
from ...core.internals import wrapped
from ...core.tracebacks import in_one_line
from ...errors import TreadleError
from ..scope import DirectScope, Scope
from ..step_context import Build, Effects, StepContext, running
from .patches import INTERNALS, FuncGraph
from .stateful_draws import is_counted

_PYTHON: Final = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc"})
_INSERTS: Final = ("LookupTableInsertV2", "LookupTableImportV2")
_WITHOUT_RESULT: Final = frozenset(
    {
        *(*_INSERTS, "LookupTableRemoveV2", "PrintV2", "WriteSummary", "WriteScalarSummary"),
        *("WriteHistogramSummary", "WriteImageSummary", "WriteAudioSummary", "WriteGraphSummary"),
        *("WriteRawProtoSummary", "ImportEvent", "WriteFile", "Save", "SaveV2", "SaveSlices"),
        *("MergeV2Checkpoints", "QueueEnqueueV2", "QueueEnqueueManyV2", "QueueCloseV2"),
        *("BarrierInsertMany", "BarrierClose", "Stage", "MapStage", "OrderedMapStage"),
    }
)
_ITERATORS: Final = ("IteratorGetNext", "IteratorGetNextSync", "IteratorGetNextAsOptional")
_HELD: Final = {
    **dict.fromkeys(_ITERATORS, "an iterator, whose position"),
    **{
        f"Queue{name}V2": "a queue, whose elements"
        for name in ("Enqueue", "EnqueueMany", "Dequeue", "DequeueMany", "DequeueUpTo")
    },
    **dict.fromkeys(("BarrierInsertMany", "BarrierTakeMany"), "a barrier, whose elements"),
    **dict.fromkeys(
        ("Stage", "Unstage", "MapStage", "MapUnstage", "OrderedMapStage", "OrderedMapUnstage"),
        "a staging area, whose elements",
    ),
}
ACTING: Final = _PYTHON | _WITHOUT_RESULT | _HELD.keys() | {"Print"}
"""Operations that act on something else than variables."""


class ActingError(BaseException):
    """A dry run has reached an operation that acts, and whose result it needs."""


class LookupTable:
    """A lookup table that a step changes.

    Args:
        handle: The resource.
        keys: The dtype of its keys.
        values: The dtype of its values.
    """

    def __init__(self, handle: Any, keys: Any, values: Any) -> None:
        self.handle, self._keys, self._values = handle, keys, values

    def read(self) -> dict[str, Any]:
        """Return its keys and values as arrays."""
        found = tf.raw_ops.LookupTableExportV2(
            table_handle=self.handle, Tkeys=self._keys, Tvalues=self._values
        )
        return {"keys": _encoded(found.keys), "values": _encoded(found.values)}

    def write(self, saved: Mapping[str, Any]) -> None:
        """Replace all keys and values by what `read` returned."""
        keys, values = _decoded(saved["keys"]), _decoded(saved["values"])
        with tf.init_scope():
            tf.raw_ops.LookupTableImportV2(
                table_handle=self.handle,
                keys=tf.constant(keys, self._keys),
                values=tf.constant(values, self._values),
            )


def _encoded(tensor: Any) -> Any:
    """Return an array, or of strings their bytes and lengths."""
    array = tensor.numpy()
    if tensor.dtype != tf.string:
        return array
    texts = array.ravel().tolist()
    return {
        "bytes": np.frombuffer(b"".join(texts), np.uint8).copy(),
        "lengths": np.array([len(text) for text in texts], np.int64),
        "shape": list(array.shape),
    }


def _decoded(saved: Any) -> Any:
    if not isinstance(saved, dict):
        return saved
    ends = np.cumsum(saved["lengths"]).tolist()
    data, starts = saved["bytes"].tobytes(), [0, *ends]
    texts = [data[a:b] for a, b in zip(starts, ends, strict=False)]
    return np.array(texts, object).reshape(saved["shape"])


def _note(effects: Effects, op: str, inputs: Any, graph: Any = None) -> None:
    """Record what an operation does, unless it only computes or changes variables.

    Args:
        effects: The record.
        op: The type of the operation.
        inputs: Its inputs, of which the first may be a resource.
        graph: The graph that it is in; None if it runs eagerly.
    """
    if effects.paused or not (op in ACTING or is_counted(op)):
        return
    effects.acts |= op in ACTING
    held = _HELD.get(op)
    if op not in ACTING:
        effects.refuse(
            f"{effects.name} draws with {op}, which counts its calls where no checkpoint finds the "
            "count: draw with keras.random"
        )
    elif op in ("PyFunc", "EagerPyFunc"):
        effects.refuse(
            f"{effects.name} calls Python, whose own state no checkpoint holds: keep the state in "
            "variables, or pass stateful=False to tf.numpy_function if there is none"
        )
    elif op in _INSERTS:
        handle = _outside(graph, inputs[0])
        if handle is not None and effects.name == "eval_step":
            effects.refuse(
                "eval_step changes a table, which a checkpoint holds only if train_step changes "
                "it: count in a metric"
            )
        elif handle is not None:
            effects.keep(LookupTable(handle, inputs[1].dtype, inputs[2].dtype))
    elif held is not None and (not inputs or _outside(graph, inputs[0]) is not None):
        effects.refuse(
            f"{effects.name} uses {held} no checkpoint holds: pass the data to the loop, or "
            "keep it in variables"
        )


def _outside(graph: Any, handle: Any) -> Any:
    """Return the resource that a tensor of a graph stands for; None if the graph creates it."""
    while graph is not None and handle is not None and not hasattr(handle, "numpy"):
        handle = next((outer for outer, inner in graph.captures if inner is handle), None)
        graph = graph.outer_graph
    return handle


def observed(effects: Effects) -> AbstractContextManager[Any]:
    """Record what the operations of graphs do that are traced in this context."""

    def create(original: Any, graph: Any, op: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        _note(effects, op, inputs, graph)
        return original(graph, op, inputs, *args, **kwargs)

    return wrapped({INTERNALS["create_op"]: create})


@contextmanager
def without_acting(effects: Effects, ran: list[str] | None = None) -> Generator[None]:
    """Leave operations that act out of what runs eagerly in this context, in this thread.

    Args:
        effects: Where they are recorded.
        ran: Where to list operations that have to run: those with a result, and queues, which
            would wait forever for what is left out. None if these must not run.

    Raises:
        ActingError: At an operation that has to run and must not, or that changes a table.
    """
    local: list[Any] = []  # iterators that the step itself creates

    def execute(original: Any, ctx: Any, op: str, op_name: Any, *args: Any) -> Any:
        if not effects.paused and (op in ACTING or is_counted(op)):
            if any(args[0] is x for x in local if args):
                return original(ctx, op, op_name, *args)
            if op in ACTING and ran is None and (op in _INSERTS or op not in _WITHOUT_RESULT):
                raise ActingError
            _note(effects, op, args)
            if op in _WITHOUT_RESULT and (ran is None or op not in _HELD):
                return None
            if ran is not None and op in ACTING:
                ran.append(op)
        found = original(ctx, op, op_name, *args)
        if op.startswith("AnonymousIterator"):
            local.append(found[0] if isinstance(found, tuple) else found)
        return found

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly():
            effects.acts = True
            if ran is None:
                raise ActingError
            ran.append("PyFunc")
        return original(*args, **kwargs)

    with wrapped({INTERNALS["execute"]: execute, INTERNALS["py_func_common"]: call}):
        yield


def dry_run(
    function: Callable[[Any], Any], batch: Any, step: StepContext
) -> tuple[Scope, Sequence[tf.Variable]]:
    """Run a step without acting.

    Args:
        function: The step.
        batch: Its batch, of tensors.
        step: Its context, which records what the step does.

    Returns:
        The scope of the run, which knows the variables of Keras that the step uses, and the
        trainable ones of TensorFlow that it reads, among them those of Keras' variables.
    """
    build = step.build or Build()
    watcher = INTERNALS["VariableWatcher"].get() or tf.GradientTape
    # Only where a tape exists, TensorFlow tells which variables a traced function reads.
    tape = partial(tf.GradientTape, watch_accessed_variables=False)

    def attempt(scope: Scope, around: AbstractContextManager[Any]) -> Any:
        build.applied.clear()
        step.violations.clear()
        if step.ranges is not None:
            step.ranges.used.clear()
        with running(step), scope, around, tape(), watcher() as reads:
            # In a graph, also a batch has no values.
            function(batch if tf.executing_eagerly() else structures.mapped(tf.identity, batch))
            return scope, reads.watched_variables()

    try:
        return attempt(Scope(), without_acting(build.effects))
    except ActingError:
        pass
    try:
        found = attempt(DirectScope(), _traced(build.effects))
    except TreadleError:
        raise
    except Exception as error:
        ran, reason = list[str](), in_one_line(error)
        found = attempt(Scope(), without_acting(build.effects, ran))
        if ran:
            build.effects.repeated = (
                f"{build.effects.name} acts once more than it trains, such as by calling Python: "
                f"it had to run before training, since TensorFlow cannot trace it ({reason})"
            )
    else:
        if step.ranges is not None:
            step.ranges.used.clear()  # they have no values
    return found


@contextmanager
def _traced(effects: Effects) -> Generator[None]:
    """Trace operations into a graph that is dropped."""
    with observed(effects), FuncGraph("dry_run").as_default():
        yield
