"""The directory of a run: what it was configured as, and whether it is finished.

`run.json` tells; this hook writes it, others write the files beside it.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .errors import DirectoryError
from .hook import Hook, LoopView
from .logs import StepLogs
from .options import backend_name, run_seed

RUN = "run.json"
LEFT_BEHIND = (RUN, "log.jsonl", "epochs.csv", "state.npz", "curves.png")
PACKAGES = ("treadle", "keras", "tensorflow", "jax", "torch", "numpy")


class RunDirectory(Hook):
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
        differences = _differences(before, asked)
        if differences:
            raise DirectoryError(
                f"{self.path} holds a finished run that cannot be continued: "
                f"{'; '.join(differences)}. Choose another directory, or start anew there with "
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
            self._write()

    def _compare(self, wanted: Mapping[str, Any]) -> None:
        differences = _differences(self.facts.get("configuration", {}), wanted)
        if differences:
            raise DirectoryError(
                f"{self.path} holds a run of another configuration: {'; '.join(differences)}. "
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


def read_run(path: Path) -> dict[str, Any]:
    """Return what a run directory's `run.json` holds.

    Raises:
        DirectoryError: There is none, or it cannot be read.
    """
    file = path / RUN
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DirectoryError(f"{path} holds no run: there is no {RUN} in it") from error
    except (OSError, ValueError) as error:
        raise DirectoryError(f"cannot read {file}: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("configuration"), dict):
        raise DirectoryError(f"{file} is not the record of a run")
    return record  # type: ignore[return-value]


def described(task: Any) -> dict[str, Any]:
    """Return what a task says of itself: its class and its plain attributes."""
    plain = {k: v for k, v in vars(task).items() if isinstance(v, (bool, int, float, str))}
    return {"task": type(task).__qualname__, "settings": plain}


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += _differences(before, after, f"{prefix}{key}.")  # type: ignore[arg-type]
        elif before != after:
            found.append(f"{prefix}{key} was {before!r}, now {after!r}")
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
