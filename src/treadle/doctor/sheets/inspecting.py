"""Inspecting a task: a few uncompiled steps, repeated with changes, and the facts about them."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from ...core.options import Options
from ...core.tracebacks import shortened
from ...data import as_source
from ...errors import ConfigurationError
from ...loop import Loop
from ...steps.task import Datasets
from ..trials import Trials, unchanged
from .batches import batch_facts
from .certain import layer_mistakes, loss_mistakes
from .certain_steps import not_finite, step_mistakes
from .findings import Finding
from .influences import Influences
from .layers import layer_facts
from .lines import Line
from .losses import loss_facts
from .optimizers import optimizer_facts
from .phases import evaluation_facts, metric_facts, random_facts
from .sheet import Sheet
from .terms import Terms
from .variables import variable_facts

IGNORE = "doctor_ignore"


def inspect(
    task: Any, data: Any = None, *, validation: Any = None, steps: int | None = None
) -> Sheet:
    """Measure what a step of a task does, and find the mistakes in it that are certain.

    Two training steps and one evaluation step run uncompiled while calls of layers, losses,
    metrics and optimizers are recorded. The last step is then repeated from equal state, each time
    with one thing changed: a row or a position of one array, the weights, the number of rows.
    Afterwards all variables and random states are as before. A model that is built by its first
    batch stays built, and a one-time iterator is consumed.

    Args:
        task: The task. Codes in its attribute `doctor_ignore` are reported as silenced.
        data: The training data, or `Datasets`; default: those of the task.
        validation: Data for `eval_step`; default: those of the `Datasets`.
        steps: The number of training steps that are planned, which schedules are compared with.
            Default: the task's own `steps`, or `epochs` × batches.

    Raises:
        ConfigurationError: `doctor_ignore` is not a list of codes.
        DataError: There are no batches.
        TreadleError: The task cannot be trained at all.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> task = treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1))
        >>> x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
        >>> data = treadle.data.from_arrays(x, x[:, :1] + x[:, 1:], batch_size=16)
        >>> treadle.doctor.inspect(task, data).findings
        []
    """
    started = time.monotonic()
    ignored = _ignored(task)
    with shortened():
        data = task.datasets() if data is None else data
        if isinstance(data, Datasets):
            validation = data.validation if validation is None else validation
            data = data.train
        if isinstance(validation, dict):
            validation = next(iter(validation.values()), None)
        train = as_source(data)
        held_out = None if validation is None else as_source(validation)
        with Loop(task, options=Options(execution="eager"), console=False) as loop:
            loop.prepare(train)
            # A sheet may show numbers that are not finite.
            with unchanged(task), np.errstate(all="ignore"):
                trials = Trials(loop, train, held_out)
                lines, found = _measured(trials, steps or _planned(task, train))
    return Sheet(
        task=type(task).__name__,
        backend=keras.backend.backend(),
        lines=lines,
        findings=[finding for finding in found if finding.code not in ignored],
        silenced=[finding for finding in found if finding.code in ignored],
        not_measured=trials.failed,
        steps=trials.steps,
        seconds=time.monotonic() - started,
    )


def _measured(trials: Trials, steps: int | None) -> tuple[list[Line], list[Finding]]:
    """Return the facts and the certain mistakes."""
    found = list(not_finite(trials))
    influences, terms = Influences(trials), Terms(trials)
    if not found:
        influences.measure()
    parts: dict[str, Callable[[], Sequence[Line]]] = {
        "batch facts": lambda: batch_facts(trials, influences),
        "losses facts": lambda: loss_facts(trials, terms),
        "layers facts": lambda: layer_facts(trials, influences),
        "variables facts": lambda: variable_facts(trials),
        "optimizers facts": lambda: optimizer_facts(trials, steps),
        "randomness facts": lambda: random_facts(trials),
        "evaluation facts": lambda: evaluation_facts(trials),
        "metrics facts": lambda: metric_facts(trials),
    }
    lines = [line for name, part in parts.items() for line in _guarded(trials, name, part)]
    mistakes: dict[str, Callable[[], Iterator[Finding]]] = {
        "mistakes of losses": lambda: loss_mistakes(trials, influences, terms),
        "mistakes of layers": lambda: layer_mistakes(trials),
        "mistakes of steps": lambda: step_mistakes(trials),
    }
    found = found or [x for name, part in mistakes.items() for x in _guarded(trials, name, part)]
    return lines, list(dict.fromkeys(found))


def _guarded(trials: Trials, name: str, part: Callable[[], Any]) -> list[Any]:
    """Return what a function yields; an exception in it is listed as not measured."""
    found: list[Any] = []
    try:
        found.extend(part())
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        trials.failed[name] = f"{type(error).__name__}: {text}"
    return found


def _ignored(task: Any) -> frozenset[str]:
    ignored = getattr(task, IGNORE, ())
    if isinstance(ignored, str) or not all(isinstance(code, str) for code in ignored):
        raise ConfigurationError(
            f"{type(task).__name__}.{IGNORE} must be a list of codes such as ['L-unpaired'], not "
            f"{ignored!r}"
        )
    return frozenset(ignored)


def _planned(task: Any, train: Any) -> int | None:
    """Return the number of steps of the task's own training length, or None."""
    steps, epochs = getattr(task, "steps", None), getattr(task, "epochs", None)
    if isinstance(steps, int):
        return steps
    return epochs * train.length if isinstance(epochs, int) and train.length else None
