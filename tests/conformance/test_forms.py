"""Each form of batch (structure, shapes, dtypes) has a dry run, written variables and slots."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile, once
from keras import ops
from loops import same

import treadle
from tests.dying import killed
from treadle.errors import DataError
from treadle.hooks import Checkpoint, NonFinite
from treadle.steps import compiled_step
from treadle.steps.state import State

# Two forms of batch that differ in one thing, and how a step recognizes the first one.
KINDS: dict[str, tuple[Any, Any, Callable[[Any], bool]]] = {
    "structure": (
        lambda x: {"a": np.full(2, x, "float32")},
        lambda x: {"b": np.full(2, x, "float32")},
        lambda batch: "a" in batch,
    ),
    "shape": (
        lambda x: np.full(3, x, "float32"),
        lambda x: np.full(2, x, "float32"),
        lambda batch: batch.shape[0] == 3,
    ),
    "dtype": (
        lambda x: np.full(2, x, "float32"),
        lambda x: np.full(2, x, "int32"),
        lambda batch: "float" in keras.backend.standardize_dtype(batch.dtype),
    ),
}


class Pair(treadle.Task):
    """Trains `a` on batches of one form, and `b` on those of another."""

    def __init__(self, kind: str, make: Callable[[], Any], shared: bool = False) -> None:
        self.is_a = KINDS[kind][2]
        self.a, self.b = keras.Variable([1.0]), keras.Variable([2.0])
        self.oa = make()
        self.ob = self.oa if shared else make()

    def train_step(self, batch: Any) -> Any:
        (x,) = keras.tree.flatten(batch)
        x = ops.cast(x, "float32")
        v, optimizer = (self.a, self.oa) if self.is_a(batch) else (self.b, self.ob)
        return {"loss": treadle.minimize(lambda: ops.mean((v * x) ** 2), [v], optimizer)}


class Momentum:
    make = staticmethod(lambda: keras.optimizers.SGD(0.1, momentum=0.5))

    def __init__(self) -> None:
        self.slots = dict.fromkeys("ab", 0.0)

    def __call__(self, name: str, v: float, g: float) -> float:
        self.slots[name] = 0.5 * self.slots[name] - 0.1 * g
        return v + self.slots[name]


class Adam:
    make = staticmethod(lambda: keras.optimizers.Adam(0.1))

    def __init__(self) -> None:
        self.slots = {name: (0.0, 0.0) for name in "ab"}
        self.count = 0

    def __call__(self, name: str, v: float, g: float) -> float:
        self.count += 1
        m, s = self.slots[name]
        m, s = 0.9 * m + 0.1 * g, 0.999 * s + 0.001 * g * g
        self.slots[name] = m, s
        rate = 0.1 * np.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        return v - rate * m / (np.sqrt(s) + 1e-7)


def by_hand(order: str, kind: type, shared: bool) -> list[float]:
    """Return the losses of a hand-written loop over batches of ones."""
    values, one = {"a": 1.0, "b": 2.0}, kind()
    updates = {"a": one, "b": one if shared else kind()}
    losses: list[float] = []
    for name in order:
        losses.append(values[name] ** 2)
        values[name] = updates[name](name, values[name], 2 * values[name])
    return losses


def batches(order: str, kind: str = "structure", x: float = 1.0) -> list[Any]:
    return [KINDS[kind]["ab".index(name)](x) for name in order]


def fitted(
    task: treadle.Task, given: Sequence[Any], *hooks: Any, epochs: int = 1, **how: Any
) -> treadle.Loop:
    loop = treadle.Loop(task, hooks=hooks, console=False, **how)
    loop.fit(list(given), epochs=epochs)
    return loop


@EXECUTIONS
@pytest.mark.parametrize(
    ("kind", "update", "shared", "order"),
    [
        ("structure", Momentum, False, "abbba"),
        ("shape", Adam, False, "ababab"),
        ("dtype", Momentum, True, "aaaabb"),
        ("structure", Adam, True, "bbabaa"),
    ],
)
def test_each_form_trains_as_in_a_loop_by_hand(
    execution: Any, kind: str, update: Any, shared: bool, order: str
) -> None:
    options = treadle.Options(execution=execution)
    loop = fitted(Pair(kind, update.make, shared), batches(order, kind), options=options)
    found = loop.history.steps("loss")
    np.testing.assert_allclose(found, by_hand(order, update, shared), rtol=2e-5)
    iterations = loop.state.arrays()["oa/iterations"]
    assert iterations == (len(order) if shared else order.count("a"))


def test_a_form_is_built_once_and_then_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    original = compiled_step.build_step

    def counted(*arguments: Any, **options: Any) -> Any:
        built.append(arguments)
        return original(*arguments, **options)

    monkeypatch.setattr(compiled_step, "build_step", counted)
    loop = fitted(Pair("shape", Momentum.make), batches("abab" * 4, "shape"))
    assert len(built) == 2
    assert loop.costs.programs == 2


@EXECUTIONS
def test_a_dry_run_of_a_later_form_changes_nothing(execution: Any) -> None:
    class Drops(Pair):
        def __init__(self) -> None:
            super().__init__("shape", Adam.make)
            self.seed = keras.random.SeedGenerator(3)
            self.seen = keras.metrics.Mean()

        def train_step(self, batch: Any) -> Any:
            self.seen.update_state(keras.random.uniform((), seed=self.seed))
            return super().train_step(batch)

    options = treadle.Options(execution=execution)
    with treadle.Loop(Drops(), console=False, options=options) as loop:
        for batch in batches("aab", "shape"):
            loop.step(batch)
        before = loop.state.arrays()
        prepared = loop._run.training.prepared
        assert prepared is not None
        prepared.prepare(np.ones(2, "float32"))  # known
        prepared.prepare(np.ones(7, "float32"))  # new
        after = loop.state.arrays()
    same(after, before)


class Lazy(treadle.Task):
    """Has a second head that the first batch of another form builds."""

    def __init__(self, shared: bool = False) -> None:
        self.body = keras.layers.Dense(3, activation="tanh")
        self.heads = {"a": keras.layers.Dense(1), "b": keras.layers.Dense(2)}
        self.one = keras.optimizers.Adam(0.05)
        self.two = self.one if shared else keras.optimizers.SGD(0.05, momentum=0.9)
        self.errors = {"a": keras.metrics.Mean(), "b": keras.metrics.Mean()}

    def train_step(self, batch: Any) -> Any:
        ((name, x),) = batch.items()
        head, optimizer = self.heads[name], self.one if name == "a" else self.two

        def objective() -> Any:
            return ops.mean((head(self.body(x)) - 1.0) ** 2)

        loss, grads = treadle.gradients(objective, self.weights(head))
        optimizer.apply(grads, self.weights(head))
        self.errors[name].update_state(loss)
        return {"loss": loss}

    def weights(self, head: Any) -> Any:
        return [*self.body.trainable_variables, *head.trainable_variables]


def inputs(order: str, rows: int = 4) -> list[Any]:
    rng = np.random.default_rng(1)
    return [{name: rng.normal(size=(rows, 2)).astype("float32")} for name in order]


@EXECUTIONS
@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=long_to_compile)])
def test_layers_that_a_later_form_builds_are_trained(execution: Any, shared: bool) -> None:
    def run(order: Sequence[Any], **how: Any) -> treadle.Loop:
        keras.utils.set_random_seed(0)
        return fitted(Lazy(shared), order, options=treadle.Options(execution=execution))

    loop = run([*inputs("aabab")])
    state = loop.state.arrays()
    assert {"heads/b/kernel", "heads/a/kernel"} <= set(state)
    keras.utils.set_random_seed(0)
    task = Lazy(shared)  # all built before, its optimizers with all variables; trained by hand
    for head in task.heads.values():
        head(task.body(np.zeros((1, 2), "float32")))
    both = [*task.weights(task.heads["a"]), *task.heads["b"].trainable_variables]
    task.one.build(both if shared else task.weights(task.heads["a"]))
    if not shared:
        task.two.build(task.weights(task.heads["b"]))
    for batch in inputs("aabab"):
        task.train_step({name: ops.convert_to_tensor(x) for name, x in batch.items()})
    expected = State.discover(task).arrays()
    assert set(expected) == set(state)
    for path in expected:
        if not path.startswith("errors/"):  # the loop resets metrics
            np.testing.assert_allclose(state[path], expected[path], rtol=1e-4, atol=1e-6)


class Named(NamedTuple):
    b: Any
    a: Any


@dataclass
class Record:
    b: Any
    a: Any


class Contained(Lazy):
    """Reads batches in containers of classes, one for each form."""

    def train_step(self, batch: Any) -> Any:
        whole, batch = batch, batch["b"] if isinstance(batch, OrderedDict) else batch
        name = "a" if batch.b is None else "b"
        assert isinstance(batch, {"a": Named, "b": Record}[name])
        assert isinstance(whole, {"a": Named, "b": OrderedDict}[name])
        return super().train_step({name: getattr(batch, name)})


@pytest.mark.parametrize(
    ("shared", "at"),
    [
        pytest.param(False, 4, marks=long_to_compile),
        pytest.param(False, 8, marks=pytest.mark.long),
        pytest.param(True, 2, marks=(pytest.mark.long, once)),
        pytest.param(True, 3, marks=pytest.mark.long),
    ],
)
def test_a_killed_run_resumes_with_all_forms(tmp_path: Path, shared: bool, at: int) -> None:
    given = [
        Named(None, x["a"]) if "a" in x else OrderedDict(z=None, b=Record(x["b"], None))
        for x in inputs("aababa")
    ]

    def run(directory: Path, *ends: int) -> treadle.Loop:
        keras.utils.set_random_seed(0)
        hooks = [Checkpoint(every="1 step"), *(treadle.at(f"{n} steps", killed) for n in ends)]
        return fitted(Contained(shared), given, *hooks, epochs=2, directory=directory)

    expected = run(tmp_path / "whole")
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "killed", at)
    found = run(tmp_path / "killed")
    same(found.state.arrays(), expected.state.arrays())
    for name in ("loss", "a", "b"):
        np.testing.assert_array_equal(found.history[name], expected.history[name])
    assert "warning" not in found.history.names()


@long_to_compile
def test_a_finished_run_has_the_variables_of_all_forms_again(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    first = fitted(Lazy(), inputs("aab"), directory=tmp_path).state.arrays()
    keras.utils.set_random_seed(0)
    again = fitted(Lazy(), inputs("aab"), directory=tmp_path)
    assert again.progress.step == 3
    same(again.state.arrays(), first)


class Renamed(treadle.Task):
    """Reads the batch by the given keys."""

    def __init__(self, x: str, y: str) -> None:
        self.keys, self.w = (x, y), keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_step(self, batch: Any) -> Any:
        x, y = (batch[key] for key in self.keys)
        loss = treadle.minimize(lambda: ops.mean((self.w * x - y) ** 2), [self.w], self.optimizer)
        return {"loss": loss}


@once
def test_a_resume_with_renamed_batch_keys_names_both_structures(tmp_path: Path) -> None:
    def run(x: str, y: str, epochs: int) -> treadle.Loop:
        batch = {x: np.ones(2, "float32"), y: np.zeros(2, "float32")}
        return fitted(Renamed(x, y), [batch] * 2, epochs=epochs, directory=tmp_path, override=True)

    run("image", "label", 1)
    with pytest.raises(DataError) as caught:
        run("x", "y", 2)
    assert str(caught.value) == (
        "this run cannot resume: it was trained on batches {'image': array, 'label': array}, for "
        "which train_step now raises KeyError: 'x', and the source gives {'x': array, 'y': array}. "
        "Use the earlier structure in the data and in train_step again, or start a new run with "
        "the weights of this one (treadle.warm_start)"
    )
    assert run("image", "label", 2).progress.step == 4  # the checkpoint is still valid


@once
def test_a_resume_at_a_batch_of_a_structure_that_was_not_recorded(tmp_path: Path) -> None:
    def run(epochs: int, key: str) -> treadle.Loop:
        task = Pair("structure", Momentum.make)
        batch = {key: np.ones(2, "float32")}
        return fitted(task, [batch], epochs=epochs, directory=tmp_path, override=True)

    run(1, "a")
    assert run(2, "b").progress.step == 2


@long_to_compile
@EXECUTIONS
def test_a_skipped_step_of_a_later_form_is_undone(execution: Any) -> None:
    options = treadle.Options(execution=execution)
    bad = {"b": np.full((4, 2), np.nan, "float32")}
    given = inputs("aabab")

    def run(batches: Any) -> treadle.Loop:
        keras.utils.set_random_seed(0)
        return fitted(Lazy(), batches, NonFinite("skip"), options=options)

    for at in (2, 4):  # the first batch of its form, and a later one
        loop = run([*given[:at], bad, *given[at:]])
        assert loop.history.steps("undone").sum() == 1
        same(loop.state.arrays(), run(given).state.arrays())


@EXECUTIONS
def test_loss_scaling_undoes_what_a_later_form_changes(execution: Any) -> None:
    class Half(treadle.Task):
        def __init__(self) -> None:
            kind = {"dtype": "mixed_float16", "kernel_initializer": "ones"}
            self.heads = {name: keras.layers.Dense(1, **kind) for name in "ab"}
            self.optimizers = {name: keras.optimizers.SGD(0.1, momentum=0.9) for name in "ab"}
            self.counts = {name: keras.Variable(0.0) for name in "ab"}

        def train_step(self, batch: Any) -> Any:
            ((name, x),) = batch.items()
            head = self.heads[name]
            self.counts[name].assign_add(1.0)
            loss = treadle.minimize(lambda: ops.mean(head(x)), head, self.optimizers[name])
            return {"loss": loss}

    one = np.ones((2, 2), "float32")
    given = [{"a": one}, {"b": one}, {"b": one * np.float32(1e4)}, {"b": one}, {"a": one}]
    loop = fitted(Half(), given, options=treadle.Options(execution=execution))
    state = loop.state.arrays()
    assert loop.history.steps("undone").tolist() == [0, 0, 1, 0, 0]
    assert (state["counts/a"], state["counts/b"]) == (2, 2)
    assert (state["optimizers/b/iterations"], state["loss_scale/scale"]) == (2, 2.0**14)
    # Two steps of momentum with gradients of 1.
    np.testing.assert_allclose(state["heads/b/kernel"], 1 - 0.1 - 0.19, rtol=1e-3)


class Adds(Pair):
    """Accumulates gradients over two steps, for each form by itself."""

    def __init__(self) -> None:
        super().__init__("shape", Momentum.make)
        self.c = keras.Variable([[1.0, 1.0]])
        self.sums = {name: treadle.Accumulator(2) for name in "ab"}

    def train_step(self, batch: Any) -> Any:
        name = "a" if self.is_a(batch) else "b"
        variables = [self.a] if name == "a" else [self.b, self.c]
        optimizer = self.oa if name == "a" else self.ob

        def objective() -> Any:
            return sum(ops.mean((v * batch[0]) ** 2) for v in variables)

        loss, grads = treadle.gradients(objective, variables)
        self.sums[name].add(grads, lambda mean: optimizer.apply(mean, variables), weight=1.0)
        return {"loss": loss}


@EXECUTIONS
def test_each_form_accumulates_for_itself(execution: Any) -> None:
    options = treadle.Options(execution=execution)
    given = [KINDS["shape"][name == "b"](x) for name, x in zip("ababba", range(1, 7), strict=True)]
    loop = fitted(Adds(), given, options=options)
    state = loop.state.arrays()
    # a: batches 1 and 3 are one update, and batch 6 waits; b: batches 2 and 4 are, and 5 waits.
    a = 1 - 0.1 * (2 * 1 + 2 * 9) / 2
    b = 2 - 0.1 * (4 * 4 + 4 * 16) / 2
    np.testing.assert_allclose([state["a"][0], state["b"][0]], [a, b], rtol=1e-5)
    assert (state["sums/a/filled"], state["sums/b/filled"]) == (1, 1)
    np.testing.assert_allclose(state["sums/a/sums/0"], 2 * a * 36, rtol=1e-5)
    np.testing.assert_allclose(state["sums/b/sums/0"], 2 * b * 25, rtol=1e-5)


class Scored(Lazy):
    def eval_step(self, batch: Any) -> Any:
        ((name, x),) = batch.items()
        loss = ops.mean((self.heads[name](self.body(x)) - 1.0) ** 2)
        self.errors[name].update_state(loss)
        return {"score": loss}

    def predict_step(self, batch: Any) -> Any:
        (x,) = batch.values()
        return ops.sum(self.body(x))[None]


@long_to_compile
def test_evaluation_of_two_forms_changes_nothing_and_counts_all() -> None:
    keras.utils.set_random_seed(0)
    with treadle.Loop(Scored(), console=False) as loop:
        loop.fit(inputs("a"), epochs=1)
        before = loop.state.arrays()
        scores = loop.evaluate(inputs("aabab"))
        after = loop.state.arrays()
        alone = [loop.evaluate([batch]) for batch in inputs("aabab")]
    means = [x["score"] for x in alone]
    assert scores["score"] == pytest.approx(np.mean(means), rel=1e-5)
    assert scores["a"] == pytest.approx(np.mean([means[i] for i in (0, 1, 3)]), rel=1e-5)
    assert set(alone[0]) == {"score", "a"}  # of the metrics those that were updated
    assert scores["b"] == pytest.approx(np.mean([means[i] for i in (2, 4)]), rel=1e-5)
    for path, value in before.items():
        np.testing.assert_array_equal(after[path], value, err_msg=path)
    assert "heads/b/kernel" in after


@pytest.mark.long
def test_a_run_resumes_with_layers_that_evaluation_built(tmp_path: Path) -> None:
    def run(directory: Path, *more: Any) -> Any:
        keras.utils.set_random_seed(0)
        hooks = [Checkpoint(every="1 step"), *more]
        loop = treadle.Loop(Scored(), directory, hooks=hooks, console=False)
        loop.fit(inputs("aab"), inputs("ab", 3), epochs=2, validate_every="1 step")
        return loop

    expected = run(tmp_path / "whole")
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "killed", treadle.at("5 steps", killed))
    found = run(tmp_path / "killed")
    same(found.state.arrays(), expected.state.arrays())
    assert found.history["val_score"] == expected.history["val_score"]


def test_functions_are_built_for_each_form_of_their_inputs() -> None:
    keras.utils.set_random_seed(0)
    task = Scored()
    with treadle.Loop(task, console=False) as loop:
        for batch in inputs("aba"):
            ((name, x),) = batch.items()
            found = loop.call(
                lambda given: task.heads[next(iter(given))](task.body(*given.values())), batch
            )
            np.testing.assert_allclose(
                found, ops.convert_to_numpy(task.heads[name](task.body(x))), rtol=1e-5, atol=1e-6
            )
        assert loop.predict([*inputs("a"), *inputs("b", 3)]).shape == (2,)


@pytest.mark.long
def test_a_rollback_resets_variables_that_a_later_form_created(tmp_path: Path) -> None:
    bad = {"b": np.full((4, 2), np.nan, "float32")}
    given = [*inputs("aabab")]

    def run(directory: Path, batches: Any) -> treadle.Loop:
        keras.utils.set_random_seed(0)
        hooks = [Checkpoint(every="2 steps"), NonFinite("rollback")]
        return fitted(Lazy(), batches, *hooks, directory=directory)

    expected = run(tmp_path / "good", given)
    found = run(tmp_path / "bad", [*given[:3], bad, *given[3:]])
    same(found.state.arrays(), expected.state.arrays())


@pytest.mark.skipif(keras.config.backend() == "jax", reason="a dry run on JAX has no values")
@pytest.mark.parametrize("execution", ["eager", "auto"])
def test_a_step_that_runs_as_python_is_undone_in_all_its_branches(execution: Any) -> None:
    class Looks(treadle.Task):
        def __init__(self) -> None:
            self.a, self.b = keras.Variable(1.0), keras.Variable(2.0)
            self.optimizer = keras.optimizers.SGD(0.1)

        def train_step(self, batch: Any) -> Any:
            if float(ops.max(batch)) > 1:  # which the first batch does not
                self.b.assign(7.0)
            loss = treadle.minimize(lambda: self.a * ops.max(batch), [self.a], self.optimizer)
            return {"loss": loss}

    if execution == "auto" and keras.config.backend() == "tensorflow":
        pytest.skip("TensorFlow compiles it or raises an error")
    given = [np.full(2, x, "float32") for x in (1, np.inf, 1)]
    options = treadle.Options(execution=execution)
    loop = fitted(Looks(), given, NonFinite("skip"), options=options)
    assert loop.plan.startswith("eager")
    state = loop.state.arrays()
    assert loop.history.steps("undone").tolist() == [0, 1, 0]
    np.testing.assert_allclose([state["a"], state["b"]], [0.8, 2], rtol=1e-6)
