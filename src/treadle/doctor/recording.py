"""The calls of a step that runs uncompiled, with their arrays."""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from keras import ops

from ..backends.base import active
from ..core import structures
from ..steps.probes import APPLY, Key, Probe, ProbedCall
from .numbers import Array

Change = Callable[[Any], Any]
"""Returns other outputs of a call."""


class Event:
    """One call during a step.

    Attributes:
        call: Its Python values.
    """

    def __init__(self, call: ProbedCall, values: Mapping[str, Any]) -> None:
        self.call, self._values = call, values

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The tensors of the call as NumPy arrays, by name; those of structures with their keys."""
        found: dict[str, Array] = {}
        for name, value in self._values.items():
            for keys, leaf in structures.with_paths(value):
                key = name + structures.text_of(tuple(keys))
                if ops.is_tensor(leaf):
                    found[key] = active().to_numpy(ops.stop_gradient(leaf))
                elif isinstance(leaf, np.ndarray):
                    found[key] = leaf
        return found

    def get(self, name: str) -> Array | None:
        """Return one array, or None if the call did not have it."""
        return self.arrays.get(name)

    @property
    def given(self) -> Array | None:
        """The input of a layer, the first one if it has several; None if it got no tensor."""
        return next(iter(self.part("inputs").values()), None)

    @cached_property
    def by_path(self) -> dict[str, Array]:
        """The outputs by the paths of `call.facts`: gradients by those of their variables."""
        paths = self.call.facts["paths"]
        pairs = [(path, self.get(f"outputs[{i}]")) for i, path in enumerate(paths)]
        return {path: x for path, x in pairs if x is not None}

    def part(self, name: str) -> dict[str, Array]:
        """Return the arrays of this name, by their keys in it."""
        return {k.removeprefix(name): x for k, x in self.arrays.items() if k.startswith(name)}

    def floats(self, name: str = "outputs") -> dict[str, Array]:
        """Return the float arrays of this name, by their keys in it."""
        return {key: x for key, x in self.part(name).items() if "float" in str(x.dtype)}


class StepRecorder(Probe):
    """Records the calls of a step, and changes what some of them return.

    Args:
        changes: Changes of the outputs of calls, by kind and number.
        tapped: The outputs whose slopes are recorded; see `Probe`.
        detailed: Whether to find the lines of calls, to enter branches, and to reuse programs.
    """

    def __init__(
        self,
        changes: Mapping[tuple[str, Key], Change] = {},
        tapped: Mapping[Key, Mapping[str, Any]] = {},
        detailed: bool = False,
    ) -> None:
        super().__init__()
        self._changes, self.tapped = changes, tapped
        self.lines = self.enters = self.is_fast = detailed

    def see(self, call: ProbedCall, values: dict[str, Any]) -> Any:
        """Record a call."""
        change = self._changes.get((call.kind, call.key))
        if change is not None:
            values = {**values, "outputs": change(values["outputs"])}
        kept = values
        if call.kind == APPLY:  # PyTorch may empty an accumulator in place before the step ends
            gradients = values["outputs"]
            copies = [ops.copy(ops.stop_gradient(g)) if ops.is_tensor(g) else g for g in gradients]
            kept = {**values, "outputs": copies}
        self.met.append((call, kept))
        return values["outputs"]

    def events(self) -> list[Event]:
        """Return the calls, in order."""
        found = [Event(*entry) for entry in self.met]
        for event in found:
            _ = event.arrays  # now, since PyTorch changes tensors in place
        return found
