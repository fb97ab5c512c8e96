"""States of what gives batches, as a checkpoint can hold them: JSON's types and NumPy arrays.

What JSON has no name for, and a state may hold all the same, is written as a dict of one entry: a
tuple (`random.getstate()` is one) as `{"(tuple)": […]}`, and so are bytes, torch tensors and dicts
whose keys are no texts. Nothing is pickled: reading a state runs no code.
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
"""How objects call what returns their state, and what takes it back."""


@dataclass(frozen=True, slots=True)
class Keeper:
    """What returns the state of an object, and what takes it back.

    Attributes:
        name: The object's class, for messages.
        state: Returns the state.
        restore: Given what `state` returned, makes the object what it was then.
    """

    name: str
    state: Callable[[], Any]
    restore: Callable[[Any], Any]


def keeper_of(thing: Any) -> Keeper | None:
    """Return what keeps the state of an object, or of the one whose method this is; None if none.

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
    """Return what keeps the states of an object or of a list of them, one after another.

    Raises:
        DataError: One of them has no `state()` and `restore(state)`.

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
                f"keeps names a {type(thing).__name__}, which no checkpoint can hold: it needs "
                "state() and restore(state)"
            )
        keepers.append(keeper)

    def restore(states: Any) -> None:
        for keeper, state in zip(keepers, states, strict=True):
            keeper.restore(state)

    name = " and ".join(keeper.name for keeper in keepers)
    return Keeper(name, lambda: [keeper.state() for keeper in keepers], restore)


_tallies: Final[dict[int, Counter[str]]] = {}


def tallies_of(thing: Any) -> Counter[str]:
    """Return counts that belong to an object as long as it lives, whoever asks."""
    if id(thing) not in _tallies:
        _tallies[id(thing)] = Counter()
        weakref.finalize(thing, _tallies.pop, id(thing), None)
    return _tallies[id(thing)]


class Resumable:
    """An iterator of batches that can say from where it could go on.

    Args:
        iterator: Gives batches.
        state: Returns the state after the batches that it gave.
        name: Whose state it is, for messages.
        lasting: The state outlives the epoch: the next one begins with it.
        costly: The state is asked for no more often than it must be.
        optional: Without a state that a checkpoint can hold, batches can be drawn and discarded.
        opening: The state from which the iterator was made, where that is all that can be gone
            back to: its batches are drawn again from the epoch's first on.
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
        """Return the state after the batches given so far, as `encoded` writes it.

        Raises:
            DataError: It holds what a checkpoint cannot.
        """
        return encoded(self._state(), self.name)

    def close(self) -> None:
        """Let go of threads and files."""
        close = getattr(self.iterator, "close", None)
        if close is not None:
            close()


def encoded(state: Any, name: str, path: str = "") -> Any:
    """Return a state in JSON's types and NumPy arrays, which are copies.

    Args:
        state: Of numbers, texts, bytes, None, arrays, and lists, tuples and dicts of them.
        name: Whose state it is, for messages.
        path: Where in it this stands, for messages.

    Raises:
        DataError: It holds something else.

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
        f"no checkpoint can hold: a state is made of numbers, texts, None, arrays, and lists, "
        f"tuples and dicts of them"
    )


def decoded(state: Any) -> Any:
    """Return the state that `encoded` wrote.

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
