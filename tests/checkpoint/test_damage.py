"""Truncated, changed, missing and malicious files are detected, named and skipped."""

import errno
import io
import json
import os
import random
import shutil
import subprocess
import sys

import pytest

from tests.faults import Quick, checkpoint, same
from tests.faults import path_of as path_at
from tests.forging import CASES
from tests.waiting import WATCHDOG
from treadle.checkpoint import Checkpoints
from treadle.errors import CheckpointError

FILES = ("manifest.json", "manifest.sha256", "arrays.safetensors", "fixed")
OLDER, NEWEST = "step-000000000006", "step-000000000012"


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of steps 6 and 12; only the newer one shares a file."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", system=Quick())
    for step in (6, 12):
        checkpoints.save(checkpoint(step, fixed=step == 12))
        checkpoints.wait()
    return tmp_path / "checkpoints"


def path_of(folder, name):
    if name == "fixed":
        [path] = (folder / "fixed").iterdir()
        return path
    return folder / NEWEST / name


def check_passed_over(folder, name):
    """The one before is found, and it is said which file of the newest is at fault, and why."""
    found = Checkpoints(folder, system=Quick())
    assert same(found.latest(), checkpoint(6, fixed=False))
    [(rejected, reason)] = found.rejected
    assert rejected == NEWEST
    blamed = path_of(folder, "manifest.json" if name == "manifest.sha256" else name)
    assert reason.startswith(f"{blamed} is damaged: it")
    return reason.removeprefix(f"{blamed} is damaged: ")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_skipped(folder, name):
    path = path_of(folder, name)
    data, chance = path.read_bytes(), random.Random(name)
    lengths = {0, 1, len(data) - 1, *chance.sample(range(len(data)), min(60, len(data)))}
    for length in lengths:
        path.write_bytes(data[:length])
        why = check_passed_over(folder, name)
        if name.startswith("manifest"):
            assert why == "its SHA-256 is not the one in manifest.sha256"
        else:
            assert why == f"it has {length:,} bytes, and its manifest says {len(data):,}"
    assert len(lengths) > 55


def test_a_flipped_bit_is_detected(folder):
    chance = random.Random(7)
    for _ in range(60):
        name = chance.choice(FILES)
        path = path_of(folder, name)
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        whole = path.read_bytes()
        path.write_bytes(data)
        why = check_passed_over(folder, name)
        where = "manifest.sha256" if name.startswith("manifest") else "its manifest"
        assert why == f"its SHA-256 is not the one in {where}"
        path.write_bytes(whole)
    assert same(Checkpoints(folder).latest(), checkpoint(12))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_lost_is_named(folder, name):
    path = path_of(folder, name)
    path.unlink()
    found = Checkpoints(folder)
    assert found.latest().progress.step == 6
    assert found.rejected == [(NEWEST, f"cannot read {path}: No such file or directory")]


def test_other_files_are_left_alone(folder):
    left = [".partial-step-000000000099-0a", ".partial-removed-step-000000000001-0b"]
    strays = ["notes.txt", "step-12", "step-000000000099.bak", "step-000000000098"]
    for name in left:
        (folder / name).mkdir()
        (folder / name / "arrays.safetensors").write_bytes(b"half")
        (folder / name / "within").mkdir()
        (folder / name / "link").symlink_to(folder / NEWEST)
    (folder / ".partial-file").write_bytes(b"")
    (folder / "fixed" / ".partial-0.safetensors-0c").write_bytes(b"half")
    (folder / "fixed" / f"{'0' * 64}.safetensors").write_bytes(b"not in the manifest")
    (folder / "fixed" / "mine.safetensors").write_bytes(b"not of a checkpoint")
    for name in strays:
        (folder / name).write_bytes(b"")
    found = Checkpoints(folder, system=Quick())
    assert same(found.latest(), checkpoint(12))
    reason = f"{folder}/step-000000000098 is not a folder, so it holds no checkpoint"
    assert found.rejected == [("step-000000000098", reason)]
    assert all((folder / name).exists() for name in left)  # only under the lock
    (folder / "step-000000000098").unlink()
    found.clean()
    names = sorted(path.name for path in folder.iterdir())
    assert names == sorted(["fixed", "step-000000000006", NEWEST, *strays[:3]])
    assert len(list((folder / "fixed").iterdir())) == 2
    assert (folder / "fixed" / "mine.safetensors").exists()
    assert same(found.latest(), checkpoint(12))


def test_if_all_are_damaged_the_run_does_not_start_from_scratch(folder):
    for step in (6, 12):
        (folder / f"step-{step:012d}" / "arrays.safetensors").write_bytes(b"")
    found = Checkpoints(folder)
    for ask, what in (
        (found.latest, "any checkpoint"),
        (lambda: found.before(99), "any checkpoint at or before step 99"),
    ):
        with pytest.raises(CheckpointError) as caught:
            ask()
        message = str(caught.value)
        newest, older = (f"{folder}/{name}/arrays.safetensors" for name in (NEWEST, OLDER))
        assert message.startswith(
            f"cannot read {what} of {folder}: {newest} is damaged: it has 0 bytes"
        )
        assert f"; {older} is damaged: it has 0 bytes" in message
        assert message.endswith(
            ". Nothing was changed: restore a copy of the files, or start from scratch in another "
            "run directory"
        )
        assert [name for name, _ in found.rejected] == [NEWEST, "step-000000000006"]
    assert found.steps() == [6, 12]


def test_a_damaged_checkpoint_is_removed_after_the_next_save(folder):
    (folder / NEWEST / "arrays.safetensors").write_bytes(b"")
    files = Quick(folder)
    found = Checkpoints(folder, system=files)
    assert found.latest().progress.step == 6
    found.save(checkpoint(7))
    found.wait()
    assert found.steps() == [6, 7] and files.most == 2
    assert found.latest().progress.step == 7 and found.rejected == []


def test_an_error_of_the_disk_while_reading_is_no_end(folder):
    class Torn(Quick):
        def perform(self, operation, *arguments):
            result = super().perform(operation, *arguments)
            if operation.__name__ != "open_file" or path_at(arguments) != folder / NEWEST / name:
                return result
            result.close()
            return Unreadable(result.name)

    class Unreadable(io.FileIO):
        def readinto(self, buffer):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        read = readinto

    for name in ("manifest.json", "manifest.sha256", "arrays.safetensors"):
        found = Checkpoints(folder, system=Torn())
        assert found.latest().progress.step == 6
        assert found.rejected == [
            (NEWEST, f"cannot read {folder}/{NEWEST}/{name}: Input/output error")
        ]


# Reads every checkpoint below a folder; prints what was said of each, and the memory it took: by
# what Python and NumPy allocate, since the memory of the process depends on the system and on the
# number of cores.
READER = """
import json, sys, tracemalloc
from pathlib import Path
from treadle.checkpoint import read
from treadle.core.folder import Folder
from treadle.errors import CheckpointError

said, memory = {}, {}
tracemalloc.start()
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        with Folder.open(folder, error=CheckpointError) as opened:
            read(opened, "step-000000000003")
        said[folder.name] = "it was read"
    except CheckpointError as error:
        said[folder.name] = str(error)
    memory[folder.name] = tracemalloc.get_traced_memory()[1] / (1 << 20)
    tracemalloc.reset_peak()
print(json.dumps([said, memory]))
"""


@pytest.fixture(scope="module")
def malice(tmp_path_factory):
    """All checkpoints that were made to harm, read by one process that has nothing else to do."""
    folder = tmp_path_factory.mktemp("malice")
    for number, (make, _) in enumerate(CASES.values()):
        make(folder / "made" / f"{number:02d}")
    (folder / "working").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", READER, str(folder / "made")],
        cwd=folder / "working",
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
    )
    assert done.returncode == 0, done.stderr
    yield folder, *json.loads(done.stdout)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", CASES)
def test_a_file_made_to_harm_is_refused(malice, name):
    folder, found, _ = malice
    number = f"{[*CASES].index(name):02d}"
    said = found[number]
    assert said.endswith(CASES[name][1]), said
    assert str(folder / "made" / number) in said


def test_files_made_to_harm_run_nothing_and_take_little_memory(malice):
    folder, found, memory = malice
    assert list((folder / "working").iterdir()) == []  # nothing was run or unpacked
    assert len(found) == len(CASES) > 30
    assert max(memory.values()) < 100, memory  # MiB
