"""Running a task's steps without a loop, from initial weights that are equal on every backend."""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from ..backends.base import active
from ..backends.window import Window, form_of
from ..core import structures
from ..core.options import Options
from ..data.leaves import Array, as_arrays, window_of
from ..errors import ConfigurationError, StateError
from ..steps.compiled_step import CompiledStep
from ..steps.derived import assigned
from ..steps.state import State
from .trace import Trace

Batches = Sequence[Any]


def run_steps(
    task: Any,
    batches: Batches,
    options: Options | None = None,
    windows: Sequence[int] = (1,),
    start: int | None = None,
    step: str = "train_step",
) -> Trace:
    """Run a step of a task once per batch and return its values and variables.

    The steps start from the task's current state, and the task keeps the state after the last step.

    Args:
        task: A task; layers and optimizers that are not built yet are built.
        batches: Batches of arrays, in any structure that the step takes (tuples, dicts, …). Their
            first dimensions may differ, as that of an epoch's last batch does.
        options: Execution options; `Options()` by default.
        windows: How many steps run as one compiled call. The sizes repeat in this order: `(3, 1)`
            means 3, 1, 3, 1 … A window also ends where the shapes of the batches change.
        start: The seed for `same_start`, which is then called first, to make the trace comparable
            with those of other backends.
        step: The name of the method to run.

    Returns:
        The trace: returned values, and all variables before the first and after the last step.

    Raises:
        ConfigurationError: There are no batches, or a window has less than one step.
        OwnershipError: A phase changed variables that it does not own, and `options` enable that
            check.

    Example:
        >>> import keras, numpy as np, treadle
        >>> task = treadle.Supervised(keras.Sequential([keras.layers.Dense(1)]), "mse", "sgd")
        >>> batches = [(np.ones((2, 3), "float32"), np.zeros((2, 1), "float32"))] * 4
        >>> trace = run_steps(task, batches, windows=(3, 1), start=0)
        >>> trace.values["loss"].shape
        (4,)
        >>> sorted(trace.changed)[:2]
        ['model/layers/0/bias', 'model/layers/0/kernel']
    """
    runner = Runner(task, first_of(batches), options, step)
    if start is not None:
        runner.start_from(start)
    return runner.run(batches, windows)


def first_of(batches: Batches) -> Any:
    """Return the first batch.

    Raises:
        ConfigurationError: `batches` is empty.
    """
    if not batches:
        raise ConfigurationError("there are no batches to run a step on")
    return batches[0]


def same_start(task: Any, seed: int = 0) -> None:
    """Set the weights of a built task to values that are the same on every backend.

    The same seed gives different initial weights on each backend. This function therefore draws
    every randomly initialized layer variable (of a float dtype, with two or more dimensions, and
    not constant) with NumPy, from the seed and the variable's path. The distribution is uniform,
    with the variance of the Glorot initializer. Biases, statistics, optimizers, metrics and seeds
    are not changed.

    Args:
        task: A task whose layers are built, as they are after its first step.
        seed: The random seed.

    Raises:
        StateError: A layer is not built, so its weights would be drawn later.

    Example:
        >>> import keras, treadle
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> same_start(treadle.Supervised(model, "mse", "sgd"))
        >>> keras.ops.convert_to_numpy(model.layers[0].kernel)[0].astype(float).round(3).tolist()
        [-0.105, -0.29, 0.146]
    """
    state = State.discover(task)
    for layer in state.layers:
        if not layer.built:
            raise StateError(
                f"same_start needs built layers, and {layer.name!r} is not: run a step first, or "
                "give run_steps a start"
            )
    _draw_weights(state, seed)


class Runner:
    """A prepared step of a task that can be run several times.

    Args:
        task: The task; layers and optimizers that are not built yet are built.
        batch: An example of the step's batches.
        options: Execution options.
        step: The name of the method to run.
    """

    def __init__(
        self, task: Any, batch: Any, options: Options | None = None, step: str = "train_step"
    ) -> None:
        self.task = task
        self._prepared = CompiledStep(
            task, getattr(task, step), as_arrays(batch), options or Options(), step
        )

    @property
    def programs(self) -> int:
        """The number of programs that were compiled."""
        return self._prepared.programs

    @property
    def state(self) -> State:
        """The task's state: every variable that is reachable from it."""
        return self._prepared.state

    def start_from(self, seed: int) -> None:
        """Draw weights as `same_start` does; layers that are still unbuilt are not in use."""
        _draw_weights(self.state, seed)

    def run(self, batches: Batches, windows: Sequence[int] = (1,)) -> Trace:
        """Run the step once per batch, in windows of these sizes, and return the trace."""
        start = self.state.arrays()
        values: list[dict[str, Array]] = []
        weights: list[dict[str, Array]] = []
        done = 0
        for window in _windows([as_arrays(batch) for batch in batches], windows):
            returned, by, broken = self._prepared.run(window, done).fetch()
            self._prepared.raise_violations(broken)
            self._prepared.finish_window()
            values.append(returned)
            weights.append(by)
            done += window.count
        return Trace(
            _joined(values),
            _joined(weights),
            start,
            self.state.arrays(),
            active().name,
            str(self._prepared.plan),
        )

    def run_in_each(
        self, batches: Batches, partitions: Iterable[Sequence[int]]
    ) -> Iterator[tuple[Sequence[int], Trace]]:
        """Run the batches once per partition, always from the same variables and random states."""
        start = self.state.arrays()
        for sizes in partitions:
            self.state.assign(start)
            with active().own_random():
                trace = self.run(batches, sizes)
            yield sizes, trace


def _draw_weights(state: State, seed: int) -> None:
    backend = active()
    optimizers_and_metrics = {
        id(v)
        for x in (*state.all_optimizers.values(), *state.metrics.values())
        for v in x.variables
    }
    for path, variable in state.variables.items():
        value = backend.read(variable)
        if (
            id(variable) not in optimizers_and_metrics
            and "float" in str(value.dtype)
            and value.ndim >= 2
            and (value != value.flat[0]).any()
        ):
            backend.write(variable, _drawn(path, value.shape, seed).astype(value.dtype))
            assigned([variable])


def _windows(batches: Batches, sizes: Sequence[int]) -> Iterator[Window]:
    """Stack batches of equal structure, shapes and dtypes in windows, cycling through the sizes."""
    if not sizes or min(sizes) < 1:
        raise ConfigurationError(f"windows must be sizes of at least 1, not {tuple(sizes)}")
    forms = [form_of(batch) for batch in batches]
    first = 0
    for size in cycle(sizes):
        last = first
        while last < len(batches) and last - first < size and forms[last] == forms[first]:
            last += 1
        stacked = structures.mapped(lambda *rows: np.stack(rows), *batches[first:last])
        yield window_of(stacked, last - first)
        first = last
        if first == len(batches):
            return


def _joined(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _drawn(path: str, shape: tuple[int, ...], seed: int) -> Array:
    fields = int(np.prod(shape[:-2]))
    limit = np.sqrt(6 / (fields * (shape[-2] + shape[-1])))
    return np.random.default_rng([seed, zlib.crc32(path.encode())]).uniform(-limit, limit, shape)
