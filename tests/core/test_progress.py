"""Where a run stands."""

import dataclasses

import pytest

from treadle.core.progress import Progress


def test_advancing_returns_a_new_progress() -> None:
    start = Progress()
    assert dataclasses.astuple(start) == (0, 0, 0, 0, 0.0)
    later = start.advanced(steps=3, examples=96).after_seconds(1.5)
    assert later == Progress(step=3, epoch=0, batch=3, examples=96, seconds=1.5)
    assert start == Progress()
    with pytest.raises(dataclasses.FrozenInstanceError):
        later.step = 4  # type: ignore[misc]


def test_an_epoch_begins_at_its_first_batch() -> None:
    later = Progress(step=10, epoch=1, batch=4, examples=320, seconds=2.0).at_epoch(2)
    assert later == Progress(step=10, epoch=2, batch=0, examples=320, seconds=2.0)


def test_progress_is_described_as_in_messages() -> None:
    assert str(Progress(step=12, epoch=1, batch=4)) == "step 12, epoch 2, batch 4"
    assert str(Progress(step=12, epoch=1)) == "step 12 and 1 epoch"
    assert str(Progress(step=16, epoch=4)) == "step 16 and 4 epochs"
    assert str(Progress(step=3)) == "step 3"  # single steps belong to no epoch
    assert Progress().following() == "step 1 (epoch 1, batch 1)"
