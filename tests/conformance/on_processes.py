"""Programs on several processes, compared with the same in one.

The file starts itself once for each process. It prints as JSON how far the results are from those
of one process, and where; for checks of errors, it prints the messages:

    python on_processes.py SIZE reference short-batch-3 …
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np
from cases import CASES, batches_of
from classifier import Classifier, dense
from keras import layers, ops

import treadle
from benchmarks import devices as benchmark
from treadle import data
from treadle.backends.base import active
from treadle.core import processes
from treadle.core.randomness import seed_everything
from treadle.distribute.channel import Channel, connect, free_port, listen
from treadle.testing.running import Runner

BACKEND = keras.config.backend()
JAX, TORCH = BACKEND == "jax", BACKEND == "torch"
PLAN = {"jax": "XLA", "tensorflow": "graph", "torch": "captured"}[BACKEND]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
FEATURES, CLASSES, STEPS = 6, 4, 7
Results = dict[str, Any]
CHECKS: dict[str, Callable[[], Results]] = {}


MESSAGES: dict[str, Callable[[], None]] = {}
"""Programs that fail."""


def fails(function: Callable[[], None]) -> Callable[[], None]:
    MESSAGES[function.__name__.replace("_", "-")] = function
    return function


class Group(Channel):
    """A group that goes on after a program that fails in all of its processes."""

    def fail(self, error: BaseException) -> None:
        pass


class Reference(Classifier):
    """What is computed over a whole batch, or drawn: statistics, masks, norms, averages."""

    def __init__(self) -> None:
        super().__init__(
            [
                layers.Dense(8, activation="relu", name="hidden", kernel_regularizer="l2"),
                layers.BatchNormalization(),
                layers.Dropout(0.2, seed=3),
                layers.Dropout(0.1),
                layers.Dense(CLASSES, name="out"),
            ],
            keras.optimizers.Adam(1e-2, global_clipnorm=0.5, use_ema=True),
        )

    def predict_step(self, batch: Any) -> Any:
        return self.model(batch[0], training=False)


class Accumulating(Reference):
    def __init__(self) -> None:
        super().__init__()
        self.accumulator = treadle.Accumulator(steps=3)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        weights = self.model.trainable_variables
        loss, grads = treadle.gradients(lambda: self.loss(y, self.model(x, training=True)), weights)
        self.accumulator.add(grads, lambda mean: self.optimizer.apply(mean, weights))
        return {"loss": loss}


def rows(count: int, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=count).astype("int32")


def source(count: int, batch_size: int, **kwargs: Any) -> Any:
    return data.from_arrays(*rows(count), batch_size=batch_size, **kwargs)


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


def rank() -> int:
    """The number of this process; 0 also while one process computes what is expected."""
    return processes.process_group().rank


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


class Apart(Reference):
    """Begins with other weights and seeds in each process, which process 0 sends to the others."""

    def __init__(self) -> None:
        super().__init__()
        self.model.layers[0].kernel_initializer = keras.initializers.HeNormal(seed=rank())
        self.noise = keras.random.SeedGenerator(rank())
        if TORCH:
            import torch

            torch.manual_seed(rank())


class Masked(Classifier):
    """Statistics over the elements that a mask selects, of which rows have different numbers."""

    def __init__(self) -> None:
        super().__init__(
            [
                layers.Reshape((3, 2)),
                layers.Masking(0.0),
                layers.BatchNormalization(),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return super().train_step((ops.where(x[:, :1] > ops.abs(x) - 1, x, 0), y))


class Small(Classifier):
    """A step, given as a function of the task and a batch."""

    def __init__(self, step: Callable[[Any, Any, Any], Any], units: int = 5) -> None:
        super().__init__([dense(units), keras.layers.Dense(CLASSES)])
        self.step = step
        self.mean = keras.Variable(0.0, trainable=False, name="mean")
        self.known = keras.Variable(0.0, trainable=False, aggregation="mean", name="known")
        self.count = keras.Variable(0, dtype="int32", trainable=False, aggregation="sum")

    def minimized(self, loss: Callable[[], Any]) -> Any:
        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    def train_step(self, batch: Any) -> Any:
        return self.step(self, *batch)


def usual(task: Any, x: Any, y: Any) -> Any:
    return task.minimized(lambda: task.loss(y, task.model(x, training=True)))


def counted(task: Any, x: Any, y: Any) -> Any:
    """Variables that say how their changes are combined."""
    task.known.assign(0.9 * task.known + ops.mean(x))
    task.count.assign(task.count + x.shape[0])
    return usual(task, x, y)


def contrastive(task: Any, x: Any, y: Any) -> Any:
    """A loss that compares each view with all other views."""

    def objective() -> Any:
        views = ops.concatenate([x, x + 0.1 * keras.random.normal(ops.shape(x))])
        z = ops.normalize(treadle.gathered(task.model(views, training=True)))
        count = z.shape[0]
        logits = ops.matmul(z, ops.transpose(z)) - 1e9 * ops.eye(count)
        return task.loss(ops.roll(ops.arange(count), count // 2), logits)

    return task.minimized(objective)


def on_values(task: Any, x: Any, y: Any) -> Any:
    """Python decides by the loss, which is that of the whole batch."""
    logs = usual(task, x, y)
    return logs if float(logs["loss"]) > 1.3 else {"loss": logs["loss"] + 1}


def tokens(task: Any, x: Any, y: Any) -> Any:
    """A mean over the tokens of all rows, of which rows have none to three."""

    def objective() -> Any:
        mask = ops.cast(ops.arange(3)[None] < y[:, None], "float32")
        targets = ops.cast(ops.reshape(x, (-1, 3, 2))[..., 0] > 0, "int32")
        logits = ops.log_softmax(ops.reshape(task.model(x, training=True), (-1, 1, CLASSES)))
        losses = -ops.sum(ops.one_hot(targets, CLASSES) * logits, axis=-1)
        right = ops.cast(ops.argmax(logits, axis=-1) == targets, "float32")
        count = ops.sum(mask)
        mean, accuracy = (
            ops.sum(value * mask) / ops.maximum(count, 1.0) for value in (losses, right)
        )
        return treadle.weighted(mean, count), {"accuracy": treadle.weighted(accuracy, count)}

    weights = task.model.trainable_variables
    (loss, logs), grads = treadle.gradients(objective, weights)
    task.accumulator.add(
        grads, lambda mean: task.optimizer.apply(mean, weights), weight=loss.weight
    )
    return {"loss": loss, **logs}


class Tokens(Small):
    def __init__(self, steps: int) -> None:
        super().__init__(tokens)
        self.accumulator = treadle.Accumulator(steps)


class MetricResults(Reference):
    """Returns the results of metrics so far, as steps for `keras.Model` do: ratios, and sums.

    One counts again after its result, one is updated with a scalar, which has no rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recall = keras.metrics.F1Score(average="macro")
        self.losses = keras.metrics.Sum()

    def results(self, x: Any, y: Any, loss: Any) -> Any:
        logits = self.model(x, training=False)
        known = self.recall(ops.one_hot(y, CLASSES), ops.softmax(logits))
        self.recall.update_state(ops.one_hot(y, CLASSES), ops.one_hot(y, CLASSES))
        found = {"f1": known, "right": self.accuracy.result()}
        if loss is not None:
            self.losses.update_state(loss)
            found["sum"] = self.losses.result()
        return found

    def train_step(self, batch: Any) -> Any:
        found = super().train_step(batch)
        return {**found, **self.results(*batch, found["loss"])}

    def eval_step(self, batch: Any) -> Any:
        return {**super().eval_step(batch), **self.results(*batch, None)}


def metric_results() -> Results:
    """Train for two epochs, and validate, and return all values of steps too."""
    treadle.setup(seed=0)
    with treadle.Loop(MetricResults(), console=False, options=treadle.Options(window=4)) as loop:
        history = loop.fit(source(51, 8), source(19, 8, shuffle=False), epochs=2)
        assert processes.process_group().size == 1 or PLAN in loop.plan, loop.plan
        steps = {f"step {name}": history.steps(name) for name in ("loss", "f1", "right", "sum")}
        logged = {name: np.array(history[name]) for name in history.names() if name != "seconds"}
        return {**steps, **logged, **loop.state.arrays()}


class OwnFunction(Reference):
    """Trains in a `tf.function` of its own, of which TensorFlow would use the first trace again.

    Process 0 has as many rows of the last batch as of others, but they are a larger share of it.
    """

    def __init__(self) -> None:
        super().__init__()
        import tensorflow as tf

        self.update = tf.function(lambda *batch: Classifier.train_step(self, batch))

    def train_step(self, batch: Any) -> Any:
        return self.update(*batch)


CHECKS |= {
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


def fit(step: Callable[[Any, Any, Any], Any], count: int = 19, units: int = 5) -> None:
    treadle.setup(seed=0)
    with treadle.Loop(Small(step, units), console=False) as loop:
        loop.fit(source(count, 8), epochs=1)


@fails
def sum_of_losses() -> None:
    fit(lambda task, x, y: task.minimized(lambda: ops.sum(task.model(x) ** 2)))


@fails
def coupled_examples() -> None:
    def similarity(task: Any, x: Any, y: Any) -> Any:
        z = task.model(x)
        return ops.mean(ops.logsumexp(ops.matmul(z, ops.transpose(z)), axis=1))

    fit(lambda task, x, y: task.minimized(lambda: similarity(task, x, y)))


@fails
def sum_that_is_logged() -> None:
    fit(lambda task, x, y: {**usual(task, x, y), "labels": ops.sum(y)})


@fails
def variable_of_own_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        task.mean.assign(ops.mean(x))
        return usual(task, x, y)

    fit(step)


@fails
def backward() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if TORCH:
            loss = task.loss(y, task.model(x))
            loss.backward()
            return {"loss": loss}
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = task.loss(y, task.model(x))
        tape.gradient(loss, task.model.layers[0].kernel.value)
        return {"loss": loss}

    fit(step)


@fails
def loop_over_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        losses = [usual(task, x[i : i + 1], y[i : i + 1])["loss"] for i in range(x.shape[0])]
        return {"loss": sum(losses) / len(losses)}

    fit(step, count=3)


@fails
def error_for_some_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if x.shape[0] == 1:
            raise ValueError("too few rows")
        return usual(task, x, y)

    fit(step, count=3)


@fails
def shuffled_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if TORCH:
            import torch

            return usual(task, x + 0 * torch.randperm(x.shape[0])[:, None], y)
        return usual(task, keras.random.shuffle(x), y)

    fit(step)


@fails
def own_random_state() -> None:
    import tensorflow as tf

    fit(lambda task, x, y: usual(task, x + tf.random.normal(x.shape), y))


@fails
def concrete_function() -> None:
    import tensorflow as tf

    normalized = layers.BatchNormalization()
    normalize = tf.function(lambda x: normalized(x, training=True))

    class Normalizing(Small):
        def __init__(self) -> None:
            super().__init__(
                lambda task, x, y: usual(task, normalize.get_concrete_function(x)(x), y)
            )
            self.normalized = normalized

    with treadle.Loop(Normalizing(), console=False) as loop:
        loop.fit(source(16, 8), epochs=1)


@fails
def ambiguous_draw() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = keras.random.normal((x.shape[0],)), keras.random.normal((4,))
        return usual(task, x + noise[0][:, None] + ops.sum(noise[1]), y)

    fit(step, count=8)


@fails
def draw_along_the_second_axis() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = keras.random.normal((FEATURES, x.shape[0]))
        return usual(task, x + ops.transpose(noise), y)

    fit(step, count=8)


@fails
def other_data() -> None:
    x, y = rows(16)
    batches = [(x[:8] + rank(), y[:8]), (x[8:], y[8:])]  # a list has no facts to compare
    with treadle.Loop(Small(usual), console=False) as loop:
        loop.fit(batches, epochs=1)


@fails
def other_seed() -> None:
    treadle.setup(seed=rank())
    try:
        treadle.Loop(Small(usual), console=False)
    finally:
        seed_everything(0)


@fails
def gathered_without_rows() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        treadle.gathered(task.mean)
        return usual(task, x, y)

    fit(step)


@fails
def other_variables() -> None:
    class Unlike(Small):
        def __init__(self) -> None:
            super().__init__(usual, 5 + rank())

    with treadle.Loop(Unlike(), console=False) as loop:
        loop.fit(source(19, 8), epochs=1)


@fails
def changed_by_hand() -> None:
    treadle.setup(seed=0)
    with treadle.Loop(Small(usual), console=False) as loop:
        loop.fit(source(16, 8), epochs=1)
        loop.task.model.layers[0].bias.assign_add(ops.ones((5,)) * rank())
        loop.fit(source(6, 6), epochs=1)


def message_of(name: str) -> str:
    try:
        MESSAGES[name]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("no error was raised")


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """The largest difference and where it is, infinite if whole numbers differ; NaN equals NaN.

    That of an array with entries above 1 is relative to its largest one.
    """
    assert list(found) == list(expected)
    worst = 0.0, ""
    for name, value in expected.items():
        same, other = np.asarray(found[name]), np.asarray(value)
        assert same.shape == other.shape, name
        if other.dtype.kind == "f":
            assert (np.isnan(same) == np.isnan(other)).all(), name
            size = max(1.0, float(np.nanmax(np.abs(other), initial=0)))
            worst = max(worst, (float(np.nanmax(np.abs(same - other), initial=0)) / size, name))
        elif not (same == other).all():
            return float("inf"), name
    return worst


def digest(found: Results) -> str:
    raw = hashlib.sha256()
    for name, value in found.items():
        raw.update(name.encode() + np.asarray(value).tobytes())
    return raw.hexdigest()


def result_of(name: str, group: Group, folder: Path) -> Any:
    """Write the results of a check, which must be equal in all processes; return an error or None.

    Of a program that fails, return the messages.
    """
    distribution = keras.distribution.distribution()
    keras.backend.clear_session()
    if JAX:
        keras.distribution.set_distribution(distribution)
    try:
        if name in MESSAGES:
            return group.exchange(message_of(name), "a message")
        found = CHECKS[name]()
        equal = len(set(group.exchange(digest(found), "a digest"))) == 1
    except Exception:
        return {"error": traceback.format_exc()}
    if not equal:
        return {"error": "the processes have different results"}
    if group.rank == 0:
        arrays = {str(i): np.asarray(value) for i, value in enumerate(found.values())}
        np.savez(folder / f"{name}.npz", names=list(found), **arrays)
    return None


def member(rank: int, size: int, port: int, folder: Path, names: list[str]) -> None:
    """Run the checks in one of the processes."""
    if rank == 0:
        links = {other: link for other, (link, _) in listen("127.0.0.1", port, size).items()}
    else:
        links = {0: connect("127.0.0.1", port, {"rank": rank})}
    group = Group(rank, size, links)
    processes.join(group)
    address = group.exchange(f"127.0.0.1:{free_port()}", "the address")[0]
    active().join_processes(group, address)
    results = {name: result_of(name, group, folder) for name in names}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    group.exchange(None, "the end")


def compared(name: str, folder: Path) -> Any:
    """The difference of the results of several processes from those of this one."""
    try:
        with np.load(folder / f"{name}.npz") as found:
            arrays = {path: found[str(i)] for i, path in enumerate(found["names"].tolist())}
        keras.backend.clear_session()
        return difference(arrays, CHECKS[name]())
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    names = sys.argv[2:]
    if os.environ.get("MEMBER"):
        rank, size, port, folder = os.environ["MEMBER"].split(maxsplit=3)
        member(int(rank), int(size), int(port), Path(folder), names)
        return
    size, port = int(sys.argv[1]), free_port()
    with TemporaryDirectory() as folder:
        members = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), *sys.argv[1:]],
                env={**os.environ, "MEMBER": f"{rank} {size} {port} {folder}", **ONE_THREAD},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        try:
            codes = [each.wait(timeout=500) for each in members]
        finally:
            for each in members:
                each.kill()
        if any(codes):
            sys.exit(max(map(abs, codes)))
        results = json.loads((Path(folder) / "results.json").read_text())
        print(json.dumps({name: x or compared(name, Path(folder)) for name, x in results.items()}))


if __name__ == "__main__":
    main()
