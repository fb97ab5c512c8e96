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


BACKEND = keras.config.backend()
COMPILERS = ("tensorflow", "jax")


def marks(name: str, every: int = 1) -> Any:
    """Return the marks of a test of a case: PyTorch runs it by default, and a compiler may.

    XLA takes seconds to compile a case. So TensorFlow and JAX have an eighth of the cases each, and
    all with `--all`.

    Args:
        name: The case.
        every: The compilers have one in so many of these: for what runs a case eagerly, which takes
            XLA as long as compiling it.
    """
    if BACKEND == "torch":
        return ()
    turn, compiler = divmod(list(CASES).index(name), len(COMPILERS))
    return () if COMPILERS[compiler] == BACKEND and turn % (4 * every) == 0 else pytest.mark.long


def shared(names: Any = CASES, every: int = 1) -> list[Any]:
    """Return cases as parameters, of which each compiler has its half, also with `--all`."""
    found = []
    for name in names:
        compiler = COMPILERS[list(CASES).index(name) % len(COMPILERS)]
        own = BACKEND in (compiler, "torch")
        there = pytest.mark.skipif(not own, reason=f"{compiler} has this case")
        chosen = marks(name, every) if own else there
        found.append(pytest.param(name, marks=chosen))
    return found


def cases(names: Any = CASES, every: int = 1) -> list[Any]:
    """Return cases as parameters, with their marks."""
    return [pytest.param(name, marks=marks(name, every)) for name in names]


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
    prepared = runner(name)
    [(_, trace)] = prepared.run_in_each(batches_of(name, STEPS), [(1,)])
    return prepared, trace
