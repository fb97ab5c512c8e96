"""The study of a search: hands out trials, decides which are pruned, and records their outcomes.

A resumed search suggests the same settings as one that was never interrupted, if its trials run one
after another: parallel trials end in a different order each time.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from .. import errors
from ..core.directory import CHECKPOINTS, differences
from ..core.user_code import changed_code
from ..errors import ConfigurationError, DirectoryError, TreadleError, TreadleWarning
from .orders import OUTPUT, Configuration, Order, Outcome
from .results import Ended, Trial
from .storage import SearchDirectory
from .suggestions import next_settings, suggest, untried

if TYPE_CHECKING:
    import optuna

TOO_MANY_FAILURES = 3
"""The search ends when this many trials have failed and no other trial has ended."""


def require_optuna() -> None:
    """Check that Optuna is installed.

    Raises:
        ConfigurationError: If it is not.
    """
    errors.require_package("optuna", "searching for settings needs Optuna, which")
    with warnings.catch_warnings():
        # In a notebook, its progress bars, which are not shown here, ask for ipywidgets.
        warnings.filterwarnings("ignore", "IProgress not found")
        import_module("optuna.progress_bar")


class Study:
    """Hands out trials and records their outcomes.

    Args:
        configuration: Configuration of the search.
        trials: Total number of trials.
        directory: Folder for the database and the run directories; None keeps all in memory.
        fresh: Remove an earlier search in the directory.

    Attributes:
        changed: A sentence on what changed in the task's code since the first trials; empty if no
            change was found.

    Raises:
        DirectoryError: If the directory cannot be used or is in use by another process, if it holds
            another search with a completed trial or a checkpoint, or if it holds a folder `trials`
            without a database.
    """

    def __init__(
        self, configuration: Configuration, trials: int, directory: Path | None, fresh: bool
    ) -> None:
        self._total, self.changed = trials, ""
        self._configuration = configuration
        self._directory = SearchDirectory(directory)
        try:
            if fresh:
                self._directory.remove()
            self._study = self._directory.open(configuration.objective)
            self._check_configuration()
            self._running = {t.number: self._again(t) for t in self._trials("RUNNING")}
            self._interrupted = list(self._running)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the database and release the directory's lock."""
        self._directory.close()

    @property
    def finished(self) -> bool:
        """Whether the requested number of trials, or every combination, has ended."""
        ended = len(self._trials("COMPLETE", "PRUNED", "FAIL"))
        enough = ended >= self._total or (self.exhausted and ended == len(self._trials()))
        return enough and not self._interrupted

    @property
    def exhausted(self) -> bool:
        """Whether every combination has been handed out, so a new trial would be a duplicate."""
        return untried(self._configuration.spaces, self._trials()) == []

    def next(self) -> Order | None:
        """Return the order of the next trial, interrupted trials first; None if none is left."""
        while self._interrupted:
            number = self._interrupted.pop(0)
            if not self.over(number):
                return self._order(self._running[number])
            # The trial was already pruned when its process was killed.
            self.end(number, Outcome("pruned"))
        if not self._trials("WAITING"):  # else a process was killed before it asked for that trial
            trials = self._trials()
            if len(trials) >= self._total or self.exhausted:
                return None
            self._study.enqueue_trial(next_settings(self._configuration, trials))
        trial = self._study.ask()
        suggest(trial, self._configuration.spaces)
        self._running[trial.number] = trial
        return self._order(trial)

    def report(self, number: int, at: int, value: float) -> bool:
        """Record a value reported by a trial, and return whether the trial must end.

        Args:
            number: Number of the trial.
            at: Number of values that it reported before this one.
            value: A finite number.
        """
        if at < self._reports(number):  # a resumed trial repeats those since its last checkpoint
            return False
        self._running[number].report(value, at)
        return self.over(number)

    def over(self, number: int) -> bool:
        """Return whether a trial is pruned at the last value that it reported.

        Optuna's median pruner compares the best value that the trial has reported so far with the
        median of those that the complete trials reported at this point.
        """
        if not self._configuration.pruning or not self._reports(number):
            return False
        return bool(self._running[number].should_prune())  # Optuna may return a NumPy bool

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
            self._running[number].set_user_attr("stopped", kind.__name__)
            raise kind((outcome.error or "").removeprefix(f"{outcome.stops}: "))
        self._compare(outcome.code)
        trial = self._running[number]
        trial.set_user_attr("outcome", asdict(replace(outcome, code={})))
        # Diverged trials are stored as pruned, but the sampler ranks them last: see `suggestions`.
        states = {"complete": TrialState.COMPLETE, "failed": TrialState.FAIL}
        value = outcome.value if outcome.ended == "complete" else None
        self._study.tell(trial, value, states.get(outcome.ended, TrialState.PRUNED))
        del self._running[number]
        self._check_failures(number, outcome)
        return self._result(self._frozen(number))

    def results(self) -> tuple[Trial, ...]:
        """Return all trials that were started."""
        return tuple(
            self._result(trial) for trial in self._trials() if trial.state.name != "WAITING"
        )

    def seed_of(self, number: int) -> int:
        """Return the seed of a trial's run."""
        return _outcome(self._frozen(number)).seed or 0

    def _check_configuration(self) -> None:
        """Check that the directory holds the same search; replace one without results.

        Raises:
            DirectoryError: If it holds another search with a completed trial or a checkpoint.
        """
        wanted, asked = self._configuration.facts(), self._configuration.order.seed
        before = self._study.user_attrs.get("configuration")
        found = differences(before, wanted) if before is not None else []
        seed = self._seed_so_far()
        if asked is not None and seed not in (None, asked) and not found:
            found = [f"seed was {seed}, the task's own, now {asked}"]
        if found and self._holds_work():
            raise DirectoryError(
                f"{self._directory.path} holds another search: {'; '.join(found)}. Choose another "
                "directory, or replace the search there with fresh=True (--fresh)"
            )
        if found:  # the other search has no results or checkpoints to lose
            self._directory.remove()
            self._study = self._directory.open(self._configuration.objective)
        self._study.set_user_attr("configuration", wanted)

    def _holds_work(self) -> bool:
        """Return whether the search has results or checkpoints that must not be removed.

        Trials that ended with a configuration error, as a monitored value that no trial logs, do
        not count.
        """
        if self._trials("COMPLETE", "PRUNED"):
            return True
        running = self._trials("RUNNING")
        kept = [t for t in running if t.user_attrs.get("stopped") != "ConfigurationError"]
        runs = [self._directory.run(trial.number) for trial in kept]
        return any(run is not None and any((run / CHECKPOINTS).glob("*")) for run in runs)

    def _seed_so_far(self) -> int | None:
        """Return the seed of the trials so far; None if no trial has started training."""
        seeds = (_outcome(trial).seed for trial in self._trials())
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

    def _again(self, frozen: "optuna.trial.FrozenTrial") -> "optuna.Trial":
        """Return a trial that an earlier process started."""
        import optuna

        trial = optuna.Trial(self._study, frozen._trial_id)  # pyright: ignore[reportPrivateUsage]
        suggest(trial, self._configuration.spaces)
        return trial

    def _order(self, trial: "optuna.Trial") -> Order:
        order = self._configuration.order
        return replace(
            order,
            number=trial.number,
            settings={**order.settings, **self._parameters(trial.params)},
            directory=self._run(trial.number),
            # All trials use the seed set in the task's file, once the first trial has reported it.
            seed=order.seed if order.seed is not None else self._seed_so_far(),
        )

    def _parameters(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return the searched settings in the order of the signature."""
        return {name: found[name] for name in self._configuration.spaces}

    def _trials(self, *states: str) -> Sequence["optuna.trial.FrozenTrial"]:
        found = self._study.get_trials(deepcopy=False)
        return [trial for trial in found if not states or trial.state.name in states]

    def _reports(self, number: int) -> int:
        return len(self._frozen(number).intermediate_values)

    def _run(self, number: int) -> str | None:
        run = self._directory.run(number)
        return str(run) if run is not None else None

    def _frozen(self, number: int) -> "optuna.trial.FrozenTrial":
        return self._study.get_trials(deepcopy=False)[number]

    def _result(self, trial: "optuna.trial.FrozenTrial") -> Trial:
        outcome = _outcome(trial)
        return Trial(
            number=trial.number,
            ended=cast(Ended, outcome.ended),
            value=trial.value if outcome.ended in ("complete", "pruned") else None,
            step=outcome.step,
            parameters=self._parameters(trial.params),
            reports=len(trial.intermediate_values),
            seconds=outcome.seconds,
            error=outcome.error,
            directory=self._run(trial.number),
        )

    def _check_failures(self, number: int, outcome: Outcome) -> None:
        """End the search if the first trials have all failed.

        Raises:
            TreadleError: If they have.
        """
        failed, others = len(self._trials("FAIL")), len(self._trials("COMPLETE", "PRUNED"))
        if outcome.ended == "failed" and failed >= TOO_MANY_FAILURES and not others:
            run = self._directory.run(number)
            output = run / OUTPUT if run is not None else None
            raise TreadleError(
                f"the first {failed} trials have failed, the last with {outcome.error}"
                f"{f'; see {output}' if output is not None and output.exists() else ''}"
            )


def _outcome(trial: "optuna.trial.FrozenTrial") -> Outcome:
    """Return the recorded outcome of a trial; one that has not ended is `unfinished`."""
    found = trial.user_attrs.get("outcome")
    return Outcome(**found) if found and trial.state.is_finished() else Outcome("unfinished")
