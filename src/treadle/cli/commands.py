"""The `treadle` application, and how its commands are declared."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from .. import __version__
from ..core.installation import chosen_backend, package_version
from ..errors import ConfigurationError
from ..recipes import find
from . import output
from .help import Command, Group
from .options import DECLARED, PANELS

EPILOG = (
    "Exit codes: 0 done or finished before, 1 an error while training, "
    "2 wrong usage, configuration, backend, data or directory, 3 time limit reached, can be "
    "resumed, 130 interrupted and saved, 143 terminated and saved."
)
EPILOG_WITHOUT_RUN = (  # of commands that save nothing and have no time limit
    "Exit codes: 0 done, 1 an error in the task's code, 2 wrong usage, configuration, backend, "
    "data or directory, 130 interrupted."
)

app = typer.Typer(
    name="treadle",
    cls=Group,
    help="You write the step; Treadle runs the loop: custom training loops on Keras 3, "
    "for TensorFlow, JAX and PyTorch.",
    epilog="Examples:\n  treadle run digits --epochs 3\n  treadle run digits --help\n"
    "  treadle run my_task.py:MyTask --set units=128 --directory runs/mine\n"
    "  treadle resume runs/mine\n\n" + EPILOG,
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def command(
    epilog: str = EPILOG_WITHOUT_RUN, name: str | None = None, passes_on: bool = False
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Register a function of one dataclass as a command; its fields are the options.

    Errors that the function raises are printed, and end the process with the matching exit code.

    Args:
        epilog: The end of the help text.
        name: The name of the command, if it is not that of the function.
        passes_on: Whether options that the command does not know are among its arguments.
    """

    def register(function: Callable[[Any], None]) -> Callable[[Any], None]:
        kind = get_type_hints(function)["options"]

        def run(context: typer.Context, **values: Any) -> None:
            with output.reporting_errors():
                _refuse_extra(context.args)
                function(kind(**values))

        vars(run)["__signature__"] = _signature(kind)
        run.__doc__ = function.__doc__
        settings = {"allow_extra_args": True, "ignore_unknown_options": passes_on}
        name_of = name or function.__name__
        app.command(name_of, cls=Command, epilog=epilog, context_settings=settings)(run)
        return function

    return register


def _signature(kind: type[Any]) -> inspect.Signature:
    """Return the signature of a command: the fields of its options, in the order of the help."""
    hints = get_type_hints(kind)
    declared = {each.name: each.metadata[DECLARED] for each in fields(kind)}
    for name, option in declared.items():
        if hints[name] is bool and not option.param_decls:  # without the name --no-FIELD
            option.param_decls = (f"--{name.rstrip('_').replace('_', '-')}",)
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is MISSING else each.default,
            annotation=Annotated[hints[each.name], declared[each.name]],
        )
        for each in sorted(
            fields(kind), key=lambda each: PANELS.index(declared[each.name].rich_help_panel)
        )
    ]
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    return inspect.Signature([context, *parameters])


def _refuse_extra(arguments: list[str]) -> None:
    """Reject extra arguments; for one of the form `NAME=VALUE`, suggest `--set`.

    Raises:
        ConfigurationError: If there is an extra argument.
    """
    for word in arguments:
        hint = f"repeat --set for each setting, as --set {word}" if "=" in word else "see --help"
        raise ConfigurationError(f"unexpected argument {word!r}: {hint}")


def _version(wanted: bool) -> None:
    if wanted:
        backend = chosen_backend()["name"]
        versions = [
            f"{name} {package_version(name) or 'not installed'}"
            for name in ("keras", backend)
            if name
        ]
        typer.echo(f"treadle {__version__} ({', '.join(versions)})")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the versions."),
    ] = False,
) -> None:
    """Parse the options before the command."""


@app.command(cls=Command, epilog=EPILOG_WITHOUT_RUN)
def recipes() -> None:
    """List the tasks that come with Treadle, and their settings."""
    with output.reporting_errors():
        output.print_recipes(find())
