"""Running a window in a background thread while the main thread reads the next one.

PyTorch divides an operation on a CPU among a team of threads of OpenMP. Each Python thread that
calls operators has a team, and keeps it. GNU's OpenMP lets the members of a team wait actively for
a while, but hardly if there are more of them than cores (see `GOMP_SPINCOUNT` in its manual). So
next to a second team, even an idle one, each operation puts threads to sleep and wakes them: on two
cores that nothing else used, steps of two layers of 64 units took 2.5 instead of 1.1 ms. Therefore
a thread that computed releases its team before the other one computes. That takes 0.3 µs if it has
none; to release an idle team of two and make the next one takes 0.1 ms.

If reading takes more than half as long as the windows, or other processes read, the team is kept:
threads that wait actively would take the processors from those that read.
"""

import ctypes
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from multiprocessing import active_children
from typing import Any

from .types import StepResult, Tensor

# A single thread, so that windows run in order. Compiled calls release the GIL; submitting one
# costs about 50 µs.
_worker = ThreadPoolExecutor(1, thread_name_prefix="treadle-window")

_HARD = 2  # omp_pause_hard, in section 3.2.44 of the specification of OpenMP 5.0

_PROCESS = os.getpid()
_away = False  # whether the background thread may have a team
_was_awaited = True  # whether reading took less than half of the latest window
_computing = False  # whether a window runs

# The share of a window for which the calling thread must wait. Where reading took a third of each
# step, it was faster to release the team; where it took half, there was no difference.
_AWAITED = 0.5

Results = tuple[dict[str, Any], dict[str, Any], list[str]]


def hand_over() -> None:
    """Release the calling thread's team of OpenMP before the background thread computes."""
    global _away
    _away = True
    if _was_awaited and os.getpid() == _PROCESS and not active_children():
        _release()()


def take_back() -> None:
    """Release the background thread's team of OpenMP before the calling thread computes.

    It does nothing while a window runs, and in a forked process, which has neither thread.
    """
    global _away
    if _away and os.getpid() == _PROCESS and not _computing:
        _away = False
        with suppress(RuntimeError):  # the interpreter ends
            submit(_release())()


@cache
def _release() -> Callable[[], Any]:
    """Return a function that releases the calling thread's team.

    It does nothing with other libraries than GNU's.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)  # PyTorch loads OpenMP for the whole process
        if hasattr(library, "omp_pause_resource_all") and not hasattr(library, "kmp_get_blocktime"):
            return lambda: library.omp_pause_resource_all(_HARD)
    return lambda: None


class Running:
    """The results of a window that runs in the background thread.

    Args:
        compute: A function that runs the window in the background thread, and returns its results
            as NumPy arrays.
        settle: A function that updates the state from the result of `compute`, in the thread that
            calls `fetch`.
    """

    def __init__(
        self, compute: Callable[[], Any], settle: Callable[[Any], Results] = lambda results: results
    ) -> None:
        self._settle = settle
        self._ended = 0.0
        self._started = time.monotonic()
        global _computing
        _computing = True
        self._future = _worker.submit(self._timed, compute)

    def fetch(self) -> Results:
        """Wait, and return values and explicit weights per name, and violations."""
        global _was_awaited
        asked = time.monotonic()
        try:
            results = self._future.result()
        finally:  # after an interrupt too, the window must end before the state is read
            wait([self._future])
        _was_awaited = self._ended - asked > _AWAITED * self.seconds
        return self._settle(results)

    def running(self) -> bool:
        """Return whether the window is still running."""
        return not self._future.done()

    @property
    def ended(self) -> float:
        """The time when the computation ended, by the monotonic clock; valid after `fetch`."""
        return self._ended

    @property
    def seconds(self) -> float:
        """The duration of the computation; valid after `fetch`."""
        return self._ended - self._started

    def _timed(self, compute: Callable[[], Any]) -> Any:
        global _computing
        try:
            return compute()
        finally:
            self._ended, _computing = time.monotonic(), False


def submit(compute: Callable[[], Any]) -> Callable[[], Any]:
    """Run a function in the background thread; return a function that waits for its result."""
    return _worker.submit(compute).result


class Done:
    """The results of a window that already ran in the calling thread.

    Args:
        results: A function that returns the results for `fetch`.
        seconds: The duration of the computation.
    """

    def __init__(self, results: Callable[[], Results], seconds: float) -> None:
        self._results = results
        self.seconds = seconds
        self.ended = time.monotonic()

    def running(self) -> bool:
        """Return False: the window has finished."""
        return False

    def fetch(self) -> Results:
        """Return values and explicit weights per name, and violations."""
        return self._results()


def start(
    compute: Callable[[], Any],
    settle: Callable[[Any], Results] = lambda results: results,
    background: bool = True,
) -> Running | Done:
    """Run a window in the background thread, or in this one before returning.

    Args:
        compute: As for `Running`.
        settle: As for `Running`.
        background: Whether this thread has other work meanwhile.
    """
    if background:
        return Running(compute, settle)
    started = time.monotonic()
    results = compute()
    return Done(lambda: settle(results), time.monotonic() - started)


def fetched(results: Sequence[StepResult], stacked: Callable[[list[Tensor]], Any]) -> Results:
    """Return the outputs of a window's steps as arrays, and the violations of any of them.

    Args:
        results: The outputs of each step. All have the same values; Python code may check something
            in some steps only.
        stacked: A function that stacks tensors of equal shapes to one array.
    """

    def by_name(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
        return {name: stacked([part[name] for part in parts]) for name in parts[0]}

    broken: dict[str, list[Tensor]] = {}
    for result in results:
        for message, flag in result.broken.items():
            broken.setdefault(message, []).append(flag)
    violated = [message for message, happened in broken.items() if stacked(happened).any()]
    return by_name([x.values for x in results]), by_name([x.weights for x in results]), violated
