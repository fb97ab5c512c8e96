"""A seed's program, and the smallest program that fails as it does."""

import contextlib
import time
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from .grammar import programs
from .program import Program


def program_of(number: int, features: frozenset[str], short: bool = False) -> Program:
    """Return the program that a seed stands for."""
    found: list[Program] = []
    _run(number, features, short, found.append)
    return found[-1]


def shrunk(
    number: int, features: frozenset[str], short: bool, fails: Any, seconds: float = 300
) -> tuple[Program, Any]:
    """Return the smallest program that fails as the seed's own does, and what it fails with.

    Args:
        number: The seed.
        features: What the grammar may use.
        short: Programs are small.
        fails: Returns what a program fails with, or None; what differs in kind is None as well.
        seconds: After so many the smallest one so far is taken.
    """
    known: dict[Program, Any] = {}
    best: list[tuple[Program, Any]] = []
    end = time.monotonic() + seconds
    first = program_of(number, features, short)

    def body(program: Program) -> None:
        if program not in known:
            known[program] = fails(program) if time.monotonic() < end or program == first else None
        if known[program] is not None:
            best[:] = [(program, known[program])]
            raise AssertionError

    with contextlib.suppress(AssertionError):
        _run(number, features, short, body)
    return best[0]


def _run(number: int, features: frozenset[str], short: bool, body: Any) -> None:
    """Call `body` with the program of a seed, and while it raises, with smaller ones."""
    calls = 0

    @seed(number)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        verbosity=Verbosity.quiet,
    )
    @given(programs(features, short))
    def one(program: Program) -> None:
        nonlocal calls
        calls += 1
        if calls > 1:  # the first that Hypothesis makes is the smallest one there is, for any seed
            body(program)

    one()
