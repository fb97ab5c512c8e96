"""What a run shows of itself: live bars on a terminal, plain lines elsewhere."""

import importlib.util
import threading
import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from math import ceil
from time import monotonic

import rich
import rich.console
from rich.live import Live
from rich.text import Text

from ..core.hook import Hook, LoopView
from ..core.logs import Record, StepLogs
from ..core.rollback import RolledBack
from ..core.terminal import Waiting, wrapped
from .display import Display, Pace, Position, Table, notes, progress_line
from .values import brief, clock, line

# Seconds between two looks.
ON_TERMINAL, IN_NOTEBOOK, IN_PLAIN_TEXT, METRICS = 0.1, 0.5, 10.0, 1.0
# A refresh is followed by this many times what it took without one: a slow terminal slows no run.
# But not by more seconds than this: bars that stand still look like a run that does.
REST, LONGEST_REST = 200, 1.0
# Where no step ends for so many seconds, a thread shows what the run is doing, and for how long.
SILENCE_ON_TERMINAL, SILENCE_IN_PLAIN_TEXT = 0.5, 30.0
# What is told at the end: compiling or waiting for data of so many seconds; and of such a share of
# the time, since the rest of the machine idled meanwhile.
NOTABLE_SECONDS, NOTABLE_SHARE = 0.1, 0.3


class Console(Hook):
    """Shows how a run goes.

    On a terminal: two bars and the newest values, below a table of the finished epochs. In a
    notebook the same, where ipywidgets are installed. Elsewhere plain lines: one for each epoch and
    validation, and one every ten seconds between them.

    While the loop compiles or validates, it shows for how long, and how many batches are done.

    It shows what the loop has fetched anyway. Running metrics, for which the device must be waited
    for, are asked for once a second at most.

    Args:
        quiet: Show nothing.
        to: Where to; rich's own console, on the standard output, if not given.

    Example:
        >>> import rich.console, treadle
        >>> to_stderr = treadle.hooks.Console(to=rich.console.Console(stderr=True))
    """

    def __init__(self, quiet: bool = False, to: rich.console.Console | None = None) -> None:
        self._quiet = quiet
        self._to = to
        self._call: _Call | None = None

    def say(self, text: str, style: str = "") -> None:
        """Print a sentence about the run, in one of rich's styles."""
        if not self._quiet:
            show(self._to or rich.get_console(), text, style)

    @contextmanager
    def activity(self, text: str) -> Generator[None]:
        """Show what happens before the first step, and for how long."""
        quiet = self._quiet or self._call is not None
        with Waiting(text, self._to, quiet=quiet, at_once=False):
            yield

    def validation(self, loop: LoopView, results: Mapping[str, float] | None) -> None:
        """Show how far a validation is, while it runs."""
        if self._call is not None:
            self._call.doing = "validating" if results is None else ""

    def start(self, loop: LoopView) -> None:
        """Show the bars; say where the run goes on, if it does."""
        if not self._quiet:
            self._call = _Call(self._to or rich.get_console(), loop)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Show the newest values, where the last look is long enough ago."""
        call, now = self._call, monotonic()
        if call is not None:
            if now >= call.due or call.waiting is not None:
                with call.lock:
                    call.look(loop, logs, now)
            call.last, call.doing = now, ""

    def record(self, loop: LoopView, record: Record) -> None:
        """Print a line that stays."""
        if self._call is not None:
            with self._call.lock:
                self._call.record(loop, record)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Remove the bars, and say why the run ended."""
        call, self._call = self._call, None
        if call is not None:
            call.close(loop, error)


class _Call:
    """One call of the loop, shown.

    Attributes:
        due: The moment of the next look.
        last: The moment after the last window.
        waiting: A validation that is not shown yet: an epoch's line may be about to tell the same.
        doing: What the loop does other than running steps.
        lock: Held by whoever draws: the loop, or the thread that shows how long something takes.
    """

    def __init__(self, console: rich.console.Console, loop: LoopView) -> None:
        self._console = console
        self._began = self._epoch_began = now = monotonic()
        self._first, self._costs = loop.progress, loop.costs
        self._pace, self._table = Pace(), Table()
        self._means: Mapping[str, float] = {}
        self._means_due = now + METRICS
        self._looked, self._plan = False, ""
        self._display: Display | None = None
        self._live: Live | None = None
        self._drawn_width = console.width
        self._interval = IN_PLAIN_TEXT
        self.due = self.last = now
        self.waiting: Record | None = None
        self.doing = "" if loop.plan else "compiling the first step"
        self.lock = threading.RLock()
        self._ended = threading.Event()
        if self._first.step > 0:
            self._print(f"going on after {self._first}", "dim")
        self._tell_plan(loop)
        widgets = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        if widgets or console.is_interactive:
            self._interval = IN_NOTEBOOK if widgets else ON_TERMINAL
            position = Position(loop, self._first, self._first.step)
            self._display = Display(position, self.doing)
            # No thread draws while steps run: it would take the interpreter from the loop.
            self._live = Live(self._display, console=console, auto_refresh=False, transient=True)
            self._live.start(refresh=True)
        silence = SILENCE_IN_PLAIN_TEXT if self._live is None else SILENCE_ON_TERMINAL
        watching = (silence, self._ended, weakref.ref(self), weakref.ref(loop))
        self._thread = threading.Thread(target=_watch, args=watching, daemon=True)
        self._thread.start()

    def look(self, loop: LoopView, logs: StepLogs, now: float) -> None:
        """Show a validation that waits, and, where it is due, how far the run is."""
        self._show_waiting()
        if now < self.due:
            return
        self.due = now + self._interval
        compiling = loop.costs.compiling - self._costs.compiling
        self._pace.look(now - compiling, logs.progress)
        if not self._looked:
            self._looked = True
            self._tell_plan(loop)
            if self._display is None:  # plain text begins with what is known after ten seconds
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
        """Print the line of an epoch or of a log; keep that of a validation for a moment."""
        now = monotonic()
        self._pace.lose(now - self.last)  # validation, or whatever led to this record
        self.last = now
        if record.kind == "epoch":
            self._show_epoch(loop, record, now)
            self._means = {}
        elif record.kind == "validation":
            self._show_waiting()
            self.waiting = record
        else:
            self._show_waiting()
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
            self._print(f"going back from {at}: {error}", "bold yellow")
        elif error is not None:
            asked = isinstance(error, (KeyboardInterrupt, SystemExit))
            how = "interrupted" if asked else type(error).__name__
            self._print(f"{how} after {at}; {ran}", "bold red")
        elif loop.reason is not None:
            self._print(f"stopped after {at}: {loop.reason}; {ran}", "bold yellow")
        else:
            self._print(f"finished: {ran}", "bold green")
        if loop.unfinished and loop.directory is not None:
            self._print(f"all of it is saved in {loop.directory}: run the same again to go on")

    def show_activity(self, loop: LoopView, now: float) -> None:
        """Show that the loop compiles or validates, and for how long; else nothing."""
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
        """Erase the bars where the terminal has become narrower, so that their lines were wrapped.

        rich goes up by as many lines as it has drawn, and the terminal now has more of them.
        """
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
        """Say what the time went to beside training, where it is worth knowing."""
        compiling = loop.costs.compiling - self._costs.compiling
        waiting = loop.costs.waiting - self._costs.waiting
        parts: list[str] = []
        if compiling >= NOTABLE_SECONDS:
            parts.append(f"{brief(compiling)} s of it compiling")
        if waiting >= NOTABLE_SHARE * (seconds - compiling) and waiting >= NOTABLE_SECONDS:
            parts.append(f"{brief(waiting)} s waiting for data, which is the bottleneck")
        return f" ({', '.join(parts)})" if parts else ""

    def _tell_plan(self, loop: LoopView) -> None:
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
        self._adapt()
        show(self._console, text, style)


def _watch(
    silence: float,
    ended: threading.Event,
    call: "weakref.ref[_Call]",
    loop: "weakref.ref[LoopView]",
) -> None:
    """Show what a run is doing where no step ends for a while, until it ends or is forgotten."""
    shown = monotonic()
    while not ended.wait(silence / 2):
        watched, view = call(), loop()
        if watched is None or view is None:
            return
        now = monotonic()
        # Bars are drawn over, and plain lines repeated more seldom.
        since = watched.last if silence < 1 else max(watched.last, shown)
        if now - since >= silence:
            with watched.lock:
                watched.show_activity(view, now)
            shown = now
        del watched, view  # so that a run that was left may be forgotten


def show(console: rich.console.Console, text: str, style: str = "") -> None:
    """Print a text: on a terminal broken between words, in a file as it is."""
    text = wrapped(text, console.width) if console.is_terminal else text
    console.print(Text(text, style), soft_wrap=True)
