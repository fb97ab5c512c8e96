"""Writing of exported files with Keras' exporters."""

import errno
import io
import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from ..backends.base import active
from ..errors import ConfigurationError, ExportError
from .formats import Format
from .prediction import Prediction, model_for_exporters, model_for_saving, named_outputs


def write(form: Format, prediction: Prediction, path: Path) -> None:
    """Write a file with Keras' exporter.

    Raises:
        StepError: `predict_step` cannot be written in the format `keras`.
        ConfigurationError: An input and an output have one name in a format without such names.
        ExportError: The exporter failed.
    """
    if not form.exporter:
        model = model_for_saving(prediction)
        with _exporting(form), quiet():
            model.save(path)
        return
    is_named = active().name in form.named
    if form.name == "onnx" and is_named:
        _check_names(prediction)
    model = model_for_exporters(prediction, flat=not is_named)
    inputs: Any = prediction.specs if len(prediction.specs) == 1 else [prediction.specs]
    options = {"dynamic_shapes": _dynamic(prediction)} if form.name == "torch" else {}
    with _exporting(form), quiet():
        model.export(
            str(path), format=form.exporter, verbose=False, input_signature=inputs, **options
        )


def _check_names(prediction: Prediction) -> None:
    """Check that no output is named like an input, as ONNX requires.

    Raises:
        ConfigurationError: One is.
    """
    inputs = [str(spec.name) for spec in prediction.specs]
    shared = [name for name in named_outputs(prediction.outputs) if name in inputs]
    if shared:
        raise ConfigurationError(
            f"an input and an output of predict_step are both named {shared[0]}, and the format "
            "onnx has each name once: return the output under another key, or use another format"
        )


def _dynamic(prediction: Prediction) -> Any:
    """Return the dynamic dimensions for `torch.export`: the batch, which is one for all inputs."""
    import torch

    size = torch.export.Dim("batch")
    each = [{0: size} for _ in prediction.specs]
    # Keras calls the model with a tuple of arguments.
    return [(each[0] if len(each) == 1 else each,)]


def reason_of(error: Exception) -> str:
    """Return the beginning of an error's message, which may be hundreds of lines."""
    return (str(error).strip() or type(error).__name__)[:1000].rstrip(".")


@contextmanager
def _exporting(form: Format) -> Generator[None]:
    """Explain an error of an exporter."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ExportError(
                f"the disk is full, so nothing was written: {error}. Free some space, or choose a "
                "path on another disk"
            ) from error
        raise ExportError(
            f"Keras cannot write predict_step in the format {form.name} on {active().name}: "
            f"{reason_of(error)}. Use another format, or export on another backend (--backend)"
        ) from error


@contextmanager
def quiet() -> Generator[None]:
    """Hide the warnings, log lines and texts of exporters; errors raise exceptions."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)
