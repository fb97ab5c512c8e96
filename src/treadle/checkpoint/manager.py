"""The checkpoints of one run: written in a thread of their own, kept, removed, and found again."""

import sys
import weakref
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Literal

from ..errors import CheckpointError, ConfigurationError, whole_number
from .files import Files
from .format import FIXED, PARTIAL, Checkpoint, Draft, Name, partial, write
from .reading import Manifest, UnknownFormatError, read, read_manifest


class LeftoverError(CheckpointError):
    """A checkpoint was saved, and what it replaces could not be removed."""


class Checkpoints:
    """What a run saved, in one folder.

    Kept are step 0, the newest, and what `keep_every` and `keep_best` ask for. The oldest goes
    before a new one is written, but never the newest that is known to be readable: so with
    `keep_last=2` there are never more than three states on the disk. A run that went back to an
    earlier step and saves again leaves what came later: it is removed.

    One process writes at a time; the run's lock sees to that. Order is that of steps, whatever
    clocks say, and the folder may be moved between runs.

    Attributes:
        committed: The newest step that this object saved and that is on the disk, power cut or
            not; None where there is none.
        rejected: Folder and reason for those that `latest`, `before` or `best` passed over.

    Args:
        folder: Made when it is first needed.
        keep_last: How many of the newest are kept, beside step 0.
        keep_every: Keep those of every so many steps.
        keep_best: How many of the best are kept, by `about["score"]`.
        direction: Whether the smallest or the largest score is best.
        files: The file system.

    Raises:
        ConfigurationError: A number that cannot be meant.

    Example:
        >>> from treadle.core.progress import Progress
        >>> checkpoints = Checkpoints(Path("runs/1/checkpoints"))
        >>> checkpoints.save(Checkpoint(Progress(step=12), {}))
        True
        >>> checkpoints.wait()
        >>> checkpoints.latest().progress.step
        12
    """

    def __init__(
        self,
        folder: Path,
        keep_last: int = 2,
        keep_every: int | None = None,
        keep_best: int = 0,
        direction: Literal["min", "max"] = "min",
        files: Files | None = None,
    ) -> None:
        if direction not in ("min", "max"):
            raise ConfigurationError(f"direction must be 'min' or 'max', not {direction!r}")
        self._folder = folder
        self._last = whole_number("keep_last", keep_last, ConfigurationError)
        self._every = keep_every
        if keep_every is not None:
            self._every = whole_number("keep_every", keep_every, ConfigurationError)
        self._best = keep_best and whole_number("keep_best", keep_best, ConfigurationError)
        self._sign = 1 if direction == "min" else -1
        self._files = files or Files()
        self.committed: int | None = None
        self.rejected: list[tuple[str, str]] = []
        # What is known of what lies on the disk, so that nothing is read at every save.
        self._readable: set[Name] = set()
        self._damaged: set[Name] = set()
        self._manifests: dict[Name, Manifest] = {}
        self._whole: set[str] = set()  # of the shared files
        self._folder_made = False
        # The interpreter waits for such a thread at its end, and an idle one does not hold it up.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="treadle-checkpoint")
        self._pending: list[Future[None]] = []
        weakref.finalize(self, _tell_unseen, self._pending)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return any(not future.done() for future in self._pending)

    def save(self, checkpoint: Checkpoint) -> bool:
        """Hand a checkpoint to the writer.

        Args:
            checkpoint: The arrays of its state must not change until `busy` is False.

        Returns:
            False where the one before is still being written, and nothing was done.

        Raises:
            CheckpointError: What went wrong in the writer before, as `check` does.
        """
        if self.busy:
            return False
        self.check()
        try:
            draft = Draft(checkpoint)
        except CheckpointError as error:  # told as what goes wrong in the writer is
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._pending.append(failed)
            return True
        self._pending.append(self._writer.submit(self._write, draft))
        return True

    def check(self) -> None:
        """Raise what went wrong in the writer, once; does not wait.

        Raises:
            CheckpointError: A checkpoint was not written; those before are as they were.
            LeftoverError: It was, and an old one could not be removed.
        """
        if self._pending and self._pending[0].done():
            self._pending.pop().result()

    def settle(self) -> None:
        """Wait until nothing is being written, whatever came of it; `check` tells."""
        wait(self._pending)

    def wait(self) -> None:
        """Wait until what was handed over is on the disk.

        Raises:
            CheckpointError: As `check` does.
        """
        self.settle()
        self.check()

    def clean(self) -> None:
        """Make the folder, and remove what torn saves left in it; only with the run's lock.

        Raises:
            CheckpointError: The folder cannot be made or written to, or something in it not be
                removed.
        """
        self.settle()
        self._make_folder()
        # Where nothing can be written here, it is better known before the first step.
        self._files.write(self._folder / partial("trial"), [], 0)
        for place in (self._folder, self._folder / FIXED):
            for name in self._files.names(place):
                if name.startswith(PARTIAL):
                    if self._files.is_folder(place / name):
                        self._files.remove_folder(place / name)
                    else:
                        self._files.remove_file(place / name)
        self._remove_unshared()

    def steps(self) -> list[int]:
        """Return the steps that there are checkpoints of, damaged ones included."""
        self.settle()
        return sorted({name.step for name in self._names()})

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole; None where none was ever saved.

        Raises:
            CheckpointError: There are some, and every one is damaged; or a newer Treadle wrote it.
        """
        self.settle()
        return self._first_whole(self._names()[::-1], "any checkpoint")

    def before(self, step: int) -> Checkpoint | None:
        """Return the newest checkpoint at or before a step that is whole; None without one.

        Raises:
            CheckpointError: There are some, and every one is damaged.
        """
        self.settle()
        names = [name for name in self._names()[::-1] if name.step <= step]
        return self._first_whole(names, f"any checkpoint at or before step {step}")

    def best(self) -> Checkpoint | None:
        """Return the checkpoint with the best score that is whole; None where none has a score.

        Raises:
            CheckpointError: There are some, and every one is damaged.
        """
        self.settle()
        ranked = self._ranked(_newest_of_each_step(self._names()))
        return self._first_whole(ranked, "any checkpoint with a score")

    def _names(self) -> list[Name]:
        """Return what has a checkpoint's name, in order."""
        names = (Name.parse(name) for name in self._files.names(self._folder))
        return sorted(name for name in names if name)

    def _first_whole(self, names: Iterable[Name], what: str) -> Checkpoint | None:
        self.rejected = []
        for name in names:
            folder = self._folder / str(name)
            try:
                found = read(folder, self._files)
                if found.progress.step != name.step:
                    raise CheckpointError(f"{folder} holds step {found.progress.step}")
            except UnknownFormatError:
                raise  # to go on from an older one would lose what a newer Treadle has done
            except CheckpointError as error:
                self.rejected.append((str(name), str(error)))
                self._damaged.add(name)
            else:
                self._readable.add(name)
                return found
        if self.rejected:
            reasons = "; ".join(reason for _, reason in self.rejected)
            raise CheckpointError(
                f"cannot read {what} of {self._folder}: {reasons}. Nothing was changed: put a copy "
                "back in place, or start anew in another run directory"
            )
        return None

    def _write(self, draft: Draft) -> None:
        step = draft.step
        self._make_folder()
        self._make_room(step)
        folder = write(self._folder, draft, self._files, self._whole)
        name = Name.parse(folder.name)
        assert name
        # What cannot be read is not told of as saved, and remembered for what is kept.
        self._manifests[name] = read_manifest(folder, self._files)
        self._damaged.discard(name)
        self._readable.add(name)
        try:
            # Until what came later is gone it would be taken for the newest.
            self._remove([other for other in self._names() if other.step > step])
            self.committed = step
            self._remove_all_but(self._worth_keeping(step, self._last))
            self._remove_unshared()
        except CheckpointError as error:
            raise LeftoverError(
                f"step {step} is saved, but what it replaces is still there: {error}"
            ) from error

    def _make_folder(self) -> None:
        # Once: a folder that is removed while the run goes on is an error, not made again.
        if not self._folder_made:
            self._files.make_folder(self._folder)
            self._folder_made = True

    def _make_room(self, step: int) -> None:
        """Remove what will not be kept beside a new checkpoint, if there is one to fall back on."""
        safe = [name for name in self._names() if name in self._readable]
        if safe:
            # Where the run went back to its start, the newest of what it leaves.
            fallback = max([name for name in safe if 0 < name.step <= step] or safe)
            self._remove_all_but({*self._worth_keeping(step, max(self._last - 1, 1)), fallback})

    def _worth_keeping(self, step: int, last: int) -> set[Name]:
        """Return what is to be kept when a run stands at `step`, `last` of the newest among it."""
        names = [name for name in self._names() if name.step <= step and name not in self._damaged]
        newest = _newest_of_each_step(names)
        kept = {name for name in newest if name.step == 0}
        kept |= set([name for name in newest if name.step][-last:])
        if self._every:
            kept |= {name for name in newest if name.step % self._every == 0}
        if self._best:
            kept |= set(self._ranked(newest)[: self._best])
        return kept

    def _ranked(self, names: Iterable[Name]) -> list[Name]:
        """Return those that have a score, the best first, of equal ones the earlier first."""
        scores = [(manifest.score, name) for name, manifest in self._known(names).items()]
        return [name for _, name in sorted((self._sign * s, n) for s, n in scores if s is not None)]

    def _known(self, names: Iterable[Name]) -> Mapping[Name, Manifest]:
        """Return the manifests of those that can be read."""
        found: dict[Name, Manifest] = {}
        for name in names:
            try:
                if name not in self._manifests:
                    self._manifests[name] = read_manifest(self._folder / str(name), self._files)
                found[name] = self._manifests[name]
            except CheckpointError:
                continue
        return found

    def _remove_all_but(self, kept: set[Name]) -> None:
        self._remove([name for name in self._names() if name not in kept])

    def _remove(self, gone: Iterable[Name]) -> None:
        away: list[Path] = []
        for name in gone:
            away.append(self._folder / partial(f"removed-{name}"))
            self._files.rename(self._folder / str(name), away[-1])
            self._manifests.pop(name, None)
            self._readable.discard(name)
            self._damaged.discard(name)
        if away:
            # The names go for good before the contents do: no half checkpoint has its name.
            self._files.sync_folder(self._folder)
        for folder in away:
            self._files.remove_folder(folder)

    def _remove_unshared(self) -> None:
        """Remove the files of unchanging arrays that no checkpoint names."""
        place = self._folder / FIXED
        files = [name for name in self._files.names(place) if name.endswith(".npz")]
        if not files:
            return
        names = self._names()
        known = self._known(names)
        if len(known) < len(names):  # what a damaged one names is not known
            return
        needed = {manifest.fixed for manifest in known.values()}
        for name in files:
            if name not in needed:
                self._files.remove_file(place / name)


def _newest_of_each_step(names: Iterable[Name]) -> list[Name]:
    return list({name.step: name for name in sorted(names)}.values())


def _tell_unseen(pending: list[Future[None]]) -> None:
    """Tell, at the end of the process, what went wrong in the writer and nobody asked for."""
    for future in pending:
        error = future.exception() if future.done() else None
        if error is not None:
            print(f"treadle: a checkpoint was not saved: {error}", file=sys.stderr)
