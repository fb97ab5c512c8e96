"""The private parts of TensorFlow that Treadle uses, and its patches of TensorFlow and Keras.

**Moments.** `tf.nn.moments` stops the gradient at the mean. The first derivative of the variance is
still correct, but the second is not, so that gradient penalties and meta-learning through
BatchNormalization or LayerNormalization would be wrong.

`tests/conformance/test_patches.py` fails by name when one of the entries changes.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np
import tensorflow as tf

from ...core.internals import KERAS, Attribute, Internal, wrapped
from ...errors import StepError, TreadleError
from ..reads import copied
from ..step_context import context

_TENSORFLOW = "https://github.com/tensorflow/tensorflow/blob/master/tensorflow"
_ISSUES = "https://github.com/tensorflow/tensorflow/issues"
_DRAWS = "tensorflow.python.ops.gen_stateless_random_ops_v2"
_ROWS = "patched on several processes: each takes its rows of the draw for the whole batch"

INTERNALS: dict[str, Internal] = {
    "moments": Internal(
        "keras.src.backend.tensorflow.nn:_compute_moments",
        "patched: second derivatives of the variance, see https://github.com/tensorflow/tensorflow/"
        "pull/19609",
        f"{KERAS}/backend/tensorflow/nn.py",
        "(x, axes, keepdims)",
    ),
    "value": Internal(
        "keras.src.backend.common:KerasVariable.value",
        "patched in steps: a read is a tensor, and not the variable, which may be assigned later",
        f"{KERAS}/backend/common/variables.py",
    ),
    "convert_to_tensor": Internal(
        "keras.src.backend.tensorflow.core:convert_to_tensor",
        "patched in steps: it returns a variable itself",
        f"{KERAS}/backend/tensorflow/core.py",
        "(x, dtype=None, sparse=None, ragged=None)",
    ),
    "keras_core": Internal(
        "keras.src.backend.tensorflow.core",
        "changed by `wide_floats`: TensorFlow converts Python's floats to float32",
        f"{KERAS}/backend/tensorflow/core.py",
        members=("tf",),
    ),
    "uniform": Internal(
        "tensorflow.python.ops.gen_stateless_random_ops_v2:stateless_random_uniform_v2",
        "patched: XLA draws other numbers than the kernels",
        f"{_ISSUES}/121243",
        "(shape, key, counter, alg, dtype=tf.float32, name=None)",
    ),
    "normal": Internal(
        "tensorflow.python.ops.gen_stateless_random_ops_v2:stateless_random_normal_v2",
        "patched: XLA draws other numbers than the kernels",
        f"{_ISSUES}/121243",
        "(shape, key, counter, alg, dtype=tf.float32, name=None)",
    ),
    "full_int": Internal(
        "tensorflow.python.ops.gen_stateless_random_ops_v2:stateless_random_uniform_full_int_v2",
        "the bits that both conversions start from, for a given key and counter",
        f"{_TENSORFLOW}/core/ops/stateless_random_ops_v2.cc",
        "(shape, key, counter, alg, dtype=tf.uint64, name=None)",
    ),
    "key_counter": Internal(
        "tensorflow.python.ops.random_ops_util:get_key_counter_alg",
        "patched: an algorithm selected at run time makes XLA compile all of them",
        f"{_TENSORFLOW}/python/ops/random_ops_util.py",
        "(seed, alg)",
    ),
    "FuncGraph": Internal(
        "tensorflow:__internal__.FuncGraph",
        "a graph that is traced for shapes, assignments or captured tensors, and then dropped; and "
        "the graph of a step, in which all sums over processes take the same resource",
        f"{_TENSORFLOW}/python/framework/func_graph.py",
        members=("as_default", "external_captures", "captures", "capture", "outer_graph"),
    ),
    "AutoTrackable": Internal(
        "tensorflow:__internal__.tracking.AutoTrackable",
        "the base class of `tf.Module`, `tf.random.Generator`, `tf.train.Checkpoint` and of what "
        "`tf.saved_model.load` returns, whose attributes hold state",
        f"{_TENSORFLOW}/python/trackable/autotrackable.py",
    ),
    "call_function": Internal(
        "tensorflow.python.eager.polymorphic_function.polymorphic_function:Function.__call__",
        "patched: a `tf.function` that a step calls keeps no trace of another run of the step",
        f"{_TENSORFLOW}/python/eager/polymorphic_function/polymorphic_function.py",
        "(self, *args, **kwds)",
    ),
    "autograph": Internal(
        "tensorflow.python.eager.polymorphic_function.autograph_util:py_func_from_autograph",
        "a `tf.function` is converted as TensorFlow does, and becomes part of the step's graph",
        f"{_TENSORFLOW}/python/eager/polymorphic_function/autograph_util.py",
        "(python_func, autograph_options=None)",
    ),
    "autograph_status": Internal(
        "tensorflow.python.autograph.core.ag_ctx",
        "conversion is off in the graph of a step, and on in a `tf.function` that it calls",
        f"{_TENSORFLOW}/python/autograph/core/ag_ctx.py",
        members=("ControlStatusCtx", "Status"),
    ),
    "is_op_determinism_enabled": Internal(
        "tensorflow.python.framework.config:is_op_determinism_enabled",
        "XLA is not used under op determinism, which has no public reader",
        f"{_TENSORFLOW}/python/framework/config.py",
        "()",
    ),
    "truncated_normal": Internal(
        f"{_DRAWS}:stateless_truncated_normal_v2",
        _ROWS,
        f"{_TENSORFLOW}/core/ops/stateless_random_ops_v2.cc",
        "(shape, key, counter, alg, dtype=tf.float32, name=None)",
    ),
    "uniform_int": Internal(
        f"{_DRAWS}:stateless_random_uniform_int_v2",
        _ROWS,
        f"{_TENSORFLOW}/core/ops/stateless_random_ops_v2.cc",
        "(shape, key, counter, alg, minval, maxval, name=None)",
    ),
    "gamma": Internal(
        f"{_DRAWS}:stateless_random_gamma_v3",
        _ROWS,
        f"{_TENSORFLOW}/core/ops/stateless_random_ops_v2.cc",
        "(shape, key, counter, alg, alpha, name=None)",
    ),
    "binomial": Internal(
        "tensorflow.python.ops.gen_stateless_random_ops:stateless_random_binomial",
        _ROWS,
        f"{_TENSORFLOW}/core/ops/stateless_random_ops.cc",
        "(shape, seed, counts, probs, dtype=tf.int64, name=None)",
    ),
    "multinomial": Internal(
        "tensorflow.python.ops.gen_stateless_random_ops:stateless_multinomial",
        _ROWS,
        f"{_TENSORFLOW}/core/ops/stateless_random_ops.cc",
        "(logits, num_samples, seed, output_dtype=tf.int64, name=None)",
    ),
    "shuffle": Internal(
        "keras.src.backend.tensorflow.random:shuffle",
        "patched on several processes: they cannot shuffle a batch that they divide",
        f"{KERAS}/backend/tensorflow/random.py",
        "(x, axis=0, seed=None)",
    ),
    "get_seed": Internal(
        "tensorflow.python.framework.random_seed:get_seed",
        "patched in steps: TensorFlow's own seeds count the operations that came before",
        f"{_TENSORFLOW}/python/framework/random_seed.py",
        "(op_seed)",
    ),
    "global_seed": Internal(
        "tensorflow.python.eager.context:global_seed",
        "the seed of `tf.random.set_seed` has no public reader",
        f"{_TENSORFLOW}/python/eager/context.py",
        "()",
    ),
    **{
        f"own.{name}": Internal(
            f"tensorflow.python.ops.gen_random_ops:{name}",
            "patched in steps: the kernel keeps a count that no checkpoint finds",
            f"{_TENSORFLOW}/python/ops/random_ops.py",
            f"({before}, seed=0, seed2=0, {after}name=None)",
        )
        for name, before, after in (
            ("random_standard_normal", "shape, dtype", ""),
            ("truncated_normal", "shape, dtype", ""),
            ("random_uniform", "shape, dtype", ""),
            ("random_uniform_int", "shape, minval, maxval", ""),
            ("multinomial", "logits, num_samples", "output_dtype=tf.int64, "),
            ("random_gamma", "shape, alpha", ""),
            ("random_poisson_v2", "shape, rate", "dtype=tf.int64, "),
            ("random_shuffle", "value", ""),
        )
    },
    "create_op": Internal(
        "tensorflow.python.framework.func_graph:FuncGraph._create_op_internal",
        "patched while a step is traced: operations that act are recorded",
        f"{_TENSORFLOW}/python/framework/func_graph.py",
        "(self, op_type, inputs, dtypes=None, input_types=None, name=None, attrs=None, "
        "op_def=None, compute_device=True)",
    ),
    "execute": Internal(
        "tensorflow.python.pywrap_tfe:TFE_Py_FastPathExecute",
        "patched in dry runs: operations that act are recorded, and not run",
        f"{_TENSORFLOW}/python/eager/pywrap_tfe_src.cc",
    ),
    "py_func_common": Internal(
        "tensorflow.python.ops.script_ops:py_func_common",
        "patched in dry runs: a function of NumPy is not called",
        f"{_TENSORFLOW}/python/ops/script_ops.py",
        "(func, inp, Tout, stateful=True, name=None)",
    ),
    "keras_moments": Internal(
        "keras.src.backend.tensorflow.nn:moments",
        "patched on several processes: the moments are those of the whole batch",
        f"{KERAS}/backend/tensorflow/nn.py",
        "(x, axes, keepdims=False, synchronized=False)",
    ),
    "assign": Internal(
        "keras.src.backend.common:KerasVariable.assign",
        "patched on several processes: the changes of assigned variables are combined",
        f"{KERAS}/backend/common/variables.py",
        "(self, value)",
    ),
    "eager_context": Internal(
        "tensorflow.python.eager.context:context",
        "forms the cluster of several processes; the strategy that does it too starts a service "
        "that ends the process when another one fails, without a Python exception",
        f"{_TENSORFLOW}/python/eager/context.py",
        "()",
    ),
    "server_protocol": Internal(
        "tensorflow.core.protobuf.tensorflow_server_pb2",
        "the addresses of the cluster",
        f"{_TENSORFLOW}/core/protobuf/tensorflow_server.proto",
        members=("ServerDef",),
    ),
    "xplane_pb2": Internal(
        "tensorflow.tsl.profiler.protobuf.xplane_pb2",
        "reads the profiler's files without the package xprof",
        "https://github.com/tensorflow/tensorflow/blob/master/third_party/xla/third_party/tsl/tsl/"
        "profiler/protobuf/xplane.proto",
        members=("XSpace",),
    ),
}

_DATASET = f"{_TENSORFLOW}/python/data/ops"

ATTRIBUTES: dict[str, Attribute] = {
    "_self_": Attribute(
        "tf.Module (prefix)",
        "TensorFlow's own attributes, which list all other attributes again",
        f"{_TENSORFLOW}/python/trackable/base.py",
    ),
    "_averages": Attribute(
        "tf.train.ExponentialMovingAverage",
        "the averages are part of the state, each by a reference to its variable",
        f"{_TENSORFLOW}/python/training/moving_averages.py",
    ),
    "_call_flat": Attribute(
        "ConcreteFunction",
        "called with a list of tensors: checking and sorting arguments by name takes 0.2 ms a call",
        f"{_TENSORFLOW}/python/eager/polymorphic_function/concrete_function.py",
    ),
    **{
        name: Attribute(
            "tf.function",
            "whether and how AutoGraph converts its Python",
            f"{_TENSORFLOW}/python/eager/polymorphic_function/polymorphic_function.py",
        )
        for name in ("_autograph", "_experimental_autograph_options")
    },
    "_iterator_resource": Attribute(
        "tf.data iterator",
        "an argument of the graph that draws the batches of a window: passing the iterator itself "
        "takes 0.4 ms a call",
        f"{_DATASET}/iterator_ops.py",
    ),
    "_inputs": Attribute(
        "tf.data.Dataset", "the parts of a pipeline", f"{_DATASET}/dataset_ops.py"
    ),
    "_functions": Attribute(
        "tf.data.Dataset", "finds functions that draw random numbers", f"{_DATASET}/dataset_ops.py"
    ),
    "_seed": Attribute(
        "shuffled tf.data.Dataset",
        "the seeds are part of the identity of the data, and must be set to resume exactly",
        f"{_DATASET}/shuffle_op.py",
    ),
    "_seed2": Attribute(
        "shuffled tf.data.Dataset",
        "the seeds are part of the identity of the data, and must be set to resume exactly",
        f"{_DATASET}/shuffle_op.py",
    ),
    "_reshuffle_each_iteration": Attribute(
        "shuffled tf.data.Dataset",
        "whether each epoch has a new order",
        f"{_DATASET}/shuffle_op.py",
    ),
    "_rerandomize": Attribute(
        "random tf.data.Dataset",
        "whether each epoch has new numbers",
        f"{_DATASET}/random_op.py",
    ),
    "_deterministic": Attribute(
        "parallel tf.data.Dataset",
        "elements of a pipeline in any order cannot be resumed",
        f"{_DATASET}/map_op.py",
    ),
    "_num_parallel_calls": Attribute(
        "parallel tf.data.Dataset",
        "functions that draw random numbers in parallel cannot be resumed",
        f"{_DATASET}/map_op.py",
    ),
}

AutoTrackable: Any = INTERNALS["AutoTrackable"].resolve()
FuncGraph: Any = INTERNALS["FuncGraph"].resolve()
is_op_determinism_enabled: Any = INTERNALS["is_op_determinism_enabled"].resolve()
eager_context: Any = INTERNALS["eager_context"].resolve()
server_protocol: Any = INTERNALS["server_protocol"].resolve()
xplane_pb2: Any = INTERNALS["xplane_pb2"].resolve()


@contextmanager
def true_moments() -> Generator[None]:
    """Make Keras compute a variance whose gradient can be differentiated again."""

    def moments(x: Any, axes: Any, keepdims: bool) -> tuple[Any, Any]:
        mean = tf.reduce_mean(x, axes, keepdims=True)
        variance = tf.reduce_mean(tf.square(x - mean), axes, keepdims=keepdims)
        return (mean if keepdims else tf.squeeze(mean, axes)), variance

    with INTERNALS["moments"].replaced(moments):
        yield


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
        found = _converted(function)(*args, **kwargs)
    return tf.nest.map_structure(_as_tensor, found)


def _converted(function: Any) -> Callable[..., Any]:
    """Return the Python of a `tf.function`, converted by AutoGraph as the function declares."""
    status: Any = INTERNALS["autograph_status"].resolve()
    converted = INTERNALS["autograph"].resolve()(
        function.python_function, function._experimental_autograph_options
    )

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            with status.ControlStatusCtx(status.Status.ENABLED):
                return converted(*args, **kwargs)
        except Exception as error:  # AutoGraph copies an exception, without its notes and fields
            if isinstance(error.__context__, TreadleError):
                raise error.__context__ from None
            raise

    return call


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


@contextmanager
def traced_again() -> Generator[None]:
    """Make each `tf.function` of the user a part of the step in this context, as it is in eager.

    TensorFlow would use its first trace: of a dry run, which has no gradients; of a step with
    another number, other rows or other kernels. A new trace of its own could only take and return
    tensors.
    """
    with wrapped({INTERNALS["call_function"]: _call_again}):
        yield
