"""`Options(execution="measure")`: time a step with every possible plan and choose the fastest."""

from collections.abc import Callable
from dataclasses import replace
from statistics import median

from ..backends.base import Executor, Outputs, active
from ..backends.plans import XLA, Plan, RefusedError
from ..backends.window import Window
from ..core.processes import process_group
from .planning import candidates
from .state import State

ROUNDS = 5
ROUND_SECONDS = 0.15  # per plan and round; five plans take about four seconds
LONGEST = 64  # steps of a timed window


def fastest(
    make: Callable[[bool], Executor], first: Executor, window: Window, state: State
) -> Executor:
    """Run a step with every possible plan in turn, and return the fastest executor.

    Args:
        make: Makes an executor. Its argument is whether the executor runs the step as Python.
        first: An executor of the step, from which its facts are read.
        window: A window whose first batch is used.
        state: The state, which is restored afterwards.

    Returns:
        The fastest executor. Its plan describes the times and the options that choose it directly.
    """
    facts = first.facts(window)
    executors: list[Executor] = []
    lengths: list[int] = []
    kept, first_batch = state.keep(), window.split(1)[0]
    try:
        with active().own_random():
            for plan in candidates(facts):
                executor = make(not plan.compiler)
                executor.plan = plan
                try:
                    lengths.append(_length(executor, first_batch))
                except RefusedError:
                    continue
                executors.append(executor)
            state.put_back(kept)
            times: list[list[float]] = [[] for _ in executors]
            for _ in range(ROUNDS):
                for executor, length, found in zip(executors, lengths, times, strict=True):
                    outputs = executor.run(first_batch.repeated(length), 0)
                    outputs.fetch()
                    found.append(_slowest(outputs) / length)
                    state.put_back(kept)
    finally:  # restore the state after an error too
        state.put_back(kept)
    order = sorted(range(len(executors)), key=lambda i: median(times[i]))
    best = executors[order[0]]
    timings = ", ".join(f"{executors[i].plan} {median(times[i]) * 1e6:,.0f} µs" for i in order)
    pin = _pin(best.plan, facts.compilers)
    best.plan = replace(best.plan, why=f"measured, per step: {timings}; keep it with {pin}")
    return best


def _length(executor: Executor, one: Window) -> int:
    """Compile the step and return the number of steps of a timed window."""
    executor.compile(one)
    executor.run(one, 0).fetch()
    outputs = executor.run(one, 0)
    outputs.fetch()
    return max(1, min(LONGEST, int(ROUND_SECONDS / max(_slowest(outputs), 1e-9))))


def _slowest(outputs: Outputs) -> float:
    """Return how long a window took, of several processes in the slowest one."""
    return process_group().slowest(outputs.seconds, "measuring plans")


def _pin(plan: Plan, compilers: tuple[str, ...]) -> str:
    """Return the options that choose a plan without measuring."""
    if not plan.compiler:
        return "Options(execution='eager')"
    jit = f", jit={plan.compiler == XLA}" if len(compilers) > 1 else ""
    return f"Options(fused={plan.fused}{jit})"
