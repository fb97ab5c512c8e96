"""Saving and restoring the states of data sources as JSON types and NumPy arrays.

Types that JSON lacks are encoded as a dict with one entry: a tuple (such as `random.getstate()`) as
`{"(tuple)": […]}`, and similarly bytes, torch tensors, and dicts whose keys are not strings.
Nothing is pickled, so reading a state runs no code.
"""

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np

from ..errors import DataError

TUPLE, BYTES, TENSOR, PAIRS = "(tuple)", "(bytes)", "(tensor)", "(dict)"

METHODS: Final = (("state", "restore"), ("state_dict", "load_state_dict"))
"""The supported pairs of method names that return and restore a state."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """The functions that return and restore the state of an object.

    Attributes:
        name: The name of the object's class, for messages.
        state: Returns the state.
        restore: Restores a state returned by `state`.
    """

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


def keeper_of(thing: Any) -> Keeper | None:
    """Return the keeper of an object, or of the object of a bound method; None without a state.

    Example:
        >>> keeper_of(print) is None
        True
    """
    for owner in (thing, getattr(thing, "__self__", None)):
        for state, restore in METHODS:
            give: Any = getattr(owner, state, None)
            take: Any = getattr(owner, restore, None)
            if callable(give) and callable(take) and not isinstance(owner, type):
                return Keeper(type(owner).__name__, give, take)
    return None


def keeper_of_all(things: Any) -> Keeper:
    """Return one keeper for an object or a list of objects.

    Raises:
        DataError: If an object has no `state()` and `restore(state)`.

    Example:
        >>> keeper_of_all([]).state()
        []
    """
    parts: list[Any] = list(things) if isinstance(things, list | tuple) else [things]
    keepers: list[Keeper] = []
    for thing in parts:
        keeper = keeper_of(thing)
        if keeper is None:
            raise DataError(
                f"keeps contains a {type(thing).__name__}, which cannot be saved in checkpoints: "
                "it needs state() and restore(state)"
            )
        keepers.append(keeper)

    def restore(states: Any) -> None:
        for keeper, state in zip(keepers, states, strict=True):
            keeper.restore(state)

    name = " and ".join(keeper.name for keeper in keepers)
    return Keeper(name, lambda: [keeper.state() for keeper in keepers], restore)


_tallies: Final[dict[int, Counter[str]]] = {}


def tallies_of(thing: Any) -> Counter[str]:
    """Return the counters attached to an object, which exist as long as the object does."""
    if id(thing) not in _tallies:
        _tallies[id(thing)] = Counter()
        weakref.finalize(thing, _tallies.pop, id(thing), None)
    return _tallies[id(thing)]


class Resumable:
    """An iterator of batches with a state that can be saved.

    Args:
        iterator: The iterator of batches.
        state: Returns the state after the batches returned so far.
        name: The owner of the state, for messages.
        lasting: The state continues across epochs: the next epoch starts with it.
        costly: The state is saved only when necessary.
        optional: If a checkpoint cannot contain the state, batches can be drawn and discarded
            instead.
        opening: The state from which the iterator was created, if only this state can be restored.
            A resumed run then draws the batches of the epoch again from the first one.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        state: Callable[[], Any],
        *,
        name: str,
        lasting: bool = False,
        costly: bool = False,
        optional: bool = False,
        opening: Any = None,
    ) -> None:
        self.iterator: Final = iterator
        self._state: Final = state
        self.name: Final = name
        self.lasting: Final = lasting
        self.costly: Final = costly
        self.optional: Final = optional
        self.opening: Final = None if opening is None else encoded(opening, name)

    def __iter__(self) -> "Resumable":
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def state(self) -> Any:
        """Return the state after the batches returned so far, encoded by `encoded`.

        Raises:
            DataError: If a checkpoint cannot contain the state.
        """
        return encoded(self._state(), self.name)

    def close(self) -> None:
        """Release threads and files."""
        close = getattr(self.iterator, "close", None)
        if close is not None:
            close()


def encoded(state: Any, name: str, path: str = "") -> Any:
    """Encode a state as JSON types and copies of NumPy arrays.

    Args:
        state: Numbers, strings, bytes, None, arrays, and lists, tuples and dicts of these.
        name: The owner of the state, for messages.
        path: The path within the state, for messages.

    Raises:
        DataError: If the state contains other types.

    Example:
        >>> encoded({"at": (1, None)}, "Buffer")
        {'at': {'(tuple)': [1, None]}}
    """
    if state is None or isinstance(state, bool | int | float | str):
        return state
    if isinstance(state, np.generic):
        return encoded(state.item(), name, path)
    if isinstance(state, np.ndarray):
        array = cast("np.ndarray[Any, Any]", state)
        if not array.dtype.hasobject:
            return array.copy()
    if isinstance(state, bytes):
        return {BYTES: np.frombuffer(state, np.uint8)}
    torch: Any = sys.modules.get("torch")
    if torch is not None and isinstance(state, torch.Tensor):
        tensor: Any = state
        return {TENSOR: tensor.detach().cpu().numpy().copy()}
    if isinstance(state, list | tuple):
        items = cast("list[Any]", state)
        parts = [encoded(part, name, f"{path}[{i}]") for i, part in enumerate(items)]
        return parts if isinstance(state, list) else {TUPLE: parts}
    if isinstance(state, Mapping):
        pairs = cast("Mapping[Any, Any]", state)
        parts = {key: encoded(part, name, f"{path}[{key!r}]") for key, part in pairs.items()}
        plain = all(isinstance(key, str) and not key.startswith("(") for key in parts)
        return parts if plain else {PAIRS: [[encoded(k, name, path), v] for k, v in parts.items()]}
    raise DataError(
        f"the state of {name} holds a {type(state).__name__}{' at ' + path if path else ''}, which "
        f"cannot be saved in checkpoints: a state may contain numbers, strings, None, arrays, and "
        f"lists, tuples and dicts of these"
    )


def decoded(state: Any) -> Any:
    """Decode a state encoded by `encoded`.

    Example:
        >>> decoded(encoded({"at": (1, None)}, "Buffer"))
        {'at': (1, None)}
    """
    if isinstance(state, list):
        return [decoded(part) for part in cast("list[Any]", state)]
    if isinstance(state, np.ndarray):
        return cast("np.ndarray[Any, Any]", state).copy()
    if not isinstance(state, Mapping):
        return state
    parts = cast("Mapping[str, Any]", state)
    kind, value = next(iter(parts.items()), ("", cast("Any", None)))
    if kind == TUPLE:
        return tuple(decoded(part) for part in value)
    if kind == BYTES:
        return value.tobytes()
    if kind == TENSOR:
        return sys.modules["torch"].from_numpy(np.array(value))
    if kind == PAIRS:
        return {decoded(key): decoded(part) for key, part in value}
    return {key: decoded(part) for key, part in parts.items()}
