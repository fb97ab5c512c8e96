"""Accumulated gradients after a resume: their notes, and checkpoints of older versions."""

import keras
import numpy as np
import pytest

import treadle
from treadle.hooks import Checkpoint
from treadle.steps.state import State


class Accumulating(treadle.Task):
    def __init__(self):
        self.w = keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1)
        self.accumulator = treadle.Accumulator(2)

    def train_step(self, batch):
        slope, weight = batch[0][0], batch[1][0]
        _, grads = treadle.gradients(lambda: self.w * slope, [self.w])
        self.accumulator.add(
            grads, lambda mean: self.optimizer.apply(mean, [self.w]), weight=weight
        )
        return {"slope": slope}


def run(directory, die_at=None):
    def die(loop):
        if loop.progress.step == die_at:
            raise OSError("killed")

    slopes = np.arange(1, 8, dtype="float32")
    weights = np.array([1, 1, 0, 0, 0, 0, 1], "float32")
    source = treadle.data.from_arrays((slopes, weights), batch_size=1, shuffle=False)
    hooks, eager = (
        [Checkpoint(every="1 step"), treadle.every("1 step", die)],
        treadle.Options("eager"),
    )
    with treadle.Loop(Accumulating(), directory, hooks, eager, console=False) as loop:
        history = loop.fit(source, epochs=2)
    notes = [record.values["note"] for record in history.records if "note" in record.values]
    return loop.state.arrays(), notes


@pytest.mark.parametrize("die_at", [4, 5, 9])
def test_notes_are_those_of_an_uninterrupted_run(tmp_path, die_at):
    expected, notes = run(tmp_path / "whole")
    assert [note.split(" whose")[0] for note in notes] == [
        "accumulator has skipped 2 groups of 2 batches",
        "accumulator has skipped 3 groups of 2 batches",
    ]
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "killed", die_at)
    found, again = run(tmp_path / "killed")
    assert again == notes
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


def test_a_checkpoint_of_an_older_version_counts_no_skipped_groups(tmp_path, monkeypatch):
    stage = State.stage

    def older(self, *args, **kwargs):
        found = stage(self, *args, **kwargs)
        return {path: x for path, x in found.items() if path != "accumulator/skipped"}

    with monkeypatch.context() as patched, pytest.raises(OSError, match="killed"):
        patched.setattr(State, "stage", older)
        run(tmp_path, die_at=2)
    assert "accumulator/skipped" not in treadle.load_run(tmp_path).variables()
    found, notes = run(tmp_path)
    assert found["accumulator/skipped"] == 3 and len(notes) == 2
