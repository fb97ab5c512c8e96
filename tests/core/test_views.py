"""What notebooks show of results: tables and curves whose texts are escaped."""

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import keras
import numpy as np
import pytest

import treadle
from tests.report_directories import log_of, write_run
from tests.run_content import write_record
from treadle.core import views
from treadle.core.history import MOST_CHARTS, History
from treadle.core.logs import Record, StepLogs
from treadle.core.progress import Progress
from treadle.doctor import Finding, Line, Sheet

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&\x1b[2J"
X = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class Reader(HTMLParser):
    """Collects the elements, attributes and texts of HTML, and that each element is closed."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.attributes, self.texts, self.open = [], set(), [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.attributes |= {name for name, _ in attributes}
        self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


HARMLESS = set(
    [
        "div",
        "p",
        "b",
        "table",
        "tr",
        "th",
        "td",
        "svg",
        "text",
        "tspan",
        "path",
        "polyline",
        "line",
        "pre",
        "span",
    ]
)


def shown(thing):
    """Return the HTML of a view after checking that it holds no element that could act."""
    text = thing._repr_html_()
    read = Reader(text)
    assert set(read.elements) <= HARMLESS
    assert not any(name.startswith("on") or name in ("src", "href") for name in read.attributes)
    assert "\x1b" not in text and "http" not in text
    return read


def task(units=2):
    layers = [keras.layers.Dense(units), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input((3,)), *layers])
    return treadle.Supervised(model, "mse", keras.optimizers.SGD(0.01))


def source():
    return treadle.data.from_arrays(X, Y, batch_size=8)


def test_a_history_shows_curves_and_the_last_epochs():
    history = History()
    values = {"loss": np.linspace(3, 1, 1000)}
    history.add_steps(StepLogs(1, values, values, 8, Progress(1000)))
    for epoch in range(12):
        numbers = {"loss": 3 - epoch / 6, "val_loss": 2.5, EVIL: 0.25}
        history.add(Record("epoch", Progress(80 * epoch + 80, epoch), numbers))
    read = shown(history)
    assert read.elements.count("svg") == 2 and read.elements.count("tr") == 1 + 10
    assert read.texts[0].startswith("History(1,000 steps, 12 epochs: loss, val_loss, ")
    assert {"3", "12", "2.167", "training", "validation"} <= {text.strip() for text in read.texts}
    assert "2.833" not in read.texts  # the first epochs are left out


def test_a_view_of_many_values_is_bounded():
    history = History()
    for epoch in range(2):
        numbers = {f"value_{i}": 1.0 * epoch for i in range(20)}
        history.add(Record("epoch", Progress(epoch + 1, epoch), numbers))
    read = shown(history)
    assert read.elements.count("svg") == MOST_CHARTS
    assert "14 more in history.plot()" in read.texts
    values = {"loss": np.random.default_rng(0).normal(size=200_000)}
    history.add_steps(StepLogs(1, values, values, 8, Progress(200_000)))
    assert len(history._repr_html_()) < 60_000


def test_an_empty_history():
    assert shown(History()).texts == ["History(0 steps, 0 epochs)"]


def lines(svg):
    return [
        [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        for line in ET.fromstring(svg).iter("polyline")
    ]


def test_curves_have_gaps_and_fit_into_the_image():
    x = np.arange(1, 8)
    y = np.array([1.0, 2.0, np.nan, 4.0, np.inf, 3.0, 2.0])
    svg = views.chart("loss", [views.Curve("training", x, y)], "step")
    parts, [point] = lines(svg), ET.fromstring(svg).iter("circle")
    assert [len(part) for part in parts] == [2, 2]
    assert all(0 <= px <= 320 and 0 <= py <= 170 for part in parts for px, py in part)
    # Larger numbers are higher.
    assert parts[0][0][1] > parts[0][1][1] == parts[1][1][1] > float(point.attrib["cy"])
    assert views.chart("loss", [views.Curve("training", x, np.full(7, np.nan))], "step") == ""


def test_a_faint_curve_does_not_determine_the_scale():
    x = np.arange(1, 5)
    single = views.Curve("", x, np.array([1.0, 900.0, 2.0, 1.0]), faint=True)
    mean = views.Curve("training", x, np.array([1.0, 2.0, 3.0, 2.0]))
    faint, main = lines(views.chart("loss", [single, mean], "step"))
    assert faint[1][1] == main[2][1]  # at the upper end
    constant = lines(views.chart("rate", [views.Curve("rate", x, np.ones(4))], "step"))
    assert len({y for _, y in constant[0]}) == 1


def test_a_logarithmic_axis_and_marks():
    x = np.array([0.0, 0.001, 0.01, 0.1])
    svg = views.chart("test", [views.Curve("loss", x, x)], "rate", True, [("suggested", 0.01)])
    [curve] = lines(svg)
    assert curve[1][0] - curve[0][0] == pytest.approx(curve[2][0] - curve[1][0], abs=0.2)
    [mark] = ET.fromstring(svg).iter("line")
    assert float(mark.attrib["x1"]) == curve[1][0] and "suggested" in svg


def test_a_sheet_of_the_doctor_is_a_table():
    finding = Finding("L-unpaired", EVIL, "seen", "because", "the fix", "mine.py:3")
    line = Line("batch", EVIL, "from", "0 to 1", "read from the batch", "unusual")
    read = shown(Sheet("Mine", "torch", [line], [finding], [], {}, 4, 1.5))
    assert read.texts[0] == "Mine on torch: 1 certain mistake, 1 unusual fact (4 steps, 1.5 s)"
    assert read.elements.count("tr") == 2 and "from 0 to 1" in read.texts
    assert any(text.endswith("(mine.py:3)") for text in read.texts)


def test_a_range_test_is_a_curve_and_a_table():
    found = treadle.doctor.find_learning_rate(task(), source(), steps=40)
    read = shown(found)
    assert read.elements.count("svg") == 1 and "suggested" in read.texts
    assert f"{found.suggestion:.2g}" in read.texts and f"{found.lowest:.2g}" in read.texts


def test_a_replay_and_a_loaded_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keras.utils.set_random_seed(0)
    with treadle.Loop(task(), "run", console=False) as loop:
        loop.fit(source(), epochs=2)
    keras.utils.set_random_seed(0)
    report = treadle.doctor.replay(task(), source(), "run", step=3)
    text = "".join(shown(report).texts)
    assert [line.rstrip() for line in text.strip().splitlines()] == [
        line.rstrip() for line in str(report).splitlines()
    ]
    read = shown(treadle.load_run("run"))
    assert read.texts[0].startswith("SavedRun('run': Supervised, finished, 16 steps, 2 epochs)")
    assert read.elements.count("svg") == 1


def test_texts_of_a_directory_are_escaped(tmp_path):
    write_run(tmp_path / "run", log_of([1.0] * 8, **{EVIL: 2.0}), settings={EVIL: EVIL})
    facts = json.loads((tmp_path / "run/run.json").read_text())
    facts["configuration"]["task"] = EVIL
    write_record(tmp_path / "run", facts)
    read = shown(treadle.load_run(tmp_path / "run"))
    assert sum("<script>alert(1)" in text for text in read.texts) >= 2
