"""The `TensorBoard` hook, which writes event files without TensorFlow."""

import os
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np

from ..core.habits import OF_TENSORBOARD, explains
from ..core.hook import Hook, LoopView
from ..core.images import Image
from ..core.logs import Array, Record, StepLogs, plain
from ..core.triggers import Span, When
from ..errors import ConfigurationError, require_package
from .events import PATTERN, EventFile
from .lines import resolved
from .tracking import recorded_settings

# Folders; TensorBoard shows each as a run. Hyperparameters are written to the training folder,
# since TensorBoard would show a separate folder as a run without charts.
TRAIN, VALIDATION = "", "validation"
SECONDS_BETWEEN = 1.0  # between writes of steps: one write of many steps is cheaper than many
BINS = 30  # the number that TensorBoard draws


class TensorBoard(Hook):
    """Writes the log of a run for TensorBoard; view it with `tensorboard --logdir runs`.

    The horizontal axis is always the step of the run. TensorBoard shows the directory as one run
    and its subfolder `validation` as another, so that both curves share a chart. The files contain:

    - `loss` etc.: means and metrics of each epoch and validation; `val_loss` is `loss` of the run
      `validation`;
    - `steps/loss` etc.: the values returned by every step;
    - `learning_rate`, or `learning_rate/<optimizer>` if there are several, about once a second and
      at each record;
    - numbers, strings and images logged with `loop.log` or by hooks;
    - histograms of all weights if `histograms` is given; each one reads the weights from the
      device;
    - hyperparameters: the settings of the task, the backend, the seed and the precision.

    Step values are written about once a second, for many steps at once. A resumed run continues in
    the same directory: events of steps after the checkpoint are removed, so that no step appears
    twice.

    Args:
        directory: The directory, which no other run may use; by default `tensorboard` in the run
            directory.
        histograms: The interval between histograms of the weights, such as `"1 epoch"` or
            `"500 steps"`; None for no histograms.

    Raises:
        ConfigurationError: If the package `tensorboard` is not installed, or `histograms` is
            invalid. At the start: if neither `directory` nor a run directory is given, or if
            `directory` contains events of another run.

    Example:
        >>> import treadle
        >>> board = treadle.hooks.TensorBoard("logs/first", histograms="1 epoch")
    """

    chief_only = True

    @explains("TensorBoard", OF_TENSORBOARD)
    def __init__(self, directory: str | Path | None = None, histograms: str | None = None) -> None:
        require_package("tensorboard", "the hook TensorBoard needs the package tensorboard, which")
        self._given = None if directory is None else Path(directory).absolute()
        self.when = None if histograms is None else When(Span.parse(histograms))
        self._restored: dict[str, int] | None = None  # file sizes from a checkpoint
        self._ended: dict[str, int] = {}  # file sizes at the end of the previous `fit` call
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Remove events of later steps that an earlier process wrote."""
        root = resolved(self._given, loop, "tensorboard/", self, "'logs/first'")
        restored, self._restored = self._restored, None
        self._begin()
        self._root = root
        self._looked = loop.progress
        self._first = loop.progress.step + 1
        self._optimizers = loop.state.optimizers
        if restored is not None:
            self._cut(restored)
        elif loop.progress.step == 0:
            self._clear()
        else:
            self._kept = self._ended
        self._described = bool(self._kept)

    def steps(self, loop: LoopView, logs: StepLogs) -> None:
        """Collect the values of every step, and write them about once a second."""
        self._pending.append((time(), logs))
        if monotonic() >= self._due:
            self._add_learning_rates(loop.progress.step)
            self._flush(loop)
        before, self._looked = self._looked, loop.progress
        if self.when is not None and self.when.due(before, loop.progress):
            self._add_histograms(loop)

    def record(self, loop: LoopView, record: Record) -> None:
        """Write the values of an epoch, a validation or a log."""
        if self._root is None:  # logged by a hook before this one started or after it ended
            return
        self._write_pending()
        step, now = record.progress.step, time()
        for folder, values in _by_folder(record).items():
            found = [value for name, part in values.items() if (value := _value(name, part))]
            if record.kind != "log":  # an epoch record repeats the values of its validation
                found = [v for v in found if self._last_steps.get((folder, v.tag)) != step]
                self._last_steps |= {(folder, value.tag): step for value in found}
            if found:
                self._file(folder).add(step, now, found)
        if record.kind != "log":
            self._add_learning_rates(step)
        when = self.when if record.kind == "epoch" else None
        if when is not None and when.due(record.progress, record.progress, epoch_ended=True):
            self._add_histograms(loop)
        self._flush(loop)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write pending values and close the files."""
        if self._root is None:
            return
        self._flush(loop)
        self._ended = self._all_sizes()
        for file in self._files.values():
            file.close()
        self._files, self._root = {}, None

    def state(self) -> dict[str, Any]:
        """Flush the files to disk and return their sizes."""
        self._write_pending()
        return {"sizes": self._all_sizes() if self._root is not None else self._ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Truncate the files to the saved sizes when the run resumes."""
        self._restored = dict(state["sizes"])

    def _begin(self) -> None:
        self._root: Path | None = None
        self._files: dict[str, EventFile] = {}
        self._kept: dict[str, int] = {}  # sizes of the files of earlier processes, by path
        self._pending: list[tuple[float, StepLogs]] = []
        self._optimizers: Mapping[str, Any] = {}
        self._last_steps: dict[tuple[str, str], int] = {}  # the last step of each tag of a record
        self._first, self._due, self._described = 1, 0.0, False

    def _paths(self) -> Iterable[tuple[str, Path]]:
        """Yield the existing event files with their names in checkpoints."""
        assert self._root is not None
        for folder in (TRAIN, VALIDATION):
            for path in (self._root / folder).glob(PATTERN):
                yield f"{folder}/{path.name}", path

    def _cut(self, sizes: Mapping[str, int]) -> None:
        for name, path in list(self._paths()):
            if name not in sizes:
                path.unlink()
            else:
                os.truncate(path, min(sizes[name], path.stat().st_size))
                self._kept[name] = path.stat().st_size

    def _clear(self) -> None:
        """Remove the event files of an earlier run in the run directory.

        Raises:
            ConfigurationError: If there are files in a directory that the user chose.
        """
        found = list(self._paths())
        if found and self._given is not None:
            raise ConfigurationError(
                f"{self._root} holds events of another run ({found[0][0].lstrip('/')}): choose "
                "another directory, or remove it"
            )
        for _, path in found:
            path.unlink()

    def _all_sizes(self) -> dict[str, int]:
        own = {f"{folder}/{f.path.name}": f.size() for folder, f in self._files.items()}
        return self._kept | own

    def _file(self, folder: str) -> EventFile:
        """Return the event file of a folder; create it if needed."""
        if folder not in self._files:
            assert self._root is not None
            self._files[folder] = EventFile(self._root / folder, self._first)
        return self._files[folder]

    def _flush(self, loop: LoopView) -> None:
        """Write pending values and flush the files for readers."""
        self._write_pending()
        if self._files and not self._described:
            self._describe(loop)
        for file in self._files.values():
            file.flush()
        self._due = monotonic() + SECONDS_BETWEEN

    def _write_pending(self) -> None:
        """Write the pending step values, grouping windows with the same names."""
        pending, self._pending = self._pending, []
        for names, windows in groupby(pending, key=lambda pair: [*pair[1].values]):
            if names:
                self._write_steps(list(windows))

    def _write_steps(self, windows: list[tuple[float, StepLogs]]) -> None:
        first = windows[0][1]
        counts = [logs.steps for _, logs in windows]
        steps = np.concatenate(
            [np.arange(logs.first_step, logs.first_step + logs.steps) for _, logs in windows]
        )
        seconds = np.repeat([at for at, _ in windows], counts)
        values = np.stack(
            [np.concatenate([logs.values[name] for _, logs in windows]) for name in first.values],
            axis=1,
        )
        names = [f"steps/{name}" for name in first.values]
        self._file(TRAIN).add_scalars(names, steps, seconds, values)

    def _add_learning_rates(self, step: int) -> None:
        from ..backends.base import active  # late: it imports Keras

        found: list[Any] = []
        for path, optimizer in self._optimizers.items():
            name = "learning_rate" if len(self._optimizers) == 1 else f"learning_rate/{path}"
            if self._last_steps.get((TRAIN, name)) != step:
                self._last_steps[TRAIN, name] = step
                rate = active().to_numpy(optimizer.learning_rate)
                found.append(_value(name, float(rate)))
        if found:
            self._write_pending()
            self._file(TRAIN).add(step, time(), found)

    def _add_histograms(self, loop: LoopView) -> None:
        from ..backends.base import active  # late: it imports Keras

        self._write_pending()
        step, state = loop.progress.step, loop.state
        slots = tuple(f"{path}/" for path in [*state.optimizers, "random"])
        metrics = {id(v) for metric in state.metrics.values() for v in metric.variables}
        found: list[Any] = []
        for path, variable in state.variables.items():
            if not path.startswith(slots) and id(variable) not in metrics:
                array = active().read(variable)
                if array.dtype.kind in "fV":  # V: bfloat16 and the other narrow floats
                    found.append(_histogram(path, array.astype(np.float64)))
        if found:
            self._file(TRAIN).add(step, time(), found)

    def _describe(self, loop: LoopView) -> None:
        """Write the hyperparameters for TensorBoard's HParams page."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._described = True
        name = str(loop.directory if loop.directory is not None else self._root)
        summary = hparams_pb(recorded_settings(loop), trial_id=name)
        self._file(TRAIN).add(0, time(), summary.value)


def _by_folder(record: Record) -> dict[str, dict[str, Any]]:
    """Assign the values of a record to folders, under the names that TensorBoard shows."""
    found: dict[str, dict[str, Any]] = {TRAIN: {}, VALIDATION: {}}
    for name, value in record.values.items():
        validated = record.kind != "log" and name.startswith("val_")
        folder = VALIDATION if validated else TRAIN
        found[folder][name.removeprefix("val_") if validated else name] = value
    return found


def _value(name: str, value: Any) -> Any:
    """Convert a number, string or image to a summary value; return None for anything else."""
    from tensorboard.compat.proto import summary_pb2

    if isinstance(value, Image):
        height, width, channels = value.shape
        picture = summary_pb2.Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=value.png()
        )
        return summary_pb2.Summary.Value(tag=name, image=picture)
    number = plain(value)
    if isinstance(number, str):
        return _tensor(name, "text", {"string_val": [number.encode()]}, 7, ())
    if number is None:
        return None
    return summary_pb2.Summary.Value(tag=name, simple_value=float(number))


def _histogram(name: str, values: Array) -> Any:
    """Return a histogram of the finite values: rows of left edge, right edge and count."""
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, BINS) if finite.size else (np.zeros(0), np.zeros(1))
    rows = np.stack([edges[:-1], edges[1:], counts], axis=1).astype("<f8")
    return _tensor(name, "histograms", {"tensor_content": rows.tobytes()}, 2, rows.shape)


def _tensor(
    name: str, plugin: str, content: Mapping[str, Any], dtype: int, shape: tuple[int, ...]
) -> Any:
    """Return a tensor summary value; `dtype` is a number from TensorFlow's types.proto."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2

    dimensions = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in shape]
    tensor = tensor_pb2.TensorProto(
        dtype=dtype, tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=dimensions), **content
    )
    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = summary_pb2.SummaryMetadata(plugin_data=data)
    return summary_pb2.Summary.Value(tag=name, tensor=tensor, metadata=metadata)
