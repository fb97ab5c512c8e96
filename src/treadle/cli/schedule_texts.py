"""Schedules given as text, such as `warm_up(cosine_decay(0.1, 1000), 100)`.

`check` rejects a wrong text before Keras is imported, which takes seconds: it parses the source of
Keras' schedules. `build` makes the schedule.
"""

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any

from ..errors import ConfigurationError, did_you_mean

BASE = "LearningRateSchedule"
OF_KERAS = "src/optimizers/schedules/learning_rate_schedule.py"

Make = Callable[[str, list[Any], dict[str, Any]], Any]
"""Returns a schedule, from the name of its class and its arguments."""


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


def check(text: str) -> None:
    """Check a schedule's text, and the schedules and arguments that it names.

    Raises:
        ConfigurationError: If the text is not an expression, names an unknown schedule, or has
            arguments that the schedule does not accept.
    """
    _value(_parsed(text), text, lambda name, args, named: None)


def build(text: str) -> Any:
    """Return the schedule that a text describes, or its number. Imports Keras.

    Raises:
        ConfigurationError: As for `check`, or if a schedule rejects the value of an argument.
    """
    import keras

    from .. import schedules

    def make(name: str, args: list[Any], named: dict[str, Any]) -> Any:
        owner = schedules if hasattr(schedules, name) else keras.optimizers.schedules
        try:
            return getattr(owner, name)(*args, **named)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"{text}: {error}") from error

    return _value(_parsed(text), text, make)


def _parsed(text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unreadable(text) from error


def _unreadable(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the schedule {text!r}: write it as a call with numbers, such as "
        "'cyclic(1e-4, 1e-2, step_size=500)'"
    )


def _named(name: str) -> Signature:
    """Return the signature of a schedule in any spelling: `one_cycle` means `OneCycle`.

    Raises:
        ConfigurationError: If there is no such schedule.
    """
    known = signatures()
    found = {each.lower(): each for each in known}.get(name.replace("_", "").lower())
    if found is None:
        raise ConfigurationError(f"there is no schedule {name!r}.{did_you_mean(name, known)}")
    return known[found]


def _value(node: ast.expr, text: str, make: Make) -> Any:
    """Return the value of an expression: a schedule that `make` returns, a list or a literal.

    No code of the text is executed: it may only contain calls of known schedules, lists, numbers,
    strings and None.

    Raises:
        ConfigurationError: If it contains anything else, or wrong arguments.
    """
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            signature = _named(name)
            _check_arguments(signature, args, keywords, text)
            values = [_value(part, text, make) for part in args]
            named = {str(word.arg): _value(word.value, text, make) for word in keywords}
            return make(signature.name, values, named)
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_value(part, text, make) for part in parts]
        case ast.Constant(value=value) if isinstance(value, (float, int, str, NoneType)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=float() | int() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=float() | int() as value)):
            return value
        case _:
            raise _unreadable(text)


def _check_arguments(
    signature: Signature, args: list[ast.expr], keywords: list[ast.keyword], text: str
) -> None:
    name, takes = signature.name, signature.takes
    starred = any(isinstance(part, ast.Starred) for part in args)
    if starred or any(word.arg is None for word in keywords):  # `*` and `**`
        raise _unreadable(text)
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
