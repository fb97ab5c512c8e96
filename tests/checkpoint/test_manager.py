"""The checkpoints of a run: which are kept, which is found, and what the writer promises."""

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref

import numpy as np
import pytest

from tests.faults import Gated, Quick, Refuses, checkpoint, no_space, path_of, same, write
from tests.waiting import WATCHDOG
from treadle.checkpoint import Checkpoints, LeftoverError, SavedState
from treadle.checkpoint.format import digest_line
from treadle.core.progress import Progress
from treadle.errors import CheckpointError, ConfigurationError


def saved(folder, *steps, system=None, scores=(), **options):
    checkpoints = Checkpoints(folder, system=system or Quick(), **options)
    for number, step in enumerate(steps):
        about = {"score": scores[number]} if number < len(scores) else {}
        assert checkpoints.save(checkpoint(step, about=about))
        checkpoints.wait()
    return checkpoints


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_found(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    first = saved(folder, 0, 6, 12)
    assert first.committed == 12
    for found in (first, Checkpoints(folder)):
        assert same(found.latest(), checkpoint(12))
        assert found.rejected == []
        assert found.steps() == [0, 6, 12]


def test_nothing_is_found_where_nothing_was_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.latest() is None and checkpoints.before(3) is None
    assert checkpoints.best() is None and checkpoints.steps() == []
    assert checkpoints.committed is None and not checkpoints.busy
    assert list(tmp_path.iterdir()) == []


def test_before_finds_where_to_start_from(tmp_path):
    checkpoints = saved(tmp_path, 0, 6, 12)
    assert [checkpoints.before(step).progress.step for step in (0, 5, 6, 11, 99)] == [
        0,
        0,
        6,
        6,
        12,
    ]
    assert saved(tmp_path / "later", 6).before(5) is None


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, [0, 15, 18]),
        ({"keep_last": 1}, [0, 18]),
        ({"keep_last": 3}, [0, 12, 15, 18]),
        ({"keep_every": 6}, [0, 6, 12, 15, 18]),
        ({"keep_every": 9, "keep_last": 1}, [0, 9, 18]),
        ({"keep_best": 1}, [0, 6, 15, 18]),
        ({"keep_best": 2}, [0, 6, 9, 15, 18]),
        ({"keep_best": 2, "direction": "max"}, [0, 3, 12, 15, 18]),
        ({"keep_best": 1, "keep_every": 9, "keep_last": 1}, [0, 6, 9, 18]),
    ],
)
def test_the_right_checkpoints_are_kept(tmp_path, options, steps):
    scores = [9.0, 0.5, 0.1, 0.2, 0.7, float("nan"), 0.3]
    checkpoints = saved(tmp_path, 0, 3, 6, 9, 12, 15, 18, scores=scores, **options)
    if options.get("direction") == "max":  # step 0 is kept anyway, and counts as one of the best
        steps.remove(3)
    assert checkpoints.steps() == steps
    # Another process sees the same scores.
    saved(tmp_path, 21, **options)
    assert (12 in Checkpoints(tmp_path).steps()) == (12 in steps and "keep_last" not in options)


def test_the_best_is_found(tmp_path):
    scores = [3, 0.5, 0.5, -float("inf"), float("nan"), None, True]
    checkpoints = saved(tmp_path, 0, 1, 2, 3, 4, 5, scores=scores, keep_best=1)
    assert checkpoints.best().progress.step == 1  # of equal ones the first
    assert Checkpoints(tmp_path, direction="max").best().progress.step == 0
    assert Checkpoints(tmp_path).latest().progress.step == 5
    (tmp_path / "step-000000000001" / "arrays.safetensors").write_bytes(b"")
    found = Checkpoints(tmp_path)
    assert found.best().progress.step == 0
    assert [name for name, _ in found.rejected] == ["step-000000000001"]


@pytest.mark.parametrize("last", [1, 2, 3])
def test_the_disk_holds_few_states_at_any_moment(tmp_path, last):
    files = Quick(tmp_path)
    saved(tmp_path / "checkpoints", 0, 3, 6, 6, 9, 9, 12, 15, system=files, keep_last=last)
    assert files.most == last + 2  # and that of step 0, and the new one


@pytest.mark.parametrize("last", [1, 2, 3])
def test_a_full_disk_leaves_the_newest_checkpoints(tmp_path, last):
    steps = [3, 6, 9, 12, 15]
    saved(tmp_path, 0, *steps, keep_last=last)
    full = Refuses(errno.ENOSPC, "append", "arrays", times=99)
    checkpoints = Checkpoints(tmp_path, keep_last=last, system=full)
    assert checkpoints.latest().progress.step == 15
    for _ in range(2):
        checkpoints.save(checkpoint(18))
        with pytest.raises(CheckpointError, match=r"step-000000000018.*: the disk is full: "):
            checkpoints.wait()
        assert checkpoints.steps() == [0, *steps[-last:]]


@pytest.mark.parametrize("full", [False, True])
def test_what_is_saved_while_the_interpreter_shuts_down_is_written_here(tmp_path, full):
    system = Refuses(errno.ENOSPC, "append", "arrays", times=99) if full else Quick()
    checkpoints = Checkpoints(tmp_path, system=system)
    checkpoints._writer.shutdown()  # as at exit
    assert checkpoints.save(checkpoint(3)) and not checkpoints.busy
    if full:
        with pytest.raises(CheckpointError, match="the disk is full"):
            checkpoints.wait()
    assert checkpoints.steps() == ([] if full else [3])


def test_the_same_step_again_is_the_newer_one(tmp_path):
    checkpoints = saved(tmp_path, 0)
    for number in range(2):
        other = SavedState(Progress(0), {"a": np.full(2, number)})
        checkpoints.save(other)
        checkpoints.wait()
        assert same(checkpoints.latest(), other)
    assert names(tmp_path) == ["fixed", "step-000000000000-2"]
    assert names(tmp_path / "fixed") == []  # what only the first one named


def test_a_save_after_a_rollback_removes_later_checkpoints(tmp_path):
    checkpoints = saved(tmp_path, 0, 6, 12, 18, keep_last=3)
    assert checkpoints.before(7).progress.step == 6
    checkpoints.save(checkpoint(8))
    checkpoints.wait()
    assert checkpoints.steps() == [0, 6, 8]


class Meanwhile(Quick):
    """Lets something happen before the first operation of a name on a file of a checkpoint."""

    def __init__(self, operation, file, happens):
        super().__init__()
        self.operation, self.file, self.happens = operation, file, happens

    def before(self, operation, *arguments):
        if operation.__name__ == self.operation and path_of(arguments).name == self.file:
            happens, self.happens = self.happens, lambda: None
            happens()


@pytest.mark.parametrize("read", ["latest", "before"])
@pytest.mark.parametrize("file", ["manifest.json", "arrays.safetensors"])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_called_damaged(tmp_path, read, file):
    """As `evaluate` and `replay` read the directory of a run that trains."""
    writing = saved(tmp_path, 0, 6, scores=[0.5, 1.0], keep_last=1)

    def happens():
        writing.save(checkpoint(12, about={"score": 2.0}))
        writing.wait()
        assert writing.steps() == [0, 12]

    reading = Checkpoints(tmp_path, system=Meanwhile("open_file", file, happens))
    found = reading.before(99) if read == "before" else getattr(reading, read)()
    assert same(found, checkpoint(12, about={"score": 2.0}))
    assert reading.rejected == []


def test_nothing_is_removed_before_something_is_known_to_be_readable(tmp_path):
    saved(tmp_path, 0, 6, 12)
    files = no_space()
    fresh = Checkpoints(tmp_path, system=files)  # has neither read nor written one
    fresh.save(checkpoint(18))
    with pytest.raises(CheckpointError):
        fresh.wait()
    assert fresh.steps() == [0, 6, 12]


def test_files_that_nothing_names_are_removed(tmp_path):
    checkpoints = saved(tmp_path, 0, 1)
    [shared] = names(tmp_path / "fixed")
    for step in (2, 3):
        changed = checkpoint(step)
        changed.state["backbone/kernel"][0] = 5.0
        checkpoints.save(changed)
        checkpoints.wait()
    assert len(names(tmp_path / "fixed")) == 2  # step 0 still names the first
    checkpoints.save(checkpoint(0, fixed=False))
    checkpoints.wait()
    assert names(tmp_path) == ["fixed", "step-000000000000-1"]
    assert names(tmp_path / "fixed") == [] and shared


def test_files_that_a_damaged_one_may_name_stay(tmp_path):
    checkpoints = saved(tmp_path, 0, 1)
    (tmp_path / "step-000000000000" / "manifest.json").write_bytes(b"")
    (tmp_path / "fixed" / "0.safetensors").write_bytes(b"")
    checkpoints = saved(tmp_path, 2)
    assert "0.safetensors" in names(tmp_path / "fixed")
    assert checkpoints.latest().progress.step == 2


# The writer's thread


def test_one_save_is_in_flight(tmp_path):
    files = Gated()
    checkpoints = Checkpoints(tmp_path / "a", system=files)
    assert checkpoints.save(checkpoint(1))
    assert files.reached.wait(WATCHDOG)
    assert checkpoints.busy and checkpoints.committed is None
    assert not checkpoints.save(checkpoint(2))
    checkpoints.check()  # nothing has gone wrong
    files.gate.set()
    checkpoints.wait()
    assert not checkpoints.busy and checkpoints.committed == 1
    assert checkpoints.steps() == [1]


def test_a_slow_disk_holds_no_more_than_one_state(tmp_path):
    files = Gated()
    checkpoints = Checkpoints(tmp_path / "a", system=files)
    states = [{"a": np.zeros(4)} for _ in range(3)]
    alive = [weakref.ref(state["a"]) for state in states]
    handed = [checkpoints.save(SavedState(Progress(n), s)) for n, s in enumerate(states)]
    assert handed == [True, False, False]
    assert files.reached.wait(WATCHDOG)
    states.clear()
    gc.collect()
    assert [ref() is not None for ref in alive] == [True, False, False]
    files.gate.set()
    checkpoints.wait()
    gc.collect()
    assert alive[0]() is None  # nor does the thread keep it


def test_only_what_may_change_is_copied(tmp_path):
    class Looking(Quick):
        written = ()

        def before(self, operation, *arguments):
            if operation.__name__ == "append":
                self.written = [*self.written, np.asarray(arguments[1])]

    files = Looking()
    state, kept, frozen = np.ones(1000), np.ones(1001), np.ones(1002)
    frozen.flags.writeable = False
    hooks = {"h": {"kept": kept, "frozen": frozen}}
    checkpoints = Checkpoints(tmp_path, system=files)
    checkpoints.save(SavedState(Progress(1), {"a": state}, hooks=hooks))
    checkpoints.wait()
    direct = [any(np.shares_memory(p, a) for p in files.written) for a in (state, kept, frozen)]
    assert direct == [True, False, True]


def test_values_that_cannot_be_saved_raise_like_failed_writes(tmp_path):
    checkpoints = saved(tmp_path, 0)
    assert checkpoints.save(checkpoint(6, about={"x": {1, 2}}))
    assert checkpoints.committed == 0 and not checkpoints.busy
    with pytest.raises(CheckpointError, match=r"^about\['x'\] is a set, which a checkpoint cannot"):
        checkpoints.check()
    assert checkpoints.save(checkpoint(6))
    checkpoints.wait()
    assert checkpoints.steps() == [0, 6]


def test_reading_waits_for_what_is_being_written(tmp_path):
    files = Gated()
    checkpoints = Checkpoints(tmp_path, system=files)
    checkpoints.save(checkpoint(1))
    assert files.reached.wait(WATCHDOG)
    threading.Timer(0.1, files.gate.set).start()
    assert checkpoints.latest().progress.step == 1


def test_a_failure_is_raised_once_at_the_next_boundary(tmp_path):
    checkpoints = saved(tmp_path, 0, 6)
    checkpoints._system = no_space()
    for ask in (checkpoints.wait, checkpoints.check, lambda: checkpoints.save(checkpoint(18))):
        checkpoints._system.times = 1
        assert checkpoints.save(checkpoint(12))
        checkpoints.settle()
        with pytest.raises(CheckpointError, match="the disk is full"):
            ask()
        checkpoints.check()
        assert checkpoints.committed == 6 and not checkpoints.busy
    assert checkpoints.save(checkpoint(12))  # there is space again
    checkpoints.wait()
    assert checkpoints.committed == 12


PROCESS = """
import sys
from pathlib import Path
import tests.faults as faults
from treadle.checkpoint import Checkpoints

class Slow(faults.Quick):
    def before(self, operation, *arguments):
        if operation.__name__ == "append":
            import time
            time.sleep(0.02)

files = {"slow": Slow(), "full": faults.no_space()}[sys.argv[2]]
checkpoints = Checkpoints(Path(sys.argv[1]), system=files)
checkpoints.save(faults.checkpoint(3))
if len(sys.argv) > 3:
    raise SystemExit(3)
"""


@pytest.mark.parametrize("leaving", [[], ["early"]])
def test_the_end_of_the_process_waits_for_the_writer(tmp_path, leaving):
    command = [sys.executable, "-c", PROCESS, str(tmp_path), "slow", *leaving]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    assert (done.returncode, done.stderr) == (3 if leaving else 0, "")
    assert same(Checkpoints(tmp_path).latest(), checkpoint(3))


def test_a_failure_not_yet_raised_is_reported_at_the_end(tmp_path):
    command = [sys.executable, "-c", PROCESS, str(tmp_path), "full"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    assert done.returncode == 0
    assert done.stderr.startswith(f"treadle: a checkpoint was not saved: cannot write {tmp_path}/")
    assert done.stderr.count("\n") == 1
    assert Checkpoints(tmp_path).latest() is None


def test_an_idle_writer_does_not_hold_up_the_end(tmp_path):
    code = f"{PROCESS}\ncheckpoints.wait()\nprint(checkpoints.committed)"
    command = [sys.executable, "-c", code, str(tmp_path), "slow"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")


# Places and clocks


def test_the_order_of_checkpoints_does_not_depend_on_clocks_or_location(tmp_path):
    saved(tmp_path / "run" / "checkpoints", 0, 6, 12)
    for path in (tmp_path / "run" / "checkpoints" / "step-000000000006").iterdir():
        os.utime(path, (2e9, 2e9))
    for path in (tmp_path / "run" / "checkpoints" / "step-000000000012").iterdir():
        os.utime(path, (0, 0))
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    moved = Checkpoints(tmp_path / "elsewhere" / "checkpoints", system=Quick())
    assert same(moved.latest(), checkpoint(12))
    moved.save(checkpoint(18))
    moved.wait()
    assert moved.steps() == [0, 12, 18]


def test_a_folder_that_was_renamed_is_not_another_step(tmp_path):
    saved(tmp_path, 0, 6)
    (tmp_path / "step-000000000006").rename(tmp_path / "step-000000000016")
    found = Checkpoints(tmp_path)
    assert found.latest().progress.step == 0
    assert found.rejected == [("step-000000000016", f"{tmp_path}/step-000000000016 holds step 6")]


def test_checkpoints_of_a_newer_version_are_not_skipped(tmp_path):
    saved(tmp_path, 0, 6)
    newer = tmp_path / "step-000000000006" / "manifest.json"
    newer.write_bytes(data := newer.read_bytes().replace(b'"format": 1', b'"format": 2'))
    newer.with_name("manifest.sha256").write_bytes(digest_line(data))
    found = Checkpoints(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        found.latest()
    assert str(caught.value) == (
        f"{newer} is of format 2, and this version of Treadle reads format 1: use the version "
        "that wrote it"
    )
    assert found.before(5).progress.step == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_last": 0}, "keep_last must be at least 1, not 0"),
        ({"keep_every": 0}, "keep_every must be at least 1, not 0"),
        ({"keep_best": -1}, "keep_best must be at least 1, not -1"),
        ({"direction": "up"}, "direction must be 'min' or 'max', not 'up'"),
    ],
)
def test_invalid_numbers_are_refused(tmp_path, options, message):
    with pytest.raises(ConfigurationError) as caught:
        Checkpoints(tmp_path, **options)
    assert str(caught.value) == message


# What the system refuses


@pytest.mark.parametrize(
    "file", ["arrays.safetensors", "manifest.json", "manifest.sha256", "fixed"]
)
def test_a_full_disk_is_named(tmp_path, file):
    saved(tmp_path, 0, 6)
    files = no_space(text=file)
    files.perform = _free_bytes(files.perform, lambda: 1234)
    changed = checkpoint(12)
    changed.state["backbone/kernel"][0] = 5.0
    with pytest.raises(CheckpointError) as caught:
        write(tmp_path, changed, files)
    message = str(caught.value)
    part = "fixed/" if file == "fixed" else ".partial-step-000000000012-"
    assert message.startswith(f"cannot write {tmp_path}/{part}")
    sizes = {"arrays.safetensors": "162", "manifest.sha256": "80", "fixed": "248"}
    if file in sizes:
        needed = f": the disk is full: it needs about {sizes[file]} bytes, 1,234 are free"
        assert message.endswith(needed)
    assert [name for name in names(tmp_path) if name.startswith(".")] == []
    assert all(not name.startswith(".") for name in names(tmp_path / "fixed"))
    assert same(Checkpoints(tmp_path).latest(), checkpoint(6))


def _free_bytes(perform, free):
    def performed(operation, *arguments):
        if operation.__name__ == "free_bytes":
            return free()
        return perform(operation, *arguments)

    return performed


def test_a_disk_that_does_not_say_what_is_free(tmp_path):
    def unknown():
        raise OSError(errno.EIO, "Input/output error")

    files = no_space()
    files.perform = _free_bytes(files.perform, unknown)
    with pytest.raises(CheckpointError, match=r"bytes, an unknown number are free$"):
        write(tmp_path, checkpoint(3), files)


@pytest.mark.parametrize(
    ("operation", "text", "doing"),
    [
        ("append", "arrays.safetensors", "write"),
        ("sync_file", "arrays.safetensors", "write"),
        ("sync_file", "manifest.json", "write"),
        ("create_file", "manifest.sha256", "write"),
        ("make_folder", ".partial", "make the folder"),
        ("sync_folder", ".partial", "sync the folder"),
        ("sync_folder", "fixed", "sync the folder"),
        ("sync_folder", "checkpoints", "sync the folder"),
        ("replace", ".partial", "rename"),
        ("list_names", "checkpoints", "list the folder"),
        ("inspect", "fixed", "inspect"),
        ("open_file", "manifest.json", "read"),
        ("read_file", "manifest.sha256", "read"),
    ],
)
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT])
def test_a_disk_with_errors_commits_nothing(tmp_path, number, operation, text, doing):
    folder = tmp_path / "checkpoints"
    checkpoints = saved(folder, 0, 6)
    checkpoints._system = Refuses(number, operation, text)
    checkpoints.save(checkpoint(12))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.wait()
    message = str(caught.value)
    assert message.startswith(f"cannot {doing} {folder}")
    full = number == errno.EDQUOT and ": the disk is full: it needs about " in message
    assert message.endswith(f": {os.strerror(number)}") or full
    assert text in message
    assert checkpoints.committed == 6
    # A complete checkpoint that was not announced may be found, if the disk has it after all.
    found = Checkpoints(folder).latest()
    assert same(found, checkpoint(found.progress.step)) and found.progress.step in (6, 12)
    assert not [name for name in names(folder) if name.startswith(".")]
    checkpoints.save(checkpoint(18))
    checkpoints.wait()
    assert same(Checkpoints(folder).latest(), checkpoint(18))
    assert len(checkpoints.steps()) == 3


def test_files_that_cannot_be_removed_are_reported_without_an_error(tmp_path):
    checkpoints = saved(tmp_path, 0, 6, keep_last=1)
    checkpoints._system = Refuses(errno.EIO, "unlink", "removed-step-000000000006")
    checkpoints.save(checkpoint(12))
    with pytest.raises(LeftoverError) as caught:
        checkpoints.wait()
    assert str(caught.value).startswith(
        "step 12 is saved, but old checkpoints were not removed: cannot remove "
        f"{tmp_path}/.partial-removed-step-000000000006-"
    )
    assert checkpoints.committed == 12
    assert same(Checkpoints(tmp_path).latest(), checkpoint(12))
    checkpoints.clean()
    assert names(tmp_path) == ["fixed", "step-000000000000", "step-000000000012"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_an_unwritable_folder_is_an_error_before_the_first_step(tmp_path, number):
    folder = tmp_path / "checkpoints"
    for operation, doing, path in (
        ("make_folder", "make the folder", f"{folder}:"),
        ("create_file", "write", f"{folder}/.partial-trial-"),
    ):
        with pytest.raises(CheckpointError) as caught:
            Checkpoints(folder, system=Refuses(number, operation)).clean()
        assert str(caught.value).startswith(f"cannot {doing} {path}")
        assert str(caught.value).endswith(f": {os.strerror(number)}")
    Checkpoints(folder).clean()
    assert names(folder) == []


def test_a_folder_that_is_removed_is_not_made_again(tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    checkpoints = saved(folder, 0)
    (tmp_path / "run").rename(tmp_path / "gone")
    checkpoints.save(checkpoint(6))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.wait()
    assert str(caught.value).startswith(f"cannot open the folder {folder.parent}")
    assert str(caught.value).endswith(": No such file or directory")
    assert names(tmp_path) == ["gone"]
