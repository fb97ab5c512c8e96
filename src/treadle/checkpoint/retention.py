"""Which checkpoints of a run are kept, and the removal of others, and of no other files."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from ..core.folder import PARTIAL, Folder, partial
from ..errors import CheckpointError, ConfigurationError, whole_number, whole_number_or_none
from .arrays import SUFFIX
from .format import FIXED, Name
from .manifest import Manifest, read_manifest

SHARED = re.compile(rf"[0-9a-f]{{64}}{re.escape(SUFFIX)}")


class LeftoverError(CheckpointError):
    """A checkpoint was saved, but old checkpoints could not be removed."""


class Retention:
    """The checkpoints to keep, and what is known of those on disk.

    Step 0, the newest checkpoints, and those selected by `every` and `best` are kept.

    Attributes:
        readable: The checkpoints that are known to be valid.
        damaged: Those that are known not to be.
        manifests: Those that were read, so that saving does not read them each time.

    Args:
        last: The number of newest checkpoints to keep, in addition to step 0.
        every: Keep the checkpoints whose step is a multiple of this number.
        best: The number of best checkpoints to keep, by `about["score"]`.
        direction: Whether the smallest or the largest score is best.

    Raises:
        ConfigurationError: If an argument is invalid.
    """

    def __init__(
        self, last: int, every: int | None, best: int, direction: Literal["min", "max"]
    ) -> None:
        if direction not in ("min", "max"):
            raise ConfigurationError(f"direction must be 'min' or 'max', not {direction!r}")
        self._last = whole_number("keep_last", last, ConfigurationError)
        self._every = whole_number_or_none("keep_every", every, ConfigurationError)
        self._best = best and whole_number("keep_best", best, ConfigurationError)
        self._sign = 1 if direction == "min" else -1
        self.readable: set[Name] = set()
        self.damaged: set[Name] = set()
        self.manifests: dict[Name, Manifest] = {}

    def found(self, name: Name, manifest: Manifest) -> None:
        """Note that a checkpoint was written and read back."""
        self.manifests[name] = manifest
        self.damaged.discard(name)
        self.readable.add(name)

    def remove_old(self, folder: Folder, step: int, committed: Callable[[int], None]) -> None:
        """Remove the checkpoints that are not kept, after a run has saved `step`.

        Args:
            folder: The folder of the checkpoints.
            step: The step.
            committed: Called when a run would resume from this step.

        Raises:
            LeftoverError: They could not be removed.
        """
        try:
            # Later steps are removed first, since they would be read as the newest checkpoint.
            self._remove(folder, [other for other in names_in(folder) if other.step > step])
            committed(step)
            self._remove_all_but(folder, self._kept_at(folder, step, self._last))
            self.remove_unshared(folder)
        except CheckpointError as error:
            raise LeftoverError(
                f"step {step} is saved, but old checkpoints were not removed: {error}"
            ) from error

    def make_room(self, folder: Folder, step: int) -> None:
        """Remove checkpoints that no rule keeps, if a readable one remains.

        The newest ones are kept until the new one is on disk, which may be full.
        """
        safe = [name for name in names_in(folder) if name in self.readable]
        if safe:
            # If the run rolled back to its start, this is the newest of the later checkpoints.
            fallback = max([name for name in safe if 0 < name.step <= step] or safe)
            kept = self._kept_at(folder, step, self._last)
            self._remove_all_but(folder, {*kept, fallback})

    def _kept_at(self, folder: Folder, step: int, last: int) -> set[Name]:
        """Return the checkpoints to keep when a run is at `step`, with the `last` newest ones."""
        names = [n for n in names_in(folder) if n.step <= step and n not in self.damaged]
        newest = list({name.step: name for name in names}.values())  # the last one of each step
        kept = {name for name in newest if name.step == 0}
        kept |= set([name for name in newest if name.step][-last:])
        if self._every:
            kept |= {name for name in newest if name.step % self._every == 0}
        if self._best:
            kept |= set(self.ranked(folder, names)[: self._best])
        return kept

    def ranked(self, folder: Folder, names: Iterable[Name]) -> list[Name]:
        """Return the checkpoints with a score, best first; with equal scores, the earlier first.

        Of several of one step, it is the last one with a score.
        """
        known = self.known(folder, sorted(names))
        scores = {
            name.step: (self._sign * manifest.score, name)
            for name, manifest in known.items()
            if manifest.score is not None
        }
        return [name for _, name in sorted(scores.values())]

    def known(self, folder: Folder, names: Iterable[Name]) -> Mapping[Name, Manifest]:
        """Return the manifests of the checkpoints that can be read."""
        found: dict[Name, Manifest] = {}
        for name in names:
            try:
                if name not in self.manifests:
                    self.manifests[name] = read_manifest(folder, str(name))
                found[name] = self.manifests[name]
            except CheckpointError:
                continue
        return found

    def _remove_all_but(self, folder: Folder, kept: set[Name]) -> None:
        self._remove(folder, [name for name in names_in(folder) if name not in kept])

    def _remove(self, folder: Folder, gone: Iterable[Name]) -> None:
        away: list[str] = []
        for name in gone:
            away.append(partial(f"removed-{name}"))
            folder.rename(str(name), away[-1])
            self.manifests.pop(name, None)
            self.readable.discard(name)
            self.damaged.discard(name)
        if away:
            # Sync the renaming before removing contents, so that a partially removed checkpoint
            # never has a valid name.
            folder.sync()
        for name in away:
            folder.remove_folder(name)

    def remove_unshared(self, folder: Folder) -> None:
        """Remove shared files of constant arrays that no checkpoint references."""
        if not folder.is_folder(FIXED):
            return
        with folder.subfolder(FIXED) as place:
            files = [name for name in place.names() if SHARED.fullmatch(name)]
            if not files:
                return
            names = names_in(folder)
            known = self.known(folder, names)
            if len(known) < len(names):  # the references of a damaged checkpoint are unknown
                return
            needed = {manifest.fixed for manifest in known.values()}
            for name in files:
                if name not in needed:
                    place.remove_file(name)


def names_in(folder: Folder | None) -> list[Name]:
    """Return the names of all checkpoints in a folder, in order."""
    names = (Name.parse(name) for name in (folder.names() if folder is not None else ()))
    return sorted(name for name in names if name)


def remove_partial(folder: Folder) -> None:
    """Remove the files and folders of incomplete saves."""
    for name in folder.names():
        if name.startswith(PARTIAL):
            folder.remove_folder(name)


def remove_checkpoints(directory: Folder, name: str) -> None:
    """Remove all checkpoints in a folder, and the folder if nothing else is in it.

    A link is left alone: what it points to may belong to another run. The folder is renamed first:
    if the process is killed meanwhile, no run resumes from the checkpoints that are left.
    """
    if not directory.is_folder(name):
        return
    hidden = name if name.startswith(PARTIAL) else partial(name)
    if hidden != name:
        directory.rename(name, hidden)
    with directory.subfolder(hidden) as folder:
        for found in folder.names():
            if found.startswith(PARTIAL) or (Name.parse(found) and folder.is_folder(found)):
                folder.remove_folder(found)
        if folder.is_folder(FIXED):
            with folder.subfolder(FIXED) as fixed:
                for found in fixed.names():
                    if found.startswith(PARTIAL) or SHARED.fullmatch(found):
                        fixed.remove_folder(found)
                is_empty = not fixed.names()
            if is_empty:
                folder.remove_empty_folder(FIXED)
        is_empty = not folder.names()
    if is_empty:
        directory.remove_empty_folder(hidden)
    elif hidden != name:
        directory.rename(hidden, name)
