"""Data sets whose length changes between epochs, and streams that other sources cut into epochs."""

import contextlib
import itertools

import keras
import numpy as np
import pytest

import treadle
from treadle.core.identity import source_facts
from treadle.data import as_source, closed_loop, groups, limited, zipped

LOOP = object()  # stands for the running loop


class Numbers(keras.utils.PyDataset):
    """Gives the numbers of its batches; an epoch changes their count, or its begin does."""

    def __init__(self, length, step, at_begin=False):
        super().__init__()
        self.length, self.step, self.at_begin = length, step, at_begin
        self.calls = []

    @property
    def num_batches(self):
        return self.length

    def __getitem__(self, index):
        if index >= self.length:
            raise IndexError(index)
        return np.array([index])

    def on_epoch_begin(self):
        self.calls.append("begin")
        self.length += self.step if self.at_begin else 0

    def on_epoch_end(self):
        self.calls.append("end")
        self.length += 0 if self.at_begin else self.step


class Values(treadle.Task):
    def train_step(self, batch):
        return {"value": keras.ops.sum(batch)}


def endless(first=0):
    numbers = itertools.count(first)
    return closed_loop(lambda _: np.array([next(numbers)]))


def cut(batches=6):
    return limited(lambda: (np.array([i]) for i in itertools.count()), batches)


def listed(count):
    return [np.array([0])] * count


def read(source, epochs=3, most=3):
    """Return the batches of each epoch, as lists."""
    found = []
    for epoch in range(epochs):
        reader, batches = source.read(epoch, loop=LOOP), []
        while (window := reader.take(most)) is not None:
            batches += [keras.tree.flatten(window.batch(i)) for i in range(window.count)]
        reader.close()
        found.append([[leaf.item() for leaf in batch] for batch in batches])
    return found


LENGTHS = {
    "alone": (lambda data: data, [4, 6, 8]),
    "groups": (lambda data: groups(data, 2), [2, 3, 4]),
    "zipped": (lambda data: zipped(data, listed(7)), [4, 6, 7]),
    "zipped with a stream": (lambda data: zipped(endless(), data), [4, 6, 8]),
    "limited": (lambda data: limited(data, 5), [4, 5, 5]),
    "nested": (lambda data: limited(zipped(groups(data, 2), endless()), 3), [2, 3, 3]),
}


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("at_begin", [False, True])
def test_each_epoch_has_the_length_of_its_start(kind, at_begin):
    combined, lengths = LENGTHS[kind]
    for first, step, expected in ((4, 2, lengths), (8, -2, lengths[::-1])):
        data = Numbers(first - step * at_begin, step, at_begin)
        source = as_source(combined(data))
        assert list(map(len, read(source))) == expected
        assert data.calls == ["begin", "end"] * 3  # also where another source ends the epoch
        assert source.length in (expected[-1], None)


def test_a_data_set_that_grows_is_the_same_source():
    data = Numbers(3, 2)
    source = as_source(data)
    before = source_facts(source), source_facts(zipped(source, endless()))
    read(source)
    assert as_source(data) is source
    assert (source_facts(source), source_facts(zipped(source, endless()))) == before == ({}, {})
    assert source_facts(as_source(listed(3))) == {"length": 3}


def test_a_list_that_grows_has_its_length_at_the_start_of_each_epoch():
    batches = listed(2)
    source = zipped(batches, listed(9))
    lengths = [len(read(source, 1)[0]), batches.extend(listed(3)), len(read(source, 1)[0])]
    assert lengths == [2, None, 5]


@pytest.mark.parametrize("step", [2, -2])
def test_a_run_resumes_in_an_epoch_of_another_length(step, tmp_path):
    def run(killed_at, **options):
        def kill(loop):
            if loop.progress.step == killed_at:
                raise KeyboardInterrupt

        hooks = [treadle.every("1 step", kill)]
        loop = treadle.Loop(Values(), hooks=hooks, console=False, **options)
        with contextlib.suppress(KeyboardInterrupt), loop:
            loop.fit(Numbers(4 - step, step), epochs=3)
        return loop.history.steps("value").tolist()

    expected = run(None)
    assert len(expected) == 12
    for killed_at in (5, 8):
        run(killed_at, directory=tmp_path / "run")
    assert run(None, directory=tmp_path / "run") == expected


STREAMS = {
    "endless": (lambda: zipped(listed(4), endless()), [range(4), range(4, 8), range(8, 12)]),
    "first": (lambda: zipped(a=endless(), b=listed(2)), [range(2), range(2, 4), range(4, 6)]),
    "limited": (lambda: zipped(listed(4), cut()), [range(4), range(4, 8), range(8, 12)]),
    "of groups": (lambda: zipped(listed(1), groups(endless(), 2)), [[0, 1], [2, 3], [4, 5]]),
    "in groups": (
        lambda: groups(limited(keras_stream(), 5), 2),
        [[*range(i, i + 4)] for i in (0, 4, 8)],
    ),
    "nested": (lambda: zipped(listed(2), zipped(endless())), [range(2), range(2, 4), range(4, 6)]),
    "with a generator": (
        lambda: zipped(lambda: iter(listed(3)), endless()),
        [range(3), range(3, 6), range(6, 9)],
    ),
}


def keras_stream():
    class Stream(keras.utils.PyDataset):
        num_batches = None

        def __getitem__(self, index):
            return np.array([index])

    return Stream()


@pytest.mark.parametrize("kind", STREAMS)
@pytest.mark.parametrize("most", [1, 3, 9])
def test_a_stream_continues_where_the_epoch_before_left_it(kind, most):
    make, expected = STREAMS[kind]
    found = read(make(), most=most)
    of_stream = (
        slice(None) if kind == "in groups" else slice(0, 1) if kind == "first" else slice(1, None)
    )
    numbers = [[n for batch in epoch for n in batch[of_stream]] for epoch in found]
    assert numbers == list(map(list, expected))


def test_a_stream_continues_after_an_epoch_that_its_reader_left():
    source = cut()
    for epoch in range(3):
        assert source.read(epoch).take(2).batches.ravel().tolist() == [2 * epoch, 2 * epoch + 1]
    assert source.read(0).take(1).batches.ravel().tolist() == [0]  # epoch 0 starts the stream


def test_sources_that_are_all_endless_have_no_epoch():
    assert zipped(endless(), endless()).endless
    assert not zipped(endless(), listed(2)).endless
    assert zipped(endless(), listed(2)).length == 2
    assert zipped(endless(), lambda: iter(listed(2))).length is None
