"""`predict_step` as a function of the parts of a batch that it uses, and as a Keras model."""

import re
from collections.abc import Sequence
from math import inf
from typing import Any

import keras
import numpy as np

from ..backends.base import active
from ..core import structures
from ..core.keras_lists import layers_in
from ..errors import ConfigurationError, DataError, StepError
from ..steps.building import build


class _Unused:
    """A stand-in for a part of a batch that `predict_step` does not use, as labels."""


class Prediction:
    """A task's `predict_step` as a function of the parts of a batch that it uses.

    A part is unused if `predict_step` returns with an object in its place that is not an array.
    So labels in a batch `(x, y)` are not inputs of an exported file.

    Args:
        task: The task, whose variables are built.
        batch: An example batch, as `loop.predict` takes it.

    Attributes:
        batch: The example batch.
        specs: The shape, dtype and name of each input; the first dimension is the batch.
        outputs: The outputs for the example batch, a structure of arrays.
        layers: The layers of the task with variables that `predict_step` reads, and the built
            ones without variables.
        variables: The Keras variables that it reads and that are in no layer, by path.

    Raises:
        ConfigurationError: If `predict_step` draws random numbers, changes variables, or uses no
            part of the batch.
        DataError: If an input has no batch dimension.
    """

    def __init__(self, task: Any, batch: Any) -> None:
        batch = structures.mapped(np.asarray, batch)
        self._task, self.batch = task, batch
        self.layers, self.variables = _read(task, batch)
        leaves = structures.flatten(batch)
        self._leaves: list[Any] = [active().to_device(leaf) for leaf in leaves]
        with active().undifferentiated(), active().own_random():
            self.outputs = structures.mapped(active().to_numpy, self._call(self._leaves))
            self._used = [i for i in range(len(leaves)) if not self._drop(i)]
        if not self._used:
            raise ConfigurationError(
                f"predict_step of {type(task).__name__} uses no part of its batch, so an exported "
                "file would have no input"
            )
        names = _names(batch, self._used)
        self.specs = [
            keras.InputSpec(
                shape=(None, *leaves[i].shape[1:]),
                dtype=keras.backend.standardize_dtype(self._leaves[i].dtype),
                name=name,
            )
            for i, name in zip(self._used, names, strict=True)
        ]
        sizes = {name: leaves[i].shape[:1] for i, name in zip(self._used, names, strict=True)}
        if len(set(sizes.values())) > 1 or () in sizes.values():
            shapes = zip(names, (tuple(leaves[i].shape) for i in self._used), strict=True)
            found = ", ".join(f"{name} {shape}" for name, shape in shapes)
            raise DataError(
                f"the inputs of predict_step differ in their first dimension ({found}): an "
                "exported file takes batches of any size, so it is the batch in all of them"
            )
        self.size: int = leaves[self._used[0]].shape[0]

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Return what `predict_step` returns for these inputs, in containers as of `predict`.

        Operations on symbolic tensors may return others, such as a list for a named tuple.
        """
        leaves = list(self._leaves)
        for i, given in zip(self._used, inputs, strict=True):
            leaves[i] = given
        return structures.pack(self.outputs, structures.flatten(self._call(leaves)))

    def inputs(self, batch: Any) -> list[np.ndarray[Any, Any]]:
        """Return the inputs in a batch, with the dtypes of the exported file."""
        leaves = structures.flatten(batch)
        return [
            leaves[i].astype(spec.dtype, copy=False)
            for i, spec in zip(self._used, self.specs, strict=True)
        ]

    def resized(self, size: int) -> Any:
        """Return a batch with another number of rows, taken from the example batch in turn."""
        rows = np.arange(size) % self.size

        def chosen(leaf: Any) -> Any:
            return leaf[rows] if leaf.shape[:1] == (self.size,) else leaf

        return structures.mapped(chosen, self.batch)

    def _call(self, leaves: Sequence[Any]) -> Any:
        return self._task.predict_step(structures.pack(self.batch, leaves))

    def _drop(self, i: int) -> bool:
        """Return whether a part is unused, and put the stand-in in its place if so."""
        leaves = list(self._leaves)
        leaves[i] = _Unused()
        try:
            outputs = structures.flatten(self._call(leaves))
        except Exception:  # whatever a computation with such an object raises
            return False
        if any(isinstance(output, _Unused) for output in outputs):
            return False
        self._leaves = leaves
        return True


class PredictionModel(keras.Model):
    """A Keras model that computes a `Prediction`, for Keras' exporters.

    Args:
        prediction: The function.
        flat: Whether to return a tuple of tensors instead of what `by_name` returns.
    """

    def __init__(self, prediction: Prediction, flat: bool) -> None:
        # Without autocast: predict_step gets the inputs as in `predict`, under every precision.
        super().__init__(name="predict_step", autocast=False)
        # Attributes are how Keras finds the variables; those that it misses become constants.
        self.parts, self.own = prediction.layers, list(prediction.variables.values())
        self._prediction, self._flat = prediction, flat

    def call(self, inputs: Any) -> Any:
        """Return the outputs for one input, or for a list of inputs."""
        outputs = self._prediction(inputs if isinstance(inputs, (list, tuple)) else [inputs])
        return tuple(structures.flatten(outputs)) if self._flat else by_name(outputs)

    def build(self, input_shape: Any = None) -> None:
        """Do nothing: all layers are built."""
        self.built = True


def model_for_exporters(prediction: Prediction, flat: bool) -> Any:
    """Return a model whose exported file computes `predict_step`."""
    model = PredictionModel(prediction, flat)
    inputs = [active().to_device(x) for x in prediction.inputs(prediction.batch)]
    with active().undifferentiated():
        model(inputs[0] if len(inputs) == 1 else inputs)  # exporters need a model that was called
    return model


def model_for_saving(prediction: Prediction) -> Any:
    """Return a functional model that computes `predict_step`, and is made of Keras' operations.

    Raises:
        StepError: `predict_step` uses operations that are not Keras', values of tensors, or
            variables that are in no layer.
    """
    if prediction.variables:
        raise StepError(
            f"predict_step reads {next(iter(prediction.variables))}, a variable that is in no "
            "layer, and the format keras holds the variables of layers only: make it a weight of "
            "a layer, or use another format"
        )
    inputs = [
        keras.Input(batch_shape=spec.shape, dtype=spec.dtype, name=spec.name)
        for spec in prediction.specs
    ]
    try:
        outputs = by_name(prediction(inputs), nested=True)
        model = keras.Model(inputs[0] if len(inputs) == 1 else inputs, outputs, name="predict_step")
    except Exception as error:
        raise StepError(
            "the format keras needs a predict_step that is made of layers and of functions of "
            f"keras.ops, for tensors without values: {error}. Change it, or use another format"
        ) from error
    return model


def _read(task: Any, batch: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the layers and the other variables that `predict_step` reads; check the step.

    Raises:
        ConfigurationError: It draws random numbers, or changes variables.
    """
    state, found = build(task, task.predict_step, batch, "predict_step")
    seeds = [state.path_of(seed) for seed in state.seeds if id(seed) in found.read]
    if seeds:
        raise ConfigurationError(
            f"predict_step of {type(task).__name__} draws random numbers ({seeds[0]}), which an "
            "exported file cannot repeat: take them as an input of predict_step"
        )
    changed = [path for path, v in state.variables.items() if id(v) in found.written]
    if changed:
        raise ConfigurationError(
            f"predict_step of {type(task).__name__} changes {changed[0]}: an exported file holds "
            "no state that changes. Remove the assignment, or call layers with training=False"
        )
    # A layer without variables may hold a table, as StringLookup does.
    layers = [
        layer
        for layer in state.layers
        if any(id(v) in found.read for v in layer.variables)
        or (layer.built and not layer.variables)
    ]
    inside = {id(v) for layer in layers for v in layer.variables}
    others = {
        path: variable
        for path, variable in state.variables.items()
        if id(variable) in found.read
        and id(variable) not in inside
        and isinstance(variable, keras.Variable)
    }
    inner = {id(part) for layer in layers for part in layers_in(layer)[1:]}
    return [layer for layer in layers if id(layer) not in inner], others


def by_name(outputs: Any, nested: bool = False) -> Any:
    """Return outputs as exporters take them: as they are, or as a dict of arrays by path.

    Exporters take an array, a list or tuple of arrays, or a dict of arrays with names as keys.
    Other containers and None become names.

    Args:
        outputs: What `predict_step` returns.
        nested: Whether dicts, lists and tuples may be nested, as in Keras' own format.

    Example:
        >>> by_name({"scores": [1, 2], "mask": None}), by_name((1, 2))
        ({'scores_0': 1, 'scores_1': 2}, (1, 2))
    """
    return outputs if _is_plain(outputs, inf if nested else 1) else named_outputs(outputs)


def _is_plain(outputs: Any, levels: float) -> bool:
    """Return whether outputs are arrays in plain containers, of at most so many levels."""
    parts = structures.parts(outputs)
    if parts is None:
        return outputs is not None
    names = type(outputs) is not dict or all(isinstance(key, str) for key in outputs)
    is_container = type(outputs) in (dict, list, tuple) and names and levels > 0
    return is_container and all(_is_plain(part, levels - 1) for _, part in parts)


def named_outputs(outputs: Any) -> dict[str, Any]:
    """Return the arrays of outputs by their paths, or by `outputs` for a single array."""
    pairs = structures.with_paths(outputs)
    names = _distinct(["_".join(map(str, path)) or "outputs" for path, _ in pairs])
    return {name: array for name, (_, array) in zip(names, pairs, strict=True)}


def _names(batch: Any, used: Sequence[int]) -> list[str]:
    """Return a name for each used part: its keys in dicts, or `inputs`.

    Example:
        >>> _names({"image": 0, "meta": {"age": 0}}, [0, 1]), _names((0, 0), [0])
        (['image', 'meta_age'], ['inputs'])
    """
    paths = [path for path, _ in structures.with_paths(batch)]
    words = ["_".join(str(key) for key in paths[i] if isinstance(key, str)) for i in used]
    # Keras allows no slash in a name, and the signature of a SavedModel only identifiers.
    return _distinct([re.sub(r"\W", "_", word) or "inputs" for word in words])


def _distinct(words: Sequence[str]) -> list[str]:
    """Return the words, with their number in the list after each that is there twice."""
    while len(set(words)) < len(words):  # again, if such a name is itself in the list
        words = [w if words.count(w) == 1 else f"{w}_{i}" for i, w in enumerate(words)]
    return list(words)
