"""The record of a run, `run.json`: what it was configured as, and whether it is finished."""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..core.directory import CHECKPOINTS, LOG, RUN, STATE, differences, read_run
from ..core.hook import Hook, LoopView
from ..core.identity import changed_code, code_of, identity, versions
from ..core.lock import Lock
from ..core.logs import StepLogs
from ..core.options import backend_name, precision_name, run_seed
from ..core.progress import Progress
from ..errors import DirectoryError
from .final import read_arrays
from .images import remove as remove_images

LEFT_BEHIND = (RUN, LOG, "epochs.csv", STATE, "curves.png")


class RunRecord(Hook):
    """A directory that belongs to one run.

    Args:
        path: Made where it does not exist.
        task: What is trained. Another one, or one that was made otherwise, in the same place is an
            error.
        configuration: What else the run is, in JSON's types.
        fresh: Remove what an earlier run left.
        override: Go on with a run of another configuration, and record what differs; or the names
            of what may differ.

    Attributes:
        path: The directory.
        facts: What `run.json` holds.
        changed: What changed in the code since the run that it holds, or nothing.
        overridden: What differs from the run that it holds, where that was allowed.

    Raises:
        DirectoryError: It cannot be written to, another process trains into it, it holds a run of
            another configuration (the message shows the difference), or files like a run's without
            one.
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
        self._leaves = [*LEFT_BEHIND, *(f"{attribute}.keras" for attribute in vars(task))]
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise DirectoryError(
                f"cannot write to the run directory {path}: {error.strerror or error}. Choose "
                "another directory"
            ) from error
        self._lock = Lock(path)
        self._lock.acquire()  # for now; a run that begins takes it again
        try:
            if not (path / RUN).exists():
                self._refuse_strangers()
            elif fresh:
                self._remove()
                remove_images(path)
            wanted, code = _in_json({**identity(task), **configuration}), code_of(task)
            self.facts: dict[str, Any] = read_run(path) if (path / RUN).exists() else {}
            self._seen = self._version()
        finally:
            self._lock.release()
        self.from_before, self._started, self._begun = bool(self.facts), False, False
        self._calls: list[dict[str, Any]] = list(self.facts.get("calls", []))
        if self.facts:
            self._compare(
                f"{path} holds a run of another configuration",
                self.facts.get("configuration", {}),
                wanted,
            )
        self.changed = changed_code(self.facts.get("code", {}), code)
        self.facts = {"format": 1, "code": code, **self.facts, "configuration": wanted}

    @property
    def finished(self) -> bool:
        """Say whether the run that this directory holds came to its end, in another process."""
        return self.from_before and bool(self.facts.get("finished"))

    @property
    def progress(self) -> Progress:
        """Where the finished run that this directory holds stands."""
        return Progress(**self.facts["progress"])

    def final_state(self) -> Mapping[str, Any]:
        """Return every variable as the finished run left it; nothing where it did not say."""
        file = self.path / STATE
        return read_arrays(file) if file.exists() else {}

    def passed_over(self) -> dict[tuple[int, int, int], str]:
        """Return the batches that the run goes on without; see `pass_over`."""
        return passed_over(self.facts)

    def pass_over(self, at: Progress, why: str) -> None:
        """Record that the run goes on without the batch that would come here."""
        batch = {"epoch": at.epoch, "batch": at.batch, "step": at.step, "why": why}
        self.facts["passed_over"] = [*self.facts.get("passed_over", []), batch]
        self._write()

    def call(self, number: int, asked: Mapping[str, Any]) -> bool:
        """Take note of what a call that trains was asked for; say whether it was done before.

        Args:
            number: The number of the call, from 0.
            asked: Its arguments.

        Raises:
            DirectoryError: It was asked for something else before.
        """
        wanted = _in_json(asked)
        if number >= len(self._calls):
            self._calls.append(wanted)
            return False
        before, self._calls[number] = self._calls[number], wanted
        self._compare(f"{self.path} holds another run", before, wanted)
        return self.finished and not self.overridden

    def compare_constants(self, before: Mapping[str, str], now: Mapping[str, str]) -> None:
        """Compare the Python values that the run began with, of those that changed since.

        Raises:
            DirectoryError: The script begins with other values, and no override allows that.
        """
        what = f"{self.path} holds a run that began with other Python values"
        self._compare(what, {"constants": before}, {"constants": now})

    def may_lose(self, changed: Mapping[str, str]) -> bool:
        """Say whether an override lets the run resume without these changes; record them if so."""
        found = [f"constants.{path} was not put back: {how}" for path, how in changed.items()]
        if not all(self._may_differ(text) for text in found):
            return False
        self.facts["overridden"] = [*self.facts.get("overridden", []), *found]
        return True

    def start(self, loop: LoopView) -> None:
        """Take the directory for this process; a call that trains is unfinished until its end.

        Raises:
            DirectoryError: Another process trains into it, or has done so since it was looked at.
        """
        self._lock.acquire()
        if self._version() != self._seen:
            self._lock.release()
            raise DirectoryError(
                f"the run in {self.path} went on in another process since it was read: run the "
                "script again"
            )
        self._started, self._begun, self.from_before = True, False, False

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write down, at the first step, that a run has started, and on what."""
        if self._begun:
            return
        self._begun = True
        self.facts["calls"] = self._calls
        self.facts |= {
            "backend": backend_name(),
            "precision": precision_name(),
            "seed": run_seed(),
            "options": asdict(loop.options),
            "plan": loop.plan,
            "versions": versions(),
            "started": self.facts.get("started", _now()),
            "finished": None,
            "error": None,
        }
        self._write()

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write down that the run came to its end, or what ended it unfinished.

        Where no step ran, nothing is left: files without the record of a run are nobody's. Where
        the run could not start, they are somebody else's.
        """
        if not self._started:
            return
        self._started = False
        try:
            if not self._begun and not (self.path / RUN).exists():
                if error is not None:
                    self._remove()
                return
            done = error is None and not loop.unfinished
            self.facts |= {
                "calls": self._calls,
                "finished": _now() if done else None,
                "reason": loop.reason,
                "error": None if error is None else f"{type(error).__name__}: {error}".rstrip(": "),
                "progress": asdict(loop.progress),
                "costs": asdict(loop.costs),
            }
            self._write()
        finally:
            self._lock.release()

    def _remove(self) -> None:
        for name in self._leaves:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def _refuse_strangers(self) -> None:
        """Refuse a directory with files of somebody else's that the run would write.

        Raises:
            DirectoryError: There are some. Empty ones are what a killed process left.
        """
        files = [self.path / name for name in self._leaves]
        found = [file.name for file in files if file.is_file() and file.stat().st_size]
        if found:
            raise DirectoryError(
                f"{self.path} holds {', '.join(found)}, but no {RUN}: these are not of a run of "
                "Treadle, and it would overwrite them. Choose another directory, or move them away"
            )

    def _compare(self, what: str, before: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Refuse to go on as another run, or take note of the differences where that is wanted."""
        found = differences(before, wanted)
        if any(not self._may_differ(text) for text in found):
            raise DirectoryError(
                f"{what}: {'; '.join(found)}. Choose another directory, start anew there with "
                "fresh=True (--fresh), or go on with it all the same with override=True "
                "(--override)"
            )
        self.overridden += found
        if found:
            self.facts["overridden"] = [*self.facts.get("overridden", []), *found]

    def _may_differ(self, difference: str) -> bool:
        if isinstance(self._override, bool):
            return self._override
        return difference.partition(" was ")[0] in self._override

    def _write(self) -> None:
        temporary = self.path / f"{RUN}.partial"
        temporary.write_text(json.dumps(self.facts, indent=2, default=str) + "\n")
        os.replace(temporary, self.path / RUN)
        self._seen = self._version()

    def _version(self) -> tuple[int, int] | None:
        """Return what tells one `run.json` from the next: each run that takes a step writes one."""
        try:
            found = (self.path / RUN).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns


def passed_over(facts: Mapping[str, Any]) -> dict[tuple[int, int, int], str]:
    """Return the batches that a run passed over, by epoch, batch and step before, and why."""
    batches = facts.get("passed_over", [])
    return {(x["epoch"], x["batch"], x["step"]): x["why"] for x in batches}


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they are when they have been written and read again."""
    return json.loads(json.dumps(dict(values), default=str))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
