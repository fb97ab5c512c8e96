"""Examining a task: a few uncompiled steps, repeated with changes, and the checks of them."""

import time
from collections.abc import Iterator
from typing import Any

from ...core.options import Options
from ...core.tracebacks import shortened
from ...data import as_source
from ...errors import ConfigurationError
from ...loop import Loop
from ...steps.task import Datasets
from . import (
    checks_accumulation,
    checks_adversaries,
    checks_batches,
    checks_evaluation,
    checks_finite,
    checks_gradients,
    checks_labels,
    checks_layers,
    checks_losses,
    checks_metrics,
    checks_mixtures,
    checks_native,
    checks_optimizers,
    checks_outputs,
    checks_padding,
    checks_pairs,
    checks_rows,
    checks_sequences,
    checks_signs,
    checks_slopes,
    checks_sources,
    checks_state,
    checks_targets,
    checks_terms,
)
from .guarding import guarded
from .report import Finding, Report, ordered
from .trials import Trials

IGNORE = "doctor_ignore"

FIRST_CHECKS = (checks_gradients, checks_losses, checks_outputs, checks_metrics, checks_layers)
LATER_CHECKS = (
    checks_accumulation,
    checks_signs,
    checks_padding,
    checks_targets,
    checks_pairs,
    checks_native,
    checks_adversaries,
    checks_rows,
    checks_labels,
    checks_mixtures,
    checks_evaluation,
    checks_slopes,
)


def examine(
    task: Any, data: Any = None, *, validation: Any = None, steps: int | None = None
) -> Report:
    """Search a task for mistakes that training would not report.

    Three training steps and one evaluation step run uncompiled while calls of layers, losses,
    metrics and optimizers are recorded. The last step is then repeated from equal state, each time
    with one thing changed: rows of one array shuffled or held twice, other values of one array,
    larger regularization losses, another value of a variable without gradient. Afterwards all
    variables and random states are as before. A model that is built by its first batch stays built,
    and a one-time iterator is consumed.

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
        >>> treadle.doctor.examine(task, data).codes()
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
            trials = Trials(loop, train, held_out)
            try:
                planned = steps or _planned(task, train)
                found = ordered(list(_findings(trials, train, held_out, planned)))
            finally:
                trials.restore()
    skipped = {} if planned else {"O-over-early, O-over-late": "the length of the run is unknown"}
    if held_out is None or trials.evaluation is None:
        skipped["E-trains, E-random, E-scale, T-on-in-eval, D-overlap"] = "there is no evaluation"
    skipped |= trials.failed
    return Report(
        task=type(task).__name__,
        findings=[finding for finding in found if finding.code not in ignored],
        silenced=[finding for finding in found if finding.code in ignored],
        skipped=skipped,
        steps=trials.steps,
        seconds=time.monotonic() - started,
    )


def _findings(trials: Trials, train: Any, validation: Any, steps: int | None) -> Iterator[Finding]:
    if broken := guarded(trials, checks_finite.check, trials):
        trials.failed["all others"] = "they need finite numbers"
        yield from broken
        return
    for module in FIRST_CHECKS:
        yield from guarded(trials, module.check, trials)
    yield from guarded(trials, checks_batches.check, trials)
    yield from guarded(trials, checks_sequences.check, trials)
    yield from guarded(trials, checks_sources.check, trials, train, validation)
    yield from guarded(trials, checks_optimizers.check, trials, steps)
    yield from guarded(trials, checks_state.check, trials, steps)
    yield from guarded(trials, checks_terms.constant_terms, trials)
    for module in LATER_CHECKS:
        yield from guarded(trials, module.check, trials)


def _ignored(task: Any) -> frozenset[str]:
    ignored = getattr(task, IGNORE, ())
    if isinstance(ignored, str) or not all(isinstance(code, str) for code in ignored):
        raise ConfigurationError(
            f"{type(task).__name__}.{IGNORE} must be a list of codes such as ['D-imbalance'], not "
            f"{ignored!r}"
        )
    return frozenset(ignored)


def _planned(task: Any, train: Any) -> int | None:
    """Return the number of steps of the task's own training length, or None."""
    steps, epochs = getattr(task, "steps", None), getattr(task, "epochs", None)
    if isinstance(steps, int):
        return steps
    if isinstance(epochs, int) and train.length is not None:
        return epochs * train.length
    return None
