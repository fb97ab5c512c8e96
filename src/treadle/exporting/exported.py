"""`treadle.export`: writes a task's `predict_step` as a file, and compares it with `predict`."""

import warnings
from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras

from ..backends.base import active
from ..core import structures
from ..core.options import run_seed
from ..data import as_source
from ..data.source import ReadRequest, read_from
from ..distribute import single_process_only
from ..errors import ConfigurationError, DataError, ExportError, TreadleWarning
from ..loop import Loop
from ..steps.averages import Averages
from ..steps.state import State
from .comparing import TOLERANCE, TOLERANCE_OF_HALF, largest_difference
from .formats import (
    Format,
    check_free,
    check_writable,
    chosen_format,
    install,
    missing_runtime,
    size_of,
    temporary_folder,
)
from .prediction import Prediction, by_name, named_outputs
from .runtimes import load
from .writing import quiet, reason_of, write


@dataclass(frozen=True)
class Exported:
    """An exported file.

    Attributes:
        path: The file, or the folder of a SavedModel.
        format: The name of the format.
        inputs: The dtype and the shape of each input by name, in order; a dimension of None is of
            any size.
        outputs: The same for the outputs, by the path in what `predict_step` returns.
        runtime: The runtime that the file was loaded with, and its version; empty if none is
            installed.
        difference: The largest difference between the outputs of the file and those of
            `predict`, relative to the magnitude of an output above 1; None if not compared.
        tolerance: The largest difference that is accepted.
        not_compared: Why the file was not compared, and what to install; empty if it was.
        bytes: The size of the file with all that belongs to it.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", "sgd")
        >>> found = treadle.export(task, "averages.keras", batch=np.ones((4, 2), "float32"))
        >>> found.format, found.outputs, found.not_compared
        ('keras', {'outputs': 'float32 (None, 1)'}, '')
    """

    path: Path
    format: str
    inputs: dict[str, str]
    outputs: dict[str, str]
    runtime: str
    difference: float | None
    tolerance: float
    not_compared: str
    bytes: int

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as JSON types."""
        return {**asdict(self), "path": str(self.path)}


def export(
    task: Any,
    path: str | Path,
    format: str | None = None,
    *,
    batch: Any = None,
    averages: bool = False,
    tolerance: float | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write a task's `predict_step` with its weights as a file that needs no Treadle.

    The file contains everything that `predict_step` computes, including pre- and post-processing,
    for batches of any size. Parts of the batch that it does not use, such as labels, are not
    inputs of the file. Nested outputs become a dict of arrays by path. The file is loaded in its
    own runtime, and its outputs are compared with those of `Loop.predict`; then it is renamed to
    `path`.

    Args:
        task: A loop, or a task with trained weights.
        path: Where the file is written.
        format: `"keras"`, `"savedmodel"`, `"onnx"`, `"litert"`, `"openvino"` or `"torch"`; by
            default that of the path's suffix.
        batch: An example batch, as `predict_step` gets it: its shapes but for the batch size are
            those of the file. By default the first one of `task.datasets()`: of `predict`, else
            of `validation`, else of `train`.
        averages: Use the averages of weights that optimizers keep (`use_ema=True`). After
            training, the weights are the averages already.
        tolerance: The largest difference that is accepted; by default 1e-4, or 1e-2 if the task
            computes in float16 or bfloat16. It is relative to the magnitude of an output above 1.
        overwrite: Replace an existing file.

    Returns:
        The file, its inputs and outputs, and the largest difference.

    Raises:
        ConfigurationError: If the backend cannot write the format, a package is missing, the path
            exists, or `predict_step` draws random numbers or changes variables.
        ExportError: If the exporter fails, or the file computes something else than `predict`.
        StepError: If `predict_step` cannot be written in the format `keras`.
        DataError: If there is no example batch, or its inputs have no common batch size.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", "sgd")
        >>> done = treadle.export(task, "line.keras", batch=np.ones((4, 2), "float32"))
        >>> done.inputs, done.difference <= done.tolerance
        ({'inputs': 'float32 (None, 2)'}, True)
    """
    path = Path(path)
    form = chosen_format(format, path)
    _check_call(form, path, tolerance, overwrite)
    loop = task if isinstance(task, Loop) else Loop(task, console=False)
    batch = _first_batch(loop) if batch is None else batch
    with _averages(loop.task) if averages else nullcontext():
        return _export(form, path, loop, batch, tolerance)


def _check_call(form: Format, path: Path, tolerance: float | None, overwrite: bool) -> None:
    check_writable(form, active().name)
    check_free(form, path, overwrite)
    if tolerance is not None and not tolerance >= 0:
        raise ConfigurationError(f"tolerance is {tolerance!r}: expected a number of at least 0")
    single_process_only(
        "export was called in one of {} processes: export in one process, from a checkpoint of "
        "the run (treadle export DIR)"
    )


def _export(form: Format, path: Path, loop: Loop, batch: Any, tolerance: float | None) -> Exported:
    """Write the file, compare it, and move it to its place."""
    loop.predict([batch])  # builds the layers, and raises the errors of predict_step
    prediction = Prediction(loop.task, batch)
    if tolerance is None:
        half = any(
            layer.compute_dtype in ("float16", "bfloat16") and layer.variables
            for layer in prediction.layers
        )
        tolerance = TOLERANCE_OF_HALF if half else TOLERANCE
    not_compared = missing_runtime(form)
    with temporary_folder(path) as folder:
        written = folder / path.name
        write(form, prediction, written)
        size = size_of(written)
        runtime, difference = "", None
        if not not_compared:
            runtime, difference = _compared(form, written, loop, prediction, tolerance)
        install(written, path)
    if not_compared:
        message = f"{path} was not compared with predict: {not_compared}"
        warnings.warn(message, TreadleWarning, stacklevel=3)
    return Exported(
        path,
        form.name,
        {str(spec.name): _described(spec) for spec in prediction.specs},
        _outputs(prediction.outputs, prediction.size),
        runtime,
        difference,
        tolerance,
        not_compared,
        size,
    )


def _compared(
    form: Format, path: Path, loop: Loop, prediction: Prediction, tolerance: float
) -> tuple[str, float]:
    """Run a file in its own runtime; return the runtime and the largest difference.

    Batches of two sizes are compared, since an exporter may fix the size that it was shown.

    Raises:
        ExportError: The file cannot be loaded or run, or the difference is above the tolerance.
    """
    largest, runtime = 0.0, form.title
    names = [str(spec.name) for spec in prediction.specs]
    for size in (prediction.size, prediction.size // 2 or 2):
        batch = prediction.resized(size)
        predicted = loop.predict([batch])
        # A file whose outputs have names gives them in the order of the names.
        named = not form.exporter or active().name in form.named
        expected = (
            keras.tree.flatten(by_name(predicted, nested=not form.exporter))
            if named
            else structures.flatten(predicted)
        )
        try:
            with quiet():
                loaded = load(form.name, path, names)
                runtime = loaded.runtime
                found = loaded.run(prediction.inputs(batch))
        except Exception as error:
            raise ExportError(
                f"the exported file fails in {runtime} for a batch of {size}, so nothing was "
                f"written: {reason_of(error)}. Use another format, or export on another backend "
                "(--backend)"
            ) from error
        largest = max(largest, largest_difference(expected, found, size))
    if not largest <= tolerance:
        raise ExportError(
            f"the outputs of the exported file in {runtime} differ from those of predict by up to "
            f"{largest:.2g}, above the tolerance of {tolerance:.2g}, so nothing was written. Use "
            "another format or another backend (--backend), or set tolerance=… (--tolerance)"
        )
    return runtime, largest


def _first_batch(loop: Loop) -> Any:
    """Return the first batch of the task's data.

    Raises:
        ConfigurationError: The task has no `datasets`.
        DataError: The data has no batch.
    """
    data = loop.task.datasets()
    validation = data.validation
    if isinstance(validation, dict):
        validation = next(iter(validation.values()), None)
    chosen = next(x for x in (data.predict, validation, data.train) if x is not None)
    reader = read_from(
        as_source(chosen), ReadRequest(0, seed=run_seed(), loop=loop.view, ordered=True)
    )
    with closing(reader):
        window = reader.take(1)
        if window is None:
            raise DataError("the data gave no batch: pass an example with export(…, batch=…)")
        return window.batch(0)


@contextmanager
def _averages(task: Any) -> Generator[None]:
    """Set the weights to their averages inside the block.

    Raises:
        ConfigurationError: No optimizer averages weights.
    """
    state = State.discover(task)
    kept = state.keep()
    averages = Averages()
    if not averages.exist(state):
        raise ConfigurationError(
            f"averages=True (--averages), but no optimizer of {type(task).__name__} has averaged "
            "weights: it needs use_ema=True, and at least one update. Export without averages"
        )
    averages.finish(state)
    try:
        yield
    finally:
        state.put_back(kept)


def _described(array: Any) -> str:
    return f"{keras.backend.standardize_dtype(array.dtype)} {tuple(array.shape)}"


def _outputs(outputs: Any, size: int) -> dict[str, str]:
    """Describe outputs by their names; a first dimension of the batch size may be any."""
    found: dict[str, str] = {}
    for name, array in named_outputs(outputs).items():
        whole = array.shape[:1] == (size,)
        found[name] = f"{array.dtype} {(None, *array.shape[1:]) if whole else array.shape}"
    return found
