"""Exported files in their own runtimes, which are imported when a file is loaded.

A file is loaded by what its users load it with. That may be another framework than the backend,
such as TensorFlow for a SavedModel written on JAX, so these imports are here and not in
`backends/<name>/`.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import keras
import numpy as np

from ..backends.base import active

Arrays = list[np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Loaded:
    """A file that its runtime has loaded.

    Attributes:
        runtime: The name and the version of the runtime.
        run: Returns the outputs for inputs: those with names in the order of the names.
    """

    runtime: str
    run: Callable[[Arrays], Arrays]


def load(name: str, path: Path, names: Sequence[str]) -> Loaded:
    """Load a file in its own runtime.

    Args:
        name: The name of the format.
        path: The file or the folder.
        names: The names of the inputs, in order.
    """
    return _LOADERS[name](path, names)


def _keras(path: Path, names: Sequence[str]) -> Loaded:
    # Without a compiled program: this is also how the model is called in another program.
    model = keras.saving.load_model(path, safe_mode=True)

    def run(inputs: Arrays) -> Arrays:
        with active().undifferentiated():
            return _numpy(model(_one_or_list(inputs), training=False))

    return Loaded(f"Keras {keras.__version__}", run)


def _savedmodel(path: Path, names: Sequence[str]) -> Loaded:
    import tensorflow as tf

    loaded = tf.saved_model.load(str(path))

    def run(inputs: Arrays) -> Arrays:
        outputs = loaded.serve(_one_or_list([tf.constant(x) for x in inputs]))
        return [np.asarray(output) for output in keras.tree.flatten(outputs)]

    return Loaded(f"TensorFlow {tf.__version__}", run)


def _onnx(path: Path, names: Sequence[str]) -> Loaded:
    runtime = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    order = order_of([given.name for given in session.get_inputs()], names)

    def run(inputs: Arrays) -> Arrays:
        return list(session.run(None, dict(zip(order, inputs, strict=True))))

    return Loaded(f"ONNX Runtime {runtime.__version__}", run)


def _litert(path: Path, names: Sequence[str]) -> Loaded:
    try:
        kind = importlib.import_module("ai_edge_litert.interpreter").Interpreter
        runtime = f"LiteRT {version('ai-edge-litert')}"
    except ImportError:  # TensorFlow still contains the interpreter
        import tensorflow as tf

        kind, runtime = tf.lite.Interpreter, f"tf.lite of TensorFlow {tf.__version__}"
    interpreter = kind(model_path=str(path))
    runner = interpreter.get_signature_runner("serving_default")
    order = order_of(list(runner.get_input_details()), names)

    def run(inputs: Arrays) -> Arrays:
        outputs = runner(**dict(zip(order, inputs, strict=True)))
        return [outputs[name] for name in sorted(outputs, key=_natural)]

    return Loaded(runtime, run)


def _openvino(path: Path, names: Sequence[str]) -> Loaded:
    openvino = importlib.import_module("openvino")
    # OpenVINO would compute in bfloat16 on CPUs that have it.
    model = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(inputs: Arrays) -> Arrays:
        results = model(inputs)
        return [np.array(results[output]) for output in model.outputs]

    return Loaded(f"OpenVINO {version('openvino')}", run)


def _torch(path: Path, names: Sequence[str]) -> Loaded:
    import torch

    module = torch.export.load(path).module()

    def run(inputs: Arrays) -> Arrays:
        with torch.no_grad():
            return _numpy(module(_one_or_list([active().to_device(x) for x in inputs])))

    return Loaded(f"PyTorch {torch.__version__}", run)


_LOADERS: dict[str, Callable[[Path, Sequence[str]], Loaded]] = {
    "keras": _keras,
    "savedmodel": _savedmodel,
    "onnx": _onnx,
    "litert": _litert,
    "openvino": _openvino,
    "torch": _torch,
}


def order_of(found: Sequence[str], names: Sequence[str]) -> Sequence[str]:
    """Return the names of a file's inputs in the order of the inputs of `predict_step`.

    Writers keep the order of the inputs, but not always their names.

    Raises:
        ValueError: The file has other inputs; the message is a clause.
    """
    if len(found) > len(names):
        further = ", ".join(name for name in found if name not in names)
        raise ValueError(
            f"it has further inputs ({further}): its writer makes inputs of tensors that are no "
            "variables, such as the mean of a Normalization layer"
        )
    if len(found) < len(names):
        raise ValueError(
            f"it has the inputs {', '.join(found) or 'nothing'}, and not "
            f"{', '.join(name for name in names if name not in found)}: its writer has computed "
            "what depends on them for one batch"
        )
    return names if set(found) == set(names) else found


def _one_or_list(inputs: Sequence[Any]) -> Any:
    return inputs[0] if len(inputs) == 1 else list(inputs)


def _numpy(outputs: Any) -> Arrays:
    return [active().to_numpy(output) for output in keras.tree.flatten(outputs)]


def _natural(name: str) -> tuple[str, int]:
    """Return a key that sorts `output_10` after `output_2`, and other names as texts."""
    word, _, number = name.rpartition("_")
    return (word, int(number)) if word == "output" and number.isdigit() else (name, -1)
