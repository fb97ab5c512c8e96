"""The record of a run, `run.json`: its configuration, versions, and whether it is finished."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from ..checkpoint import Checkpoints
from ..checkpoint.retention import remove_checkpoints
from ..checkpoint.run_files import final_state, list_files, newest_hash, recorded_run
from ..core.claims import Claim, Identity, identity_of
from ..core.directory import (
    CHECKPOINTS,
    DOCTOR,
    FORMAT,
    HEALTH,
    LOG,
    MODEL,
    OF_THE_END,
    RUN,
    STATE,
    LostRecordError,
    RunFile,
    copy_of,
    differences,
    encode_record,
    in_both,
    joined,
)
from ..core.folder import Folder, partial, written_as
from ..core.hook import Hook, LoopView
from ..core.identity import identity, in_json_types, versions
from ..core.internals import switched_off
from ..core.lock import HOLDER, Lock
from ..core.logs import Record, StepLogs
from ..core.options import backend_name, precision_name, run_seed
from ..core.processes import is_chief, process_group
from ..core.progress import Progress
from ..core.user_code import attributes_of, changed_code, code_of
from ..errors import DirectoryError
from .images import FOLDER as IMAGES
from .images import remove as remove_images
from .learning_rates import LearningRates, current_rates

TRACKED = ("mlflow.json", "wandb.json")  # the ids of tracked runs
PROBE = "writable"  # written and removed again, to check that files can be written
LEFT_BEHIND = (RUN, LOG, "epochs.csv", STATE, "curves.png", HEALTH, *TRACKED)


class RunRecord(Hook):
    """Claims a run directory, validates its configuration and writes `run.json`.

    Args:
        path: The run directory; created if it does not exist.
        task: The task. A different task, or one constructed with different arguments, than that of
            the run in the directory is an error.
        configuration: Other settings that identify the run, as JSON values.
        fresh: Remove the artifacts of an earlier run.
        override: Resume a run although its configuration differs, and record the differences; or
            the names of settings that may differ.

    Attributes:
        path: The run directory.
        facts: The content of `run.json`.
        recovered: A sentence if the record was lost and comes from a checkpoint, else "". `start`
            writes the file again.
        changed: Changes in the code since the recorded run, if any.
        overridden: Differences to the recorded run that `override` allowed.

    Raises:
        DirectoryError: If the directory cannot be written to, another process trains in it, it
            contains a run with a different configuration (the message shows the differences), or it
            contains files with the names of run artifacts but no run.
    """

    def __init__(
        self,
        path: Path,
        task: Any,
        configuration: Mapping[str, Any],
        fresh: bool = False,
        override: bool | Collection[str] = False,
    ) -> None:
        self.path, self._override = path, override
        self.overridden: list[str] = []
        self._leaves = [*LEFT_BEHIND, *(f"{attribute}{MODEL}" for attribute in attributes_of(task))]
        self._lock = Lock(path)
        self._held: Claim | None = None
        self._made = [place for place in (path, *path.parents) if not place.exists()]
        self._left = False  # whether the directory was removed again
        self._seen: tuple[Identity, tuple[int, int] | None] | None = None
        self.facts: dict[str, Any]
        self.facts, self.recovered, new_id = process_group().on_chief(
            lambda: self._read(fresh), "opening the run directory"
        )
        wanted, code = in_json_types({**identity(task), **configuration}), code_of(task)
        self.from_before, self._started, self._begun = bool(self.facts), False, False
        self._resumes, self._costs_before = self.from_before, dict(self.facts.get("costs", {}))
        self._rates = LearningRates(self.facts.get("learning_rates", {}))
        self._calls: list[dict[str, Any]] = list(self.facts.get("calls", []))
        self._calls_made = 0  # calls of this process, also those that an earlier one completed
        if self.facts:
            recorded = _identifying(self.facts["configuration"])
            now = _identifying(wanted)
            # Other versions of Keras and Treadle describe more or less of an optimizer.
            a, b = (x.pop("compiled", {}) for x in (recorded, now))
            recorded["compiled"], now["compiled"] = in_both(a, b), in_both(b, a)
            if a or b:
                wanted["compiled"] = joined(a, b)
            self._compare(f"{path} holds a run of another configuration", recorded, now)
        self.changed = changed_code(self.facts.get("code", {}), code)
        start = {"format": FORMAT, "id": new_id, "code": code}
        self.facts = {**start, **self.facts, "configuration": wanted}

    @property
    def finished(self) -> bool:
        """Whether the run in this directory was finished by another process."""
        return self.from_before and bool(self.facts.get("finished"))

    @property
    def progress(self) -> Progress:
        """The progress of the finished run in this directory."""
        return Progress(**self.facts["progress"])

    @property
    def id(self) -> str:
        """The identifier of the run."""
        return self.facts["id"]

    def final_state(self) -> tuple[Mapping[str, Any], str]:
        """Return the final value of every variable; see `checkpoint.run_files.final_state`."""
        return final_state(self.path, cast(RunFile, self.facts))

    def passed_over(self) -> dict[tuple[int, int, int], str]:
        """Return the batches excluded by rollbacks; see `pass_over`."""
        return passed_over(self.facts)

    def pass_over(self, at: Progress, why: str) -> None:
        """Record that the batch at this position is excluded from the run."""
        batch = {"epoch": at.epoch, "batch": at.batch, "step": at.step, "why": why}
        self.facts["passed_over"] = [*self.facts.get("passed_over", []), batch]
        self._write()

    def call(self, number: int, asked: Mapping[str, Any]) -> bool:
        """Record the arguments of a `fit` call, and return whether it is already finished.

        Args:
            number: The number of the call, from 0.
            asked: The arguments of the call.

        Raises:
            DirectoryError: If the recorded call has different arguments.
        """
        wanted = in_json_types(asked)
        self._calls_made = number + 1
        if number >= len(self._calls):
            self._calls.append(wanted)
            return False
        before, self._calls[number] = self._calls[number], wanted
        self._compare(f"{self.path} holds another run", before, wanted)
        return self.finished and not self.overridden

    def compare_constants(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Compare the initial Python values of the recorded run with those of the script.

        Args:
            before: The values at the start of the recorded run, of those that changed during it.
            now: The values at the start of this script.

        Raises:
            DirectoryError: If they differ, and no override allows that.
        """
        what = f"{self.path} holds a run that began with other Python values"
        self._compare(what, {"constants": before}, {"constants": now})

    def may_lose(self, changed: Mapping[str, str]) -> bool:
        """Return whether an override allows resuming without these changes; record them if so."""
        found = [f"constants.{path} was not put back: {how}" for path, how in changed.items()]
        if not all(self._may_differ(text) for text in found):
            return False
        self.facts["overridden"] = [*self.facts.get("overridden", []), *found]
        return True

    def copy(self, step: int) -> dict[str, Any]:
        """Return what the checkpoint of a step must hold of the record.

        This is the run's id, and what it needs to resume without the file, unless that is long.
        A run that starts from scratch again leaves the same checkpoint of step 0 as the first time.
        """
        facts = {**self.facts, "calls": self._calls}
        if step == 0:  # these belong to the first step
            facts = {k: v for k, v in facts.items() if k not in ("plan", "execution", "started")}
        copy = copy_of(cast(RunFile, facts))
        return {"id": self.id} | ({"run": copy} if copy else {})

    def start(self, loop: LoopView) -> None:
        """Lock the directory for this process and mark the run as unfinished.

        If the record was lost, it is written again, before anything else is changed.

        Raises:
            DirectoryError: If another process trains in it, or has done so since `run.json` was
                read.
        """
        process_group().on_chief(self._lock_directory, "locking the run directory")
        self._held = Claim(self.path)
        from ..backends.base import active  # late: it imports Keras

        self.facts.pop("launcher", None)  # of an earlier process
        # What is known before the first step is in the checkpoint of step 0, too.
        self.facts |= {
            "backend": backend_name(),
            "precision": precision_name(),
            "seed": run_seed(),
            "devices": active().computes_on()["devices"],
            "options": asdict(loop.options),
            "versions": versions(),
            **({"launcher": process_group().launcher} if process_group().launcher else {}),
        }
        if self.recovered:
            self._write()
        self._started, self._begun, self.from_before = True, False, False

    def _lock_directory(self) -> None:
        if self._left:  # an earlier call of this loop failed before its first step
            with _opened(self.path) as folder:
                self._seen = folder.identity, None
            self._left = False
        self._lock.acquire()
        with Folder.open(self.path) as folder:
            if (folder.identity, folder.version(RUN)) != self._seen:
                self._lock.release()
                raise DirectoryError(
                    f"another process continued the run in {self.path} after it was read here: run "
                    "the script again"
                )

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write `run.json` at the first step: the plan and the start time."""
        if self._begun:
            return
        self._begun = True
        if self._resumes:
            resumed = {"step": logs.first_step - 1, "at": _now()}
            self.facts["resumed"] = [*self.facts.get("resumed", []), resumed]
            self._resumes = False
        self.facts |= {
            "calls": self._calls,
            "plan": loop.plan,
            "execution": loop.executed,
            "started": self.facts.get("started", _now()),
            "error": None,
        }
        self._unfinish()
        self._write()

    def _unfinish(self) -> None:
        for name in OF_THE_END:
            self.facts.pop(name, None)
        self.facts["finished"] = None

    def record(self, loop: LoopView, record: Record) -> None:
        """Sample the learning rates at epochs and validations."""
        if record.kind != "log":
            rates = current_rates(loop.optimizers) if self._rates.due else {}
            self._rates.add(record.progress.step, rates)

    def state(self) -> dict[str, Any]:
        """Return the sampled learning rates."""
        return self._rates.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the sampled learning rates."""
        self._rates.restore(state)

    def _release(self) -> None:
        if self._held is not None:
            self._held.release()
            self._held = None

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Record that the run is finished, or the error or reason that ended it.

        If an error ended the run before its first step, run artifacts are removed, since without
        `run.json` a later run would reject the directory. If this run never started, they belong to
        another one and are kept.
        """
        if not self._started:
            self._release()
            return
        self._started = removed = False
        if not is_chief():
            self._release()
            return
        try:
            if not self._begun:
                with Folder.open(self.path) as folder:
                    if folder.kind(RUN) is None:
                        if error is not None:
                            self._remove(folder)
                            removed = True
                        return
            done = error is None and not loop.unfinished
            self.facts |= {
                # Later calls of an earlier process are not finished: they run again.
                "calls": self._calls[: self._calls_made] if done else self._calls,
                "reason": loop.reason,
                "error": None if error is None else f"{type(error).__name__}: {error}".rstrip(": "),
                "progress": asdict(loop.progress),
                "learning_rates": self._rates.facts(),
                "costs": {
                    name: spent + self._costs_before.get(name, 0)
                    for name, spent in asdict(loop.costs).items()
                },
            }
            self._unfinish()
            if done:
                from keras import Model  # late: it fixes the backend

                held = attributes_of(loop.task)
                models = [f"{n}{MODEL}" for n, x in held.items() if isinstance(x, Model)]
                with Folder.open(self.path) as folder:
                    files = list_files(folder, [STATE, *models, HEALTH])
                end = _now(), files, newest_hash(self.path)
                self.facts |= dict(zip(OF_THE_END, end, strict=True))
            self._write()
        finally:
            self._lock.release()
            self._release()
            if removed:
                self.leave()

    def leave(self) -> None:
        """Remove the run directory if this object created it and it is empty."""
        if not is_chief() or self._seen is None:
            return
        with suppress(OSError):  # it is not empty
            if identity_of(self.path) != self._seen[0]:
                return  # another one is in its place
            for place in self._made:
                place.rmdir()
                self._left = True

    def _read(self, fresh: bool) -> tuple[dict[str, Any], str, str]:
        """Return what `_claim` does, and lock the directory meanwhile; `start` locks it again."""
        with _opened(self.path) as folder:
            self._lock.acquire()
            try:
                claimed = self._claim(folder, fresh)
                self._remove_leftovers(folder)
                self._seen = folder.identity, folder.version(RUN)
                return claimed
            finally:
                self._lock.release()

    def _claim(self, folder: Folder, fresh: bool) -> tuple[dict[str, Any], str, str]:
        """Return the record of the run in the directory, after removing the run if `fresh`.

        Returns:
            The record, empty if there is no run; a sentence if it comes from a checkpoint; and the
            id of a new run.

        Raises:
            DirectoryError: If there are files that would be overwritten, but no record.
        """
        if fresh and folder.kind(RUN) is not None:  # perhaps damaged
            self._remove(folder)
        try:
            found, note = recorded_run(self.path)
        except LostRecordError as lost:
            if not lost.missing:
                raise
            self._reject_foreign_files(folder)
            return {}, "", token_hex(8)
        if note and not self._has_results(folder) and folder.kind(RUN) is None:
            # Ended before its first step: settings may be corrected. The id is that of step 0.
            return {}, "", found["id"]
        if fresh:
            self._remove(folder)
            return {}, "", token_hex(8)
        return dict(found), note, ""

    def _has_results(self, folder: Folder) -> bool:
        """Return whether a run has left more than the checkpoint of step 0 and empty files."""
        steps = Checkpoints(self.path / CHECKPOINTS).steps()
        return any(steps) or any(folder.size(name) for name in self._leaves)

    def _remove(self, folder: Folder) -> None:
        """Remove the artifacts of a run, and no other files."""
        remove_checkpoints(folder, CHECKPOINTS)
        remove_images(folder)  # the log lists them
        for name in (*self._leaves, DOCTOR):
            folder.remove_file(name)

    def _remove_leftovers(self, folder: Folder) -> None:
        """Remove temporary files of a process that was killed while it wrote them."""
        known = (*self._leaves, HOLDER, RUN, PROBE)
        for place in (folder, *([folder.subfolder(IMAGES)] if folder.is_folder(IMAGES) else [])):
            for name in place.names():
                whole = written_as(name)
                if whole == CHECKPOINTS:
                    remove_checkpoints(place, name)
                if whole in known or (place is not folder and whole.endswith(".png")):
                    place.remove_folder(name)

    def _reject_foreign_files(self, folder: Folder) -> None:
        """Reject a directory with files that the run would overwrite but did not write.

        Empty files are allowed: a killed process leaves them.

        Raises:
            DirectoryError: If there are such files.
        """
        steps = Checkpoints(self.path / CHECKPOINTS).steps()
        if any(steps):
            raise DirectoryError(
                f"{self.path} holds checkpoints up to step {steps[-1]}, but no {RUN}, and none of "
                f"them holds a valid copy of it. Restore a copy of {RUN}, or choose another "
                "directory"
            )
        found = [name for name in self._leaves if folder.size(name)]
        if found:
            raise DirectoryError(
                f"{self.path} holds {', '.join(found)}, but no {RUN}: these files are not of a "
                "Treadle run, and training would overwrite them. Choose another directory, or move "
                "them away"
            )

    def _compare(self, what: str, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Raise if the configurations differ, or record the differences if they are allowed."""
        found = differences(before, wanted)
        if any(not self._may_differ(text) for text in found):
            names = ", ".join(f'"{text.partition(" was ")[0]}"' for text in found)
            raise DirectoryError(
                f"{what}: {'; '.join(found)}. Choose another directory, start from scratch with "
                f"fresh=True (--fresh), or resume the run with override=[{names}] (--override)"
            )
        self.overridden += found
        if found:
            self.facts["overridden"] = [*self.facts.get("overridden", []), *found]

    def _may_differ(self, difference: str) -> bool:
        if isinstance(self._override, bool):
            return self._override
        return difference.partition(" was ")[0] in self._override

    def _write(self) -> None:
        """Write `run.json`, in the process that writes files."""
        if not is_chief():
            return
        if switched_off:
            self.facts["switched_off"] = [*switched_off]
        text = encode_record(self.facts)
        with Folder.open(self.path) as folder:
            folder.write(RUN, [text], len(text))
            self._seen = folder.identity, folder.version(RUN)


def _identifying(configuration: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the number of devices, on any of which a run may resume."""
    return {name: value for name, value in configuration.items() if name != "devices"}


def _opened(path: Path) -> Folder:
    """Open the directory of a run, after checking that files can be written to it.

    Raises:
        DirectoryError: If they cannot.
    """
    try:
        folder = Folder.open(path, create=True)
        probe = partial(PROBE)
        folder.create(probe, [], sync=False)
        folder.remove_file(probe)
    except DirectoryError as error:
        why = getattr(error.__cause__, "strerror", None) or error
        raise DirectoryError(
            f"cannot write to the run directory {path}: {why}. Choose another directory"
        ) from error
    return folder


def passed_over(facts: Mapping[str, Any]) -> dict[tuple[int, int, int], str]:
    """Return the excluded batches of a run: (epoch, batch, previous step) to the reason."""
    batches = facts.get("passed_over", [])
    return {(x["epoch"], x["batch"], x["step"]): x["why"] for x in batches}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
