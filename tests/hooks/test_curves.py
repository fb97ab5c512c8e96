"""`LearningCurve`: the plot of training and validation."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from tests.hook_loop import NAN, Loop
from treadle import hooks
from treadle.core import drawing
from treadle.core.drawing import save
from treadle.core.history import History, Panel, panels_of
from treadle.core.logs import Record, StepLogs
from treadle.core.progress import Progress
from treadle.hooks import final as hook


@pytest.fixture(autouse=True)
def plots(monkeypatch):
    """Save plots, which `quick_runs` leaves out of all other tests."""
    monkeypatch.setattr(hook, "save", save)


def history(epochs=3, length=50, scale=1.0, first=1):
    found = History()
    for epoch in range(epochs):
        steps = np.arange(first + epoch * length, first + (epoch + 1) * length)
        values = {"loss": (scale / steps + 1).astype("f4")}
        progress = Progress(int(steps[-1]), epoch, length)
        found.add_steps(StepLogs(int(steps[0]), values, values, 8, progress))
        means = {"loss": 1.0, "accuracy": 0.5, "val_loss": 1.2, "val_far_accuracy": 0.4}
        found.add(Record("validation", progress, means))
        found.add(Record("epoch", progress, {**means, "text": "no number"}))
    return found


def test_curves_are_drawn_without_touching_pyplot(tmp_path):
    # In a process without Keras, which imports pyplot itself.
    code = (
        "import sys; from treadle.core.history import *; from treadle.core.progress import *\n"
        "from treadle.hooks.final import draw\n"
        "record = Record('epoch', Progress(step=9), {'loss': 0.5, 'accuracy': 0.6})\n"
        "assert draw(History([record]), 'curves.png')\n"
        "print('matplotlib.pyplot' in sys.modules)"
    )
    run = [sys.executable, "-W", "error", "-c", code]
    found = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "False\n", found.stderr
    width, height = np.frombuffer((tmp_path / "curves.png").read_bytes()[16:24], ">u4")
    assert width == 1590 and height == 540


def test_learning_curve_draws_however_training_ended(tmp_path):
    loop = Loop(tmp_path)
    hooks.LearningCurve().end(loop, None)
    assert list(tmp_path.iterdir()) == []  # there is nothing to draw
    loop.history = history()
    hooks.LearningCurve().end(loop, ValueError())
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]


def test_learning_curve_is_left_out_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loop = Loop(tmp_path)
    loop.history = history()
    hooks.LearningCurve().end(loop, None)
    assert list(tmp_path.iterdir()) == []


def test_panels_show_training_next_to_validation():
    loss, accuracy = panels_of(history())
    assert (loss.name, accuracy.name) == ("loss", "accuracy")
    assert loss.noisy[0].tolist() == list(range(1, 151))
    assert loss.points == {"validation": {50: 1.2, 100: 1.2, 150: 1.2}}
    assert accuracy.points == {
        "training": {50: 0.5, 100: 0.5, 150: 0.5},
        "validation, far": {50: 0.4, 100: 0.4, 150: 0.4},
    }
    assert not len(accuracy.noisy[0])


def test_panels_of_a_resumed_run_begin_where_it_did():
    assert panels_of(history(first=101))[0].noisy[0][0] == 101


def test_panels_of_an_endless_epoch_take_training_from_validations():
    found = History()
    found.add(Record("validation", Progress(5), {"accuracy": 0.5, "val_accuracy": 0.4}))
    (panel,) = panels_of(found)
    assert panel.points == {"training": {5: 0.5}, "validation": {5: 0.4}}


def test_panels_pass_over_what_is_no_number():
    found = History()
    values = {"loss": np.array([1.0, NAN, 3.0])}
    found.add_steps(StepLogs(1, values, values, 8, Progress(3)))
    found.add(Record("epoch", Progress(3), {"loss": 2.0, "text": "a", "gone": NAN}))
    (panel,) = panels_of(found)
    assert [part.tolist() for part in panel.noisy] == [[1, 3], [1.0, 3.0]]


def test_a_smooth_line_is_a_moving_mean():
    steps = np.arange(1.0, 401.0)
    panel = Panel("loss", (steps, steps % 2))
    middles, means = panel.smooth
    assert len(middles) == len(means) == 391 and middles[0] == 6
    np.testing.assert_allclose(means, 0.5)


@pytest.mark.parametrize(("scale", "expected"), [(10.0, "linear"), (1e5, "log")])
def test_a_loss_over_more_than_two_decades_has_a_logarithmic_scale(scale, expected):
    from matplotlib.figure import Figure

    loss = panels_of(history(scale=scale))[0]
    axes = Figure().add_subplot()
    drawing._draw_panel(axes, loss)
    assert axes.get_yscale() == expected
    assert axes.get_title(loc="left") == axes.get_ylabel() == "loss"
    assert axes.get_xlabel() == "step"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "validation"]
