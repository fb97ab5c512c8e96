"""What schedules refuse, and their pictures; their numbers are in tests/conformance."""

import keras
import numpy as np
import pytest
from keras.optimizers.schedules import CosineDecay
from keras_versions import needs_keras

from treadle import schedules
from treadle.errors import ConfigurationError
from treadle.schedules import Cyclic, OneCycle, Piecewise, WarmUp


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Cyclic("a", 1, 2), "Cyclic needs a number as low, not 'a'"),
        (lambda: Cyclic(0, float("nan"), 2), "Cyclic needs a number as high, not nan"),
        (lambda: Cyclic(0, True, 2), "Cyclic needs a number as high, not True"),
        (lambda: Cyclic(0, 1, 2.5), "step_size must be a whole number, not 2.5"),
        (lambda: Cyclic(0, 1, 0), "step_size must be at least 1, not 0"),
        (
            lambda: Cyclic(0, 1, 2, "triangle"),
            "unknown mode 'triangle' of Cyclic. Did you mean 'triangular'? Known: triangular, "
            "triangular2, exp_range.",
        ),
        (
            lambda: Cyclic(0, 1, 2, "exp_range", 1.1),
            "Cyclic needs a gamma above 0 and up to 1, not 1.1: it multiplies at each step",
        ),
        (lambda: OneCycle(1, 1), "steps must be at least 2, not 1"),
        (
            lambda: OneCycle(1, 9, cycle=0),
            "OneCycle needs a cycle above 0 and up to 1, not 0.0: it is the part of all steps that "
            "the cycle takes",
        ),
        (lambda: WarmUp(None, 9), "WarmUp needs a number as to, not None"),
        (
            lambda: WarmUp(abs, 9),
            "WarmUp needs a schedule or a number as to, not <built-in function abs>: inherit from "
            "keras.optimizers.schedules.LearningRateSchedule",
        ),
        (lambda: WarmUp(1, -1), "steps must be at least 1, not -1"),
        (
            lambda: Piecewise([1, 2], [3, 4]),
            "Piecewise has 2 schedules and 2 boundaries: it needs one boundary between each two "
            "schedules, so 1",
        ),
        (
            lambda: Piecewise([1, 2, 3], [4, 4]),
            "the boundaries of Piecewise must increase, but they are [4, 4]",
        ),
        (lambda: Piecewise([1, "b"], [4]), "Piecewise needs a number as schedules[1], not 'b'"),
        (lambda: Piecewise([1, 2], [4.5]), "boundaries[0] must be a whole number, not 4.5"),
        (
            lambda: schedules.optimizers_of({}),
            "the task holds no optimizer, so it has no learning rate: keep one as an attribute, "
            "such as self.optimizer",
        ),
    ],
)
def test_invalid_arguments_are_refused(make, message):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value) == message


def test_numbers_of_numpy_are_numbers():
    assert Cyclic(np.float32(0), np.int64(1), np.int64(2)).get_config() == {
        "low": 0.0,
        "high": 1.0,
        "step_size": 2,
        "mode": "triangular",
        "gamma": 1.0,
    }


def test_the_optimizers_within_one_each_have_a_rate():
    needs_keras("3.15", "keras.optimizers.MultiOptimizer")
    inner = [keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.2)]
    choose = keras.optimizers.OptimizerMap(inner[1], {"a": inner[0]})
    several = keras.optimizers.MultiOptimizer(choose)
    found = schedules.optimizers_of({"optimizer": several})
    assert list(found) == ["optimizer/inner_optimizers/0", "optimizer/inner_optimizers/1"]
    assert list(found.values()) == inner


def test_values_of_many_steps_are_some():
    at, found = schedules.values(Cyclic(0, 1, 5_000), 10_001)
    assert len(at) == len(found) == 2000
    assert (at[0], at[-1]) == (0, 10_000)
    np.testing.assert_allclose(found, 1 - np.abs(at / 5000 - 1), atol=1e-6)
    assert schedules.values(CosineDecay(1.0, 4), 5)[1][0] == 1.0
    assert schedules.values(0.5, 3)[1].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("shown", "scale"), [({"rate": Cyclic(0, 1, 5)}, "linear"), ({"a": 1, "b": 1e-4}, "log")]
)
def test_pictures(shown, scale, tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(schedules, "save", lambda figure, path: saved.append((figure, path)))
    schedules.draw(shown, tmp_path / "rate.png", 20)
    ((figure, path),) = saved
    (axes,) = figure.axes
    assert path == tmp_path / "rate.png" and axes.get_yscale() == scale
    assert [line.get_label() for line in axes.lines] == list(shown)
    assert axes.lines[0].get_xdata().tolist() == list(range(20))
    assert (axes.get_legend() is None) == (len(shown) == 1)
