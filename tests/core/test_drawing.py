import importlib.util

import numpy as np
import pytest

from treadle.core import drawing
from treadle.errors import ConfigurationError


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "rate.pgn",
            "rate.pgn cannot be drawn: unknown kind of picture 'pgn'. Did you mean 'png'? Known: "
            "png, svg, pdf.",
        ),
        ("no/rate.png", "no/rate.png cannot be drawn: there is no folder no"),
    ],
)
def test_invalid_values_are_not_drawn(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError) as caught:
        drawing.checked_picture(path)
    assert str(caught.value) == message


def test_drawing_needs_matplotlib(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        drawing.checked_picture("rate.png")
    assert str(caught.value) == (
        "rate.png cannot be drawn, because Matplotlib is not installed: pip install matplotlib"
    )


def test_a_figure_is_saved(tmp_path):
    figure = drawing.new_figure(3.0, 2.0)
    axes = figure.add_subplot()
    drawing.style_axes(axes, "title", "x", "y")
    drawing.count_in_thousands(axes)
    assert axes.xaxis.get_major_formatter()(12_000, 0) == "12,000"
    drawing.save(figure, tmp_path / "figure.png")
    width, height = np.frombuffer((tmp_path / "figure.png").read_bytes()[16:24], ">u4")
    assert (width, height) == (450, 300)
