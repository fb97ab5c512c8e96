"""Contestants take turns; medians, quartiles, and ratios within each round."""

import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

# A turn is so long at least: shorter ones measure the machine's mood.
SHORTEST = 0.3
# What is so many times slower than the first contestant has one turn: it decides nothing.
HOPELESS = 8
# So has what needs so many seconds for one: all its turns would take most of a benchmark's time.
LONGEST = 4.0
# Of a round, the turn that is timed must be so much: else its processors did other things as well.
WHOLE = 0.9


class Turn(Protocol):
    """What a round of a contestant says of itself."""

    seconds: float
    steps: int
    values: dict[str, float]


class Runner(Protocol):
    """The timing of a contestant."""

    def round(self, epochs: int = 1) -> Turn: ...

    def about(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


@dataclass
class Times:
    """The times of one contestant.

    Attributes:
        first: Seconds of its making and its first epoch, compilation included.
        steps: Steps in its first epoch.
        values: What its first epoch counted: everybody must have learned the same.
        per_step: Microseconds per step, for each round.
        processor: Microseconds per step that all processors together spent, for each round; empty
            where a round has more in it than the turn that is timed.
        about: What else it said of itself.
        failed: Why it could not take part.
    """

    first: float = math.nan
    steps: int = 0
    values: dict[str, float] = field(default_factory=lambda: dict[str, float]())
    per_step: list[float] = field(default_factory=lambda: list[float]())
    processor: list[float] = field(default_factory=lambda: list[float]())
    about: dict[str, Any] = field(default_factory=lambda: dict[str, Any]())
    failed: str = ""


def take_turns(
    makers: Mapping[str, Callable[[], Runner]],
    rounds: int,
    shortest: float = SHORTEST,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Times]:
    """Time contestants in turn, each round in another order.

    Making them and their first epoch are timed apart; a second one shows how many epochs a turn
    has.

    Args:
        makers: Makes each contestant.
        rounds: How many turns each has.
        shortest: Seconds that a turn takes at least.
        tell: Called with a line about what goes on.
    """
    times = {name: Times() for name in makers}
    ready: dict[str, _Ready] = {}
    for name, make in makers.items():
        try:
            ready[name] = _Ready.of(make, times[name], shortest)
        except Exception as error:  # what others cannot do is a result; what we cannot is a fault
            if name == "treadle":
                raise
            times[name].failed = f"{type(error).__name__}: {error}".splitlines()[0]
        tell(f"{name}: {times[name]}")
    slowest = HOPELESS * next(iter(ready.values())).pace
    for number in range(rounds):
        names = [
            name
            for name, one in ready.items()
            if number == 0 or (one.pace < slowest and one.seconds < LONGEST)
        ]
        if not names:  # all of them take long
            break
        for name in rotated(names, number):
            gc.collect()
            started, spent = time.perf_counter(), time.process_time()
            turn = ready[name].runner.round(ready[name].epochs)
            passed, spent = time.perf_counter() - started, time.process_time() - spent
            times[name].per_step.append(turn.seconds / turn.steps * 1e6)
            if turn.seconds > WHOLE * passed:
                times[name].processor.append(spent / turn.steps * 1e6)
    for name, one in ready.items():
        times[name].about = one.runner.about()
        one.runner.close()
    return times


def compared(makers: Mapping[str, Callable[[], Runner]], rounds: int) -> dict[str, Times]:
    """Time contestants in turn, as `take_turns` does, and exit if one of them fails."""
    found = take_turns(makers, rounds)
    failed = [f"{name}: {times.failed}" for name, times in found.items() if times.failed]
    if failed:
        sys.exit("\n".join(failed))
    return found


def per_step(makers: Mapping[str, Callable[[], Runner]], rounds: int) -> dict[str, list[float]]:
    """Return the microseconds of a step in each turn by contestant; exit if one fails."""
    return {name: times.per_step for name, times in compared(makers, rounds).items()}


def by_base(times: Mapping[str, Sequence[float]], base: str = "treadle") -> dict[str, "Spread"]:
    """Return the time of each contestant by that of another one, turn by turn."""
    return {name: ratio(found, times[base]) for name, found in times.items()}


@dataclass
class _Ready:
    """A contestant that has compiled, and what a turn of it has.

    Attributes:
        runner: The contestant.
        epochs: How many epochs a turn has.
        pace: Seconds per step.
        seconds: About how long a turn takes.
    """

    runner: Runner
    epochs: int
    pace: float
    seconds: float

    @classmethod
    def of(cls, make: Callable[[], Runner], times: Times, shortest: float) -> "_Ready":
        """Make a contestant; its first epoch goes into `times`."""
        started = time.perf_counter()
        runner = make()
        turn = runner.round()
        times.first = time.perf_counter() - started
        times.steps, times.values = turn.steps, turn.values
        again = runner.round()
        epochs = max(1, math.ceil(shortest / again.seconds))
        return cls(runner, epochs, again.seconds / again.steps, epochs * again.seconds)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """Return the names beginning at another one, the others every second time backwards.

    Example:
        >>> rotated(["a", "b", "c"], 0), rotated(["a", "b", "c"], 1)
        (['a', 'b', 'c'], ['b', 'a', 'c'])
    """
    shift = by % len(names)
    others = [*names[shift + 1 :], *names[:shift]]
    return [names[shift], *(others[::-1] if by % 2 else others)]


@dataclass(frozen=True)
class Spread:
    """A median between quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Summarize some values.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(low=1.5, median=2.0, high=2.5)
        """
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)

    def __format__(self, form: str) -> str:
        """Return the median with its quartiles, as tables show them.

        Example:
            >>> f"{Spread.of([1.0, 2.0, 3.0]):.2f}"
            '2.00 (1.50 to 2.50)'
        """
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def ratio(times: Sequence[float], base: Sequence[float]) -> Spread:
    """Return how often `base` fits into `times`, round by round: both ran side by side.

    Example:
        >>> ratio([4.0, 8.0, 4.0], [2.0, 4.0, 1.0]).median
        2.0
    """
    return Spread.of([one / other for one, other in zip(times, base, strict=False)])


class Neighbours:
    """How much of the processors others use meanwhile: what they take is missing in the figures."""

    def __init__(self) -> None:
        self._before = self._clocks()

    def share(self) -> float:
        """Return the share of all processors' time that was neither idle nor ours."""
        busy, ours, passed = (
            after - before for after, before in zip(self._clocks(), self._before, strict=True)
        )
        return max(0.0, busy - ours) / passed

    def _clocks(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        everything = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return everything - idle, sum(os.times()[:4]), everything


def machine() -> dict[str, Any]:
    """Return what the figures depend on in addition to the versions."""
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        lines = described.read_text().splitlines()
        model = next((x.split(": ")[1] for x in lines if x.startswith("model name")), model)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": model, "cores": cores, "memory": f"{memory:.0f} GiB"}


def processor() -> str:
    """Return the processor and its cores, as pages name them."""
    about = machine()
    return f"{about['cpu']}, {about['cores']} cores"
