"""The record of a run, `run.json`: what it was configured as, and whether it is finished."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..directory import (
    INTERRUPTED_STATE,
    RUN,
    STATE,
    differences,
    read_run,
    why_unfinished,
)
from ..errors import DirectoryError
from ..hook import Hook, LoopView
from ..identity import changed_code, code_of, identity
from ..logs import StepLogs
from ..options import backend_name, precision_name, run_seed
from ..progress import Progress

LEFT_BEHIND = (RUN, "log.jsonl", "epochs.csv", STATE, INTERRUPTED_STATE, "curves.png")
PACKAGES = ("treadle", "keras", "tensorflow", "jax", "torch", "numpy")


class RunRecord(Hook):
    """A directory that belongs to one run.

    Args:
        path: Made where it does not exist.
        task: What is trained. Another one, or one that was made otherwise, in the same place is an
            error.
        configuration: What else the run is, in JSON's types.
        fresh: Remove what an earlier run left.

    Attributes:
        path: The directory.
        facts: What `run.json` holds.
        changed: What changed in the code since the finished run that it holds, or nothing.

    Raises:
        DirectoryError: It cannot be written to, holds a run of another configuration (the message
            shows the difference) or one that did not finish, or files like a run's without one.
    """

    def __init__(
        self,
        path: Path,
        task: Any,
        configuration: Mapping[str, Any],
        fresh: bool = False,
    ) -> None:
        self.path = path
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
        if not (path / RUN).exists():
            self._refuse_strangers()
        elif fresh:
            self._remove()
        wanted, code = _in_json({**identity(task), **configuration}), code_of(task)
        self.facts: dict[str, Any] = read_run(path) if (path / RUN).exists() else {}
        self._from_before, self._begun = bool(self.facts), False
        self._fits: list[dict[str, Any]] = []
        if self.facts:
            self._compare(wanted)
        self.changed = changed_code(self.facts.get("code", {}), code)
        self.facts = {"format": 1, "code": code, **self.facts, "configuration": wanted}

    @property
    def finished(self) -> bool:
        """Say whether the run that this directory holds came to its end."""
        return bool(self.facts.get("finished"))

    @property
    def progress(self) -> Progress:
        """Where the run that this directory holds stands."""
        return Progress(**self.facts["progress"])

    def is_done(self, asked: Mapping[str, Any]) -> bool:
        """Say whether this call of `fit` was finished by an earlier process, and note it if not.

        Raises:
            DirectoryError: Another call of `fit` was.
        """
        self._fits.append(_in_json(asked))
        if not self._from_before:
            return False
        fits = self.facts.get("fits", [])
        before = fits[len(self._fits) - 1] if len(fits) >= len(self._fits) else {}
        found = differences(before, self._fits[-1])
        if found:
            raise DirectoryError(
                f"{self.path} holds a finished run that cannot be continued: "
                f"{'; '.join(found)}. Choose another directory, or start anew there with "
                "fresh=True (--fresh)"
            )
        return True

    def start(self, loop: LoopView) -> None:
        """Refuse to train where a run has finished; a call that trains is unfinished until its end.

        Raises:
            DirectoryError: The run was finished by an earlier process.
        """
        if self._from_before:
            raise DirectoryError(
                f"{self.path} holds a finished run, which would be overwritten: choose another "
                "directory, or start anew there with fresh=True (--fresh)"
            )
        self._begun = False

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Write down, at the first step, that a run has started, and on what."""
        if self._begun:
            return
        self._begun = True
        self.facts["fits"] = self._fits
        versions: dict[str, str] = {"python": platform.python_version()}
        for package in PACKAGES:
            try:
                versions[package] = version(package)
            except PackageNotFoundError:
                continue
        self.facts |= {
            "backend": backend_name(),
            "precision": precision_name(),
            "seed": run_seed(),
            "options": asdict(loop.options),
            "plan": loop.plan,
            "versions": versions,
            "started": _now(),
            "finished": None,
            "error": None,
        }
        self._write()

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write down that the run came to its end, or what ended it unfinished.

        Where no step ran, nothing is left: files without the record of a run are nobody's.
        """
        if not self._begun:
            if error is not None and not (self.path / RUN).exists():
                self._remove()
            return
        self.facts |= {
            "finished": _now() if error is None else None,
            "reason": loop.reason,
            "error": None if error is None else f"{type(error).__name__}: {error}".rstrip(": "),
            "progress": asdict(loop.progress),
            "costs": asdict(loop.costs),
        }
        self._write()

    def _remove(self) -> None:
        for name in self._leaves:
            (self.path / name).unlink(missing_ok=True)

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

    def _compare(self, wanted: Mapping[str, Any]) -> None:
        found = differences(self.facts.get("configuration", {}), wanted)
        if found:
            raise DirectoryError(
                f"{self.path} holds a run of another configuration: {'; '.join(found)}. "
                "Choose another directory, or start anew there with fresh=True (--fresh)"
            )
        if not self.finished:
            raise DirectoryError(
                f"{self.path} holds a run that did not finish{why_unfinished(self.facts)}, and it "
                "cannot be continued: choose another directory, or start anew there with "
                "fresh=True (--fresh)"
            )

    def _write(self) -> None:
        temporary = self.path / f"{RUN}.partial"
        temporary.write_text(json.dumps(self.facts, indent=2, default=str) + "\n")
        os.replace(temporary, self.path / RUN)


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they are when they have been written and read again."""
    return json.loads(json.dumps(dict(values), default=str))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
