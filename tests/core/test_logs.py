"""Means, histories, and what a user's own loop gets."""

import itertools

import numpy as np
import pytest

from treadle.core.history import History
from treadle.core.logs import Logs, Means, Record, StepLogs
from treadle.core.progress import Progress


def window(first: int, values: list[float], name: str = "loss") -> StepLogs:
    array = np.array(values, "float32")
    last = Progress(step=first + len(values) - 1)
    return StepLogs(first, {name: array}, {name: np.full(len(values), 8.0)}, 8, last)


# StepLogs


def test_rows_are_numbered_by_step() -> None:
    some = window(5, [1.0, 0.5, 0.25])
    assert some.steps == 3
    assert list(some.rows()) == [(5, {"loss": 1.0}), (6, {"loss": 0.5}), (7, {"loss": 0.25})]
    assert all(type(row["loss"]) is float for _, row in some.rows())


def test_steps_that_return_nothing_have_rows_all_the_same() -> None:
    assert list(StepLogs(1, {}, {}, 8, Progress(step=2)).rows()) == [(1, {}), (2, {})]


# Means


def test_means_do_not_depend_on_windows() -> None:
    rng = np.random.default_rng(0)
    values, weights = rng.normal(size=64).astype("float32"), rng.integers(1, 9, 64).astype(float)
    expected = (values.astype("float64") * weights).sum() / weights.sum()
    results = set()
    for sizes in ((64,), (1,), (7,), (3, 1, 20)):
        means, start = Means(), 0
        for size in itertools.cycle(sizes):
            part = slice(start, start + size)
            means.add({"loss": values[part]}, {"loss": weights[part]})
            start += size
            if start >= 64:
                break
        results.add(means.result()["loss"])
    assert len(results) == 1
    assert results.pop() == pytest.approx(expected, rel=1e-12)


def test_each_value_counts_by_its_own_weight() -> None:
    means = Means()
    means.add(
        {"loss": np.array([1.0, 4.0]), "tokens": np.array([10, 20])},
        {"loss": np.array([3.0, 1.0]), "tokens": np.array([1.0, 1.0])},
    )
    assert means.result() == {"loss": 1.75, "tokens": 15.0}


def test_values_without_weight_have_no_mean() -> None:
    means = Means()
    assert means.result() == {}
    means.add({"loss": np.array([1.0])}, {"loss": np.array([0.0])})
    assert means.result() == {}


def test_nan_is_reported_not_hidden() -> None:
    means = Means()
    means.add({"loss": np.array([1.0, np.nan])}, {"loss": np.ones(2)})
    assert np.isnan(means.result()["loss"])


def test_a_value_of_weight_0_may_be_nan() -> None:
    means = Means()
    means.add({"loss": np.array([1.0, np.nan, np.inf])}, {"loss": np.array([2.0, 0.0, 0.0])})
    assert means.result() == {"loss": 1.0}


def test_values_and_weights_must_be_as_many() -> None:
    with pytest.raises(ValueError, match="zip"):
        Means().add({"loss": np.ones(2)}, {"loss": np.ones(3)})


# History


def history() -> History:
    found = History()
    found.add(Record("validation", Progress(step=2), {"val_loss": 0.7}))
    found.add(Record("epoch", Progress(step=2), {"loss": 0.9, "val_loss": 0.7}))
    found.add(Record("log", Progress(step=3), {"note": "text"}))
    found.add(Record("epoch", Progress(step=4), {"loss": 0.8}))
    return found


def test_records_by_name_and_by_kind() -> None:
    found = history()
    assert found["loss"] == [0.9, 0.8]
    assert found["note"] == ["text"]
    assert found.names() == ["val_loss", "loss", "note"]
    assert found.epochs == [{"loss": 0.9, "val_loss": 0.7}, {"loss": 0.8}]
    assert found.last == {"val_loss": 0.7, "loss": 0.8}


def test_a_name_that_no_record_holds() -> None:
    with pytest.raises(KeyError) as caught:
        history()["accuracy"]
    assert caught.value.args[0] == ("no record holds 'accuracy'; there are: val_loss, loss, note")
    with pytest.raises(KeyError, match="no record holds 'loss'; there are: none"):
        History()["loss"]


@pytest.mark.parametrize("count", [1, 2, 511, 512, 1500])
def test_every_steps_value_survives_however_many_windows(count: int) -> None:
    found = History()
    for i in range(count):
        found.add_steps(window(2 * i + 1, [2.0 * i, 2.0 * i + 1]))
    np.testing.assert_array_equal(found.steps("loss"), np.arange(2 * count))
    assert len(found._chunks) == 1
    assert found.first_step == 1
    assert found.step_names == ["loss"]


def test_a_name_that_the_step_did_not_return() -> None:
    found = History()
    assert found.first_step is None
    with pytest.raises(KeyError, match="the step returned no 'loss'; it returned: nothing"):
        found.steps("loss")
    found.add_steps(window(1, [1.0]))
    with pytest.raises(KeyError, match="the step returned no 'accuracy'; it returned: loss"):
        found.steps("accuracy")


def test_a_metric_has_no_value_for_a_step() -> None:
    found = history()
    found.add_steps(window(1, [1.0]))
    with pytest.raises(KeyError) as caught:
        found.steps("val_loss")
    assert caught.value.args[0] == (
        "the step returned no 'val_loss'; it returned: loss. 'val_loss' has one value for each "
        "epoch, validation or log, and none for single steps, like every metric: use "
        "history['val_loss']"
    )


# Logs


def test_metrics_are_computed_lazily_and_once() -> None:
    calls = []

    def metrics() -> dict[str, float]:
        calls.append(1)
        return {"accuracy": 0.9, "loss": 99.0}

    found = Logs({"loss": 0.5}, Progress(step=3), metrics)
    assert found["loss"] == 0.5
    assert calls == []
    assert found["accuracy"] == 0.9
    assert found["accuracy"] == 0.9
    assert found["loss"] == 0.5
    assert len(calls) == 1
    assert found.step == 3
    with pytest.raises(KeyError, match="no 'acuracy' in the logs; there are: loss, accuracy"):
        found["acuracy"]


def test_a_history_is_shown_in_a_line() -> None:
    assert repr(History()) == "History(0 steps, 0 epochs)"
    history = History([Record("epoch", Progress(step=2), {"loss": 0.5, "val_loss": 0.6})])
    history.add_steps(StepLogs(1, {"loss": np.zeros(2000)}, {}, 8, Progress(step=2000)))
    assert repr(history) == "History(2,000 steps, 1 epoch: loss, val_loss)"


def test_the_last_values_are_numbers() -> None:
    values = {"loss": 0.5, "note": "a text", "image": np.zeros((2, 2)), "n": np.float32(2)}
    history = History([Record("epoch", Progress(), values)])
    assert history.last == {"loss": 0.5, "n": 2.0}
    assert history["note"] == ["a text"]
