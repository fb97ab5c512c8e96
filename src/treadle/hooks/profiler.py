"""The `Profiler` hook, which traces steps and reports where the time of a run is spent."""

import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic

from ..core.claims import Claim
from ..core.hook import DetailedHook, LoopView
from ..core.logs import StepLogs
from ..core.progress import Costs
from ..core.triggers import Span, When
from ..errors import ConfigurationError
from .lines import resolved

LISTED = 8  # the number of operations in the table
LONGEST = 48  # longer names of operations are truncated


class Profiler(DetailedHook):
    """Traces steps with the framework's profiler, and reports where the time of the run is spent.

    The trace is saved as `trace.json.gz`; open it at https://ui.perfetto.dev. On TensorFlow and
    JAX, TensorBoard's profile page can show it too (this needs `pip install xprof`). Tracing slows
    down the traced steps. The first windows include compilation, so trace later steps.

    At the end, a table is logged as `profile`: the seconds spent running steps, compiling, waiting
    for data, in validations and in everything else (hooks, checkpoints, records), and the
    operations of the traced steps by self time, summed over all threads.

    Args:
        steps: The steps to trace, as a slice: `"100:110"` traces the ten steps after step 100.
            Windows end at both steps. If empty, nothing is traced, but the table is still logged.
        directory: The directory of the trace; by default `profile` in the run directory.

    Raises:
        ConfigurationError: If `steps` is not a valid slice. At the start: if no directory is given
            and the run has none.

    Example:
        >>> import treadle
        >>> profiler = treadle.hooks.Profiler(steps="100:110", directory="profile")
        >>> [int(when.span.amount) for when in profiler.when]
        [100, 110]
    """

    chief_only = True

    def __init__(self, steps: str = "100:110", directory: str | Path | None = None) -> None:
        match = re.fullmatch(r"\s*(\d*)\s*:\s*(\d+)\s*", steps)
        first, last = (int(match[1] or 0), int(match[2])) if match else (0, 0)
        if steps and not first < last:
            raise ConfigurationError(
                f"Profiler(steps={steps!r}) must be two numbers of steps, the second one larger, "
                "as '100:110'"
            )
        self._first, self._last = first, last
        self._given = None if directory is None else Path(directory).absolute()
        ends = [step for step in (first, last) if step]
        self.when = tuple(When(Span(step, "step"), repeat=False) for step in ends)
        self._costs = Costs()
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Start measuring."""
        self._begin()
        self._began = loop.progress.seconds
        if not self._last:
            return
        self._directory = resolved(self._given, loop, "profile/", self, "directory='profile'")

    def before(self, loop: LoopView) -> None:
        """Start the trace if it is due."""
        from ..backends.base import active  # late: it imports Keras

        step = loop.progress.step
        if self._directory is not None and not self._traced and self._first <= step < self._last:
            if self._given is None and (claim := Claim.of(self._directory.parent)):
                claim.check(claim.path)  # the backend writes to a path
            self._trace.enter_context(active().trace(self._directory))
            self._traced = step, step
        self._since_costs, self._since = loop.costs, monotonic()

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Measure a window, and stop the trace if it is due."""
        self._running += self._passed(loop)
        if self._traced and self._traced[1] < self._last:
            self._traced = self._traced[0], loop.progress.step
            if loop.progress.step >= self._last:
                self._trace.close()

    def validation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Measure a validation."""
        if results is None:
            self._since_costs, self._since = loop.costs, monotonic()
        else:
            self._validating += self._passed(loop)

    def _passed(self, loop: LoopView) -> float:
        """Return the seconds since the measurement began, without those of compiling and waiting.

        Reading the next window may take longer than running this one: then the loop waits for it.
        """
        now, before = loop.costs, self._since_costs
        others = now.compiling - before.compiling + now.waiting - before.waiting
        return monotonic() - self._since - others

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Stop a running trace, and log the table."""
        self._trace.close()
        if self._began is None:
            return
        costs, before = loop.costs, self._costs
        self._costs = costs
        if error is None:
            seconds = loop.progress.seconds - self._began
            parts = {
                "running steps": self._running,
                "compiling": costs.compiling - before.compiling,
                "waiting for data": costs.waiting - before.waiting,
                "validation": self._validating,
            }
            parts["hooks, checkpoints, the rest"] = max(0.0, seconds - sum(parts.values()))
            loop.log({"profile": "\n".join([*_shares(parts, seconds), *self._operations()])})
        self._began = None

    def _begin(self) -> None:
        self._trace = ExitStack()
        self._directory: Path | None = None
        self._traced: tuple[int, int] | None = None  # (first, last]: steps traced
        self._began: float | None = None
        self._running = self._validating = self._since = 0.0
        self._since_costs = Costs()

    def _operations(self) -> list[str]:
        """Return the lines of the table about the traced steps."""
        from ..backends.traces import TRACE, own_times, read_trace

        if self._traced is None or self._directory is None:
            return []
        first, last = self._traced
        found = own_times(read_trace(self._directory))
        longest = sorted(found.items(), key=lambda item: -item[1][0])[:LISTED]
        head = f"steps {first + 1} to {last}: {self._directory / TRACE} (ui.perfetto.dev opens it)"
        rows = [
            f"  {_short(name):<{LONGEST}} {microseconds / 1e3:9.2f} ms {count:6} ×"
            for name, (microseconds, count) in longest
        ]
        return [head, *rows]


def _shares(parts: Mapping[str, float], seconds: float) -> list[str]:
    """Return a line for each part of the time, with its share of the total.

    Example:
        >>> for line in _shares({"running steps": 1.5, "compiling": 0.5}, 2.0):
        ...     print(line)
        where the time went: 2.00 s
          running steps                    1.50 s   75 %
          compiling                        0.50 s   25 %
    """
    rows = [
        f"  {name:<30} {part:6.2f} s  {100 * part / max(seconds, 1e-9):3.0f} %"
        for name, part in parts.items()
    ]
    return [f"where the time went: {seconds:.2f} s", *rows]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
