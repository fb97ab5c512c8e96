"""Statistics of each layer in one step: norms of gradient, weights and update, and dead units.

A measured step is the step itself with further outputs. It is compiled as a program of its own and
runs in addition to the step, from the same state with the same batch; afterwards the state is
restored. More outputs of the step's own program would change how XLA fuses operations, and so the
rounding of the weights. A step that runs as Python is measured while it runs: there, each operation
is a call of its own, whose result does not depend on others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import keras
import numpy as np
from keras import ops

from ..backends.base import Outputs
from ..backends.types import Tensor, Variable
from ..core.float64 import wide
from ..core.logs import UNDONE, Array
from .probes import APPLY, GRADIENTS, LAYER, Probe, ProbedCall, probing
from .skipping import Step
from .state import State

# Functions whose result is exactly 0 for all inputs below some number.
RECTIFIERS: Final = {
    *("relu", "relu6", "gelu", "silu", "swish", "hard_silu", "hard_swish", "hard_sigmoid"),
    *("sparse_plus", "squareplus", "soft_shrink", "hard_shrink", "threshold"),
}
PREFIX: Final = "layers/"
GRADIENT, UNITS = "gradient", "units"
KINDS: Final = frozenset((LAYER, GRADIENTS, APPLY))
WEIGHT, UPDATE = "weight", "update"


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What one step did with one layer.

    Attributes:
        path: The path of the layer, or of a variable that is in no layer.
        kind: The class of the layer; `"Variable"` for a variable that is in no layer.
        optimizers: The paths of the optimizers that update its weights.
        gradient: The norm of the gradient of the loss; None if it was not measured.
        weight: The norm of the trainable weights before the step; None if there are none.
        update: The norm of the change of these weights; None if there are none.
        size: The number of trainable weights.
        units: For each unit, whether its output was not 0 for some part of the batch; None if the
            layer has no activation that can be exactly 0.
    """

    path: str
    kind: str
    optimizers: tuple[str, ...]
    gradient: float | None
    weight: float | None
    update: float | None
    size: int
    units: Array | None

    @property
    def dead(self) -> float | None:
        """The share of units whose output was 0 for the whole batch."""
        return None if self.units is None else float(1 - self.units.mean())


@dataclass(frozen=True, eq=False)
class StepStatistics:
    """The statistics of all layers in one step.

    Attributes:
        step: The number of the step, from 1.
        layers: The layers, in the order of the forward pass.
        undone: Whether the step was undone, by loss scaling or `NonFinite("skip")`.
        accumulates: Whether gradients are accumulated, so that most steps update no weight.
    """

    step: int
    layers: Sequence[LayerStatistics]
    undone: bool = False
    accumulates: bool = False


class MeasuredStep:
    """A step that also returns statistics of its layers.

    Args:
        step: The step.
        state: The state of its task.
        assigned: The paths of the variables that it assigns, or that its optimizers update.
    """

    def __init__(self, step: Step, state: State, assigned: Sequence[str]) -> None:
        self._step, self._state = step, state
        self._trained = {path: v for path, v in state.variables.items() if _is_trained(v)}
        self._trained = {path: v for path, v in self._trained.items() if path in set(assigned)}
        self._gradients: list[str] = []
        self._units: list[tuple[str, int]] = []
        self._calls: list[str] = []

    def __call__(self, batch: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the step, and return its values and the statistics."""
        recorder = _LayerRecorder()
        before = [ops.copy(ops.convert_to_tensor(v)) for v in self._trained.values()]
        with probing(recorder, self._state, KINDS):
            values, weights = self._step(batch)
        after = [ops.convert_to_tensor(v) for v in self._trained.values()]
        gradients, units = recorder.found()
        # The names are Python values of the trace, as those of the values that a step returns.
        self._gradients, self._calls = list(gradients), recorder.calls()
        self._units = [(path, int(flags.shape[0])) for path, flags in units.items()]
        changes = [_wide(new) - _wide(old) for new, old in zip(after, before, strict=True)]
        columns = {
            GRADIENT: list(gradients.values()),
            WEIGHT: [_norm(x) for x in before],
            UPDATE: [_norm(x) for x in changes],
        }
        measured = {PREFIX + name: ops.stack(x) for name, x in columns.items() if x}
        if units:
            flags = [ops.cast(x, "float32") for x in units.values()]
            measured[PREFIX + UNITS] = ops.concatenate(flags, axis=0)
        return {**values, **measured}, weights

    def split(
        self, values: Mapping[str, Array], step: int
    ) -> tuple[dict[str, Any], StepStatistics]:
        """Return the values of the step itself, and the statistics of the first step of a window.

        Args:
            values: The values of a window of this step.
            step: The number of its first step, from 1.
        """
        own = {name: x for name, x in values.items() if not name.startswith(PREFIX)}
        none = np.zeros(0, np.float32)
        first = {
            name: np.asarray(values[PREFIX + name][0]) if PREFIX + name in values else none
            for name in (GRADIENT, WEIGHT, UPDATE, UNITS)
        }
        norms = {
            GRADIENT: dict(zip(self._gradients, first[GRADIENT].tolist(), strict=True)),
            WEIGHT: dict(zip(self._trained, first[WEIGHT].tolist(), strict=True)),
            UPDATE: dict(zip(self._trained, first[UPDATE].tolist(), strict=True)),
        }
        ends = np.cumsum([size for _, size in self._units], dtype=int)
        parts = np.split(first[UNITS] > 0, ends[:-1]) if self._units else []
        units = dict(zip((path for path, _ in self._units), parts, strict=True))
        undone = bool(own[UNDONE][0]) if UNDONE in own else False
        layers = self._layers(norms, units)
        return own, StepStatistics(step, layers, undone, self._accumulates())

    def _layers(
        self, norms: Mapping[str, Mapping[str, float]], units: Mapping[str, Array]
    ) -> list[LayerStatistics]:
        """Return the statistics by layer, in the order of the forward pass."""
        kinds: dict[str, str] = {}
        for layer in self._state.layers:
            kinds.setdefault(self._state.layer_paths[id(layer)], type(layer).__name__)
        paths = dict.fromkeys([*self._trained, *norms[GRADIENT]])
        variables: dict[str, list[str]] = {}
        for path in paths:
            parent = path.rpartition("/")[0]
            variables.setdefault(parent if parent in kinds else path, []).append(path)
        for path in units:
            variables.setdefault(path, [])
        order = {path: i for i, path in enumerate(self._calls)}
        listed = {path: i for i, path in enumerate(variables)}
        found = sorted(variables, key=lambda p: (_position(p, order), listed[p]))
        owners = self._optimizers()
        return [
            LayerStatistics(
                path=path,
                kind=kinds.get(path, "Variable"),
                optimizers=tuple(dict.fromkeys(o for p in variables[path] for o in owners(p))),
                gradient=_joined(norms[GRADIENT], variables[path]),
                weight=_joined(norms[WEIGHT], variables[path]),
                update=_joined(norms[UPDATE], variables[path]),
                size=sum(_size(self._trained[p]) for p in variables[path] if p in self._trained),
                units=units.get(path),
            )
            for path in found
        ]

    def _optimizers(self) -> Callable[[str], list[str]]:
        """Return a function of a variable's path: the paths of the optimizers that update it."""
        held = {
            path: {id(v) for v in getattr(optimizer, "_trainable_variables", ())}
            for path, optimizer in self._state.optimizers.items()
        }
        variables = self._state.variables
        return lambda path: [o for o, ids in held.items() if id(variables.get(path)) in ids]

    def _accumulates(self) -> bool:
        own = self._state.optimizers.values()
        return bool(self._state.accumulators) or any(
            getattr(optimizer, "gradient_accumulation_steps", None) for optimizer in own
        )


class MeasuredOutputs:
    """The outputs of a window of a measured step that replaces the step itself.

    Attributes:
        statistics: The statistics of the first step; None before `fetch`.

    Args:
        outputs: The outputs of the measured step.
        measured: The measured step.
        step: The number of the first step, from 1.
    """

    def __init__(self, outputs: Outputs, measured: MeasuredStep, step: int) -> None:
        self._outputs, self._measured, self._step = outputs, measured, step
        self.statistics: StepStatistics | None = None

    @property
    def seconds(self) -> float:
        """The duration of the steps."""
        return self._outputs.seconds

    @property
    def ended(self) -> float:
        """The time when the steps ended."""
        return self._outputs.ended

    def running(self) -> bool:
        """Return whether the steps are still running."""
        return self._outputs.running()

    def fetch(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Wait, and return the outputs of the step itself."""
        values, weights, broken = self._outputs.fetch()
        values, self.statistics = self._measured.split(values, self._step)
        return values, weights, broken


class _LayerRecorder(Probe):
    """Records the norms of gradients, and which units of layers were not 0."""

    def __init__(self) -> None:
        super().__init__()
        self._called: list[str] = []

    def see(self, call: ProbedCall, values: dict[str, Any]) -> Any:
        """Record the norms of gradients, and calls of layers and which of their units are not 0."""
        outputs = values["outputs"]
        if call.kind == LAYER:
            self._called.append(call.path)
            units = units_of(call.of, outputs)
            if units is not None:
                self.met.append((UNITS, call.path, units))
        elif call.kind in (GRADIENTS, APPLY):
            pairs = zip(call.facts["paths"], outputs, strict=False)
            self.met += [(call.kind, path, _norm(g)) for path, g in pairs if g is not None]
        return outputs

    def calls(self) -> list[str]:
        """Return the paths of the layers, in the order of their first calls."""
        return list(dict.fromkeys(self._called))

    def found(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the norm of each variable's gradient, and the flags of each layer's units.

        Of several gradients of a variable, the last one counts. Those that an optimizer applies
        count only for variables without others, since they may be clipped. A unit that several
        calls of its layer compute is active if it is in one of them.
        """
        gradients: dict[str, dict[str, Tensor]] = {GRADIENTS: {}, APPLY: {}}
        units: dict[str, Tensor] = {}
        for kind, path, x in self.met:
            if kind != UNITS:
                gradients[kind][path] = x
            elif path in units and units[path].shape == x.shape:
                units[path] = ops.logical_or(units[path], x)
            else:
                units.setdefault(path, x)
        return gradients[APPLY] | gradients[GRADIENTS], units


def units_of(layer: Any, outputs: Any) -> Tensor | None:
    """Return which units of a layer's outputs are not 0; None if its units are never exactly 0."""
    if not (_rectifies(layer) and layer.trainable and ops.is_tensor(outputs)):
        return None
    if len(outputs.shape) < 2:
        return None
    first = getattr(layer, "data_format", None) == "channels_first" and len(outputs.shape) > 2
    unit = 1 if first else len(outputs.shape) - 1
    others = [axis for axis in range(len(outputs.shape)) if axis != unit]
    return ops.any(ops.not_equal(outputs, 0), axis=others)


def _is_trained(variable: Variable) -> bool:
    trainable = getattr(variable, "trainable", getattr(variable, "requires_grad", False))
    return bool(trainable) and "float" in keras.backend.standardize_dtype(variable.dtype)


def _size(variable: Variable) -> int:
    return int(np.prod(variable.shape))


def _rectifies(layer: Any) -> bool:
    """Return whether a layer ends with a function that is exactly 0 for many inputs."""
    if isinstance(layer, keras.layers.ReLU):
        return not layer.negative_slope
    activation = getattr(layer, "activation", None)
    if isinstance(activation, keras.layers.Layer):
        return _rectifies(activation)
    return getattr(activation, "__name__", "") in RECTIFIERS


def _norm(tensor: Any) -> Tensor:
    """Return the norm; also of numbers whose squares are outside of the range of float32."""
    x = _wide(ops.convert_to_tensor(tensor))
    if 0 in x.shape:
        return ops.zeros((), wide())
    most = ops.max(ops.abs(x))
    scale = ops.where(most > 0, most, ops.ones_like(most))
    return ops.cast(scale * ops.sqrt(ops.sum(ops.square(x / scale))), wide())


def _wide(tensor: Tensor) -> Tensor:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return tensor if dtype == "float64" else ops.cast(tensor, "float32")


def _joined(norms: Mapping[str, float], paths: Sequence[str]) -> float | None:
    """Return the norm of several variables together; None if none of them has one."""
    found = [norms[path] for path in paths if path in norms]
    return float(np.sqrt(np.sum(np.square(np.array(found, np.float64))))) if found else None


def _position(path: str, order: Mapping[str, int]) -> float:
    """Return the position of the first call of a layer, or of the layer around it."""
    while path:
        if path in order:
            return order[path]
        path = path.rpartition("/")[0]
    return float("inf")
