"""The history of a run as a plot and as a data frame."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from treadle.core.history import History
from treadle.core.logs import Record, StepLogs
from treadle.core.progress import Progress
from treadle.errors import ConfigurationError


def of_two_epochs(first=1):
    found = History()
    values = {"loss": np.array([4.0, 3.0, 2.0, 1.0]), "norm": np.array([1.0, np.nan, 3.0, 4.0])}
    found.add_steps(StepLogs(first, values, values, 8, Progress(first + 3)))
    for epoch in range(2):
        at = Progress(first + 2 * epoch + 1, epoch, seconds=1.5 * (epoch + 1))
        found.add(Record("validation", at, {"val_loss": 5.0}))
        found.add(Record("epoch", at, {"loss": 3.5 - 2 * epoch, "val_loss": 5.0, "accuracy": 0.5}))
    found.add(Record("log", at, {"note": "a text"}))
    return found


def titles(figure):
    return [axes.get_title(loc="left") for axes in figure.axes]


def test_values_of_epochs_are_those_that_fit_of_keras_returns():
    expected = {"loss": [3.5, 1.5], "val_loss": [5.0, 5.0], "accuracy": [0.5, 0.5]}
    assert of_two_epochs().history == expected


def test_a_plot_has_a_panel_for_each_metric():
    figure = of_two_epochs().plot()
    assert titles(figure) == ["loss", "accuracy"]
    loss = figure.axes[0]
    assert [line.get_label() for line in loss.get_lines()] == ["training", "validation"]
    assert list(loss.get_lines()[0].get_xdata()) == [1, 2, 3, 4]
    assert list(loss.get_lines()[1].get_xdata()) == [2, 4]
    assert figure._repr_png_().startswith(b"\x89PNG")


def test_names_select_what_is_plotted():
    history = of_two_epochs(first=11)
    assert titles(history.plot("accuracy")) == ["accuracy"]
    norm = history.plot("norm")  # a value that steps return, and no epoch records
    assert titles(norm) == ["norm"]
    assert list(norm.axes[0].get_lines()[0].get_xdata()) == [11, 13, 14]  # without NaN


def test_what_cannot_be_plotted(monkeypatch):
    with pytest.raises(ConfigurationError) as caught:
        of_two_epochs().plot("acuracy")
    assert str(caught.value) == (
        "history.plot('acuracy'): the history has no number of this name. Did you mean 'accuracy'? "
        "Known: loss, accuracy."
    )
    with pytest.raises(ConfigurationError, match=r"no finite number of an epoch.*train first"):
        History().plot()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        of_two_epochs().plot()
    assert str(caught.value) == (
        "history.plot() needs Matplotlib, which is not installed: pip install matplotlib"
    )


def test_data_frames():
    pandas = pytest.importorskip("pandas")
    history = of_two_epochs(first=11)
    epochs = history.to_pandas()
    assert epochs.columns.tolist() == ["step", "seconds", "loss", "val_loss", "accuracy"]
    assert epochs.index.tolist() == [1, 2] and epochs.index.name == "epoch"
    assert epochs["loss"].tolist() == [3.5, 1.5] and epochs["step"].tolist() == [12, 14]
    steps = history.to_pandas("steps")
    assert steps.index.tolist() == [11, 12, 13, 14] and steps.index.name == "step"
    assert steps["loss"].tolist() == [4.0, 3.0, 2.0, 1.0] and steps["norm"].isna().sum() == 1
    records = history.to_pandas("records")
    assert records["kind"].tolist() == ["validation", "epoch", "validation", "epoch", "log"]
    assert records["note"].dropna().tolist() == ["a text"]
    for rows in ("epochs", "steps", "records"):
        assert isinstance(History().to_pandas(rows), pandas.DataFrame)


def test_rows_of_data_frames(monkeypatch):
    """What pandas gets, also where it is not installed."""
    made = []
    stand_in = SimpleNamespace(
        DataFrame=lambda data, **k: made.append((data, k)) or "a frame",
        RangeIndex=lambda first, end, name: (first, end, name),
    )
    monkeypatch.setitem(sys.modules, "pandas", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    history = of_two_epochs(first=11)
    assert history.to_pandas("steps") == history.to_pandas("records") == "a frame"
    (values, of_steps), (rows, of_records) = made
    assert list(values) == ["loss", "norm"] and of_steps == {"index": (11, 15, "step")}
    assert rows[1] == {
        **{"kind": "epoch", "epoch": 1, "step": 12, "seconds": 1.5},
        **{"loss": 3.5, "val_loss": 5.0, "accuracy": 0.5},
    }
    assert of_records["columns"][:4] == ["kind", "epoch", "step", "seconds"]


def test_without_pandas_the_error_names_it(monkeypatch):
    with pytest.raises(ConfigurationError) as caught:
        of_two_epochs().to_pandas("epoch")  # type: ignore[arg-type]
    assert str(caught.value) == "rows must be 'epochs', 'steps' or 'records', not 'epoch'"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        of_two_epochs().to_pandas()
    assert str(caught.value) == (
        "history.to_pandas() needs pandas, which is not installed: pip install pandas"
    )
