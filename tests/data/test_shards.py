"""Sources of which each process reads its own share, in one process or in threads that stand for
several; what several processes do is tested with them, in `conformance/test_sharded.py`."""

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.waiting import WATCHDOG
from treadle.core import processes
from treadle.core.identity import source_facts
from treadle.data import groups, limited, sharded, zipped
from treadle.data.reader import BatchSource
from treadle.data.source import shards_of
from treadle.distribute import shards
from treadle.distribute.group import SeveralProcesses
from treadle.errors import DataError
from treadle.run import circumstances


@pytest.fixture
def in_two(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], Any]], list[Any]]:
    """Calls a function of the rank in two threads, each of which stands for a process."""
    of_thread, values = threading.local(), [None, None]
    barrier = threading.Barrier(2, timeout=WATCHDOG)

    class Two(SeveralProcesses):
        size = 2

        @property
        def rank(self) -> int:
            return of_thread.rank

        def exchange(self, value: Any, at: str) -> list[Any]:
            values[self.rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

    monkeypatch.setattr(processes, "_group", Two())
    backend = SimpleNamespace(computes_own_rows=lambda examples: True)
    monkeypatch.setattr(shards, "group_backend", lambda: backend)

    def each(function: Callable[[int], Any]) -> list[Any]:
        def run(rank: int) -> Any:
            of_thread.rank = rank
            return function(rank)

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(run, range(2)))

    return each


def share(shard_index: int, shard_count: int) -> Any:
    return [np.full(8 // shard_count, file) for file in range(6)[shard_index::shard_count]]


def test_one_process_reads_the_whole() -> None:
    source = sharded(share)
    assert (source.length, source.shards, source.endless) == (6, 1, False)
    reader = source.read(1, start=4)
    assert reader.take(9).batches[:, 0].tolist() == [4, 5] and reader.take(9) is None
    assert source_facts(source) == source_facts(limited(source, 2)) == {"sharded": True}


def test_a_source_that_lists_its_files_as_shards_is_not_divided() -> None:
    class OfFiles:
        length, endless, batch_examples, inexact, closed_loop = 2, False, 8, None, False
        shards = ("0.npy", "1.npy")

        def read(self, epoch: int, start: int = 0, **how: Any) -> Any: ...

    assert shards_of(OfFiles()) is shards_of(limited(OfFiles(), 2)) is None
    assert source_facts(OfFiles()) == {"length": 2, "batch_examples": 8}
    groups(OfFiles(), 2)


@pytest.mark.parametrize("start", [2, 5, 7])
def test_one_process_reads_on_where_several_ended(start: int) -> None:
    """Their positions are in other data; as many batches as were trained on are left out."""
    position = {"shards": 2, "epoch": 0, "batches": [start, 1], "parts": [{"epoch": 0}, None]}
    of_list = sharded(share).read(0, start=start, position=position)
    of_stream = sharded(lambda *shard: lambda: iter(share(*shard))).read(
        0, start=start, position=position
    )
    for reader in (of_list, of_stream):
        window = reader.take(9)
        found = [] if window is None else window.batches[:, 0].tolist()
        assert found == list(range(6))[start:]


def test_a_share_that_has_ended_takes_part_in_batches_of_another_form(in_two: Any) -> None:
    """Such as longer sequences: it has no batch of this form itself."""

    def read(rank: int) -> list[tuple[int, ...]]:
        source = sharded(lambda shard_index, shard_count: lengths[shard_index])
        reader = source.read(0)
        return [reader.take(1).batches.shape for _ in lengths[0]]

    lengths = [np.zeros((2, 3)), np.zeros((2, 5))], [np.zeros((2, 3))]
    assert in_two(read) == [[(1, 4, 3), (1, 2, 5)]] * 2


def test_a_second_call_in_an_endless_epoch_does_not_draw_again(in_two: Any) -> None:
    """Drawing again would change the state of what makes the batches."""

    def read(rank: int) -> Any:
        drawn = itertools.count()
        of_rank = BatchSource(lambda reading: (np.full(2, i) for i in drawn), None, endless=True)
        reader = sharded(lambda shard_index, shard_count: of_rank).read(0, start=3)
        return reader.take(1).batches[0, 2 * rank].item(), reader.position()["batches"]

    assert in_two(read) == [(0, [4, 4])] * 2


def test_batches_from_which_a_step_may_be_built_have_no_rows_of_zeros(in_two: Any) -> None:
    """The first one, and one that was put back because its form differs from those before it."""

    def read(rank: int) -> list[list[int]]:
        source = sharded(lambda shard_index, shard_count: [np.ones(2)] * 3)
        reader = source.read(0)
        first = reader.take(2)
        reader.put_back(first)
        return [reader.take(1).batches[0].tolist() for _ in range(3)]

    own = [[1, 1, 0, 0]] * 2, [[0, 0, 1, 1]] * 2
    assert in_two(read) == [[[1, 1, 1, 1], *rows] for rows in own]


def test_a_batch_is_completed_with_the_rows_of_all(in_two: Any) -> None:
    """So that all processes name the same rows that are not finite."""

    def read(rank: int) -> Any:
        window = sharded(share).read(0).take(2)
        assert not window.shares.whole
        one = window.split(1)[1]
        return processes.process_group().completed(one).batch(0).tolist()

    assert in_two(read) == [[2] * 4 + [3] * 4] * 2


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (np.zeros(3), "a numpy.ndarray"),
        (sharded(share), "a treadle.distribute.shards.ShardedSource"),
        (lambda: iter([]), "<lambda>, which has too many positional arguments"),
    ],
)
def test_what_is_no_function_of_two_arguments_is_refused(given: Any, what: str) -> None:
    with pytest.raises(DataError) as caught:
        sharded(given)
    assert str(caught.value) == (
        "sharded takes a function of shard_index and shard_count that returns the share of a "
        f"process, such as sharded(lambda shard_index, shard_count: …), not {what}"
    )


@pytest.mark.parametrize("combine", [lambda x: groups(x, 2), lambda x: zipped(a=x), zipped])
def test_shares_are_combined_inside_only(combine: Any) -> None:
    name = "groups" if combine is not zipped and "groups" in combine.__code__.co_names else "zipped"
    for source in (sharded(share), limited(sharded(share), 3)):
        with pytest.raises(DataError) as caught:
            combine(source)
        assert str(caught.value) == (
            f"{name} cannot combine a source of sharded: combine the sources inside, as in "
            f"sharded(lambda shard_index, shard_count: {name}(…))"
        )


@pytest.mark.parametrize(
    ("before", "now", "same"),
    [
        (2, 4, False),
        (1, 2, False),
        (2, 1, False),
        (1, 1, True),  # processes that read all batches
    ],
)
def test_a_resumed_run_warns_if_the_batches_differ(
    before: int, now: int, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def executed(shards: int) -> dict[str, Any]:
        return {"compiler": "graph", "fused": True, "resident": False, "shards": shards}

    there = {"devices": "cpu (4 processes)"}
    monkeypatch.setattr(circumstances, "circumstances", lambda: there)
    warning = circumstances.lost_guarantee(
        {"devices": "cpu (2 processes)", "execution": executed(before)}, executed(now)
    )
    assert ("and the batches are the same" in warning) is same
    assert ("the batches differ from here on" in warning) is not same
