"""The recipe on a table in which what is looked for is rare, on the active backend."""

import os
import signal

import keras
import numpy as np
import pytest
from executions import some
from recipe_runs import make

import treadle
from treadle.errors import Terminated
from treadle.recipes.tabular import BalancedAccuracy, balanced_weights, split

SETTINGS = ("units=8", "learning_rate=0.02", "batch_size=256")


def stopped(loop):
    loop.stop("enough")


def killed(loop):
    os.kill(os.getpid(), signal.SIGTERM)


def broken(loop):
    raise ZeroDivisionError


WAYS = {
    "early": (["patience=2"], [], None),
    "at its end": ([], [], None),
    "by a hook": ([], [treadle.at("5 epochs", stopped)], None),
    "by a signal": ([], [treadle.at("5 epochs", killed)], Terminated),
    "by an error": ([], [treadle.at("5 epochs", broken)], ZeroDivisionError),
}


class Kept(treadle.Hook):
    """The weights of each epoch that was better than all before it, by its score."""

    def __init__(self):
        self.weights = {}

    def record(self, loop, record):
        if record.kind == "epoch":
            score = record.values["val_balanced_accuracy"]
            self.weights.setdefault(score, loop.task.model.get_weights())


@pytest.mark.parametrize("way", some(WAYS))
def test_the_best_weights_are_restored_however_training_ends(way):
    settings, hooks, error = WAYS[way]
    made = make("tabular", *SETTINGS, *settings)
    datasets = made.datasets()
    kept = Kept()
    hooks = [*made.hooks(), kept, *hooks]
    loop = treadle.Loop(made.task, hooks=hooks, console=False)
    try:
        with loop:
            loop.fit(datasets.train, datasets.validation, epochs=40 if way == "early" else 8)
        assert error is None
    except (Terminated, ZeroDivisionError) as found:
        assert type(found) is error
    scores = loop.history["val_balanced_accuracy"]
    assert len(scores) < {"early": 40, "at its end": 9}.get(way, 6)
    assert max(scores) > min(scores)
    assert scores[-1] < max(scores) or way != "early"
    for ours, best in zip(made.task.model.get_weights(), kept.weights[max(scores)], strict=True):
        np.testing.assert_array_equal(ours, best)
    again = treadle.Loop(made.task, console=False).evaluate(datasets.validation)
    assert again["balanced_accuracy"] == pytest.approx(max(scores))
    logged = [r.values for r in loop.history.records if "final_balanced_accuracy" in r.values]
    assert len(logged) == (0 if error else 1)
    if not error:
        assert logged[0]["final_balanced_accuracy"] == pytest.approx(max(scores))
        assert "test_recall" in loop.history.records[-1].values


def test_rare_wines_are_found_only_where_they_have_their_weight():
    found = {}
    for weighted in ("true", "false"):
        made = make("tabular", *SETTINGS, f"weighted={weighted}")
        datasets = made.datasets()
        with treadle.Loop(made.task, hooks=made.hooks(), console=False) as loop:
            loop.fit(datasets.train, datasets.validation, epochs=10)
        found[weighted] = loop.history.records[-1].values
    assert found["true"]["test_balanced_accuracy"] > 0.6
    assert found["false"]["test_balanced_accuracy"] < 0.55
    assert found["true"]["test_recall"] > found["false"]["test_recall"] + 0.2


def test_both_kinds_weigh_the_same():
    for name in ("train", "validation", "test"):
        _, y = split(name)
        weights = balanced_weights(y)
        assert 0.02 < y.mean() < 0.05
        assert weights.mean() == pytest.approx(1, rel=1e-5)
        assert weights[y[:, 0] == 1].sum() == pytest.approx(weights[y[:, 0] == 0].sum(), rel=1e-4)


def test_no_wine_is_in_two_parts():
    rows = [set(map(bytes, split(name)[0])) for name in ("train", "validation", "test")]
    assert [len(part) for part in rows] == [2377, 792, 792]
    assert len(set.union(*rows)) == 3961


def test_inputs_are_normalized_by_what_is_trained_on():
    model = make("tabular", *SETTINGS).task.model
    x, _ = split("train")
    normal = keras.ops.convert_to_numpy(model.layers[0](x))
    np.testing.assert_allclose(normal.mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(normal.std(axis=0), 1, atol=1e-3)


def test_balanced_accuracy_is_the_mean_of_both_recalls():
    metric = BalancedAccuracy()
    y = np.array([[1], [1], [0], [0], [0], [0]], "float32")
    metric.update_state(y[:3], np.array([[0.9], [0.1], [0.2]], "float32"))
    metric.update_state(y[3:], np.array([[0.3], [0.4], [0.5]], "float32"))
    assert float(metric.result()) == pytest.approx((1 / 2 + 3 / 4) / 2)
    metric.reset_state()
    assert float(metric.result()) == 0
