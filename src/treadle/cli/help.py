"""How commands print their help: settings of the task that is named, and hints to `--set`."""

import inspect
import shutil
import textwrap
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import ConfigurationError
from ..recipes import Recipe, find, resolve

WIDEST = 100
EXAMPLES = "Examples:"
ARGUMENTS = f"{__name__}.arguments"


class Group(TyperGroup):
    """The program itself."""

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the parameters; no type is shown for flags."""
        return without_types(super().get_params(ctx))  # type: ignore[arg-type]


class Command(TyperCommand):
    """A command whose `NAME --help` lists the settings of the task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.help:  # lines of a docstring are no lines of the terminal
            paragraphs = inspect.cleandoc(self.help).split("\n\n")
            self.help = "\n\n".join(
                part if part.startswith(EXAMPLES) else " ".join(part.split()) for part in paragraphs
            )

    def get_params(self, ctx: typer.Context) -> list[Any]:  # type: ignore[override]
        """Return the parameters; no type is shown for flags and for the task."""
        return without_types(super().get_params(ctx))  # type: ignore[arg-type]

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse; an unknown option that is a setting of the task is answered with its `--set`."""
        given = list(args)
        ctx.meta[ARGUMENTS] = given
        try:
            return super().parse_args(ctx, args)  # type: ignore[arg-type]
        except Exception as error:
            option: str | None = getattr(error, "option_name", None)
            if option is not None and type(error).__name__ == "NoSuchOption":
                hint = setting_hint(option, given)
                if hint:
                    vars(error)["message"] = hint
                    vars(error)["possibilities"] = []
            raise

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Print the help, and the settings of the task that is named beside `--help`."""
        super().format_help(ctx, formatter)  # type: ignore[arg-type]
        recipe = recipe_in(ctx.meta.get(ARGUMENTS, []))
        if recipe is not None and any(part.name == "set_" for part in self.params):
            for line in settings_lines(recipe, shutil.get_terminal_size().columns):
                typer.echo(line)


def without_types(parameters: list[Any]) -> list[Any]:
    """Return parameters that show no `<bool>` for a flag, and no `<str>` beside a metavar."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            vars(parameter)["display_type_rich"] = lambda ctx: ""  # pyright: ignore
    return parameters


def recipe_in(words: list[str]) -> Recipe | None:
    """Return the task that one of these words names; None where none does."""
    recipes = find()
    for word in words:
        if word in recipes:
            return recipes[word]
        if not word.startswith("-") and (word.endswith(".py") or ".py:" in word):
            try:
                return resolve(word)
            except ConfigurationError:
                return None
    return None


def setting_hint(option: str, words: list[str]) -> str:
    """Return how to give an unknown option as a setting; empty where the task has no such one."""
    recipe = recipe_in(words)
    name = option.lstrip("-").replace("-", "_")
    names = [parameter.name for parameter in (recipe.parameters or ()) if recipe] if recipe else []
    if recipe is None or name not in names:
        return ""
    value = next(
        (
            words[i + 1] if word == option else word.partition("=")[2]
            for i, word in enumerate(words)
            if (word == option and i + 1 < len(words) and not words[i + 1].startswith("--"))
            or word.startswith(f"{option}=")
        ),
        "VALUE",
    )
    return (
        f"No such option: {option}. It is a setting of the task {recipe.name}: use "
        f"--set {name}={value}"
    )


def settings_lines(recipe: Recipe, width: int) -> list[str]:
    """Return the settings of a task, with types and defaults, as lines of a terminal."""
    if recipe.parameters is None:
        return [f" The settings of {recipe.name} cannot be read from its file.", ""]
    if not recipe.parameters:
        return [f" {recipe.name} has no settings.", ""]
    lines = [f" Settings of {recipe.name}, given as --set NAME=VALUE:"]
    room = min(width, WIDEST)
    longest = max(len(parameter.name) for parameter in recipe.parameters) + 2
    for parameter in recipe.parameters:
        parts = [parameter.kind or "any type"]
        if parameter.required:
            parts.append("required")
        elif parameter.has_default:
            parts.append(f"default {parameter.default}")
        if parameter.annotated is not None:
            parts.append(f"searched by tune in {parameter.annotated}")
        head = f"   {parameter.name.ljust(longest)}"
        lines += textwrap.wrap(
            ", ".join(parts),
            max(room, 40),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
    return [*lines, ""]
