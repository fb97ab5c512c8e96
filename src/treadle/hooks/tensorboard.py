"""What a run logs, in the files that TensorBoard shows; needs no TensorFlow."""

import importlib.util
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic, time
from typing import Any

import numpy as np

from ..core.directory import RUN, read_run
from ..core.hook import Hook, LoopView
from ..core.identity import identity
from ..core.images import Image
from ..core.logs import Array, Record, StepLogs
from ..core.triggers import Span, When
from ..errors import ConfigurationError
from .events import PATTERN, EventFile
from .values import plain

# Folders: TensorBoard's runs. Hyper-parameters are written to the one of training: one of their
# own would be shown as a run without charts.
TRAIN, VALIDATION = "", "validation"
SECONDS_BETWEEN = 1.0  # writes of steps: a write of many takes hardly longer than one of few
BINS = 30  # as many as TensorBoard draws


class TensorBoard(Hook):
    """Writes what a run logs for TensorBoard: `tensorboard --logdir runs`.

    The horizontal axis is the run's step everywhere. TensorBoard shows the directory as one run,
    and validation as another below it, `validation`, whose curves share the charts of training:

    - `loss` and the like: means and metrics of each epoch and validation; `val_loss` is `loss` of
      `validation`;
    - `steps/loss`: what every step returned;
    - `learning_rate`, or `learning_rate/<optimizer>` where there are several, about once a second
      and at each record;
    - what `loop.log` and hooks log: numbers, texts, and pictures;
    - histograms of all weights, where they are asked for: each look reads them from the device;
    - hyper-parameters: the task's settings, the backend, the seed, the precision.

    Values of steps are written about once a second, for many steps at once. A run that goes on in
    another process goes on in the same directory: what was written of steps after the checkpoint is
    cut off, so that no step is there twice.

    Args:
        directory: Of this run alone; `tensorboard` in the run directory if not given.
        histograms: How often weights are looked at, as `"1 epoch"` or `"500 steps"`; None for
            never.

    Raises:
        ConfigurationError: The package `tensorboard` is not installed; `histograms` cannot be read.
            At the start: without a directory in a run that has none, or where the one that was
            given holds events of another run.

    Example:
        >>> import treadle
        >>> board = treadle.hooks.TensorBoard("logs/first", histograms="1 epoch")
    """

    def __init__(self, directory: str | Path | None = None, histograms: str | None = None) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ConfigurationError(
                "the hook TensorBoard needs the package tensorboard, which is not installed: "
                "pip install 'treadle[tensorboard]'"
            )
        self._given = directory
        self.when = None if histograms is None else When(Span.parse(histograms))
        self._restored: dict[str, int] | None = None  # sizes of files, by another process
        self._ended: dict[str, int] = {}  # the same, by an earlier call in this one
        self._begin()

    def start(self, loop: LoopView) -> None:
        """Cut off what an earlier process wrote of later steps."""
        if self._given is None and loop.directory is None:
            raise ConfigurationError(
                "TensorBoard() writes into the run directory, but this run has none: pass "
                "TensorBoard('logs/first'), or a directory to the loop"
            )
        own = Path(loop.directory or "") / "tensorboard"
        restored, self._restored = self._restored, None
        self._begin()
        self._root = Path(self._given) if self._given is not None else own
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
        """Keep every step's values, and write them now and then."""
        self._pending.append((time(), logs))
        if monotonic() >= self._due:
            self._add_learning_rates(loop.progress.step)
            self._flush(loop)
        before, self._looked = self._looked, loop.progress
        if self.when is not None and self.when.due(before, loop.progress):
            self._add_histograms(loop)

    def record(self, loop: LoopView, record: Record) -> None:
        """Write what is known of an epoch or a validation, or was logged."""
        if self._root is None:  # logged by a hook that begins before this one, or ends after it
            return
        self._write_pending()
        step, now = record.progress.step, time()
        for folder, values in _by_folder(record).items():
            found = [value for name, part in values.items() if (value := _value(name, part))]
            if record.kind != "log":  # an epoch repeats what a validation at its end has told
                found = [v for v in found if self._told.get((folder, v.tag)) != step]
                self._told |= {(folder, value.tag): step for value in found}
            if found:
                self._file(folder).add(step, now, found)
        if record.kind != "log":
            self._add_learning_rates(step)
        when = self.when if record.kind == "epoch" else None
        if when is not None and when.due(record.progress, record.progress, epoch_ended=True):
            self._add_histograms(loop)
        self._flush(loop)

    def end(self, loop: LoopView, error: BaseException | None) -> None:
        """Write the rest, and close the files."""
        if self._root is None:
            return
        self._flush(loop)
        self._ended = self._all_sizes()
        for file in self._files.values():
            file.close()
        self._files, self._root = {}, None

    def state(self) -> dict[str, Any]:
        """Return how large the files are, which are on the disk before this returns."""
        self._write_pending()
        return {"sizes": self._all_sizes() if self._root is not None else self._ended}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Cut the files to these sizes when the run goes on."""
        self._restored = dict(state["sizes"])

    def _begin(self) -> None:
        self._root: Path | None = None
        self._files: dict[str, EventFile] = {}
        self._kept: dict[str, int] = {}  # of earlier processes: their sizes, by path
        self._pending: list[tuple[float, StepLogs]] = []
        self._optimizers: Mapping[str, Any] = {}
        self._told: dict[tuple[str, str], int] = {}  # the last step of each tag of a record
        self._first, self._due, self._described = 1, 0.0, False

    def _paths(self) -> Iterable[tuple[str, Path]]:
        """Yield the event files that are there, and what they are called in checkpoints."""
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
        """Remove what an earlier run left in the directory, which begins anew.

        Raises:
            ConfigurationError: It was given, so it may be somebody else's.
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
        """Return the file of one of TensorBoard's runs, begun where there is none."""
        if folder not in self._files:
            assert self._root is not None
            self._files[folder] = EventFile(self._root / folder, self._first)
        return self._files[folder]

    def _flush(self, loop: LoopView) -> None:
        """Let readers see all that was written."""
        self._write_pending()
        if self._files and not self._described:
            self._describe(loop)
        for file in self._files.values():
            file.flush()
        self._due = monotonic() + SECONDS_BETWEEN

    def _write_pending(self) -> None:
        """Write the values of the steps that wait, those of like names together."""
        pending, self._pending = self._pending, []
        same: list[tuple[float, StepLogs]] = []
        for i, (at, logs) in enumerate(pending):
            same.append((at, logs))
            following = pending[i + 1][1].values if i + 1 < len(pending) else None
            if logs.values and (following is None or [*following] != [*logs.values]):
                self._write_steps(same)
            if following is None or [*following] != [*logs.values]:
                same = []

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
            if self._told.get((TRAIN, name)) != step:
                self._told[TRAIN, name] = step
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
        """Write the hyper-parameters, for the page that compares runs by them."""
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb

        self._described = True
        recorded = loop.directory is not None and (loop.directory / RUN).exists()
        facts = read_run(loop.directory) if recorded and loop.directory else {}
        settings = facts.get("configuration") or identity(loop.task)
        name = str(loop.directory if loop.directory is not None else self._root)
        summary = hparams_pb(dict(_flat(settings)), trial_id=name)
        self._file(TRAIN).add(0, time(), summary.value)


def _by_folder(record: Record) -> dict[str, dict[str, Any]]:
    """Say which values belong to which of TensorBoard's runs, and under which name."""
    found: dict[str, dict[str, Any]] = {TRAIN: {}, VALIDATION: {}}
    for name, value in record.values.items():
        validated = record.kind != "log" and name.startswith("val_")
        folder = VALIDATION if validated else TRAIN
        found[folder][name.removeprefix("val_") if validated else name] = value
    return found


def _value(name: str, value: Any) -> Any:
    """Return a number, a text or a picture as TensorBoard has it; None for anything else."""
    from tensorboard.compat.proto import summary_pb2

    if isinstance(value, Image):
        height, width, channels = value.shape
        picture = summary_pb2.Summary.Image(
            height=height,
            width=width,
            colorspace=channels,
            encoded_image_string=value.png(),
        )
        return summary_pb2.Summary.Value(tag=name, image=picture)
    number = plain(value)
    if isinstance(number, str):
        return _tensor(name, "text", {"string_val": [number.encode()]}, 7, ())
    if number is None:
        return None
    return summary_pb2.Summary.Value(tag=name, simple_value=float(number))


def _histogram(name: str, values: Array) -> Any:
    """Return the counts of values in bins: rows of left edge, right edge and count.

    What is not finite has no place among them.
    """
    finite = values[np.isfinite(values)]
    counts, edges = np.histogram(finite, BINS) if finite.size else (np.zeros(0), np.zeros(1))
    rows = np.stack([edges[:-1], edges[1:], counts], axis=1).astype("<f8")
    return _tensor(name, "histograms", {"tensor_content": rows.tobytes()}, 2, rows.shape)


def _tensor(
    name: str, plugin: str, content: Mapping[str, Any], dtype: int, shape: tuple[int, ...]
) -> Any:
    """Return a value that is a tensor; dtypes are numbered as in TensorFlow's types.proto."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2

    dimensions = [tensor_shape_pb2.TensorShapeProto.Dim(size=size) for size in shape]
    tensor = tensor_pb2.TensorProto(
        dtype=dtype, tensor_shape=tensor_shape_pb2.TensorShapeProto(dim=dimensions), **content
    )
    data = summary_pb2.SummaryMetadata.PluginData(plugin_name=plugin)
    metadata = summary_pb2.SummaryMetadata(plugin_data=data)
    return summary_pb2.Summary.Value(tag=name, tensor=tensor, metadata=metadata)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield settings that lie in one another by names such as `settings.units`."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")  # type: ignore[reportUnknownArgumentType]
        else:
            known = isinstance(value, (bool, int, float, str))
            yield f"{prefix}{name}", value if known else str(value)
