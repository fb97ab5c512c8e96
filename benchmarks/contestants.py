"""Who is timed: what every contestant has in common, and those that every backend has.

A contestant trains whole epochs and returns what it counted. Hand-driven loops are closures over
their own model; `fit` takes its own time, between the ends of two epochs, so that nothing of what
a call of it sets up counts against it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

import keras

import treadle

from .workloads import Job

Values = dict[str, float]
Epoch = Callable[[], Values]
# "raw": one compiled call with nothing around it; "hand": what people write; "part": does
# less, or needs to be configured.
Kind = Literal["treadle", "raw", "hand", "fit", "framework", "part"]


@dataclass(frozen=True)
class Entry:
    """A contestant that may take part.

    Attributes:
        name: For the tables.
        kind: What it is compared as.
        make: Makes it for a job.
    """

    name: str
    kind: Kind
    make: Callable[[Job], "Contestant"]


@dataclass
class Round:
    """What one turn of a contestant took.

    Attributes:
        seconds: For all its steps.
        steps: How many.
        values: What the last epoch counted: loss, accuracy.
    """

    seconds: float
    steps: int
    values: Values


class Contestant:
    """One way to train.

    Args:
        epoch: Trains one epoch of `steps` steps and returns what it counted, which waits for the
            device.
        steps: Steps in such an epoch.
    """

    def __init__(self, epoch: Epoch, steps: int) -> None:
        self._epoch, self.steps = epoch, steps

    def round(self, epochs: int = 1) -> Round:
        """Train some epochs and take the time."""
        values: Values = {}
        started = time.perf_counter()
        for _ in range(epochs):
            values = self._epoch()
        return Round(time.perf_counter() - started, epochs * self.steps, values)

    def about(self) -> dict[str, Any]:
        """Return what else is worth keeping, when all is over."""
        return {}

    def close(self) -> None:
        """Let go of everything."""


class TreadleLoop(Contestant):
    """Treadle as a user has it who passes a directory: every default hook is at work.

    `fit` consists of exactly these two loops; here they stand in a generator, which rests while
    other contestants have their turn. The console writes as it does where there is no terminal.

    Args:
        job: What to train.
        source: Other data than the job's arrays.
        hooks: With the default hooks, or with none.
        options: How steps are executed.
        make: Makes another task than the job's.

    Attributes:
        loop: What runs; None before the first epoch.
    """

    def __init__(
        self,
        job: Job,
        source: Any = None,
        hooks: bool = True,
        options: treadle.Options | None = None,
        make: Callable[[], Any] | None = None,
    ) -> None:
        self.loop: Any = None
        train = source or treadle.data.from_arrays(*job.arrays, batch_size=job.batch_size)
        if source is None and len(job.arrays) == 1:  # one array alone would make bare batches
            train = treadle.data.from_arrays(job.arrays, batch_size=job.batch_size)

        def epochs() -> Iterator[Values]:
            task = (make or job.make)()
            with ExitStack() as stack:
                folder = stack.enter_context(TemporaryDirectory()) if hooks else None
                none = () if hooks else (_no_guard(),)
                loop = treadle.Loop(task, folder, hooks=none, console=hooks, options=options)
                self.loop = stack.enter_context(loop)
                for _ in self.loop.epochs():
                    for _ in self.loop.steps(train, every="auto"):
                        pass
                    yield self.loop.metrics()

        self._rounds = epochs()
        super().__init__(lambda: next(self._rounds), job.steps)

    def about(self) -> dict[str, Any]:
        """Return the plan and what it cost to compile."""
        return {"plan": self.loop.plan, **asdict(self.loop.costs)}

    def close(self) -> None:
        """Let the run come to its end."""
        self.loop.stop("all had their turns")
        next(self._rounds, None)


def _no_guard() -> treadle.hooks.NonFinite:
    """Return the one hook that every loop has, made to look at nothing."""
    guard = treadle.hooks.NonFinite()
    guard.steps = lambda loop, logs: None
    return guard


class Fit(Contestant):
    """`model.fit`, as it runs in the midst of many epochs, without a progress bar.

    Args:
        model: A compiled model.
        data: `x` and `y`, or a source of batches.
        steps: Steps of an epoch.
        train: Trains the model: `treadle.fit`, or `fit` of Keras by default.
        **arguments: Of `fit`.
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        steps: int,
        train: Callable[..., Any] = keras.Model.fit,
        **arguments: Any,
    ) -> None:
        self.model, self.steps, self._train = model, steps, train
        self._data, self._arguments = data, arguments
        self._callbacks: list[Any] = arguments.pop("callbacks", [])
        self._fresh = True

    def round(self, epochs: int = 1) -> Round:
        """Train one epoch more than asked for: the first one holds what the call sets up."""
        clock = Clock()
        # The first call compiles anyway, and its first epoch is what the others' first epoch is.
        more = 0 if self._fresh else 1
        self._fresh = False
        started = time.perf_counter()
        self._train(
            self.model,
            *self._data,
            epochs=epochs + more,
            verbose=0,
            callbacks=[clock, *self._callbacks],
            **self._arguments,
        )
        ends = [started, *clock.ends]
        return Round(ends[-1] - ends[more], epochs * self.steps, clock.values)


class Clock(keras.callbacks.Callback):
    """Notes when epochs end; it is called at no step."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []
        self.values: Values = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())
        self.values = {name: float(value) for name, value in (logs or {}).items()}


def compiled(job: Job, **compile_arguments: Any) -> Any:
    """Return the job's model, compiled for `fit`, `evaluate` and `predict` of Keras."""
    task = job.make()
    task.model.compile(
        optimizer=task.optimizer,
        loss=task.loss,
        metrics=list(job.metrics().values()),
        **compile_arguments,
    )
    return task.model


def fit(job: Job, source: Any = None, **compile_arguments: Any) -> Contestant:
    """`model.fit` over arrays, which it shuffles each epoch, or over another source of batches."""
    model = compiled(job, **compile_arguments)
    if source is not None:
        return Fit(model, (source,), job.steps)
    return Fit(model, job.arrays, job.steps, batch_size=job.batch_size)


def sliced(arrays: Sequence[Any], batch_size: int) -> Iterator[tuple[Any, ...]]:
    """Yield the batches of arrays in stored order."""
    for start in range(0, len(arrays[0]), batch_size):
        yield tuple(array[start : start + batch_size] for array in arrays)


def checked(outputs: Any) -> Values:
    """Return sums of predictions by which contestants are compared."""
    return {"first batch": float(abs(outputs[:100]).sum()), "last": float(abs(outputs[-1]).sum())}
