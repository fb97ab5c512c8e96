"""What `run` and `evaluate` do, in terms of the public interface."""

import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import treadle

from ..directory import INTERRUPTED_STATE, RUN, STATE, read_run, why_unfinished
from ..errors import ConfigurationError, DirectoryError
from ..identity import changed_code, code_of
from ..options import Options, backend_name, overriding, precision_name, run_seed
from ..recipes import Recipe, resolve
from ..when import Span
from . import advice, environment, output

if TYPE_CHECKING:  # importing it would import NumPy
    from ..logs import History

RUNS = Path("runs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """A run as it was asked for; see `treadle run --help`."""

    recipe: Recipe
    settings: Mapping[str, Any]
    epochs: int | None
    steps: int | None
    until: str | None
    backend: str | None
    precision: str | None
    seed: int | None
    options: Options
    directory: Path | None
    data_dir: Path | None
    fresh: bool
    quiet: bool


@dataclass(frozen=True)
class Outcome:
    """A run that has come to its end.

    Attributes:
        directory: Where its files are.
        before: It had been finished before, and nothing ran now.
        quiet: Nothing has been shown of that.
        changed: What changed in its code since, or nothing.
        facts: What `run.json` holds.
        history: All that it logged.
    """

    directory: Path
    before: bool
    quiet: bool
    changed: str
    facts: Mapping[str, Any]
    history: "History"


def train(request: Request) -> Outcome:
    """Train a task; this imports Keras, after all arguments have been checked.

    Raises:
        TreadleError: Something that was asked for cannot be, or training failed.
    """
    if request.until is not None and Span.parse(request.until).of != "seconds":
        raise ConfigurationError(
            f"--until takes a time, as '30 min', not {request.until!r}: for counts there are "
            "--epochs and --steps"
        )
    note = environment.prepare(
        request.backend,
        request.recipe.backend,
        request.data_dir,
        request.seed,
        request.precision,
    )
    if note:
        output.note(note)
    with overriding(request.seed, request.precision, request.backend):
        made = request.recipe.make(request.settings)
    asked = {"epochs": request.epochs, "steps": request.steps, "until": request.until}
    lasts: dict[str, Any] = {k: v for k, v in asked.items() if v is not None} or made.lasts
    if not lasts:
        raise ConfigurationError(
            f"{request.recipe.name} does not say how long it trains: add --epochs, --steps or "
            "--until, or give the class an attribute, as `epochs = 10`"
        )
    if not request.quiet and (description := made.describe()):
        output.say(description)
    with _directory(request.directory, request.recipe.name) as directory:
        before = not request.fresh and (directory / RUN).exists()
        if not before and not request.quiet and request.precision is None:
            word = advice.on_precision(made.task)
            if word:
                output.note(word)
        loop = treadle.Loop(
            made.task,
            directory,
            hooks=made.hooks(),
            options=request.options,
            configuration=_configuration(request, lasts),
            fresh=request.fresh,
            console=not request.quiet,
        )
        with loop:
            data = made.datasets()
            with output.interrupts(told=not request.quiet):
                history = loop.fit(data.train, data.validation, **lasts)
    facts = read_run(directory)
    changed = changed_code(facts.get("code", {}), code_of(made.task))
    return Outcome(directory, before, request.quiet, changed, facts, history)


def evaluate(directory: Path, data_dir: Path | None) -> dict[str, dict[str, float]]:
    """Make the task of a run again, with what it learned, and measure it.

    Of a run that an error or an interrupt ended, the state is the one that it had then.

    Only the task's own file, which the run names, is executed; its arrays are plain data.

    Returns:
        The results on every set: `validation` (or `validation/<name>` where sets have names) and
        `test`, of those that the task has.

    Raises:
        TreadleError: The directory holds no run that has ended, its task cannot be made again, or
            there is nothing to measure it on.
    """
    configuration, state = _recorded(directory)
    try:
        recipe = resolve(configuration["recipe"])
    except ConfigurationError as error:
        raise DirectoryError(f"the task of {directory} cannot be made again: {error}") from error
    recorded = configuration.get("data_dir")
    folder = data_dir or (Path(recorded) if recorded else None)
    ran = {name: configuration[name] for name in ("seed", "precision", "backend")}
    environment.prepare(ran["backend"], recipe.backend, folder, ran["seed"], ran["precision"])
    with overriding(**ran):
        made = recipe.make(configuration["settings"])
    data = made.datasets()
    named = data.validation if isinstance(data.validation, dict) else {"": data.validation}
    sets = {f"validation/{name}" if name else "validation": part for name, part in named.items()}
    sets = {name: part for name, part in {**sets, "test": data.test}.items() if part is not None}
    if not sets:
        raise ConfigurationError(f"{recipe.name} has neither validation nor test data")
    from ..hooks.final import read_arrays  # late, as is all that imports NumPy

    options = Options(execution=configuration["execution"])
    with treadle.Loop(made.task, options=options, console=False) as loop:
        loop.prepare(data.train)
        loop.state.assign(read_arrays(state))
        return {name: loop.evaluate(part) for name, part in sets.items()}


def _recorded(directory: Path) -> tuple[dict[str, Any], Path]:
    """Return the configuration of a run that a command made, and the file of its last state."""
    record = read_run(directory)
    configuration = record["configuration"]
    if "recipe" not in configuration:
        raise DirectoryError(
            f"{directory} holds a run of a script, which `treadle evaluate` cannot make again: "
            "call loop.evaluate in the script"
        )
    finished = bool(record.get("finished"))
    state = directory / (STATE if finished else INTERRUPTED_STATE)
    if not state.is_file():
        raise DirectoryError(
            f"{directory} holds a run that did not finish{why_unfinished(record)}: there is no "
            f"{STATE} to evaluate"
        )
    if not finished:
        output.note(
            f"{directory} holds a run that did not finish{why_unfinished(record)}: this is "
            "measured with the weights that it had then"
        )
    return configuration, state


def _configuration(request: Request, lasts: Mapping[str, Any]) -> dict[str, Any]:
    """Return all that makes this run what it is, as it is compared and recorded."""
    return {
        "recipe": request.recipe.source,
        "settings": dict(request.settings),
        **lasts,
        # What the task was made with, be it the command's or its file's.
        "seed": run_seed(),
        "backend": backend_name(),
        "precision": precision_name(),
        "execution": request.options.execution,
        "data_dir": str(request.data_dir.absolute()) if request.data_dir else None,
    }


@contextmanager
def _directory(asked: Path | None, name: str) -> Generator[Path]:
    """Give the run directory that was asked for, or a new one, removed again if no run begins."""
    if asked is not None:
        yield asked
        return
    number = 1
    while True:
        directory = RUNS / f"{name}-{number}"
        try:
            directory.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise DirectoryError(
                f"cannot make the run directory {directory}: {error.strerror or error}. Name "
                "another with --directory"
            ) from error
    try:
        yield directory
    finally:
        if not (directory / RUN).exists():
            shutil.rmtree(directory, ignore_errors=True)
