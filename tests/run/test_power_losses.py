"""Runs that lose power at any operation on their files; `scripts/fuzz-directories` is longer."""

import json
import shutil
from contextlib import suppress

import keras
import pytest

import treadle
from tests.directories.power import PowerLosses
from tests.directories.tiny_task import Tiny
from tests.faults import Recording, path_of


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return PowerLosses(tmp_path_factory.mktemp("losses"))


@pytest.mark.long
def test_runs_that_lose_power_end_like_one_that_does_not(losses):
    for number in range(8):
        shot = losses.run(1, number)
        assert shot.faults == [], shot


@pytest.mark.parametrize(
    "name",
    ["checkpoints", *(pytest.param(x, marks=pytest.mark.long) for x in ("log.jsonl", "images"))],
)
def test_a_sync_that_is_left_out_is_found(tmp_path, monkeypatch, name):
    """What is not synced is lost, and the results differ."""
    perform = Recording.perform

    def forgetful(files, operation, *arguments):
        syncs = operation.__name__ in ("sync_file", "sync_folder")
        if not (syncs and name in str(path_of(arguments))):
            return perform(files, operation, *arguments)

    monkeypatch.setattr(Recording, "perform", forgetful)
    losses = PowerLosses(tmp_path)
    assert any(losses.run(1, number).faults for number in range(20))


def test_a_process_that_ends_between_two_calls_has_not_finished_the_second(tmp_path):
    """An earlier process began the second call; this one completed the first, and was killed."""
    directory = tmp_path / "run"

    def fit(calls, dies=False):
        def at(loop):
            if dies and loop.progress.step == 20:
                raise KeyboardInterrupt

        keras.utils.clear_session(free_memory=False)
        treadle.setup(seed=0)
        task = Tiny()
        train = task.datasets().train
        options = treadle.Options(execution="eager")
        hooks = [treadle.hooks.Checkpoint("18 steps"), treadle.at("20 steps", at)]
        with (
            suppress(KeyboardInterrupt),
            treadle.Loop(task, directory, hooks=hooks, options=options, console=False) as loop,
        ):
            for how in calls:
                loop.fit(train, **how)
        return loop

    both = [{"epochs": 3}, {"steps": 5}]
    fit(both, dies=True)
    for saved in (directory / "checkpoints").glob("step-*[1-9]*"):  # the power fails, too
        shutil.rmtree(saved)
    fit(both[:1])
    assert len(json.loads((directory / "run.json").read_text())["calls"]) == 1
    assert fit(both).progress.step == 23
