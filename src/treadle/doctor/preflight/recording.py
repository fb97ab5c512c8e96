"""What a step does while it runs uncompiled: events of layers, losses, metrics and optimizers.

Tensors of an objective have no values in JAX until it has been differentiated: the recorder returns
them with its results.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from keras import ops

from ...backends.base import active
from ...backends.records import Records
from ...core import structures
from ...core.tracebacks import MACHINERY, PACKAGE, RECIPES
from ..numbers import Array

LAYER, LOSS, ENTROPY, METRIC = "layer", "loss", "cross-entropy", "metric"
GRADIENTS, APPLY, DRAW, BRANCH = "gradients", "apply", "draw", "branch"
ADDED_LOSS, CLIP, OBJECTIVE, FROZEN = "add_loss", "clip", "objective", "frozen"
ACTIVATION: Final = "activation"
LOOP: Final = "for_each"


@dataclass(frozen=True, eq=False)
class Info:
    """The Python values of an event.

    Attributes:
        path: The layer, loss, metric or optimizer, by path or name.
        kind: Its class, or the name of the function.
        line: The line of the user's code that called it.
        of: The object itself.
        more: Further values.
    """

    path: str
    kind: str
    line: str
    of: Any = None
    more: Mapping[str, Any] = field(default_factory=lambda: {})


class Event:
    """One call during a step.

    Attributes:
        what: The kind of event, such as `LAYER`.
        info: Its Python values.
    """

    def __init__(self, what: str, info: Info, tensors: Mapping[str, Any]) -> None:
        self.what, self.info, self._tensors = what, info, tensors

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """The tensors of the call as NumPy arrays, by name; those that are not given are left out.

        A name of a structure has its keys appended.
        """
        found: dict[str, Array] = {}
        for name, value in self._tensors.items():
            for keys, leaf in structures.with_paths(value):
                key = name + structures.text_of(keys)
                if ops.is_tensor(leaf):
                    found[key] = active().to_numpy(ops.stop_gradient(leaf))
                elif isinstance(leaf, np.ndarray):
                    found[key] = leaf
        return found

    def __getitem__(self, name: str) -> Array:
        """Return one array."""
        return self.arrays[name]

    def get(self, name: str) -> Array | None:
        """Return one array, or None if the call did not have it."""
        return self.arrays.get(name)


class StepRecorder(Records):
    """Records the events of a step; a `backends.step_context.Recorder`."""

    def gradients(self, paths: Sequence[str], gradients: Sequence[Any], loss: Any) -> None:
        """Record gradients and their loss."""
        info = Info("", "gradients", user_line(), more={"paths": list(paths)})
        self.add(GRADIENTS, info, **dict(zip(paths, gradients, strict=True)))
        self.add(OBJECTIVE, info, loss=loss)

    def add(self, what: str, info: Info, /, **tensors: Any) -> None:
        """Record an event; the names of tensors are those of arguments, or paths of variables."""
        if self.in_place:
            self.met.append((what, info, tensors))

    def events(self) -> list[Event]:
        """Return all events, in order."""
        return [Event(*entry) for entry in self.met]


def user_line() -> str:
    """Return the file and line of the innermost frame of the user's code, as `file.py:12`."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        ours = file.startswith(PACKAGE) and not file.startswith(RECIPES)
        if not ours and module not in MACHINERY and module not in ("importlib", "numpy"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
