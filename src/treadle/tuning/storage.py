"""The directory of a search: its lock, its SQLite database, and the directories of its runs.

Only the main process opens the database. Optuna's storages can be shared with the worker processes,
but its file for that, a journal (`optuna.storages.JournalStorage`, 5.0), does not survive a kill: a
record that was cut while it was written makes the file unreadable as soon as others follow, and the
lock of a killed process stops all others for 30 seconds. Nor would a shared storage save the main
process: trials must be handed out by one process, since the number of a trial seeds its settings.
"""

import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..core.lock import Lock
from ..errors import DirectoryError

if TYPE_CHECKING:
    import optuna

DATABASE, TRIALS, NAME = "study.db", "trials", "treadle"
UNPRUNED, WARM_UP = 5, 2
"""Completed trials before any trial is pruned, and reports of a trial that never prune it."""


class SearchDirectory:
    """The directory of a search, locked until `close`.

    Args:
        path: Folder for the database and the run directories; None keeps all in memory.

    Raises:
        DirectoryError: If the directory cannot be made or is in use by another process, or if it
            holds a folder `trials` without a database.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = Lock(path) if path is not None else None
        self._storage: optuna.storages.RDBStorage | None = None
        if path is None or self._lock is None:
            return
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DirectoryError(
                f"cannot make the directory {path}: {error.strerror or error}"
            ) from error
        self._lock.acquire()
        if (path / TRIALS).exists() and not (path / DATABASE).exists():
            self.close()
            raise DirectoryError(
                f"{path / TRIALS} exists without {DATABASE} next to it, so it does not belong "
                "to a search and is not used. Choose another directory (--directory), or move it "
                "away"
            )

    def run(self, number: int) -> Path | None:
        """Return the run directory of a trial."""
        return self.path / TRIALS / f"{number:04}" if self.path is not None else None

    def open(self, direction: Literal["minimize", "maximize"]) -> "optuna.Study":
        """Open the study in the database, or create it.

        Raises:
            DirectoryError: If the file is not a database of a search, or cannot be used.
        """
        import optuna

        try:
            if self.path is not None:
                # Opened by path, since some characters have a special meaning in a database URL.
                path = (self.path / DATABASE).absolute()
                opened = partial(sqlite3.connect, path, check_same_thread=False)
                address, more = f"sqlite:///{DATABASE}", {"creator": opened}
                self._storage = optuna.storages.RDBStorage(address, engine_kwargs=more)
            with quiet():
                return optuna.create_study(
                    storage=self._storage,
                    study_name=NAME,
                    pruner=optuna.pruners.MedianPruner(UNPRUNED, WARM_UP),
                    sampler=optuna.samplers.RandomSampler(seed=0),  # unused: see `next_settings`
                    direction=direction,
                    load_if_exists=True,
                )
        except Exception as error:  # SQLite, SQLAlchemy and Optuna each raise their own classes
            raise DirectoryError(
                f"cannot use {self.path}/{DATABASE} as the database of a search: "
                f"{type(error).__name__}: {error}. Choose another directory, or replace the search "
                "there with fresh=True (--fresh)"
            ) from error

    def remove(self) -> None:
        """Remove the search in the directory.

        The runs are removed first, because the database marks them as part of a search.

        Raises:
            DirectoryError: If a file cannot be removed.
        """
        self._close_database()
        path = self.path
        if path is None or not (path / DATABASE).exists():
            return
        try:
            if (path / TRIALS).exists():
                shutil.rmtree(path / TRIALS)
            for more in ("-journal", "-wal", "-shm", ""):  # files that SQLite adds
                (path / f"{DATABASE}{more}").unlink(missing_ok=True)
        except OSError as error:
            raise DirectoryError(
                f"cannot remove the search in {path}: {error}. Choose another directory"
            ) from error

    def close(self) -> None:
        """Close the database and release the directory's lock."""
        self._close_database()
        if self._lock is not None:
            self._lock.release()

    def _close_database(self) -> None:
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()


@contextmanager
def quiet() -> Generator[None]:
    """Suppress Optuna's log message that a study was created."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
