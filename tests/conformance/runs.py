"""What all tests look at: every case is prepared once, and run once per way of running it."""

from functools import cache
from typing import Any

import keras
import pytest
from cases import CASES, batches_of

import treadle
from treadle.testing import Trace
from treadle.testing.running import Runner

STEPS = 7
MIXED = (3, 1, 3)
PARTITIONS = (MIXED, (2,), (7,))  # and (1,), with which these are compared


def a_quarter() -> list[Any]:
    """Return all cases as parameters: PyTorch runs all, the others a quarter, and all with `--all`.

    It is for what runs a case eagerly, which takes XLA as long as compiling it.
    """
    return [
        pytest.param(name, marks=pytest.mark.long_to_compile if number % 4 else ())
        for number, name in enumerate(CASES)
    ]


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
    return _compiled(name, sizes)


def from_same_start(name: str, steps: int) -> Trace:
    """The compiled step without random numbers, from a start that all backends share."""
    if CASES[name].steady is CASES[name].make:  # no need to compile it again
        prepared, trace = _single_steps(name)
        prepared.state.assign(trace.start)
    else:
        prepared = runner(name, steady=True)
    prepared.start_from(seed=0)
    return prepared.run(batches_of(name, steps), MIXED)  # needs no further program


@cache
def _compiled(name: str, sizes: tuple[int, ...]) -> Trace:
    prepared, first = _single_steps(name)
    if sizes == (1,):
        return first
    prepared.state.assign(first.start)
    [(_, trace)] = prepared.run_in_each(batches_of(name, STEPS), [sizes])
    return trace


@cache
def _single_steps(name: str) -> tuple[Runner, Trace]:
    """Prepare the compiled step, and run it in single steps."""
    prepared = runner(name)
    [(_, trace)] = prepared.run_in_each(batches_of(name, STEPS), [(1,)])
    return prepared, trace
