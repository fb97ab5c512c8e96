"""The checkpoints of one run: writing in a background thread, retention, removal and lookup."""

import os
import sys
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..core.folder import FileSystem, Folder, partial
from ..errors import CheckpointError
from .format import FIXED, Draft, Name, SavedState, is_written, split_arrays, write
from .manifest import UnknownFormatError, read_manifest
from .parts import check_count, raise_faults, received_reports, send_report, write_own_parts
from .reading import read
from .retention import Retention, names_in, remove_partial


class Checkpoints:
    """The checkpoints of a run, in one folder.

    Step 0, the newest checkpoints, and those selected by `keep_every` and `keep_best` are kept. The
    oldest checkpoint is removed after a new one is on disk; with `keep_last=2`, at most four states
    are on disk at a time. If a run rolls back to an earlier step and saves again, checkpoints of
    later steps are removed before, but never the newest one that is known to be readable. A step is
    not written again if its newest checkpoint is equal.

    Only one process writes at a time, which the lock of the run ensures. Checkpoints are ordered by
    step, not by file times. The folder may be moved between runs. It must not be a symbolic link.

    Attributes:
        committed: The newest step that this object saved and synced to disk, so that it survives a
            power cut; None if there is none.
        rejected: The folder and reason of each checkpoint that `latest`, `before` or `best`
            skipped.

    Args:
        folder: The folder; created when it is first needed.
        keep_last: The number of newest checkpoints to keep, in addition to step 0.
        keep_every: Keep the checkpoints whose step is a multiple of this number.
        keep_best: The number of best checkpoints to keep, by `about["score"]`.
        direction: Whether the smallest or the largest score is best.
        system: Performs the file system operations.

    Raises:
        ConfigurationError: If an argument is invalid.

    Example:
        >>> from treadle.core.progress import Progress
        >>> checkpoints = Checkpoints(Path("runs/1/checkpoints"))
        >>> checkpoints.save(SavedState(Progress(step=12), {}))
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
        system: FileSystem | None = None,
    ) -> None:
        self._path = folder
        self._kept = Retention(keep_last, keep_every, keep_best, direction)
        self._system = system or FileSystem()
        self.committed: int | None = None
        self.rejected: list[tuple[str, str]] = []
        self._whole: set[str] = set()  # names of validated shared files
        self._folder_made = False
        # The interpreter waits for this thread at exit; an idle thread does not delay it.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="treadle-checkpoint")
        self._pending: list[Future[None]] = []
        weakref.finalize(self, _print_unraised, self._pending)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return bool(self._pending) and not self._pending[-1].done()

    def save(self, checkpoint: SavedState, temporary: str | None = None) -> bool:
        """Start writing a checkpoint in the background thread.

        Args:
            checkpoint: The checkpoint. The arrays of its state must not change until `busy` is
                False.
            temporary: The name on which the processes have agreed, if all of them write; the others
                call `save_parts`.

        Returns:
            False if the previous checkpoint is still being written; nothing is saved then.

        Raises:
            CheckpointError: If writing the previous checkpoint failed, as in `check`, or if arrays
                are cut into too many parts, for all processes.
        """
        if self.busy:
            return False
        self.check()
        check_count(split_arrays(checkpoint))
        try:
            draft = Draft(checkpoint, temporary)
        except CheckpointError as error:  # `check` reports it like an error of the thread
            if temporary is not None:
                self._start(self._discard, temporary, error)
                return True
            failed: Future[None] = Future()
            failed.set_exception(error)
            self._pending.append(failed)
            return True
        self._start(self._write, draft)
        return True

    def save_parts(self, checkpoint: SavedState, temporary: str) -> None:
        """Start writing this process's parts of a checkpoint that the chief saves.

        A failure is reported to the chief, whose save then fails.

        Args:
            checkpoint: The checkpoint, of which only the `OwnParts` are written.
            temporary: The name on which the processes have agreed.

        Raises:
            CheckpointError: If arrays are cut into too many parts, for all processes.
        """
        self.check()
        split = split_arrays(checkpoint)
        check_count(split)
        self._start(self._write_parts, split, temporary)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run a function in the background thread, or here if the interpreter is shutting down."""
        try:
            self._pending.append(self._writer.submit(work, *arguments))
            return
        except RuntimeError:  # no thread starts while the interpreter shuts down
            done: Future[None] = Future()
        try:
            done.set_result(work(*arguments))
        except Exception as error:
            done.set_exception(error)
        self._pending.append(done)

    def check(self) -> None:
        """Raise the error of the last finished save, once. Does not wait.

        Raises:
            CheckpointError: If the checkpoint was not written; earlier checkpoints are unchanged.
            LeftoverError: If it was written, but an old checkpoint could not be removed.
        """
        if self._pending and self._pending[0].done():
            self._pending.pop().result()

    def settle(self) -> None:
        """Wait until nothing is being written. Does not raise errors; call `check` for these."""
        wait(self._pending)

    def wait(self) -> None:
        """Wait until the last checkpoint is on disk.

        Raises:
            CheckpointError: If writing it failed, as in `check`.
        """
        self.settle()
        self.check()

    def clean(self) -> None:
        """Create the folder, and remove files of incomplete saves. Requires the lock of the run.

        Raises:
            CheckpointError: If the folder cannot be created or written to, or if files in it cannot
                be removed.
        """
        self.settle()
        with self._opened_to_write() as folder:
            # A trial write detects a folder that is not writable before the first step.
            folder.create(partial("trial"), [])
            remove_partial(folder)
            if folder.is_folder(FIXED):
                with folder.subfolder(FIXED) as fixed:
                    remove_partial(fixed)
            self._kept.remove_unshared(folder)

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, including damaged ones."""
        self.settle()
        with self._opened() as folder:
            return sorted({name.step for name in names_in(folder)})

    def hook_states(self) -> dict[int, Mapping[str, Any]]:
        """Return the states of hooks, without arrays, of each step whose manifest can be read."""
        self.settle()
        with self._opened() as folder:
            known = {} if folder is None else self._kept.known(folder, names_in(folder))
        return {name.step: manifest.sections["hooks"] for name, manifest in known.items()}

    def latest(self, together: bool = False) -> SavedState | None:
        """Return the newest valid checkpoint, or None if none was saved.

        Args:
            together: Whether several processes call this at the same point. Then they return one
                checkpoint, which is valid for all; see `read`.

        Raises:
            CheckpointError: If all checkpoints are damaged, or a newer version of Treadle wrote
                the newest one.
        """
        return self._first_valid(lambda _, names: names[::-1], "any checkpoint", together)

    def before(self, step: int) -> SavedState | None:
        """Return the newest valid checkpoint at or before a step, or None if there is none.

        Raises:
            CheckpointError: If all checkpoints up to this step are damaged.
        """
        return self._first_valid(
            lambda _, names: [name for name in names[::-1] if name.step <= step],
            f"any checkpoint at or before step {step}",
        )

    def best(self) -> SavedState | None:
        """Return the valid checkpoint with the best score, or None if none has a score.

        Raises:
            CheckpointError: If all checkpoints with a score are damaged.
        """
        return self._first_valid(self._kept.ranked, "any checkpoint with a score")

    @contextmanager
    def _opened(self) -> Generator[Folder | None]:
        """Open the folder for reading; yield None if it does not exist."""
        if not os.path.lexists(self._path):
            yield None
            return
        with (
            Folder.open(self._path.parent, False, CheckpointError, self._system) as directory,
            directory.subfolder(self._path.name) as folder,
        ):
            yield folder

    @contextmanager
    def _opened_to_write(self) -> Generator[Folder]:
        """Open the folder for writing; create it the first time."""
        # Only once: if the folder is removed during the run, that is an error.
        create = not self._folder_made
        with (
            Folder.open(self._path.parent, create, CheckpointError, self._system) as directory,
            directory.subfolder(self._path.name, create) as folder,
        ):
            self._folder_made = True
            yield folder

    def _first_valid(
        self,
        choose: Callable[[Folder, list[Name]], Iterable[Name]],
        what: str,
        together: bool = False,
    ) -> SavedState | None:
        self.settle()
        self.rejected = []
        with self._opened() as folder:
            if folder is None:
                return None
            for name in choose(folder, names_in(folder)):
                try:
                    found = _read_together(folder, name) if together else _read(folder, name)
                except UnknownFormatError:
                    raise  # resuming from an older checkpoint would discard work of a newer Treadle
                except CheckpointError as error:
                    if not together and name not in names_in(folder):
                        # A process that trains saved a newer one, and removed this one.
                        return self._first_valid(choose, what)
                    self.rejected.append((str(name), str(error)))
                    self._kept.damaged.add(name)
                else:
                    self._kept.readable.add(name)
                    return found
        if self.rejected:
            reasons = "; ".join(reason for _, reason in self.rejected)
            raise CheckpointError(
                f"cannot read {what} of {self._path}: {reasons}. Nothing was changed: restore a "
                "copy of the files, or start from scratch in another run directory"
            )
        return None

    def _write_parts(self, split: Mapping[str, Any], temporary: str) -> None:
        report: dict[str, Any]
        try:
            with (
                self._opened_to_write() as folder,
                folder.subfolder(temporary, create=True) as files,
            ):
                report = write_own_parts(files, split)
        except CheckpointError as error:
            report = {"fault": str(error)}
        send_report(report, temporary)

    def _write(self, draft: Draft) -> None:
        try:
            self._write_draft(draft)
        except CheckpointError as error:
            if draft.temporary is None or draft.reported:
                raise
            self._discard(draft.temporary, error)

    def _discard(self, temporary: str, error: CheckpointError) -> NoReturn:
        """Remove the parts that other processes write of a checkpoint that this one cannot save.

        Raises:
            CheckpointError: The error.
        """
        received_reports(temporary)  # until then, they may be writing
        with suppress(CheckpointError), self._opened_to_write() as folder:
            folder.remove_folder(temporary)
        raise error

    def _write_draft(self, draft: Draft) -> None:
        with self._opened_to_write() as folder:
            of_step = [name for name in names_in(folder) if name.step == draft.step]
            name = of_step[-1] if of_step else None
            if draft.split:  # the others write at the same time: compared when all have written
                saved = name if name in self._kept.readable else None
                if saved is None:
                    self._kept.make_room(folder, draft.step)
                name = Name.parse(write(folder, draft, self._whole, saved))
            elif name is not None and self._is_saved(folder, draft, name):
                folder.sync()  # a killed run may have renamed it without syncing the folder
            else:
                self._kept.make_room(folder, draft.step)
                name = Name.parse(write(folder, draft, self._whole))
            assert name
            # Reading it back ensures that it can be read before it counts as saved; the retention
            # rules use the cached manifest.
            self._kept.found(name, read_manifest(folder, str(name)))
            self._kept.remove_old(folder, draft.step, self._commit)

    def _commit(self, step: int) -> None:
        self.committed = step

    def _is_saved(self, folder: Folder, draft: Draft, name: Name) -> bool:
        """Return whether a readable checkpoint equals a draft."""
        try:
            if not is_written(folder, draft, name):
                return False
            if name not in self._kept.readable:
                read(folder, str(name))
        except (CheckpointError, ValueError, LookupError, TypeError, AttributeError):
            return False  # it is damaged
        return True


def _read(folder: Folder, name: Name, together: bool = False) -> SavedState:
    """Read a checkpoint, which must hold the step in its name."""
    found = read(folder, str(name), together)
    if found.progress.step != name.step:
        raise CheckpointError(f"{folder.path / str(name)} holds step {found.progress.step}")
    return found


def _read_together(folder: Folder, name: Name) -> SavedState:
    """Read a checkpoint in all processes, of which each verifies a part; all fail if one does."""
    found, fault = None, None
    try:
        found = _read(folder, name, together=True)
    except UnknownFormatError:
        raise
    except CheckpointError as error:
        fault = str(error)
    raise_faults(fault, f"verifying checkpoint {name}")
    assert found is not None
    return found


def _print_unraised(pending: list[Future[None]]) -> None:
    """Print errors of the background thread that were not raised before the process ends."""
    for future in pending:
        error = future.exception() if future.done() else None
        if error is not None:
            print(f"treadle: a checkpoint was not saved: {error}", file=sys.stderr)
