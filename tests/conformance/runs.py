"""What all tests look at: every case is run once per way of running it."""

from functools import cache
from typing import Any

import keras

import treadle
from treadle.testing import Trace
from treadle.testing.running import Runner

from .cases import CASES, batches_of

STEPS = 7
PARTITIONS = ((1,), (2,), (3, 1, 3), (7,))


def made(name: str) -> treadle.Task:
    """A fresh task of a case; equal each time."""
    keras.utils.set_random_seed(0)
    return CASES[name].make()


def runner(name: str, **options: Any) -> Runner:
    """A prepared step of a fresh task of a case."""
    task = made(name)
    return Runner(task, batches_of(name, STEPS), treadle.Options(**options), "train_step")


@cache
def eager(name: str) -> Trace:
    """The readable reference, which checks what each phase owns."""
    return runner(name, execution="eager", checked=True).run((1,))


def compiled(name: str, sizes: tuple[int, ...] = (1,)) -> Trace:
    """The compiled step in windows of these sizes."""
    return _compiled(name)[sizes]


@cache
def _compiled(name: str) -> dict[Any, Trace]:
    return dict(runner(name).run_again_in(PARTITIONS))
