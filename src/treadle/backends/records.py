"""Records of what a step computes, in order, with concrete values on every backend."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from ..core.keras_internals import INTERNALS
from .base import active
from .step_context import context


class Records:
    """The entries of a record; the part of a `backends.step_context.Recorder` about objectives.

    JAX traces an objective, so what is recorded there becomes concrete only as a result of its
    differentiation. What is computed in traces inside it, such as the body of a loop, is left out:
    it has no single value, and must not leave that trace.
    """

    def __init__(self) -> None:
        self.met: list[Any] = []
        self._around: list[tuple[list[Any], Any]] = []
        self._place: Any = active().place()

    def begin(self) -> None:
        """Start a separate record for an objective."""
        self._around.append((self.met, self._place))
        self.met, self._place = [], active().place()

    def taken(self) -> list[Any]:
        """End the objective's record, and return it."""
        met, (self.met, self._place) = self.met, self._around.pop()
        return met

    def give(self, met: Any) -> None:
        """Add an objective's record, now with concrete values."""
        self.met += met

    @property
    def in_place(self) -> bool:
        """Whether the step runs in the trace of this record, and not in one inside it."""
        return active().place() == self._place


@contextmanager
def recording_layers() -> Generator[None]:
    """Make every layer pass its outputs to the method `output` of the step's recorder."""
    layer_call = INTERNALS["layer_call"]
    original = layer_call.resolve()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        recorder: Any = context().recorder
        if recorder is not None:
            recorder.output(self, outputs)
        return outputs

    with layer_call.replaced(called):
        yield
