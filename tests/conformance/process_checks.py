"""Programs that give the same results on several processes as in one, by name."""

import itertools
import resource
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cases import CASES, batches_of
from keras import ops
from process_tasks import (
    TORCH,
    Accumulating,
    Apart,
    Masked,
    MetricResults,
    OwnFunction,
    Reference,
    Small,
    Tokens,
    contrastive,
    counted,
    on_values,
    rows,
    source,
    usual,
)

import treadle
from benchmarks import devices as benchmark
from treadle import data
from treadle.core import processes
from treadle.core.randomness import seed_everything
from treadle.errors import TreadleWarning
from treadle.testing.running import Runner

BACKEND = keras.config.backend()
PLAN = {"jax": "XLA", "tensorflow": "graph", "torch": "captured"}[BACKEND]
STEPS = 7
Results = dict[str, Any]
CHECKS: dict[str, Callable[[], Results]] = {}


def trained(
    make: Callable[[], Any] = Reference,
    count: int = 51,
    batch_size: int = 8,
    whole: bool = False,
    plan: str = PLAN,
    **options: Any,
) -> Results:
    """Return losses, logs and the whole state after two epochs."""
    treadle.setup(seed=0)
    validation = source(333, 64, shuffle=False) if whole else None
    with treadle.Loop(
        make(), console=False, options=treadle.Options(**{"window": 8, **options})
    ) as loop:
        history = loop.fit(source(count, batch_size), validation, epochs=2)
        logged = [name for name in history.names() if "loss" in name or "accuracy" in name]
        found = {name: np.array(history[name]) for name in logged}
        found |= {"step losses": history.steps("loss"), **loop.state.arrays()}
        if whole:
            found["predictions"] = loop.predict(validation)
        if processes.process_group().size > 1 or BACKEND != "tensorflow":  # else compiled by XLA
            assert plan in loop.plan, loop.plan
    return found


CHECKS |= {
    "reference": lambda: trained(whole=True),
    "eager": lambda: trained(count=19, execution="eager", plan="eager"),
    "accumulating": lambda: trained(Accumulating),
    "short-batch-1": lambda: trained(count=33),
    "short-batch-41": lambda: trained(count=64 + 41, batch_size=64),
    "fewer-rows-than-processes": lambda: trained(count=11, batch_size=3),
    "streamed": lambda: trained(data_on_device=False),
}


def of_case(name: str) -> Callable[[], Results]:
    """Seven steps of one of the conformance cases, with batches of eight rows."""

    def run() -> Results:
        treadle.setup(seed=0)
        runner = Runner(CASES[name].make(), batches_of(name, 1)[0])
        trace = runner.run(batches_of(name, STEPS), (3, 1, 3))
        return {**trace.values, **trace.state}

    return run


CHECKS |= {f"case-{name}": of_case(name) for name in CASES}


def of_recipe(name: str) -> Callable[[], Results]:
    """Eight steps of a recipe, with small settings."""

    def run() -> Results:
        values, state = benchmark.trained(name, 1, 8)
        return {**values, **state}

    return run


CHECKS |= {f"recipe-{name}": of_recipe(name) for name in benchmark.SMALL}


SHARES = [4, 4, 4, 4, 4, 2], [4, 4, 4, 1]
"""The rows of the batches that two processes read from their own shares of a stream."""


def shares() -> Any:
    """Two shares of a stream, or in one process the batches that two read together."""

    def batches(shard: int) -> list[Any]:
        starts = np.cumsum([0, *SHARES[shard]])
        x, y = rows(int(starts[-1]), seed=shard + 1)
        return [(x[a:b], y[a:b]) for a, b in itertools.pairwise(starts)]

    if processes.process_group().size == 1:
        pairs = itertools.zip_longest(batches(0), batches(1))
        return [
            tuple(np.concatenate(parts) for parts in zip(*filter(None, pair), strict=True))
            for pair in pairs
        ]
    return data.sharded(lambda shard_index, shard_count: batches(shard_index))


def sharded() -> Results:
    """Train for two epochs, and validate, on shares of a stream."""
    treadle.setup(seed=0)
    with treadle.Loop(Reference(), console=False, options=treadle.Options(window=4)) as loop:
        history = loop.fit(shares(), shares(), epochs=2)
        size = processes.process_group().size
        assert size == 1 or f"sharded over {size} processes (inexact on" in loop.plan, loop.plan
        logged = {name: np.array(history[name]) for name in ("loss", "val_loss", "val_accuracy")}
        return {**logged, "step losses": history.steps("loss"), **loop.state.arrays()}


CHECKS["sharded"] = sharded


predicted_rows: list[int] = []


class Predicting(Reference):
    """Predicts in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def predict_step(self, batch: Any) -> Any:
        x = batch[0]
        predicted_rows.append(x.shape[0])
        if self.how == "some-rows" and x.shape[0] == 4:
            raise ValueError("not for four rows")
        found = self.model(x, training=False)
        if self.how == "coupled":
            return ops.softmax(found, axis=0)
        if self.how == "drawn":
            seeds = self.model.layers[2].seed_generator
            return found + keras.random.normal(ops.shape(found), seed=seeds)
        if self.how == "one-number":
            return {"all": ops.mean(found, axis=0)}
        kinds = ops.argmax(found, axis=1), ops.cast(found[:, :1], "float16"), found > 0
        return {"found": found, "kinds": kinds}


def predicted() -> Results:
    """Predict on batches of 8 rows and a last one of 3 or 1, in memory, streamed, and sharded."""
    found: Results = {}
    size = processes.process_group().size
    hows = ("rows", "coupled", *(("drawn", "one-number", "some-rows") if TORCH else ()))
    for how in hows:
        for execution in ("eager", "auto") if TORCH else ("auto",):  # others compile, for long
            seed_everything(0)
            task, options = Predicting(how), treadle.Options(execution=execution)
            with treadle.Loop(task, console=False, options=options) as loop:
                sources = source(19, 8), [rows(8), rows(8, 1), rows(1, 2)], shares()
                if how == "some-rows":  # of which the whole batches are no such ones
                    sources = sources[:2]
                for i, each in enumerate(sources):
                    predicted_rows.clear()
                    result = loop.predict(each)
                    parts = keras.tree.flatten(result)
                    found |= {f"{how} {execution} {i} {j}": x for j, x in enumerate(parts)}
                    if (execution, how, i) == ("eager", "rows", 1) and size > 1:
                        # The form of a batch is known: no process computes all of its rows.
                        assert predicted_rows[:2] == [4, 4]
                        assert 8 not in predicted_rows, predicted_rows
    return found


CHECKS["predicted"] = predicted


def metric_results() -> Results:
    """Train for two epochs, and validate, and return all values of steps too."""
    treadle.setup(seed=0)
    with treadle.Loop(MetricResults(), console=False, options=treadle.Options(window=4)) as loop:
        history = loop.fit(source(51, 8), source(19, 8, shuffle=False), epochs=2)
        assert processes.process_group().size == 1 or PLAN in loop.plan, loop.plan
        steps = {f"step {name}": history.steps(name) for name in ("loss", "f1", "right", "sum")}
        logged = {name: np.array(history[name]) for name in history.names() if name != "seconds"}
        return {**steps, **logged, **loop.state.arrays()}


class Wide(Small):
    """A step whose rows need many numbers each."""

    def __init__(self, numbers: int) -> None:
        super().__init__(usual)
        self.numbers = numbers

    def train_step(self, batch: Any) -> Any:
        wide = ops.exp(batch[0][:, :1] * ops.arange(self.numbers, dtype="float32") * 1e-9)
        return {**super().train_step(batch), "wide": ops.mean(ops.sum(wide, axis=1))}


class Crowded(Reference):
    """Has no memory in one process for more rows than it has in two."""

    def _hold(self, batch: Any) -> Any:
        if batch[0].shape[0] > 4 and processes.process_group().rank == 1:
            raise MemoryError
        return batch

    def train_step(self, batch: Any) -> Any:
        return super().train_step(self._hold(batch))

    def eval_step(self, batch: Any) -> Any:
        return super().eval_step(self._hold(batch))

    def predict_step(self, batch: Any) -> Any:
        return super().predict_step(self._hold(batch))


def crowded() -> Results:
    """Train, evaluate and predict with batches for which a process has too little memory."""
    treadle.setup(seed=0)
    validation = source(30, 8, shuffle=False)
    with treadle.Loop(Crowded(), console=False, options=treadle.Options(window=4)) as loop:
        history = loop.fit(source(27, 8), validation, epochs=2)
        logged = {name: np.array(history[name]) for name in history.names() if "loss" in name}
        return {**logged, "predictions": loop.predict(validation), **loop.state.arrays()}


class Scaled(Reference):
    scale = 1.0

    def predict_step(self, batch: Any) -> Any:
        return self.scale * super().predict_step(batch)


def changed_values() -> Results:
    """Predict with a Python value that changes, and changes back, with rows of other forms."""
    treadle.setup(seed=0)
    found: Results = {}
    with treadle.Loop(Scaled(), console=False) as loop:
        for scale, count, size in ((1.0, 9, 5), (2.0, 5, 5), (1.0, 4, 4), (2.0, 9, 5)):
            loop.task.scale = scale
            found[f"{scale} {count}"] = loop.predict(source(count, size, shuffle=False))
    return found


def limited() -> Results:
    """Train with half of the memory that a whole batch needs, which in one process fails."""

    def train(numbers: int = 1 << 22) -> Results:
        return trained(lambda: Wide(numbers), count=16, batch_size=16)

    train(16)  # what is imported and allocated once does not count
    keras.backend.clear_session()
    if processes.process_group().size == 1:
        with memory(400 << 20), pytest.raises(RuntimeError, match="can't allocate memory"):
            train()
        keras.backend.clear_session()
        return train()
    few = (
        r"train_step: a process has too little memory for a batch of 16 examples, so only the "
        r"first 8 are compared with the results of one process\. To compare all examples of a "
        r"batch, train once with a smaller batch size"
    )
    first = processes.process_group().rank == 0
    with memory(400 << 20), pytest.warns(TreadleWarning, match=few) if first else nullcontext():
        return train()


@contextmanager
def memory(more: int) -> Generator[None]:
    """Let this process have so many bytes of memory more than now."""
    now = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, now[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, now)


CHECKS |= {
    "crowded": crowded,
    "changed-values": changed_values,
    "limited": limited,
    "tokens": lambda: trained(lambda: Tokens(1)),
    "tokens-accumulated": lambda: trained(lambda: Tokens(3), count=33, batch_size=4),
    "masked": lambda: trained(Masked),
    "apart": lambda: trained(Apart),
    "counted": lambda: trained(lambda: Small(counted)),
    "gathered": lambda: trained(lambda: Small(contrastive), count=21, batch_size=9),
    "on-values": lambda: trained(lambda: Small(on_values), plan="could not be captured"),
    "metric-results": metric_results,
    "own-function": lambda: trained(OwnFunction, count=8 * 3 + 7),
}
