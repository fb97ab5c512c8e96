"""`treadle.tune`: run a hyperparameter search for a task."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core.options import backend_name
from ..core.process_settings import default_backend
from ..core.ranges import PLAIN, Space
from ..errors import ConfigurationError, DataError, whole_number
from ..recipes import Parameter, resolve
from . import space
from .orders import Configuration, Order
from .results import Trial, Tuned, command_of
from .study import Study, require_optuna
from .workers import Workers

RUNS = Path("runs")


def tune(
    task: str | Callable[..., Any],
    train: Any = None,
    validation: Any = None,
    *,
    trials: int = 20,
    search: Mapping[str, Space] | None = None,
    fixed: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    monitor: str = "val_loss",
    direction: str | None = None,
    directory: str | Path | None = None,
    workers: int = 1,
    backend: str | None = None,
    precision: str | None = None,
    seed: int | None = None,
    data_dir: str | Path | None = None,
    pruning: bool = True,
    fresh: bool = False,
    on_trial_end: Callable[[Trial], None] | None = None,
) -> Tuned:
    """Search a task's hyperparameters.

    The first trial uses the task's defaults if they are within the search space. The next trials
    use random settings. From the eleventh on, settings are suggested by Optuna's tree-structured
    Parzen estimator (Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"). All
    trials train from the same seed. The value of a trial is the last one that it logged. A trial is
    pruned if its best value so far is worse than the median of the completed trials at the same
    epoch. The search ends early when every combination has been tried.

    The same call again resumes an interrupted search, and does nothing if all trials have ended. An
    interrupted trial resumes from its last checkpoint.

    Args:
        task: A recipe's name or `"file.py:Task"`, whose trials run in worker processes; or a class
            or function that makes a task, whose trials run in this process, one after another.
            `keras.backend.clear_session` is called before each of the latter.
        train: Training data if a class or function is given: a source that can be read repeatedly.
            None means the task's own data.
        validation: A source, or a dict of named sources. If `train` and `validation` are both None,
            the task's own data is used for both.
        trials: Total number of trials, including those of earlier calls.
        search: Search space by name of the setting: a `treadle.Range` or `treadle.Choice`. It is
            added to the spaces in the task's signature, and takes precedence over them.
        fixed: Values of settings that are not searched, by name.
        epochs: Passes over the data in each trial; None means the task's own.
        steps: Steps in each trial.
        monitor: Name of the value to optimize: logged by epochs, by validations or by hooks. Each
            time that it is logged counts as one report.
        direction: `"min"` or `"max"`; None derives it from the name.
        directory: Folder for the database and the run directories. None means `runs/NAME-tune`; if
            a class or function is given, None keeps everything in memory.
        workers: How many trials run in parallel, each in its own process.
        backend: As for `treadle.setup`; None means the backend that Keras is configured for.
        precision: As for `treadle.setup`.
        seed: Seed of the runs and of the suggestions; None means the seed set in the task's file,
            else 0.
        data_dir: The folder with data sets; None means the default of the environment.
        pruning: Whether to end bad trials early.
        fresh: Remove an earlier search in the directory, with its runs, and start from scratch.
        on_trial_end: Callback that receives each `Trial` when it has ended.

    Returns:
        All trials, the best one, and the command that repeats it.

    Raises:
        ConfigurationError: If Optuna is not installed, there is nothing to search, a name is
            unknown, a space does not fit its setting, no trial logs `monitor`, or its direction
            cannot be derived from the name.
        DirectoryError: If the directory holds another search or is in use by another process, or a
            run cannot be written.
        DataError: If the first trials have no data.
        TreadleError: If the first three trials fail.

    Warns:
        TreadleWarning: If the task's code changed since the first trials.

    Example:
        >>> import keras, numpy as np, treadle
        >>> def line(rate: float = 1e-4):
        ...     model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        ...     return treadle.Supervised(model, "mse", keras.optimizers.SGD(rate))
        >>> x = np.linspace(-1, 1, 32, dtype="float32")[:, None]
        >>> data = treadle.data.from_arrays(x, 2 * x, batch_size=8)
        >>> rates = {"rate": treadle.Range(1e-4, 1.0, log=True)}
        >>> found = treadle.tune(line, data, search=rates, trials=4, epochs=2, monitor="loss")
        >>> found.best.number > 0, found.parameters["rate"] > 1e-4
        (True, True)
    """
    require_optuna()
    from ..hooks.monitor import direction_of  # late: it imports NumPy

    trials = whole_number("trials", trials, ConfigurationError)
    workers = whole_number("workers", workers, ConfigurationError)
    lasts = {
        name: whole_number(name, value, ConfigurationError)
        for name, value in (("epochs", epochs), ("steps", steps))
        if value is not None
    }
    on_end = on_trial_end or (lambda trial: None)
    if isinstance(task, str):
        _check_data_and_settings(task, train, validation, fixed or {})
        recipe = resolve(task)
        name, source, parameters = recipe.name, recipe.source, recipe.known_parameters()
        backend = backend or os.environ.get("KERAS_BACKEND") or recipe.backend or default_backend()
        if data_dir is not None and not Path(data_dir).is_dir():
            raise DataError(f"data_dir={str(data_dir)!r}: there is no such folder")
        folder = str(Path(data_dir).absolute()) if data_dir is not None else None
    else:
        if workers != 1 or any(option is not None for option in (backend, precision, data_dir)):
            raise ConfigurationError(
                "the trials of a class or function run in this process, one after another, with "
                "its backend, precision and data: to set workers, backend, precision or data_dir, "
                "pass the task's name, as 'my_task.py:MyTask'"
            )
        name = source = space.name_of(task)
        parameters, backend, folder = space.parameters_of(task), backend_name(), None
    fixed = dict(fixed or {})
    spaces = space.chosen(parameters, search or {}, fixed, name)
    order = Order(
        task=source,
        settings=fixed,
        lasts=lasts,
        monitor=monitor,
        direction=direction_of(monitor, direction),
        seed=seed,
        backend=backend,
        precision=precision,
        data_dir=folder,
    )
    configuration = Configuration(
        order,
        spaces,
        others=_others(parameters, spaces, fixed, name),
        defaults=_defaults(parameters, spaces),
        pruning=pruning,
        data=_facts(train, validation),
    )
    if isinstance(task, str) and directory is None:
        directory = RUNS / f"{name}-tune"
    place = None if directory is None else Path(directory).absolute()
    with closing(Study(configuration, trials, place, fresh)) as study:
        before = study.finished
        if isinstance(task, str):
            environment = {"TREADLE_DATA": folder} if folder is not None else {}
            Workers(study, workers, environment, on_end).run()
        else:
            _run_here(study, task, train, validation, on_end)
        at = str(directory) if directory is not None else None
        found = Tuned(
            monitor,
            order.direction,
            study.results(),
            at,
            before=before,
            exhausted=study.exhausted,
            changed=study.changed,
        )
        best = found.best
        if not isinstance(task, str) or best is None:
            return found
        seed, options = study.seed_of(best.number), configuration.options
        command = command_of(task, {**fixed, **best.parameters}, lasts, seed, options)
        return replace(found, command=command)


def _run_here(
    study: Study,
    task: Callable[..., Any],
    train: Any,
    validation: Any,
    on_trial_end: Callable[[Trial], None],
) -> None:
    import keras

    from ..distribute.setup import overriding, setup
    from ..recipes._loading import Made
    from .trial import TrialTask, tried

    def make(order: Order) -> TrialTask:
        keras.backend.clear_session()  # `setup` needs it; layers are numbered from 1 again
        setup(seed=order.seed or 0)
        with overriding(order.seed):
            made = Made(task(**order.settings), None)
        return TrialTask(made, train, validation)

    while (order := study.next()) is not None:
        outcome = tried(order, partial(make, order), partial(study.report, order.number))
        on_trial_end(study.end(order.number, outcome))


def _check_data_and_settings(
    task: str, train: Any, validation: Any, fixed: Mapping[str, Any]
) -> None:
    """Check what is given to trials that run in worker processes.

    Raises:
        ConfigurationError: If data is given, or a setting that cannot be sent as JSON.
    """
    if train is not None or validation is not None:
        raise ConfigurationError(
            f"the trials of {task} run in other processes, on its own data: leave train and "
            "validation out, or pass a class or function instead of the name"
        )
    for name, value in fixed.items():
        if not isinstance(value, PLAIN):
            raise ConfigurationError(
                f"fixed={{{name!r}: …}} must be a number, a text, True, False or None, to be sent "
                f"to other processes, not of type {type(value).__name__}: pass a class or function "
                "instead of the task's name"
            )


def _others(
    parameters: Sequence[Parameter],
    spaces: Mapping[str, Space],
    given: Mapping[str, Any],
    owner: str,
) -> dict[str, Any]:
    """Return the known defaults of settings that are neither searched nor given.

    Raises:
        ConfigurationError: If a setting without a default is neither given nor searched.
    """
    values: dict[str, Any] = {}
    for parameter in parameters:
        name = parameter.name
        if name in given or name in spaces:
            continue
        elif parameter.required:
            raise ConfigurationError(
                f"{owner} needs a value for {name!r}, of type {parameter.kind or 'unknown'}: fix "
                f"it, as fixed={{{name!r}: …}} or --set {name}=…, or search it"
            )
        elif parameter.has_default:
            values[name] = parameter.default
    return values


def _defaults(parameters: Sequence[Parameter], spaces: Mapping[str, Space]) -> dict[str, Any]:
    """Return the task's defaults of the searched settings; empty if one is outside its space."""
    found = {parameter.name: parameter.default for parameter in parameters}
    inside = all(found[name] in space for name, space in spaces.items())
    return {name: found[name] for name in spaces} if inside else {}


def _facts(train: Any, validation: Any) -> dict[str, Any]:
    """Return facts that identify the given data, as JSON types; empty for the task's own data."""
    if train is None and validation is None:
        return {}
    from ..core.identity import in_json_types, source_facts
    from ..data import as_source
    from ..run.validation import Validation

    found = {"train": source_facts(as_source(train))} if train is not None else {}
    validating = Validation.of(validation, "1 epoch")
    found |= {"validation": validating.facts()["validation"]} if validating else {}
    return in_json_types(found)
