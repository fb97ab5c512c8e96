"""Schedules as texts, checked without importing Keras: by reading the source of their classes."""

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
    """What a schedule takes.

    Attributes:
        name: The name of its class.
        takes: The names of its arguments.
        needs: Those without a default.
    """

    name: str
    takes: tuple[str, ...]
    needs: tuple[str, ...]


def parsed(text: str) -> ast.expr:
    """Return a schedule's text as an expression, of known schedules with arguments that fit.

    Raises:
        ConfigurationError: It is no expression, names an unknown schedule, or gives arguments that
            the schedule does not take.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise unreadable(text) from error
    _check(node, text)
    return node


def unreadable(text: str) -> ConfigurationError:
    """Return the error for a text that is no schedule."""
    return ConfigurationError(
        f"cannot read the schedule {text!r}: write it as a call with numbers, such as "
        "'cyclic(1e-4, 1e-2, step_size=500)'"
    )


def named(name: str, known: Sequence[str]) -> str:
    """Return the known schedule that is meant: `one_cycle` means `OneCycle`.

    Raises:
        ConfigurationError: There is none.
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
    """Return the schedules of Treadle and of Keras by the names of their classes."""
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
    fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]  # of a dataclass
    names = [(part.target.id, part.value) for part in fields if isinstance(part.target, ast.Name)]
    return Signature(
        node.name,
        tuple(name for name, _ in names),
        tuple(name for name, default in names if default is None),
    )
