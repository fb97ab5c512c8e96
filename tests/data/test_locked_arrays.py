"""Arrays are read-only while sources and loops hold them, and as they were afterwards."""

import gc

import keras
import numpy as np
import pytest
from executions import EXECUTIONS

import treadle
from tests.data.test_changed_arrays import Mean
from treadle.core import locked_arrays
from treadle.data import from_arrays, limited, zipped


def zeros(rows=8):
    return np.zeros((rows, 1), "float32")


def test_the_arrays_of_a_source_are_read_only():
    x, reshaped = zeros(), np.zeros(8, "float32")
    sources = [from_arrays({"x": x, "none": None}, batch_size=2)]
    sources += [from_arrays(reshaped.reshape(8, 1), batch_size=2)]
    for array in (x, reshaped):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 1


def test_a_view_locks_its_own_memory_only():
    whole = zeros()
    given = whole[:4]
    source = from_arrays(given, batch_size=2)
    assert not given.flags.writeable and whole.flags.writeable
    del source
    assert given.flags.writeable


def test_a_second_source_of_the_same_arrays_has_writable_views_too():
    whole = zeros()
    sources = [from_arrays(part, batch_size=2) for part in (whole, whole, whole[:4])]
    assert all(source.arrays.flags.writeable for source in sources)  # PyTorch would copy others
    assert all(np.shares_memory(source.arrays, whole) for source in sources)
    assert not whole.flags.writeable
    fixed = np.broadcast_to(np.float32(1), (4, 1))  # which may not become writable
    from_arrays(np.asarray(keras.ops.ones((4, 1))), fixed, batch_size=2)


def test_arrays_are_as_they_were_when_nothing_holds_them():
    x, fixed, view = zeros(), zeros(), zeros()
    fixed.flags.writeable = False
    part = view[:]
    first = from_arrays(x, fixed, part, batch_size=2)
    second = from_arrays(x, part, batch_size=4)
    reader = first.read(0)
    del first
    gc.collect()
    assert not x.flags.writeable and not part.flags.writeable
    del second, reader
    gc.collect()
    assert [a.flags.writeable for a in (x, fixed, view, part)] == [True, False, True, True]
    assert not any(entry.array is x for entry in locked_arrays._entries.values())


def test_a_view_waits_for_the_array_that_it_is_a_view_of():
    whole = zeros()
    part = whole[:]
    of_part, of_whole = from_arrays(part, batch_size=2), from_arrays(whole, batch_size=2)
    del of_part
    gc.collect()
    assert not part.flags.writeable
    del of_whole
    gc.collect()
    assert part.flags.writeable and whole.flags.writeable


def test_a_closed_loop_holds_no_array():
    x, y = zeros(), zeros()
    train, test = from_arrays(x, batch_size=2), from_arrays(y, batch_size=2)
    with treadle.Loop(Mean(), console=False) as other:
        with treadle.Loop(Mean(), console=False) as loop:
            loop.fit(train, limited(test, 2), epochs=1)
            loop.predict(train)
            other.evaluate(test)
            assert not x.flags.writeable
        assert x.flags.writeable and not y.flags.writeable
        x[:] = 3
    assert y.flags.writeable
    with treadle.Loop(Mean(), console=False) as loop:  # with the same source
        assert loop.evaluate(train) == {"mean": 3}
        assert not x.flags.writeable


def test_a_loop_that_fails_holds_no_array():
    x = zeros()

    def fail(loop):
        raise OSError

    source = from_arrays(x, batch_size=2)
    hooks = [treadle.every("1 step", fail)]
    with pytest.raises(OSError), treadle.Loop(Mean(), hooks=hooks, console=False) as loop:
        loop.fit(source, epochs=1)
    assert x.flags.writeable


COMBINED = {
    "alone": lambda x: from_arrays(x, batch_size=2, shuffle=False),
    "view": lambda x: from_arrays(x[:-2], batch_size=2, shuffle=False),
    "zipped": lambda x: zipped(from_arrays(x, batch_size=2), from_arrays(x, batch_size=2)),
    "limited": lambda x: limited(from_arrays(x, batch_size=2), 90),
}


@EXECUTIONS
@pytest.mark.parametrize("kind", COMBINED)
def test_values_of_an_array_that_was_unlocked_are_seen_by_the_next_call(execution, kind):
    x = zeros(200)
    source = COMBINED[kind](x)
    options = treadle.Options(execution=execution)
    with treadle.Loop(First(), options=options, console=False) as loop:
        for value in (1, 2, 3):
            x.flags.writeable = True
            x[:] = value
            loop.fit(source, steps=value * 3)
            assert loop.evaluate(source) == {"mean": value}
    assert loop.history.steps("mean").tolist() == [1] * 3 + [2] * 6 + [3] * 9


class First(Mean):
    """Returns the mean of the first array of a batch."""

    def train_step(self, batch):
        return super().train_step(keras.tree.flatten(batch)[0])

    def eval_step(self, batch):
        return super().eval_step(keras.tree.flatten(batch)[0])


def by_hook(x):
    def assign(loop):
        x[:] = 1

    return {"hooks": [treadle.every("1 step", assign)]}


def by_callback(x):
    class Assign(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            np.add(x, 1, out=x)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    return {"hooks": [treadle.hooks.KerasCallbacks([Assign()], model=model)]}


@pytest.mark.parametrize("make", [by_hook, by_callback])
def test_the_error_of_an_assignment_is_explained(make):
    x = zeros()
    loop = treadle.Loop(Mean(), **make(x), console=False)
    with pytest.raises(ValueError, match="read-only") as raised, loop:
        loop.fit(from_arrays(x, batch_size=2), epochs=1)
    assert raised.value.__notes__[1:] == [
        "if this array is data of treadle.data.from_arrays: it is read-only until its loop is "
        "closed, since copies of it may be on a device. Pass changing=True, or change a copy"
    ]


def test_other_errors_of_read_only_arrays_are_not_explained(monkeypatch):
    assert not locked_arrays.explanation(ValueError("other"))
    monkeypatch.setattr(locked_arrays, "_entries", {})
    assert not locked_arrays.explanation(ValueError("assignment destination is read-only"))
