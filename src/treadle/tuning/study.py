"""What was tried and what is tried next: Optuna's study, in a database of its own.

A search that is interrupted suggests, when it goes on, what it would have suggested anyway: the
sampler of each trial is made anew, seeded by the number of the trial, and knows nothing but the
trials before. (Parallel trials end in an order that is different each time.)
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
"""Trials with random settings before others are suggested; Optuna's default."""
UNPRUNED, WARM_UP = 5, 2
"""So many trials come to their end before any is pruned, and so many reports are passed over."""
LISTED = 1_000
"""Up to so many combinations are listed, so that none is tried twice; beyond, that is rare."""
HOPELESS = 3
"""So many trials fail, and no other ended, before the search is given up."""


def require_optuna() -> None:
    """Refuse to go on without Optuna.

    Raises:
        ConfigurationError: It is not installed.
    """
    if find_spec("optuna") is None:
        raise ConfigurationError(
            "searching for settings needs Optuna, which is not installed: pip install "
            "'treadle[tune]'"
        )


@dataclass(frozen=True)
class Wanted:
    """What a search is; another one does not go on with its database.

    Attributes:
        task: The recipe, `file.py:Task`, or the name of what makes the task.
        spaces: What is tried, by name.
        fixed: Settings that are given.
        others: Known defaults of those that are neither searched nor given; the task itself has
            them, but where they change, it is another search.
        defaults: What the task has in place of what is tried, where that is known and within the
            spaces: the first trial. Nothing otherwise.
        lasts: Epochs or steps; nothing means the task's own.
        monitor: The value that trials are judged by.
        direction: Whether a smaller or a larger one is better.
        pruning: Whether a trial ends early where others were better by then.
        seed: Of the runs and of the suggestions; None means the file's own, else 0.
        options: More about how a trial is run: of an order.
        data: What is known of the data, where it is not the task's own.
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
        """Return all that makes it another search, in JSON's types."""
        settings = {**self.others, **self.fixed}
        return {
            "task": self.task,
            "search": {name: _told(space) for name, space in self.spaces.items()},
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
    """Hands out trials, and takes what came of them.

    Args:
        wanted: What is searched for.
        trials: How many in all.
        directory: Where the database and the run directories are; None keeps all in memory.
        fresh: Remove what an earlier search left there.

    Attributes:
        total: How many in all.
        changed: A sentence on what changed in the task's code since the first trials; empty where
            that is nothing, as far as is known.

    Raises:
        ConfigurationError: Optuna is not installed.
        DirectoryError: The directory cannot be used, another process searches there, it holds
            another search, of which some trial came to its end or saved a checkpoint, or a folder
            of the name that run directories are to be in, and no database.
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
            self._refuse_strange()
            if fresh:
                self._remove()
            self._open()
            self._refuse_another()
            self._interrupted = [self._again(trial) for trial in self._trials("RUNNING")]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the database and the directory."""
        self._close_database()
        if self._lock is not None:
            self._lock.release()

    @property
    def finished(self) -> bool:
        """Whether as many trials as are wanted have ended, or all that there are."""
        ended = len(self._trials("COMPLETE", "PRUNED", "FAIL"))
        enough = ended >= self.total or (self.exhausted and ended == len(self._trials()))
        return enough and not self._interrupted

    @property
    def exhausted(self) -> bool:
        """Whether every combination has been handed out: any further trial would equal another."""
        return self._untried(self._trials()) == []

    def next(self) -> Order | None:
        """Return what is to be tried next, interrupted trials first; None where that is all."""
        while self._interrupted:
            trial = self._interrupted.pop(0)
            self._begun[trial.number] = trial
            self._reports[trial.number] = len(self._frozen(trial.number).intermediate_values)
            if not self.over(trial.number):
                return self._order(trial)
            # This had been the answer already, when the process was killed.
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
        """Take a value that a trial has reached; say whether it is to end here.

        Args:
            number: The trial.
            at: How many values it has reported before.
            value: A finite number.
        """
        trial, known = self._begun[number], self._reports[number]
        if at < known:  # a trial that goes on tells some again
            return False
        trial.report(value, at)
        self._reports[number] = at + 1
        return self.over(number)

    def over(self, number: int) -> bool:
        """Say whether a trial is to end at the last value that it reported.

        Optuna's median pruner compares the best value that the trial has reported so far with the
        median of those that the complete trials reported at this point.
        """
        if not self._wanted.pruning or not self._reports[number]:
            return False
        return bool(self._begun[number].should_prune())  # it may be NumPy's

    def end(self, number: int, outcome: Outcome) -> Trial:
        """Take what came of a trial.

        Raises:
            TreadleError: No settings would do better; the trial is tried again the next time. Or
                the first trials have all failed.
        """
        from optuna.trial import TrialState

        # Where other settings found their data, it is these that do not fit it.
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
        # Of suggestions, what diverged is worse than anything that was pruned: see `_for_sampler`.
        bad = outcome.ended in ("pruned", "diverged")
        state = TrialState.PRUNED if bad else TrialState.FAIL
        if outcome.ended == "complete":
            self._study.tell(trial, outcome.value)
        else:
            self._study.tell(trial, state=state)
        del self._begun[number]
        self._give_up(number, outcome)
        return self._result(self._frozen(number))

    def results(self) -> tuple[Trial, ...]:
        """Return all that was tried."""
        return tuple(
            self._result(trial) for trial in self._trials() if trial.state.name != "WAITING"
        )

    def seed_of(self, number: int) -> int:
        """Return the seed that the run of a trial had."""
        return self._frozen(number).user_attrs["seed"]

    def _open(self) -> None:
        import optuna

        direction = "minimize" if self._wanted.direction == "min" else "maximize"
        pruner = optuna.pruners.MedianPruner(UNPRUNED, WARM_UP)
        try:
            if self._directory is not None:
                # Opened by its path: in an address, a path may mean something else.
                path = (self._directory / DATABASE).absolute()
                opened = partial(sqlite3.connect, path, check_same_thread=False)
                address, more = f"sqlite:///{DATABASE}", {"creator": opened}
                self._storage = optuna.storages.RDBStorage(address, engine_kwargs=more)
            with _quiet():
                self._study = optuna.create_study(
                    storage=self._storage,
                    study_name=NAME,
                    pruner=pruner,
                    sampler=optuna.samplers.RandomSampler(seed=0),  # never asked: see `_queue`
                    direction=direction,
                    load_if_exists=True,
                )
        except Exception as error:  # SQLite's, SQLAlchemy's or Optuna's own, by what is wrong
            raise DirectoryError(
                f"cannot use {self._directory}/{DATABASE} as the database of a search: "
                f"{type(error).__name__}: {error}. Choose another directory, or begin anew there "
                "with fresh=True (--fresh)"
            ) from error

    def _refuse_another(self) -> None:
        """Go on with the search in the directory, if it is this one.

        Raises:
            DirectoryError: It is another one, and some trial of it came to its end or saved a
                checkpoint.
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
                "directory, or begin anew there with fresh=True (--fresh)"
            )
        if found:  # nothing is lost
            self._close_database()
            self._remove()
            self._open()
        self._study.set_user_attr("configuration", wanted)

    def _refuse_strange(self) -> None:
        """Refuse to put runs among what is not ours, or to remove that.

        Raises:
            DirectoryError: There is a folder of the name that they are to be in, and no database.
        """
        directory = self._directory
        if directory is None or (directory / DATABASE).exists():
            return
        if (directory / TRIALS).exists():
            raise DirectoryError(
                f"{directory / TRIALS} is there, and no {DATABASE} beside it: it is no search's, "
                "and is left as it is. Choose another directory (--directory), or move it away"
            )

    def _holds_work(self) -> bool:
        """Say whether it would be a loss to remove what is here: results, or hours of training.

        What could not be meant, as a value that no trial logs, left nothing worth keeping.
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
        """Remove a search: its runs first, which are ours only as long as the database is there.

        Raises:
            DirectoryError: Something cannot be removed.
        """
        directory = self._directory
        if directory is None or not (directory / DATABASE).exists():
            return
        try:
            if (directory / TRIALS).exists():
                shutil.rmtree(directory / TRIALS)
            for more in ("-journal", "-wal", "-shm", ""):  # SQLite's own names
                (directory / f"{DATABASE}{more}").unlink(missing_ok=True)
        except OSError as error:
            raise DirectoryError(
                f"cannot remove the search in {directory}: {error}. Choose another directory"
            ) from error

    def _queue(self) -> None:
        """Put into the database, in one go, what is tried next.

        It is asked for of a copy of the study in memory: in the database, a trial would get one
        setting after another, and a process may be killed in between.
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
            asked = known.ask()
            self._suggest(asked)
            parameters = asked.params
            untried = self._untried(trials)
            if untried and parameters not in untried:
                parameters = untried[seed % len(untried)]
        self._study.enqueue_trial(parameters, user_attrs={"parameters": parameters})

    def _untried(self, trials: Sequence["optuna.trial.FrozenTrial"]) -> list[dict[str, Any]] | None:
        """Return the combinations that were not tried; None where there are too many to list."""
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
        """Return the seed that trials trained from; None where none did."""
        seeds = (trial.user_attrs.get("seed") for trial in self._trials())
        return next((seed for seed in seeds if seed is not None), None)

    def _compare(self, code: Mapping[str, str]) -> None:
        """Warn once where the code of a trial is other code than that of the first."""
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
        """Return a trial that another process began."""
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
            # The file's own seed, once it is known: all trials train from one.
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

    def _give_up(self, number: int, outcome: Outcome) -> None:
        """Stop where the first trials have failed, and nothing else was there.

        Raises:
            TreadleError: So it is.
        """
        failed, others = len(self._trials("FAIL")), len(self._trials("COMPLETE", "PRUNED"))
        if outcome.ended == "failed" and failed >= HOPELESS and not others:
            place = self._place(number)
            output = Path(place, OUTPUT) if place is not None else None
            raise TreadleError(
                f"the first {failed} trials have failed, the last with {outcome.error}"
                f"{f'; see {output}' if output is not None and output.exists() else ''}"
            )


def _told(space: Space) -> str:
    """Return what differs where a space does: on the command line 1 and "1" look alike."""
    return str(space) if isinstance(space, Range) else repr(space)


def _values(space: Space) -> list[Any] | None:
    """Return the values of a space; None where they are not few, or no whole numbers."""
    if isinstance(space, Choice):
        return list(space.values)
    if not space.whole or (space.last - space.low) / (space.step or 1) >= LISTED:
        return None
    return list(range(int(space.low), int(space.last) + 1, int(space.step or 1)))


def _for_sampler(trial: "optuna.trial.FrozenTrial") -> "optuna.trial.FrozenTrial":
    """Return a trial as the sampler is to see it.

    Optuna's orders those that did not come to their end by how far they came, and then by their
    last value: one that diverged late would be among the best of them. Without values it is the
    worst.
    """
    if trial.user_attrs.get("ended") != "diverged":
        return trial
    seen = copy.copy(trial)
    seen.intermediate_values = {}
    return seen


@contextmanager
def _quiet() -> Generator[None]:
    """Keep Optuna from telling that it made a study."""
    from optuna import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)
