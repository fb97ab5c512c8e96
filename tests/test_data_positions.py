"""Every kind of source goes on from every batch as if it had never been interrupted."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests import position_kinds as kinds
from treadle.data import as_source
from treadle.data.states import encoded
from treadle.errors import DataError

ROOT = Path(__file__).parents[1]


def straight(make, **how):
    """Read a source to its end; return its batches, and where it stood at each boundary."""
    places = []

    def visit(epoch, batch, feed, count):
        places.append((epoch, batch, kinds.plain(feed.position()), count))

    return kinds.read(as_source(make()), visit=visit, **how), places


@pytest.mark.parametrize("name", kinds.KINDS)
@pytest.mark.parametrize("ahead", [False, True])
def test_all_that_follows_is_the_same(name, ahead):
    make = kinds.KINDS[name]
    expected, places = straight(make, ahead=ahead)
    assert len(places) > kinds.EPOCHS
    for epoch, batch, position, count in places:
        found = kinds.read(as_source(make()), epoch, batch, position, most=3)
        assert found == expected[count:], (epoch, batch, position)


@pytest.mark.parametrize("name", kinds.KINDS)
def test_a_position_is_one_of_any_boundary(name):
    make = kinds.KINDS[name]
    expected, places = straight(make, most=1)
    epoch, batch, position, count = places[-2]
    assert kinds.read(as_source(make()), epoch, batch, position) == expected[count:]
    # Resumed and interrupted again.
    again = []

    def visit(epoch, batch, feed, count):
        again.append((epoch, batch, kinds.plain(feed.position()), count))

    epoch, batch, position, before = places[1]
    kinds.read(as_source(make()), epoch, batch, position, visit=visit)
    for epoch, batch, position, count in again[:3]:
        found = kinds.read(as_source(make()), epoch, batch, position)
        assert found == expected[before + count :]


@pytest.mark.parametrize("name", kinds.IN_PROCESSES)
def test_a_process_of_its_own_reads_the_same(name, tmp_path):
    expected, places = straight(kinds.IN_PROCESSES[name])
    started = []
    for place in (1, len(places) // 2, len(places) - 2):
        epoch, batch, position, count = places[place]
        path = tmp_path / str(place)
        path.write_bytes(pickle.dumps((epoch, batch, position)))
        command = [sys.executable, str(ROOT / "tests/position_kinds.py"), name, str(path)]
        paths = os.pathsep.join([str(ROOT), *sys.path])
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
        started.append((process, path, count))
    for process, path, count in started:
        assert process.wait() == 0
        assert pickle.loads(path.read_bytes()) == expected[count:]
