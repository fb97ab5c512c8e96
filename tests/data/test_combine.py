import itertools

import numpy as np
import pytest

from tests.data_batches import View, X, Y, all_batches
from treadle.data import as_source, closed_loop, from_arrays, from_function, groups, limited, zipped
from treadle.errors import DataError


def arrays():
    return from_arrays(X, Y, batch_size=5)  # two full batches and a short one


def drawn():
    return from_function(lambda rng: rng.random(3), 7)


SEEKING = {
    "groups": lambda: groups(drawn(), 2),
    "groups with a short batch": lambda: groups(arrays(), 3),
    "groups of one": lambda: groups(arrays(), 1),
    "groups of unequal batches": lambda: groups([np.zeros(i % 3 + 1) for i in range(9)], 2),
    "pair": lambda: zipped(arrays(), drawn()),
    "named": lambda: zipped(z=arrays(), a=drawn()),
    "limited": lambda: limited(drawn(), 5),
    "limited beyond its length": lambda: limited(drawn(), 50),
    "groups of groups": lambda: groups(groups(drawn(), 2), 3),
    "groups of a pair": lambda: groups(zipped(arrays(), drawn()), 2),
    "pair of groups": lambda: zipped(groups(drawn(), 3), arrays()),
    "limited groups of a pair": lambda: limited(groups(zipped(arrays(), arrays()), 1), 2),
    "groups of limited": lambda: groups(limited(drawn(), 5), 2),
    "pair of a pair and limited": lambda: zipped(zipped(a=drawn()), limited(arrays(), 2)),
    "limited stream": lambda: limited(endless(), 4),
    "groups of a limited stream": lambda: groups(limited(endless(), 6), 2),
    "limited groups of a stream": lambda: limited(groups(endless(), 2), 3),
}


class Endless:
    """A seekable source without end."""

    length = None
    endless = True
    batch_examples = 1
    inexact = None
    closed_loop = False

    def read(self, epoch, start=0, *, seed=0, loop=None, ordered=False):
        assert epoch == 0
        return from_function(lambda rng: rng.random(1), 100).read(0, start, seed=seed)


def endless():
    return Endless()


def test_groups_are_tuples_of_consecutive_batches():
    source = groups(from_arrays(Y, batch_size=3, shuffle=False), 2)
    assert (source.length, source.batch_examples) == (2, 3)
    window = source.read(0).take(2)
    assert (window.count, window.examples) == (2, 3)
    first, second = window.batches
    assert first.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert second.tolist() == [[3, 4, 5], [9, 10, 11]]


def test_groups_leave_out_an_incomplete_last_one_and_draw_nothing_of_it():
    calls = []
    source = groups(closed_loop(lambda loop: np.array(calls.append(1) or 0), length=5), 2)
    assert len(all_batches(source, loop=View(), most=9)) == 2
    assert len(calls) == 4
    assert len(all_batches(groups(lambda: iter([np.zeros(1)] * 5), 2))) == 2


def test_groups_join_batches_of_different_form():
    window = groups(from_arrays(Y, batch_size=8, shuffle=False), 2).read(0).take(9)
    assert [part.tolist() for part in window.batches] == [[list(range(8))], [[8, 9, 10, 11]]]
    assert (window.count, window.examples) == (1, 8)


def test_a_closed_loop_source_is_never_prefetched():
    calls = []

    def act(loop):
        calls.append(1)
        return np.zeros(2)

    # What one step needs is drawn, and no more.
    for source, needed in (
        (groups(closed_loop(act), 3), 3),
        (zipped(drawn(), closed_loop(act)), 1),
        (zipped(closed_loop(act), drawn()), 1),
        (limited(closed_loop(act), 9), 1),
        (limited(groups(zipped(closed_loop(act), drawn()), 2), 9), 2),
    ):
        calls.clear()
        reader = source.read(0, loop=View())
        assert calls == []
        for step in range(1, 4):
            window = reader.take(50)
            assert window.count == 1
            assert len(calls) == step * needed
        reader.put_back(window)
        reader.take(50)
        assert len(calls) == 3 * needed


def test_zipped_ends_with_the_shortest_without_drawing_more():
    calls = []

    def act(loop):
        calls.append(1)
        return np.zeros(2)

    source = zipped(closed_loop(act), drawn())
    assert source.length == 7
    assert len(all_batches(source, loop=View(), most=4)) == 7
    assert len(calls) == 7


def test_zipped_structure_and_examples():
    source = zipped(z=arrays(), a=from_arrays(X, batch_size=3))
    assert source.batch_examples == 5  # of `z`, the first one
    window = source.read(0).take(9)
    assert list(window.batches) == ["z", "a"]
    assert (window.count, window.examples) == (2, 5)
    assert [leaf.shape for leaf in window.batches["z"]] == [(2, 5, 2), (2, 5)]
    pair = zipped(arrays(), drawn())
    assert pair.batch_examples == 5 and isinstance(pair.read(0).take(1).batches, tuple)


def test_zipped_arrays_stay_aligned():
    source = zipped(from_arrays(X, batch_size=5), from_arrays(Y, batch_size=5))
    x, y = source.read(3, seed=8).take(2).batches
    assert np.array_equal(x[..., 0], 2 * y)


def test_zipped_carries_what_is_unknown_and_inexact():
    def stream():
        yield np.zeros(1)

    source = zipped(arrays(), stream, closed_loop(lambda loop: np.zeros(1)))
    assert source.length is None and not source.endless
    assert source.inexact.startswith("source 1: the function stream cannot seek")
    assert "; source 2: the batches of a closed-loop source" in source.inexact
    assert zipped(good=arrays(), bad=stream).inexact.startswith("source bad: ")
    assert groups(stream, 2).inexact == limited(stream, 2).inexact == as_source(stream).inexact
    assert zipped(closed_loop(print), closed_loop(print)).endless


def numbers(first=0, stop=None):
    count = itertools.count(first) if stop is None else range(first, stop)
    return (np.array(i) for i in count)


def values(source, epoch, start=0, most=2):
    reader, found = source.read(epoch, start), []
    while (window := reader.take(most)) is not None:
        found += window.batches.tolist()
    reader.close()
    return found


@pytest.mark.parametrize("data", [numbers, lambda: numbers], ids=["iterator", "function"])
def test_limited_streams_continue_across_epochs(data):
    source = limited(data(), 3)
    assert source.length is None  # it cannot be known that it is endless
    assert [values(source, epoch) for epoch in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    # In a new process the stream is drawn up to the position.
    assert values(limited(data(), 3), 2, 1) == [7, 8]
    assert values(limited(data(), 3), 1, 3) == []


def test_limited_streams_go_on_within_an_epoch():
    source = limited(numbers(), 5)
    reader = source.read(0)
    assert reader.take(2).batches.tolist() == [0, 1]
    window = reader.take(2)
    reader.put_back(window)
    reader.close()
    assert values(source, 0, 2) == [2, 3, 4]
    assert values(source, 1) == [5, 6, 7, 8, 9]


def test_limited_streams_read_an_earlier_position_from_the_start():
    source = limited(lambda: numbers(), 3)
    assert values(source, 0) == values(source, 0) == [0, 1, 2]
    spent = limited(numbers(), 3)
    values(spent, 0)
    with pytest.raises(DataError, match=r"gives its batches once: 3 of them are spent"):
        values(spent, 0)


def test_limited_streams_that_end_begin_again():
    source = limited(lambda: numbers(0, 5), 3)
    expected = [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]
    assert [values(source, epoch) for epoch in range(4)] == expected
    assert values(limited(lambda: numbers(0, 5), 3), 3, 1) == [4]
    whole = limited(lambda: numbers(0, 6), 3)  # ends just where an epoch does
    assert [values(whole, epoch) for epoch in range(3)] == [[0, 1, 2], [3, 4, 5], [0, 1, 2]]
    assert values(limited(lambda: numbers(0, 6), 3), 2, 1) == [1, 2]


def test_limited_stream_shorter_than_the_position():
    with pytest.raises(DataError, match=r"^epoch 2 has 2 batches, but 3 of its batches were tr"):
        limited(lambda: numbers(0, 5), 3).read(1, 3)


def test_limited_endless_source_seeks_at_once():
    calls = []
    source = limited(closed_loop(lambda loop: np.array(calls.append(1) or len(calls))), 4)
    assert source.length == 4 and not source.endless
    reader = source.read(100, 2, loop=View())
    assert [reader.take(9).count, reader.take(9).count, reader.take(9)] == [1, 1, None]
    assert len(calls) == 2


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: groups(drawn(), 0), r"^n must be at least 1, not 0$"),
        (lambda: groups(drawn(), "2"), r"^n must be a whole number, not '2': write n=2$"),
        (lambda: groups(drawn(), 2.5), r"^n must be a whole number, not 2\.5$"),
        (lambda: groups(drawn(), 8), r"^the source has 7 batches: too few for one group of 8$"),
        (lambda: all_batches(groups(iter([Y]), 2)), r"^the source gave no batch in epoch 1"),
        (lambda: zipped(), r"^zipped takes sources either by position .*: got none$"),
        (lambda: zipped(drawn(), a=drawn()), r"^zipped takes sources either .*: got both$"),
        (lambda: limited(drawn(), 0), r"^batches must be at least 1, not 0$"),
        (lambda: limited(drawn(), 2.5), r"^batches must be a whole number, not 2\.5$"),
        (lambda: all_batches(limited(iter([]), 2)), r"^the source gave no batch in epoch 1"),
    ],
)
def test_messages(call, message):
    with pytest.raises(DataError, match=message):
        call()


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_arrays(Y, batch_size=2),
        lambda: as_source(list(np.zeros((6, 2)))),
        lambda: zipped(as_source(list(np.zeros((6, 2)))), from_arrays(Y, batch_size=2)),
        lambda: zipped(a=as_source(list(np.zeros((6, 2)))), b=from_arrays(Y, batch_size=2)),
        lambda: groups(list(np.zeros((12, 2))), 2),
        lambda: limited(iter(np.zeros((6, 2))), 9),
    ],
)
def test_returned_batches_join_the_following_ones(make):
    reader = make().read(0)
    reader.put_back(reader.take(1))  # as a loop does that peeks at the first batch
    assert reader.take(4).count == 4
    assert reader.take(4).count == 2
    assert reader.take(4) is None
