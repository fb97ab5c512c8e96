"""Help texts of commands: list the settings of the given task, and suggest `--set`."""

import inspect
import shutil
import textwrap
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..errors import ConfigurationError
from ..recipes import Recipe, find, resolve

WIDEST = 100
EXAMPLES = "Examples:"
ARGUMENTS = f"{__name__}.arguments"


class WithPlainHelp:
    """A command or group whose help wraps examples and shows no types for flags."""

    help: str | None
    epilog: str | None

    def get_params(self, ctx: typer.Context) -> list[Any]:
        """Return the parameters, without `<bool>` for flags and `<str>` next to a metavar."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
            elif parameter.param_type_name == "argument":
                vars(parameter)["display_type_rich"] = lambda ctx: ""  # pyright: ignore
        return parameters

    def format_help(self, ctx: typer.Context, formatter: Any) -> None:
        """Print the help."""
        texts = self.help, self.epilog
        # Rich leaves one column free on both sides.
        width = shutil.get_terminal_size().columns - 2
        self.help, self.epilog = (text and _with_wrapped_examples(text, width) for text in texts)
        try:
            super().format_help(ctx, formatter)  # type: ignore[misc]
        finally:
            self.help, self.epilog = texts


class Group(WithPlainHelp, TyperGroup):  # type: ignore[misc]
    """The `treadle` command group."""


class Command(WithPlainHelp, TyperCommand):  # type: ignore[misc]
    """A command whose `NAME --help` lists the settings of the task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.help:  # join the docstring's lines, so that they wrap at the terminal's width
            paragraphs = inspect.cleandoc(self.help).split("\n\n")
            self.help = "\n\n".join(
                part if part.startswith(EXAMPLES) else " ".join(part.split()) for part in paragraphs
            )

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parse the arguments; suggest `--set` if an unknown option is a setting of the task."""
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
        """Print the help, and the settings of the task if one is given together with `--help`."""
        super().format_help(ctx, formatter)
        recipe = recipe_in(ctx.meta.get(ARGUMENTS, []))
        if recipe is not None and any(part.name == "set_" for part in self.params):
            for line in settings_lines(recipe, shutil.get_terminal_size().columns):
                typer.echo(line)


def _with_wrapped_examples(text: str, width: int) -> str:
    """Return a text whose indented lines, the examples, fit into a width."""
    lines: list[str] = []
    for line in text.split("\n"):
        if not line.startswith("  ") or len(line) <= width:
            lines.append(line)
            continue
        lines += textwrap.wrap(
            line, width, subsequent_indent=" " * 6, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def recipe_in(words: list[str]) -> Recipe | None:
    """Return the first task named by the arguments, or None."""
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
    """Return a hint to give an unknown option with `--set`; empty if it is not a setting."""
    recipe = recipe_in(words)
    name = option.lstrip("-").replace("-", "_")
    if recipe is None or name not in (parameter.name for parameter in recipe.parameters or ()):
        return ""
    joined = dict(word.split("=", 1) for word in words if "=" in word)
    following = dict(pairwise(words)).get(option, "")
    value = joined.get(option) or (following if following[:2] != "--" else "") or "VALUE"
    return (
        f"No such option: {option}. It is a setting of the task {recipe.name}: use "
        f"--set {name}={value}"
    )


def settings_lines(recipe: Recipe, width: int) -> list[str]:
    """Return lines that list the settings of a task with types and defaults."""
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
