"""Search spaces of a task's settings, from its signature or from command-line texts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..core.ranges import Choice, Range, Space, fitted
from ..errors import ConfigurationError, did_you_mean
from ..recipes import Parameter
from ..recipes import parameters_of as parameters_of

HOW = "'units=64..512 log', 'units=64..512 step 64' or 'activation=relu,gelu'"


def read(texts: Sequence[str], parameters: Sequence[Parameter], owner: str) -> dict[str, Space]:
    """Parse search spaces given as text, and return them by name of the setting.

    Args:
        texts: As `units=64..512 log`, `units=64..512 step 64` or `activation=relu,gelu`.
        parameters: The task's parameters; their types determine how values are parsed.
        owner: The task's name, for messages.

    Raises:
        ConfigurationError: If a text cannot be parsed, a name is unknown, or a value does not fit
            the type of its parameter.

    Example:
        >>> read(["units=8..64 log"], [Parameter("units", "int", (int,), 16)], "Line")
        {'units': Range(low=8, high=64, log=True, step=None)}
    """
    known = {parameter.name: parameter for parameter in parameters}
    found: dict[str, Space] = {}
    for text in texts:
        name, _, values = (part.strip() for part in text.partition("="))
        if not name or not values:
            raise ConfigurationError(f"cannot read the search {text!r}: write it as {HOW}")
        if name not in known:
            raise ConfigurationError(f"{owner} has no setting {name!r}.{did_you_mean(name, known)}")
        found[name] = _range(text, values) if ".." in values else _choice(known[name], values)
    return found


def chosen(
    parameters: Sequence[Parameter],
    search: Mapping[str, Space],
    fixed: Mapping[str, Any],
    owner: str,
) -> dict[str, Space]:
    """Return the search space of a task by name, in the order of its signature.

    It contains the settings in `search`, and those with a space in the signature that are not in
    `fixed`.

    Raises:
        ConfigurationError: If a name is unknown or in both `search` and `fixed`, a space does not
            fit its parameter, or there is nothing to search.
    """
    known = {parameter.name: parameter for parameter in parameters}
    for name in (*search, *fixed):
        if name not in known:
            raise ConfigurationError(f"{owner} has no setting {name!r}.{did_you_mean(name, known)}")
        if name in search and name in fixed:
            raise ConfigurationError(
                f"{name} is both searched ({search[name]}) and fixed ({fixed[name]!r}): leave one "
                "of the two out"
            )
    spaces: dict[str, Space] = {}
    for name, parameter in known.items():
        space = search.get(name, None if name in fixed else parameter.space)
        if space is None:
            continue
        if type(space) not in (Range, Choice):
            raise ConfigurationError(
                f"the search space of {name} is {space!r}, which is neither a treadle.Range nor a "
                "treadle.Choice"
            )
        spaces[name] = fitted(name, space, parameter.accepts, parameter.kind)
    if not spaces:
        raise ConfigurationError(
            f"{owner} has no search space: annotate a setting, as `units: "
            "Annotated[int, treadle.Range(64, 512, log=True)] = 64`, or add --search 'units="
            f"64..512 log'. Settings that are not fixed: "
            f"{', '.join(name for name in known if name not in fixed) or 'none'}"
        )
    return spaces


def name_of(make: Callable[..., Any]) -> str:
    """Return the name of a class or function; it is the same in each process.

    Example:
        >>> name_of(partial(int, base=2))
        'int'
    """
    while isinstance(make, partial):
        make = make.func
    return getattr(make, "__qualname__", type(make).__qualname__)


def _range(text: str, values: str) -> Range:
    bounds, *more = values.split()
    low, _, high = bounds.partition("..")
    try:
        if more not in (["log"], []) and (len(more) != 2 or more[0] != "step"):
            raise ValueError
        step = _number(more[1]) if len(more) == 2 else None
        return Range(_number(low), _number(high), more == ["log"], step)
    except ValueError as error:
        raise ConfigurationError(f"cannot read the search {text!r}: write it as {HOW}") from error


def _choice(parameter: Parameter, values: str) -> Choice:
    return Choice(*(parameter.read(part.strip()) for part in values.split(",")))


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)
