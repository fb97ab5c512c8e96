"""Warm start: initialize a task with the trained weights of another run."""

import warnings
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..checkpoint.run_files import learned, recorded_run
from ..errors import ConfigurationError, StateError, TreadleWarning, did_you_mean
from ..steps.state import State


def warm_start(
    task: Any,
    directory: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> list[str]:
    """Initialize a task's weights from another run, without its optimizer state.

    Weights are all variables except those of optimizers, accumulators, metrics, random generators
    and loss scales. Step counts, averages of gradients and random states start from scratch.
    Variables that exist only in the other run are ignored.

    Call this before creating the loop. The script may run again: a resumed run restores its own
    weights.

    Args:
        task: A task whose models are built.
        directory: The directory of the other run. The weights are those at its end, or those of its
            newest checkpoint if it has not finished.
        rename: Maps paths, or beginnings of paths, in the other run to paths in this task, such as
            `{"encoder": "model/layers/0"}`.
        only: Patterns (`fnmatch`) of the paths in this task to set, such as
            `["model/layers/[0-3]/*"]`; all if None. Use it to exclude a new head.

    Returns:
        The paths of the weights that were set.

    Raises:
        StateError: If weights have no value in the other run, or one of another shape. All are
            listed, and nothing is changed.
        ConfigurationError: If a model is not built, or a path or a pattern matches nothing.
        DirectoryError: If the directory holds no run, or a run without a checkpoint.
        CheckpointError: If none of its checkpoints can be read.

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
    _require_built(state)
    wanted = _chosen(_weights(state), only)
    if recovered := recorded_run(Path(directory))[1]:
        warnings.warn(f"{recovered}, whose weights are used", TreadleWarning, stacklevel=2)
    values = _renamed(learned(Path(directory))[0], dict(rename or {}))
    missing = [path for path in wanted if path not in values]
    if missing:
        raise StateError(
            f"{directory} has no value for {', '.join(missing)}.{did_you_mean(missing[0], values)} "
            "Map its path in that run with rename, or exclude it with only. Nothing was changed"
        )
    state.assign({path: values[path] for path in wanted}, wanted)
    return wanted


def _require_built(state: State) -> None:
    unbuilt = [state.layer_paths[id(layer)] for layer in state.layers if not layer.built]
    if unbuilt:
        raise ConfigurationError(
            f"{unbuilt[0]} is not built, so it has no weights yet: give the model an Input, call "
            "it on a batch, or call loop.prepare(source) before treadle.warm_start"
        )


def _weights(state: State) -> list[str]:
    scale = state.loss_scale
    others = [v for metric in state.metrics.values() for v in metric.variables]
    others += [v for optimizer in state.all_optimizers.values() for v in optimizer.variables]
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
                f"only={pattern!r} matches no weight of this task.{did_you_mean(pattern, weights)}"
            )
    return [path for path in weights if any(fnmatchcase(path, pattern) for pattern in only)]


def _renamed(values: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, Any]:
    """Return values under their paths in this task; the longest matching beginning applies."""
    for old in rename:
        if not any(_is_at_or_below(path, old) for path in values):
            raise ConfigurationError(
                f"rename has {old!r}, which is not a path in that run or the beginning of one."
                f"{did_you_mean(old, values)}"
            )
    found: dict[str, Any] = {}
    for path, value in values.items():
        old = max((old for old in rename if _is_at_or_below(path, old)), key=len, default=None)
        new = path if old is None else rename[old] + path[len(old) :]
        # A renamed value takes precedence over one that already had the new name.
        if old is not None or new not in found:
            found[new] = value
    return found


def _is_at_or_below(path: str, start: str) -> bool:
    return path == start or path.startswith(f"{start}/")
