"""Arrays that are changed in place while a source holds them."""

import contextlib

import keras
import numpy as np
import pytest
from executions import EXECUTIONS

import treadle
from treadle.errors import DataError


class Mean(treadle.Task):
    def __init__(self):
        self.count = keras.Variable(0.0)

    def train_step(self, batch):
        self.count.assign_add(1.0)
        return {"mean": keras.ops.mean(batch)}

    def eval_step(self, batch):
        return {"mean": keras.ops.mean(batch)}

    def predict_step(self, batch):
        return batch


@EXECUTIONS
def test_changing_arrays_are_read_for_each_batch(execution):
    x = np.zeros((8, 1), "float32")
    source = treadle.data.from_arrays(x, batch_size=2, changing=True)

    def add_one(loop):
        x[:] += 1

    hooks = [treadle.every("1 epoch", add_one)]
    options = treadle.Options(execution=execution)
    loop = treadle.Loop(Mean(), hooks=hooks, options=options, console=False)
    history = loop.fit(source, source, epochs=3)
    assert history["mean"] == [0, 1, 2] and history["val_mean"] == [0, 1, 2]
    assert loop.evaluate(source) == {"mean": 3}
    assert loop.predict(source).tolist() == [[3]] * 8
    x[:] = 9
    assert loop.fit(source, epochs=1)["mean"][-1] == 9
    assert treadle.Loop(Mean(), console=False).evaluate(source) == {"mean": 10}


COMBINED = {
    "alone": lambda x: arrays(x),
    "zipped": lambda x: treadle.data.zipped(a=arrays(x), b=[np.zeros((2, 1), "float32")] * 60),
    "groups": lambda x: treadle.data.groups(arrays(x), 1),
    "limited": lambda x: treadle.data.limited(arrays(x), 50),
}


class Sums(Mean):
    def train_step(self, batch):
        self.count.assign_add(1.0)
        return {"sum": sum(keras.ops.sum(x) for x in keras.tree.flatten(batch))}


def arrays(*x):
    return treadle.data.from_arrays(*x, batch_size=2, shuffle=False, changing=True)


def sums(kind, change_at, killed_at=None, **options):
    """Return the sum of each step, where a hook adds one to the array after some steps."""
    x = np.zeros((120, 1), "float32")

    def add_one(loop):
        x[:] += 1

    def kill(loop):
        raise KeyboardInterrupt

    hooks = [treadle.every(f"{change_at} steps", add_one)]
    hooks += [treadle.every(f"{killed_at} steps", kill)] if killed_at else []
    loop = treadle.Loop(Sums(), hooks=hooks, console=False, **options)
    with contextlib.suppress(KeyboardInterrupt), loop:
        loop.fit(COMBINED[kind](x), epochs=1)
    return loop.history.steps("sum").tolist()


@pytest.mark.parametrize("kind", COMBINED)
def test_a_step_sees_the_values_that_the_arrays_have_when_it_begins(kind):
    steps = 50 if kind == "limited" else 60
    assert sums(kind, 20) == [0] * 20 + [2] * 20 + [4] * (steps - 40)


@pytest.mark.parametrize("kind", ["alone", "zipped"])
def test_a_run_resumes_with_the_values_of_the_arrays(kind, tmp_path):
    expected = sums(kind, 15)
    assert sums(kind, 15, 35, directory=tmp_path / "run") == expected[:35]
    assert sums(kind, 15, directory=tmp_path / "run") == expected


@pytest.mark.parametrize("kind", ["alone", "zipped"])
@pytest.mark.parametrize("by_hooks", [False, True])
def test_what_a_body_sets_for_its_epoch_is_not_restored(kind, by_hooks, tmp_path):
    def sums(killed_in=None, directory=None):
        x = np.full((8, 1), 5.0, "float32")

        def add_one(loop):
            x[:] += 1

        hooks = [treadle.every("2 steps", add_one)] if by_hooks else []
        source = COMBINED[kind](x)
        with (
            contextlib.suppress(KeyboardInterrupt),
            treadle.Loop(Sums(), directory, hooks, console=False) as loop,
        ):
            for epoch in loop.epochs(4):
                if epoch == killed_in:
                    raise KeyboardInterrupt
                if not by_hooks:
                    x[:] = epoch
                for _ in loop.steps(source):
                    pass
        return loop.history.steps("sum").tolist()

    expected = sums()
    assert expected[::4] == ([10, 14, 18, 22] if by_hooks else [0, 2, 4, 6])
    sums(2, tmp_path / "run")
    assert sums(directory=tmp_path / "run") == expected


def test_an_array_that_a_body_does_not_set_is_restored(tmp_path):
    def sums(killed_in=None, directory=None):
        x, y = np.zeros((4, 1), "float32"), np.zeros((4, 1), "float32")
        with (
            contextlib.suppress(KeyboardInterrupt),
            treadle.Loop(Sums(), directory, console=False) as loop,
        ):
            for epoch in loop.epochs(3):
                if epoch == killed_in:
                    raise KeyboardInterrupt
                x[:] = epoch
                if epoch == 0:
                    y[:] = 7
                for _ in loop.steps(arrays(x, y)):
                    pass
        return loop.history.steps("sum").tolist()

    expected = sums()
    assert expected == [14, 14, 16, 16, 18, 18]
    sums(1, tmp_path / "run")
    assert sums(directory=tmp_path / "run") == expected


def test_what_checkpoints_do_not_save_of_changing_arrays_is_said(monkeypatch):
    x, y = np.zeros((8, 2), "float32"), np.zeros(8, "float32")
    assert arrays(x, y).inexact is None
    monkeypatch.setattr(treadle.data.arrays, "CHANGING_BYTES", 40)
    source = arrays({"x": x, "y": y})
    assert source.inexact == (
        "the array 'x' may change (changing=True), but is larger than the 40 bytes that "
        "checkpoints save of an array: give arrays that do not change in a source of their own, "
        "as in zipped(from_arrays(x, …), from_arrays(y, …, changing=True)), or restore the array "
        "before training"
    )
    assert list(source.saved()) == ["['y']"]
    apart = treadle.data.zipped(treadle.data.from_arrays(x, batch_size=2), arrays(y))
    assert apart.inexact is None
    x.flags.writeable = False
    assert source.inexact is None and arrays(x).saved() is None


def test_saved_arrays_of_another_size_are_refused():
    source = arrays(np.zeros(8, "float32"))
    position = source.read(0).position()
    expected = r"^the batch has 64 bytes, but 32 when the run was saved: this is not the data that"
    with pytest.raises(DataError, match=expected):
        arrays(np.zeros(8)).read(0, position=position)


def test_an_array_that_is_converted_is_read_only_and_does_not_change():
    swapped = np.zeros(8, ">f4")
    expected = (
        r"^the second array is a numpy.ndarray of dtype >f4, which is copied, so that "
        r"changing=True would not see its changes: pass a NumPy array of dtype float32, and "
        r"change that$"
    )
    with pytest.raises(DataError, match=expected):
        arrays(np.zeros(8), swapped)
    swapped[:] = 1
    source = treadle.data.from_arrays(swapped, batch_size=2)
    with pytest.raises(ValueError, match="read-only"):
        swapped[:] = 2
    assert source.arrays.dtype.isnative
