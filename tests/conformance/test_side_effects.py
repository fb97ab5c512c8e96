"""What a step does besides computing happens once for each training step, and never before it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from tests.dying import killed
from treadle import data
from treadle.errors import TreadleWarning

BACKEND = keras.config.backend()
STEPS, BATCH = 6, 4
on_tensorflow = pytest.mark.skipif(BACKEND != "tensorflow", reason="operations of TensorFlow")

X = np.random.default_rng(0).normal(size=(BATCH * 3, 2)).astype("float32")
SOURCE = data.from_arrays(X, batch_size=BATCH)


class Acting(treadle.Task):
    """Trains a model whose optimizer is not built yet, and acts in each step."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        self.model = keras.Sequential([keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.SGD(1e-3)
        self.act = act

    def train_step(self, batch: Any) -> Any:
        found = self.act(batch)
        loss = treadle.minimize(
            lambda: ops.mean(self.model(batch) ** 2), self.model, self.optimizer
        )
        return {"loss": loss, "found": found}


def train(act: Callable[[Any], Any], directory: Path | None = None, **options: Any) -> Any:
    keras.utils.set_random_seed(0)
    options = treadle.Options(**options)
    with treadle.Loop(Acting(act), directory, options=options, console=False) as loop:
        return loop.fit(SOURCE, epochs=STEPS // 3).steps("found").tolist()


if BACKEND == "tensorflow":
    import tensorflow as tf

    def environment() -> tuple[Any, Any]:
        calls: list[float] = []

        def step(x: Any) -> Any:
            calls.append(float(np.sum(x)))
            return np.float32(len(calls))

        return calls, step

    def calling(function: Any) -> Any:
        calls, step = environment()

        def act(x: Any) -> Any:
            return tf.ensure_shape(function(step, [x], tf.float32), [])

        return act, lambda: len(calls)

    class Kinds:
        """Functions that act in a step, each with a function that counts how often it did."""

        @staticmethod
        def numpy_function(path: Path) -> Any:
            return calling(tf.numpy_function)

        @staticmethod
        def py_function(path: Path) -> Any:
            return calling(tf.py_function)

        @staticmethod
        def iterator(path: Path) -> Any:
            numbers = iter(tf.data.Dataset.range(99))

            def act(x: Any) -> Any:
                return tf.cast(next(numbers), tf.float32)

            return act, lambda: int(next(numbers))

        @staticmethod
        def table(path: Path) -> Any:
            table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

            def act(x: Any) -> Any:
                key = tf.constant([7], tf.int64)
                table.insert(key, table.lookup(key) + 1.0)
                return tf.ensure_shape(table.lookup(key), [1])[0]

            return act, lambda: int(table.lookup(tf.constant(7, tf.int64)))

        @staticmethod
        def queue(path: Path) -> Any:
            queue = tf.queue.FIFOQueue(99, [tf.float32], [()])

            def act(x: Any) -> Any:
                queue.enqueue(tf.reduce_sum(x))
                queue.enqueue(tf.reduce_sum(x))
                return queue.dequeue()

            return act, lambda: int(queue.size())

        @staticmethod
        def printed(path: Path) -> Any:
            path /= "printed.txt"

            def act(x: Any) -> Any:
                tf.print("step", output_stream=f"file://{path}")
                return tf.reduce_sum(x)

            return act, lambda: path.read_text().count("step")

        @staticmethod
        def summary(path: Path) -> Any:
            writer = tf.summary.create_file_writer(str(path))

            def act(x: Any) -> Any:
                with writer.as_default():
                    tf.summary.scalar(
                        "sum", tf.reduce_sum(x), step=tf.cast(treadle.step(), tf.int64)
                    )
                return tf.reduce_sum(x)

            def count() -> int:
                writer.close()
                (file,) = path.glob("events*")
                events = tf.compat.v1.train.summary_iterator(str(file))
                return sum(bool(event.summary.value) for event in events)

            return act, count

        @staticmethod
        def in_a_branch(path: Path) -> Any:
            act, count = calling(tf.numpy_function)
            return lambda x: tf.cond(tf.reduce_sum(x) < 1e9, lambda: act(x), lambda: 0.0), count

    KINDS = [name for name in vars(Kinds) if not name.startswith("_")]
else:
    KINDS = []


@on_tensorflow
@pytest.mark.filterwarnings("ignore:a resume of this run may not be exact")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(x, marks=pytest.mark.long if x in ("py_function", "queue") else ())
        for x in KINDS
    ],
)
@pytest.mark.parametrize(
    "execution", ["auto", *(pytest.param(x, marks=pytest.mark.long) for x in ("eager", "measure"))]
)
def test_operations_of_tensorflow_act_once_for_each_step(
    kind: str, execution: str, tmp_path: Path
) -> None:
    act, count = getattr(Kinds, kind)(tmp_path)
    train(act, execution=execution)
    assert count() == STEPS


@on_tensorflow
def test_a_table_resumes_and_rolls_back_with_the_state(tmp_path: Path) -> None:
    def counting() -> Callable[[Any], Any]:
        numbers = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, 0.0)
        empty = {"empty_key": -1, "deleted_key": -2}
        three = tf.constant(3, tf.int64)
        dense = tf.lookup.experimental.DenseHashTable(tf.int64, tf.int64, 0, **empty)

        def act(x: Any) -> Any:
            key = tf.strings.as_string(treadle.step() % 2)
            numbers.insert(key, numbers.lookup(key) + 1.0)
            dense.insert(three, dense.lookup(three) + 2)
            found = numbers.lookup(key) + 100 * tf.cast(dense.lookup(three), tf.float32)
            return tf.ensure_shape(found, []) + 0 * tf.reduce_sum(x)

        return act

    def run(directory: Path, *more: Any, source: Any = SOURCE) -> Any:
        keras.utils.set_random_seed(0)
        hooks = [treadle.hooks.Checkpoint("1 step"), *more]
        with treadle.Loop(Acting(counting()), directory, hooks=hooks, console=False) as loop:
            return loop.fit(source, epochs=STEPS // 3).steps("found").tolist()

    whole = run(tmp_path / "whole")
    assert whole == [201.0, 401.0, 602.0, 802.0, 1003.0, 1203.0]
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "killed", treadle.every("4 steps", killed))
    assert run(tmp_path / "killed") == whole
    broken = data.from_arrays(np.where(np.arange(len(X)) == 9, np.nan, X.T).T, batch_size=BATCH)
    rollback = treadle.hooks.NonFinite("rollback")
    assert run(tmp_path / "rolled-back", rollback, source=broken) == whole[: STEPS - 2]


class Branching(Acting):
    """Counts in one table in the first step and in another later, and evaluates with both."""

    def __init__(self) -> None:
        create = tf.lookup.experimental.MutableHashTable
        tables = create(tf.int64, tf.float32, 0.0), create(tf.int64, tf.float32, 0.0)
        key = tf.constant([1], tf.int64)

        def insert(table: Any) -> Any:
            table.insert(key, table.lookup(key) + 1.0)
            return 0.0

        def counted() -> Any:
            one, many = (tf.ensure_shape(table.lookup(key), [1])[0] for table in tables)
            return one + 100 * many

        def act(x: Any) -> Any:
            first = tf.reduce_all(x == X[:BATCH])
            tf.cond(first, lambda: insert(tables[0]), lambda: insert(tables[1]))
            return counted()

        super().__init__(act)
        self.counted = counted

    def eval_step(self, batch: Any) -> Any:
        return {"found": self.counted()}


@on_tensorflow
@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_tables_of_branches_are_told_apart_in_a_resumed_run_and_in_an_evaluation(
    execution: str, tmp_path: Path
) -> None:
    in_order = data.from_arrays(X, batch_size=BATCH, shuffle=False)

    def loop(*hooks: Any) -> Any:
        options = treadle.Options(execution=execution)
        return treadle.Loop(Branching(), tmp_path, hooks=hooks, options=options, console=False)

    every_step = treadle.hooks.Checkpoint("1 step")
    with (
        pytest.raises(OSError, match="killed"),
        loop(every_step, treadle.every("2 steps", killed)) as ended,
    ):
        ended.fit(in_order, epochs=2)
    with loop() as resumed:
        found = resumed.fit(in_order, epochs=2).steps("found").tolist()
    assert found == [1.0, 101.0, 201.0, 202.0, 302.0, 402.0]
    with loop() as finished:
        assert finished.evaluate(in_order) == {"found": 402.0}


@on_tensorflow
def test_a_table_that_eval_step_changes_is_named(tmp_path: Path) -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)

    class Evaluating(Acting):
        def eval_step(self, batch: Any) -> Any:
            table.insert(tf.constant([1], tf.int64), [1.0])
            return {"found": tf.reduce_sum(batch)}

    message = (
        "a resume of this run may not be exact: eval_step changes a table, which a checkpoint "
        "holds only if train_step changes it: count in a metric"
    )
    with (
        pytest.warns(TreadleWarning, match=message),
        treadle.Loop(Evaluating(tf.reduce_sum), tmp_path, console=False) as loop,
    ):
        loop.fit(SOURCE, validation=SOURCE, epochs=1)


@on_tensorflow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "iterator",
            "a resume of this run may not be exact: train_step uses an iterator, whose position "
            "no checkpoint holds: pass the data to the loop, or keep it in variables",
        ),
        (
            "queue",
            "a resume of this run may not be exact: train_step uses a queue, whose elements no "
            "checkpoint holds: pass the data to the loop, or keep it in variables",
        ),
        (
            "numpy_function",
            "a resume of this run may not be exact: train_step calls Python, whose own state no "
            "checkpoint holds: keep the state in variables, or pass stateful=False to "
            "tf.numpy_function if there is none",
        ),
        (
            "sampler",
            "a resume of this run may not be exact: train_step draws with "
            "LogUniformCandidateSampler, which counts its calls where no checkpoint finds the "
            "count: draw with keras.random",
        ),
        (
            "raw",
            "a resume of this run may not be exact: train_step draws with NonDeterministicInts, "
            "which counts its calls where no checkpoint finds the count: draw with keras.random",
        ),
    ],
)
def test_state_that_no_checkpoint_holds_is_named_before_training(
    kind: str, message: str, tmp_path: Path
) -> None:
    acts = {
        "sampler": lambda x: tf.cast(
            tf.random.log_uniform_candidate_sampler(
                tf.constant([[1]], tf.int64), 1, 2, True, 9
            ).sampled_candidates[0],
            tf.float32,
        ),
        "raw": lambda x: tf.cast(
            tf.raw_ops.NonDeterministicInts(shape=[1], dtype=tf.int32)[0] % 2, tf.float32
        ),
    }
    act = acts.get(kind) or getattr(Kinds, kind)(tmp_path)[0]
    with (
        pytest.warns(TreadleWarning) as warned,
        treadle.Loop(Acting(act), tmp_path / "run", console=False) as loop,
    ):
        loop.prepare(SOURCE)
        loop.fit(SOURCE, epochs=1)
    found = [str(warning.message) for warning in warned if warning.category is TreadleWarning]
    assert found == [message]


@on_tensorflow
def test_state_in_a_branch_that_the_dry_run_does_not_take_is_named_too(tmp_path: Path) -> None:
    numbers = iter(tf.data.Dataset.range(99))

    def act(x: Any) -> Any:
        def take() -> Any:
            return tf.cast(next(numbers), tf.float32)

        return tf.cond(tf.reduce_sum(x) > 1e9, take, lambda: 0.0)

    with pytest.warns(TreadleWarning, match=r"train_step uses an iterator, whose position no"):
        train(act, tmp_path)


@on_tensorflow
def test_a_step_that_cannot_be_traced_and_acts_says_that_it_acts_once_more() -> None:
    calls, step = environment()

    def act(x: Any) -> Any:
        return float(tf.numpy_function(step, [x], tf.float32)) + tf.zeros([])

    with pytest.warns(
        TreadleWarning,
        match=r"train_step acts once more than it trains, such as by calling Python: it had to run "
        r"before training, since TensorFlow cannot trace it \(.*\)",
    ):
        train(act, execution="eager")
    assert len(calls) > STEPS


@on_tensorflow
def test_a_step_that_cannot_be_traced_may_read_what_it_has_put_into_a_queue(tmp_path: Path) -> None:
    queue = tf.queue.FIFOQueue(99, [tf.float32], [()])

    def act(x: Any) -> Any:
        queue.enqueue(tf.reduce_sum(x))
        return float(queue.dequeue()) + tf.zeros([])

    with pytest.warns(TreadleWarning, match="acts once more than it trains"):
        assert len(train(act, execution="eager")) == STEPS
    assert int(queue.size()) == 0


@on_tensorflow
def test_a_step_that_cannot_be_traced_and_fills_a_table_acts_once_for_each_step() -> None:
    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    key = tf.constant(7, tf.int64)

    def act(x: Any) -> Any:
        table.insert(key, table.lookup(key) + 1.0)
        return float(table.lookup(key)) + tf.zeros([])

    assert train(act, execution="eager") == [1.0 + step for step in range(STEPS)]


@pytest.mark.skipif(BACKEND != "jax", reason="callbacks of JAX")
@pytest.mark.parametrize("kind", ["io_callback", "debug.callback", "debug.print"])
@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_callbacks_of_jax_act_once_for_each_step(kind: str, execution: str, capfd: Any) -> None:
    import jax
    from jax.experimental import io_callback

    calls: list[float] = []

    def count(x: Any) -> Any:
        calls.append(float(x))
        return np.float32(len(calls))

    def act(x: Any) -> Any:
        total = ops.sum(x)
        if kind == "io_callback":
            return io_callback(count, jax.ShapeDtypeStruct((), "float32"), total, ordered=True)
        if kind == "debug.callback":
            jax.debug.callback(lambda x: calls.append(float(x)), total)
        else:
            jax.debug.print("total {}", total)
        return total

    train(act, execution=execution)
    jax.effects_barrier()
    assert len(calls) + capfd.readouterr().out.count("total") == STEPS


@pytest.mark.skipif(BACKEND != "torch", reason="steps of PyTorch are Python")
@pytest.mark.parametrize(("execution", "before"), [("eager", 2), ("auto", 4)])
def test_python_in_a_step_of_pytorch_also_runs_before_training(execution: str, before: int) -> None:
    environment = iter(range(99))
    found = train(lambda x: x.sum() * 0 + next(environment), execution=execution)
    assert found == list(range(before, before + STEPS))
