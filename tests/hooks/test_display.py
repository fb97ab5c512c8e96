"""What a console shows: position, speed, and values as text."""

from types import SimpleNamespace

import numpy as np

from treadle.core.logs import clock, line, plain, short
from treadle.core.progress import Progress
from treadle.hooks.display import Position, Speed


def at(progress, **planned):
    loop = {"epochs_planned": None, "steps_planned": None, "steps_per_epoch": None, **planned}
    return Position(SimpleNamespace(**loop), progress, first_step=100)


def test_position_by_epochs():
    position = at(Progress(step=1150, epoch=2, batch=50), epochs_planned=4, steps_per_epoch=100)
    assert (position.epoch, position.epoch_part) == ("3/4", 0.625)
    assert (position.step, position.step_part) == ("50/100", 0.5)
    assert position.steps_left == 150


def test_position_by_steps():
    position = at(Progress(step=1100, epoch=2, batch=50), steps_planned=2100, steps_per_epoch=100)
    assert (position.epoch, position.epoch_part) == ("3", 0.5)
    assert (position.step, position.step_part) == ("1,100/2,100", 0.5)
    assert position.steps_left == 1000


def test_position_by_whichever_ends_first():
    by = {"epochs_planned": 10, "steps_planned": 200, "steps_per_epoch": 100}
    assert at(Progress(step=150, batch=50), **by).steps_left == 50


def test_position_without_an_end():
    position = at(Progress(step=1234, epoch=1, batch=7))
    assert (position.epoch, position.epoch_part) == ("2", None)
    assert (position.step, position.step_part) == ("1,234", None)
    assert position.steps_left is None


def test_pace_knows_nothing_at_first():
    pace = Speed()
    assert pace.examples_per_second is None and pace.seconds_for(5) is None
    pace.update(1.0, Progress(step=1, examples=64))
    assert pace.examples_per_second is None and pace.seconds_for(5) is None


def test_speed_leaves_validation_out_and_the_time_left_does_not():
    pace = Speed()
    pace.update(0.0, Progress(step=10, examples=640))
    pace.lose(8.0)
    pace.update(10.0, Progress(step=20, examples=1280))
    assert pace.examples_per_second == 320
    assert pace.seconds_for(10) == 10


def test_scalars_of_any_kind_are_plain():
    import ml_dtypes
    import tensorflow as tf

    values = [True, np.bool_(True), 3, np.int64(3), tf.constant(3), 0.5, np.float32(0.5)]
    values += [np.float64(0.5), np.asarray(0.5), ml_dtypes.bfloat16(0.5), tf.constant(0.5), "text"]
    found = [plain(value) for value in values]
    assert found == [True, True, 3, 3, 3, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, "text"]
    assert [type(x) for x in found] == [bool] * 2 + [int] * 3 + [float] * 6 + [str]
    assert plain(None) is plain([1]) is plain(np.zeros(1)) is plain(np.array(None)) is None


def test_numbers_are_short():
    numbers = [0.0, 0.00012346, 0.012345, 0.98765, 9.9999, 123.456, 12345.6, 1e9, -2.5, 1e-12]
    assert [short(n) for n in numbers] == (
        ["0", "0.0001235", "0.01235", "0.9877", "10", "123.5", "12,346", "1e+09", "-2.5", "1e-12"]
    )
    assert [short(n, fixed=True) for n in (0.0, 0.5, 12.0, 1e-12, float("nan"), 7)] == (
        ["0.000", "0.5000", "12.00", "1.000e-12", "nan", "7"]
    )
    assert [short(x) for x in (float("-inf"), None, np.zeros((2, 3)))] == [
        "-inf",
        "<NoneType>",
        "<ndarray 2x3>",
    ]


def test_lines_and_clocks():
    assert line({"loss": 0.5, "why": "none"}) == "loss 0.5  why: none"
    assert [clock(s) for s in (0.4, 61, 3600)] == ["0:00", "1:01", "1:00:00"]
