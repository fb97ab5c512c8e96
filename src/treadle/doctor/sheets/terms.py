"""Which regularization and added losses reach the losses that are differentiated."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from keras import ops

from ...steps.probes import ADDED_LOSS
from ..numbers import as_floats
from ..trials import Trials, TriedStep

NEAR: Final = 0.1
"""How far the measured change may be from the expected one, relative to it."""


class Terms:
    """A step in which regularization and added losses are doubled.

    Attributes:
        names: The layers that have some.
        expected: The sum of these losses; 0 if there are none.
        trial: The step; None if there are none.
    """

    def __init__(self, trials: Trials) -> None:
        state, self.expected, self.trial = trials.state, 0.0, None
        trained = trials.usual.applied.keys() | trials.usual.gradients.keys()
        regular = {
            path: variable
            for path, variable in state.variables.items()
            if getattr(variable, "regularizer", None) is not None and path in trained
        }
        added = trials.usual.of(ADDED_LOSS)
        self.names = [path.rpartition("/")[0] for path in regular]
        self.names += [state.layer_paths.get(id(e.call.of), e.call.path) for e in added]
        if not self.names:
            return
        for event in added:
            self.expected += float(as_floats(event.arrays["outputs"]).sum())
        for variable in regular.values():
            loss = ops.stop_gradient(variable.regularizer(variable.value))
            self.expected += float(ops.convert_to_numpy(loss))
        changes = {(ADDED_LOSS, event.call.key): _doubled(lambda x: x) for event in added}
        with ExitStack() as stack:
            for variable in regular.values():
                stack.callback(setattr, variable, "regularizer", variable.regularizer)
                variable.regularizer = _doubled(variable.regularizer)
            self.trial: TriedStep | None = trials.attempt("regularization", changes=changes)

    def in_loss(self, trials: Trials, number: int) -> str:
        """Return whether they are in a loss; empty if there are none."""
        if self.trial is None or number >= len(self.trial.losses):
            return ""
        change = self.trial.losses[number] - trials.usual.losses[number]
        if abs(change) <= NEAR * abs(self.expected) / len(self.names):
            return "not in it"
        is_whole = abs(change - self.expected) <= NEAR * abs(self.expected)
        return "in it" if is_whole else "partly in it"


def _doubled(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: 2 * function(x)
