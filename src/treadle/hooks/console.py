"""The `Console` hook: live progress bars on a terminal, plain lines elsewhere."""

import threading
import weakref
from collections.abc import Mapping
from math import ceil
from time import monotonic

import rich
import rich.console
from rich.live import Live
from rich.text import Text

from ..core.hook import DetailedHook, LoopView, RolledBack
from ..core.logs import Record, StepLogs, brief, clock, line
from ..core.terminal import Waiting, printable
from . import notebook
from .display import Display, MetricsTable, Position, Speed, notes, progress_line
from .notebook import NotebookDisplay

# Seconds between two updates.
ON_TERMINAL, IN_NOTEBOOK, IN_PLAIN_TEXT, METRICS = 0.1, 0.5, 10.0, 1.0
# After a refresh, the next one waits this many times as long as the refresh took, so that a slow
# terminal does not slow down training. The wait is limited to LONGEST_REST seconds, so that the
# bars do not seem to hang.
REST, LONGEST_REST = 200, 1.0
# If no step ends for this many seconds, a thread shows the current activity and its duration.
SILENCE_ON_TERMINAL, SILENCE_IN_PLAIN_TEXT = 0.5, 30.0
# The last line reports compiling and waiting for data if they took at least this many seconds, and
# waiting only if it also took at least this share of the time.
NOTABLE_SECONDS, NOTABLE_SHARE = 0.1, 0.3


class Console(DetailedHook):
    """Displays the progress of a run.

    On a terminal and in a notebook, it shows two progress bars and the latest values below a table
    of finished epochs. Elsewhere it prints plain lines: one per epoch and validation, and one every
    ten seconds in between. In a notebook, all of it is one output of the cell.

    While the loop compiles or validates, it shows the elapsed time and the number of finished
    batches.

    The step values shown are those that the loop fetches anyway. Running metrics require waiting
    for the device, so they are fetched at most once a second.

    Args:
        quiet: Show nothing.
        to: The rich console to print to; by default rich's global console on standard output.

    Example:
        >>> import rich.console, treadle
        >>> to_stderr = treadle.hooks.Console(to=rich.console.Console(stderr=True))
    """

    chief_only = True

    def __init__(self, quiet: bool = False, to: rich.console.Console | None = None) -> None:
        self._quiet = quiet
        self._to = to
        self._call: _Call | None = None

    def print(self, text: str, style: str = "") -> None:
        """Print a message about the run, in one of rich's styles."""
        if self._quiet:
            return
        if self._call is not None and self._call.notebook is not None:
            self._call.notebook.print(text, style)
        else:
            show(self._to or rich.get_console(), text, style)

    def activity(self, text: str) -> Waiting:
        """Show an activity before the first step, and its duration."""
        quiet = self._quiet or self._call is not None
        return Waiting(text, self._to, quiet=quiet, at_once=False)

    def validation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Show the progress of a validation while it runs."""
        if self._call is not None:
            self._call.doing = "validating" if results is None else ""

    def start(self, loop: LoopView) -> None:
        """Show the progress bars, and print the step from which a run resumes."""
        if not self._quiet:
            self._call = _Call(self._to or rich.get_console(), loop)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Show the latest values if an update is due."""
        call, now = self._call, monotonic()
        if call is not None:
            if now >= call.due or call.waiting is not None:
                with call.lock:
                    call.update(loop, logs, now)
            call.last, call.doing = now, ""

    def record(self, loop: LoopView, record: Record) -> None:
        """Print the record as a permanent line."""
        if self._call is not None:
            with self._call.lock:
                self._call.record(loop, record)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Remove the progress bars, and print why the run ended."""
        call, self._call = self._call, None
        if call is not None:
            call.close(loop, error)


class _Call:
    """The display of one `fit` call.

    Attributes:
        due: The time of the next update.
        last: The time at which the last window ended.
        waiting: A validation record that is not printed yet, because the record of an epoch at the
            same step may follow and include it.
        doing: The current activity, such as validating, while no steps run.
        notebook: The output of the cell, in a notebook.
        lock: Held while drawing, by the loop or by the thread that shows activities.
    """

    def __init__(self, console: rich.console.Console, loop: LoopView) -> None:
        self._console = console
        self._began = self._epoch_began = now = monotonic()
        self._first, self._costs = loop.progress, loop.costs
        self._pace, self._table = Speed(), MetricsTable()
        self._means: Mapping[str, float] = {}
        self._means_due = now + METRICS
        self._updated, self._plan = False, ""
        self._display: Display | None = None
        self._live: Live | NotebookDisplay | None = None
        self.notebook: NotebookDisplay | None = None
        self._drawn_width = console.width
        self._interval = IN_PLAIN_TEXT
        self.due = self.last = now
        self.waiting: Record | None = None
        self.doing = "" if loop.plan else "compiling the first step"
        self.lock = threading.RLock()
        self._ended = threading.Event()
        in_notebook = notebook.shows(console)
        if in_notebook or console.is_interactive:
            self._interval = IN_NOTEBOOK if in_notebook else ON_TERMINAL
            position = Position(loop, self._first, self._first.step)
            self._display = Display(position, self.doing)
        if in_notebook and self._display is not None:
            self.notebook = NotebookDisplay(self._display)
        if self._first.step > 0:
            self._print(f"resuming after {self._first}", "dim")
        self._print_plan(loop)
        if self._display is not None:
            # No automatic refresh: a drawing thread would compete with the loop for the GIL.
            self._live = self.notebook or Live(
                self._display, console=console, auto_refresh=False, transient=True
            )
            self._live.start(refresh=True)
        silence = SILENCE_IN_PLAIN_TEXT if self._live is None else SILENCE_ON_TERMINAL
        watching = (silence, self._ended, weakref.ref(self), weakref.ref(loop))
        self._thread = threading.Thread(target=_watch, args=watching, daemon=True)
        self._thread.start()

    def update(self, loop: LoopView, logs: StepLogs, now: float) -> None:
        """Print a pending validation record, and update the progress if an update is due."""
        self._show_waiting()
        if now < self.due:
            return
        self.due = now + self._interval
        compiling = loop.costs.compiling - self._costs.compiling
        self._pace.update(now - compiling, logs.progress)
        if not self._updated:
            self._updated = True
            self._print_plan(loop)
            if self._display is None:  # the first plain line is printed after ten seconds
                return
        if now >= self._means_due:
            self._means, self._means_due = loop.metrics(), now + METRICS
        newest = {name: array[-1] for name, array in logs.values.items()}
        position = Position(loop, logs.progress, self._first.step)
        extra = notes(position, self._pace, now - self._began)
        if self._display is None or self._live is None:
            self._print(progress_line(position, {**newest, **self._means}, extra))
            return
        display = self._display
        display.position, display.notes = position, extra
        display.newest, display.means = newest, self._means
        began = monotonic()
        self._adapt()
        self._live.refresh()
        ended = monotonic()
        self.due = max(self.due, ended + min(LONGEST_REST, REST * (ended - began)))

    def record(self, loop: LoopView, record: Record) -> None:
        """Print the line of an epoch or a log; defer that of a validation."""
        now = monotonic()
        self._pace.lose(now - self.last)  # time spent on a validation or in hooks
        self.last = now
        if record.kind == "epoch":
            self._show_epoch(loop, record, now)
            self._means = {}
        elif record.kind == "validation":
            self._show_waiting()
            self.waiting = record
        else:
            self._show_waiting()
            if record.kind == "partial":
                at = record.progress
                self._print(
                    f"epoch {at.epoch + 1} ends after {at.batch:,} of its batches: training "
                    "continues with another source"
                )
            else:
                self._print_values(record)

    def close(self, loop: LoopView, error: BaseException | None) -> None:
        """Remove the bars and print the last line."""
        self._ended.set()
        self._thread.join()
        try:
            self._show_waiting()
        finally:
            if self._live is not None:
                self._adapt()
                self._live.stop()
                self._live = None
        at = loop.progress
        steps, seconds = at.step - self._first.step, at.seconds - self._first.seconds
        time = f"{brief(seconds)} s" if seconds < 60 else clock(seconds)
        ran = f"{steps:,} step{'s' if steps != 1 else ''} in {time}{self._spent(loop, seconds)}"
        if isinstance(error, RolledBack):
            self._print(f"rolling back from {at}: {error}", "bold yellow")
        elif error is not None:
            asked = isinstance(error, (KeyboardInterrupt, SystemExit))
            how = "interrupted" if asked else type(error).__name__
            self._print(f"{how} after {at}; {ran}", "bold red")
        elif loop.reason is not None:
            self._print(f"stopped after {at}: {loop.reason}; {ran}", "bold yellow")
        else:
            self._print(f"finished: {ran}", "bold green")
        if loop.unfinished and loop.directory is not None:
            self._print(f"progress is saved in {loop.directory}: run the same command to resume")

    def show_activity(self, loop: LoopView, now: float) -> None:
        """Show the elapsed time while the loop compiles or validates."""
        what, evaluated = self.doing or ("compiling" if loop.compiling else ""), loop.evaluated
        if not what or self._ended.is_set():
            return
        if self.doing == "validating" and evaluated is not None:
            done, of = evaluated
            what += f" {done:,}/{of:,}" if of is not None else f" {done:,}"
        text = f"{what} … {now - self.last:.0f} s"
        if self._display is None or self._live is None:
            self._print(text, "dim")
            return
        time, _ = self._display.notes
        self._display.notes = time, text
        self._adapt()
        self._live.refresh()

    def _adapt(self) -> None:
        """Erase the progress bars if the terminal became narrower and wrapped their lines.

        rich moves the cursor up by the number of lines it drew, which no longer suffices.
        """
        if self.notebook is not None:
            return
        width, before = self._console.width, self._drawn_width
        self._drawn_width = width
        if self._display is None or width >= before or not self._display.drawn:
            return
        drawn = self._display.drawn
        rows = sum(max(1, ceil(length / width)) for length in drawn)
        up, down = rows - 1, len(drawn) - 1
        codes = f"\r\x1b[{up}A\x1b[J" if up else "\r\x1b[J"
        self._console.file.write(codes + (f"\x1b[{down}B" if down else ""))
        self._console.file.flush()

    def _spent(self, loop: LoopView, seconds: float) -> str:
        """Return the time spent compiling and waiting for data, if it is notable."""
        compiling = loop.costs.compiling - self._costs.compiling
        waiting = loop.costs.waiting - self._costs.waiting
        parts: list[str] = []
        if compiling >= NOTABLE_SECONDS:
            parts.append(f"{brief(compiling)} s of it compiling")
        if waiting >= NOTABLE_SHARE * (seconds - compiling) and waiting >= NOTABLE_SECONDS:
            parts.append(f"{brief(waiting)} s waiting for data, which is the bottleneck")
        return f" ({', '.join(parts)})" if parts else ""

    def _print_plan(self, loop: LoopView) -> None:
        if loop.plan and loop.plan != self._plan:
            self._plan = loop.plan
            self._print(f"plan: {loop.plan}", "dim")

    def _show_epoch(self, loop: LoopView, record: Record, now: float) -> None:
        values = dict(record.values)
        if self.waiting is not None and self.waiting.progress.step == record.progress.step:
            values, self.waiting = {**self.waiting.values, **values}, None
        self._show_waiting()
        number, of = record.progress.epoch + 1, loop.epochs_planned
        epoch = f"{number:>{len(str(of))}}/{of}" if of is not None else f"{number}"
        seconds, self._epoch_began = now - self._epoch_began, now
        rows = self._table.rows(epoch, seconds, values)
        if self._live is None or len(rows[-1]) > self._console.width:
            self._print(f"epoch {epoch.strip()}  {brief(seconds)} s  {line(values)}")
            return
        for header in rows[:-1]:
            self._print(header, "bold")
        self._print(rows[-1])

    def _show_waiting(self) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            self._print_values(waiting)

    def _print_values(self, record: Record) -> None:
        self._print(f"step {record.progress.step:,}  {line(record.values)}")

    def _print(self, text: str, style: str = "") -> None:
        if self.notebook is not None:
            self.notebook.print(text, style)
            return
        self._adapt()
        show(self._console, text, style)


def _watch(
    silence: float,
    ended: threading.Event,
    call: "weakref.ref[_Call]",
    loop: "weakref.ref[LoopView]",
) -> None:
    """Show the current activity whenever no step ends for a while, until the run ends."""
    shown = monotonic()
    while not ended.wait(silence / 2):
        watched, view = call(), loop()
        if watched is None or view is None:
            return
        now = monotonic()
        # Bars are redrawn in place; plain lines are repeated less often.
        since = watched.last if silence < 1 else max(watched.last, shown)
        if now - since >= silence:
            with watched.lock:
                watched.show_activity(view, now)
            shown = now
        del watched, view  # so that an abandoned run can be garbage-collected


def show(console: rich.console.Console, text: str, style: str = "") -> None:
    """Print a text, wrapped between words on a terminal and unwrapped in a file."""
    text = printable(text, console.width if console.is_terminal else None)
    console.print(Text(text, style), soft_wrap=True)
