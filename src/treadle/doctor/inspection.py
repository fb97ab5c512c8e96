"""Step inspection: running one step uncompiled, and recording its activations and gradients."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.options import Options
from ..core.randomness import set_random_states
from ..steps.compiled_step import CompiledStep
from ..steps.probes import GRADIENTS, LAYER, probing
from ..steps.python_values import PythonValues
from .numbers import Array, as_floats, is_float
from .recording import StepRecorder
from .visiting import StepInputs


@dataclass(frozen=True)
class StepInspection:
    """The values that one step computed, by path.

    Attributes:
        values: The values that the step returned.
        activations: The outputs of layers, in the order of their calls. Further calls of a layer
            have `#2` and so on appended to the path; parts of a structure have their keys.
        gradients: The gradients that `treadle.gradients` returned.
        after: Every variable after the step.
        updates: The change of each variable of a float dtype, as float64.
        layers: The class of each layer, by path.
    """

    values: Mapping[str, Array]
    activations: Mapping[str, Array]
    gradients: Mapping[str, Array]
    after: Mapping[str, Array]
    updates: Mapping[str, Array]
    layers: Mapping[str, str]


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
    recorder = StepRecorder()
    with probing(recorder, prepared.state, frozenset((LAYER, GRADIENTS))):
        values, _, _ = prepared.run(window, inputs.progress.step).fetch()
    activations, gradients = list[tuple[str, Array]](), list[tuple[str, Array]]()
    for event in recorder.events():
        if event.call.kind == LAYER:
            activations += [(event.call.path + k, x) for k, x in event.part("outputs").items()]
        elif event.call.kind == GRADIENTS:
            gradients += event.by_path.items()
    paths, after = prepared.state.layer_paths, prepared.state.arrays()
    floats = {p: x for p, x in inputs.state.items() if is_float(x)}
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        updates = {path: as_floats(after[path]) - as_floats(x) for path, x in floats.items()}
    return StepInspection(
        values={name: x[0] for name, x in values.items()},
        activations=_numbered(activations),
        gradients=_numbered(gradients),
        after=after,
        updates=updates,
        # Of the layers that share a path (with a Keras input layer, for example), the first counts.
        layers={paths[id(x)]: type(x).__name__ for x in reversed(prepared.state.layers)},
    )


def _numbered(pairs: Sequence[tuple[str, Array]]) -> dict[str, Array]:
    """Return arrays by path; `#2` and so on is appended to a path that is repeated."""
    counts: Counter[str] = Counter()
    found: dict[str, Array] = {}
    for path, array in pairs:
        counts[path] += 1
        found[f"{path}#{counts[path]}" if counts[path] > 1 else path] = array
    return found
