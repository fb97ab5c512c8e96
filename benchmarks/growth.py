"""What the other tables need: hooks, precision, growth of data, parameters and steps, memory."""

import gc
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import keras
import psutil

from . import models
from .contestants import Contestant, Entry, TreadleLoop
from .timing import take_turns
from .workloads import Job, job

# 784-444-444-10 has ten times the parameters of 784-64-64-10.
WIDE = 444
HOOK_STEPS = 10_000


def hooks(entries: list[Entry], rounds: int, quick: bool) -> dict[str, Any]:
    """Time all default hooks against none, and each hook by a clock around its calls."""
    work = job("mlp-sgd")
    makers: dict[str, Callable[[], Contestant]] = {
        "treadle": lambda: TreadleLoop(work),
        "treadle, no hooks": lambda: TreadleLoop(work, hooks=False),
    }
    # What is looked for is small, so there are more rounds.
    times = take_turns(makers, rounds if quick else 3 * rounds, 0.1 if quick else 0.5)
    each = each_hook(work, HOOK_STEPS // (10 if quick else 1))
    return {"times": {name: asdict(one) for name, one in times.items()}, "each": each}


def each_hook(work: Job, steps: int) -> dict[str, float]:
    """Return the microseconds per step that each default hook takes."""
    contestant = TreadleLoop(work)
    contestant.round()
    spent: dict[str, float] = {}

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                spent[name] += time.perf_counter() - started

        return call

    for hook in contestant.loop._dispatcher._hooks:
        name = type(hook).__name__
        spent[name] = 0.0
        for method in ("steps", "record"):
            setattr(hook, method, clocked(name, getattr(hook, method)))
    epochs = -(-steps // work.steps)
    contestant.round(epochs)
    contestant.close()
    return {name: seconds / (epochs * work.steps) * 1e6 for name, seconds in spent.items()}


def precision(entries: list[Entry], rounds: int, quick: bool) -> dict[str, Any]:
    """Time the convolutional network in float32 and in mixed_bfloat16, by hand and by Treadle."""
    work = job("cifar10-cnn")
    makers: dict[str, Callable[[], Contestant]] = {}
    for entry in entries:
        if entry.name not in ("treadle", "raw in-graph loop", "@tf.function step over tf.data"):
            continue
        for policy in ("float32", "mixed_bfloat16"):
            make = partial(_made_in, policy, work.workload.make)
            typed = replace(work, workload=replace(work.workload, make=make))
            makers[f"{entry.name}, {policy}"] = partial(entry.make, typed)
    times = take_turns(makers, rounds, 0.1 if quick else 0.3)
    return {"times": {name: asdict(one) for name, one in times.items()}}


def _made_in(policy: str, make: Callable[[], Any]) -> Any:
    with dtype_policy(policy):
        return make()


@contextmanager
def dtype_policy(name: str) -> Any:
    """Let layers that are made inside compute in another type."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def growth(entries: list[Entry], rounds: int, quick: bool) -> dict[str, Any]:
    """Time ten times the data and ten times the parameters, next to the plain loop."""
    small = job("mlp-sgd", 187)
    wide_task = replace(
        small.workload, make=lambda: models.mlp(keras.optimizers.SGD(1e-2), width=WIDE)
    )
    wide = replace(small, workload=wide_task)
    plain = next(e for e in entries if e.name in PLAIN)
    makers: dict[str, Callable[[], Contestant]] = {
        "treadle": lambda: TreadleLoop(small),
        "treadle, data × 10": lambda: TreadleLoop(job("mlp-sgd", 1870)),
        "treadle, parameters × 10": lambda: TreadleLoop(wide),
        plain.name: lambda: plain.make(small),
        f"{plain.name}, parameters × 10": lambda: plain.make(wide),
    }
    times = take_turns(makers, rounds, 0.1 if quick else 0.3)
    return {"plain": plain.name, "times": {name: asdict(one) for name, one in times.items()}}


# The loop of the same Keras model with nothing around it, on each backend.
PLAIN = ("raw in-graph loop", "raw lax.scan", "Keras layers, tensor slices")


def memory(entries: list[Entry], rounds: int, quick: bool) -> dict[str, Any]:
    """Train 100,000 steps; note memory, time per step and compiled programs on the way."""
    steps, looks = (5_000, 20) if quick else (100_000, 50)
    work = job("mlp-sgd", 100)
    contestant = TreadleLoop(work)
    process = psutil.Process()
    rows: list[dict[str, float]] = []
    done = 0
    while done < steps:
        part = contestant.round(max(1, steps // looks // work.steps))
        done += part.steps
        gc.collect()
        rows.append(
            {
                "step": done,
                "mebibytes": process.memory_info().rss / 2**20,
                "microseconds": part.seconds / part.steps * 1e6,
                "programs": contestant.loop.costs.programs,
            }
        )
    contestant.close()
    return {"rows": rows}
