"""The state of a task: all variables reachable from its attributes, each once, named by path."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from ..backends.base import active
from ..backends.types import Variable
from ..core.identity import MadeWith
from ..core.split_arrays import StoredParts
from ..core.user_code import attributes_of, name_in
from ..errors import StateError, listed
from .constants import Constant, fingerprint, fingerprints
from .derived import assigned
from .discovery import MOST_SEARCHED, PLAIN, Discovery, path_in
from .own_values import STEPS, is_own
from .results import NUMBERS
from .snapshot import Snapshot


class State:
    """The variables, layers, optimizers and metrics reachable from a task's attributes.

    Attributes:
        variables: Path to variable, in the order of the attributes; those of optimizers come last.
        layers: All layers.
        layer_paths: The paths of the layers, by id.
        optimizers: Path to optimizer, without those that are parts of others.
        all_optimizers: Path to optimizer, with those that are parts of others.
        accumulators: Path to `treadle.Accumulator`.
        metrics: Name to metric, without those that are parts of others. The name is the last part
            of the path, or the whole path if that part is a position in a list or the name of
            another metric.
        built_by_steps: Paths of attributes whose variables the first batch creates, and which are
            no constants: their holder lists their names in an attribute `built_by_steps`.
        seeds: The states of seed generators, including Keras' global one.
        derived: Path to object with derived state; see `derived`.
        too_large: Paths of objects without state that hold too many values to compare all of them.
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

    def __init__(self, task: Any, found: Discovery) -> None:
        self._task = task
        self.variables, self._paths = found.variables, found.paths
        self.layers, self.layer_paths = found.layers, found.layer_paths
        self.optimizers, self.accumulators = found.optimizers, found.accumulators
        self.all_optimizers = {**found.optimizers, **found.inner_optimizers}
        self.metrics, self.seeds = found.metrics, found.seeds
        self.loss_scale, self.derived = found.loss_scale, found.derived
        self._constants, self._arrays = found.constants, found.arrays
        self.built_by_steps, self.too_large = found.built_by_steps, found.too_large
        self._backend = active()

    @classmethod
    def discover(cls, task: Any) -> "State":
        """Find the state of a task by walking its attributes.

        Raises:
            StateError: An optimizer scales its own loss, which `gradients` would not know of; or a
                layer computes in float16, and the attribute `loss_scale` is not a `LossScale`.
        """
        return cls(task, Discovery.of(task))

    @classmethod
    def constants_of(cls, task: Any) -> dict[str, Constant]:
        """Return the Python values of a task, by path, as readable and writable constants.

        A layer precedes its sublayers, because setting its `trainable` sets theirs. Nothing is
        changed.
        """
        return Discovery.constants_of(task)

    def path_of(self, variable: Variable) -> str:
        """Return a variable's path, or Keras' path of it if it is not part of the state."""
        return path_in(self._paths, variable)

    def name_of(self, thing: Any) -> str:
        """Return the path of a loss, or the name of a metric; empty if it is unknown."""
        parts = ((path, constant.read()) for path, constant in self._constants.items())
        return next((name for name, x in (*parts, *self.metrics.items()) if x is thing), "")

    def narrow(self) -> list[str]:
        """Return the paths of variables, layers to be built and losses narrower than float64."""
        layers = {self.layer_paths[id(x)]: x.variable_dtype for x in self.layers if not x.built}
        values = {path: constant.read() for path, constant in self._constants.items()}
        losses = {p: x.dtype for p, x in values.items() if isinstance(x, keras.losses.Loss)}
        variables = {p: keras.backend.standardize_dtype(v.dtype) for p, v in self.variables.items()}
        found = {**variables, **layers, **losses}
        return [p for p, dtype in found.items() if "float" in dtype and dtype != "float64"]

    def refuse_unsaved(self) -> None:
        """Reject variables that no checkpoint can hold.

        Raises:
            StateError: The values of a variable are no numbers.
        """
        for path, variable in self.variables.items():
            dtype = str(getattr(variable.dtype, "name", variable.dtype))
            if not dtype.startswith((*NUMBERS, "complex")):
                raise StateError(
                    f"{path} is a variable of dtype {dtype}, and a run directory can only hold "
                    "numbers, so that the run could not resume: keep the number of a string in a "
                    "list that is an attribute of the task, or train without a directory"
                )

    def refuse_hidden(self, variables: Sequence[Variable], name: str) -> None:
        """Reject variables that a step uses and that are not part of the state.

        Raises:
            StateError: There are some. The message has the name by which the step uses what holds
                the first one. If an attribute holds it in an object of a class that is not
                searched, the message names both.
        """
        if not variables:
            return
        used = self.name_in_steps(lambda thing: _holds(thing, variables[0]))
        names = listed([self.path_of(variable) for variable in variables], 5)
        raise StateError(
            f"{name} uses {names}, which no attribute of the task reaches, so a compiled "
            f"step would never see it change: keep {used or 'what holds it'} as an attribute, or "
            f"pass it to treadle.task(…, {used or 'model'}={used or 'model'})"
            f"{self._holder_of(variables[0])}"
        )

    def name_in_steps(self, wanted: Callable[[Any], bool]) -> str:
        """Return the name by which the functions of the task use an object; empty if unknown."""
        of_class = [getattr(type(self._task), name, None) for name in sorted(STEPS)]
        functions = (*getattr(self._task, "_made_with", MadeWith({})).functions, *of_class)
        try:
            return name_in(functions, wanted)
        except Exception:  # objects of the user may raise anything when they are looked at
            return ""

    def _holder_of(self, variable: Variable) -> str:
        """Return a sentence about an object that is not searched and holds a variable, if any."""
        held = {path: x for path, x in self._constants.items() if not x.used_by_name}
        things = [(path, constant.read()) for path, constant in held.items()]
        waiting, seen = [(path, thing, "") for path, thing in things], dict[int, Any]()
        for path, thing, kind in waiting:
            if thing is variable and kind:
                return f". {path} holds it in a {kind}, whose attributes are not searched"
            if isinstance(thing, (*PLAIN, type)) or id(thing) in seen or len(seen) > MOST_SEARCHED:
                continue
            seen[id(thing)] = thing
            if isinstance(thing, (dict, list, tuple, set, frozenset)):
                parts: Any = thing.values() if isinstance(thing, dict) else thing
            else:
                kind = kind or ("" if is_own(type(thing)) else type(thing).__name__)
                parts = attributes_of(thing).values()
            waiting += [(path, part, kind) for part in list(parts)]
        return ""

    def __contains__(self, variable: Variable) -> bool:
        """Return whether a variable is part of the state."""
        return id(variable) in self._paths

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return a copy of every value as a NumPy array."""
        return {path: self._backend.read(v) for path, v in self.variables.items()}

    def stage(
        self, buffers: Mapping[str, np.ndarray[Any, Any]], only_split: bool = False
    ) -> dict[str, Any]:
        """Return every value as a NumPy array that later steps do not change.

        Of values that are split among processes, return the parts that this process writes.

        Args:
            buffers: The result of an earlier call that is no longer needed; it is overwritten.
            only_split: Return only values that are split among processes.
        """
        chosen = self.variables
        if only_split:
            chosen = {path: v for path, v in chosen.items() if self._backend.is_split([v])}
        return {path: self._backend.stage(v, buffers.get(path)) for path, v in chosen.items()}

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
            value = arrays[path]
            if isinstance(value, StoredParts) and not self._backend.is_split([variable]):
                value = np.asarray(value)
            self._backend.write(variable, value)
        assigned(chosen.values())

    def keep(self, paths: Sequence[str] | None = None) -> dict[str, Any]:
        """Return copies of values, on the device if that is cheap, for `put_back`."""
        chosen = self.variables if paths is None else paths
        return {path: self._backend.keep(self.variables[path]) for path in chosen}

    def put_back(self, kept: Mapping[str, Any]) -> None:
        """Set variables to what `keep` returned."""
        for path, value in kept.items():
            self._backend.write(self.variables[path], value)
        assigned(self.variables[path] for path in kept)

    def constants(self) -> dict[str, Any]:
        """Return the fingerprints of the Python values, by path.

        A compiled step takes Python values as constants, with their values at the time of tracing.
        """
        return fingerprints(self._constants)

    def add_constants(self, found: Mapping[str, Constant], before: Mapping[str, Any]) -> None:
        """Add Python values, and leave out those used by name that a dry run changed: caches.

        Args:
            found: The values by path.
            before: The fingerprints of all values before the dry run.
        """
        self._constants |= found
        for path, constant in list(self._constants.items()):
            if constant.used_by_name and fingerprint(constant.read()) != before.get(path):
                del self._constants[path]

    def in_no_checkpoint(self, paths: Iterable[str]) -> list[str]:
        """Return the paths of containers among some values that only functions reach."""
        known = {path: self._constants[path] for path in paths if path in self._constants}
        kinds = (list, tuple, dict)
        return [p for p, x in known.items() if x.used_by_name and isinstance(x.read(), kinds)]

    def leave_out(self, paths: Iterable[str]) -> list[str]:
        """Leave out those of some values that are used by name; return their paths.

        A step changes them itself, perhaps while it runs, as a callback does.
        """
        own = [path for path in paths if self._constants[path].used_by_name]
        for path in own:
            del self._constants[path]
        return own

    @staticmethod
    def read_by(function: Any, task: Any) -> dict[str, Constant]:
        """Return the Python values that a function may read besides those that steps read."""
        return Discovery.read_by(task, function)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the Python values, which finds quickly that none has changed."""
        return Snapshot(self._constants)

    def held_arrays(self) -> dict[tuple[int, str], tuple[Any, list[Any]]]:
        """Return the arrays that objects of Keras hold: the object, and the array or the items.

        The keys are the id of the object, and the attribute.
        """
        found: dict[tuple[int, str], tuple[Any, list[Any]]] = {}
        for constant in self._arrays.values():
            value = constant.read()
            parts: Any = value.values() if isinstance(value, dict) else value
            listed = list(parts) if isinstance(value, (list, tuple, dict)) else [value]
            found[id(constant.holder), constant.name] = constant.holder, listed
        return found


def _holds(thing: Any, variable: Variable) -> bool:
    """Return whether an object is a variable, or a part of Keras or a container that holds it."""
    if isinstance(thing, (list, tuple, dict)):
        parts = list(thing.values() if isinstance(thing, dict) else thing)
        nested = (list, tuple, dict)
        return any(_holds(part, variable) for part in parts if not isinstance(part, nested))
    if isinstance(thing, (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)):
        return any(part is variable for part in thing.variables)
    if isinstance(thing, keras.random.SeedGenerator):
        return thing.state is variable
    return thing is variable


def _kind(dtype: str) -> str:
    """Return `float`, `int` or `bool` for a dtype of any size."""
    return (
        dtype.rstrip("0123456789").removeprefix("u").removeprefix("b") if dtype != "bool" else dtype
    )
