"""Half precision: true gradients, and steps that are undone whole where float16 overflows."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cases import (
    CASES,
    CLASSES,
    FEATURES,
    ROWS,
    Classifier,
    TwoModels,
    batches,
    batches_of,
    dense,
    head,
)
from keras import ops

import treadle
from treadle import data
from treadle.errors import ConfigurationError, DirectoryError, NonFiniteError, StateError, StepError
from treadle.hooks import NonFinite
from treadle.testing import compiled_equals_eager, fused_equals_unfused, run_steps
from treadle.testing.running import Runner
from treadle.testing.trace import same_bits

BACKEND = keras.config.backend()
EAGER = treadle.Options(execution="eager")
BATCHES = list(zip(*batches(7), strict=True))


@pytest.fixture(autouse=True)
def clean() -> Any:
    yield
    keras.config.set_dtype_policy("float32")


def half(make: Callable[[], Any]) -> Any:
    """A task whose layers compute in float16, from the same start each time."""
    keras.config.set_dtype_policy("mixed_float16")
    keras.utils.set_random_seed(0)
    return make()


def full(make: Callable[[], Any]) -> Any:
    keras.config.set_dtype_policy("float32")
    keras.utils.set_random_seed(0)
    return make()


def source(batch_size: int = ROWS) -> Any:
    x, y = batches(6)
    return data.from_arrays(
        x.reshape(-1, FEATURES), y.reshape(-1), batch_size=batch_size, shuffle=False
    )


class Gradients(treadle.Task):
    """Keeps the gradients of its loss, which float16 is too coarse for, where they can be seen."""

    size = 1e-8

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [keras.Input((FEATURES,)), keras.layers.Dense(5, activation="tanh"), head()]
        )
        self.found = [keras.Variable(ops.zeros(v.shape)) for v in self.model.trainable_variables]

    def loss(self, x: Any) -> Any:
        return ops.mean(ops.cast(self.model(x), "float32") ** 2) * self.size

    def differentiated(self, x: Any) -> Any:
        return treadle.gradients(lambda: self.loss(x), self.model.trainable_variables)

    def train_step(self, batch: Any) -> Any:
        loss, grads = self.differentiated(batch[0])
        for variable, gradient in zip(self.found, grads, strict=True):
            variable.assign(gradient)
        return {"loss": loss}


class SecondDerivatives(Gradients):
    """The loss after an inner gradient step (MAML): differentiated through the inner gradient."""

    size = 1e-6  # both derivatives are scaled by a root of the scale

    def differentiated(self, x: Any) -> Any:
        variables = self.model.trainable_variables

        def objective() -> Any:
            _, inner = treadle.gradients(lambda: self.loss(x), variables)
            rate = 0.5 / self.size
            adapted = [
                ops.convert_to_tensor(v) - rate * g for v, g in zip(variables, inner, strict=True)
            ]
            with treadle.substituted(variables, adapted):
                return self.loss(x)

        return treadle.gradients(objective, variables)


class Penalty(Gradients):
    """The size of the slope alone: its gradient is a second derivative and nothing else."""

    size = 1e-6

    def differentiated(self, x: Any) -> Any:
        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(self.loss, x)
            return ops.sum((slope / self.size) ** 2) * self.size

        return treadle.gradients(objective, self.model.trainable_variables, unreached="zeros")


class InBranches(Gradients):
    """Gradients in a mapped function in a branch."""

    def differentiated(self, x: Any) -> Any:
        def each(x: Any) -> Any:
            return Gradients.differentiated(self, x[None])

        def rows() -> Any:
            losses, grads = treadle.for_each(each, x)
            return ops.mean(losses), [ops.mean(g, axis=0) for g in grads]

        def nothing() -> Any:
            return ops.zeros(()), [ops.zeros(v.shape) for v in self.found]

        return treadle.cond(treadle.step() < 5, rows, nothing)


EXECUTIONS = pytest.mark.parametrize(
    "options",
    [
        pytest.param(None, id="compiled"),
        pytest.param(EAGER, id="eager", marks=pytest.mark.long_to_compile),
    ],
)
DIFFERENTIATED = pytest.mark.parametrize(
    "kind",
    [Gradients, SecondDerivatives, Penalty, InBranches],
    ids=["plain", "inner-step", "penalty", "in-branches"],
)


def error(found: Any, right: Any) -> float:
    """How far gradients are off, relative to the largest number."""
    return max(
        float(np.abs(np.asarray(a) - b).max() / np.abs(b).max())
        for a, b in zip(found, right, strict=True)
        if np.abs(b).max() > 0
    )


def found_by(trace: Any) -> list[Any]:
    found = [x for path, x in trace.state.items() if path.startswith("found/")]
    assert found
    return found


@DIFFERENTIATED
@EXECUTIONS
def test_gradients_are_true_where_float16_has_none(kind: Any, options: Any) -> None:
    narrow, wide = (run_steps(make(kind), BATCHES[:1], options) for make in (half, full))
    assert narrow.values["undone"].tolist() == [0.0]
    assert error(found_by(narrow), found_by(wide)) < 0.03


@DIFFERENTIATED
def test_without_a_scale_they_would_be_wrong(kind: Any) -> None:
    """Outside of a step nothing is scaled."""
    narrow, wide = (make(kind).differentiated(tensor(BATCHES[0][0]))[1] for make in (half, full))
    assert error(arrays_of(narrow), arrays_of(wide)) > 0.3


def arrays_of(tensors: Any) -> list[Any]:
    return [ops.convert_to_numpy(x) for x in tensors]


def tensor(array: Any) -> Any:
    return ops.convert_to_tensor(array)


def test_several_losses_and_inputs_in_float16() -> None:
    class Several(Gradients):
        def differentiated(self, x: Any) -> Any:
            variables = self.model.trainable_variables
            losses, grads = treadle.gradients(
                lambda: {"a": self.loss(x), "b": 2 * self.loss(x)},
                {"a": variables[:2], "b": variables[2:]},
            )
            return losses["a"], [*grads["a"], *grads["b"]]

    class Inputs(Gradients):
        def __init__(self) -> None:
            super().__init__()
            self.found = [keras.Variable(ops.zeros((ROWS, FEATURES)))]
            self.dtype = keras.config.dtype_policy().compute_dtype

        def differentiated(self, x: Any) -> Any:
            loss, grads = treadle.input_gradients(self.loss, ops.cast(x, self.dtype))
            assert keras.backend.standardize_dtype(grads[0].dtype) == "float32"
            return loss, grads

    for kind in (Several, Inputs):
        narrow, wide = (run_steps(make(kind), BATCHES[:1]) for make in (half, full))
        assert error(found_by(narrow), found_by(wide)) < 0.03


def test_a_method_that_is_called_gets_true_gradients_and_leaves_the_scale_alone() -> None:
    class Called(Gradients):
        def __init__(self) -> None:
            super().__init__()
            self.size = 1e-8

        def slopes(self, x: Any) -> Any:
            return self.differentiated(x)[1]

    task = half(Called)
    with treadle.Loop(task, console=False) as loop:
        found = loop.call(task.slopes, BATCHES[0][0])
        before = loop.state.arrays()
        task.size = 1e30  # overflows
        assert not np.isfinite(loop.call(task.slopes, BATCHES[0][0])[0]).all()
        assert all(same_bits(before[path], x) for path, x in loop.state.arrays().items())
    right = full(Called).differentiated(tensor(BATCHES[0][0]))[1]
    assert error(found, arrays_of(right)) < 0.03


# What is undone

WHOLE = """
    adam multi-optimizer ema accumulation batchnorm dropout-seeded dropout-unseeded keras-random
    regularizer cond substituted for-each two-models one-forward-pass convolution lstm attention
    metrics-only supervised
""".split()  # noqa: SIM905 - a list of strings would take a page


# By default those that differ most in what must be undone.
OFTEN = (
    "adam",
    "multi-optimizer",
    "accumulation",
    "batchnorm",
    "dropout-seeded",
    "cond",
    "for-each",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in OFTEN else pytest.mark.long) for n in WHOLE]
)
def test_an_overflowing_step_is_undone_whole(name: str) -> None:
    runner = Runner(half(CASES[name].make), batches_of(name, 1)[0], treadle.Options(checked=True))
    start = runner.state.arrays()
    runner.state.assign({**start, "loss_scale/scale": np.float32(2.0**100)})
    trace = runner.run(batches_of(name, 1))
    assert trace.values["undone"].tolist() == [1.0]
    assert trace.values["loss_scale"].tolist() == [2.0**100]
    assert trace.state["loss_scale/scale"] == 2.0**99
    assert trace.state["loss_scale/finite_steps"] == 0
    seeds = {runner.state.path_of(v) for v in runner.state.seeds}
    assert trace.changed <= seeds | {"loss_scale/scale"}
    if name in ("dropout-seeded", "keras-random"):
        assert trace.changed & seeds  # random numbers are not drawn twice
    # The same step with a scale that fits learns.
    runner.state.assign({**start, "loss_scale/scale": np.float32(2.0**8)})
    learned = runner.run(batches_of(name, 1))
    assert learned.values["undone"].tolist() == [0.0]
    assert learned.changed - seeds - {"loss_scale/finite_steps"}


class Poisoned(TwoModels):
    """Two gradients in a step; a batch says the roots of what their losses are multiplied by.

    1e15 overflows in float16 alone, 1e30 anywhere.
    """

    def __init__(self, **scale: Any) -> None:
        super().__init__()
        self.loss_scale = treadle.LossScale(**scale)
        self.mean = keras.metrics.Mean()

    def train_step(self, batch: Any) -> Any:
        x, factors = batch
        fake = self.generator(x, training=True)
        critic_loss = treadle.minimize(
            lambda: (
                factors[0] ** 2 * ops.mean(ops.cast(self.critic(fake) - self.critic(x), "float32"))
            ),
            self.critic,
            self.optimizers["critic"],
        )
        generator_loss = treadle.minimize(
            lambda: (
                factors[1] ** 2 * -ops.mean(ops.cast(self.critic(self.generator(x)), "float32"))
            ),
            self.generator,
            self.optimizers["generator"],
        )
        self.mean.update_state(critic_loss)
        return {"critic_loss": critic_loss, "generator_loss": treadle.weighted(generator_loss, 3)}


def poisoned_batches(*factors: tuple[float, float]) -> list[Any]:
    return [
        (x, np.array(f, "float32")) for x, f in zip(batches(len(factors))[0], factors, strict=True)
    ]


@EXECUTIONS
def test_one_overflow_of_several_gradients_undoes_them_all(options: Any) -> None:
    good, first, second, infinite = (1.0, 1.0), (1e15, 1.0), (1.0, 1e15), (1e30, 1.0)
    sequence = poisoned_batches(good, first, second, infinite, good)
    runner = Runner(half(Poisoned), sequence[0], options)
    start = runner.state.arrays()
    trace = runner.run(sequence)
    runner.state.assign(start)
    without = runner.run([sequence[0], sequence[4]])
    assert trace.values["undone"].tolist() == [0, 1, 1, 1, 0]
    assert trace.state["loss_scale/scale"] == 2.0**12
    for path, value in without.state.items():
        if not path.startswith("loss_scale/"):
            np.testing.assert_allclose(trace.state[path], value, rtol=1e-3, err_msg=path)


def test_windows_agree_bit_for_bit_and_compiled_equals_eager() -> None:
    good, bad = (1.0, 1.0), (1.0, 1e15)
    sequence = poisoned_batches(good, bad, good, good, bad, good, good)

    def make() -> Any:
        return half(lambda: Poisoned(initial=2.0**10, growth_steps=2))

    fused_equals_unfused(make, sequence)
    # `critic_loss` is a difference of outputs of up to 1.4 that nearly cancel, so the rounding of
    # the outputs, not the size of the loss, is what compiled and eager may differ by. Processors
    # with float16 arithmetic (AVX512-FP16) fuse more and round elsewhere: there the second step
    # gave 0.0029 compiled and 0.0043 eagerly, where float32 says 0.0052.
    compiled_equals_eager(make, sequence, rtol=1e-2, atol=4 * float(np.finfo("float16").eps))
    trace = run_steps(make(), sequence, windows=(3, 4))
    assert trace.values["undone"].tolist() == [0, 1, 0, 0, 1, 0, 0]
    scales = [2.0**e for e in (10, 10, 9, 9, 10, 9, 9)]
    assert trace.values["loss_scale"].tolist() == scales
    assert trace.state["loss_scale/scale"] == 2.0**10
    kept = 1 - trace.values["undone"]
    assert trace.weights["critic_loss"].tolist() == (ROWS * kept).tolist()
    assert trace.weights["generator_loss"].tolist() == (3 * kept).tolist()
    assert trace.weights["undone"].tolist() == [ROWS] * 7


# In a loop


def loop_of(task: Any, **kwargs: Any) -> treadle.Loop:
    return treadle.Loop(task, console=False, **kwargs)


@pytest.mark.long_to_compile
def test_an_undone_step_counts_in_no_mean_and_ends_no_run() -> None:
    good, infinite = (1.0, 1.0), (1e30, 1.0)
    with loop_of(half(Poisoned)) as loop:
        history = loop.fit(poisoned_batches(good, infinite, good, good), epochs=1)
    losses, undone = history.steps("critic_loss"), history.steps("undone")
    assert undone.tolist() == [0, 1, 0, 0]
    assert not np.isfinite(losses[1])
    assert history["critic_loss"] == [pytest.approx(losses[[0, 2, 3]].mean(), rel=1e-6)]
    assert history["mean"] == [pytest.approx(losses[[0, 2, 3]].mean(), rel=1e-3)]
    assert history["undone"] == [0.25]
    assert loop.progress.step == 4
    assert int(loop.state.arrays()["optimizers/critic/iterations"]) == 3


@pytest.mark.long_to_compile
def test_a_batch_that_holds_nan_still_ends_the_run() -> None:
    batch = poisoned_batches((1.0, np.nan))[0]
    with (
        pytest.raises(
            NonFiniteError, match=r"generator_loss is nan at step 1.*the second array, row 1"
        ),
        loop_of(half(Poisoned)) as loop,
    ):
        loop.step(batch)


class Root(Classifier):
    """A finite loss with a gradient that is no number, whatever the scale."""

    def __init__(self, **scale: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.zero = keras.Variable(0.0)
        self.loss_scale = treadle.LossScale(**scale)

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return self.loss(batch[1], self.model(batch[0])) + ops.sqrt(self.zero)

        variables = [*self.model.trainable_variables, self.zero]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


@pytest.mark.long_to_compile
def test_a_scale_that_falls_for_ever_ends_the_run() -> None:
    why = (
        r"gradients are not finite at step 4, .*not even with a loss scale of 2\*\*-14.*division by"
    )
    with (
        pytest.raises(NonFiniteError, match=why),
        loop_of(half(lambda: Root(initial=2.0**-11))) as loop,
    ):
        loop.fit(source(), epochs=1)
    stopping = loop_of(half(lambda: Root(initial=2.0**-11)), hooks=[NonFinite("stop")])
    with stopping as loop:
        loop.fit(source(), epochs=3, steps=12)
    assert "not even with a loss scale" in str(loop.reason)


@pytest.mark.long_to_compile
def test_validation_knows_nothing_of_the_scale() -> None:
    def make() -> Any:
        return Classifier([dense(), keras.layers.BatchNormalization(), head()])

    with loop_of(half(make)) as loop:
        history = loop.fit(source(), validation=source(), epochs=2)
    assert {name for name in history.names() if "scale" in name or "undone" in name} == {
        "loss_scale",
        "undone",
    }
    assert float(loop.task.loss_scale.scale.numpy()) == 2.0**15
    assert int(loop.task.loss_scale.finite_steps) == 12
    assert history.steps("loss").dtype == np.float32


@pytest.mark.long_to_compile
def test_gradients_in_an_evaluation_leave_the_scale_alone() -> None:
    class Attacked(Classifier):
        def eval_step(self, batch: Any) -> Any:
            x, y = batch
            loss, _ = treadle.input_gradients(lambda x: 1e30 * self.loss(y, self.model(x)), x)
            return {"loss": loss}

    with loop_of(half(lambda: Attacked([dense(), head()]))) as loop:
        loop.fit(source(), steps=2)
        before = loop.state.arrays()
        loop.evaluate(source())
        assert all(same_bits(before[path], x) for path, x in loop.state.arrays().items())
    assert before["loss_scale/finite_steps"] == 2


@pytest.mark.parametrize(
    "policy",
    ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.long_to_compile)],
)
def test_narrow_layers_learn_as_well(policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, FEATURES)).astype("float32")
    y = (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(axis=1).astype("int32")
    train = data.from_arrays(x, y, batch_size=32)
    task = Classifier(
        [dense(16), keras.layers.BatchNormalization(), head()], keras.optimizers.Adam(0.02)
    )
    assert task.model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    with loop_of(task) as loop:
        history = loop.fit(train, epochs=15)
    assert history["accuracy"][-1] > 0.85
    assert all(str(x.dtype) == "float32" for p, x in loop.state.arrays().items() if "kernel" in p)


def test_extra_losses_of_narrow_layers_are_added() -> None:
    class Activity(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.sum(ops.abs(inputs)))
            return inputs

    def make() -> Any:
        model = keras.Sequential([dense(), Activity(), head()])
        return treadle.Supervised(model, "sparse_categorical_crossentropy", "sgd")

    narrow, wide = (run_steps(make_(make), BATCHES[:1]) for make_ in (half, full))
    np.testing.assert_allclose(narrow.values["loss"], wide.values["loss"], rtol=1e-2)


def test_some_layers_in_float16_are_enough() -> None:
    keras.utils.set_random_seed(0)
    task = Classifier([dense(), dense(dtype="mixed_float16"), head()])
    trace = run_steps(task, BATCHES, windows=(7,))
    assert trace.values["loss_scale"].tolist() == [2.0**15] * 7
    assert (
        "loss_scale" not in run_steps(full(lambda: Classifier([dense(), head()])), BATCHES).values
    )


@pytest.mark.long_to_compile
def test_the_precision_is_part_of_what_a_run_is(tmp_path: Any) -> None:
    def make() -> Any:
        return Classifier([dense(), head()])

    with loop_of(half(make), directory=tmp_path) as loop:
        loop.fit(source(), epochs=1)
    with pytest.raises(DirectoryError, match="precision was 'mixed_float16', now 'float32'"):
        loop_of(full(make), directory=tmp_path)
    with loop_of(half(make), directory=tmp_path / "own", configuration={"a": 1}) as loop:
        loop.fit(source(), epochs=1)
    with pytest.raises(DirectoryError, match="configuration: precision was 'mixed_float16', now"):
        loop_of(full(make), directory=tmp_path / "own", configuration={"a": 1})


# Errors


def test_weights_in_float16_are_refused() -> None:
    task = Classifier([dense(dtype="float16"), keras.layers.Dense(CLASSES, dtype="float32")])
    with pytest.raises(
        ConfigurationError, match=r"keeps its weights in float16.*use mixed_float16"
    ):
        loop_of(task).fit(source(), steps=1)
    frozen = Classifier([dense(dtype="float16"), keras.layers.Dense(CLASSES, dtype="float32")])
    frozen.model.layers[0].trainable = False
    with loop_of(frozen) as loop:
        loop.fit(source(), steps=1)


@pytest.mark.skipif(BACKEND == "jax", reason="JAX has no native steps")
def test_a_native_step_in_float16_is_refused() -> None:
    class Native(Classifier):
        def train_step(self, batch: Any) -> Any:
            x, y = batch
            if BACKEND == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.loss(y, self.model(x))
                grads = tape.gradient(loss, self.model.trainable_weights)
            else:
                loss = self.loss(y, self.model(x))
                loss.backward()
                grads = [v.value.grad for v in self.model.trainable_weights]
            self.optimizer.apply(grads, self.model.trainable_weights)
            return {"loss": loss}

    why = r"computes in float16.*train_step differentiates without Treadle.*use treadle.gradients"
    with pytest.raises(ConfigurationError, match=why):
        loop_of(half(lambda: Native([dense(), head()]))).fit(source(), steps=1)


def test_names_that_loss_scaling_needs() -> None:
    task = half(lambda: Classifier([dense(), head()]))
    task.loss_scale = 1024.0
    with pytest.raises(
        StateError, match=r"'loss_scale' must be a treadle.LossScale.*1024.0.*rename"
    ):
        loop_of(task).fit(source(), steps=1)

    class Own(Classifier):
        def train_step(self, batch: Any) -> Any:
            return {"undone": super().train_step(batch)["loss"]}

    with pytest.raises(StepError, match="train_step returned 'undone', but loss scaling logs"):
        loop_of(half(lambda: Own([dense(), head()]))).fit(source(), steps=1)

    class Measured(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])
            self.undone = self.accuracy
            del self.accuracy

        def train_step(self, batch: Any) -> Any:
            x, y = batch
            self.undone.update_state(y, self.model(x))
            treadle.minimize(lambda: self.loss(y, self.model(x)), self.model, self.optimizer)

    with pytest.raises(StepError, match="returns 'undone', and a metric of the task has this name"):
        loop_of(half(Measured)).fit(source(), steps=1)


@pytest.mark.parametrize(
    "wrong", [{"initial": 0.0}, {"initial": float("nan")}, {"growth_steps": 0}]
)
def test_a_scale_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="LossScale needs a positive scale and at least 1"):
        treadle.LossScale(**wrong)
