"""The hook `Wandb`, which sends a run to Weights & Biases, or writes it for a later upload."""

import importlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from .tracking import Tracker
from .tracking_sender import Sent, Values
from .wandb_files import last_step

UNSURE: Final = 10_000  # steps that the package may hold in memory when its process is killed


class Wandb(Tracker):
    """Sends settings, values of every step, records, images and files to Weights & Biases.

    A background thread sends; training never waits. With `mode="offline"`, the package writes files
    into the folder `wandb` in the run directory, which `wandb sync` uploads later. A resumed run
    continues the same run, and each step is sent once; `wandb.json` in the run directory holds its
    id and the last step. Offline, each process writes a folder of its own: upload all of them with
    `wandb sync --append`.

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
    """The connection to the package `wandb`, which has a process of its own for the network.

    Args:
        project: The name of the project.
        name: The name of the run, or None.
        mode: `"online"`, `"offline"` or None.
        directory: The run directory, or None.
    """

    keeps_last_step = True  # until a later step is logged, more may join its row

    def __init__(
        self, project: str, name: str | None, mode: str | None, directory: Path | None
    ) -> None:
        self._project, self._name, self._mode = project, name, mode
        self._directory = directory
        self._run: Any = None

    def received(self, run: str, sent: Sent) -> Sent:
        """Return what the files hold, and online what has surely left the killed process."""
        step = None if self._directory is None else last_step(self._directory, run)
        return Sent(max(0, sent.step - UNSURE) if step is None else step)

    def open(self, run: str | None, settings: Mapping[str, Any]) -> tuple[str, Sent | None]:
        """Start a run, or continue one; only the server knows what it has received."""
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
        if self._run.offline:
            return str(self._run.id), None
        # After a resume, `step` is the next one; a new run has 0.
        return str(self._run.id), Sent(max(0, int(self._run.step) - 1))

    def send(self, values: Sequence[Values]) -> None:
        """Log values by step; what is logged at the same step joins one row."""
        wandb = importlib.import_module("wandb")
        for value in values:
            row: dict[str, Any] = {**value.numbers, **value.texts}
            with tempfile.TemporaryDirectory() as folder:
                for name, image in value.images.items():
                    path = Path(folder) / (re.sub(r"[^\w.-]", "_", name) + ".png")
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
