"""Check schedules given as text. Keras is not imported: the source of its classes is parsed."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from ..errors import ConfigurationError, did_you_mean

BASE = "LearningRateSchedule"
OF_KERAS = "src/optimizers/schedules/learning_rate_schedule.py"


@dataclass(frozen=True)
class Signature:
    """The arguments of a schedule.

    Attributes:
        name: Name of the class.
        takes: Names of all arguments.
        needs: Names of the arguments without a default.
    """

    name: str
    takes: tuple[str, ...]
    needs: tuple[str, ...]


def parsed(text: str) -> ast.expr:
    """Parse a schedule's text, and check the schedules and arguments that it names.

    Raises:
        ConfigurationError: If the text is not an expression, names an unknown schedule, or has
            arguments that the schedule does not accept.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise unreadable(text) from error
    _check(node, text)
    return node


def unreadable(text: str) -> ConfigurationError:
    """Return the error for a text that cannot be parsed as a schedule."""
    return ConfigurationError(
        f"cannot read the schedule {text!r}: write it as a call with numbers, such as "
        "'cyclic(1e-4, 1e-2, step_size=500)'"
    )


def named(name: str, known: Sequence[str]) -> str:
    """Return the class name of a schedule in any spelling: `one_cycle` means `OneCycle`.

    Raises:
        ConfigurationError: If there is no such schedule.
    """
    found = {each.lower(): each for each in known}.get(name.replace("_", "").lower())
    if found is None:
        raise ConfigurationError(f"there is no schedule {name!r}.{did_you_mean(name, known)}")
    return found


def _check(node: ast.expr, text: str) -> None:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            known = signatures()
            _check_arguments(known[named(name, list(known))], args, keywords, text)
            for part in (*args, *(word.value for word in keywords)):
                _check(part, text)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            for part in parts:
                _check(part, text)
        case _:
            try:
                ast.literal_eval(node)
            except ValueError as error:
                raise unreadable(text) from error


def _check_arguments(
    signature: Signature, args: list[ast.expr], keywords: list[ast.keyword], text: str
) -> None:
    name, takes = signature.name, signature.takes
    unknown = [word.arg for word in keywords if word.arg is not None and word.arg not in takes]
    if unknown:
        raise ConfigurationError(
            f"{text}: {name} has no argument {unknown[0]!r}.{did_you_mean(unknown[0], takes)}"
        )
    if len(args) > len(takes):
        raise ConfigurationError(
            f"{text}: {name} takes {len(takes)} arguments ({', '.join(takes)}), found {len(args)}"
        )
    given = {*takes[: len(args)], *(word.arg for word in keywords)}
    missing = [argument for argument in signature.needs if argument not in given]
    if missing:
        raise ConfigurationError(
            f"{text}: {name} needs {' and '.join(missing)}; its arguments are {', '.join(takes)}"
        )


@cache
def signatures() -> dict[str, Signature]:
    """Return the signatures of the schedules of Treadle and Keras, by class name."""
    keras = find_spec("keras")
    folders = [Path(folder) for folder in (keras.submodule_search_locations or ())] if keras else []
    files = [Path(__file__).parents[1] / "schedules.py", *(each / OF_KERAS for each in folders)]
    found: dict[str, Signature] = {}
    for file in files:
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and node.name[0] != "_" and node.name != BASE:
                found[node.name] = _signature(node)
    return found


def _signature(node: ast.ClassDef) -> Signature:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            takes = [argument.arg for argument in part.args.args[1:]]
            count = len(takes) - len(part.args.defaults)
            return Signature(node.name, tuple(takes), tuple(takes[:count]))
    # Without `__init__`, the class is a dataclass: its fields are the arguments.
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
    names = [(part.target.id, part.value) for part in fields if isinstance(part.target, ast.Name)]
    return Signature(
        node.name,
        tuple(name for name, _ in names),
        tuple(name for name, default in names if default is None),
    )
