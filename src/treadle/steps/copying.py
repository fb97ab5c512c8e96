"""Copies of Keras models and layers with variables of their own."""

import enum
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import keras
import numpy as np

from ..backends.base import active
from ..core.keras_lists import layers_in
from ..core.options import without_tensorflow
from ..errors import StepError
from .constants import is_array, tuple_like

# Not copied: what never changes, and tables of TensorFlow.
_LOOKUPS = (
    *(keras.layers.IntegerLookup, keras.layers.StringLookup, keras.layers.TextVectorization),
)
_SHARED = (type, enum.Enum, keras.DTypePolicy, *_LOOKUPS)
_CONTAINERS = (dict, list, set, tuple, frozenset, deque, partial, SimpleNamespace)
_KERAS = (keras.Variable, keras.Operation, keras.metrics.Metric)
# What `compile` and the methods of a model add.
_LEFT_OUT = {
    **dict.fromkeys(("optimizer", "loss", "_compile_loss", "_compile_metrics", "_loss_tracker")),
    **dict.fromkeys(("train_function", "test_function", "predict_function", "_compile_config")),
    "_compiled_trainable_state": None,
    "compiled": False,
}


def copied(model: Any) -> Any:
    """Return a copy of a built model or layer with equal weights that shares no variable with it.

    Raises:
        StepError: It has no configuration, and holds an object that cannot be copied.
    """
    try:
        copy = _from_config(model)
    except Exception:  # raised by classes of users
        copy = None
    if copy is None:
        return _Copier(model).copy
    for old, new in zip(model.weights, copy.weights, strict=True):
        new.assign(keras.ops.copy(active().keep(old)))  # JAX must not donate a shared array
    return copy


def _from_config(model: Any) -> Any:
    """Return a model made from the configuration of another one; None if it is not equal."""
    with without_tensorflow():
        copy = (
            keras.models.clone_model(model)
            if isinstance(model, keras.Model)
            else type(model).from_config(model.get_config())
        )
    if not copy.built:
        copy.build_from_config(model.get_build_config() or {})
    own = {id(variable) for variable in model.variables}
    shapes = [tuple(v.shape) for v in model.weights] == [tuple(v.shape) for v in copy.weights]
    is_equal = shapes and not any(id(v) in own for v in copy.variables)
    return copy if is_equal and _has_equal_settings(model, copy) else None


def _has_equal_settings(model: Any, copy: Any) -> bool:
    """Return whether the layers of a copy have the numbers and flags of those of the original.

    A configuration lacks some: the `lora_alpha` of a layer, and the vocabulary of a lookup.
    """
    pairs = list(zip(layers_in(model), layers_in(copy), strict=False))
    if any(isinstance(layer, _LOOKUPS) for layer, _ in pairs):
        return False
    return all(
        vars(other).get(name) == value
        for layer, other in pairs
        for name, value in vars(layer).items()
        if isinstance(value, (bool, int, float)) and not name.startswith("_")
    )


class _Copier:
    """Copies an object with all objects that it reaches, each once.

    Objects are created empty and filled later, so that a deep model needs no deep recursion.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._copies: dict[int, tuple[Any, Any]] = {}  # the original too, which keeps its id alive
        self._unfilled: list[Callable[[], None]] = []
        self._left_out = _left_out(model)
        for variable in model.variables:  # first: a PyTorch module also holds their values
            self._of(variable)
        self.copy = self._of(model)
        while self._unfilled:
            self._unfilled.pop()()
        for original, copy in list(self._copies.values()):
            self._replace_ids(original, copy)

    def _of(self, thing: Any) -> Any:
        """Return the copy of an object, which may be filled later."""
        if id(thing) not in self._copies:
            copy = thing if self._is_shared(thing) else self._new(thing)
            self._copies[id(thing)] = thing, copy
        return self._copies[id(thing)][1]

    def _is_shared(self, thing: Any) -> bool:
        """Return whether the copy holds the object itself."""
        kind: Any = type(thing)
        if isinstance(thing, (*_CONTAINERS, MethodType, FunctionType)):
            return False
        if isinstance(thing, _SHARED) or kind.__module__.split(".")[0] in sys.stdlib_module_names:
            return True
        return not (is_array(thing) or hasattr(thing, "__dict__") or _slots(thing))

    def _new(self, thing: Any) -> Any:
        if isinstance(thing, keras.Variable):
            return self._variable(thing)
        if is_array(thing):
            try:
                return thing.copy() if isinstance(thing, np.ndarray) else keras.ops.copy(thing)
            except Exception:  # a tensor without a value, which was stored while a step was traced
                return thing
        if isinstance(thing, MethodType):
            return MethodType(thing.__func__, self._of(thing.__self__))
        if isinstance(thing, FunctionType):
            return self._function(thing)
        if isinstance(thing, partial):
            inner: Any = thing
            return partial(self._of(inner.func), *self._of(inner.args), **self._of(inner.keywords))
        if isinstance(thing, (tuple, frozenset)):
            parts = [self._of(part) for part in thing]
            return tuple_like(thing, parts) if isinstance(thing, tuple) else type(thing)(parts)
        return self._object(thing)

    def _variable(self, variable: Any) -> Any:
        value = variable._value
        copy = keras.Variable(
            keras.ops.copy(active().keep(variable)),
            dtype=keras.backend.standardize_dtype(value.dtype),
            trainable=variable.trainable,
            aggregation=variable.aggregation,
            name=variable.name,
        )
        self._copies[id(value)] = value, copy._value
        # Its path, its constraint, whether it is cast, and what a layer has set.
        kept = {name: part for name, part in vars(variable).items() if part is not value}
        self._unfilled.append(lambda: self._fill_attributes(copy, kept))
        return copy

    def _function(self, function: Any) -> Any:
        """Return a function, or a new one if it refers to objects of Keras in its closure."""
        cells: list[Any] = [_content(cell) for cell in function.__closure__ or ()]
        if not any(isinstance(content, _KERAS) for content in cells):
            return function
        closure = tuple(
            CellType(self._of(content)) if isinstance(content, _KERAS) else cell
            for cell, content in zip(function.__closure__, cells, strict=True)
        )
        copy = FunctionType(
            function.__code__, function.__globals__, function.__name__, None, closure
        )
        copy.__defaults__, copy.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
        return copy

    def _object(self, thing: Any) -> Any:
        """Return an empty object of the same class, which is filled later.

        Raises:
            StepError: The class cannot be created without arguments.
        """
        kind: Any = type(thing)
        if isinstance(thing, dict) and not issubclass(kind, dict):  # a proxy of TensorFlow
            kind = dict
        try:
            copy = kind.__new__(kind)
        except TypeError as error:
            if not isinstance(kind.__new__, FunctionType):  # a class of a framework, without state
                return thing
            model, name = type(self._model).__name__, self._model.name
            raise StepError(
                f"frozen_copy cannot make {name!r} from a configuration, nor copy the "
                f"{kind.__name__} that it holds, whose __new__ needs arguments: write get_config "
                f"for {model}, or create a second {model} and call "
                "treadle.blend(second, first, 1.0)"
            ) from error
        self._unfilled.append(lambda: self._fill(thing, copy))
        return copy

    def _fill(self, thing: Any, copy: Any) -> None:
        """Add the items and attributes of an object to its copy."""
        if isinstance(thing, dict):
            insert: Any = OrderedDict if isinstance(thing, OrderedDict) else dict
            for key, value in thing.items():  # type: ignore[reportUnknownVariableType]
                if id(value) in self._left_out:
                    continue
                insert.__setitem__(copy, self._of(key), self._of(value))
        elif isinstance(thing, (list, deque)):
            kind: Any = list if isinstance(thing, list) else deque
            parts: list[Any] = [p for p in thing if id(getattr(p, "ref", p)) not in self._left_out]  # type: ignore[reportUnknownVariableType]
            kind.extend(copy, [self._of(part) for part in parts])
        elif isinstance(thing, set):
            set.update(copy, {self._of(part) for part in thing})  # type: ignore[reportUnknownVariableType]
        if isinstance(thing, defaultdict):
            copy.default_factory = self._of(thing.default_factory)  # type: ignore[reportUnknownMemberType]
        attributes = dict(getattr(thing, "__dict__", {})) if type(copy) is type(thing) else {}
        if isinstance(thing, keras.Layer):
            # `build` and `quantize` are functions that refer to the layer, made by `__new__`.
            for name in [n for n, part in vars(copy).items() if isinstance(part, FunctionType)]:
                attributes.pop(name, None)
        if isinstance(thing, keras.Model):
            attributes |= {k: v for k, v in _LEFT_OUT.items() if k in attributes}
        self._fill_attributes(copy, attributes)
        for name in _slots(thing):
            object.__setattr__(copy, name, self._of(getattr(thing, name)))

    def _fill_attributes(self, copy: Any, attributes: Mapping[str, Any]) -> None:
        for name, value in attributes.items():
            if isinstance(value, dict) and "_torch_params" in value:
                # PyTorch's list of parameters is made again when it is needed.
                value = {k: part for k, part in value.items() if k != "_torch_params"}  # type: ignore[reportUnknownVariableType]
            vars(copy)[name] = self._of(value)

    def _replace_ids(self, original: Any, copy: Any) -> None:
        """Replace ids of objects, which Keras' trackers and functional models store."""
        if copy is original:
            return
        if hasattr(original, "stored_ids"):
            copy.stored_ids = {
                name: {id(self._copies[i][1]) if i in self._copies else i for i in ids}
                for name, ids in original.stored_ids.items()
            }
        if isinstance(original, keras.Function):  # names of nodes begin with the id of a layer
            sets = {k: set(x) for k, x in vars(original).items() if isinstance(x, set)}  # type: ignore[reportUnknownVariableType]
            names: dict[str, set[str]] = {
                k: x for k, x in sets.items() if all(isinstance(part, str) for part in x)
            }
            vars(copy).update({k: set(map(self._with_new_id, x)) for k, x in names.items()})

    def _with_new_id(self, name: str) -> str:
        known, _, rest = name.partition("_")
        found = self._copies.get(int(known)) if known.isdecimal() else None
        return name if found is None else f"{id(found[1])}_{rest}"


def _left_out(model: Any) -> set[int]:
    """Return the ids of what `compile` and `fit` have added, which TensorFlow tracks too."""
    found: list[Any] = []
    for layer in layers_in(model):
        held = vars(layer)
        tracked = held.get("_self_unconditional_checkpoint_dependencies", ())
        found += [part.ref for part in tracked if part.name in _LEFT_OUT]
        if isinstance(layer, keras.Model):
            found += [held.get(name) for name in _LEFT_OUT]
    return {id(part) for part in found if part not in (None, False)}


def _slots(thing: Any) -> list[str]:
    """Return the names of an object's attributes that are in `__slots__`."""
    names: list[str] = []
    for kind in type(thing).__mro__:
        slots: Any = kind.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return [n for n in names if n not in ("__dict__", "__weakref__") and hasattr(thing, n)]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
