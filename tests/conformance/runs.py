"""What all tests look at: every case is prepared once, and run once per way of running it."""

from functools import cache
from typing import Any

import keras
from cases import CASES, batches_of

import treadle
from treadle.testing import Trace
from treadle.testing.running import Runner

STEPS = 7
PARTITIONS = ((1,), (2,), (3, 1, 3), (7,))


def runner(name: str, steady: bool = False, **options: Any) -> Runner:
    """A prepared step of a fresh task of a case; equal each time."""
    case = CASES[name]
    make = case.steady if steady else case.make
    assert make is not None
    keras.utils.set_random_seed(0)
    return Runner(make(), batches_of(name, 1)[0], treadle.Options(**options))


@cache
def eager(name: str) -> Trace:
    """The readable reference, which checks what each phase owns."""
    return runner(name, execution="eager", checked=True).run(batches_of(name, STEPS))


def compiled(name: str, sizes: tuple[int, ...] = (1,)) -> Trace:
    """The compiled step in windows of these sizes."""
    return _compiled(name)[1][sizes]


def from_same_start(name: str, steps: int) -> Trace:
    """The compiled step without random numbers, from a start that all backends share."""
    if CASES[name].steady is CASES[name].make:  # no need to compile it again
        prepared, traces = _compiled(name)
        prepared.state.assign(traces[1,].start)
    else:
        prepared = runner(name, steady=True)
    prepared.start_from(seed=0)
    return prepared.run(batches_of(name, steps), (STEPS,))


@cache
def _compiled(name: str) -> tuple[Runner, dict[Any, Trace]]:
    prepared = runner(name)
    return prepared, dict(prepared.run_in_each(batches_of(name, STEPS), PARTITIONS))
