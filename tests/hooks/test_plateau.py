"""`ReduceOnPlateau`: when the learning rate is reduced, and how far."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from tests.hook_loop import NAN, Loop
from treadle import hooks
from treadle.errors import ConfigurationError


def plateau(hook, losses, rate=1.0, loop=None):
    """Tell a hook of losses, one record each; returns the learning rate after each of them."""
    loop = loop or Loop()
    optimizer = keras.optimizers.SGD(rate)
    loop.state = SimpleNamespace(all_optimizers={"optimizer": optimizer})
    hook.start(loop)
    rates = []
    for loss in losses:
        loop.record(hook, "epoch", step=loop.progress.step + 1, val_loss=loss)
        rates.append(float(np.array(optimizer.learning_rate)))
    return rates


def test_a_rate_is_reduced_where_nothing_improves():
    hook = hooks.ReduceOnPlateau(factor=0.5, patience=2)
    losses = [3, 2, 2, 2.5, 1, NAN, 1, 1, 1]
    assert plateau(hook, losses) == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_a_reduction_is_logged():
    loop = Loop()
    plateau(hooks.ReduceOnPlateau(factor=0.5, patience=1), [1, 2], loop=loop)
    assert loop.history.records[-1].values == {
        "optimizer/learning_rate": 0.5,
        "note": "the learning rate of optimizer went from 1 to 0.5, because val_loss did "
        "not improve in the last record: its best is 1, at step 1",
    }


def test_epochs_of_the_cooldown_do_not_count():
    hook = hooks.ReduceOnPlateau(factor=0.5, patience=1, cooldown=2)
    assert plateau(hook, [1] * 8) == [1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]


def test_a_rate_has_a_minimum():
    loop = Loop()
    hook = hooks.ReduceOnPlateau(factor=0.5, patience=1, minimum=0.375)
    assert plateau(hook, [1] * 5, loop=loop) == [1, 0.5, 0.375, 0.375, 0.375]
    assert len([r for r in loop.history.records if "note" in r.values]) == 2


def test_a_plateau_survives_a_restart():
    losses = [1, 2, 3, 1, 2, 2, 2]
    make = lambda: hooks.ReduceOnPlateau(factor=0.5, patience=2, cooldown=1)  # noqa: E731
    whole = plateau(make(), losses)
    for middle in range(1, len(losses)):
        before, loop = make(), Loop()
        rates = plateau(before, losses[:middle], loop=loop)
        after = make()
        after.restore(json.loads(json.dumps(before.state())))
        rates += plateau(after, losses[middle:], rate=rates[-1], loop=Loop(step=middle))
        assert rates == whole, middle
    again = make()
    plateau(again, [0, 1])
    assert plateau(again, losses) == whole  # each call starts from scratch


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"factor": 1.5},
            "ReduceOnPlateau needs a factor between 0 and 1, not 1.5: the learning rate is "
            "multiplied by it",
        ),
        ({"patience": 0}, "ReduceOnPlateau needs a patience of at least 1, not 0"),
        ({"cooldown": -1}, "ReduceOnPlateau needs a cooldown of at least 0, not -1"),
        ({"minimum": -1.0}, "ReduceOnPlateau needs a minimum of at least 0, not -1.0"),
        ({"min_delta": -1.0}, "ReduceOnPlateau needs a min_delta of at least 0, not -1.0"),
    ],
)
def test_invalid_plateau_arguments(wrong, message):
    with pytest.raises(ConfigurationError) as caught:
        hooks.ReduceOnPlateau(**wrong)
    assert str(caught.value) == message


def test_a_schedule_cannot_be_reduced():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 100)
    with pytest.raises(ConfigurationError) as caught:
        plateau(hooks.ReduceOnPlateau(), [1], rate=schedule)
    assert str(caught.value) == (
        "the learning rate of optimizer is a schedule (CosineDecay), which ReduceOnPlateau cannot "
        "change: give the optimizer a number, or name another one with "
        "ReduceOnPlateau(optimizer=…)"
    )
    with pytest.raises(ConfigurationError, match="the task has no optimizer 'critic'"):
        plateau(hooks.ReduceOnPlateau(optimizer="critic"), [1])
    with pytest.raises(ConfigurationError, match="ReduceOnPlateau cannot find 'val_los'"):
        plateau(hooks.ReduceOnPlateau("val_los", direction="min"), [1])
