"""Explanations of common mistakes, shown below the framework's error message."""

import re
from collections.abc import Iterator

from ..core.internals import TITLES
from ..core.process_settings import BACKENDS
from .user_code import failed_line, numpy_function

CONDITION = (
    "A Python `if`, `while`, `and` or bool() used a tensor, whose value is not known while "
    "the step is compiled: choose values with keras.ops.where, and branches that train with "
    "treadle.cond"
)
NUMBER = (
    "Python code used the value of a tensor (float(), int(), range() or the like), which is not "
    "known while the step is compiled: compute with keras.ops, for example keras.ops.cast, and "
    "return values to inspect from the step"
)
VALUE = (
    "The value of a tensor is not known while the step is compiled: return it from the step, and "
    "inspect it in a hook or in the history"
)
NUMPY = "A NumPy function was called with a tensor of the step: "
KEPT = (
    "A tensor of another call of the step was used: keep state between steps in a keras.Variable "
    "that is an attribute of the task"
)
MADE = (
    "The step creates a variable: create layers, metrics and optimizers once, in the task's "
    "__init__, and keep them as attributes; the first batch builds them"
)
DTYPES = (
    "TensorFlow computes nothing from tensors of two dtypes: cast one of them, for example with "
    "keras.ops.cast(x, y.dtype), or use the functions of keras.ops, such as keras.ops.multiply(x, "
    "y), which do"
)
INTEGERS = (
    "JAX computes with integers of 32 bits: write a larger number as a float, such as 2.0**40, or "
    "turn 64-bit types on with treadle.setup(precision='float64')"
)
OUT_OF_RANGE = (
    "An index or a label is out of range: treadle.Options(checked=True) checks every batch, and "
    "names the layer or the loss, and the step"
)
DEVICE_LOST = (
    "An assertion failed on the device, most likely because an index or a label is out of range. "
    "This process has lost its device: the weights there can no longer be read, and every later "
    "operation fails. Start the program again in a new process; treadle.Options(checked=True) "
    "finds such integers before they reach the device"
)
_DEVICE_LOST = (
    "device-side assert triggered",
    "an illegal memory access was encountered",
    "CUDA_ERROR_ASSERT",
    "CUDA_ERROR_ILLEGAL_ADDRESS",
)
MINIMIZE = (
    "Optimizers of Keras have no `minimize`: write treadle.minimize(objective, self.model, "
    "self.optimizer), where objective is a function without arguments that returns the loss"
)
OPTIMIZERS = (
    "configure_optimizers is not called: write self.optimizer = keras.optimizers.Adam(0.001) in "
    "the task's __init__"
)
LOG = 'A task has no `log`: end the step with `return {"loss": loss}`, which logs its values'
ONE_HOT = (
    "The labels seem to be one-hot vectors, and the loss needs class numbers: use "
    "keras.losses.CategoricalCrossentropy, or labels of one number a row, as from labels.argmax(-1)"
)
CLASSES = (
    "The labels seem to be class numbers, and the loss needs one-hot vectors: use "
    "keras.losses.SparseCategoricalCrossentropy, or keras.utils.to_categorical(labels)"
)
_SHAPES = re.compile(
    r"target\.shape=(?:torch\.Size\(\[|\()([\d, ]*)\]?\), "
    r"output\.shape=(?:torch\.Size\(\[|\()([\d, ]*)\]?\)"
)
METHODS = {"backward": "torch", "detach": "torch", "zero_grad": "torch", "requires_grad_": "torch"}


def common(error: BaseException, name: str) -> str:
    """Return the explanation of an error that can occur on every backend, or an empty string.

    Args:
        error: The exception that a step raised.
        name: The running backend.
    """
    text = str(error)
    if "create a variable while in a stateless scope" in text:
        return MADE
    if found := _SHAPES.search(text):
        return _labels(*(tuple(re.findall(r"\d+", shape)) for shape in found.groups()))
    if isinstance(error, AttributeError) and error.name == "minimize":
        return MINIMIZE
    if isinstance(error, AttributeError) and error.name in ("log", "log_dict"):
        return LOG if hasattr(error.obj, "train_step") else ""
    if isinstance(error, AttributeError) and error.name == "optimizer":
        return OPTIMIZERS if hasattr(error.obj, "configure_optimizers") else ""
    other = next((m for m in modules(error) if m in BACKENDS and m != name), None)
    if isinstance(error, AttributeError):
        other = METHODS.get(str(error.name), other)
    if name != "torch" and "must be Tensor, not" in text:  # C++ functions have no Python frames
        other = "torch"
    if other is None or other == name:
        return ""
    return (
        f"The step calls {TITLES[other]}, but Keras runs on {TITLES[name]}: write it with "
        f"keras.ops and treadle.gradients, which run everywhere, or run it with "
        f"KERAS_BACKEND={other}"
    )


def _labels(target: tuple[str, ...], output: tuple[str, ...]) -> str:
    """Explain why the shape of labels does not fit that of predictions; empty if unknown."""
    if target == output and len(output) > 1:
        return ONE_HOT
    return CLASSES if target in (output[:-1], (*output[:-1], "1")) else ""


def numpy_called(error: BaseException) -> str:
    """Return the explanation of an error of a NumPy function, with the user's line."""
    line = failed_line(error)
    name, instead = numpy_function(line)
    if not name:
        return NUMPY + "use the function of the same name in keras.ops"
    return f"{NUMPY}use {instead} for {name}, at {line}"


def device_lost(error: BaseException) -> bool:
    """Return whether an error means that this process can no longer use its device."""
    return any(text in str(error) for text in _DEVICE_LOST)


def modules(error: BaseException) -> Iterator[str]:
    """Yield the top-level packages of the frames in an error's traceback."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        trace = trace.tb_next


def innermost(error: BaseException) -> str:
    """Return the package of the frame that raised an error."""
    return list(modules(error))[-1] if error.__traceback__ is not None else ""
