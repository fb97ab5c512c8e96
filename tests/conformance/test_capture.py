"""PyTorch: what is captured does what Python would, in every bit, over many steps."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, ROWS, Classifier, batches, dense, head
from executions import some
from keras import ops
from own_step import CAPTURED, Steps, learn

import treadle
from treadle.backends.background import Running
from treadle.backends.step_context import context
from treadle.errors import StepError
from treadle.testing import Trace, run_steps
from treadle.testing.running import Runner
from treadle.testing.trace import Tolerance, compare

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's way to compile a step", allow_module_level=True)

import torch

from treadle.backends.torch.capture import proof
from treadle.backends.torch.capture.passes import simplified

STEPS = 24
X, Y = batches(STEPS)
BATCHES = list(zip(X, Y, strict=True))

Make = Callable[[], Any]


def traces(make: Make, windows: tuple[int, ...] = (5, 1)) -> tuple[Trace, Trace]:
    """What a task does captured, and run as it is, from the same start."""
    found: list[Trace] = []
    for execution in ("auto", "eager"):
        keras.utils.set_random_seed(3)
        found.append(run_steps(make(), BATCHES, treadle.Options(execution=execution), windows))
    return found[0], found[1]


def assert_captured(make: Make) -> Trace:
    """Check that a task's step is captured, and does in every bit what Python does."""
    captured, eager = traces(make)
    assert captured.plan == CAPTURED
    compare(captured, eager, "captured", "run eagerly", tolerance=None)
    assert captured.changed
    return captured


# Optimizers

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "nesterov": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda: keras.optimizers.Adam(1e-2, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.01),
    "rmsprop-centered": lambda: keras.optimizers.RMSprop(1e-2, momentum=0.9, centered=True),
    "lion": lambda: keras.optimizers.Lion(1e-2),
    "adagrad": lambda: keras.optimizers.Adagrad(1e-2),
    "adadelta": lambda: keras.optimizers.Adadelta(0.5),
    "adamax": lambda: keras.optimizers.Adamax(1e-2),
    "nadam": lambda: keras.optimizers.Nadam(1e-2),
    "ftrl": lambda: keras.optimizers.Ftrl(1e-2),
    "lamb": lambda: keras.optimizers.Lamb(1e-2),
    "adafactor": lambda: keras.optimizers.Adafactor(1e-2),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, clipnorm=0.1),
    "clipvalue": lambda: keras.optimizers.Adam(1e-2, clipvalue=0.01),
    "global-clipnorm": lambda: keras.optimizers.Adam(1e-2, global_clipnorm=0.1),
    "ema-overwrite": lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=5),
    "accumulation-adam": lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", some(OPTIMIZERS))
def test_optimizers(name: str) -> None:
    assert_captured(lambda: Classifier([dense(), head()], OPTIMIZERS[name]()))


SCHEDULES: dict[str, Make] = {
    "staircase": lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5, staircase=True),
    "piecewise": lambda: keras.optimizers.schedules.PiecewiseConstantDecay(
        [4, 9], [0.1, 0.05, 0.01]
    ),
    "polynomial-cycle": lambda: keras.optimizers.schedules.PolynomialDecay(0.1, 6, cycle=True),
    "warm-up": lambda: keras.optimizers.schedules.CosineDecay(
        0.0, 10, warmup_target=0.1, warmup_steps=6
    ),
    "restarts": lambda: keras.optimizers.schedules.CosineDecayRestarts(0.1, 5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_scheduled_learning_rates(name: str) -> None:
    assert_captured(lambda: Classifier([dense(), head()], keras.optimizers.SGD(SCHEDULES[name]())))


# Random numbers

gamma = keras.random.gamma  # as `from keras.random import gamma`
DRAWS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda x, seed: keras.random.normal(x.shape, seed=seed),
    "uniform": lambda x, seed: keras.random.uniform(x.shape, -1, 1, seed=seed),
    "truncated": lambda x, seed: keras.random.truncated_normal(x.shape, seed=seed),
    "randint": lambda x, seed: ops.cast(keras.random.randint(x.shape, 0, 9, seed=seed), x.dtype),
    "categorical": lambda x, seed: ops.cast(
        keras.random.categorical(x, FEATURES, seed=seed), x.dtype
    ),
    "shuffle": lambda x, seed: keras.random.shuffle(x, seed=seed),
    "dropout": lambda x, seed: keras.random.dropout(x, 0.4, seed=seed),
    "dropout-rows": lambda x, seed: keras.random.dropout(x, 0.4, noise_shape=(ROWS, 1), seed=seed),
    "gamma": lambda x, seed: keras.random.gamma(x.shape, 2.0, seed=seed),
    "beta": lambda x, seed: keras.random.beta(x.shape, 2.0, ops.abs(x) + 1, seed=seed),
    "binomial": lambda x, seed: keras.random.binomial(x.shape, 5, 0.3, seed=seed),
    "imported": lambda x, seed: gamma(x.shape, 2.0, seed=seed),
}


@pytest.mark.parametrize("seeded", [True, False], ids=["seeded", "unseeded"])
@pytest.mark.parametrize("name", some(DRAWS))
def test_random_numbers(name: str, seeded: bool) -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = DRAWS[name](x, task.seed if seeded else None)
        loss = learn(task, x + 0.1 * noise, y)
        return {"loss": loss, "noise": ops.sum(noise)}

    trace = assert_captured(lambda: Steps(step, seed=keras.random.SeedGenerator(4)))
    assert len(set(trace.values["noise"].tolist())) > STEPS / 2  # others in each step


def test_a_number_as_seed_draws_the_same_in_each_step() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = keras.random.normal((ROWS, FEATURES), seed=11)
        return {"loss": learn(task, x + noise, y), "noise": ops.sum(noise)}

    trace = assert_captured(lambda: Steps(step))
    assert len(set(trace.values["noise"].tolist())) == 1


# Branches


def test_one_branch_runs_and_the_other_draws_nothing() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noisy = treadle.cond(
            treadle.step() % 3 == 1,
            lambda: x + 0.1 * keras.random.normal((ROWS, FEATURES)),
            lambda: x * 0.5,
        )
        return {"loss": learn(task, noisy, y), "sum": ops.sum(noisy)}

    assert_captured(lambda: Steps(step))


def test_a_variable_chooses_the_branch() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        double = treadle.cond(task.flag.value, lambda: ops.ones(()) * 2, lambda: ops.ones(()))
        late = ops.cond(task.late.value, lambda: ops.ones(()), lambda: ops.zeros(()))
        task.late.assign(treadle.step() >= 20)
        task.flag.assign(ops.logical_not(task.flag.value))
        return {"loss": learn(task, x * double, y), "late": late, "double": double}

    def make() -> Any:
        flags = {n: keras.Variable(False, dtype="bool", trainable=False) for n in ("flag", "late")}
        return Steps(step, **flags)

    trace = assert_captured(make)
    assert trace.values["double"].tolist() == [1.0, 2.0] * (STEPS // 2)
    assert trace.values["late"].tolist() == [0.0] * 21 + [1.0] * (STEPS - 21)


def test_branches_inside_branches_change_the_state() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        def often() -> Any:
            task.often.assign_add(1)
            return treadle.cond(
                treadle.step() % 4 == 0, lambda: learn(task, x, y), lambda: ops.sum(x) * 0
            )

        def seldom() -> Any:
            return task.often.value * 2.0

        loss = treadle.cond(treadle.step() % 5 != 0, often, seldom)
        return {"loss": loss, "often": task.often.value}

    trace = assert_captured(lambda: Steps(step, often=keras.Variable(0.0)))
    assert trace.values["often"][-1] == sum(i % 5 != 0 for i in range(STEPS))


# What is left out, and done otherwise


def test_pooling_uses_the_memory_layout_of_images() -> None:
    """Keras copies images before it pools them; the values stay the same."""

    def make() -> Any:
        return Classifier(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(64),
                keras.layers.Reshape((8, 8, 1)),
                keras.layers.Conv2D(4, 3, activation="relu", padding="same"),
                keras.layers.MaxPooling2D(2),
                keras.layers.BatchNormalization(),
                keras.layers.Conv2D(4, 3, activation="relu"),
                keras.layers.MaxPooling2D(2, 1, padding="same"),
                keras.layers.Flatten(),
                head(),
            ]
        )

    captured, eager = traces(make)
    assert captured.plan == CAPTURED
    compare(captured, eager, "captured", "run eagerly", Tolerance(rtol=1e-5, atol=1e-7))


def test_gradients_of_a_layer_that_runs_over_time() -> None:
    layers = keras.layers

    def make() -> Any:
        sequence = layers.Reshape((FEATURES // 2, 2))
        return Classifier([sequence, layers.LSTM(4, return_sequences=True), layers.GRU(3), head()])

    assert_captured(make)


def test_a_sum_of_slices_that_is_used_twice() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            w = task.w.value
            scaled = w * 2.0
            rows = [scaled[i] * float(i + 1) for i in range(4)]
            parts = ops.stack([*rows, scaled[1], scaled[1:3, :].sum(axis=0)])
            return ops.sum(parts**2) + ops.sum(ops.abs(w))

        return treadle.minimize(objective, [task.w], task.optimizer)

    assert_captured(
        lambda: Steps(step, w=keras.Variable(np.linspace(-1, 1, 12).reshape(4, 3), dtype="float32"))
    )


def test_a_sum_of_slices_that_is_computed_twice() -> None:
    """The first sum is computed in the memory of its first slice, so the second needs its own."""

    def step(task: Any, x: Any, y: Any) -> Any:
        a, b = x[0, 0] * 1.5, x[0, 1] * 1.5
        weights = task.w.value.detach().requires_grad_()
        with torch.enable_grad():
            numbers = weights * 2.0
            value = numbers[0] * a + numbers[1] * b
        first, second = (
            torch.autograd.grad(value, numbers, a, retain_graph=again)[0] for again in (True, False)
        )
        task.w.assign(task.w.value - 0.1 * (first + 2.0 * second))
        return {"w": ops.sum(task.w.value), "loss": learn(task, x, y)}

    assert_captured(lambda: Steps(step, w=keras.Variable(np.linspace(-1, 1, 12), dtype="float32")))


def test_operations_with_the_same_arguments_are_called_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """But not if what they read was changed between them, nor if 1 and 1.0 differ."""
    blocks: list[Any] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        blocks.append(simplified(*arguments, **options))
        return blocks[-1]

    monkeypatch.setattr(proof, "simplified", kept)

    def step(task: Any, x: Any, y: Any) -> Any:
        row, count = x[0], task.count
        sines = [ops.sin(row), ops.sin(row), ops.sin(count.value)]
        count.assign_add(ops.sum(row))
        sines += [ops.sin(count.value), ops.sin(count.value)]
        added = [ops.add(task.whole.value, 1), ops.add(task.whole.value, 1.0)]
        return {
            "sines": ops.stack([ops.sum(x) for x in sines]).square().sum(),
            "added": added[0] + ops.cast(added[1], "int32"),
            "loss": learn(task, x, y),
        }

    def make() -> Any:
        whole = keras.Variable(3, dtype="int32", trainable=False)
        return Steps(step, count=keras.Variable(0.0), whole=whole)

    trace = assert_captured(make)
    assert set(trace.values["added"]) == {8}
    aten: Any = torch.ops.aten
    calls = Counter(node.function for node in blocks[0].nodes)
    assert calls[aten.sin.default] == 3  # of the row, and of both values of the variable
    assert aten.copy_.default not in calls  # the variable was added to in place


def test_a_variable_is_assigned_what_overlaps_with_it() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        raw = task.w._value
        with torch.no_grad():
            for part in (raw.T, raw, raw.sum(0, keepdim=True), raw[:, :1]):
                raw.copy_(raw + part)
            raw.copy_(raw / raw.norm())
        return {"w": ops.sum(task.w.value[0] * x[0, :3]), "loss": learn(task, x, y)}

    assert_captured(
        lambda: Steps(step, w=keras.Variable(np.linspace(-1, 1, 9).reshape(3, 3), dtype="float32"))
    )


def test_values_from_variables_and_constants_are_those_of_their_step() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        before = task.count.value
        task.count.assign_add(1)
        buffer = ops.zeros((3,))
        buffer[1] = task.count.value
        return {
            "before": before,
            "after": task.count.value,
            "buffer": ops.sum(buffer),
            "constant": ops.convert_to_tensor(7.0),
            "number": 3,
            "loss": learn(task, x, y),
        }

    trace = assert_captured(lambda: Steps(step, count=keras.Variable(0.0)))
    assert trace.values["after"].tolist() == [float(i + 1) for i in range(STEPS)]
    assert trace.values["buffer"].tolist() == trace.values["after"].tolist()
    assert set(trace.values["constant"]) == {7.0} and set(trace.values["number"]) == {3}


def test_higher_derivatives_and_vmap() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(
                lambda x: ops.sum(ops.tanh(task.model(x)) ** 2), x
            )
            norms = ops.vectorized_map(lambda row: ops.sum(row**2), slope)
            return task.loss(y, task.model(x)) + ops.mean(norms)

        return treadle.minimize(objective, task.model, task.optimizer)

    assert_captured(lambda: Steps(step))


def test_values_that_pytorch_reads_only_to_check_arguments_are_captured() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        targets = ops.one_hot(y, 3)
        return {"loss": learn(task, x, y), "first": ops.sum(targets[:, 0])}

    assert_captured(lambda: Steps(step))


def test_operators_that_return_sizes_beside_tensors() -> None:
    """As fused attention on CUDA does, whose backward pass takes the sizes."""

    @torch.library.custom_op("treadle_tests::scaled_rows", mutates_args=())
    def scaled_rows(x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x * x.shape[1], x.shape[1], x.sum(0)

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.factor = output[1]

    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        return gradient * ctx.factor

    scaled_rows.register_autograd(backward, setup_context=keep)

    def step(task: Any, x: Any, y: Any) -> Any:
        sizes: list[int] = []

        def objective() -> Any:
            scaled, size, _ = scaled_rows(task.model.layers[0](x))
            sizes.append(size)
            return task.loss(y, task.model.layers[1](scaled / 4))

        losses = treadle.minimize(objective, task.model, task.optimizer)
        return {"loss": losses, "size": ops.convert_to_tensor(sizes[0])}

    assert_captured(lambda: Steps(step))


def test_statistics_that_an_operator_changes() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            hidden = torch.nn.functional.batch_norm(
                x, task.mean.value, task.variance.value, training=True
            )
            return task.loss(y, task.model(hidden))

        return treadle.minimize(objective, task.model, task.optimizer)

    def make() -> Any:
        mean = keras.Variable(np.zeros(FEATURES, "float32"), trainable=False)
        variance = keras.Variable(np.ones(FEATURES, "float32"), trainable=False)
        return Steps(step, mean=mean, variance=variance)

    assert {"mean", "variance"} <= set(assert_captured(make).changed)


# What the proof must leave alone


def test_verification_restores_all_state() -> None:
    keras.utils.set_random_seed(5)
    task = Steps(lambda task, x, y: {"loss": learn(task, x, y)}, dense(), keras.layers.Dropout(0.5))
    runner = Runner(task, BATCHES[0])
    window = next(windows(BATCHES[:3]))
    tensors = {path: v._value for path, v in runner.state.variables.items()}
    needed = {path: x.requires_grad for path, x in tensors.items()}
    before, random = runner.state.arrays(), (torch.get_rng_state(), np.random.get_state()[1])

    (made,) = runner._prepared._programs.values()
    made.executor.facts(window)  # records and proves

    assert runner.programs == 1
    after = runner.state.arrays()
    assert all(np.array_equal(before[path], after[path]) for path in before)
    assert torch.equal(torch.get_rng_state(), random[0])
    assert np.array_equal(np.random.get_state()[1], random[1])
    runner.run(BATCHES)
    for path, variable in runner.state.variables.items():
        assert variable._value is tensors[path] and variable._value.grad is None
        assert variable._value.requires_grad == needed[path]
        assert variable._value.grad_fn is None


def test_slots_created_during_verification_get_their_initial_values() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        if context().build is None:  # as Python may, that decides by something else than a batch
            treadle.minimize(lambda: ops.sum(task.late**2), [task.late], task.other)
        return {"loss": learn(task, x, y)}

    late, other = keras.Variable([1.0]), keras.optimizers.SGD(0.1, momentum=0.9)
    run_steps(Steps(step, late=late, other=other), BATCHES[:1])
    np.testing.assert_allclose(ops.convert_to_numpy(late), [0.8], rtol=1e-6)
    np.testing.assert_allclose(ops.convert_to_numpy(other.momentums[0]), [-0.2], rtol=1e-6)


def windows(chosen: Any) -> Any:
    from treadle.testing.running import _windows

    return _windows(chosen, (len(chosen),))


def test_a_user_s_own_view_of_a_weight_is_updated() -> None:
    task = Steps(lambda task, x, y: {"loss": learn(task, x, y)})
    kernel = task.model.layers[0].kernel
    view = kernel.value[0].detach()
    run_steps(task, BATCHES[:3])
    assert torch.equal(view, kernel.value[0])


SHORT = [(x[:5], y[:5]) for x, y in BATCHES[:2]]
MANY = "the step could not be captured: batches have more than 1 different shapes"


def test_batch_forms_beyond_a_limit_run_as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.backends.torch.capture.windows.MOST_FORMS", 1)

    def run(execution: str) -> Trace:
        keras.utils.set_random_seed(0)
        options = treadle.Options(execution=execution)
        runner = Runner(Classifier([dense(), head()]), BATCHES[0], options)
        trace = runner.run([*BATCHES[:2], *SHORT, *BATCHES[2:4]])
        assert runner.programs == (execution == "auto")
        return trace

    captured, eager = run("auto"), run("eager")
    assert captured.plan == f"{CAPTURED} (as Python for some batches: {MANY})"
    compare(captured, eager, "captured", "run eagerly", tolerance=None)
    with pytest.raises(StepError) as caught:
        run("compiled")
    assert str(caught.value) == (
        f"train_step cannot be compiled for some of its batches: {MANY}. "
        "Let it run as Python with Options(execution='auto')"
    )


@pytest.mark.usefixtures("assumes_cpu")  # else a device is lost
def test_an_error_in_a_captured_step_names_the_line() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        task.table.assign_add(ops.take(task.table.value, y, axis=0)[:4] * 0.1)  # this line
        return {"sum": ops.sum(task.table.value)}

    rows = np.zeros(ROWS, "int32")
    task = Steps(step, table=keras.Variable(np.ones((4, 2), "float32")))
    runner = Runner(task, (X[0], rows))
    runner.run([(X[0], rows)] * 2)
    with pytest.raises(IndexError) as caught:
        runner.run([(X[0], rows + 40)])
    (note,) = caught.value.__notes__
    assert note.startswith("at test_capture.py:") and note.endswith("# this line")


def test_rows_of_arrays_are_gathered_as_batches_of_them() -> None:
    def run(**options: Any) -> list[float]:
        keras.utils.set_random_seed(0)
        x, y = X.reshape(-1, FEATURES)[:70].astype("float64"), Y.reshape(-1)[:70]
        x.flags.writeable = False
        source = treadle.data.from_arrays({"x": x, "y": y}, batch_size=ROWS)
        task = Steps(lambda task, x, y: {"loss": learn(task, x, y)})
        step = task.train_step
        task.train_step = lambda batch: step((batch["x"], batch["y"]))
        with treadle.Loop(task, options=treadle.Options(**options), console=False) as loop:
            losses = loop.fit(source, epochs=2).steps("loss").tolist()
        kind = {None: "on the device", False: "streamed"}[options.get("data_on_device")]
        assert loop.plan == f"{CAPTURED}, data {kind}"
        return losses

    assert run() == run(data_on_device=False)
    assert len(run()) == 18


@pytest.mark.parametrize(
    ("make", "in_background"),
    [
        (lambda: Classifier([dense(), keras.layers.Dropout(0.3, seed=1), head()]), True),
        (lambda: Classifier([dense(), keras.layers.Dropout(0.3), head()]), False),
        (lambda: Steps(lambda task, x, y: learn(task, x + DRAWS["gamma"](x, 3), y)), False),
    ],
    ids=["seeded", "unseeded", "gamma"],
)
def test_only_steps_that_draw_no_global_random_numbers_run_in_the_background(
    make: Make, in_background: bool
) -> None:
    runner = Runner(make(), BATCHES[0])
    outputs = runner._prepared.run(next(windows(BATCHES[:2])), 0)
    outputs.fetch()
    assert isinstance(outputs, Running) is in_background


def test_eval_steps_are_captured_too() -> None:
    task = Classifier([dense(), keras.layers.BatchNormalization(), head()])
    runner = Runner(task, BATCHES[0], step="eval_step")
    trace = runner.run(BATCHES)
    assert trace.plan == CAPTURED
    eager = Runner(task, BATCHES[0], treadle.Options(execution="eager"), step="eval_step")
    eager.state.assign(trace.start)
    compare(trace, eager.run(BATCHES), "captured", "run eagerly", tolerance=None)
