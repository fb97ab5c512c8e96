"""Schedules given as text, such as `warm_up(cosine_decay(0.1, 1000), 100)`."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from ..core.expressions import evaluate
from ..errors import ConfigurationError, did_you_mean


def parsed(text: str) -> ast.expr:
    """Parse a schedule's text; needs no Keras.

    Raises:
        ConfigurationError: If the text is not an expression.
    """
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unreadable(text) from error


def build(text: str) -> Any:
    """Return the schedule that a text describes. Imports Keras.

    No code of the text is executed: it may only contain calls of known schedules, by the name of
    the class or in lower case, lists, numbers, strings and None.

    Raises:
        ConfigurationError: If it contains anything else, names an unknown schedule, or has
            arguments that the schedule does not accept.
    """
    node, kinds = parsed(text), _schedules()
    known = kinds | {re.sub(r"(?<=[a-z])(?=[A-Z])", "_", n).lower(): k for n, k in kinds.items()}
    called = [part.func for part in ast.walk(node) if isinstance(part, ast.Call)]
    for part in called:
        if isinstance(part, ast.Name) and part.id not in known:
            guess = did_you_mean(part.id, kinds)
            raise ConfigurationError(f"there is no schedule {part.id!r}.{guess}")
    if any(isinstance(part, ast.Name) and part not in called for part in ast.walk(node)):
        raise _unreadable(text)  # a schedule without its arguments
    made = {name: partial(_make, text, kind) for name, kind in known.items()}
    try:
        found = evaluate(node, made)
    except ConfigurationError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise _unreadable(text) from error
    if type(found) not in (*kinds.values(), int, float):
        raise _unreadable(text)
    return found


def _unreadable(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the schedule {text!r}: write it as a call with numbers, such as "
        "'cyclic(1e-4, 1e-2, step_size=500)'"
    )


def _make(text: str, kind: Callable[..., Any], *args: Any, **named: Any) -> Any:
    signature = inspect.signature(kind)
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        raise ConfigurationError(
            f"{text}: {kind.__name__}: {error}; its arguments are {', '.join(signature.parameters)}"
        ) from error
    try:
        return kind(*args, **named)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{text}: {error}") from error


def _schedules() -> dict[str, Callable[..., Any]]:
    """Return the schedules of Keras and Treadle by the names of their classes."""
    from keras.optimizers import schedules as of_keras

    from .. import schedules

    base = of_keras.LearningRateSchedule
    return {
        name: kind
        for module in (of_keras, schedules)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, base) and kind is not base and name[0] != "_"
    }
