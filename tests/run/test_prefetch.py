"""Reading ahead: which batches come next, and how the time that reading takes is counted."""

from typing import Any

import numpy as np
import pytest

from treadle import data
from treadle.core.progress import Progress
from treadle.data import as_source
from treadle.run import prefetch
from treadle.run.prefetch import ROWS_AHEAD, Feed


def opened(source: Any) -> Feed:
    feed = Feed()
    feed.open(as_source(source), Progress(), None)  # type: ignore[arg-type] - it reads no state
    return feed


def read_ahead(feed: Feed, most: int = 1) -> None:
    feed.read_ahead(lambda: most, lambda window: window, lambda: False)


def taken(feed: Feed, most: int = 1) -> list[int]:
    window = feed.take(most, Progress())
    assert window is not None
    return window.batches.ravel().tolist()


def numbers(count: int = 200) -> Any:
    return data.from_arrays(np.arange(count), batch_size=1, shuffle=False)


def test_rows_read_ahead_for_single_steps_are_given_one_by_one_or_as_a_window() -> None:
    feed = opened(numbers())
    assert taken(feed) == [0]
    read_ahead(feed)
    assert [taken(feed), taken(feed)] == [[1], [2]]
    assert taken(feed, 100) == list(range(3, 103))  # more than was read ahead
    assert taken(feed) == [103]


def test_an_interrupt_while_rows_are_read_ahead_repeats_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feed = opened(numbers())
    assert taken(feed) == [0]
    reader = feed._open[2]  # type: ignore[index]
    take = reader.take

    def interrupted(most: int) -> Any:
        if most == ROWS_AHEAD:
            raise KeyboardInterrupt
        return take(most)

    with monkeypatch.context() as patched:
        patched.setattr(reader, "take", interrupted)
        read_ahead(feed)
    with pytest.raises(KeyboardInterrupt):
        feed.take(1, Progress())
    assert feed.take(1, Progress()) is None  # closed, as after each error
    feed.open(as_source(numbers()), Progress(batch=1), None)  # type: ignore[arg-type]
    assert taken(feed) == [1]


def test_a_slow_source_is_read_in_parallel_until_it_is_fast_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(prefetch.time, "monotonic", lambda: now)
    feed = opened([np.array([i]) for i in range(40)])
    assert feed.slow

    def read(seconds: float) -> None:
        nonlocal now
        batches = feed._open[2]  # type: ignore[index]
        take = batches.take

        def timed(most: int) -> Any:
            nonlocal now
            now += seconds
            return take(most)

        monkeypatch.setattr(batches, "take", timed)
        read_ahead(feed)
        monkeypatch.setattr(batches, "take", take)
        taken(feed)

    for _ in range(prefetch.SLOW_FOR):
        assert feed.slow
        read(0.0001)
    assert not feed.slow
    waited = feed.waited
    read(0.5)
    assert feed.slow
    assert feed.waited - waited == pytest.approx(0.5)  # nothing ran meanwhile
