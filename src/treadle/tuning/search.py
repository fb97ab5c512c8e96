"""`treadle.tune`: a search for the best settings of a task, from beginning to end."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..core.backend_choice import default_backend
from ..core.options import backend_name
from ..core.ranges import PLAIN, Space
from ..errors import ConfigurationError, DataError, whole_number
from ..recipes import Parameter, known_parameters, resolve
from . import space
from .orders import Order
from .results import Trial, Tuned, command_of
from .study import Study, Wanted, require_optuna
from .workers import run

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
    told: Callable[[Trial], None] | None = None,
) -> Tuned:
    """Search for the settings with which a task becomes best.

    The first trial has the task's defaults, where these are within what is searched. Then follow
    random settings, and from the eleventh on those that Optuna's tree-structured Parzen estimator
    suggests (Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization"). All trials train
    from one seed. A trial is judged by the last value that it logged. One whose best value so far
    is worse than the median of what complete ones had at the same epoch is ended there. Where
    every combination was tried, the search is at its end.

    The same call again goes on where the search was, whatever ended it, and does nothing where all
    trials have ended. A trial that was interrupted goes on from its last checkpoint.

    Args:
        task: A recipe's name or `"file.py:Task"`, whose trials run in processes of their own; or a
            class or function that makes a task, whose trials run in this process, one after
            another: `keras.backend.clear_session` is called before each.
        train: What to train on, where a class or function is given: a source that can be read again
            and again. None means the task's own data.
        validation: A source, or a dict of named ones; where both are None, both are the task's own.
        trials: How many in all, earlier calls included.
        search: What is tried, by name: a `treadle.Range` or `treadle.Choice`. It adds to what the
            task's signature says, and takes its place.
        fixed: Settings that are not searched, by name.
        epochs: Passes over the data in each trial; None means the task's own.
        steps: Steps in each trial.
        monitor: The name of the value that trials are judged by, of epochs, validations or what
            hooks log: each time that it is logged is a report.
        direction: `"min"` or `"max"`: what is better; None where it follows from the name.
        directory: Where the database and the runs go. None means `runs/NAME-tune`, or, where a
            class or function is given, memory alone.
        workers: How many trials run at the same time, each in a process.
        backend: As for `treadle.setup`; None means what Keras is configured for.
        precision: As for `treadle.setup`.
        seed: Of the runs, and of the suggestions; None means the file's own, else 0.
        data_dir: The folder with data sets; None means what the environment says.
        pruning: End trials early.
        fresh: Remove the search that is in the directory, its runs included, and begin anew.
        told: Called with each trial that has ended.

    Raises:
        ConfigurationError: Optuna is not installed, nothing is to be searched, a name is unknown, a
            space does not fit, no trial logs `monitor`, or what is better does not follow from it.
        DirectoryError: The directory holds another search, or another process searches there; or a
            run cannot be written.
        DataError: The first trials have no data.
        TreadleError: The first three trials have failed.

    Warns:
        TreadleWarning: The task's code changed since the first trials.

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
    from ..hooks.monitor import direction_of  # late, as is all that imports NumPy

    trials = whole_number("trials", trials, ConfigurationError)
    workers = whole_number("workers", workers, ConfigurationError)
    lasts = {
        name: whole_number(name, value, ConfigurationError)
        for name, value in (("epochs", epochs), ("steps", steps))
        if value is not None
    }
    watching = told or _nothing
    if isinstance(task, str):
        recipe = resolve(task)
        if train is not None or validation is not None:
            raise ConfigurationError(
                f"{recipe.name} is tried in other processes, on its own data: leave train and "
                "validation out, or pass a class or function in place of its name"
            )
        name, source = recipe.name, recipe.source
        parameters = known_parameters(recipe.parameters, name)
        backend = backend or os.environ.get("KERAS_BACKEND") or recipe.backend
        options = _options(backend or default_backend(), precision, data_dir)
        _refuse_objects(fixed or {})
    else:
        _refuse_elsewhere(workers, backend, precision, data_dir)
        name = source = space.name_of(task)
        parameters, options = space.parameters_of(task), {"backend": backend_name()}
    fixed = dict(fixed or {})
    spaces = space.chosen(parameters, search or {}, fixed, name)
    wanted = Wanted(
        task=source,
        spaces=spaces,
        fixed=fixed,
        others=_others(parameters, spaces, fixed, name),
        defaults=_defaults(parameters, spaces),
        lasts=lasts,
        monitor=monitor,
        direction=direction_of(monitor, direction),
        pruning=pruning,
        seed=seed,
        options=options,
        data=_facts(train, validation),
    )
    if isinstance(task, str) and directory is None:
        directory = RUNS / f"{name}-tune"
    study = Study(wanted, trials, Path(directory) if directory is not None else None, fresh)
    try:
        before = study.finished
        if isinstance(task, str):
            folder = options["data_dir"]
            run(study, workers, {"TREADLE_DATA": folder} if folder is not None else {}, watching)
        else:
            _run_here(study, task, train, validation, watching)
        place = str(directory) if directory is not None else None
        found = Tuned(
            monitor,
            wanted.direction,
            study.results(),
            place,
            before=before,
            exhausted=study.exhausted,
            changed=study.changed,
        )
        if not isinstance(task, str) or found.best is None:
            return found
        settings = {**fixed, **found.best.parameters}
        ran_with = study.seed_of(found.best.number)
        return replace(found, command=command_of(task, settings, lasts, ran_with, options))
    finally:
        study.close()


def _run_here(
    study: Study,
    task: Callable[..., Any],
    train: Any,
    validation: Any,
    told: Callable[[Trial], None],
) -> None:
    """Try all that a study hands out in this process."""
    import keras

    from ..core.options import overriding, setup
    from ..recipes._loading import Made
    from .trial import Subject, tried

    def make(order: Order) -> Subject:
        keras.backend.clear_session()  # `setup` wants no layers; they are numbered from 1 again
        setup(seed=order.seed or 0)
        with overriding(order.seed):
            made = Made(task(**order.settings), None)
        return Subject(made, train, validation)

    while (order := study.next()) is not None:
        outcome = tried(order, partial(make, order), partial(study.report, order.number))
        told(study.end(order.number, outcome))


def _options(
    backend: str | None, precision: str | None, data_dir: str | Path | None
) -> dict[str, str | None]:
    """Return how processes are to run trials.

    Raises:
        DataError: There is no such folder.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(f"data_dir={str(data_dir)!r}: there is no such folder")
    folder = str(Path(data_dir).absolute()) if data_dir is not None else None
    return {"backend": backend, "precision": precision, "data_dir": folder}


def _refuse_elsewhere(workers: int, *elsewhere: Any) -> None:
    """Refuse what can only be said of other processes.

    Raises:
        ConfigurationError: Something of that was said.
    """
    if workers != 1 or any(option is not None for option in elsewhere):
        raise ConfigurationError(
            "a class or function is tried in this process, one trial after another, with the "
            "backend, the precision and the data that it has: for workers, backend, precision and "
            "data_dir pass the task's name, as 'my_task.py:MyTask'"
        )


def _refuse_objects(fixed: Mapping[str, Any]) -> None:
    """Refuse settings that cannot be told to another process.

    Raises:
        ConfigurationError: One is no plain value.
    """
    for name, value in fixed.items():
        if not isinstance(value, PLAIN):
            raise ConfigurationError(
                f"fixed={{{name!r}: …}} is to be a number, a text, True, False or None, which "
                f"other processes can be told, not of type {type(value).__name__}: pass a class or "
                "function in place of the task's name"
            )


def _others(
    parameters: Sequence[Parameter],
    spaces: Mapping[str, Space],
    given: Mapping[str, Any],
    owner: str,
) -> dict[str, Any]:
    """Return the known defaults of what is neither searched nor given.

    Raises:
        ConfigurationError: One without a default is neither given nor searched.
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
    """Return what the task has in place of what is searched; nothing where some is outside."""
    found = {parameter.name: parameter.default for parameter in parameters}
    inside = all(found[name] in space for name, space in spaces.items())
    return {name: found[name] for name in spaces} if inside else {}


def _facts(train: Any, validation: Any) -> dict[str, Any]:
    """Return what tells the data that trials see from other data, in JSON's types."""
    if train is None and validation is None:
        return {}
    from ..core.identity import source_facts
    from ..data import as_source
    from ..run.evaluation import Validation

    found = {"train": source_facts(as_source(train))} if train is not None else {}
    validating = Validation.of(validation, "1 epoch")
    found |= {"validation": validating.facts()["validation"]} if validating else {}
    return json.loads(json.dumps(found, default=str))


def _nothing(trial: Trial) -> None:
    pass
