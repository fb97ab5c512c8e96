"""Records of what a step computes, in order, with concrete values on every backend."""

from collections import Counter
from collections.abc import Generator, Mapping
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

    Attributes:
        met: The entries.
        is_fast: See `backends.step_context.Recorder`.
        around: The numbers of the calls of `gradients` around the running code.
        layer_paths: The paths of the layers whose calls are recorded, by id.
    """

    is_fast = False

    def __init__(self) -> None:
        self.met: list[Any] = []
        self.around: tuple[int, ...] = ()
        self.layer_paths: Mapping[int, str] = {}
        self._outside: list[Any] = []
        self._counts: Counter[str] = Counter()
        self._place: Any = active().place()

    def begin(self) -> None:
        """Start a separate record for an objective, which JAX runs twice with the same numbers."""
        self._outside.append((self.met, self.around, self._counts, self._place))
        self.met, self._place = [], active().place()
        self.around = (*self.around, self._counts[""])
        self._counts = Counter()

    def taken(self) -> list[Any]:
        """End the objective's record, and return it."""
        met = self.met
        self.met, self.around, self._counts, self._place = self._outside.pop()
        return met

    def give(self, met: Any) -> None:
        """Add an objective's record, now with concrete values."""
        self._counts[""] += 1
        self.met += met

    def next_number(self, kind: str) -> tuple[int, ...]:
        """Return the number of the next call of a kind, after those of the calls around it."""
        return (*self.around, self._counts[kind])

    def numbered(self, kind: str) -> tuple[int, ...]:
        """Return the number of a call of a kind, and count it."""
        number = self.next_number(kind)
        self._counts[kind] += 1
        return number

    @property
    def latest(self) -> tuple[int, ...]:
        """The number of the objective that was differentiated last, as in `around` inside it."""
        return (*self.around, self._counts[""] - 1)

    @property
    def in_place(self) -> bool:
        """Whether the step runs in the trace of this record, and not in one inside it."""
        return active().place() == self._place


@contextmanager
def recording_layers() -> Generator[None]:
    """Make layers pass their calls to the method `layer` of the step's recorder.

    Layers whose ids are not in the recorder's `paths` are left out.
    """
    layer_call = INTERNALS["layer_call"]
    original = layer_call.resolve()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder: Any = context().recorder
        if recorder is None or context().build is not None:
            return original(self, *args, **kwargs)
        recorder.depth += 1
        try:
            outputs = original(self, *args, **kwargs)
        finally:
            recorder.depth -= 1
        path = recorder.layer_paths.get(id(self))
        return outputs if path is None else recorder.layer(self, args, kwargs, outputs, path)

    with layer_call.replaced(called):
        yield
