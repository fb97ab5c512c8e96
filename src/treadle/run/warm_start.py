"""Warm start: training begins with weights that another run has learned."""

from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..checkpoint import Checkpoints
from ..checkpoint.arrays import read_arrays
from ..core.directory import CHECKPOINTS, STATE, read_run, why_unfinished
from ..errors import ConfigurationError, DirectoryError, StateError, did_you_mean
from ..steps.state import State


def learned(directory: Path) -> tuple[Mapping[str, Any], int | None]:
    """Return every variable as a run left it, by path.

    Returns:
        The arrays, and the step of the checkpoint that they are of; None where the run finished.

    Raises:
        DirectoryError: The directory holds no run, or one that has not saved anything.
        CheckpointError: None of its checkpoints can be read.
    """
    record = read_run(directory)
    if record.get("finished") and (directory / STATE).is_file():
        return read_arrays(directory / STATE), None
    found = Checkpoints(directory / CHECKPOINTS).latest()
    if found is None:
        raise DirectoryError(
            f"{directory} holds a run that did not finish{why_unfinished(record)}, and has no "
            "checkpoint"
        )
    return found.state, found.progress.step


def warm_start(
    task: Any,
    directory: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> list[str]:
    """Set a task's weights to those that another run has learned, and nothing else.

    Weights are all variables but those of optimizers, accumulators, metrics, random generators and
    loss scales: step counts, averages of gradients and random states begin anew. Call it before the
    loop, in a script that may be run again: a run that goes on has its own weights. What the other
    run has beyond these is passed over.

    Args:
        task: A task whose models are built.
        directory: Of the other run. Its end counts, or its newest checkpoint where it has not
            finished.
        rename: Paths there and here, whole ones or their beginnings, as
            `{"encoder": "model/layers/0"}`.
        only: Patterns of the paths here, as `["model/layers/[0-3]/*"]` (`fnmatch`); all if not
            given. A new head beside an old body is left out this way.

    Returns:
        The paths of what was set.

    Raises:
        StateError: A weight has no value there, or one of another shape; all are listed, and
            nothing was changed.
        ConfigurationError: A model is not built, or a path or a pattern is of nothing.
        DirectoryError: The directory holds no run, or one that has saved nothing.
        CheckpointError: None of its checkpoints can be read.

    Example:
        >>> import keras, numpy as np, treadle
        >>> def task():
        ...     model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        ...     return treadle.Supervised(model, "mse", "sgd")
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> with treadle.Loop(task(), "runs/before", console=False) as loop:
        ...     history = loop.fit(data, epochs=1)
        >>> treadle.warm_start(task(), "runs/before")
        ['model/layers/0/kernel', 'model/layers/0/bias']
    """
    state = State.discover(task)
    unbuilt = [state.layer_paths[id(layer)] for layer in state.layers if not layer.built]
    if unbuilt:
        raise ConfigurationError(
            f"{unbuilt[0]} is not built, so it has no weights yet: give the model an Input, call "
            "it on a batch, or call loop.prepare(source) before treadle.warm_start"
        )
    weights = _weights(state)
    wanted = _chosen(weights, only)
    values = _renamed(learned(Path(directory))[0], dict(rename or {}))
    missing = [path for path in wanted if path not in values]
    if missing:
        raise StateError(
            f"{directory} has no value for {', '.join(missing)}.{did_you_mean(missing[0], values)} "
            "Say what it is called there with rename, or leave it out with only. Nothing was "
            "changed"
        )
    state.assign({path: values[path] for path in wanted}, wanted)
    return wanted


def _weights(state: State) -> list[str]:
    scale = state.loss_scale
    others = [v for metric in state.metrics.values() for v in metric.variables]
    others += [v for optimizer in state.optimizers.values() for v in optimizer.variables]
    others += [v for accumulator in state.accumulators.values() for v in accumulator.variables]
    others += [*state.seeds, *([scale.scale, scale.finite_steps] if scale is not None else [])]
    known = {id(variable) for variable in others}
    return [path for path, variable in state.variables.items() if id(variable) not in known]


def _chosen(weights: list[str], only: Collection[str] | None) -> list[str]:
    if only is None:
        return weights
    for pattern in only:
        if not any(fnmatchcase(path, pattern) for path in weights):
            raise ConfigurationError(
                f"only={pattern!r} is of no weight of this task.{did_you_mean(pattern, weights)}"
            )
    return [path for path in weights if any(fnmatchcase(path, pattern) for pattern in only)]


def _renamed(values: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Return values under the paths that they have here; the longest beginning counts."""
    for old in rename:
        if not any(_begins(path, old) for path in values):
            raise ConfigurationError(
                f"rename has {old!r}, which is no path there, nor its beginning."
                f"{did_you_mean(old, values)}"
            )
    found: dict[str, Any] = {}
    for path, value in values.items():
        old = max((old for old in rename if _begins(path, old)), key=len, default=None)
        new = path if old is None else rename[old] + path[len(old) :]
        # What was renamed wins over what had the name before.
        if old is not None or new not in found:
            found[new] = value
    return found


def _begins(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")
