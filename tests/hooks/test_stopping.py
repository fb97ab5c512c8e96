"""`BestWeights` and `EarlyStopping`: monitored values, patience, and the best weights."""

import numpy as np
import pytest

from tests.hook_loop import NAN, Loop
from treadle import hooks
from treadle.errors import ConfigurationError


def trained(hook, losses, error=None, loop=None, name="val_loss"):
    """Train: the weights are always the number of the step, one record each."""
    loop = loop or Loop()
    hook.start(loop)
    for loss in losses:
        loop.weights = loop.progress.step + 1
        loop.record(hook, "epoch", step=loop.weights, **{name: loss})
        if loop.reason:
            break
    loop.weights += 100  # steps after the last record
    hook.end(loop, error)
    return loop


ENDS = [None, ValueError("boom"), KeyboardInterrupt(), SystemExit()]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_the_best_weights_are_restored_however_training_ends(error):
    loop = trained(hooks.EarlyStopping(), [3, 1, 2], error)
    assert loop.weights == 2 and loop.reason is None
    stopped = trained(hooks.EarlyStopping(patience=2), [3, 1, 2, 4, 0], error)
    assert stopped.weights == 2 and stopped.progress.step == 4
    assert stopped.reason == (
        "val_loss did not improve in the last 2 records: its best is 1, at step 2"
    )
    assert loop.warnings == stopped.warnings == []


def notes(loop):
    return [r.values["note"] for r in loop.history.records if "note" in r.values]


def test_best_weights_stops_nothing_and_names_the_step():
    loop = trained(hooks.BestWeights(), [3, 1, 2, 4, 5, 6, 7, 8])
    assert loop.weights == 2 and loop.progress.step == 8 and loop.reason is None
    assert notes(loop) == ["the weights are those of step 2, the best val_loss: 1"]
    assert notes(trained(hooks.BestWeights(), [3, 1], KeyboardInterrupt())) == []
    interrupted = Loop()
    interrupted.unfinished = True
    assert notes(trained(hooks.BestWeights(), [3, 1, 2], loop=interrupted)) == []
    assert interrupted.weights == 2
    with pytest.raises(ConfigurationError, match="BestWeights needs a min_delta of at least 0"):
        hooks.BestWeights(min_delta=-1)


def test_restoring_the_best_weights_can_be_disabled():
    loop = trained(hooks.EarlyStopping(patience=1, restore_best=False), [1, 2])
    assert loop.weights == 102
    assert loop.reason == "val_loss did not improve in the last record: its best is 1, at step 1"
    assert loop.warnings == []


def test_larger_may_be_better_and_better_by_how_much():
    hook = hooks.EarlyStopping("val_accuracy", patience=3, min_delta=0.1)
    loop = trained(hook, [0.5, 0.59, 0.61, 0.7, 0.65, 0.6], name="val_accuracy")
    assert loop.weights == 3 and loop.progress.step == 6


def test_nan_is_never_better():
    assert trained(hooks.EarlyStopping(), [NAN, 2, NAN, 3]).weights == 2
    loop = trained(hooks.EarlyStopping(patience=3), [NAN] * 5)
    assert loop.reason == "val_loss was NaN in the last 3 records" and loop.weights == 103


def test_a_value_counts_once_for_each_step():
    hook, loop = hooks.EarlyStopping(patience=2), Loop()
    for step, loss in ((10, 1.0), (20, 2.0), (30, 3.0)):
        assert loop.reason is None
        loop.record(hook, "validation", step=step, loss=0.0, val_loss=loss)
        loop.record(hook, "epoch", loss=0.0, val_loss=loss)
        loop.record(hook, "log", val_loss=-1.0)
    assert loop.reason is not None


@pytest.mark.parametrize(
    ("name", "direction"),
    [
        ("val_loss", "min"),
        ("val_rmse", "min"),
        ("val_mae", "min"),
        ("top_1_error", "min"),
        ("AUC_loss", "min"),
        ("val_accuracy_5", "max"),
        ("val_acc", "max"),
        ("val_AUC", "max"),
        ("f1_score", "max"),
        ("val_precision_at_recall", "max"),
    ],
)
def test_the_direction_follows_from_many_names(name, direction):
    better = trained(hooks.EarlyStopping(name), [1, 2], name=name).weights
    assert better == {"min": 1, "max": 2}[direction]


def test_the_direction_must_be_known():
    hooks.EarlyStopping("reward", direction="max")
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping("reward")
    assert str(caught.value) == (
        "cannot infer from the name 'reward' whether smaller or larger is better: pass "
        "direction='min' or direction='max', or correct the name"
    )
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping(direction="maximum")
    assert str(caught.value) == (
        "unknown direction 'maximum'. Did you mean 'max'? Known: min, max."
    )


@pytest.mark.parametrize("wrong", [{"patience": -1}, {"min_delta": -0.5}])
def test_patience_and_delta_are_not_negative(wrong):
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping(**wrong)
    ((name, value),) = wrong.items()
    assert str(caught.value) == f"EarlyStopping needs a {name} of at least 0, not {value}"


def unknown(name, kind, **values):
    with pytest.raises(ConfigurationError) as caught:
        Loop().record(hooks.EarlyStopping(name), kind, step=1, **values)
    return str(caught.value)


def test_an_unknown_monitor_is_refused_at_the_first_validation():
    assert unknown("val_acuracy_loss", "epoch", loss=1.0, val_accuracy_loss=1.0) == (
        "EarlyStopping cannot find 'val_acuracy_loss'. Did you mean 'val_accuracy_loss'? Known: "
        "loss, val_accuracy_loss."
    )
    assert unknown("val_loss", "validation", other=1.0) == (
        "EarlyStopping cannot find 'val_loss'. Known: other."
    )
    assert unknown("accuracy", "epoch", loss=1.0).endswith("'accuracy'. Known: loss.")


def test_a_validation_may_come_later_than_an_epoch():
    hook, loop = hooks.EarlyStopping(), Loop()
    loop.record(hook, "epoch", step=1, loss=1.0)
    loop.record(hook, "validation", step=2, loss=1.0, val_loss=1.0)
    loop.record(hook, "epoch", step=3, loss=1.0)
    assert hook.state()["best_step"] == 2


def test_a_monitor_that_was_never_logged_is_reported():
    loop = trained(hooks.EarlyStopping(), [1.0], name="loss")
    assert loop.warnings == [
        "EarlyStopping found no val_loss: pass a validation source to fit, or monitor a value "
        "that is recorded every epoch"
    ]
    assert trained(hooks.EarlyStopping(), [1.0], ValueError(), name="loss").warnings == []


def test_early_stopping_survives_a_restart():
    before = hooks.EarlyStopping(patience=3)
    loop = Loop()
    before.start(loop)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        loop.record(before, "epoch", step=step, val_loss=loss)
    state = before.state()
    assert state["arrays"] == {"weights": np.array(0)}
    told = {name: value for name, value in state.items() if name != "arrays"}
    assert told == {"best": 1.0, "best_step": 2, "last_step": 3, "waited": 1}

    after = hooks.EarlyStopping(patience=3)
    after.restore(state)
    loop = trained(after, [2.0, 2.0, 2.0], loop=Loop(step=3))
    assert loop.progress.step == 5 and loop.weights == 0  # as the first process had them
    assert loop.reason == "val_loss did not improve in the last 3 records: its best is 1, at step 2"
    assert loop.warnings == []


def test_early_stopping_is_reset_at_each_call():
    hook = hooks.EarlyStopping(patience=2)
    trained(hook, [1, 2, 3])
    loop = trained(hook, [9, 8, 9], loop=Loop(step=10))
    assert loop.weights == 12 and loop.reason is None
