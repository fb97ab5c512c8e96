"""Seeding the global random states of Python, NumPy and torch for each batch of a source.

A source may draw from these generators: an augmentation calls `np.random.rand`, or a shuffling
`DataLoader` calls torch. They are therefore seeded before every batch as a function of (seed,
epoch, batch), and restored afterwards. Random numbers then depend neither on previous batches nor
on the train step, so a batch is the same after a resume, when prefetched, or when read alone.
Functions that a source calls with `loop.call` are seeded in the same way, with `stream`.
"""

import ctypes
import random
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, Final

import numpy as np

from .order import hashed

PURPOSE = 2
"""Distinguishes these hashes from those in `functions`, which hash as many numbers."""

_random: Any = np.random  # its type stubs lack two functions

NUMBERS: Final = 624
SIZE: Final = 4 * NUMBERS + ctypes.sizeof(ctypes.c_int)
"""Bytes of a Mersenne Twister: 624 numbers, and the position of the next one."""

_drawn: list[int] = []
"""The seed, epoch and batch being drawn, and the number of `stream` calls; empty otherwise."""


@contextmanager
def preserved() -> Generator[None, None, None]:
    """Restore the global random states on exit. This takes about 25 µs, mostly for Python."""
    torch = _torch()
    python_state, restore_numpy = random.getstate(), numpy_state()
    torch_state = None if torch is None else torch.default_generator.get_state()
    drawn = list(_drawn)
    try:
        yield
    finally:
        _drawn[:] = drawn
        random.setstate(python_state)
        restore_numpy()
        if torch is not None:
            torch.default_generator.set_state(torch_state)


def seed_for_batch(seed: int, epoch: int, batch: int) -> None:
    """Seed the global random states for a batch. This takes about 10 µs."""
    _drawn[:] = seed, epoch, batch, 0
    key = hashed(PURPOSE, seed, epoch, batch)
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    torch = _torch()
    if torch is not None:
        torch.default_generator.manual_seed(key >> 1)  # torch takes 63 bits


def stream() -> int | None:
    """Return a 31-bit seed for a random stream, or None if no batch is being drawn.

    Each call returns a different seed. If a batch is drawn again, such as after a resume, the seeds
    are the same.
    """
    if not _drawn:
        return None
    *batch, calls = _drawn
    _drawn[-1] = calls + 1
    return hashed(PURPOSE, *batch, calls + 1) >> 33


def _torch() -> Any:
    """Return torch if it has been imported; otherwise nothing can draw from its generator."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None


def numpy_state() -> Callable[[], None]:
    """Return a function that restores the present state of NumPy's global generator.

    `np.random.get_state` and `set_state` convert 624 numbers one by one. That takes 70 µs, which is
    longer than it takes to draw many batches. This copies the generator's memory instead, whose
    address NumPy publishes. The layout of that memory is compared with `get_state` once.
    """
    generator: Any = _random.get_bit_generator()
    if not isinstance(generator, np.random.MT19937) or not _has_known_layout():
        # The complete state, which takes about 60 µs.
        return partial(np.random.set_state, np.random.get_state(legacy=False))
    address: int = generator.ctypes.state_address
    before = ctypes.string_at(address, SIZE)
    # Normal numbers are drawn in pairs. If the second one of a pair waits to be returned, it is not
    # part of this memory: drawing a number tells, since it then leaves the memory unchanged.
    number = np.random.standard_normal()
    if ctypes.string_at(address, SIZE) == before:
        state = {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": number}
        np.random.set_state(state)
        return partial(np.random.set_state, state)

    def restore() -> None:
        ctypes.memmove(address, before, SIZE)
        _random.set_bit_generator(generator)  # discards a waiting number

    restore()
    return restore


@cache
def _has_known_layout() -> bool:
    """Return whether the memory of NumPy's generator has the layout that this module expects."""
    generator: Any = np.random.MT19937(0)
    generator.random_raw(5)  # so that the position is neither zero nor the last one
    state = generator.state["state"]
    expected = state["key"].astype("uint32").tobytes() + bytes(ctypes.c_int(state["pos"]))
    return ctypes.string_at(generator.ctypes.state_address, SIZE) == expected
