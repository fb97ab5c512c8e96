"""The base class of `Loop`: the parts of a run, its interface for hooks, saving and restoring.

Hooks see a run as `core.hook.LoopView`.
"""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoint
from ..core.error_notes import noting
from ..core.hook import Hook
from ..core.logs import History, Record, loggable
from ..core.options import Options
from ..core.progress import Costs, Progress
from ..core.tracebacks import shortened
from ..core.triggers import Scheduled
from ..hooks.run_record import RunRecord
from ..steps.averages import Averages
from ..steps.saved_constants import SavedConstants
from ..steps.state import State
from .arguments import checked_hooks, checked_options, checked_task
from .call import Call
from .dispatch import HookDispatcher
from .evaluation import Evaluation, Validation
from .explanations import explaining
from .prefetch import Feed
from .restoring import Restoring
from .resume import Resuming, about_call, circumstances
from .training import Training
from .unchanged_weights import WeightCheck


class Run:
    """Base class of `Loop`, with everything except training. `Loop` documents the arguments."""

    def __init__(
        self,
        task: Any,
        directory: str | Path | None = None,
        hooks: Sequence[Hook | Scheduled] = (),
        options: Options | None = None,
        configuration: Mapping[str, Any] | None = None,
        fresh: bool = False,
        override: bool | Collection[str] = False,
        console: bool = True,
    ) -> None:
        self.task = checked_task(task)
        self.options = checked_options(options)
        self.progress = Progress()
        self.history = History()
        self.steps_per_epoch: int | None = None
        self.directory = Path(directory) if directory is not None else None
        self._run_record = record = (
            RunRecord(self.directory, task, configuration or {}, fresh, override)
            if self.directory is not None
            else None
        )
        self._dispatcher = HookDispatcher(
            checked_hooks(hooks), self.directory, console, self._run_record
        )
        skip = self._dispatcher.skip_nonfinite
        self._training = Training(task, replace(self.options, skip_nonfinite=skip))
        self._passed = record.passed_over() if record is not None else {}
        self._evaluation = Evaluation(task, self.options)
        self._feed = Feed()
        self._last_trigger_check = self.progress
        self._validation: Validation | None = None
        self._call = Call(self.progress, self.progress)
        self._last_recorded_step = 0
        self._weights = WeightCheck()
        self._averages = Averages()
        self._swapped_optimizers: list[Any] | None = None  # set while hooks end; see `Averages`
        self._resuming = Resuming(None)
        self._constants = SavedConstants(task)
        self._restoring = Restoring(self._constants, record)
        if record is not None and record.from_before:
            self._resuming = Resuming(self._dispatcher.newest_checkpoint())
            self._restore_progress(record, at_end=record.finished)
            found = self._resuming.found
            if found is not None and found.loop["call"] < 0:
                # The run only called `loop.step`: the script's next calls follow the checkpoint.
                self._restoring.begin_call(found)

    @property
    def state(self) -> State:
        """All variables of the task by path."""
        return State.discover(self.task)

    @property
    def plan(self) -> str:
        """How steps are executed, in one line; empty before the first step."""
        return self._training.prepared.plan_text() if self._training.prepared else ""

    @property
    def reason(self) -> str | None:
        """The reason given for stopping the call, or None."""
        return self._call.reason

    @property
    def unfinished(self) -> bool:
        """Whether the call was interrupted before its planned end, and is meant to be resumed."""
        return self._call.unfinished

    @property
    def epochs_planned(self) -> int | None:
        """The number of epochs of the run at the end of this call, or None if unknown."""
        return self._call.epochs

    @property
    def steps_planned(self) -> int | None:
        """The step at which this call ends, or None if unknown."""
        return self._call.steps

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizers that `train_step` applies, by path; empty before the first step."""
        prepared = self._training.prepared
        if prepared is None:
            return {}
        found = prepared.state.optimizers.items()
        return {path: optimizer for path, optimizer in found if id(optimizer) in prepared.applied}

    @property
    def compiling(self) -> bool:
        """Whether a window is being compiled now."""
        return self._training.compiling

    @property
    def evaluated(self) -> tuple[int, int | None] | None:
        """Batches done by the running evaluation, and their total number if known."""
        return self._evaluation.position

    @property
    def costs(self) -> Costs:
        """The number of compiled programs, and the time spent compiling and waiting for data."""
        costs = self._training.costs()
        compiling = costs.compiling + self._evaluation.compile_seconds
        return replace(costs, compiling=compiling, waiting=self._feed.waited)

    def evaluate(self, source: Any) -> dict[str, float]:
        """Evaluate a source with `eval_step` and return the means and metrics.

        The state is unchanged afterwards.
        """
        self._resuming.refuse_unbuilt(self.state)
        with shortened(), noting("evaluation", self.progress), explaining():
            return self._evaluation.evaluate(source, self)

    def predict(self, source: Any) -> Any:
        """Run `predict_step` over a source and return NumPy arrays joined on the first axis."""
        self._resuming.refuse_unbuilt(self.state)
        with shortened(), explaining():
            return self._evaluation.predict(source, self)

    def call(self, function: Callable[..., Any], *inputs: Any) -> Any:
        """Run a function of the task compiled and return NumPy arrays; state changes are discarded.

        Inside the function, arrays and floats are tensors, while integers, booleans and strings are
        constants. Each call draws from a new random stream. Compiled programs are kept for the 16
        most recently called combinations of function and constants.
        """
        if self._resuming.waits:  # a source may call this for its first batch, before the build
            self._resuming.assign_what_exists(self.state)
            self._resuming.refuse_unbuilt(self.state)
        with shortened(), explaining():
            return self._evaluation.call(function, *inputs)

    def find_learning_rate(self, train: Any, **how: Any) -> Any:
        """Run a learning-rate range test; the state is unchanged afterwards. See `treadle.doctor`.

        Args:
            train: A source of batches.
            how: Keyword arguments of `treadle.doctor.find_learning_rate`: `optimizer`, `monitor`,
                `begin`, `end`, `steps`.

        Returns:
            A `treadle.doctor.RangeTest`, with `suggestion` and `draw("rates.png")`.
        """
        self._dispatcher.refuse_training("find_learning_rate")
        # Imported late: the doctor package depends on the loop.
        doctor = importlib.import_module("treadle.doctor")
        return doctor.find_learning_rate(self.task, train, **{"options": self.options, **how})

    def metrics(self) -> dict[str, float]:
        """Return training means and metric results since they were last reset."""
        return self._training.metrics()

    def log(self, values: Mapping[str, Any]) -> None:
        """Log values at the current step: scalars of any library, strings or images.

        Raises:
            ConfigurationError: If a value is none of these. Nothing is logged then.
        """
        self._record("log", loggable(values, "loop.log"))

    def capture(self, buffers: Mapping[str, Any], score: float | None = None) -> Checkpoint:
        """Return the complete state of the run at this window boundary, as a checkpoint.

        Args:
            buffers: The `state` of an earlier checkpoint that is no longer needed; it is
                overwritten.
            score: The value of the monitored metric, if the best checkpoints are kept.
        """
        state, prepared = self.state, self._training.prepared
        written = set(prepared.written if prepared is not None else state.variables)
        return Checkpoint(
            progress=self.progress,
            state=state.stage(buffers),
            fixed=frozenset(path for path in state.variables if path not in written),
            loop={
                **about_call(self._resuming),
                "constants": self._constants.capture(
                    self.progress.step,
                    # A run that restarts from step 0 calls the `start` of its hooks again.
                    self._restoring.begun if self.progress.step == 0 else None,
                ),
                "recompile": self._training.changed_constants(),
                "forms": {"train_step": self._training.forms, "eval_step": self._evaluation.forms},
                "means": self._training.sums(),
                "looked": asdict(self._last_trigger_check),
                "recorded": self._last_recorded_step,
                "validation": self._validation.last if self._validation else None,
                "calls": self._evaluation.calls,
                "weights": self._weights.state(state),
                "reason": self._call.ended_by,
                "averages": self._averages.begun,
            },
            source=self._feed.position(),
            hooks=self._dispatcher.states(),
            about={**circumstances(), "plan": self.plan, "score": score},
        )

    def _initial(self) -> dict[str, Any]:
        """Return the initial values of variables created after the first step."""
        return {**self._training.initial, **self._evaluation.initial}

    def stop(self, why: str) -> None:
        """Stop training at this window boundary; the reason `why` is printed and recorded."""
        self._call.stop(why)

    def snapshot(self) -> dict[str, Any]:
        """Return a copy of every variable's value, for `restore`."""
        return self.state.keep()

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Set every variable to the value it had when `snapshot` was taken."""
        self.state.put_back(snapshot)
        if self._swapped_optimizers is not None:  # training has ended: use averaged weights
            self._averages.finish(self.state, self._swapped_optimizers)

    def batch_at(self, step: int) -> Any:
        """Return the batch of a step (from 1) of the window that ran last, as NumPy arrays."""
        return self._training.batch_at(step)

    def _record(self, kind: str, values: Mapping[str, Any]) -> None:
        if kind != "log":  # count the time since the last window, mainly validation
            self.progress = self._call.timed(self.progress)
        record = Record(kind, self.progress, dict(values))
        self.history.add(record)
        if kind != "log":
            self._last_recorded_step = self.progress.step
        self._dispatcher.notify("record", self, record)

    def _restore_progress(self, record: RunRecord, at_end: bool) -> None:
        """Restore progress, history and hook state of an earlier process.

        The values of variables are restored later, when the variables exist.

        Args:
            record: The record of the run.
            at_end: Restore the end of a finished run instead of its last checkpoint. The state of
                the hooks is not restored then.
        """
        found = self._resuming.found
        if at_end:
            self._resuming.end_with(record.final_state())
            self.progress, self.history = record.progress, self._dispatcher.history(record.path)
            self._last_trigger_check = self.progress
            self._evaluation.calls = found.loop["calls"] if found is not None else 0
        elif (saved := self._resuming.reopen()) is not None:
            self._go_on_from(saved, record.path)

    def _go_on_from(self, found: Checkpoint, directory: Path) -> None:
        """Restore progress, history and hook state from a checkpoint of the run in a directory."""
        self._resuming.show(found.state)
        self.progress, self._last_recorded_step = found.progress, found.loop["recorded"]
        self._last_trigger_check = Progress(**found.loop["looked"])
        self._evaluation.calls = found.loop["calls"]
        self.history = self._dispatcher.history(directory, found.progress.step, found.hooks)
        self._dispatcher.restore(found.hooks)
