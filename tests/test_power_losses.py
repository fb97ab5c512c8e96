"""Runs that lose power at any operation on their files; the long form is `scripts/fuzz-directories`."""

import pytest

from tests.directories.power import PowerLosses
from tests.faults import Recording, path_of


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return PowerLosses(tmp_path_factory.mktemp("losses"))


@pytest.mark.faults
def test_runs_that_lose_power_end_like_one_that_does_not(losses):
    for number in range(30):
        shot = losses.run(1, number)
        assert shot.faults == [], shot


@pytest.mark.faults
@pytest.mark.parametrize("name", ["log.jsonl", "epochs.csv", "images", "checkpoints"])
def test_a_sync_that_is_left_out_is_found(tmp_path, monkeypatch, name):
    """What is not synced is lost, and the results differ."""
    perform = Recording.perform

    def forgetful(files, operation, *arguments):
        syncs = operation.__name__ in ("sync_file", "sync_folder")
        if not (syncs and name in str(path_of(arguments))):
            return perform(files, operation, *arguments)

    monkeypatch.setattr(Recording, "perform", forgetful)
    losses = PowerLosses(tmp_path)
    assert any(losses.run(1, number).faults for number in range(40))
