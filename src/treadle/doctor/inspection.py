"""Step inspection: running one step uncompiled, and recording its activations and gradients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from keras import ops

from ..backends.base import active
from ..backends.records import Records, recording_layers
from ..backends.step_context import recorded_by
from ..core import structures
from ..core.options import Options
from ..core.randomness import set_random_states
from ..steps.compiled_step import CompiledStep
from ..steps.python_values import PythonValues
from .numbers import Array
from .visiting import StepInputs

ACTIVATION, GRADIENT = "activation", "gradient"


@dataclass(frozen=True)
class StepInspection:
    """The values that one step computed, by path.

    Attributes:
        values: The values that the step returned.
        activations: The outputs of layers, in the order of their calls. Further calls of a layer
            have `#2` and so on appended to the path; parts of a structure have their keys.
        gradients: The gradients that `treadle.gradients` returned.
        after: Every variable after the step.
        layers: The class of each layer, by path.
    """

    values: Mapping[str, Array]
    activations: Mapping[str, Array]
    gradients: Mapping[str, Array]
    after: Mapping[str, Array]
    layers: Mapping[str, str]


class OutputRecorder(Records):
    """Records the outputs of layers and of `treadle.gradients`; a `backends.step_context.Recorder`.

    Args:
        paths: The layers' paths, by id.
    """

    def __init__(self, paths: Mapping[int, str]) -> None:
        super().__init__()
        self._paths = paths

    def gradients(self, paths: Sequence[str], gradients: Sequence[Any], loss: Any) -> None:
        """Record gradients."""
        if self.in_place:
            self.met += [(GRADIENT, path, g) for path, g in zip(paths, gradients, strict=True)]

    def output(self, layer: Any, outputs: Any) -> None:
        """Record a layer's outputs; layers that are not part of the task are ignored."""
        path = self._paths.get(id(layer))
        if path is None or not self.in_place:
            return
        for keys, leaf in structures.with_paths(outputs):
            if ops.is_tensor(leaf):
                name = path + structures.text_of(keys)
                self.met.append((ACTIVATION, name, leaf))

    def arrays(self, kind: str) -> dict[str, Array]:
        """Return everything of one kind that was recorded, in order."""
        counts: Counter[str] = Counter()
        found: dict[str, Array] = {}
        for which, path, tensor in self.met:
            if which == kind:
                counts[path] += 1
                name = f"{path}#{counts[path]}" if counts[path] > 1 else path
                found[name] = active().to_numpy(ops.stop_gradient(tensor))
        return found


def inspect_step(task: Any, inputs: StepInputs, options: Options) -> StepInspection:
    """Run a step uncompiled, and record the values that it computes.

    Args:
        task: The task; it keeps the state after the step.
        inputs: The step inputs.
        options: The run's execution options.
    """
    window = inputs.window.streamed()
    PythonValues(task).set(inputs.constants)  # hooks may have changed some after the step
    eager = replace(options, execution="eager")
    prepared = CompiledStep(task, task.train_step, window.batch(0), eager, "train_step")
    # A batch of new shapes may create variables, which then keep their initial values.
    known = [path for path in prepared.state.variables if path in inputs.state]
    prepared.state.assign(inputs.state, among=known)
    set_random_states(inputs.random)
    keeper = OutputRecorder(prepared.state.layer_paths)
    with recorded_by(keeper), recording_layers():
        values, _, _ = prepared.run(window, inputs.progress.step).fetch()
    paths = prepared.state.layer_paths
    return StepInspection(
        values={name: x[0] for name, x in values.items()},
        activations=keeper.arrays(ACTIVATION),
        gradients=keeper.arrays(GRADIENT),
        after=prepared.state.arrays(),
        # Of the layers that share a path (with a Keras input layer, for example), the first counts.
        layers={paths[id(x)]: type(x).__name__ for x in reversed(prepared.state.layers)},
    )
