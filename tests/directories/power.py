"""Cut the power of a run at any operation on its files, and resume what the disk then holds.

What was not synced may be lost, cut, or filled with zeros: the content of a file until the file is
synced, its name until its folder is. See `tests.faults.Disk`.
"""

import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import keras

import treadle
from tests.faults import Disk, Recording
from treadle.checkpoint import Checkpoints
from treadle.core.folder import FileSystem, Folder
from treadle.hooks import final

from .compared import contents
from .tiny_task import Tiny

MOST_LOSSES = 3  # in one run


@dataclass
class Shot:
    """A run that lost power, and what is wrong with what came of it.

    Attributes:
        number: The number from which everything else is drawn.
        losses: The last operation before each loss of power.
        faults: What is wrong, as short sentences.
        answer: "equal".
        message: What the run said about the files that it found.
    """

    number: int
    losses: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    answer: str = "equal"
    message: str = ""


class PowerLosses:
    """Runs that lose power, each compared with one that did not.

    Args:
        root: An empty folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._log = self._recorded(root / "whole")
        self.expected = self._result(root / "whole")

    def run(self, seed: int, number: int) -> Shot:
        """Let a run lose power up to three times, resume it, and compare the results."""
        chance, shot = Random(f"{seed} {number}"), Shot(number)
        log, before = self._log, None
        losses = chance.choice((1, 1, 2, MOST_LOSSES))
        folder = self._root / "shot"
        for loss in range(losses):
            after = self._root / f"after-{loss}"
            shutil.rmtree(after, ignore_errors=True)
            at = chance.randint(1, max(len(log), 1))
            _lose(log[:at], before, folder if loss else self._root / "whole", after, chance)
            shot.losses.append(_shown(log[at - 1], self._root) if log else "nothing")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(after, folder)
            before = after
            try:
                log = self._recorded(folder)
            except Exception as error:
                shot.faults.append(f"{type(error).__name__}: {error}")
                return shot
        found = self._result(folder)
        names = [n for n in {**self.expected, **found} if found.get(n) != self.expected.get(n)]
        shot.faults += [f"{name} differs" for name in names]
        return shot

    def _recorded(self, root: Path) -> list[Any]:
        """Run the program, and return all operations on the files in a folder."""
        files = Recording()
        root.mkdir(exist_ok=True)
        with _patched(files):
            self.loop = train(root / "run")
        return [done for done in files.log if done[1].is_relative_to(root)]

    def _result(self, root: Path) -> dict[str, Any]:
        history = {name: list(map(repr, self.loop.history[name])) for name in ("loss", "val_loss")}
        return {**contents(root / "run"), "the history": history}


def train(directory: Path) -> treadle.Loop:
    """Train the tiny task in two calls, as a script does that always is the same."""
    keras.utils.clear_session(free_memory=False)
    treadle.setup(seed=0)
    task = Tiny()
    data, options = task.datasets(), treadle.Options(execution="eager")
    with treadle.Loop(task, directory, hooks=task.hooks(), options=options, console=False) as loop:
        loop.fit(data.train, data.validation, epochs=3)
        loop.fit(data.train, data.validation, steps=5)
    return loop


@contextmanager
def _patched(files: Recording) -> Generator[None]:
    """Record all operations, save each checkpoint that is due, and draw no curves."""
    perform, save, draw = FileSystem.perform, Checkpoints.save, final.draw

    def saved(checkpoints: Checkpoints, *args: Any) -> bool:
        checkpoints.settle()  # else one is omitted while the one before is written
        return save(checkpoints, *args)

    def drawn(history: Any, path: Path) -> None:
        with Folder.open(path.parent) as folder:
            folder.write(path.name, [b"a picture"])

    FileSystem.perform = lambda _, *done: files.perform(*done)  # type: ignore[method-assign]
    Checkpoints.save, final.draw = saved, drawn  # type: ignore[method-assign]
    try:
        yield
    finally:
        FileSystem.perform, Checkpoints.save = perform, save
        final.draw = draw


def _lose(log: list[Any], before: Path | None, root: Path, after: Path, chance: Random) -> None:
    """Write what a disk holds after a loss of power.

    Args:
        log: The operations before it.
        before: What the disk held before them; None for nothing.
        root: The folder in which they were done.
        after: The folder to write.
        chance: Draws what becomes of everything that was not synced.
    """
    disk = Disk(root)
    if before is not None:
        disk.load(before)
    for name, *arguments in log:
        disk.do(name, *arguments)
    likely = chance.choice((0.0, 0.1, 0.5, 0.9))  # that something unsafe is there

    def choose(kind: int) -> bool | Callable[[bytes, bytes], bytes]:
        if kind == 0 or chance.random() < 0.4:
            return chance.random() < likely
        return lambda safe, now: _torn(safe, now, chance)

    disk.lay_out(after, choose)


def _torn(safe: bytes, now: bytes, chance: Random) -> bytes:
    """Cut what was written after the last sync, or fill it with zeros."""
    pairs = enumerate(zip(safe, now, strict=False))
    # Not all of the safe content: a file may also have been shortened.
    kept = next((i for i, (one, other) in pairs if one != other), min(len(safe), len(now)))
    end = chance.randint(kept, len(now))
    zeros = chance.choice((0, len(now) - end, len(now) - kept))
    return now[: len(now) - zeros] + bytes(zeros) if zeros else now[:end]


def _shown(operation: Any, root: Path) -> str:
    name, path, *_ = operation
    return f"{name} {path.relative_to(root)}"
