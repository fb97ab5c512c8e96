"""The hook `MLflow`, which sends a run to an MLflow tracking server."""

import hashlib
import importlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from posixpath import normpath
from typing import Any, Final

from ..core.file_names import file_name
from .tracking import Tracker, Values

LONGEST: Final = 5000  # characters of a parameter or a tag
MOST_CHARACTERS: Final = 250  # of the name of a value or a parameter
MOST_PARAMETERS: Final = 100  # in one call
_OTHERS: Final = re.compile(r"[^\w\-. :/]")


class MLflow(Tracker):
    """Sends settings, values of every step, records, images and files to MLflow.

    A background thread sends; training never waits for the server. If it cannot be reached, the
    thread tries again, and what was not sent is logged as a warning at the end. A resumed run
    continues the same MLflow run, whose id is in `mlflow.json` in the run directory, and sends the
    steps after its checkpoint again.

    - Parameters: the settings of the task, the backend, the seed and the precision.
    - Metrics: `loss` etc. for every step; `val_loss` and logged numbers; `epoch/loss` etc. for the
      means of an epoch.
    - Artifacts: logged images and texts, and at the end all files of the run directory, such as
      the final model and the log, without checkpoints.

    Args:
        experiment: The name of the experiment, which is created if needed.
        uri: The address of the server, such as `"http://127.0.0.1:5000"`; by default as MLflow
            itself chooses it (`MLFLOW_TRACKING_URI`).
        name: The name of the run; by default that of the run directory.
        upload: Whether to upload the files of the run directory at the end.
        wait: How many seconds to wait at the end for what is not sent yet.

    Raises:
        ConfigurationError: If the package `mlflow` or `mlflow-skinny` is not installed, or `wait`
            is negative.

    Example:
        >>> import treadle
        >>> hook = treadle.hooks.MLflow("digits", uri="http://127.0.0.1:5000")  # doctest: +SKIP
    """

    def __init__(
        self,
        experiment: str = "Default",
        uri: str | None = None,
        name: str | None = None,
        upload: bool = True,
        wait: float = 30.0,
    ) -> None:
        super().__init__("mlflow", upload, wait)
        self._experiment, self._uri, self._name = experiment, uri, name

    def client(self, directory: Path | None) -> "MLflowClient":
        """Return a client for a run directory."""
        name = self._name or (directory.name if directory is not None else None)
        return MLflowClient(self._experiment, self._uri, name)


class MLflowClient:
    """The connection to a server."""

    unsure = 0

    def __init__(self, experiment: str, uri: str | None, name: str | None) -> None:
        self._experiment, self._uri, self._name = experiment, uri, name
        self._client: Any = None
        self._run = ""

    def open(self, run: str | None, settings: Mapping[str, Any]) -> str:
        """Create a run with its parameters, or continue one, and return its id."""
        entities = importlib.import_module("mlflow.entities")
        tracking = importlib.import_module("mlflow.tracking")
        self._client = client = tracking.MlflowClient(self._uri)
        if run is not None:
            client.update_run(run, status="RUNNING")
            self._run = run
            return run
        found = client.get_experiment_by_name(self._experiment)
        place = found.experiment_id if found else client.create_experiment(self._experiment)
        made = client.create_run(place, run_name=self._name).info.run_id
        parameters = [entities.Param(_name(k), str(v)[:LONGEST]) for k, v in settings.items()]
        for i in range(0, len(parameters), MOST_PARAMETERS):
            client.log_batch(made, params=parameters[i : i + MOST_PARAMETERS])
        self._run = made
        return made

    def send(self, values: Sequence[Values]) -> None:
        """Send values: the metrics in one call, and each image and text as a file."""
        entities = importlib.import_module("mlflow.entities")
        metrics = [
            entities.Metric(_name(name), number, int(1000 * value.seconds), value.step)
            for value in values
            for name, number in value.numbers.items()
        ]
        for value in values:
            self._send_files(value)
        self._client.log_batch(self._run, metrics=metrics)

    def _send_files(self, value: Values) -> None:
        if not value.images and not value.texts:
            return
        with tempfile.TemporaryDirectory() as folder:
            for name, image in value.images.items():
                path = Path(folder) / f"{file_name(name)}-{value.step}.png"
                path.write_bytes(image.png())
                self._client.log_artifact(self._run, str(path), "images")
            for name, text in value.texts.items():
                path = Path(folder) / f"{file_name(name)}-{value.step}.txt"
                path.write_text(text, encoding="utf-8")
                self._client.log_artifact(self._run, str(path), "texts")

    def upload(self, directory: Path, files: Sequence[str]) -> None:
        """Upload files as artifacts below `run`."""
        for file in files:
            folder = str(Path("run") / Path(file).parent)
            self._client.log_artifact(self._run, str(directory / file), folder)

    def close(self, status: str) -> None:
        """End the run."""
        known = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
        self._client.set_terminated(self._run, known[status])


def _name(name: str) -> str:
    """Return a name that MLflow accepts: other characters become underscores.

    MLflow rejects a whole batch of values for the name of one, if that is too long, or no relative
    path in its shortest form. In such names, slashes become underscores too, and a hash follows.

    Example:
        >>> _name("norm/model[0]"), _name("a//b")
        ('norm/model_0_', 'a__b-7a9acf33')
    """
    found = _OTHERS.sub("_", name)
    if len(found) <= MOST_CHARACTERS and normpath(found) == found and found[0] not in "./":
        return found
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{found.replace('/', '_').lstrip('.')[: MOST_CHARACTERS - 9]}-{digest}"
