"""The calls of a loop that train: how they are numbered, skipped, begun and ended."""

import atexit
import inspect
import os
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from ..backends.hints import device_lost
from ..checkpoint.run_files import averaged
from ..core.hook import RolledBack
from ..core.identity import in_json_types
from ..core.processes import process_group
from ..core.progress import Progress
from ..core.signals import handled_signals
from ..core.tracebacks import shortened
from ..data.same_source import is_same_source
from ..data.source import Source
from ..errors import NonFiniteError, ProcessError, TreadleWarning
from .accumulated import note_skipped_groups, note_unfilled_groups
from .call import Call, Kind
from .run import Run
from .state import RunState
from .validation import Validation

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")
_open: WeakKeyDictionary[Generator[Any], int] = WeakKeyDictionary()  # with their processes


def closed_at_exit(
    method: Callable[_Arguments, Generator[_Value]],
) -> Callable[_Arguments, Generator[_Value]]:
    """Return a method whose generators are closed at exit, as after a `break`, in one process.

    A script may end while it holds `steps = loop.steps(…)`. Python closes such a generator after it
    has cleared modules, when nothing can be saved anymore.
    """

    @wraps(method)
    def begin(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Generator[_Value]:
        generator = method(*args, **kwargs)
        _open[generator] = os.getpid()
        atexit.unregister(_close)
        atexit.register(_close)  # runs before callbacks registered earlier, as those of trackers
        return generator

    return begin


def _close() -> None:
    """Close the generators of this process, the inner ones first.

    Several processes save together, so their generators are not closed: another process may wait
    for messages of a step. A generator that runs belongs to a thread.
    """
    for generator, process in reversed(list(_open.items())):
        runs = inspect.getgeneratorstate(generator) == inspect.GEN_RUNNING
        if process == os.getpid() and not runs and process_group().size == 1:
            try:
                generator.close()
            except Exception:
                traceback.print_exc()


class Calls:
    """Begins and ends the calls of a loop that train, and skips those of an earlier process.

    Attributes:
        in_context: Whether the loop's `with` block is active: hooks end with it.
    """

    def __init__(self, run: Run) -> None:
        self._run, self.in_context = run, False
        # The arguments and the source of the call, and those of a call that raised an error.
        self._asked: tuple[Mapping[str, Any], Source | None] | None = None
        self._failed = self._asked

    def skip_completed_call(
        self, arguments: Mapping[str, Any], source: Source | None = None
    ) -> bool:
        """Skip the next call that trains if an earlier process completed it.

        Args:
            arguments: The arguments of the call, as recorded in `run.json`.
            source: The source of the call, if it is known before the call begins.

        Returns:
            Whether the call was skipped.
        """
        process_group().require_equal("call of the loop", in_json_types(arguments))
        run, resume, record = self._run, self._run.resume, self._run.services.record
        reporter = run.services.reporter
        if self._repeats_failed_call(arguments, source):
            resume.call -= 1
        self._asked, self._failed = (arguments, source), None
        number = resume.call + 1
        if record is None:
            return False
        done = record.call(number, arguments)
        if record.finished and not done and not resume.is_later(number):
            run.restore_progress()  # resume with other arguments
        saved = resume.state
        if not done and (saved is None or number >= saved.call):  # not complete
            return False
        resume.next_call(run.progress)
        if source is not None and resume.is_of_this_call:
            run.epoch_source.recognize(source)
        lost = resume.restore_python_values(early=resume.is_of_this_call)
        resume.assign_what_exists()
        run.take_early_records()  # dropped: the earlier process has logged them
        if done:
            if lost:
                reporter.warn(
                    f"the finished run was not restored completely: {lost} during the run"
                )
            run.current.reason = "it was finished before"
            reporter.print(
                f"the run in {record.path} is already finished; nothing was done: fresh=True "
                "trains again, another directory keeps both"
            )
            reporter.warn(record.changed)
        return True

    def _repeats_failed_call(self, arguments: Mapping[str, Any], source: Source | None) -> bool:
        """Return whether the call that raised an error is repeated: it keeps its number.

        A script that resumes the run makes the call once, unless it fails again.
        """
        if self._failed is None or arguments != self._failed[0]:
            return False
        failed = self._failed[1]
        return source is failed or bool(source and failed and is_same_source(source, failed))

    def build_and_assign(self, source: Source) -> None:
        """Build the model with the first batch of a source, and assign its restored variables."""
        run = self._run
        with shortened():
            window = run.training.zeros(run.resume.forms)
            window = window or run.feed.sample(source, Progress(), run)
            if window is not None:
                run.resume.build(window)
            run.resume.assign_what_exists()

    def roll_back(self, error: RolledBack) -> None:
        """Return to the newest checkpoint, and exclude the batch that the error names.

        Raises:
            NonFiniteError: If this call has no checkpoint that can be read. Those of earlier calls
                lack what the script's own code did between the calls.
        """
        run, record, resume = self._run, self._run.services.record, self._run.resume
        assert record is not None  # `services_of` requires a directory for rollback
        found = run.services.newest_checkpoint()
        if found is None or RunState.of(found).call != resume.call:
            raise NonFiniteError(
                f"{error}. The run cannot roll back, because the checkpoint with which this call "
                "of loop.fit began cannot be read: it was not written, as a warning says, or the "
                "files of the run directory were changed"
            ) from None
        if error.passed is not None:
            record.pass_over(error.passed, str(error))
            run.excluded = record.passed_over()
        run.feed.close()
        resume.rolled_back = True
        resume.use(found, resume.call - 1)
        seconds = run.progress.seconds  # the time of the discarded steps counts too
        run.restore_progress()
        run.progress = run.progress.after_seconds(seconds)

    # The call

    @contextmanager
    def checking_arguments(self) -> Generator[None]:
        """Remove the run directory again if a call of a new run is rejected."""
        try:
            yield
        except BaseException:
            if not self._run.started:
                self._leave_directory()
            raise

    @contextmanager
    def calling(
        self,
        kind: Kind,
        epochs: int | None = None,
        steps: int | None = None,
        deadline: float | None = None,
        validation: Validation | None = None,
    ) -> Generator[Call]:
        """Begin and end a call that trains. Inside another call, yield that one.

        Hooks end after an error, after `fit`, or at the end of the `with` block around the loop.
        """
        run = self._run
        if run.current.running:
            try:
                yield run.current
            except Exception:  # the call around it only gets to know that its body ended
                self._failed = self._asked
                raise
            self._failed = None
            return
        run.current = call = self._begin_call(kind, epochs, steps, deadline, validation)
        error: BaseException | None = None
        try:
            with handled_signals() as call.request:
                yield call
                self._failed = None
                if run.agreement is not None:
                    run.agreement.at_end(call.request.signal)
                call.heed_signals()  # those received during the last validation
                if call.unfinished and run.started:
                    run.services.save(run)
            if call.signal is not None:
                raise call.request.error(call.signal)
        except GeneratorExit:  # the user's `for` ended early; the `with` block gets the reason
            raise
        except BaseException as raised:
            error, self._failed = raised, self._asked
            run.feed.close()  # a later call reads again, after the last batch trained on
            if device_lost(raised):
                raised.add_note(run.services.recovery())
            self.report_failure(raised)
            raise
        finally:
            try:
                if kind == "fit" or error or not self.in_context:
                    self.end(error, final=call.has_epochs)
            finally:
                call.running = False

    def _begin_call(
        self,
        kind: Kind,
        epochs: int | None,
        steps: int | None,
        deadline: float | None,
        validation: Validation | None,
    ) -> Call:
        run, resume = self._run, self._run.resume
        self._failed = None
        if kind != "step" and run.services.checkpointer is not None:
            run.values.begin_call()
        if kind == "step":  # calls of `loop.step` are not numbered
            self._asked = None
        else:
            resume.next_call(run.progress)
            if resume.is_of_this_call:
                resume.restore_python_values(early=kind == "epochs")
                if resume.state is not None and resume.state.progress.step:
                    run.take_early_records()  # dropped: the earlier process has logged them
        limits = epochs, steps, deadline, validation
        call = Call(kind, resume.begun, run.progress, *limits, run.agreement)
        call.running = True
        saved = resume.state
        if kind == "epochs" and resume.is_of_this_call:
            call.sources_to_skip = len(run.epoch_source.earlier)
        if saved is not None and not resume.is_later(resume.call):
            call.stop(saved.ended_by)
            if validation is not None and saved.validation:
                validation.restore(saved.validation)
        return call

    # The end

    def end(self, error: BaseException | None, final: bool) -> None:
        """Save a checkpoint and end the hooks.

        At the final end of training, averaged weights (`use_ema=True`) are replaced by their
        averages. The checkpoint is saved first: it holds the raw weights, from which a longer run
        resumes exactly.

        Args:
            error: The exception that ended the call, or None.
            final: Whether training ends here, and not only this call.
        """
        run = self._run
        if not run.started:
            if final and error is None:
                self._end_completed_run()
            self._leave_directory()
            return
        try:
            if error is None:
                self._warn_unchanged()
                note_skipped_groups(run)
                note_unfilled_groups(run)
                run.services.save(run)
                if final and not run.current.unfinished:
                    run.swapped_optimizers = run.services.swapped_optimizers
                    for warning in run.averages.finish(run.state, run.swapped_optimizers):
                        run.record("log", {"warning": warning})
        except BaseException as failure:
            error = failure  # the run has not finished: its newest checkpoint is an old one
            self.report_failure(failure)
            raise
        finally:
            run.started, run.ending = False, True
            try:
                run.services.hooks.end(run, error)
            except BaseException as failure:
                self.report_failure(failure)
                raise
            finally:
                run.swapped_optimizers, run.ending = None, False
        if error is None:  # all files are written before any process continues
            process_group().require_equal("step at which training ended", run.progress.step)

    def report_failure(self, error: BaseException) -> None:
        """Report an error to the other processes, so that they end and do not wait for this one.

        All of them heed the same signals, and roll back at the same step: these are no failures.

        Raises:
            ProcessError: Another process has failed, of which the error is a consequence.
        """
        if self._run.current.signal is None and not isinstance(error, (ProcessError, RolledBack)):
            process_group().fail(error)

    def _leave_directory(self) -> None:
        """Remove the run directory if this process created it and it is empty."""
        if self._run.services.record is not None:
            self._run.services.record.leave()

    def _end_completed_run(self) -> None:
        """Use averaged weights if an earlier process completed all epochs, but not their end."""
        run, saved = self._run, self._run.resume.state
        if run.current.was_complete and saved is not None:
            run.resume.use_final_state(averaged(saved.arrays, saved.averaging_updates))
            run.resume.assign_what_exists()

    def _warn_unchanged(self) -> None:
        """Warn if this call changed no weight."""
        run, prepared = self._run, self._run.training.prepared
        text = run.weight_check.warning(prepared) if prepared and not run.current.unfinished else ""
        if text:
            run.record("log", {"warning": text})
            if not run.services.reporter.has_console:
                warnings.warn(text, TreadleWarning, stacklevel=2)
