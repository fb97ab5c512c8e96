"""The study of a search: stores trials and suggests settings, with Optuna and an SQLite database.

A resumed search suggests the same settings as one that was never interrupted: each trial gets a new
sampler, which is seeded by the number of the trial and sees only the earlier trials. (This does not
hold for parallel trials, which end in a different order each time.)
"""

import copy
import hashlib
import math
import shutil
import sqlite3
import warnings
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import errors
from ..core.directory import CHECKPOINTS, differences
from ..core.identity import changed_code, described
from ..core.lock import Lock
from ..core.ranges import Choice, Range, Space
from ..errors import ConfigurationError, DirectoryError, TreadleError, TreadleWarning
from .orders import OUTPUT, Order, Outcome
from .results import Ended, Trial

if TYPE_CHECKING:
    import optuna

DATABASE, TRIALS, NAME = "study.db", "trials", "treadle"
STARTUP = 10
"""Number of random trials before the sampler suggests settings; Optuna's default."""
UNPRUNED, WARM_UP = 5, 2
"""Completed trials before any trial is pruned, and reports of a trial that never prune it."""
LISTED = 1_000
"""Maximum number of combinations that are listed, so that none is tried twice. In larger spaces
duplicates are rare."""
TOO_MANY_FAILURES = 3
"""The search ends when this many trials have failed and no other trial has ended."""


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        ConfigurationError: If it is not.
    """
    if find_spec("optuna") is None:
        raise ConfigurationError(
            "searching for settings needs Optuna, which is not installed: pip install "
            "'treadle[tune]'"
        )


@dataclass(frozen=True)
class Wanted:
    """Configuration of a search. A database is only reused by a search of the same configuration.

    Attributes:
        task: The recipe, `file.py:Task`, or the name of the class or function that makes the task.
        spaces: Search spaces by name of the setting.
        fixed: Values of settings that are not searched.
        others: Known defaults of settings that are neither searched nor fixed. They are not passed
            to the task, but if they change, the configuration is a different one.
        defaults: The task's defaults of the searched settings, used by the first trial; empty if
            they are unknown or outside the search space.
        lasts: Number of epochs or steps by name; if empty, the task's own.
        monitor: Name of the value to optimize.
        direction: Whether to minimize or maximize it.
        pruning: Whether to end bad trials early.
        seed: Seed of the runs and of the suggestions; None means the seed set in the task's file,
            else 0.
        options: Further fields of the orders: backend, precision and data folder.
        data: Facts that identify the data, if it is not the task's own.
    """

    task: str
    spaces: Mapping[str, Space]
    fixed: Mapping[str, Any]
    others: Mapping[str, Any]
    defaults: Mapping[str, Any]
    lasts: Mapping[str, int]
    monitor: str
    direction: Literal["min", "max"]
    pruning: bool
    seed: int | None
    options: Mapping[str, Any]
    data: Mapping[str, Any]

    def configuration(self) -> dict[str, Any]:
        """Return the values that are compared when a search is resumed, as JSON types."""
        settings = {**self.others, **self.fixed}
        return {
            "task": self.task,
            "search": {name: _text(space) for name, space in self.spaces.items()},
            "fixed": {name: described(settings[name]) for name in sorted(settings)},
            **self.lasts,
            "monitor": self.monitor,
            "direction": self.direction,
            "pruning": self.pruning,
            "seed": self.seed or 0,
            **self.options,
            **self.data,
        }


class Study:
    """Hands out trials and records their outcomes.

    Args:
        wanted: Configuration of the search.
        trials: Total number of trials.
        directory: Folder for the database and the run directories; None keeps all in memory.
        fresh: Remove an earlier search in the directory.

    Attributes:
        total: Total number of trials.
        changed: A sentence on what changed in the task's code since the first trials; empty if no
            change was found.

    Raises:
        ConfigurationError: If Optuna is not installed.
        DirectoryError: If the directory cannot be used or is in use by another process, if it holds
            another search with a completed trial or a checkpoint, or if it holds a folder `trials`
            without a database.
    """

    def __init__(self, wanted: Wanted, trials: int, directory: Path | None, fresh: bool) -> None:
        require_optuna()
        self.total, self._wanted, self._directory, self.changed = trials, wanted, directory, ""
        self._lock = Lock(directory) if directory is not None else None
        self._storage: optuna.storages.RDBStorage | None = None
        self._begun: dict[int, optuna.Trial] = {}
        self._reports: Counter[int] = Counter()
        if directory is not None:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise DirectoryError(
                    f"cannot make the directory {directory}: {error.strerror or error}"
                ) from error
        if self._lock is not None:
            self._lock.acquire()
        try:
            self._check_ownership()
            if fresh:
                self._remove()
            self._open()
            self._check_configuration()
            self._interrupted = [self._again(trial) for trial in self._trials("RUNNING")]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and release the directory's lock."""
        self._close_database()
        if self._lock is not None:
            self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether the requested number of trials, or every combination, has ended."""
        ended = len(self._trials("COMPLETE", "PRUNED", "FAIL"))
        enough = ended >= self.total or (self.exhausted and ended == len(self._trials()))
        return enough and not self._interrupted

    @property
    def exhausted(self) -> bool:
        """Whether every combination has been handed out, so a new trial would be a duplicate."""
        return self._untried(self._trials()) == []

    def next(self) -> Order | None:
        """Return the order of the next trial, interrupted trials first; None if none is left."""
        while self._interrupted:
            trial = self._interrupted.pop(0)
            self._begun[trial.number] = trial
            self._reports[trial.number] = len(self._frozen(trial.number).intermediate_values)
            if not self.over(trial.number):
                return self._order(trial)
            # The trial was already pruned when its process was killed.
            self.end(trial.number, Outcome("pruned"))
        queued = self._trials("WAITING")
        if not queued and (len(self._trials()) >= self.total or self.exhausted):
            return None
        if not queued:
            self._queue()
        trial = self._study.ask()
        self._suggest(trial)
        self._begun[trial.number] = trial
        return self._order(trial)

    def report(self, number: int, at: int, value: float) -> bool:
        """Record a value reported by a trial, and return whether the trial must end.

        Args:
            number: Number of the trial.
            at: Number of values that it reported before this one.
            value: A finite number.
        """
        trial, known = self._begun[number], self._reports[number]
        if at < known:  # a resumed trial repeats the reports since its last checkpoint
            return False
        trial.report(value, at)
        self._reports[number] = at + 1
        return self.over(number)

    def over(self, number: int) -> bool:
        """Return whether a trial is pruned at the last value that it reported.

        Optuna's median pruner compares the best value that the trial has reported so far with the
        median of those that the complete trials reported at this point.
        """
        if not self._wanted.pruning or not self._reports[number]:
            return False
        return bool(self._begun[number].should_prune())  # Optuna may return a NumPy bool

    def end(self, number: int, outcome: Outcome) -> Trial:
        """Record the outcome of a trial.

        Raises:
            TreadleError: If the trial's error would occur with any settings (the trial is then
                repeated when the search is resumed), or if the first trials have all failed.
        """
        from optuna.trial import TrialState

        # A DataError counts as a failed trial if trials with other settings did find their data.
        others_did = outcome.stops == "DataError" and self._trials("COMPLETE", "PRUNED")
        if outcome.stops and not others_did:
            kind = getattr(errors, outcome.stops, ConfigurationError)
            self._begun[number].set_user_attr("stopped", kind.__name__)
            raise kind((outcome.error or "").removeprefix(f"{outcome.stops}: "))
        self._compare(outcome.code)
        trial = self._begun[number]
        trial.set_user_attr("ended", outcome.ended)
        trial.set_user_attr("seconds", outcome.seconds)
        trial.set_user_attr("seed", outcome.seed)
        if outcome.error is not None:
            trial.set_user_attr("error", outcome.error)
        # Diverged trials are stored as pruned, but the sampler ranks them last: see `_for_sampler`.
        bad = outcome.ended in ("pruned", "diverged")
        state = TrialState.PRUNED if bad else TrialState.FAIL
        if outcome.ended == "complete":
            self._study.tell(trial, outcome.value)
        else:
            self._study.tell(trial, state=state)
        del self._begun[number]
        self._check_failures(number, outcome)
        return self._result(self._frozen(number))

    def results(self) -> tuple[Trial, ...]:
        """Return all trials that were started."""
        return tuple(
            self._result(trial) for trial in self._trials() if trial.state.name != "WAITING"
        )

    def seed_of(self, number: int) -> int:
        """Return the seed of a trial's run."""
        return self._frozen(number).user_attrs["seed"]

    def _open(self) -> None:
        import optuna

        direction = "minimize" if self._wanted.direction == "min" else "maximize"
        pruner = optuna.pruners.MedianPruner(UNPRUNED, WARM_UP)
        try:
            if self._directory is not None:
                # Opened by path, since some characters have a special meaning in a database URL.
                path = (self._directory / DATABASE).absolute()
                opened = partial(sqlite3.connect, path, check_same_thread=False)
                address, more = f"sqlite:///{DATABASE}", {"creator": opened}
                self._storage = optuna.storages.RDBStorage(address, engine_kwargs=more)
            with _quiet():
                self._study = optuna.create_study(
                    storage=self._storage,
                    study_name=NAME,
                    pruner=pruner,
                    sampler=optuna.samplers.RandomSampler(seed=0),  # unused: see `_queue`
                    direction=direction,
                    load_if_exists=True,
                )
        except Exception as error:  # SQLite, SQLAlchemy and Optuna each raise their own classes
            raise DirectoryError(
                f"cannot use {self._directory}/{DATABASE} as the database of a search: "
                f"{type(error).__name__}: {error}. Choose another directory, or replace the search "
                "there with fresh=True (--fresh)"
            ) from error

    def _check_configuration(self) -> None:
        """Check that the directory holds the same search; replace one without results.

        Raises:
            DirectoryError: If it holds another search with a completed trial or a checkpoint.
        """
        wanted = self._wanted.configuration()
        before = self._study.user_attrs.get("configuration")
        found = differences(before, wanted) if before is not None else []
        seed = self._seed_so_far()
        if self._wanted.seed is not None and seed not in (None, self._wanted.seed) and not found:
            found = [f"seed was {seed}, the task's own, now {self._wanted.seed}"]
        if found and self._holds_work():
            raise DirectoryError(
                f"{self._directory} holds another search: {'; '.join(found)}. Choose another "
                "directory, or replace the search there with fresh=True (--fresh)"
            )
        if found:  # the other search has no results or checkpoints to lose
            self._close_database()
            self._remove()
            self._open()
        self._study.set_user_attr("configuration", wanted)

    def _check_ownership(self) -> None:
        """Check that the folder for run directories does not belong to another program.

        Raises:
            DirectoryError: If the folder exists without a database.
        """
        directory = self._directory
        if directory is None or (directory / DATABASE).exists():
            return
        if (directory / TRIALS).exists():
            raise DirectoryError(
                f"{directory / TRIALS} exists without {DATABASE} next to it, so it does not belong "
                "to a search and is not used. Choose another directory (--directory), or move it "
                "away"
            )

    def _holds_work(self) -> bool:
        """Return whether the search has results or checkpoints that must not be removed.

        Trials that ended with a configuration error, as a monitored value that no trial logs, do
        not count.
        """
        if self._trials("COMPLETE", "PRUNED"):
            return True
        running = self._trials("RUNNING")
        kept = [t for t in running if t.user_attrs.get("stopped") != "ConfigurationError"]
        places = [self._place(trial.number) for trial in kept]
        return any(place and any(Path(place, CHECKPOINTS).glob("*")) for place in places)

    def _close_database(self) -> None:
        if self._storage is not None:
            self._storage.remove_session()
            self._storage.engine.dispose()

    def _remove(self) -> None:
        """Remove the search in the directory.

        The runs are removed first, because the database marks them as part of a search.

        Raises:
            DirectoryError: If a file cannot be removed.
        """
        directory = self._directory
        if directory is None or not (directory / DATABASE).exists():
            return
        try:
            if (directory / TRIALS).exists():
                shutil.rmtree(directory / TRIALS)
            for more in ("-journal", "-wal", "-shm", ""):  # files that SQLite adds
                (directory / f"{DATABASE}{more}").unlink(missing_ok=True)
        except OSError as error:
            raise DirectoryError(
                f"cannot remove the search in {directory}: {error}. Choose another directory"
            ) from error

    def _queue(self) -> None:
        """Add the settings of the next trial to the database, in one transaction.

        They are suggested by a copy of the study in memory. In the database, a trial would get one
        setting after another, and the process could be killed in between.
        """
        import optuna

        trials = self._trials()
        parameters = dict(self._wanted.defaults) if not trials else {}
        if not parameters:
            text = f"{self._wanted.seed or 0}/{len(trials)}"
            seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4])
            sampler = optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP, multivariate=True, constant_liar=True
            )
            with _quiet():
                known = optuna.create_study(direction=self._study.direction, sampler=sampler)
            known.add_trials([_for_sampler(trial) for trial in trials])
            suggested = known.ask()
            self._suggest(suggested)
            parameters = suggested.params
            untried = self._untried(trials)
            if untried and parameters not in untried:
                parameters = untried[seed % len(untried)]
        self._study.enqueue_trial(parameters, user_attrs={"parameters": parameters})

    def _untried(self, trials: Sequence["optuna.trial.FrozenTrial"]) -> list[dict[str, Any]] | None:
        """Return the combinations that were not tried; None if there are too many to list."""
        spaces = self._wanted.spaces
        listed = [_values(space) for space in spaces.values()]
        sizes = [len(values) if values is not None else LISTED + 1 for values in listed]
        if math.prod(sizes) > LISTED:
            return None
        tried = [trial.user_attrs["parameters"] for trial in trials]
        rows = product(*filter(None, listed))
        every = (dict(zip(spaces, row, strict=True)) for row in rows)
        return [parameters for parameters in every if parameters not in tried]

    def _seed_so_far(self) -> int | None:
        """Return the seed of the trials so far; None if no trial has started training."""
        seeds = (trial.user_attrs.get("seed") for trial in self._trials())
        return next((seed for seed in seeds if seed is not None), None)

    def _compare(self, code: Mapping[str, str]) -> None:
        """Warn once if the task's code differs from that of the first trial."""
        first = self._study.user_attrs.get("code", {})
        if code and not first:
            self._study.set_user_attr("code", dict(code))
        found = changed_code(first, code, "this search began")
        if found and not self.changed:
            self.changed = found
            warnings.warn(found, TreadleWarning, stacklevel=2)

    def _suggest(self, trial: "optuna.Trial") -> None:
        for name, space in self._wanted.spaces.items():
            if isinstance(space, Choice):
                trial.suggest_categorical(name, space.values)
            elif space.whole:
                low, high, step = int(space.low), int(space.last), int(space.step or 1)
                trial.suggest_int(name, low, high, step=step, log=space.log)
            else:
                trial.suggest_float(name, space.low, space.last, step=space.step, log=space.log)

    def _again(self, frozen: "optuna.trial.FrozenTrial") -> "optuna.Trial":
        """Return a trial that an earlier process started."""
        import optuna

        trial = optuna.Trial(self._study, frozen._trial_id)  # pyright: ignore[reportPrivateUsage]
        self._suggest(trial)
        return trial

    def _order(self, trial: "optuna.Trial") -> Order:
        wanted = self._wanted
        return Order(
            number=trial.number,
            task=wanted.task,
            settings={**wanted.fixed, **trial.user_attrs["parameters"]},
            lasts=wanted.lasts,
            monitor=wanted.monitor,
            direction=wanted.direction,
            directory=self._place(trial.number),
            # All trials use the seed set in the task's file, once the first trial has reported it.
            seed=wanted.seed if wanted.seed is not None else self._seed_so_far(),
            **wanted.options,
        )

    def _place(self, number: int) -> str | None:
        return str(self._directory / TRIALS / f"{number:04}") if self._directory else None

    def _trials(self, *states: str) -> Sequence["optuna.trial.FrozenTrial"]:
        found = self._study.get_trials(deepcopy=False)
        return [trial for trial in found if not states or trial.state.name in states]

    def _frozen(self, number: int) -> "optuna.trial.FrozenTrial":
        return self._study.get_trials(deepcopy=False)[number]

    def _result(self, trial: "optuna.trial.FrozenTrial") -> Trial:
        ended: Ended = trial.user_attrs.get("ended", "unfinished")
        if trial.state.name == "RUNNING":
            ended = "unfinished"
        value = trial.value if ended in ("complete", "pruned") else None
        return Trial(
            number=trial.number,
            ended=ended,
            value=value,
            parameters=trial.user_attrs["parameters"],
            reports=len(trial.intermediate_values),
            seconds=trial.user_attrs.get("seconds"),
            error=trial.user_attrs.get("error"),
            directory=self._place(trial.number),
        )

    def _check_failures(self, number: int, outcome: Outcome) -> None:
        """End the search if the first trials have all failed.

        Raises:
            TreadleError: If they have.
        """
        failed, others = len(self._trials("FAIL")), len(self._trials("COMPLETE", "PRUNED"))
        if outcome.ended == "failed" and failed >= TOO_MANY_FAILURES and not others:
            place = self._place(number)
            output = Path(place, OUTPUT) if place is not None else None
            raise TreadleError(
                f"the first {failed} trials have failed, the last with {outcome.error}"
                f"{f'; see {output}' if output is not None and output.exists() else ''}"
            )


def _text(space: Space) -> str:
    """Return a text that identifies a space; `str` of a choice would not tell 1 from "1"."""
    return str(space) if isinstance(space, Range) else repr(space)


def _values(space: Space) -> list[Any] | None:
    """Return the values of a choice or a range of whole numbers; None if there are too many."""
    if isinstance(space, Choice):
        return list(space.values)
    if not space.whole or (space.last - space.low) / (space.step or 1) >= LISTED:
        return None
    return list(range(int(space.low), int(space.last) + 1, int(space.step or 1)))


def _for_sampler(trial: "optuna.trial.FrozenTrial") -> "optuna.trial.FrozenTrial":
    """Return a trial in the form that is passed to the sampler.

    Optuna's sampler ranks pruned trials by their number of reports and then by their last value, so
    a trial that diverged late would rank among the best of them. Without reported values it ranks
    last.
    """
    if trial.user_attrs.get("ended") != "diverged":
        return trial
    seen = copy.copy(trial)
    seen.intermediate_values = {}
    return seen


@contextmanager
def _quiet() -> Generator[None]:
    """Suppress Optuna's log message that a study was created."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
