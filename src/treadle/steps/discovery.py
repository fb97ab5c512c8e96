"""The walk over a task's attributes that finds its state, each part once, named by path."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from inspect import Signature
from itertools import islice
from types import FunctionType, MethodType, NoneType
from typing import Any

import keras

from ..backends.base import active
from ..backends.types import Variable
from ..core.identity import MadeWith
from ..core.keras_internals import global_seed_generator
from ..core.keras_lists import BOOKKEEPING, listed, own_variables
from ..core.logs import LOSS_SCALE
from ..core.user_code import attributes_of
from ..errors import StateError
from .constants import Constant, attribute, is_array, item
from .derived import excluded, is_derived
from .loss_scale import LossScale
from .own_values import Read, Searched, is_own, own_values, read_by_steps
from .settings import settings_in
from .task import adapter

_NO_ARRAYS = BOOKKEEPING | {"_parameters", "_buffers"}  # of a PyTorch module
PLAIN = (bool, int, float, complex, str, NoneType)
# What most attributes of layers are: no state is in one of these types, or in an empty container.
STATELESS = frozenset({*PLAIN, set, FunctionType, Signature})
# Objects of Keras that may hold others, and that are walked after what the attributes of tasks,
# layers and dataclasses reach, so that a thing that both reach has the path of the latter.
HOLDERS = (
    keras.losses.Loss,
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.quantizers.Quantizer,
    keras.Operation,
    keras.initializers.Initializer,
    keras.callbacks.Callback,
)
# Their plain values change nothing in a step: they are used where variables are made, and by hooks.
_NOT_IN_STEPS = (keras.initializers.Initializer, keras.callbacks.Callback)
_OBJECTS = (
    *HOLDERS,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.optimizers.schedules.LearningRateSchedule,
)


_STATE = (
    keras.Variable,
    keras.Layer,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
_PARTS = (keras.Layer, keras.metrics.Metric, keras.random.SeedGenerator)
_WITH_STATE = (*HOLDERS, *_STATE)
MOST_SEARCHED = 10_000  # objects that one of a user's class may hold; this runs once per epoch


class Discovery:
    """The variables, layers, optimizers, metrics and Python values that a task's attributes reach.

    The attributes that `State` has too are documented there.

    Attributes:
        paths: The paths of the variables, by id.
        constants: Path to readable and writable Python value.
        arrays: Path to an attribute of an object of Keras that is an array, or that holds some.
        too_large: Paths of objects and containers of which not all values are constants.
    """

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self.layers: list[Any] = []
        self.layer_paths: dict[int, str] = {}
        self.optimizers: dict[str, Any] = {}
        self.inner_optimizers: dict[str, Any] = {}
        self.accumulators: dict[str, Any] = {}
        self.metrics: dict[str, Any] = {}
        self.derived: dict[str, Any] = {}
        self.built_by_steps: list[str] = []
        self.seeds: list[Variable] = []
        self.loss_scale: LossScale | None = None
        self.paths: dict[int, str] = {}
        self.constants: dict[str, Constant] = {}
        self.arrays: dict[str, Constant] = {}
        self.too_large: list[str] = []
        self._task: Any = None
        self._functions: list[Any] = []  # that the task holds
        self._own_kinds: set[type] = set()  # the user's classes
        self._seen: set[int] = set()
        self._holders: dict[str, Constant] = {}  # objects and containers without state
        self._named: set[int] = set()  # the optimizers whose slots have names
        self._deferred: list[tuple[str, Any]] = []
        self._metric_paths: list[str] = []
        self._backend = active()

    @classmethod
    def of(cls, task: Any) -> "Discovery":
        """Find the state of a task; create its loss scale if it needs one.

        Raises:
            StateError: As for `State.discover`.
        """
        found = cls()
        found._walk_task(task)
        narrow = any(layer.compute_dtype == "float16" for layer in found.layers)
        if narrow and not adapter(task).scales_losses:
            found.loss_scale = LossScale.of(task)
            found._walk(found.loss_scale, LOSS_SCALE, attribute(task, LOSS_SCALE, None))
        found._complete()
        # `keras.random` functions use this generator if no seed is given.
        generator = global_seed_generator()
        found._add("random/keras", generator.state)
        found.seeds.append(generator.state)
        return found

    @classmethod
    def constants_of(cls, task: Any) -> dict[str, Constant]:
        """Find the Python values of a task without creating anything."""
        found = cls()
        found._walk_task(task)
        found._complete()
        return found.constants

    def _walk_task(self, task: Any) -> None:
        self._task = task
        self._seen.add(id(task))
        if is_derived(task):
            self.derived[""] = task
        self._walk_attributes(task, "", None)
        for name, part in adapter(task).unreached_parts().items():
            self._walk(part, name)
        self._functions = [
            value
            for constant in self.constants.values()
            if isinstance(value := constant.read(), (FunctionType, MethodType, partial))
        ]

    def _complete(self) -> None:
        """Walk the deferred objects, and the optimizers.

        An optimizer's slots are named after the variables that it trains. So it comes after what
        holds these, which may be another optimizer.
        """
        self._walk_deferred()
        while waiting := [
            (path, optimizer)
            for path, optimizer in (*self.optimizers.items(), *self.inner_optimizers.items())
            if id(optimizer) not in self._named
        ]:
            ready = [(path, optimizer) for path, optimizer in waiting if self._knows(optimizer)]
            for path, optimizer in ready or waiting:
                self._add_optimizer(path, optimizer)
            self._walk_deferred()
        called = frozenset(filter(_is_called_by_keras, self._own_kinds))
        searched = _own_values(self._task, self._functions, called)
        self.constants |= searched.found

        def reads(kinds: frozenset[type]) -> Read:
            kinds |= self._own_kinds - called
            if kinds not in searched.read:
                named = [type(self._task), *sorted(kinds, key=_name_of)]
                layers = sorted(called, key=_name_of)
                searched.read[kinds] = read_by_steps(searched.functions, layers, named)
            return searched.read[kinds]

        self._add_settings(reads)

    def _add_settings(self, reads: Callable[[frozenset[type]], Read]) -> None:
        held = attributes_of(self._task)
        found = settings_in(self._holders, held, self._seen, reads, self._is_state)
        self.too_large = found.too_large
        for path, constant in found.values.items():
            self.constants.setdefault(path, constant)

    def _is_state(self, thing: Any) -> bool:
        """Return whether an object has state of its own, which is found elsewhere."""
        return isinstance(thing, _WITH_STATE) or self._backend.native_children(thing) is not None

    @classmethod
    def read_by(cls, task: Any, function: Callable[..., Any]) -> dict[str, Constant]:
        """Find the Python values that a function may read: by name, or in what a task holds."""
        found = cls()
        found._walk_task(task)
        found._walk_deferred()
        called = set(filter(_is_called_by_keras, found._own_kinds))
        own, found.constants = {type(task), *found._own_kinds} - called, {}
        found._add_settings(lambda kinds: read_by_steps([function], called, own | kinds))
        return found.constants | own_values([function], [])

    def _walk_deferred(self) -> None:
        """Add what the attributes of deferred objects reach, and of those found by that."""
        for path, thing in self._deferred:  # which grows meanwhile
            if isinstance(thing, _OBJECTS):  # first: some are tracked by TensorFlow too
                if not isinstance(thing, _NOT_IN_STEPS):
                    self._add_plain(path, thing, vars(thing), PLAIN[:-1])  # None: later a tensor
                self._walk_members(path, thing)
            elif (children := self._backend.native_children(thing)) is not None:
                for name, part in children.items():
                    self._walk(part, f"{path}/{name}")
            elif self._holds_more(thing):
                self._walk_attributes(thing, path, None)
            else:
                self._holders[path] = Constant(partial(lambda x: x, thing), _keep)
        self._deferred.clear()

    def _holds_more(self, thing: Any) -> bool:
        """Return whether an object of a user's class reaches state that no other path reaches."""
        seen = {id(thing): thing}
        for holder in (waiting := [thing]):
            for part in islice(self._parts(holder), MOST_SEARCHED):
                known = id(part) in self.paths or id(part) in self._seen
                if known or _is_stateless(part) or id(part) in seen:
                    continue
                if isinstance(part, _STATE) or self._backend.is_native_variable(part):
                    return True
                if len(seen) == MOST_SEARCHED:
                    return False
                seen[id(part)] = part  # which keeps the id alive
                waiting.append(part)
        return False

    def _parts(self, thing: Any) -> Iterable[Any]:
        """Return what a container holds, or an object of a class that is searched."""
        if isinstance(thing, dict):
            return thing.values()
        if isinstance(thing, (list, tuple)):
            return thing
        if (children := self._backend.native_children(thing)) is not None:
            return children.values()
        own = is_own(type(thing)) or dataclasses.is_dataclass(thing)
        return attributes_of(thing).values() if own else ()

    def _walk_members(self, path: str, thing: Any, slots: bool = True) -> None:
        """Add what an object's attributes reach; `slots`: also variables and lists of them."""
        for name, value in list(vars(thing).items()):
            if _is_stateless(value) or name in BOOKKEEPING or name.startswith("_self_"):
                continue
            parts: Any = value.values() if isinstance(value, dict) else value
            parts = parts if isinstance(value, (list, tuple, dict)) else (value,)
            if slots or not any(isinstance(part, keras.Variable) for part in parts):
                own = any(_is_object(type(part)) for part in parts)
                constant = attribute(thing, name, None) if own else None
                self._walk(value, f"{path}/{name.lstrip('_')}", constant)

    def _walk(self, thing: Any, path: str, constant: Constant | None = None) -> None:
        """Add one value to the state: a variable, a container of variables, or a Python constant.

        `constant` reads and sets the value later; it is None if the Python values of this part of
        the state are not constants.
        """
        if isinstance(thing, keras.Variable) or self._backend.is_native_variable(thing):
            self._add(path, thing)
        elif isinstance(thing, (list, tuple, dict)):
            pairs = thing.items() if isinstance(thing, dict) else enumerate(thing)
            if self._first_visit(thing, path):
                if constant is not None:
                    self.constants[path] = constant
                for key, part in list(pairs):
                    if constant is not None or not (id(part) in self.paths or _is_stateless(part)):
                        # The key of an average refers to the variable that it follows.
                        of: Any = getattr(key, "deref", None)
                        name = key if of is None else path_in(self.paths, of())
                        self._walk(part, f"{path}/{name}", constant and item(constant, key))
        elif isinstance(thing, keras.random.SeedGenerator):
            if self._first_visit(thing, path):
                self._add(f"{path}/state", thing.state)
                self.seeds.append(thing.state)
        elif isinstance(thing, keras.optimizers.Optimizer):
            if self._first_visit(thing, path):
                if constant is not None:  # otherwise from `Model.compile`, and perhaps not used
                    refuse_scaling(path, thing)
                inner = _is_inside(path, self.optimizers)
                (self.inner_optimizers if inner else self.optimizers)[path] = thing
        elif isinstance(thing, keras.metrics.Metric):
            if self._first_visit(thing, path):
                self._add_metric(path, thing)
        elif isinstance(thing, keras.Layer):
            if self._first_visit(thing, path):
                self._add_layer(path, thing)
        elif (
            dataclasses.is_dataclass(thing)
            or getattr(thing, "holds_state", False)
            or isinstance(thing, keras.optimizers.schedules.LearningRateSchedule)
        ):
            if self._first_visit(thing, path):
                if getattr(thing, "is_accumulator", False):
                    self.accumulators[path] = thing
                self._walk_attributes(thing, path, constant)
        elif (
            isinstance(thing, HOLDERS)
            or self._backend.native_children(thing) is not None
            or is_own(type(thing))
        ) and self._first_visit(thing, path):
            self._deferred.append((path, thing))
        if constant is not None and not isinstance(thing, (list, tuple, dict)):
            # A plain value is a constant by value, any other object by identity.
            self.constants.setdefault(path, constant)

    def _walk_attributes(self, holder: Any, path: str, owner: Constant | None) -> None:
        """Add the attributes of a task, or of an object in one, which `owner` reads and sets."""
        left = excluded(holder)
        by_steps = getattr(holder, "built_by_steps", ())
        for name, value in attributes_of(holder).items():
            if name in left:
                continue
            inner = f"{path}/{name}" if path else name
            if name in by_steps:
                self.built_by_steps.append(inner)
                self._walk(value, inner)
                continue
            constant = attribute(holder, name, owner)
            if isinstance(value, PLAIN):
                self.constants[inner] = constant
            else:
                self._walk(value, inner, constant)

    def _add(self, path: str, variable: Variable) -> None:
        if id(variable) in self.paths:
            return
        unique, suffix = path, 1
        while unique in self.variables:
            unique, suffix = f"{path}_{suffix}", suffix + 1
        self.variables[unique] = variable
        self.paths[id(variable)] = unique

    def _first_visit(self, thing: Any, path: str) -> bool:
        if id(thing) in self._seen:
            return False
        self._seen.add(id(thing))
        if is_own(type(thing)):
            self._own_kinds.add(type(thing))
        if is_derived(thing):
            self.derived[path] = thing
        return True

    def _add_layer(self, path: str, layer: Any) -> None:
        self.layers.append(layer)
        self.layer_paths[id(layer)] = path
        self._add_plain(path, layer, ("trainable", *vars(layer)))
        attributes = _attributes(layer)
        variables = own_variables(layer)
        names = {id(value): name for name, value in attributes.items()}
        for variable in variables:
            if id(variable) in names:
                self._add(f"{path}/{names[id(variable)]}", variable)
        if isinstance(layer, (keras.Sequential, keras.Function)):
            for i, part in enumerate(layer.layers):
                self._walk(part, f"{path}/layers/{i}")
        for name, value in attributes.items():
            if not _is_stateless(value):  # skips most attributes: this runs once per epoch
                self._walk(value, f"{path}/{name}")
                if isinstance(value, (list, tuple, dict)) and is_own(type(layer)):
                    stored = name if name in vars(layer) else f"_{name}"
                    self._holders[f"{path}/{name}"] = attribute(layer, stored, None)
        for kind, i, part in listed(layer, _PARTS):  # those without an attribute
            self._walk(part, f"{path}/{kind.strip('_')}/{i}")
        for i, variable in enumerate(variables):  # unnamed variables have Keras' automatic names
            if id(variable) not in self.paths:
                automatic = re.fullmatch(r"variable(_\d+)?", variable.name)
                self._add(f"{path}/{f'variables/{i}' if automatic else variable.name}", variable)

    def _add_plain(
        self, path: str, thing: Any, names: Iterable[str], kinds: tuple[type, ...] = PLAIN
    ) -> None:
        """Add the numbers, flags, strings and arrays of an object of Keras to the constants."""
        held, left = vars(thing), excluded(thing)
        for name in names:
            value = held.get(name)
            if type(value) not in STATELESS and name not in left:  # a lookup: see `_add_layer`
                self._add_array(path, thing, name, value)
            if name.startswith("_") or name in ("name", "built") or name in left:
                continue
            if isinstance(getattr(thing, name, ()), kinds):
                self.constants.setdefault(f"{path}/{name}", attribute(thing, name, None))

    def _add_array(self, path: str, thing: Any, name: str, value: Any) -> None:
        """Add an array, or a container of arrays, to the constants."""
        parts: Any = value.values() if isinstance(value, dict) else value
        parts = parts if isinstance(value, (list, tuple, dict)) else (value,)
        if name in _NO_ARRAYS or name.startswith("_self_") or not any(map(is_array, parts)):
            return
        constant = self.arrays[f"{path}/{name}"] = attribute(thing, name, None)
        self._walk(value, f"{path}/{name}", constant)

    def _add_metric(self, path: str, metric: Any) -> None:
        if not _is_inside(path, self._metric_paths):  # else the outer one uses and resets it
            own = path.endswith(f"/{metric.name}")  # which may contain slashes
            name = metric.name if own else path.rsplit("/", 1)[-1]
            self.metrics[path if name.isdecimal() or name in self.metrics else name] = metric
        self._metric_paths.append(path)
        for variable in metric.variables:
            self._add(f"{path}/{variable.name}", variable)
        for name, value in list(vars(metric).items()):
            if name not in BOOKKEEPING and isinstance(value, keras.random.SeedGenerator):
                self._walk(value, f"{path}/{name}")
        self._deferred.append((path, metric))

    def _add_optimizer(self, path: str, optimizer: Any) -> None:
        """Add an optimizer's variables; slots are named after the variables they belong to."""
        if id(optimizer) in self._named:
            return
        self._named.add(id(optimizer))
        self._add_constants_of_optimizer(path, optimizer)
        if not self._knows(optimizer):  # it may train variables that it holds itself
            self._walk_members(path, optimizer, slots=False)
            self._walk_deferred()
        owners = [path_in(self.paths, v) for v in optimizer._trainable_variables]
        for name, value in list(vars(optimizer).items()):
            slot = f"{path}/{name.lstrip('_')}"
            if isinstance(value, keras.Variable):
                self._add(slot, value)
            elif value is not None and value is getattr(optimizer, "inner_optimizer", None):
                # Before `variables` below, which a `LossScaleOptimizer` has of its inner one.
                self._walk(value, slot)
                self._add_optimizer(slot, value)
            elif isinstance(value, list) and name not in ("_variables", "_trainable_variables"):
                for i, part in enumerate(value):
                    if isinstance(part, keras.Variable):
                        self._add(f"{slot}/{owners[i] if i < len(owners) else i}", part)
                    elif isinstance(part, keras.optimizers.Optimizer):
                        # Before `variables` below, which has those of a MultiOptimizer's parts too.
                        self._walk(part, f"{slot}/{i}")
                        self._add_optimizer(f"{slot}/{i}", part)
        for i, variable in enumerate(optimizer.variables):
            self._add(f"{path}/variables/{i}", variable)
        self._deferred.append((path, optimizer))

    def _knows(self, optimizer: Any) -> bool:
        """Return whether the variables that an optimizer trains have paths."""
        return all(id(v) in self.paths for v in optimizer._trainable_variables)

    def _add_constants_of_optimizer(self, path: str, optimizer: Any) -> None:
        """Add an optimizer's numbers and its learning rate (a variable or a schedule) to constants.

        A compiled step uses the learning rate object that was set when the step was compiled.
        """
        self._add_plain(path, optimizer, vars(optimizer))
        rate = getattr(optimizer, "_learning_rate", None)
        if rate is not None:
            reads = partial(getattr, optimizer, "_learning_rate", None)
            writes = partial(_set_learning_rate, optimizer)
            constant = Constant(reads, writes, optimizer, "_learning_rate")
            if isinstance(rate, keras.Variable):
                self.constants.setdefault(f"{path}/learning_rate", constant)
            else:
                self._walk(rate, f"{path}/learning_rate", constant)


def _is_stateless(value: Any) -> bool:
    """Say, quickly, that a value holds no state; False for some that hold none."""
    return type(value) in STATELESS or (isinstance(value, (list, tuple, dict)) and not value)


@cache
def _is_object(kind: type) -> bool:
    """Return whether a class is one of an object of Keras, other than a layer."""
    return issubclass(kind, _OBJECTS) and not issubclass(kind, keras.Layer)


def _is_inside(path: str, others: Iterable[str]) -> bool:
    """Return whether an object belongs to one of the objects with other paths."""
    return any(path.startswith(f"{other}/") for other in others)


def path_in(paths: Mapping[int, str], variable: Variable) -> str:
    """Return a variable's path by its id, or Keras' path of it if it is not part of the state."""
    return paths.get(id(variable)) or str(getattr(variable, "path", variable.name))


def _own_values(task: Any, held: list[Any], layers: frozenset[type]) -> Searched:
    """Return the plain values that the functions of a task and of its layers use by name.

    They are searched once for each set of functions and layers, since this takes milliseconds.

    Args:
        task: A task.
        held: Functions that it holds.
        layers: The classes of its layers.
    """
    functions = (*getattr(task, "_made_with", MadeWith({})).functions, *held)
    known: Searched | None = getattr(task, "_own_values", None)
    if known is None or (known.functions, known.kinds) != (functions, layers):
        found = own_values(functions, [type(task), *sorted(layers, key=_name_of)])
        known = Searched(functions, layers, found)
        if hasattr(type(task), "_own_values"):
            object.__setattr__(task, "_own_values", known)
    return known


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


@cache
def _is_called_by_keras(kind: type) -> bool:
    """Return whether Keras may call any method of a class in a step."""
    return issubclass(kind, (keras.Layer, *_OBJECTS)) and not issubclass(kind, _NOT_IN_STEPS)


def _keep(value: Any) -> None:
    """Do not replace an object, only its parts."""


def _set_learning_rate(optimizer: Any, rate: Any) -> None:
    """Set an optimizer's learning rate to a schedule or a variable.

    Keras' setter does not accept the variable that was the learning rate before.
    """
    if not isinstance(rate, keras.Variable):
        optimizer.learning_rate = rate
    elif optimizer._learning_rate is not rate:
        attributes = vars(optimizer)
        attributes["_learning_rate"] = rate
        if not any(v is rate for v in optimizer.variables):
            # In the list itself: a built optimizer accepts no new variables.
            first = optimizer.variables[0]
            lists = [x for x in attributes.values() if isinstance(x, list)]
            next(x for x in lists if x and x[0] is first).append(rate)


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
    # On PyTorch, layers are modules, and those that are attributes are not in `vars`.
    modules = dict(layer.named_children()) if hasattr(layer, "named_children") else {}
    layers = {
        name: value
        for name, value in {**modules, **attributes}.items()
        if isinstance(value, keras.Layer)
    }
    # Layers come first on every backend, because an object that is reachable by several paths is
    # named after the first one.
    return {name.lstrip("_"): value for name, value in {**layers, **attributes}.items()}
