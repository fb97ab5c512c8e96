"""What the processes of a run agree on by exchanging values: also the time, and signals."""

import base64
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np

from .. import errors
from ..core.directory import canonical
from ..core.processes import ProcessGroup
from ..errors import ProcessError, TreadleError

if TYPE_CHECKING:
    from ..backends.window import Window
    from ..run.predictions import Predictions

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]

MOST_TOGETHER: Final = 40 << 20
"""The most bytes that all processes exchange in one message. Larger arrays take several ones."""
SECONDS: Final = 0.05
"""The time between two exchanges after windows, each of which takes about 0.2 ms."""
MOST_WINDOWS: Final = 1000
"""The most windows between two exchanges."""


class SeveralProcesses(ProcessGroup, ABC):
    """Base class of groups of several processes; subclasses implement the exchange.

    Attributes:
        time: The time of the chief in seconds, when the processes last agreed on it.
    """

    time = 0.0

    @abstractmethod
    def exchange(self, value: Any, at: str) -> list[Any]:
        """Return the values of all processes by rank."""

    def agree_on_time(self) -> None:
        """Set the clock of all processes."""
        self.time = self.exchange(time.monotonic(), "reading the clock")[0]

    def exchange_arrays(self, arrays: Sequence[Array], at: str) -> list[list[Array]]:
        """Return NumPy arrays of all processes by rank."""
        native = [np.ascontiguousarray(x, x.dtype.newbyteorder("=")) for x in arrays]
        data = b"".join(x.tobytes() for x in native)
        forms = [[x.dtype.name, list(x.shape)] for x in arrays]
        found = self.exchange([forms, len(data)], at)
        each = max(1 << 10, MOST_TOGETHER // self.size)
        received: list[list[bytes]] = [[] for _ in found]
        for start in range(0, max(size for _, size in found), each):
            part = base64.b64encode(data[start : start + each]).decode()
            for parts, text in zip(received, self.exchange(part, at), strict=True):
                parts.append(base64.b64decode(text))
        return [
            _arrays(forms, b"".join(parts))
            for (forms, _), parts in zip(found, received, strict=True)
        ]

    def on_chief(self, function: Callable[[], T], at: str) -> T:
        """Return what a function returns in the chief; an error of Treadle is raised in all."""
        if self.rank:
            kind, result = self.exchange(None, at)[0]
            if kind:
                raise getattr(errors, kind)(result)
            return result
        try:
            result = function()
        except TreadleError as error:
            kinds = (kind.__name__ for kind in type(error).__mro__)
            public = next(name for name in kinds if hasattr(errors, name))
            self.exchange([public, str(error)], at)
            raise
        self.exchange(["", result], at)
        return result

    def require_equal(self, what: str, value: Any) -> None:
        """Check that all processes have the same value."""
        found = self.exchange(value, f"comparing the {what}")
        for rank, other in enumerate(found):
            if other != found[0] and canonical(other) != canonical(found[0]):
                raise ProcessError(
                    f"the {what} of process {rank} and of process 0 differ: "
                    f"{'; '.join(_differences(other, found[0], rank))}. All processes must run the "
                    "same script with the same data and settings"
                )

    def slowest(self, seconds: float, at: str) -> float:
        """Return the longest of the times of all processes."""
        return max(self.exchange(seconds, at))

    def agreement(self) -> "WindowAgreement":
        """Return what lets a run agree on time and signals."""
        return WindowAgreement(self)

    def divided(
        self, predictions: "Predictions", caller: Callable[[Any], Any], known: dict[Any, Any]
    ) -> Any:
        """Return predictions of which this process computes those of its rows, if possible."""
        from ..backends.base import active  # late, as below: they import Keras
        from .dividing.backend import DividedBackend
        from .predictions import DividedPredictions

        backend = active()
        if not isinstance(backend, DividedBackend):  # programs run on the devices of all
            return predictions
        return DividedPredictions(self, backend.summed, predictions, caller, known)

    def completed(self, window: "Window") -> "Window":
        """Return a window with the rows of all processes."""
        from .predictions import completed

        return completed(window, self)


class WindowAgreement:
    """Exchanges what differs between the processes of a run, and decides for all of them.

    Attributes:
        signal: The signal that any process has received, once all know of it.
    """

    def __init__(self, group: SeveralProcesses) -> None:
        self._group = group
        self.signal: signal.Signals | None = None
        self._left, self._waited = 0, 0.0
        self._windows, self._since = 0, time.monotonic()  # of the last exchange

    def clock(self) -> float:
        """Return the time of the chief when the processes last agreed on it."""
        return self._group.time

    def after_window(
        self, step: int, seconds: float, waited: float, received: signal.Signals | None
    ) -> float | None:
        """Agree after a window, and return the seconds that it took in the slowest process.

        Many short windows share one exchange; the others return None.

        Args:
            step: The last step of the window, which must be the same in all processes.
            seconds: The seconds that the window took in this process.
            waited: The seconds that this process has waited for batches so far, which count too.
            received: The signal that this process has received, or None.
        """
        self._windows += 1
        if self._left > 0:
            self._left -= 1
            return None
        seconds += (waited - self._waited) / self._windows
        self._waited = waited
        longest, between = self._exchange(received, seconds, f"the window that ends at step {step}")
        self._left = min(MOST_WINDOWS, int(SECONDS / max(between, 1e-6)))
        return longest

    def at_end(self, received: signal.Signals | None) -> None:
        """Agree at the end of a call, so that all processes heed the same signals."""
        self._exchange(received, 0.0, "the end of a call of the loop")
        self._left = 0

    def _exchange(
        self, received: signal.Signals | None, seconds: float, at: str
    ) -> tuple[float, float]:
        """Return the longest time of a window, and the mean time from one window to the next.

        The latter includes hooks, validation and the body of a `for` loop: a signal or a time
        limit must not wait for many windows if these are slow.
        """
        now = time.monotonic()
        between = (now - self._since) / max(1, self._windows)
        mine = [now, seconds, between, None if received is None else +received]
        found = self._group.exchange(mine, at)
        self._group.time = found[0][0]
        numbers = [theirs[3] for theirs in found if theirs[3] is not None]
        if numbers:
            self.signal = signal.Signals(numbers[0])
        self._windows, self._since = 0, time.monotonic()
        return max(theirs[1] for theirs in found), max(theirs[2] for theirs in found)


def _arrays(forms: Sequence[Any], data: bytes) -> list[Array]:
    """Return arrays of dtypes and shapes whose values follow each other."""
    found: list[Array] = []
    start = 0
    for name, shape in forms:
        dtype = np.dtype(name)
        count = prod(shape)
        found.append(np.frombuffer(data, dtype, count, start).reshape(shape))
        start += count * dtype.itemsize
    return found


def _differences(theirs: Any, chiefs: Any, rank: int, path: str = "") -> list[str]:
    """Describe where a value differs from that of the chief."""
    if isinstance(theirs, dict) and isinstance(chiefs, dict):
        found: list[str] = []
        for key in dict.fromkeys([*theirs, *chiefs]):  # type: ignore[misc]
            one, other = theirs.get(key), chiefs.get(key)  # type: ignore[misc]
            if one != other and canonical(one) != canonical(other):
                found += _differences(one, other, rank, f"{path}.{key}" if path else str(key))
        return found
    name = f"{path} " if path else ""
    return [f"{name}is {theirs!r:.200} in process {rank}, and {chiefs!r:.200} in process 0"]
