"""Settings of a run: `Options` for execution, and what Keras is set to."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigurationError, did_you_mean, whole_number_or_none
from . import keras_internals

EXECUTIONS = ("auto", "compiled", "eager", "measure")
COMPILERS = ("auto", "inductor", "cuda-graph", "captured")


@dataclass(frozen=True, slots=True)
class Options:
    """Execution options of the steps; immutable, and recorded with the run.

    Attributes:
        execution: `"auto"`: compile if the backend can, else run as Python. `"compiled"`: compile,
            and raise an error if the backend cannot. `"eager"`: run as Python, which is slow but
            easy to debug. `"measure"`: time all possible plans briefly, use the fastest, and report
            the options that select it directly.
        window: The largest number of steps per window; None lets the plan decide. Results do not
            depend on it.
        fused: True to run the steps of a window as one compiled call, False to run each step as its
            own call; None lets the plan decide.
        jit: Compile with XLA if the backend has a choice (TensorFlow); None lets the plan decide.
        compiler: How a captured training step runs on PyTorch. `"captured"`: as generated Python
            code. `"inductor"`: compiled by PyTorch's compiler; what it cannot compile runs as
            captured, and the plan gives the reason. `"cuda-graph"`: the same, and replayed as a
            CUDA graph, which was not tested on a GPU. `"auto"`: captured on a CPU; on another
            device compiled by Inductor in calls that train for many steps.
        data_on_device: Copy the arrays of `treadle.data.from_arrays` to the device as a whole, and
            gather batches there; None does so up to 2 GiB. Results do not depend on it.
        preflight: Check for mistakes before the first step: variables that are not reachable from
            the task's attributes, losses that do not depend on any variable, steps that return
            nothing, and indices and labels out of range in the first batch.
        checked: Check in every step that indices and labels are in range, which costs a few
            operations for each lookup and each sparse loss, and that each phase changes only what
            it owns, which costs a copy of all other variables.
        skip_nonfinite: Undo, within the compiled step, a training step after which a value or a
            variable is NaN or infinite; costs a copy of the variables it changes. Set by
            `NonFinite(action="skip")`.

    Raises:
        ConfigurationError: A value is unknown or invalid.

    Example:
        >>> Options(window=8).window
        8
    """

    execution: Literal["auto", "compiled", "eager", "measure"] = "auto"
    window: int | None = None
    fused: bool | None = None
    jit: bool | None = None
    compiler: Literal["auto", "inductor", "cuda-graph", "captured"] = "auto"
    data_on_device: bool | None = None
    preflight: bool = True
    checked: bool = False
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        """Check the options."""
        if self.execution not in EXECUTIONS:
            raise ConfigurationError(
                f"unknown execution {self.execution!r}.{did_you_mean(self.execution, EXECUTIONS)}"
            )
        if self.compiler not in COMPILERS:
            raise ConfigurationError(
                f"unknown compiler {self.compiler!r}.{did_you_mean(self.compiler, COMPILERS)}"
            )
        window = whole_number_or_none("window", self.window, ConfigurationError)
        object.__setattr__(self, "window", window)


def backend_name() -> str:
    """Return the name of the backend that Keras runs on."""
    import keras

    return keras.config.backend()


def precision_name() -> str:
    """Return the name of Keras' global dtype policy, which `setup(precision=…)` sets."""
    import keras

    return keras.config.dtype_policy().name


def device_count() -> int:
    """Return the number of devices that a step runs on, which `setup(devices=…)` sets."""
    import keras

    distribution = keras.distribution.distribution()
    return 1 if distribution is None else int(distribution.device_mesh.devices.size)


def run_seed() -> int:
    """Return the seed of the run, which determines the order of the data: Keras' seed, else 0."""
    return global_random_seed() or 0


def global_random_seed() -> int | None:
    """Return the seed passed to `keras.utils.set_random_seed`, or None."""
    return keras_internals.random_seed()


@contextmanager
def without_tensorflow() -> Generator[None]:
    """Keep Keras from importing TensorFlow for serialization on another backend.

    If TensorFlow is installed, Keras imports it to check objects against TensorFlow's types. That
    takes about 4 seconds and prints TensorFlow's log lines. As long as TensorFlow is not imported,
    no object can be of its types.
    """
    utils = keras_internals.INTERNALS["module_utils"].get()
    known = vars(utils.tensorflow) if utils else {}
    if "tensorflow" in sys.modules or "_available" not in known:
        yield
        return
    before, known["_available"] = known["_available"], False
    try:
        yield
    finally:
        known["_available"] = before
