"""Claims of this process on run directories, by device and inode.

A path may lead to another directory in the middle of a run, if one is renamed over it. So a run
claims its directory, and `Folder.open` compares what the path leads to with what it led to then.
"""

import os
from pathlib import Path
from weakref import WeakValueDictionary

from ..errors import DirectoryError

Identity = tuple[int, int]


class Claim:
    """The directory that a path led to when a run began; valid until it is released.

    Raises:
        DirectoryError: There is no such directory.

    Example:
        >>> claim = Claim(Path("."))
        >>> Claim.of(Path(".")) is claim
        True
        >>> claim.release()
        >>> Claim.of(Path(".")) is None
        True
    """

    def __init__(self, path: Path) -> None:
        try:
            self.path, self._identity = path, identity_of(path)
        except OSError as error:
            raise gone(path) from error
        _claims[path] = self

    def release(self) -> None:
        """End the claim.

        Without this, a traceback that holds the object would keep the claim for the rest of the
        process.
        """
        if _claims.get(self.path) is self:
            del _claims[self.path]

    @staticmethod
    def of(path: Path) -> "Claim | None":
        """Return the claim of this process on a directory, or None."""
        return _claims.get(path)

    def check(self, opened: int | Path) -> None:
        """Check that an open directory, or what a path leads to, is the claimed one.

        Raises:
            DirectoryError: It is another one, or there is none.
        """
        try:
            found = identity_of(opened)
        except OSError as error:
            raise gone(self.path) from error
        if found != self._identity:
            raise DirectoryError(
                f"the run directory {self.path} was replaced by another one while the run trained "
                "into it. Nothing was changed in that one: put the run's own directory back in its "
                "place, and run the script again to resume"
            )


_claims: WeakValueDictionary[Path, Claim] = WeakValueDictionary()


def identity_of(opened: int | Path) -> Identity:
    """Return the device and the inode of a file or a directory."""
    found = os.stat(opened)
    return found.st_dev, found.st_ino


def gone(directory: Path) -> DirectoryError:
    """Return the error that a run directory is not in its place any more."""
    return DirectoryError(
        f"the run directory {directory} is gone: it was removed or renamed while the run trained "
        "into it, or its disk was removed. Nothing more can be saved there: put it back, and run "
        "the script again to resume; or run the script again to start from scratch"
    )
