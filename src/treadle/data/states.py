"""The states of data sources: how to get and restore them, and iterators that have one."""

import inspect
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, Final

import numpy as np

from ..checkpoint.structure import snapshot
from ..core.user_code import attributes_of
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

    return together(keepers)


def together(keepers: Sequence[Keeper]) -> Keeper:
    """Return one keeper for several, whose state is the list of theirs."""

    def restore(states: Any) -> None:
        for keeper, state in zip(keepers, states, strict=True):
            keeper.restore(state)

    name = " and ".join(keeper.name for keeper in keepers)
    return Keeper(name, lambda: [keeper.state() for keeper in keepers], restore)


MOST_PARTS: Final = 64
"""Containers with more parts are data, in which no generator is searched."""

MOST_OBJECTS: Final = 2000
"""The number of objects after which the search for generators ends."""

LIBRARIES: Final = ("jax", "keras", "numpy", "tensorflow", "torch", "torchdata")
"""Packages whose functions use no generator of a user."""


def generators_of(*things: Any) -> Keeper | None:
    """Return one keeper for the random generators that objects and functions use; None without.

    They are searched in attributes, containers, and the variables of functions. The global ones are
    not among them: they are seeded for each batch.

    Example:
        >>> generators_of(lambda: np.random.rand()) is None
        True
        >>> generators_of({"noise": [np.random.default_rng(1)]}).name
        'Generator'
    """
    found: list[Keeper] = []
    seen: dict[int, Any] = {}
    waiting = list(things)
    while waiting and len(seen) < MOST_OBJECTS:
        thing = waiting.pop(0)
        if id(thing) not in seen:
            seen[id(thing)] = thing
            keeper = _generator(thing)
            if keeper is None:
                waiting += _used_by(thing)
            else:
                found.append(keeper)
    whole = together(found)

    def restore(states: Any) -> None:
        if len(states) != len(found):
            raise DataError(
                f"the source uses {len(found)} random generators of its own, but used "
                f"{len(states)} when the run began: create the same ones with the data"
            )
        whole.restore(states)

    return Keeper("Generator", whole.state, restore) if found else None


def _generator(thing: Any) -> Keeper | None:
    """Return the keeper of a random generator that is no global one."""
    if isinstance(thing, np.random.Generator):
        bits = thing.bit_generator
        return Keeper("Generator", lambda: bits.state, partial(setattr, bits, "state"))
    torch: Any = sys.modules.get("torch")
    shared: list[Any] = [
        getattr(each, "__self__", None) for each in (np.random.rand, random.random)
    ]
    shared.append(getattr(torch, "default_generator", None))
    kinds = np.random.RandomState, random.Random, getattr(torch, "Generator", ())
    if not isinstance(thing, kinds) or any(thing is each for each in shared):
        return None
    known: Any = thing
    if isinstance(thing, random.Random):
        return Keeper("Generator", known.getstate, known.setstate)
    return Keeper("Generator", known.get_state, known.set_state)


def _used_by(thing: Any) -> list[Any]:
    """Return the parts of a container, the attributes of an object, the variables of a function."""
    if isinstance(thing, Mapping | list | tuple):
        parts: Any = thing.values() if isinstance(thing, Mapping) else thing
        return list(parts) if len(parts) <= MOST_PARTS else []
    if isinstance(thing, type | ModuleType) or hasattr(thing, "__array__"):
        return []
    if isinstance(thing, FunctionType):
        if (thing.__module__ or "").split(".")[0] in LIBRARIES:
            return []
        try:
            used = inspect.getclosurevars(thing)
        except ValueError:  # a variable has no value yet
            return []
        return [*used.nonlocals.values(), *used.globals.values(), *(thing.__defaults__ or ())]
    if isinstance(thing, MethodType | partial):
        inside = ("__self__", "__func__", "func", "args", "keywords")
        return [getattr(thing, name) for name in inside if hasattr(thing, name)]
    methods = [getattr(type(thing), name, None) for name in ("__getitem__", "__iter__", "__call__")]
    return [*attributes_of(thing).values(), *(x for x in methods if isinstance(x, FunctionType))]


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
