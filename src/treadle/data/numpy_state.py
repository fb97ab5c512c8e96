"""The state of NumPy's global generator, copied quickly.

`np.random.get_state` and `set_state` convert 624 numbers one by one. That takes 120 µs, which is
longer than it takes to draw many batches. This copies the generator's memory instead, whose address
NumPy publishes. The layout of that memory is compared with `np.random.get_state` once.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

_random: Any = np.random  # its type stubs lack two functions

NUMBERS: Final = 624
SIZE: Final = 4 * NUMBERS + ctypes.sizeof(ctypes.c_int)
"""Bytes of a Mersenne Twister: 624 numbers, and the position of the next one."""


def numpy_state() -> Callable[[], None]:
    """Return a function that restores the present state of NumPy's global generator."""
    generator: Any = _random.get_bit_generator()
    if not isinstance(generator, np.random.MT19937) or not _has_known_layout():
        return _complete(np.random.get_state(legacy=False))
    address: int = generator.ctypes.state_address
    before = ctypes.string_at(address, SIZE)
    # Normal numbers are drawn in pairs. If the second one of a pair waits to be returned, it is not
    # part of this memory: drawing a number tells, since it then leaves the memory unchanged.
    number = np.random.standard_normal()
    if ctypes.string_at(address, SIZE) == before:
        state = {**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": number}
        np.random.set_state(state)
        return _complete(state)

    def restore() -> None:
        ctypes.memmove(address, before, SIZE)
        _random.set_bit_generator(generator)  # discards a waiting number

    restore()
    return restore


def _complete(state: Any) -> Callable[[], None]:
    """Return a function that sets the complete state, which takes about 60 µs."""
    return lambda: np.random.set_state(state)


@cache
def _has_known_layout() -> bool:
    """Return whether the memory of NumPy's generator has the layout that this module expects."""
    generator: Any = np.random.MT19937(0)
    generator.random_raw(5)  # so that the position is neither zero nor the last one
    state = generator.state["state"]
    expected = state["key"].astype("uint32").tobytes() + bytes(ctypes.c_int(state["pos"]))
    return ctypes.string_at(generator.ctypes.state_address, SIZE) == expected
