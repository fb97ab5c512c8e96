"""The private parts of TensorFlow that Treadle uses, and its patches of TensorFlow and Keras.

**Moments.** `tf.nn.moments` stops the gradient at the mean. The first derivative of the variance is
still correct, but the second is not, so that gradient penalties and meta-learning through
BatchNormalization or LayerNormalization would be wrong.

`tests/conformance/test_patches.py` fails by name when one of the entries changes.
"""

import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from inspect import currentframe, getmro
from threading import get_ident
from types import FunctionType
from typing import Any

import numpy as np
import tensorflow as tf

from ...core.internals import Attributes, Internal, wrapped
from ...errors import StepError
from ..reads import copied
from ..step_context import context

_SEVERAL = "several processes cannot train together"
_CONTINUED = "tf.random is not continued exactly when a run resumes"
_UNSEEN = (
    "operations of TensorFlow that act, such as tf.print, are not seen, XLA compiles no step that "
    "draws random numbers, and tf.random is not continued exactly when a run resumes"
)
_UNSEEN_EAGERLY = (
    "operations of TensorFlow that act, such as tf.print, run once more while a step is built, and "
    "tf.random is not continued exactly in eager steps when a run resumes"
)


def _of_keras(path: str) -> tuple[str, ...]:
    """Return the places of a part of Keras' backend, whose modules moved in version 3.16."""
    return f"keras.src.backend.tensorflow.ops.{path}", f"keras.src.backend.tensorflow.{path}"


INTERNALS: dict[str, Internal] = {
    "moments": Internal(
        _of_keras("nn:_compute_moments"),
        "patched: second derivatives of the variance, see https://github.com/tensorflow/tensorflow/"
        "pull/19609",
        ("(x, axes, keepdims)",),
        lost="second derivatives through BatchNormalization and LayerNormalization, as of gradient "
        "penalties, are wrong",
    ),
    "value": Internal(
        ("keras:Variable.value",),
        "patched in steps: a read is a tensor, and not the variable, which may be assigned later",
    ),
    "convert_to_tensor": Internal(
        _of_keras("core:convert_to_tensor"),
        "patched in steps: it returns a variable itself",
        ("(x, dtype=None, sparse=None, ragged=None)", "(x, dtype=None, sparse=None)"),
    ),
    "keras_core": Internal(
        _of_keras("core"),
        "changed by `wide_floats`: TensorFlow converts Python's floats to float32",
        members=("tf",),
        lost='precision="float64" cannot be used',
    ),
    "FuncGraph": Internal(
        ("tensorflow:__internal__.FuncGraph",),
        "a graph that is traced for shapes, assignments or captured tensors, and then dropped; and "
        "the graph of a step, in which all sums over processes take the same resource",
        members=("captures", "outer_graph"),
    ),
    "call_function": Internal(
        ("tensorflow:function.__call__",),
        "patched: a `tf.function` that a step calls keeps no trace of another run of the step",
        ("(self, *args, **kwds)",),
        holder=lambda: _Function,
    ),
    "shuffle": Internal(
        ("keras.src.backend.tensorflow.random:shuffle",),
        "patched on several processes: they cannot shuffle a batch that they divide",
        ("(x, axis=0, seed=None)",),
        lost=_SEVERAL,
    ),
    "advance_generator": Internal(
        ("tensorflow:random.Generator._prepare_key_counter",),
        "patched on several processes: a generator advances by the numbers of the whole batch",
        ("(self, shape)",),
        lost=_SEVERAL,
    ),
    "get_seed": Internal(
        ("tensorflow.python.framework.random_seed:get_seed",),
        "patched in steps: TensorFlow's own seeds count the operations that came before",
        ("(op_seed)",),
        lost=_CONTINUED,
    ),
    "create_op": Internal(
        ("tensorflow.python.framework.func_graph:FuncGraph._create_op_internal",),
        "patched while a step is traced: operations that act are recorded, and those that draw are "
        "replaced: the kernels of XLA draw other numbers (https://github.com/tensorflow/tensorflow/"
        "issues/121243), some keep a count that no checkpoint finds, and each of several processes "
        "takes its rows of the draw for the whole batch",
        (
            "(self, op_type, inputs, dtypes=None, input_types=None, name=None, attrs=None, "
            "op_def=None, compute_device=True)",
        ),
        lost=_UNSEEN,
    ),
    "execute": Internal(
        ("tensorflow.python.pywrap_tfe:TFE_Py_FastPathExecute",),
        "patched in steps: as `create_op`; in dry runs, operations that act do not run",
        lost=_UNSEEN_EAGERLY,
    ),
    "VariableWatcher": Internal(
        ("tensorflow.python.eager.record:VariableWatcher",),
        "finds the variables of `tf` that a dry run reads; a tape would hold all its gradients",
        members=("watched_variables",),
        lost="the first step of a training needs more memory",
    ),
    "py_func_common": Internal(
        ("tensorflow.python.ops.script_ops:py_func_common",),
        "patched in dry runs: a function of NumPy is not called",
        ("(func, inp, Tout, stateful=True, name=None)",),
        lost="functions that tf.numpy_function calls run once more while a step is built",
    ),
    "assign": Internal(
        ("keras:Variable.assign",),
        "patched on several processes: the changes of assigned variables are combined",
        ("(self, value)",),
        lost=_SEVERAL,
    ),
    "shape": Internal(
        ("tensorflow.python.framework.tensor:Tensor.shape",),
        "patched while a graph of open sizes is traced, to see whether a step asks for them",
        lost="more batches of new shapes run as Python once more, to compare",
        loses="speed",
    ),
    "eager_context": Internal(
        ("tensorflow.python.eager.context:context",),
        "forms the cluster of several processes; the strategy that does it too starts a service "
        "that ends the process when another one fails, without a Python exception",
        ("()",),
        lost=_SEVERAL,
    ),
}

_DATA = "tensorflow.python.data.ops"

ATTRIBUTES: dict[str, Attributes] = {
    "tf.Module (prefix)": Attributes(
        ("_self_",),
        "tensorflow.python.trackable.base",
        "TensorFlow's own attributes, which list all other attributes again",
    ),
    "ConcreteFunction": Attributes(
        ("_call_flat",),
        "tensorflow.python.eager.polymorphic_function.concrete_function",
        "called with a list of tensors: checking and sorting arguments by name takes 0.2 ms a call",
    ),
    "tf.function": Attributes(
        ("_autograph",),
        "tensorflow.python.eager.polymorphic_function.polymorphic_function",
        "whether AutoGraph converts its Python",
    ),
    "tf.data iterator": Attributes(
        ("_iterator_resource",),
        f"{_DATA}.iterator_ops",
        "an argument of the graph that draws the batches of a window: passing the iterator itself "
        "takes 0.4 ms a call",
    ),
    "tf.data.Dataset": Attributes(
        ("_inputs",),
        f"{_DATA}.dataset_ops",
        "the parts of a pipeline, which may draw random numbers",
    ),
    "shuffled tf.data.Dataset": Attributes(
        ("_seed", "_seed2", "_reshuffle_each_iteration"),
        f"{_DATA}.shuffle_op",
        "whether each epoch has a new order, and its seeds, which are part of the identity of the "
        "data, and must be set to resume exactly",
    ),
    "random tf.data.Dataset": Attributes(
        ("_rerandomize",), f"{_DATA}.random_op", "whether each epoch has new numbers"
    ),
    "parallel tf.data.Dataset": Attributes(
        ("_deterministic",),
        f"{_DATA}.map_op",
        "elements of a pipeline in any order cannot be resumed",
    ),
}

# The base class of `tf.Module`, `tf.train.Checkpoint` and what `tf.saved_model.load` returns, whose
# attributes hold state.
AutoTrackable: Any = next(x for x in getmro(tf.Module) if issubclass(tf.train.Checkpoint, x))
FuncGraph: Any = INTERNALS["FuncGraph"].resolve()


def is_op_determinism_enabled() -> bool:
    """Return whether TensorFlow is deterministic: it then refuses operations without a seed."""
    with tf.Graph().as_default():
        try:
            tf.compat.v1.get_seed(None)
        except RuntimeError:
            return True
    return False


def true_moments() -> AbstractContextManager[Any]:
    """Make Keras compute a variance whose gradient can be differentiated again."""

    def moments(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
        mean = tf.reduce_mean(x, axes, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), axes, keepdims=keepdims)
        return (mean if keepdims else tf.squeeze(mean, axes)), variance

    return INTERNALS["moments"].replaced(moments)


@contextmanager
def values_read(written: frozenset[int]) -> Generator[None]:
    """Read variables as tensors in this context, in this thread, where the user reads them.

    Args:
        written: The ids of the variables that a step assigns.
    """

    def convert(original: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(x, *args, **kwargs)
        return tf.convert_to_tensor(found) if found is x and id(x) in written else found

    with (
        copied(INTERNALS["value"], written, lambda _, value: tf.convert_to_tensor(value)),
        wrapped({INTERNALS["convert_to_tensor"]: convert}),
    ):
        yield


@contextmanager
def open_shapes_read() -> Generator[list[str]]:
    """Record the modules that ask for an open shape, but for those of Keras and TensorFlow."""
    found: list[str] = []
    thread = get_ident()

    def shape(tensor: Any) -> Any:
        result = original.fget(tensor)
        frame: Any = currentframe()
        while frame.f_code.co_name in ("shape", "get_shape"):  # this function, and methods
            frame = frame.f_back
        module = str(frame.f_globals.get("__name__", ""))
        trusted = get_ident() != thread or _TRUSTED.match(module)
        if not trusted and not result.is_fully_defined():
            found.append(module)
        return result

    with INTERNALS["shape"].replaced(property(shape)) as original:
        if original is None:
            found.append("unknown")
        yield found


_TRUSTED = re.compile(r"(tensorflow|keras|treadle\.backends|treadle\.steps)(\.|$)")


class _WideFloats:
    """Stands for `tensorflow` where Keras converts values: Python's floats become float64."""

    def __getattr__(self, name: str) -> Any:
        return getattr(tf, name)

    def convert_to_tensor(self, value: Any, dtype: Any = None, name: Any = None) -> Any:
        """Convert a value to a tensor."""
        wide = dtype is None and _are_floats(value)
        return tf.convert_to_tensor(value, tf.float64 if wide else dtype, name=name)

    def cast(self, x: Any, dtype: Any) -> Any:
        """Cast a value, which TensorFlow itself makes a tensor of float32 first."""
        return tf.cast(tf.convert_to_tensor(x, tf.float64) if _are_floats(x) else x, dtype)


def _are_floats(value: Any) -> bool:
    """Return whether a value is a float of Python, or a list of numbers with at least one float."""
    if not isinstance(value, (list, tuple)):
        return type(value) is float
    kinds = set(map(type, tf.nest.flatten(value)))
    return float in kinds and kinds <= {int, float}


def wide_floats(on: bool) -> None:
    """Let Keras convert Python's floats to float64, or as TensorFlow does."""
    INTERNALS["keras_core"].resolve().tf = _WideFloats() if on else tf


_Function: Any = type(tf.function(lambda: None))


def _call_again(original: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    # A function of a SavedModel has traces, and no Python; those of TensorFlow need their graph.
    if type(function) is not _Function or _is_of_framework(function.python_function):
        return original(function, *args, **kwargs)
    args, kwargs = _as_declared(function, args, kwargs)
    build = context().build
    if build is not None:
        build.branches |= function._autograph
    if tf.executing_eagerly() or not function._autograph:
        found = function.python_function(*args, **kwargs)
    else:
        found = _converting(_features(function))(function.python_function, args, kwargs)
    return tf.nest.map_structure(_as_tensor, found)


@cache
def _converting(features: Any) -> Callable[..., Any]:
    """Return a function that calls another one, which AutoGraph converts with what it calls."""
    return tf.autograph.to_graph(_call, experimental_optional_features=features)


def _features(function: Any) -> tuple[Any, ...]:
    """Return the optional features of AutoGraph that a `tf.function` was made with."""
    kind = tf.autograph.experimental.Feature
    held = [x if isinstance(x, (list, tuple)) else (x,) for x in vars(function).values()]  # type: ignore[reportUnknownVariableType]
    return next((tuple(x) for x in held if x and all(isinstance(y, kind) for y in x)), ())  # type: ignore[reportUnknownArgumentType]


def _call(function: Any, args: Any, kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _as_tensor(x: Any) -> Any:
    """Return a number or an array as the tensor that a traced function returns."""
    numbers: Any = (bool, int, float, np.generic, np.ndarray)
    return tf.convert_to_tensor(x) if isinstance(x, numbers) else x


def _as_declared(function: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return arguments with numbers and arrays as the tensors that an input signature declares.

    Raises:
        StepError: A tensor is not what the signature declares.
    """
    if function.input_signature is None:
        return args, kwargs
    declared = function.function_spec.function_type
    bound = declared.bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        spec = declared.parameters[name].type_constraint
        if not isinstance(spec, tf.TensorSpec):
            continue
        if not tf.is_tensor(value):
            bound.arguments[name] = value = tf.convert_to_tensor(value, spec.dtype)
        if not spec.is_compatible_with(value):
            raise StepError(
                f"the input_signature of {function.python_function.__name__} declares {name} as "
                f"{spec.dtype.name} of shape {spec.shape}, but it is {value.dtype.name} of shape "
                f"{value.shape}: change the signature, or the data"
            )
    return bound.args, bound.kwargs


def _is_of_framework(function: Any) -> bool:
    """Return whether a function is one of TensorFlow or Keras, and not a layer or its method."""
    package = str(getattr(function, "__module__", "")).partition(".")[0]
    return isinstance(function, FunctionType) and package in ("tensorflow", "keras")


def traced_again() -> AbstractContextManager[Any]:
    """Make each `tf.function` of the user a part of the step in this context, as it is in eager.

    TensorFlow would use its first trace: of a dry run, which has no gradients; of a step with
    another number, other rows or other kernels. A new trace of its own could only take and return
    tensors.
    """
    return wrapped({INTERNALS["call_function"]: _call_again})
