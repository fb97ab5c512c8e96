"""A run that is resumed with another source in the middle of an epoch says what it leaves out."""

import warnings

import numpy as np
import pytest

import treadle
from tests.data.test_changed_arrays import Mean
from treadle import data
from treadle.errors import TreadleWarning

ROWS = np.arange(40, dtype="float32").reshape(40, 1)


def batches_of(size):
    return data.from_arrays(ROWS, batch_size=size, shuffle=False)


def generated():
    yield from np.split(ROWS, 10)


def trained(directory, *calls, console=False, **how):
    """Train in a new process, so to say: with a new task and a new loop."""
    options = treadle.Options(execution="eager")
    with treadle.Loop(Mean(), directory, options=options, console=console, **how) as loop:
        for source, amount in calls:
            loop.fit(source, **amount)
    return loop


def warned(loop):
    found = [record.values.get("warning", "") for record in loop.history.records]
    return [text for text in found if "left out" in text]


@pytest.mark.parametrize(
    ("first", "second", "of", "changes"),
    [
        (
            batches_of(4),
            batches_of(8),
            " of 10",
            "epochs was None, now 2; steps was 6, now None; train.length was 10, now 5; "
            "train.batch_examples was 4, now 8",
        ),
        (
            generated,
            [ROWS] * 3,
            "",
            "epochs was None, now 2; steps was 6, now None; train.length was None, now 3",
        ),
    ],
    ids=["another batch size", "another kind"],
)
def test_the_rest_of_an_epoch_that_is_left_out_is_named(tmp_path, first, second, of, changes):
    trained(tmp_path, (first, {"steps": 6}))
    expected = (
        f"epoch 1 ends after batch 6{of}, because the run is resumed with another source "
        f"({changes}): its other batches are left out, and it is none of the epochs of this call"
    )
    with pytest.warns(TreadleWarning, match="left out") as caught:
        loop = trained(tmp_path, (second, {"epochs": 2}), override=True)
    assert warned(loop) == [expected]
    assert [str(w.message) for w in caught if "left out" in str(w.message)] == [expected]
    kinds = [(record.kind, record.progress.step) for record in loop.history.records]
    place = kinds.index(("partial", 6))
    assert loop.history.records[place + 1].values == {"warning": expected}
    assert loop.progress.epoch == 3


def test_the_console_prints_it_once(tmp_path, capsys):
    trained(tmp_path, (batches_of(4), {"steps": 6}))
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreadleWarning)
        trained(tmp_path, (batches_of(8), {"epochs": 2}), console=True, override=True)
    assert capsys.readouterr().out.count("epoch 1 ends after batch 6 of 10") == 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([(batches_of(4), {"steps": 10})], [(batches_of(8), {"epochs": 1})]),  # a whole epoch
        ([(batches_of(4), {"steps": 6})], [(batches_of(4), {"epochs": 1})]),  # the same source
        (
            [(batches_of(4), {"steps": 6})],  # another source in a further call of the script
            [(batches_of(4), {"steps": 6}), (batches_of(8), {"epochs": 1})],
        ),
    ],
)
def test_nothing_is_said_if_no_batch_of_a_resumed_epoch_is_left_out(tmp_path, before, after):
    trained(tmp_path, *before)
    with warnings.catch_warnings():
        warnings.simplefilter("error", TreadleWarning)
        assert warned(trained(tmp_path, *after, override=True)) == []


def test_a_further_call_with_another_source_begins_at_its_first_batch(tmp_path):
    calls = [(batches_of(4), {"steps": 6}), (batches_of(8), {"epochs": 1})]
    trained(tmp_path / "extended", *calls[:1])
    extended = trained(tmp_path / "extended", *calls)
    straight = trained(tmp_path / "straight", *calls)
    for loop in (extended, straight):
        kinds = [(record.kind, record.progress.step) for record in loop.history.records]
        assert kinds[-1] == ("epoch", 11) and ("partial", 6) in kinds
        assert loop.history.steps("mean")[6:].tolist() == [3.5, 11.5, 19.5, 27.5, 35.5]
