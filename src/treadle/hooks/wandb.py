"""The hook `Wandb`, which sends a run to Weights & Biases, or writes it for a later upload."""

import importlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from ..core.file_names import file_name
from .tracking import Tracker, Values


class Wandb(Tracker):
    """Sends settings, values of every step, records, images and files to Weights & Biases.

    A background thread sends; training never waits. With `mode="offline"`, the package writes files
    into the folder `wandb` in the run directory, which `wandb sync` uploads later. A resumed run
    continues the same run, whose id is in `wandb.json` in the run directory. Offline, each process
    writes a folder of its own, which begins with steps that the one before may have lost: upload
    all of them with `wandb sync --append`.

    Logged numbers and values of steps keep their names; the means of an epoch are `epoch/loss` etc.
    At the end, all files of the run directory, such as the final model and the log, become an
    artifact of type `run`, without checkpoints.

    Args:
        project: The name of the project.
        name: The name of the run; by default that of the run directory.
        mode: `"online"` or `"offline"`; by default as the package chooses it (`WANDB_MODE`).
        upload: Whether to add the files of the run directory at the end.
        wait: How many seconds to wait at the end for what is not sent yet.

    Raises:
        ConfigurationError: If the package `wandb` is not installed, or `wait` is negative.

    Example:
        >>> import treadle
        >>> hook = treadle.hooks.Wandb("digits", mode="offline")  # doctest: +SKIP
    """

    def __init__(
        self,
        project: str = "treadle",
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        upload: bool = True,
        wait: float = 30.0,
    ) -> None:
        super().__init__("wandb", upload, wait)
        self._project, self._name, self._mode = project, name, mode

    def client(self, directory: Path | None) -> "WandbClient":
        """Return a client for a run directory."""
        name = self._name or (directory.name if directory is not None else None)
        return WandbClient(self._project, name, self._mode, directory)


class WandbClient:
    """The connection to the package `wandb`, which has a process of its own for the network."""

    unsure = 10_000  # steps that the package may hold in memory when its process is killed

    def __init__(
        self, project: str, name: str | None, mode: str | None, directory: Path | None
    ) -> None:
        self._project, self._name, self._mode = project, name, mode
        self._directory = directory
        self._run: Any = None

    def open(self, run: str | None, settings: Mapping[str, Any]) -> str:
        """Start a run, or continue one, and return its id."""
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(
            project=self._project,
            name=self._name,
            id=run,
            resume="allow" if run is not None else None,
            mode=self._mode,
            config=dict(settings),
            dir=None if self._directory is None else str(self._directory),
            reinit="create_new",
        )
        return str(self._run.id)

    def send(self, values: Sequence[Values]) -> None:
        """Log values by step; what is logged at the same step joins one row."""
        wandb = importlib.import_module("wandb")
        for value in values:
            if value.step < self._run.step:  # the package accepts no earlier step: it was received
                continue
            row: dict[str, Any] = {**value.numbers, **value.texts}
            with tempfile.TemporaryDirectory() as folder:
                for name, image in value.images.items():
                    path = Path(folder) / f"{file_name(name)}.png"
                    path.write_bytes(image.png())
                    row[name] = wandb.Image(str(path))
                self._run.log(row, step=value.step)

    def upload(self, directory: Path, files: Sequence[str]) -> None:
        """Add files as an artifact."""
        wandb = importlib.import_module("wandb")
        artifact = wandb.Artifact(f"run-{self._run.id}", type="run")
        for file in files:
            artifact.add_file(str(directory / file), name=file)
        self._run.log_artifact(artifact)

    def close(self, status: str) -> None:
        """End the run."""
        self._run.finish(exit_code=0 if status == "finished" else 1)
