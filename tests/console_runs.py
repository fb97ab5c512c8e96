"""What the tests of the console share: a clock that tests move, and a loop."""

import re

import numpy as np
import pytest

from treadle.core.logs import Record, StepLogs
from treadle.core.progress import Costs, Progress
from treadle.hooks import Console, console

CONTROL = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])|(\r)|(\n)|([^\x1b\r\n]+)")


def screen(written):
    """Return the lines that a terminal shows after it was sent this."""
    lines, row, column = [""], 0, 0
    for number, code, back, new, text in CONTROL.findall(written):
        if code == "A":
            row -= int(number)
        elif code == "K":
            lines[row] = ""
        elif back:
            column = 0
        elif new:
            row, column = row + 1, 0
            lines += [""] * (row == len(lines))
        elif text:
            lines[row] = lines[row][:column].ljust(column) + text
            column += len(text)
    return [line.rstrip() for line in lines if line.strip()]


class Clock:
    """Stands for `time.monotonic`: a test says how much time passes."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Run:
    """A loop as a hook sees it, with a console on some file."""

    def __init__(self, clock, to, epochs=2, length=100, end=None, plan="one plan", at=0, **kwargs):
        self.progress, self.reason, self.plan = Progress(step=at), None, plan
        self.unfinished, self.directory = False, None
        self.epochs_planned, self.steps_planned, self.steps_per_epoch = epochs, end, length
        self.asked, self.costs, self.evaluated = 0, Costs(), None
        self.compiling = False
        self.clock, self.began, self.file = clock, clock.now, to.file
        self.hook = Console(to=to, **kwargs)
        self.hook.start(self)

    def metrics(self):
        self.asked += 1
        return {"loss": 0.75, "accuracy": 0.9}

    def window(self, steps=10, seconds=0.0, loss=0.5):
        self.clock.now += seconds
        first = self.progress.step + 1
        self.progress = self.progress.advanced(steps, 64 * steps).after_seconds(
            self.clock.now - self.began
        )
        values = {"loss": np.full(steps, loss, np.float32)}
        self.hook.steps(self, StepLogs(first, values, values, 64, self.progress))

    def record(self, kind, seconds=0.0, **values):
        self.clock.now += seconds
        self.progress = self.progress.after_seconds(self.clock.now - self.began)
        self.hook.record(self, Record(kind, self.progress, values))
        if kind == "epoch":
            self.progress = self.progress.at_epoch(self.progress.epoch + 1)

    def end(self, error=None):
        self.hook.end(self, error)

    @property
    def lines(self):
        return self.file.getvalue().splitlines()

    @property
    def shown(self):
        return screen(self.file.getvalue())


@pytest.fixture(name="clock_")
def stopped_clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(console, "monotonic", clock)
    # A thread would look at this clock at any moment: tests call what it calls.
    monkeypatch.setattr(console, "_watch", lambda *_: None)
    return clock
