"""`load_run`, which opens a run directory: its settings, history, images, weights and models.

A directory may come from another person. Its files are read by the readers that commands use, which
check them and execute nothing. Keras and the backend are imported only to load a model.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoints
from ..checkpoint.run_files import fault_of, learned, learned_at
from ..core import views
from ..core.directory import CHECKPOINTS, LOG, MODEL, RunFile, why_unfinished
from ..core.folder import Folder
from ..core.history import History, html_parts
from ..core.terminal import clean
from ..errors import ConfigurationError, DirectoryError, TreadleWarning, did_you_mean
from ..hooks.images import FOLDER as IMAGES
from ..hooks.log_file import read
from ..run.recorded_history import history_of
from .images import listed_images, read_image
from .reading import flat
from .states import RunStatus, read_state, recorded_run

_LONGEST_REASON = 500  # characters of a message of Keras, which may quote a whole model


@dataclass(frozen=True)
class SavedImage:
    """An image that a run logged. A notebook displays it.

    Attributes:
        name: The name that it was logged with.
        step: The step at which it was logged.
        path: The PNG file in the run directory.
    """

    name: str
    step: int
    path: Path
    _run: str = field(default="", repr=False)

    def png(self) -> bytes:
        """Return the content of the PNG file.

        Raises:
            DirectoryError: If there is no such file, it has more than 1 MiB, or it is not the PNG
                file that the run wrote.
        """
        with Folder.open(self.path.parent.parent) as directory, directory.subfolder(IMAGES) as at:
            return read_image(at, self.path.name, self._run)

    def _repr_png_(self) -> bytes:
        """Return the PNG file that IPython displays in a notebook."""
        return self.png()


@dataclass(frozen=True, repr=False, kw_only=True)
class SavedRun(RunStatus):
    """A run that was read from its directory by `treadle.load_run`.

    It holds what the files said when they were read. `variables` and `model` read further files.

    Attributes:
        directory: The run directory.
        task: The name of the task.
        state: `finished`, `interrupted`, `failed`, or `running` if a process trains in the
            directory.
        reason: Why the run ended; empty if it did all its epochs or steps, or is running.
        settings: The settings of the task.
        configuration: Everything that identifies the run, the settings included.
        backend: The backend of the run.
        started: The time of the first step.
        versions: The versions of packages.
        step: The number of the last step.
        epoch: The number of finished epochs.
        last: The latest number of every name in the records.
        best: The best value and its epoch of each metric whose name implies a direction.
        history: Everything that the run logged, like `loop.history`. Images are their paths.
        images: The logged images, in order.
        checkpoints: The steps of the checkpoints.
        models: The names of the models saved at the end, which are attributes of the task.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> task = treadle.Supervised(model, "mse", "sgd")
        >>> with treadle.Loop(task, "runs/plane", console=False) as loop:
        ...     history = loop.fit(data, epochs=3)
        >>> run = treadle.load_run("runs/plane")
        >>> run.state, run.step, run.epoch, run.models
        ('finished', 6, 3, ('model',))
        >>> run.variables()["model/layers/0/kernel"].shape
        (2, 1)
    """

    task: str
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]
    history: History
    images: tuple[SavedImage, ...]
    checkpoints: tuple[int, ...]
    models: tuple[str, ...]
    _record: RunFile

    def __repr__(self) -> str:
        """Return the directory, the task, the state and the numbers of steps and epochs."""
        steps = f"{self.step:,} step{'s'[: self.step != 1]}"
        epochs = f"{self.epoch:,} epoch{'s'[: self.epoch != 1]}"
        return f"SavedRun({str(self.directory)!r}: {self.task}, {self.state}, {steps}, {epochs})"

    def _repr_html_(self) -> str:
        """Return the settings and the history, which a notebook displays."""
        facts = {"reason": self.reason, "started": self.started, "backend": self.backend}
        rows = [*((k, v) for k, v in facts.items() if v), *flat(self.settings).items()]
        return views.block(
            repr(self), views.table(("setting", ""), rows), *html_parts(self.history)
        )

    def variables(self, step: int | None = None) -> Mapping[str, Any]:
        """Return the value of every variable, by path, as NumPy arrays.

        They include the variables of optimizers, metrics and random generators. The paths are those
        of `loop.state`, for example `model/layers/0/kernel`.

        Args:
            step: The step of a checkpoint, one of `checkpoints`. By default the variables at the
                end of the run or, if the run has not finished, those of its newest checkpoint.

        Raises:
            DirectoryError: If there is no checkpoint, or none of this step.
            CheckpointError: If the checkpoint is damaged.
        """
        return learned(self.directory)[0] if step is None else learned_at(self.directory, step)

    def model(
        self, name: str | None = None, custom_objects: Mapping[str, Any] | None = None
    ) -> Any:
        """Load a model as it was at the end of the run, on any backend.

        No code of the run is executed: Keras loads the model in its safe mode, which knows the
        classes of Keras, those that you registered with `keras.saving`, and `custom_objects`.

        Args:
            name: The attribute of the task that held the model, one of `models`. It is not needed
                if the run saved one model.
            custom_objects: Classes and functions of the model that Keras does not know, by name.

        Returns:
            The model, not compiled.

        Raises:
            DirectoryError: If the run has not finished or saved no model of this name, the file is
                not the one that the run wrote, or Keras cannot load it.
            ConfigurationError: If the run saved several models, and `name` is not given.
        """
        directory = str(self.directory)
        otherwise = (
            f"Make the task again, and call treadle.warm_start(task, {directory!r}), or read "
            "run.variables()"
        )
        if not self._record.get("finished"):
            why = why_unfinished(self._record)
            raise DirectoryError(f"{directory} holds a run that did not finish{why}. {otherwise}")
        if not self.models:
            raise DirectoryError(
                f"{directory} holds no model: its task has none, or Keras could not save it, as a "
                f"warning in the log says. {otherwise}"
            )
        if name is None and len(self.models) > 1:
            raise ConfigurationError(
                f"{directory} holds {len(self.models)} models: {', '.join(self.models)}. Choose "
                f"one, for example run.model({next(iter(self.models))!r})"
            )
        chosen = next(iter(self.models)) if name is None else name
        if chosen not in self.models:
            raise DirectoryError(
                f"{directory} holds no model {chosen!r}.{did_you_mean(chosen, self.models)}"
            )
        file = f"{chosen}{MODEL}"
        expected = self._record.get("files", {}).get(file)
        assert expected is not None  # else it is none of `models`
        with Folder.open(self.directory) as folder:
            fault = fault_of(folder, file, expected)
        if fault:
            raise DirectoryError(f"{fault}. Restore a copy of the file, or: {otherwise}")
        return _load_model(self.directory / file, custom_objects, otherwise)


def load_run(directory: str | Path) -> SavedRun:
    """Read a run directory: settings, state, history, images, checkpoints and models.

    Only regular files in the directory are read, and nothing in it is executed. The run may have
    been started by a command or by a script, and may still train.

    Args:
        directory: The run directory.

    Raises:
        DirectoryError: If the directory holds no run, or a file in it is damaged.
        DataError: If the log is damaged; the message names the line.
        CheckpointError: If the folder of the checkpoints cannot be read.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", "sgd")
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> with treadle.Loop(task, "runs/line", console=False) as loop:
        ...     history = loop.fit(data, epochs=3)
        >>> run = treadle.load_run("runs/line")
        >>> run
        SavedRun('runs/line': Supervised, finished, 6 steps, 3 epochs)
        >>> run.history["loss"] == history["loss"], run.checkpoints[-1]
        (True, 6)
        >>> run.model().predict(np.ones((1, 2)), verbose=0).shape
        (1, 1)
    """
    directory = Path(directory)
    record, recovered = recorded_run(directory)
    if recovered:
        warnings.warn(recovered, TreadleWarning, stacklevel=2)
    state = read_state(directory, record)
    configuration = record["configuration"]
    with Folder.open(directory) as folder:
        has_log = folder.kind(LOG) is not None
    if not has_log and state.step > 0:
        warnings.warn(
            f"{directory / LOG} is missing, so the history is empty", TreadleWarning, stacklevel=2
        )
    log = read(directory / LOG) if has_log else None
    logged = listed_images(log.records) if log else []
    files = record.get("files", {})
    return SavedRun(
        **vars(state),
        task=clean(configuration.get("task", "")),
        configuration=configuration,
        versions=record.get("versions", {}),
        history=history_of(log) if log else History(),
        images=tuple(
            SavedImage(name, at, directory / IMAGES / file, record["id"])
            for name, at, file in logged
        ),
        checkpoints=tuple(Checkpoints(directory / CHECKPOINTS).steps()),
        models=tuple(n.removesuffix(MODEL) for n, x in files.items() if x and n.endswith(MODEL)),
        _record=record,
    )


def _load_model(path: Path, custom_objects: Mapping[str, Any] | None, otherwise: str) -> Any:
    """Load a file of Keras in its safe mode.

    Raises:
        DirectoryError: If Keras does not load it.
    """
    from keras import saving  # late: importing Keras fixes the backend

    from ..core.options import without_tensorflow

    try:
        with without_tensorflow():
            return saving.load_model(
                path, dict(custom_objects or {}), compile=False, safe_mode=True
            )
    # Keras raises errors of many classes for files that are damaged or that it refuses.
    except Exception as error:
        raise DirectoryError(
            f"Keras did not load {path}: {_reason(error)}. Pass the model's own "
            f"classes and functions as custom_objects={{name: class}}, or: {otherwise}"
        ) from error


def _reason(error: Exception) -> str:
    """Return what Keras says without the configurations that it quotes."""
    text = str(error).rpartition("Exception encountered: ")[2]
    text = text.partition("Full object config:")[0].partition("\n")[0]
    return clean(text, _LONGEST_REASON).strip().rstrip(".") or type(error).__name__
