"""The states of data sources: how to get and restore them, and iterators that have one."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from ..checkpoint.structure import snapshot
from ..errors import DataError

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
        self.opening: Final = None if opening is None else snapshot(opening, name)

    def __iter__(self) -> "Resumable":
        return self

    def __next__(self) -> Any:
        return next(self.iterator)

    def state(self) -> Any:
        """Return a snapshot of the state after the batches returned so far.

        Raises:
            DataError: If a checkpoint cannot contain the state.
        """
        return snapshot(self._state(), self.name)

    def close(self) -> None:
        """Release threads and files."""
        close = getattr(self.iterator, "close", None)
        if close is not None:
            close()
