"""A process that dies at any operation, and a disk that loses power at any moment."""

import random
import shutil
import subprocess
import sys
from contextlib import suppress

import pytest

from tests.faults import Crash, Dies, Disk, Quick, Recording, checkpoint, read, same
from tests.waiting import WATCHDOG
from treadle.checkpoint import Checkpoints
from treadle.errors import CheckpointError

STEPS = (0, 6, 12, 12, 18, 24, 8, 0)
# Retention at its busiest: much is kept, and the best one changes.
OPTIONS = {"keep_last": 2, "keep_every": 12, "keep_best": 1}


def at_step(step, position):
    """One checkpoint per position: where a step is saved again it holds something else."""
    about = {"score": float(position % 3), "position": position}
    saved = checkpoint(step, fixed=position != 2, about=about)
    if position >= 4:
        saved.state["backbone/kernel"][0] = -1.0  # another file is shared from here
    return saved


def run(checkpoints, first=0):
    """Save all from a position on; yields after each what is announced as saved."""
    checkpoints.clean()
    for position in range(first, len(STEPS)):
        assert checkpoints.save(at_step(STEPS[position], position))
        checkpoints.wait()
        yield position


def check_after(folder, told, options):
    """What a crash left loads, is what was saved, and serves the rest of the run."""
    checkpoints = Checkpoints(folder / "checkpoints", system=Quick(), **options)
    found = checkpoints.latest()
    assert checkpoints.rejected == []
    position = -1
    if found is not None:
        position = found.about["position"]
        assert same(found, at_step(STEPS[position], position))
    # The newest that was announced, or the one that was being written.
    assert position in (told, told + 1)
    checkpoints.clean()
    assert [p.name for p in (folder / "checkpoints").rglob(".partial*")] == []
    return position


def check_rest(folder, position, options):
    """The run resumes from the found checkpoint, and ends."""
    checkpoints = Checkpoints(folder / "checkpoints", system=Quick(), **options)
    for _ in run(checkpoints, min(position + 1, len(STEPS) - 1)):
        pass
    assert same(checkpoints.latest(), at_step(0, len(STEPS) - 1))
    assert checkpoints.steps() == [0]
    assert len(list((folder / "checkpoints" / "fixed").iterdir())) == 1


def operations(folder, options):
    files = Quick()
    for _ in run(Checkpoints(folder / "checkpoints", system=files, **options)):
        pass
    return len(files.operations)


def save_one(folder, position, files, options):
    """A process resumes a run, and saves once."""
    checkpoints = Checkpoints(folder / "checkpoints", system=files, **options)
    checkpoints.clean()
    checkpoints.latest()
    checkpoints.save(at_step(STEPS[position], position))
    checkpoints.wait()


@pytest.mark.parametrize(
    ("position", "options"),
    [
        *((position, OPTIONS) for position in (0, 6)),
        *(pytest.param(*x, marks=pytest.mark.long) for x in ((3, OPTIONS), (5, {}))),
        *(pytest.param(position, OPTIONS, marks=pytest.mark.long) for position in (2, 5, 7)),
        *(pytest.param(position, {}, marks=pytest.mark.long) for position in (2, 7)),
    ],
)
def test_a_crash_at_any_operation_loses_nothing(tmp_path, position, options):
    before = tmp_path / "before"
    before.mkdir()
    for done in range(position):
        save_one(before, done, Quick(), options)
    whole = Quick()
    save_one(shutil.copytree(before, tmp_path / "whole"), position, whole, options)
    count = len(whole.operations)
    for at in range(1, count + 1):
        folder = shutil.copytree(before, tmp_path / str(at))
        with pytest.raises(Crash):
            save_one(folder, position, Dies(at), options)
        found = check_after(folder, position - 1, options)
        if at % 10 == 0:
            check_rest(folder, found, options)
    assert count > 40


PROCESSES = """
import os, sys
from pathlib import Path
from tests.faults import Quick
from tests.checkpoint.test_crashes import OPTIONS, run
from treadle.checkpoint import Checkpoints
from treadle.core.folder_operations import append

class Exits(Quick):
    def __init__(self, at):
        super().__init__()
        self.at = at

    def before(self, operation, *arguments):
        if len(self.operations) == self.at:
            if operation is append:
                append(arguments[0], arguments[1][: len(arguments[1]) // 2])
            os._exit(9)

for at in map(int, sys.argv[2:]):
    process = os.fork()
    if not process:
        folder = Path(sys.argv[1], str(at), "checkpoints")
        for told in run(Checkpoints(folder, system=Exits(at), **OPTIONS)):
            print(at, told, flush=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
"""


def check_exits(folder, chosen):
    """The same with processes that really end, forks of one that has imported Treadle."""
    command = [sys.executable, "-c", PROCESSES, str(folder), *map(str, chosen)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    assert done.returncode == 0, done.stderr
    told = {int(at): int(position) for at, position in map(str.split, done.stdout.splitlines())}
    for at in chosen:
        position = check_after(folder / str(at), told.get(at, -1), OPTIONS)
        check_rest(folder / str(at), position, OPTIONS)


def test_a_process_that_ends_at_an_operation_loses_nothing(tmp_path):
    count = operations(tmp_path / "whole", OPTIONS)
    check_exits(tmp_path, random.Random(4).sample(range(1, count + 1), 5))


class Announcing(Checkpoints):
    """Notes in the record of operations when a step is announced as saved."""

    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "committed" and value is not None:
            self._system.log.append(("announce", value))


def recorded(folder):
    files = Recording()
    folder.mkdir()
    for _ in run(Announcing(folder / "checkpoints", system=files, **OPTIONS)):
        pass
    return files.log


def after_power_cuts(tmp_path, chosen):
    """Cut power after every operation, in the ways that are chosen; returns how often."""
    log = recorded(tmp_path / "run")
    disk, told, count = Disk(tmp_path / "run"), -1, 0
    for number, (name, *arguments) in enumerate(log):
        if name == "announce":
            told += 1
        else:
            disk.do(name, *arguments)
        for choose in chosen(number, name):
            count += 1
            check_cut(disk, tmp_path / "cut", choose, told)
    assert told == len(STEPS) - 1
    return count


def check_cut(disk, folder, choose, told):
    disk.lay_out(folder, choose)
    checkpoints = Checkpoints(folder / "checkpoints", system=Quick())
    found = checkpoints.latest()
    # Not only that one is found: nothing that is not complete has a checkpoint's name.
    assert checkpoints.rejected == []
    for name in (folder / "checkpoints").glob("step-*"):
        read(name, Quick())
    if told >= 0:
        assert found is not None
        position = found.about["position"]
        assert same(found, at_step(STEPS[position], position))
        # While what a run left behind is removed, any of it may be there still.
        assert position >= told or STEPS[position] > STEPS[told + 1]
    shutil.rmtree(folder)


def nothing_unsafe(kind):
    return False


def names_without_contents(kind):
    return kind == 0


def by_chance(seed):
    chance = random.Random(seed)
    return lambda kind: chance.random() < 0.5


def test_announced_checkpoints_survive_a_power_cut_at_any_moment(tmp_path):
    def chosen(number, name):
        # Each where it makes a difference to the operation before.
        if name in ("sync_file", "sync_folder", "announce"):
            yield nothing_unsafe
        elif name != "append":
            yield names_without_contents
        if number % 2 == 0:
            yield by_chance(number)

    assert after_power_cuts(tmp_path, chosen) > 250


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("sync_file", "arrays.safetensors"),
        ("sync_file", "manifest.json"),
        ("sync_file", "manifest.sha256"),
        ("sync_file", ".safetensors-"),  # what is shared
        ("sync_folder", ".partial-step"),
        ("sync_folder", "fixed"),
        ("sync_folder", "checkpoints"),
        ("sync_folder", "run"),
    ],
)
def test_each_sync_is_there_for_a_reason(tmp_path, name, place):
    """Where one is left out, some power cut destroys what was announced as saved."""
    disk, bad = Disk(tmp_path / "run"), 0
    for number, (operation, path, *arguments) in enumerate(recorded(tmp_path / "run")):
        if operation == "announce":
            disk.lay_out(tmp_path / str(number), nothing_unsafe)
            checkpoints = Checkpoints(tmp_path / str(number) / "checkpoints", system=Quick())
            with suppress(CheckpointError):
                found = checkpoints.latest()
                bad -= found is not None and not checkpoints.rejected
            bad += 1
        elif operation != name or place not in path.name:
            disk.do(operation, path, *arguments)
    assert bad > 0
