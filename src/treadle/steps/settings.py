"""The plain values in containers and in objects of a user's classes that a task reaches.

Usually they are settings: a dict, a namespace, an object with attributes. A compiled step takes
them as constants, if a function that steps run may read them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.user_code import attributes_of
from .constants import LARGE, Constant, attribute, item
from .own_values import PLAIN, Read, holds_settings

MOST_SETTINGS = 1_000  # values that one of these may hold


@dataclass
class Settings:
    """What was found.

    Attributes:
        values: Path to readable and writable Python value.
        kinds: The classes of the objects.
        too_large: Paths of objects and containers of which not all values are in `values`.
    """

    values: dict[str, Constant] = field(default_factory=dict[str, Constant])
    kinds: frozenset[type] = frozenset()
    too_large: list[str] = field(default_factory=list[str])


def settings_in(
    holders: Mapping[str, Constant],
    held_by_task: Mapping[str, Any],
    visited: set[int],
    reads: Callable[[frozenset[type]], Read],
    is_state: Callable[[Any], bool],
) -> Settings:
    """Find the values that steps may read in containers and objects which hold no state.

    Args:
        holders: Access to these, by path.
        held_by_task: The attributes of the task.
        visited: The ids of objects that were found under any path.
        reads: A function that returns what steps may read, since that depends on the classes of
            these objects, whose methods steps may call.
        is_state: Whether an object has state of its own, so that its values are found elsewhere.
    """
    kinds: frozenset[type] = frozenset()
    while True:
        read, found = reads(kinds), Settings()
        own = {path: x for path, x in holders.items() if _is_read(x, path, read, held_by_task)}
        # What no step reads by this name may be read by another one.
        seen = visited - {id(x.read()) for path, x in holders.items() if path not in own}
        for path, holder in {**own, **read.holders}.items():
            _search(path, holder, read, found, is_state, seen)
        if found.kinds <= kinds:
            return found
        kinds |= found.kinds


def _search(
    path: str,
    root: Constant,
    read: Read,
    found: Settings,
    is_state: Callable[[Any], bool],
    visited: set[int],
) -> None:
    """Find the plain values in a container or object, in an order that does not depend on them.

    Args:
        path: Its path.
        root: Access to it.
        read: What steps read.
        found: To which what is found is added.
        is_state: As for `settings_in`.
        visited: The ids of objects whose values are found elsewhere.
    """
    seen, by_name, names = set[int](), root.used_by_name, read.attributes
    waiting = [(path, root)]
    for at, constant in waiting:
        value = constant.read()
        small = isinstance(value, np.ndarray) and value.nbytes <= LARGE
        if isinstance(value, PLAIN) or small:
            found.values[at] = constant.reached(by_name)
            continue
        known = id(value) in visited and (by_name or constant is not root)
        if known or id(value) in seen or not holds_settings(value) or is_state(value):
            continue
        seen.add(id(value))
        if isinstance(value, (list, tuple, dict)):
            keys: Any = list(value) if isinstance(value, dict) else range(len(value))
            parts = [(f"{at}/{key}", item(constant, key)) for key in keys]
        else:
            found.kinds |= {type(value)}
            held = attributes_of(value)
            chosen = [name for name in held if names is None or name in names]
            parts = [(f"{at}/{name}", attribute(value, name, constant)) for name in chosen]
        if len(waiting) + len(parts) > MOST_SETTINGS:
            found.too_large.append(at)
            continue
        if constant.holder is not None or constant is not root:
            found.values[at] = constant.reached(by_name)
        waiting += parts


def _is_read(root: Constant, path: str, read: Read, held: Mapping[str, Any]) -> bool:
    """Return whether steps may read a container or an object without state, by its attribute.

    Args:
        root: Access to it.
        path: Its path.
        read: What steps read.
        held: What the task holds.
    """
    top = path.partition("/")[0]
    first = held.get(top)
    is_held = isinstance(first, (list, tuple, dict)) or first is root.read()
    names = (top, root.name) if is_held else (root.name,)
    return read.attributes is None or all(not x or x in read.attributes for x in names)
