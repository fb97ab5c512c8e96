"""The record of a run, `run.json`: what it was configured as, and whether it is finished."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ..directory import RUN, differences, read_run
from ..errors import DirectoryError
from ..hook import Hook, LoopView
from ..logs import StepLogs
from ..options import backend_name, precision_name, run_seed

LEFT_BEHIND = (RUN, "log.jsonl", "epochs.csv", "state.npz", "curves.png")
PACKAGES = ("treadle", "keras", "tensorflow", "jax", "torch", "numpy")


class RunRecord(Hook):
    """A directory that belongs to one run.

    Args:
        path: Made where it does not exist.
        configuration: What the run is, in JSON's types; another one in the same place is an error.
        fresh: Remove what an earlier run left.
        models: Names of the models that it leaves, as `model` for `model.keras`.

    Attributes:
        path: The directory.
        facts: What `run.json` holds.

    Raises:
        DirectoryError: It cannot be written to, holds a run of another configuration (the message
            shows the difference) or one that did not finish.
    """

    def __init__(
        self,
        path: Path,
        configuration: Mapping[str, Any],
        fresh: bool = False,
        models: Sequence[str] = (),
    ) -> None:
        self.path = path
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
        if fresh:
            for name in [*LEFT_BEHIND, *(f"{model}.keras" for model in models)]:
                (path / name).unlink(missing_ok=True)
        wanted: dict[str, Any] = json.loads(json.dumps(dict(configuration), default=str))
        self.facts: dict[str, Any] = read_run(path) if (path / RUN).exists() else {}
        self._from_before, self._begun = bool(self.facts), False
        self._fits: list[dict[str, Any]] = []
        if self.facts:
            self._compare(wanted)
        self.facts.setdefault("format", 1)
        self.facts["configuration"] = wanted

    @property
    def finished(self) -> bool:
        """Say whether the run that this directory holds came to its end."""
        return bool(self.facts.get("finished"))

    def is_done(self, asked: Mapping[str, Any]) -> bool:
        """Say whether this call of `fit` was finished by an earlier process, and note it if not.

        Raises:
            DirectoryError: Another call of `fit` was.
        """
        self._fits.append(dict(asked))
        if not self._from_before:
            return False
        fits = self.facts.get("fits", [])
        before = fits[len(self._fits) - 1] if len(fits) >= len(self._fits) else {}
        found = differences(before, asked)
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
        }
        self._write()

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write down that the run came to its end; one that failed stays unfinished."""
        if self._begun and error is None:
            progress = asdict(loop.progress)
            self.facts |= {"finished": _now(), "reason": loop.reason, "progress": progress}
            self.facts["costs"] = asdict(loop.costs)
            self._write()

    def _compare(self, wanted: Mapping[str, Any]) -> None:
        found = differences(self.facts.get("configuration", {}), wanted)
        if found:
            raise DirectoryError(
                f"{self.path} holds a run of another configuration: {'; '.join(found)}. "
                "Choose another directory, or start anew there with fresh=True (--fresh)"
            )
        if not self.finished:
            raise DirectoryError(
                f"{self.path} holds a run that did not finish, and it cannot be continued: choose "
                "another directory, or start anew there with fresh=True (--fresh)"
            )

    def _write(self) -> None:
        temporary = self.path / f"{RUN}.partial"
        temporary.write_text(json.dumps(self.facts, indent=2, default=str) + "\n")
        os.replace(temporary, self.path / RUN)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
