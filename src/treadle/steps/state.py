"""The state of a task: all variables reachable from its attributes, each once, named by path."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import keras
import numpy as np

from ..backends.base import active
from ..backends.types import Variable
from ..core.keras_internals import seed_generator
from ..core.logs import LOSS_SCALE
from ..errors import StateError
from .constants import Constant, fingerprint, part_of, set_attribute, set_part
from .loss_scale import LossScale

# Keras' internal bookkeeping: what it lists is found under the attribute that the user wrote.
BOOKKEEPING = frozenset(
    """
    _layers _metrics _trainable_variables _non_trainable_variables _seed_generators _functional
    _operations _operations_by_depth _operations_by_name _nodes _nodes_by_depth _tracker
    _inbound_nodes _outbound_nodes _trainable_weights _variables _loss_tracker _compile_metrics
    _compile_loss _losses
    """.split()  # noqa: SIM905 - a list of strings would take a page
)
PLAIN = (bool, int, float, str, NoneType)


class State:
    """The variables, layers, optimizers and metrics reachable from a task's attributes.

    Attributes:
        variables: Path to variable, in the order of the attributes; those of optimizers come last.
        layers: All layers.
        layer_paths: The paths of the layers, by id.
        optimizers: Path to optimizer.
        accumulators: Path to `treadle.Accumulator`.
        metrics: Name to metric. The name is the last part of the path, or the whole path if that
            part is a position in a list or the name of another metric.
        seeds: The states of seed generators, including Keras' global one.
        loss_scale: The loss scale if any layer computes in float16, else None.

    Example:
        >>> import keras
        >>> class Holder:
        ...     pass
        >>> task = Holder()
        >>> task.scale = keras.Variable(1.0)
        >>> list(State.discover(task).variables)
        ['scale', 'random/keras']
    """

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.layers: list[Any] = []
        self.layer_paths: dict[int, str] = {}
        self.optimizers: dict[str, Any] = {}
        self.accumulators: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.seeds: list[Variable] = []
        self.loss_scale: LossScale | None = None
        self._paths: dict[int, str] = {}
        self._seen: set[int] = set()
        self._constants: dict[str, Constant] = {}
        self._backend = active()

    @classmethod
    def discover(cls, task: Any) -> "State":
        """Find the state of a task by walking its attributes.

        Raises:
            StateError: An optimizer scales its own loss, which `gradients` would not know of; or a
                layer computes in float16, and the attribute `loss_scale` is not a `LossScale`.
        """
        state = cls()
        state._walk_attributes(task, "", None)
        if any(layer.compute_dtype == "float16" for layer in state.layers):
            state.loss_scale = LossScale.of(task)
            state._walk(state.loss_scale, LOSS_SCALE, _attribute(task, LOSS_SCALE, None))
        for path, optimizer in state.optimizers.items():
            state._add_optimizer(path, optimizer)
        # `keras.random` functions use this generator if no seed is given.
        generator = seed_generator.global_seed_generator()
        state._add("random/keras", generator.state)
        state.seeds.append(generator.state)
        return state

    @classmethod
    def constants_of(cls, task: Any) -> dict[str, Constant]:
        """Return the Python values of a task, by path, as readable and writable constants.

        A layer precedes its sublayers, because setting its `trainable` sets theirs. Nothing is
        changed.
        """
        state = cls()
        state._walk_attributes(task, "", None)
        for path, optimizer in state.optimizers.items():
            state._add_constants_of_optimizer(path, optimizer)
        return state._constants

    def path_of(self, variable: Variable) -> str:
        """Return a variable's path, or Keras' path of it if it is not part of the state."""
        return self._paths.get(id(variable)) or str(getattr(variable, "path", variable.name))

    def __contains__(self, variable: Variable) -> bool:
        """Return whether a variable is part of the state."""
        return id(variable) in self._paths

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return a copy of every value as a NumPy array."""
        return {path: self._backend.read(v) for path, v in self.variables.items()}

    def stage(self, buffers: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
        """Return every value as a NumPy array that later steps do not change.

        Args:
            buffers: The result of an earlier call that is no longer needed; it is overwritten.
        """
        return {p: self._backend.stage(v, buffers.get(p)) for p, v in self.variables.items()}

    def assign(self, arrays: Mapping[str, Any], among: Sequence[str] | None = None) -> None:
        """Set every variable, after checking that all values fit.

        Args:
            arrays: Values by path.
            among: The paths of the variables to set; default: all.

        Raises:
            StateError: Values are missing, have unknown paths, or have another shape or kind of
                dtype (float, integer or bool; the sizes differ between backends). The message lists
                all of them, and nothing is assigned.
        """
        chosen = self.variables if among is None else {p: self.variables[p] for p in among}
        faults = [f"{path} has no value" for path in chosen if path not in arrays]
        faults += [f"{path} is not in this task" for path in arrays if path not in self.variables]
        for path, variable in chosen.items():
            if path not in arrays:
                continue
            shape, dtype = tuple(arrays[path].shape), str(arrays[path].dtype)
            if shape != tuple(variable.shape):
                faults.append(f"{path} has shape {shape}, expected {tuple(variable.shape)}")
            expected = keras.backend.standardize_dtype(variable.dtype)
            if _kind(dtype) != _kind(expected):
                faults.append(f"{path} has dtype {dtype}, expected {expected}")
        if faults:
            raise StateError(
                f"the values do not fit the task: {'; '.join(faults)}. Nothing was changed"
            )
        for path, variable in chosen.items():
            self._backend.write(variable, arrays[path])

    def keep(self, paths: Sequence[str] | None = None) -> dict[str, Any]:
        """Return copies of values, on the device if that is cheap, for `put_back`."""
        chosen = self.variables if paths is None else paths
        return {path: self._backend.keep(self.variables[path]) for path in chosen}

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Set variables to what `keep` returned."""
        for path, value in kept.items():
            self._backend.write(self.variables[path], value)

    def constants(self) -> dict[str, Any]:
        """Return the fingerprints of the Python values, by path.

        A compiled step takes Python values as constants, with their values at the time of tracing.
        """
        return {path: fingerprint(constant.read()) for path, constant in self._constants.items()}

    def _walk(self, thing: Any, path: str, constant: Constant | None = None) -> None:
        """Add one value to the state: a variable, a container of variables, or a Python constant.

        `constant` reads and sets the value later; it is None if the Python values of this part of
        the state are not constants.
        """
        if isinstance(thing, keras.Variable) or self._backend.is_native_variable(thing):
            self._add(path, thing)
        elif isinstance(thing, (list, tuple, dict)):
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
            if self._first_visit(thing):
                if constant is not None:
                    self._constants[path] = constant
                for key, part in list(pairs):
                    self._walk(part, f"{path}/{key}", constant and _part(constant, key))
        elif isinstance(thing, keras.random.SeedGenerator):
            if self._first_visit(thing):
                self._add(f"{path}/state", thing.state)
                self.seeds.append(thing.state)
        elif isinstance(thing, keras.optimizers.Optimizer):
            if self._first_visit(thing):
                if constant is not None:  # otherwise from `Model.compile`, and perhaps not used
                    refuse_scaling(path, thing)
                self.optimizers[path] = thing
        elif isinstance(thing, keras.metrics.Metric):
            if self._first_visit(thing):
                self._add_metric(path, thing)
        elif isinstance(thing, keras.Layer):
            if self._first_visit(thing):
                self._add_layer(path, thing)
        elif (
            dataclasses.is_dataclass(thing)
            or getattr(thing, "holds_state", False)
            or isinstance(thing, keras.optimizers.schedules.LearningRateSchedule)
        ):
            if self._first_visit(thing):
                if getattr(thing, "is_accumulator", False):
                    self.accumulators[path] = thing
                self._walk_attributes(thing, path, constant)
        elif (children := self._backend.native_children(thing)) and self._first_visit(thing):
            for name, part in children.items():
                self._walk(part, f"{path}/{name}")
        if constant is not None and not isinstance(thing, (list, tuple, dict)):
            # A plain value is a constant by value, any other object by identity.
            self._constants.setdefault(path, constant)

    def _walk_attributes(self, holder: Any, path: str, owner: Constant | None) -> None:
        """Add the attributes of a task, or of an object in one, which `owner` reads and sets."""
        for name, value in list(vars(holder).items()):
            inner = f"{path}/{name}" if path else name
            constant = _attribute(holder, name, owner)
            if isinstance(value, PLAIN):
                self._constants[inner] = constant
            else:
                self._walk(value, inner, constant)

    def _add(self, path: str, variable: Variable) -> None:
        if id(variable) in self._paths:
            return
        unique, suffix = path, 1
        while unique in self.variables:
            unique, suffix = f"{path}_{suffix}", suffix + 1
        self.variables[unique] = variable
        self._paths[id(variable)] = unique

    def _first_visit(self, thing: Any) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        return True

    def _add_layer(self, path: str, layer: Any) -> None:
        self.layers.append(layer)
        self.layer_paths[id(layer)] = path
        self._add_plain(path, layer, ("trainable", *vars(layer)))
        attributes = _attributes(layer)
        listed = [*layer._trainable_variables, *layer._non_trainable_variables]
        names = {id(value): name for name, value in attributes.items()}
        for variable in listed:
            if id(variable) in names:
                self._add(f"{path}/{names[id(variable)]}", variable)
        if isinstance(layer, keras.Sequential) or hasattr(layer, "_operations"):
            for i, part in enumerate(layer.layers):
                self._walk(part, f"{path}/layers/{i}")
        for name, value in attributes.items():
            if not isinstance(value, PLAIN):  # skips most attributes: this runs once per epoch
                self._walk(value, f"{path}/{name}")
        for kind in ("_layers", "_metrics", "_seed_generators"):  # those without an attribute
            for i, part in enumerate(getattr(layer, kind)):
                self._walk(part, f"{path}/{kind.strip('_')}/{i}")
        for i, variable in enumerate(listed):  # unnamed variables have Keras' automatic names
            automatic = re.fullmatch(r"variable(_\d+)?", variable.name)
            self._add(f"{path}/{f'variables/{i}' if automatic else variable.name}", variable)

    def _add_plain(self, path: str, thing: Any, names: Iterable[str]) -> None:
        """Add the numbers, flags and strings of a layer or an optimizer to the constants."""
        for name in names:
            plain = isinstance(getattr(thing, name, ()), PLAIN)
            if plain and not name.startswith("_") and name not in ("name", "built"):
                self._constants.setdefault(f"{path}/{name}", _attribute(thing, name, None))

    def _add_metric(self, path: str, metric: Any) -> None:
        name = path.rsplit("/", 1)[-1]
        self.metrics[path if name.isdecimal() or name in self.metrics else name] = metric
        for variable in metric.variables:
            self._add(f"{path}/{variable.name}", variable)
        for attribute, value in list(vars(metric).items()):
            if attribute not in BOOKKEEPING and isinstance(value, keras.random.SeedGenerator):
                self._walk(value, f"{path}/{attribute}")

    def _add_optimizer(self, path: str, optimizer: Any) -> None:
        """Add an optimizer's variables; slots are named after the variables they belong to."""
        self._add_constants_of_optimizer(path, optimizer)
        owners = [self.path_of(v) for v in optimizer._trainable_variables]
        for name, value in list(vars(optimizer).items()):
            slot = f"{path}/{name.lstrip('_')}"
            if isinstance(value, keras.Variable):
                self._add(slot, value)
            elif isinstance(value, list) and name not in ("_variables", "_trainable_variables"):
                for i, part in enumerate(value):
                    if isinstance(part, keras.Variable):
                        self._add(f"{slot}/{owners[i] if i < len(owners) else i}", part)
                    elif isinstance(part, keras.optimizers.Optimizer):  # of a MultiOptimizer
                        self._add_optimizer(f"{slot}/{i}", part)
        for i, variable in enumerate(optimizer.variables):
            self._add(f"{path}/variables/{i}", variable)

    def _add_constants_of_optimizer(self, path: str, optimizer: Any) -> None:
        """Add an optimizer's numbers and its learning rate (a variable or a schedule) to constants.

        A compiled step uses the learning rate object that was set when the step was compiled.
        """
        self._add_plain(path, optimizer, vars(optimizer))
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is not None:
            reads = partial(getattr, optimizer, "_learning_rate", None)
            constant = Constant(reads, partial(_set_learning_rate, optimizer))
            if isinstance(rate, keras.Variable):
                self._constants.setdefault(f"{path}/learning_rate", constant)
            else:
                self._walk(rate, f"{path}/learning_rate", constant)
        for name, value in list(vars(optimizer).items()):  # those of a MultiOptimizer
            for i, part in enumerate(value if isinstance(value, list) else ()):
                if isinstance(part, keras.optimizers.Optimizer):
                    inner = f"{path}/{name.lstrip('_')}/{i}"
                    self._add_constants_of_optimizer(inner, part)


def _attribute(holder: Any, name: str, owner: Constant | None) -> Constant:
    return Constant(
        partial(getattr, holder, name, None), partial(set_attribute, holder, name, owner)
    )


def _part(whole: Constant, key: Any) -> Constant:
    return Constant(part_of(whole.read, key), partial(set_part, whole, key))


def _set_learning_rate(optimizer: Any, rate: Any) -> None:
    """Set an optimizer's learning rate to a schedule or a variable.

    Keras' setter does not accept the variable that was the learning rate before.
    """
    if not isinstance(rate, keras.Variable):
        optimizer.learning_rate = rate
    elif optimizer._learning_rate is not rate:
        optimizer._learning_rate = rate
        tracker = optimizer._tracker
        locked, tracker.locked = tracker.locked, False
        optimizer._track_variable(rate)
        tracker.locked = locked


def refuse_scaling(path: str, optimizer: Any) -> None:
    """Reject an optimizer that divides gradients by a loss scale of its own.

    Raises:
        StateError: The optimizer does.
    """
    scaling = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scaling or optimizer.loss_scale_factor is not None:
        raise StateError(
            f"{path} scales its loss itself ({type(optimizer).__name__}): gradients are always "
            "unscaled here, so it would divide them once too often. Use the inner optimizer, "
            "without loss_scale_factor"
        )


def _attributes(layer: Any) -> dict[str, Any]:
    """Return the attributes that a layer's author set, by name without leading underscores."""
    attributes = {
        name: value
        for name, value in vars(layer).items()
        if name not in BOOKKEEPING and not name.startswith("_self_")  # TensorFlow's tracking
    }
    # On PyTorch, layers that are attributes are in `_modules`, together with PyTorch's bookkeeping.
    modules = attributes.pop("_modules", {})
    layers = {
        name: value
        for name, value in {**modules, **attributes}.items()
        if isinstance(value, keras.Layer)
    }
    # Layers come first on every backend, because an object that is reachable by several paths is
    # named after the first one.
    return {name.lstrip("_"): value for name, value in {**layers, **attributes}.items()}


def _kind(dtype: str) -> str:
    """Return `float`, `int` or `bool` for a dtype of any size."""
    return (
        dtype.rstrip("0123456789").removeprefix("u").removeprefix("b") if dtype != "bool" else dtype
    )
