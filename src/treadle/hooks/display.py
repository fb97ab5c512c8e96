"""The progress display of a run: position, speed and latest values."""

from collections import deque
from collections.abc import Iterator, Mapping

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from ..core.hook import LoopView
from ..core.logs import brief, clock, line, short
from ..core.progress import Progress

LONGEST_BAR = 40


class Speed:
    """Measures the speed of a run from repeated observations of its progress.

    The first observation is made after the first window, so that compiling is not counted.

    Example:
        >>> pace = Speed()
        >>> pace.update(0.0, Progress(step=10, examples=640))
        >>> pace.update(2.0, Progress(step=20, examples=1280))
        >>> pace.examples_per_second, pace.seconds_for(steps=30)
        (320.0, 6.0)
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, int] = (0.0, 0)
        self._lost = 0.0
        self._recent: deque[tuple[float, int]] = deque(maxlen=50)

    def update(self, now: float, progress: Progress) -> None:
        """Add an observation of the progress at a time in seconds.

        The time must not include compiling, which does not happen again for later steps.
        """
        self._last = now, progress.step
        self._first = self._first or self._last
        self._recent.append((now - self._lost, progress.examples))

    def lose(self, seconds: float) -> None:
        """Exclude a time in which no steps ran from the speed."""
        self._lost += seconds

    @property
    def examples_per_second(self) -> float | None:
        """The speed over recent observations; None before the second one."""
        if len(self._recent) < 2:
            return None
        (before, old), (now, new) = self._recent[0], self._recent[-1]
        return (new - old) / (now - before) if now > before else None

    def seconds_for(self, steps: int) -> float | None:
        """Estimate the time of a number of steps, including validations and hooks."""
        if self._first is None or self._last[1] == self._first[1]:
            return None
        (began, first), (now, last) = self._first, self._last
        return (now - began) / (last - first) * steps


class Position:
    """The position of a `fit` call, as texts and as fractions from 0 to 1.

    Attributes:
        epoch: The epoch, such as `3`, or `3/10` if the number of epochs is known.
        epoch_part: The finished fraction of all epochs; None if unknown.
        step: The step of the run, or within the epoch if the total number of steps is unknown.
        step_part: The finished fraction of the steps that `step` counts; None if unknown.
        steps_left: The number of steps until the end of the call; None if unknown.
    """

    def __init__(self, loop: LoopView, progress: Progress, first_step: int) -> None:
        epochs, end, length = loop.epochs_planned, loop.steps_planned, loop.steps_per_epoch
        of_epoch = progress.batch / length if length else None
        left: list[int] = []
        if epochs is None:
            self.epoch, self.epoch_part = f"{progress.epoch + 1}", of_epoch
        else:
            self.epoch = f"{progress.epoch + 1}/{epochs}"
            self.epoch_part = (progress.epoch + (of_epoch or 0.0)) / epochs
            if length is not None:
                left.append((epochs - progress.epoch) * length - progress.batch)
        if end is not None:
            self.step = f"{progress.step:,}/{end:,}"
            self.step_part = (progress.step - first_step) / max(1, end - first_step)
            left.append(end - progress.step)
        elif length is not None:
            self.step, self.step_part = f"{progress.batch:,}/{length:,}", of_epoch
        else:
            self.step, self.step_part = f"{progress.step:,}", None
        self.steps_left = max(0, min(left)) if left else None


class Display:
    """Four lines that are redrawn in place: two progress bars, the latest values, the means.

    They are drawn as rich segments, which takes 0.1 ms; rich's texts and tables take several ms.

    Attributes:
        position: The position of the run.
        notes: The text after each bar.
        newest: The values of the latest step.
        means: The means and metrics of the current epoch.
        drawn: The widths of the lines drawn last.
    """

    def __init__(self, position: Position, note: str) -> None:
        self.position = position
        self.notes: tuple[str, str] = ("", note)
        self.newest: Mapping[str, float] = {}
        self.means: Mapping[str, float] = {}
        self.drawn: list[int] = []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        """Draw the lines; values that do not fit into the width of the terminal are omitted."""
        segments = list(self._segments(console, options))
        text = "".join(segment.text for segment in segments)
        self.drawn = [min(len(line), options.max_width) for line in text.splitlines()]
        yield from segments

    def _segments(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        at = self.position
        width = max(len(at.epoch), len(at.step))
        room = options.max_width - width - max(len(note) for note in self.notes) - 10
        length = max(0, min(LONGEST_BAR, room))
        character = "-" if options.ascii_only else "━"
        # Without colors, the unfinished part of a bar would look finished, so it is not drawn.
        rest = " " if console.no_color or console.color_system is None else character
        styles = [console.get_style(name) for name in ("bar.complete", "bar.back", "dim")]
        rows = [("epoch", at.epoch, at.epoch_part), ("step", at.step, at.step_part)]
        for (label, text, part), note in zip(rows, self.notes, strict=True):
            yield Segment(f"{label:5} {text:>{width}}  ")
            if part is not None:
                done = round(min(1.0, part) * length)
                yield Segment(character * done, styles[0])
                yield Segment(rest * (length - done) + "  ", styles[1])
            yield Segment(note, styles[2])
            yield Segment.line()
        for label, values in (("now", self.newest), ("mean", self.means)):
            if values:
                fixed = {name: short(value, fixed=True) for name, value in values.items()}
                yield Segment(fitting(label, fixed, options.max_width))
                yield Segment.line()


def fitting(label: str, values: Mapping[str, str], width: int) -> str:
    """Return a line with as many values as fit; numbers are never truncated.

    Example:
        >>> fitting("now", {"loss": "0.5000", "accuracy": "0.9000"}, 30)
        'now   loss 0.5000  …'
    """
    text = f"{label:5}"
    parts = [f" {name} {value}" for name, value in values.items()]
    for number, part in enumerate(parts):
        space = " " if number else ""
        rest = 0 if number == len(parts) - 1 else len("  …")
        if len(text) + len(space) + len(part) + rest > width:
            return f"{text}{space} …"
        text += space + part
    return text


def notes(position: Position, pace: Speed, elapsed: float) -> tuple[str, str]:
    """Return the remaining time (or the elapsed time if the end is unknown) and the speed."""
    left = None if position.steps_left is None else pace.seconds_for(position.steps_left)
    time = f"{clock(elapsed)} passed" if left is None else f"{clock(left)} left"
    speed = pace.examples_per_second
    return time, "" if speed is None else f"{speed:,.0f} examples/s"


def progress_line(position: Position, values: Mapping[str, float], extra: tuple[str, str]) -> str:
    """Return the content of `Display` as one plain line."""
    parts = [f"epoch {position.epoch}", f"step {position.step}", line(values), *reversed(extra)]
    return "  ".join(part for part in parts if part)


class MetricsTable:
    """Formats one aligned row per epoch, below a header with the names of the values.

    Example:
        >>> table = MetricsTable()
        >>> for row in table.rows("1/2", 1.25, {"loss": 0.5}):
        ...     print(row)
        epoch   seconds      loss
          1/2      1.25    0.5000
        >>> table.rows("2/2", 12.5, {"loss": 0.25})
        ['  2/2      12.5    0.2500']
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._first_width = 5

    def rows(self, epoch: str, seconds: float, values: Mapping[str, object]) -> list[str]:
        """Return the row of an epoch, preceded by a new header if there are new names."""
        self._first_width = max(self._first_width, len(epoch))
        new = [name for name in values if name not in self._names]
        self._names += new
        cells = [brief(seconds), *(short(values.get(n, ""), fixed=True) for n in self._names)]
        row = self._aligned(epoch, cells)
        return [self._aligned("epoch", ["seconds", *self._names]), row] if new else [row]

    def _aligned(self, first: str, cells: list[str]) -> str:
        widths = [8, *(max(8, len(name)) for name in self._names)]
        texts = [f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)]
        return "  ".join([f"{first:>{self._first_width}}", *texts])
