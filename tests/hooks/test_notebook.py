"""`Console` in a notebook: one output of the cell, which is updated in place."""

import io
import sys
from types import SimpleNamespace

import pytest
import rich.console

from tests.console_runs import Run, stopped_clock  # noqa: F401
from treadle.hooks import notebook


class Handle:
    """An output of a cell, as IPython's `display` returns it."""

    def __init__(self, output):
        self.versions = [output]

    def update(self, output):
        self.versions.append(output)

    @property
    def text(self):
        return self.versions[-1]._repr_mimebundle_()["text/plain"]

    @property
    def markup(self):
        return self.versions[-1]._repr_mimebundle_()["text/html"]


@pytest.fixture
def outputs(monkeypatch):
    """The outputs of a cell; IPython itself is not needed."""
    found = []

    def display(output, display_id):
        assert display_id is True
        found.append(Handle(output))
        return found[-1]

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    return found


@pytest.fixture
def run(clock_, outputs):
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)
    return lambda **kwargs: Run(clock_, console, **kwargs)


def test_a_run_is_one_output(run, outputs):
    ran = run()
    assert len(outputs) == 1 and "━" in outputs[0].text
    ran.window(seconds=2.0)
    ran.window(seconds=2.0)
    assert "loss 0.75" in outputs[0].text and "320 examples/s" in outputs[0].text
    ran.record("epoch", loss=0.6, accuracy=0.875)
    ran.hook.print("a <b>message</b>", "dim")
    ran.record("epoch", loss=0.5, accuracy=0.9)
    ran.end()
    assert len(outputs) == 1
    lines = outputs[0].text.splitlines()
    assert [line.split()[0] for line in lines] == ["plan:", "epoch", "1/2", "a", "2/2", "finished:"]
    assert "&lt;b&gt;message&lt;/b&gt;" in outputs[0].markup
    assert "━" not in outputs[0].text  # the progress is removed, and the lines stay
    assert ran.file.getvalue() == ""


def test_updates_are_at_most_two_a_second(run, outputs):
    ran = run()
    for _ in range(100):
        ran.window(seconds=0.01)
    assert len(outputs[0].versions) < 10


def test_a_long_run_begins_further_outputs(run, outputs):
    ran = run(epochs=1000)
    for _ in range(notebook.MOST_LINES + 50):
        ran.record("epoch", loss=0.5)
    ran.end()
    assert len(outputs) == 2 and "━" not in outputs[0].text
    assert len(outputs[0].text.splitlines()) == notebook.MOST_LINES
    assert outputs[1].text.splitlines()[-1].startswith("finished")


def test_lines_after_the_end_bring_no_progress_back(run, outputs):
    ran = run()
    for number in range(notebook.MOST_LINES - 1):  # with the plan, one output is full
        ran.hook.print(f"line {number}")
    ran.end()
    assert [len(output.text.splitlines()) for output in outputs] == [notebook.MOST_LINES, 1]
    assert outputs[1].text.startswith("finished") and "━" not in outputs[1].text


def test_quick_lines_are_drawn_together(run, outputs):
    ran = run()
    for number in range(150):
        ran.hook.print(f"line {number}")
    assert len(outputs[0].versions) < 100
    ran.end()
    assert [f"line {number}" for number in range(150)] == outputs[0].text.splitlines()[1:-1]


def test_without_ipython_plain_lines_are_printed(clock_, monkeypatch):
    monkeypatch.setitem(sys.modules, "IPython.display", None)  # importing it fails
    console = rich.console.Console(file=io.StringIO(), force_jupyter=True)
    assert not notebook.shows(console)
    assert not notebook.shows(rich.console.Console(file=io.StringIO()))
