"""Equal runs leave equal directories, whether they were killed or not."""

import json
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import treadle
from tests.run.test_resume import bare_steps, fit_twice, run, source
from tests.run.test_resume_ends import by_epochs, by_steps
from tests.run_content import require_equal
from treadle.core.folder import FileSystem
from treadle.hooks import Checkpoint

CHANGING = ("create_file", "append", "replace", "truncate", "unlink", "make_folder", "remove_empty")


def calm() -> Any:
    """Wait for each checkpoint: otherwise the speed of the disk decides which ones are saved."""

    def settle(loop: Any) -> None:
        for hook in loop.services.hooks._hooks:
            if isinstance(hook, Checkpoint):
                hook.saved.settle()

    return treadle.every("1 step", settle)


class Copies:
    """Copies of a run directory before each operation that changes it, as a kill leaves it.

    Args:
        directory: The run directory.
        wanted: Which operations, by their number and the path that they change.
    """

    def __init__(self, directory: Path, wanted: Callable[[int, str], bool]) -> None:
        self.taken: list[Path] = []
        self.count, self._directory, self._wanted = 0, directory, wanted
        self._lock = threading.RLock()

    def perform(self, perform: Any) -> Any:
        def copying(system: FileSystem, operation: Any, *arguments: Any) -> Any:
            if operation.__name__ not in CHANGING or not self._directory.exists():
                return perform(system, operation, *arguments)
            with self._lock:  # checkpoints are written by another thread
                self.count += 1
                changed = f"{operation.__name__} {' '.join(map(str, arguments))}"
                if self._wanted(self.count, changed):
                    copy = self._directory.with_name(f"killed-{self.count}")
                    shutil.copytree(self._directory, copy)
                    self.taken.append(copy)
                return perform(system, operation, *arguments)

        return copying


def copies(body: Any, directory: Path, wanted: Callable[[int, str], bool], **how: Any) -> Copies:
    """Run without interruption, and copy the directory on the way."""
    found = Copies(directory, wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "perform", found.perform(FileSystem.perform))
        run(directory, body, hooks=[calm()], **how)
    return found


def spread(taken: list[Path], count: int = 9) -> list[Path]:
    """Some of the copies, evenly spread: resuming from each of more than 100 takes minutes."""
    return [taken[i * len(taken) // count] for i in range(count)]


# Without loops over `loop.epochs`: if one was killed after its last step, no source is left from
# which the hooks could start again, and the files that they write at the end are missing.
BODIES = {
    "epochs": (by_epochs, "3 steps"),  # the last step is the last of an epoch
    "due at the end": (by_epochs, "5 steps"),  # and a checkpoint is due there
    "steps": (by_steps, "3 steps"),  # the last step is due within an epoch
    "two calls": (fit_twice, "3 steps"),
    "own steps": (bare_steps, "7 steps"),
}


def check(tmp_path: Path, name: str, kills: int, seed: int = 0) -> None:
    """Kill a run before random operations, and compare what its resumption leaves."""
    body, every = BODIES[name]
    straight = tmp_path / "straight"
    how: Any = {"every": every, "options": treadle.Options(execution="eager")}
    count = copies(body, straight, lambda number, changed: False, **how).count
    # Most operations belong to the middle of the run: half of the kills hit its end.
    chance = random.Random(seed)
    chosen = {*chance.sample(range(1, count), kills // 2)}
    chosen |= {count - chance.randrange(count // 6) for _ in range(kills - len(chosen))}
    taken = copies(body, tmp_path / "run", lambda number, _: number in chosen, **how).taken
    require_equal(tmp_path / "run", straight)
    assert len(taken) > kills // 2
    for directory in taken:
        run(directory, body, hooks=[calm()], **how)
        require_equal(directory, straight)


def test_a_killed_run_leaves_the_files_of_an_uninterrupted_one(tmp_path: Path) -> None:
    check(tmp_path, "two calls", kills=2)


@pytest.mark.long
@pytest.mark.parametrize("name", BODIES)
def test_runs_killed_often_leave_equal_files(tmp_path: Path, name: str) -> None:
    check(tmp_path, name, kills=8, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("body", [by_steps, by_epochs])
@pytest.mark.parametrize("part", [0, 1])
def test_a_run_killed_around_its_last_checkpoint(tmp_path: Path, body: Any, part: int) -> None:
    """Before and after the folder of the last step gets its name, and while hooks end.

    One in three of the copies is resumed by default, and the others with `--all`.
    """
    last = 10 if body is by_epochs else 9
    name = f"step-{last:012d}"

    def around(number: int, changed: str) -> bool:
        return f"{name}-" in changed or f" {name}" in changed or "state.safetensors" in changed

    straight = tmp_path / "straight"
    taken = spread(copies(body, straight, around, every=f"{last} steps").taken)
    manifests = [json.loads(path.read_text()) for path in straight.rglob("manifest.json")]
    ran = [manifest["loop"]["execution"] for manifest in manifests]
    assert len(ran) == 2 and None in ran  # that of step 0 is saved before there is one
    for directory in (x for i, x in enumerate(taken) if min(i % 3, 1) == part):
        run(directory, body, hooks=[calm()], every=f"{last} steps")
        require_equal(directory, straight)


def test_a_changed_state_of_the_same_step_is_saved_again(tmp_path: Path) -> None:
    """Code after the last step may change variables: the final checkpoint contains them."""

    def changing(loop: treadle.Loop) -> None:
        for _ in loop.steps(source(), every="1 step"):
            pass
        loop.save()
        loop.save()  # equal: kept once
        names = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*5*"))
        assert len(names) == 1
        loop.task.error.total.assign(3.0)
        loop.save()
        [after] = sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*5*"))
        assert after > names[0]

    run(tmp_path, changing, every="1 h")
    found = treadle.checkpoint.Checkpoints(tmp_path / "checkpoints").latest()
    assert found is not None and found.state["error/total"] == 3.0
