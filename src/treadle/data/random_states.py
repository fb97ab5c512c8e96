"""The global random states of Python, NumPy and torch, while a source gives its batches.

A source may draw from them (an augmentation calls `np.random.rand`, a shuffling `DataLoader` calls
torch). They are therefore set anew before every batch, as a function of (seed, epoch, batch), and
afterwards put back as they were: what a source draws depends neither on what was read before nor
on what the step draws, so that a batch comes out the same after a resume, ahead of time, or alone.
What a source asks of the running loop (`loop.call`) is random in the same way, by `stream`.
"""

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from .order import hashed

PURPOSE = 2
"""Tells these hashes from those of `functions`, which are of as many numbers."""

_drawn: list[int] = []
"""The seed, epoch and batch that is drawn, and how often `stream` was asked for; else nothing."""


@contextmanager
def preserved() -> Generator[None, None, None]:
    """Put the global random states back as they were; costs about 60 µs, mostly NumPy's."""
    torch = _torch()
    python_state, numpy_state = random.getstate(), np.random.get_state(legacy=False)
    torch_state = None if torch is None else torch.default_generator.get_state()
    drawn = list(_drawn)
    try:
        yield
    finally:
        _drawn[:] = drawn
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        if torch is not None:
            torch.default_generator.set_state(torch_state)


def seed_for_batch(seed: int, epoch: int, batch: int) -> None:
    """Set the global random states as they are for this batch; costs about 10 µs."""
    _drawn[:] = seed, epoch, batch, 0
    key = hashed(PURPOSE, seed, epoch, batch)
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    torch = _torch()
    if torch is not None:
        torch.default_generator.manual_seed(key >> 1)  # torch takes 63 bits


def stream() -> int | None:
    """Return a number of 31 bits for a random stream; None where no batch is drawn.

    It is another one each time; a batch that is drawn again, as after a resume, gets the same ones.
    """
    if not _drawn:
        return None
    _drawn[-1] += 1
    return hashed(PURPOSE, *_drawn) >> 33


def _torch() -> Any:
    """Return torch where something has imported it: nobody draws from it otherwise."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "default_generator") else None
