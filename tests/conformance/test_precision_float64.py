"""`precision="float64"` computes everything in float64: NumPy is the reference, to 1e-12."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile, once
from half_precision import EAGER
from keras import ops
from keras.optimizers import schedules

import treadle
from tests.dying import Dying
from treadle import data
from treadle.core import float64
from treadle.errors import ConfigurationError, TreadleWarning
from treadle.hooks import Checkpoint
from treadle.testing.trace import same_bits

BACKEND = keras.config.backend()
ROWS, BATCHES, STEPS, TOLERANCE = 8, 5, 20, 1e-12
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS * BATCHES, 3))
Y = X.sum(axis=1, keepdims=True) + 0.1 * RNG.normal(size=(ROWS * BATCHES, 1))
EXECUTIONS = pytest.mark.parametrize(
    "options",
    [pytest.param(None, id="compiled"), pytest.param(EAGER, id="eager", marks=long_to_compile)],
)


@pytest.fixture(autouse=True)
def wide() -> Any:
    keras.backend.clear_session()
    treadle.setup(seed=1, precision="float64")
    yield
    keras.backend.clear_session()
    treadle.setup(precision="float32")


def arrays(dtype: str = "float64") -> Any:
    batch = {"x": X.astype(dtype), "y": Y.astype(dtype)}
    return data.from_arrays(batch, batch_size=ROWS, shuffle=False)


def far(found: Any, expected: Any) -> float:
    """The largest relative difference."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.dtype == np.float64, found.dtype
    return float(np.max(np.abs(found - expected) / np.abs(expected)))


def weights(model: Any) -> list[Any]:
    return [ops.convert_to_numpy(v) for v in model.trainable_variables]


class Net(treadle.Task):
    """Uses a loss, a metric, clipping, accumulation and an average, all by Keras or Treadle."""

    def __init__(self, optimizer: Any, whole: bool = False) -> None:
        self.model = self.net()
        self.slow, self.optimizer = self.net(), optimizer
        self.loss = keras.losses.MeanSquaredError()
        self.error = keras.metrics.MeanAbsoluteError()
        self.accumulator = treadle.Accumulator(2) if whole else None

    @staticmethod
    def net() -> Any:
        layers = [keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((3,)), *layers])

    def train_step(self, batch: Any) -> Any:
        x, y = batch["x"], batch["y"]

        def objective() -> Any:
            prediction = self.model(x)
            self.error.update_state(y, prediction)
            return self.loss(y, prediction)

        loss, grads = treadle.gradients(objective, self.model)
        hits = treadle.weighted(ops.mean(y[:, 0] > 0.1), 0.3)
        if self.accumulator is None:
            self.optimizer.apply(grads, self.model.trainable_variables)
            return {"loss": loss, "hits": hits}
        grads, norm = treadle.clip_by_global_norm(grads, 0.7)
        variables = self.model.trainable_variables
        self.accumulator.add(
            grads, lambda mean: self.optimizer.apply(mean, variables), weight=batch["x"][0, 0] ** 2
        )
        treadle.blend(self.slow, self.model, 0.3)
        return {"loss": loss, "hits": hits, "norm": norm}

    def eval_step(self, batch: Any) -> Any:
        return {"loss": self.loss(batch["y"], self.model(batch["x"]))}

    def predict_step(self, batch: Any) -> Any:
        return self.model(batch["x"])


class Reference:
    """The same by hand."""

    def __init__(self, model: Any) -> None:
        self.w = weights(model)
        self.first, self.second = ([np.zeros_like(w) for w in self.w] for _ in range(2))

    def predict(self, x: Any) -> Any:
        a, b, c, d = self.w
        return np.tanh(x @ a + b) @ c + d

    def gradients(self, x: Any, y: Any) -> tuple[float, float, list[Any]]:
        a, b, c, d = self.w
        hidden = np.tanh(x @ a + b)
        error = hidden @ c + d - y
        g = 2 * error / error.size
        inner = (g @ c.T) * (1 - hidden**2)
        grads = [x.T @ inner, inner.sum(axis=0), hidden.T @ g, g.sum(axis=0)]
        return np.mean(error**2), np.mean(abs(error)), grads

    def sgd(self, grads: Any, rate: float, step: int) -> None:
        for i, g in enumerate(grads):
            self.first[i] = 0.9 * self.first[i] - rate * g
            self.w[i] = self.w[i] + self.first[i]

    def adam(self, grads: Any, rate: float, step: int) -> None:
        rate *= np.sqrt(1 - 0.999 ** (step + 1)) / (1 - 0.9 ** (step + 1))
        for i, g in enumerate(grads):
            self.first[i] += (g - self.first[i]) * (1 - 0.9)
            self.second[i] += (g**2 - self.second[i]) * (1 - 0.999)
            self.w[i] = self.w[i] - self.first[i] * rate / (np.sqrt(self.second[i]) + 1e-7)


def cosine(step: int) -> float:
    if step < 5:
        return 0.05 + (0.07 - 0.05) * step / 5
    half = 0.5 * (1 + np.cos(np.pi * min((step - 5) / 30, 1)))
    return 0.07 * ((1 - 0.1) * half + 0.1)


def cycle(step: int) -> float:
    low, half = 0.07 / 10, 0.9 * 25 / 2
    if step <= 2 * half:
        return low + (0.07 - low) * (1 - abs(step / half - 1))
    return low / 1000 + (low - low / 1000) * (25 - step) / (25 - 2 * half)


RATES: dict[str, tuple[Callable[[], Any], Callable[[int], float]]] = {
    "exponential": (
        lambda: schedules.ExponentialDecay(0.05, 7, 0.9),
        lambda step: 0.05 * 0.9 ** (step / 7),
    ),
    "cosine": (
        lambda: schedules.CosineDecay(0.05, 30, 0.1, warmup_target=0.07, warmup_steps=5),
        cosine,
    ),
    "own": (
        lambda: treadle.schedules.WarmUp(treadle.schedules.OneCycle(0.07, 25), 3, start=0.01),
        lambda step: 0.01 + (cycle(0) - 0.01) * step / 3 if step < 3 else cycle(step - 3),
    ),
}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda rate: keras.optimizers.SGD(rate, momentum=0.9),
    "adam": keras.optimizers.Adam,
}
TRIED = [("sgd", "exponential"), ("adam", "cosine")]


@pytest.mark.parametrize(
    ("optimizer", "rate", "options"),
    [
        *((*tried, None) for tried in TRIED),
        *(pytest.param(*tried, EAGER, marks=once) for tried in TRIED),
        pytest.param("adam", "own", None, marks=pytest.mark.long),
    ],
)
def test_training_is_that_of_numpy(optimizer: str, rate: str, options: Any, tmp_path: Path) -> None:
    make, value = RATES[rate]
    task = Net(OPTIMIZERS[optimizer](make()))
    reference, losses, errors = Reference(task.model), [], []
    for step in range(STEPS):
        rows = slice(ROWS * (step % BATCHES), ROWS * (step % BATCHES + 1))
        loss, error, grads = reference.gradients(X[rows], Y[rows])
        getattr(reference, optimizer)(grads, value(step), step)
        losses.append(loss)
        errors.append(error)
    with treadle.Loop(task, directory=tmp_path, console=False, options=options) as loop:
        history = loop.fit(arrays(), epochs=STEPS // BATCHES)
        tested = loop.evaluate(arrays())
        predicted = loop.predict(arrays())
        called = loop.call(lambda batch: task.model(batch["x"]), {"x": X})
    hits = [np.mean(Y[ROWS * i : ROWS * (i + 1)] > 0.1) for i in range(BATCHES)]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    whole, mse = reference.predict(X), np.mean((reference.predict(X) - Y) ** 2)
    differences = {
        "losses": far(history.steps("loss"), losses),
        "log": far([line["loss"] for line in lines if "kind" not in line], losses),
        "epochs": far(history["loss"], np.mean(np.reshape(losses, (-1, BATCHES)), axis=1)),
        "metric": far(history["error"], np.mean(np.reshape(errors, (-1, BATCHES)), axis=1)),
        "hits": far(history.steps("hits")[:BATCHES], hits),
        "evaluate": far(tested["loss"], mse),
        "predict": far(predicted, whole),
        "call": far(called, whole),
        **{
            f"weight {i}": far(*w)
            for i, w in enumerate(zip(weights(task.model), reference.w, strict=True))
        },
    }
    assert not {name: x for name, x in differences.items() if not x < TOLERANCE}
    assert not [p for p, x in task_arrays(task).items() if str(x.dtype) == "float32"]


def task_arrays(task: Any) -> Any:
    with treadle.Loop(task, console=False) as loop:
        return loop.state.arrays()


@EXECUTIONS
def test_clipping_accumulation_and_averages_are_those_of_numpy(options: Any) -> None:
    task = Net(keras.optimizers.Adam(0.02), whole=True)
    reference, slow = Reference(task.model), weights(task.slow)
    sums: list[Any] = [np.zeros_like(w) for w in slow]
    total, norms = 0.0, []
    for step in range(10):
        rows = slice(ROWS * (step % BATCHES), ROWS * (step % BATCHES + 1))
        _, _, grads = reference.gradients(X[rows], Y[rows])
        norms.append(np.sqrt(sum((g**2).sum() for g in grads)))
        share = X[rows][0, 0] ** 2
        sums = [s + share * g * min(1, 0.7 / norms[-1]) for s, g in zip(sums, grads, strict=True)]
        total += share
        if step % 2:
            reference.adam([s / total for s in sums], 0.02, step // 2)
            sums, total = [np.zeros_like(w) for w in slow], 0.0
        slow = [s + 0.3 * (w - s) for s, w in zip(slow, reference.w, strict=True)]
    with treadle.Loop(task, console=False, options=options) as loop:
        history = loop.fit(arrays(), epochs=2)
    assert far(history.steps("norm"), norms) < TOLERANCE
    for found, expected in zip(weights(task.model), reference.w, strict=True):
        assert far(found, expected) < TOLERANCE
    for found, expected in zip(weights(task.slow), slow, strict=True):
        assert far(found, expected) < TOLERANCE


@long_to_compile
@EXECUTIONS
def test_a_resumed_run_has_the_same_bits(options: Any, tmp_path: Path) -> None:
    def run(directory: Path, stop: int | None = None) -> Any:
        keras.backend.clear_session()
        treadle.setup(seed=1)
        task = Net(keras.optimizers.Adam(RATES["cosine"][0]()), whole=True)
        hooks = [Checkpoint(every="3 steps"), Dying(stop)]
        with treadle.Loop(
            task, directory=directory, hooks=hooks, console=False, options=options
        ) as loop:
            history = loop.fit(arrays(), epochs=3)
            return history.steps("loss"), loop.state.arrays()

    losses, state = run(tmp_path / "whole")
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "parts", stop=8)
    again, found = run(tmp_path / "parts")
    assert same_bits(losses, again)
    assert not [path for path, x in state.items() if not same_bits(x, found[path])]


class Penalized(Net):
    """Multiplies an output by an input gradient."""

    def train_step(self, batch: Any) -> Any:
        x = batch["x"]

        def objective() -> Any:
            _, (g,) = treadle.input_gradients(lambda x: ops.sum(self.model(x) ** 2), x)
            return ops.mean(self.model(x) * g) + self.loss(batch["y"], self.model(x))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


@EXECUTIONS
def test_input_gradients_have_the_dtype_of_the_model(options: Any) -> None:
    for dtype in ("float64", "float32"):  # arrays of float32 are widened
        task = Penalized(keras.optimizers.SGD(0.01))
        a, b, c, d = weights(task.model)
        x, y = X[:ROWS].astype(dtype).astype("float64"), Y[:ROWS].astype(dtype).astype("float64")
        hidden = np.tanh(x @ a + b)
        out = hidden @ c + d
        slope = 2 * out * (((1 - hidden**2) * c.T) @ a.T)
        with treadle.Loop(task, console=False, options=options) as loop:
            history = loop.fit(arrays(dtype), epochs=1)
        expected = np.mean(out * slope) + np.mean((out - y) ** 2)
        assert far(history.steps("loss")[:1], [expected]) < TOLERANCE


@pytest.mark.skipif(BACKEND != "tensorflow", reason="JAX and PyTorch promote")
@EXECUTIONS
def test_two_dtypes_are_explained(options: Any) -> None:
    class Mixed(Net):
        def train_step(self, batch: Any) -> Any:
            return ops.mean(self.model(batch["x"]) * ops.cast(batch["y"], "float32"))

    batch = {"x": X[:ROWS], "y": Y[:ROWS], "other": X[: ROWS - 1]}
    with (
        pytest.raises(Exception, match="float") as caught,
        treadle.Loop(Mixed(keras.optimizers.SGD(0.1)), console=False, options=options) as loop,
    ):
        loop.fit([batch], epochs=1)
    notes = " ".join(caught.value.__notes__)
    assert "computes nothing from tensors of two dtypes: cast one of them" in notes
    assert "rows" not in notes


OPERATIONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a Python float": (lambda x: ops.convert_to_tensor(0.1), lambda x: 0.1),
    "a list": (lambda x: ops.convert_to_tensor([0.1, 1]), lambda x: [0.1, 1]),
    "cast": (lambda x: ops.cast(0.1, "float64"), lambda x: 0.1),
    "array": (lambda x: ops.array(0.1), lambda x: 0.1),
    "where": (lambda x: ops.where(x > 0, x, 0.1), lambda x: np.where(x > 0, x, 0.1)),
    "matmul": (lambda x: ops.matmul(x, ops.transpose(x)), lambda x: x @ x.T),
    "maximum": (lambda x: ops.maximum(x, 0.1), lambda x: np.maximum(x, 0.1)),
    "tanh": (ops.tanh, np.tanh),
    "var": (ops.var, np.var),
    "quantile": (lambda x: ops.quantile(x, 0.3), lambda x: np.quantile(x, 0.3)),
    "norm": (ops.norm, np.linalg.norm),
    "hits": (lambda x: ops.mean(x > 0), lambda x: np.mean(x > 0)),
    "integers": (lambda x: ops.mean(ops.cast(x * 9, "int32")), lambda x: np.mean(np.trunc(x * 9))),
    "power": (lambda x: ops.power(0.1, x), lambda x: 0.1**x),
    "cumsum": (ops.cumsum, np.cumsum),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_functions_of_keras_keep_float64(name: str) -> None:
    function, expected = OPERATIONS[name]
    x = X[:5]
    found = ops.convert_to_numpy(function(ops.convert_to_tensor(x)))
    assert far(found, expected(x)) < 1e-14


def test_random_numbers_are_of_float64() -> None:
    for draw in (keras.random.normal, keras.random.uniform, keras.random.truncated_normal):
        drawn = ops.convert_to_numpy(draw((50,), seed=1))
        assert drawn.dtype == np.float64
        assert not np.array_equal(drawn, drawn.astype("float32"))


@EXECUTIONS
def test_parts_with_another_dtype_are_named(options: Any) -> None:
    keras.backend.clear_session()
    treadle.setup(precision="float32")
    model, loss = Net.net(), keras.losses.MeanSquaredError()
    keras.backend.clear_session()
    treadle.setup(precision="float64")
    task = Net(keras.optimizers.SGD(0.1))
    task.model, task.loss = model, loss
    with pytest.warns(TreadleWarning) as caught:
        treadle.Loop(task, console=False, options=options)
    assert [str(w.message) for w in caught] == [
        "precision='float64', but model/layers/0/kernel, model/layers/0/bias, "
        "model/layers/1/kernel and 2 more are not float64: create them after treadle.setup, "
        "without a dtype, or with dtype='float64'"
    ]
    lazy = Net(keras.optimizers.SGD(0.1))
    lazy.model = keras.Sequential([keras.layers.Dense(1, dtype="float32")])
    with pytest.warns(TreadleWarning, match="but model/layers/0 are not float64"):
        treadle.Loop(lazy, console=False)


def test_setup_is_needed_and_comes_first() -> None:
    keras.layers.Dense(1)
    with pytest.raises(ConfigurationError, match=r"setup\(precision=…\) must come before .*'dense"):
        treadle.setup(precision="float64")
    keras.backend.clear_session()
    treadle.setup(precision="float32")
    keras.config.set_dtype_policy("float64")
    with pytest.raises(ConfigurationError, match=r"call treadle.setup\(precision='float64'\)"):
        treadle.Loop(Bare(), console=False)


class Bare(treadle.Task):
    def train_step(self, batch: Any) -> Any:
        return ops.mean(batch["x"])


@long_to_compile
def test_another_precision_sets_everything_back() -> None:
    def trained(kind: str) -> Any:
        keras.backend.clear_session()
        treadle.setup(seed=1, precision=kind)
        task = Net(keras.optimizers.SGD(0.1))
        with treadle.Loop(task, console=False) as loop:
            history = loop.fit(source, epochs=1)
            return history.steps("loss"), loop.predict(source), loop.state.arrays()

    source = arrays()  # the same object: it is placed on the device again
    for kind in ("float64", "float32", "float64", "mixed_bfloat16"):
        losses, predicted, state = trained(kind)
        wide = "float64" if kind == "float64" else "float32"
        assert keras.config.floatx() == losses.dtype == wide
        assert str(predicted.dtype) == kind.removeprefix("mixed_")
        assert {str(x.dtype) for p, x in state.items() if p.startswith("model")} == {wide}
        assert float64.is_on() == (kind == "float64")
        x = ops.convert_to_tensor(X.astype("float32"))
        assert keras.backend.standardize_dtype(ops.multiply(x, 0.1).dtype) == "float32"
    assert keras.backend.standardize_dtype(ops.mean(x > 0).dtype) == "float32"
    if BACKEND == "jax":
        import jax

        assert not jax.config.read("jax_enable_x64")
    if BACKEND == "tensorflow":
        assert keras.backend.standardize_dtype(ops.convert_to_tensor(0.1).dtype) == "float32"


@EXECUTIONS
def test_losses_beyond_the_range_of_float32_are_finite(options: Any) -> None:
    class Huge(Net):
        def train_step(self, batch: Any) -> Any:
            return {"loss": 1e200 * self.loss(batch["y"], self.model(batch["x"]))}

    hooks = [treadle.hooks.NonFinite("skip")]
    with treadle.Loop(
        Huge(keras.optimizers.SGD(0.1)), hooks=hooks, console=False, options=options
    ) as loop:
        history = loop.fit(arrays(), epochs=1)
    assert not history.steps("undone").any()
    assert (history.steps("loss") > 1e190).all()
