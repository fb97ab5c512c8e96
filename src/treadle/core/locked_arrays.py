"""Arrays of the user that are read-only while Treadle may have copies of them on a device."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, finalize

import numpy as np

EXPLANATION: Final = (
    "if this array is data of treadle.data.from_arrays: it is read-only until its loop is closed, "
    "since copies of it may be on a device. Pass changing=True, or change a copy"
)


@dataclass
class _Entry:
    array: Any
    was_writable: bool
    locks: int


_entries: Final[dict[int, _Entry]] = {}  # by the id of the array, which the entry keeps alive


class ArrayLock:
    """Keeps arrays read-only until it is released, or nothing refers to it.

    What an array is a view of is locked as well if it has no further memory: NumPy cannot lock a
    part of an array.

    Args:
        arrays: The arrays. Those of memory-mapped files are not locked.

    Attributes:
        release: A function that restores the flags that the arrays had before.
        is_partial: Whether the memory of an array can be written through a larger one.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        found: dict[int, Any] = {}
        self.is_partial = False
        for array in arrays:
            for part in _views(array):
                if part.nbytes <= array.nbytes:
                    found[id(part)] = part
                else:
                    self.is_partial = True
        self._parts = list(found.values())
        for part in self._parts:
            # Counted before it is listed: a garbage collection in between may release other locks.
            if (entry := _entries.get(id(part))) is not None:
                entry.locks += 1
                _entries[id(part)] = entry
            else:
                _entries[id(part)] = _Entry(part, part.flags.writeable, 1)
            part.flags.writeable = False
        self.release = finalize(self, _unlock, self._parts)
        self.release.atexit = False

    @property
    def is_intact(self) -> bool:
        """Whether it was not released, and the owner of the arrays has not unlocked one."""
        return self.release.alive and not any(part.flags.writeable for part in self._parts)


def _views(array: Any) -> list[Any]:
    """Return an array in memory, and the arrays that it is a view of."""
    found: list[Any] = []
    while isinstance(array, np.ndarray) and not isinstance(array, np.memmap):
        found.append(array)  # type: ignore[reportUnknownArgumentType]
        array = array.base
    return found


def _unlock(parts: list[Any]) -> None:
    """Restore the flags of arrays that no other lock needs, and of those that waited for these."""
    for part in parts:
        _entries[id(part)].locks -= 1
    free = [entry for entry in list(_entries.values()) if not entry.locks]
    for entry in sorted(
        free, key=lambda entry: len(_views(entry.array))
    ):  # a base before its views
        with suppress(ValueError):  # of an array whose base is locked: it waits for it
            entry.array.flags.writeable = entry.was_writable
        if not any(id(base) in _entries for base in _views(entry.array)[1:]):
            _entries.pop(id(entry.array), None)


def writable_view(array: Any) -> Any:
    """Return a view that is writable if possible: PyTorch shares memory with such arrays only."""
    parts = _views(array)
    flags = [part.flags.writeable for part in parts]
    with suppress(ValueError):  # memory that NumPy does not own, such as that of a JAX array
        for part in reversed(parts):
            part.flags.writeable = True
    view = array.view()
    for part, flag in zip(parts, flags, strict=True):
        part.flags.writeable = flag
    return view


class RenewedLock:
    """The lock of the arrays of a source, which is made again if it is not intact.

    Attributes:
        lock: The lock. Another one means that the arrays may have changed.
    """

    def __init__(self, arrays: Iterable[Any]) -> None:
        self._arrays = list(arrays)
        self.lock, self._sample = ArrayLock(self._arrays), None

    def is_intact(self, sample: Any) -> bool:
        """Return whether no change of the arrays is known.

        Args:
            sample: Returns a hash of some rows. It is compared if another array has the memory.
        """
        return self.lock.is_intact and (not self.lock.is_partial or sample() == self._sample)

    def renew(self, sample: Any) -> None:
        """Lock the arrays again."""
        self.lock = ArrayLock(self._arrays)
        self._sample = sample() if self.lock.is_partial else None


_used: Final[WeakKeyDictionary[Any, WeakSet[RenewedLock]]] = WeakKeyDictionary()


def use(lock: RenewedLock, loop: Any) -> None:
    """Keep arrays locked while a loop is open."""
    with suppress(TypeError):  # what stands for a loop in a user's code may have no weak reference
        _used.setdefault(loop, WeakSet()).add(lock)


def release(loop: Any) -> None:
    """Unlock the arrays that a loop used, which is closed, and no other one uses."""
    for lock in _used.pop(loop, ()):
        if not any(lock in others for others in _used.values()):
            lock.lock.release()


def explanation(error: Exception) -> str:
    """Return a note for NumPy's error about a read-only array if there are locked ones, or ""."""
    of_numpy = isinstance(error, ValueError) and "read-only" in str(error)
    return EXPLANATION if of_numpy and any(entry.locks for entry in _entries.values()) else ""
