"""What backends say about common mistakes, below what the framework says."""

from collections.abc import Iterator

from ..core.backend_choice import BACKENDS

CONDITION = (
    "A Python `if`, `while`, `and` or bool() looked at a tensor, whose value is not known while "
    "the step is compiled: choose values with keras.ops.where, and branches that train with "
    "treadle.cond"
)
NUMBER = (
    "Python asked for the value of a tensor (float(), int(), range() or the like), which is not "
    "known while the step is compiled: compute with keras.ops, for example keras.ops.cast, and "
    "return from the step what is to be looked at"
)
VALUE = (
    "The value of a tensor is not known while the step is compiled: return it from the step, and "
    "look at it in a hook or in the history"
)
NUMPY = (
    "A function of NumPy's was given a tensor of the step: use the one of the same name in "
    "keras.ops"
)
KEPT = (
    "A tensor of another call of the step was used: what is to be kept from step to step belongs "
    "in a keras.Variable that the task holds"
)
MADE = (
    "The step makes a variable: make layers, metrics and optimizers once, in the task's __init__, "
    "and keep them as attributes; the first batch builds them"
)
TITLES = {"tensorflow": "TensorFlow", "jax": "JAX", "torch": "PyTorch"}
METHODS = {"backward": "torch", "detach": "torch", "zero_grad": "torch", "requires_grad_": "torch"}


def common(error: BaseException, name: str) -> str:
    """Return what is known of an error whatever the backend, or nothing.

    Args:
        error: What a step raised.
        name: The backend that runs.
    """
    text = str(error)
    if "create a variable while in a stateless scope" in text:
        return MADE
    other = next((m for m in modules(error) if m in BACKENDS and m != name), None)
    if isinstance(error, AttributeError):
        other = METHODS.get(str(error.name))
    if name != "torch" and "must be Tensor, not" in text:  # its functions leave no frames
        other = "torch"
    if other is None or other == name:
        return ""
    return (
        f"The step calls {TITLES[other]}, and Keras runs on {TITLES[name]}: write it with "
        f"keras.ops and treadle.gradients, which run everywhere, or run it with "
        f"KERAS_BACKEND={other}"
    )


def modules(error: BaseException) -> Iterator[str]:
    """Yield the packages of the frames that an error came through, and of its class."""
    trace = error.__traceback__
    while trace is not None:
        yield str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        trace = trace.tb_next


def innermost(error: BaseException) -> str:
    """Return the package of the frame that raised an error."""
    return list(modules(error))[-1] if error.__traceback__ is not None else ""
