"""`LossSpikes`: which steps are spikes, and what is reported."""

import numpy as np
import pytest

from tests.hook_loop import NAN, Loop
from treadle.errors import ConfigurationError
from treadle.hooks import LossSpikes

rng = np.random.default_rng(0)


def falling(steps=600, noise=0.1):
    return (2 * np.exp(-np.arange(steps) / 200) + 0.5) * (1 + noise * rng.normal(size=steps))


def run(values, sizes=(64,), hook=None, loop=None, **more):
    hook, loop = hook or LossSpikes(), loop or Loop()
    i = turn = 0
    while i < len(values):
        size = sizes[turn % len(sizes)]
        window = {name: x[i : i + size] for name, x in more.items()}
        loop.window(hook, loss=np.asarray(values[i : i + size], "f4"), **window)
        i, turn = i + size, turn + 1
    return hook, loop


def test_a_spike_is_reported_with_its_step_and_what_came_before():
    values = falling()
    values[345] = 12.3
    hook, loop = run(values)
    assert hook.found == [346]
    (warning,) = loop.warnings
    assert warning.startswith("loss rose to 12.3 at step 346, epoch 1")
    assert "the median of the 256 steps before was" in warning and "largest value" in warning


@pytest.mark.parametrize("sizes", [(1,), (7,), (256,), (3, 100, 1)])
def test_the_size_of_windows_does_not_matter(sizes):
    values = falling()
    values[[200, 420, 421]] = 15, 20, 19
    assert run(values, sizes)[0].found == [201, 421]


def test_ordinary_losses_have_no_spike():
    heavy = np.exp(rng.normal(-4, 1.5, size=4000))  # mostly easy examples, some hard ones
    for values in (falling(4000), heavy, np.zeros(500), rng.standard_t(3, size=4000)):
        assert run(values)[0].found == []


def test_a_loss_that_stays_high_is_one_spike():
    values = np.concatenate([falling(), falling() + 40])
    hook, _ = run(values)
    assert hook.found == [601]


def test_undone_steps_and_nan_do_not_count():
    values = falling()
    values[300], values[310] = 50, NAN
    undone = np.zeros(600)
    undone[300] = 1
    assert run(values, undone=undone)[0].found == []


def test_at_most_ten_are_reported():
    values = falling(4000)
    values[np.arange(200, 3600, 100)] = 100
    hook, loop = run(values)
    assert len(hook.found) > 10 and len(loop.warnings) == 10
    assert loop.warnings[-1].endswith(". Further spikes are not reported")


def test_a_resumed_hook_finds_the_same():
    values = falling()
    values[[200, 420]] = 15, 20
    first, loop = run(values[:300], (50,))
    second = LossSpikes()
    second.restore(first.state())
    second.start(loop)
    run(values[300:], (50,), second, loop)
    assert second.found == [201, 421]


def test_an_unknown_name_is_an_error():
    with pytest.raises(ConfigurationError, match=r"monitors 'los', and the step returns loss.*Did"):
        run([1.0], hook=LossSpikes("los"))
