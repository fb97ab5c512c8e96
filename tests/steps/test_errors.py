"""What a step must not do: the same message, compiled and eager."""

import re
import traceback
from collections.abc import Callable
from typing import Any

import keras
import pytest
from cases import batches_of
from classifier import CLASSES, Classifier, dense, head
from executions import EAGER
from gradient_tasks import TwoModels
from keras import ops

import treadle
from treadle.errors import GradientError, OwnershipError, StateError, StepError, TreadleError
from treadle.testing import run_steps
from treadle.testing.running import Runner

BATCHES = batches_of("unbuilt", 3)


class Broken(Classifier):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__([keras.Input((6,)), dense(), head()])
        self.step = step

    def train_step(self, batch: Any) -> Any:
        return self.step(self, *batch)


@pytest.fixture(params=["compiled", EAGER])
def execution(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def message(execution: str) -> Callable[..., str]:
    """Runs a broken step and returns its message."""

    def run(kind: type[TreadleError], step: Any, **options: Any) -> str:
        task = step if isinstance(step, treadle.Task) else Broken(step)
        with pytest.raises(kind) as caught:
            run_steps(task, BATCHES, treadle.Options(execution=execution, **options))
        assert type(caught.value) is kind
        return str(caught.value)

    return run


Message = Callable[..., str]


# Gradients


def first_layer_alone(task: Broken, x: Any, y: Any) -> Any:
    return ops.mean(task.model.layers[0](x))


def stopped(task: Broken, x: Any, y: Any) -> Any:
    first, last = task.model.layers
    return ops.mean(first(x)) + ops.stop_gradient(ops.mean(last(first(x))))


def through_whole_numbers(task: Broken, x: Any, y: Any) -> Any:
    first, last = task.model.layers
    winners = ops.argmax(last(first(x)), axis=-1)
    return ops.mean(first(x)) + ops.mean(ops.cast(winners, "float32"))


def only_measured(task: Broken, x: Any, y: Any) -> Any:
    first, last = task.model.layers
    task.accuracy.update_state(y, last(first(x)))
    return ops.mean(first(x))


@pytest.mark.parametrize(
    "objective", [first_layer_alone, stopped, through_whole_numbers, only_measured]
)
def test_a_variable_that_the_loss_does_not_reach_is_named(
    message: Message, objective: Callable[..., Any]
) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        return treadle.minimize(lambda: objective(task, x, y), task.model, task.optimizer)

    assert message(GradientError, step) == (
        "no gradient for model/layers/1/kernel: the loss does not depend on it. Leave it out of "
        "the variables, or pass unreached='zeros' for a gradient of zeros"
    )


def test_of_several_losses_the_one_that_misses_is_named(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        first, last = task.model.layers
        _, _ = treadle.gradients(
            lambda: {"a": ops.mean(first(x)), "b": ops.mean(last(first(x)))},
            {"a": first, "b": [first.kernel, last.bias, task.model.layers[0].bias]},
        )
        _, _ = treadle.gradients(
            lambda: {"a": ops.mean(first(x)), "b": ops.mean(last(first(x)))}, {"a": last, "b": last}
        )

    assert message(GradientError, step).startswith(
        "no gradient for model/layers/1/kernel: the loss 'a' does not depend on it."
    )


def test_unreached_variables_get_zeros_on_request(execution: str) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        loss, grads = treadle.gradients(
            lambda: stopped(task, x, y), task.model.trainable_variables, unreached="zeros"
        )
        return {"loss": loss, "unreached": sum(ops.sum(ops.abs(g)) for g in grads[2:])}

    trace = run_steps(Broken(step), BATCHES, treadle.Options(execution=execution))
    assert trace.values["unreached"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (
            lambda task, x, y: task.model(x),
            f"the loss must be a scalar, but has shape (8, {CLASSES}): reduce it, for example with "
            "ops.mean",
        ),
        (lambda task, x, y: ops.sum(y), "the loss must be of a float type, but is int32"),
        (
            lambda task, x, y: treadle.weighted(ops.mean(task.model(x)), ops.ones(3)),
            "the weight of the loss must be a scalar, but has shape (3,): pass the number of items "
            "that the loss is a mean of, for example ops.sum(mask)",
        ),
        (
            lambda task, x, y: ([ops.mean(task.model(x))], "extra"),
            "the loss must be a scalar tensor, but the objective returned list",
        ),
    ],
)
def test_values_that_are_no_loss(message: Message, loss: Any, expected: str) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        variables = task.model.trainable_variables
        treadle.gradients(lambda: loss(task, x, y), variables)

    assert message(GradientError, step) == expected


def test_losses_and_variables_of_other_names(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        parts = {"a": task.model.layers[0], "b": task.model.layers[1]}
        treadle.gradients(lambda: {"a": ops.mean(task.model(x))}, parts)

    assert message(GradientError, step) == (
        "the objective must return a dict of losses named ['a', 'b'], as the variables are, or "
        "(that dict, anything); it returned ['a']"
    )


def test_an_input_that_the_result_does_not_depend_on(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        treadle.input_gradients(lambda a, b: ops.sum(a), x, x)

    assert message(GradientError, step) == "the function's result does not depend on input 1"


def test_inputs_of_whole_numbers(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        treadle.input_gradients(lambda y: ops.sum(y), y)

    assert message(GradientError, step) == (
        "input 0 has dtype int32: only float tensors have gradients; cast it with "
        "ops.cast(x, 'float32')"
    )


# State


def test_a_model_that_no_attribute_reaches(message: Message) -> None:
    hidden = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, name="hidden_layer")])

    def step(task: Broken, x: Any, y: Any) -> Any:
        loss = ops.mean(hidden(x)) + ops.mean(task.model(x))
        return {"loss": loss}

    path = r"(sequential_\d+/)?hidden_layer"
    assert re.fullmatch(
        rf"train_step uses {path}/kernel, {path}/bias, which no attribute of the task reaches, so "
        r"a compiled step would never see it change: keep hidden as an attribute, or pass "
        r"it to treadle\.task\(…, hidden=hidden\)",
        message(StateError, step),
    )


@pytest.mark.parametrize(
    "use",
    [
        lambda things, x: things["variable"].assign_add(1.0),
        lambda things, x: things["variable"] * 2.0,
        lambda things, x: things["metric"].update_state(1.0),
        lambda things, x: keras.random.normal((2,), seed=things["generator"]),
    ],
    ids=["assigned", "read", "metric", "generator"],
)
def test_anything_else_that_no_attribute_reaches(message: Message, use: Any) -> None:
    things = {
        "variable": keras.Variable(0.0, name="counter"),
        "metric": keras.metrics.Mean(name="average"),
        "generator": keras.random.SeedGenerator(1, name="generator"),
    }

    def step(task: Broken, x: Any, y: Any) -> Any:
        use(things, x)
        return {"loss": ops.mean(task.model(x))}

    text = message(StateError, step)
    assert re.match(r"train_step uses (counter|average/total|generator/\w+)", text)
    assert "which no attribute of the task reaches" in text
    assert text.endswith(
        "keep things as an attribute, or pass it to treadle.task(…, things=things)"
    )


def test_an_optimizer_that_no_attribute_reaches(message: Message) -> None:
    hidden = keras.optimizers.Adam(name="hidden")

    def step(task: Broken, x: Any, y: Any) -> Any:
        return treadle.minimize(lambda: ops.mean(task.model(x)), task.model, hidden)

    assert message(StateError, step) == (
        "train_step applies the optimizer 'hidden' (Adam), which no attribute of the task reaches, "
        "so it would be neither saved nor compiled in: keep hidden as an attribute, or pass it to "
        "treadle.task(…, hidden=hidden)"
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        lambda: keras.optimizers.SGD(loss_scale_factor=8.0),
    ],
)
def test_an_optimizer_that_scales_the_loss(message: Message, make: Any) -> None:
    optimizer = make()
    assert message(StateError, Classifier([dense(), head()], optimizer)) == (
        f"optimizer scales its loss itself ({type(optimizer).__name__}): gradients are always "
        "unscaled here, so it would divide them once too often. Use the inner optimizer, without "
        "loss_scale_factor"
    )


def test_variables_created_again_in_each_step(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        task.layers = [*getattr(task, "layers", []), keras.layers.Dense(2)]
        return ops.mean(task.layers[-1](x))

    assert message(StateError, step) == (
        "train_step makes new variables each time it is called: make layers, metrics and "
        "optimizers in __init__ and keep them as attributes"
    )


def test_a_layer_created_in_each_step(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        return ops.mean(keras.layers.Dense(2, name="forgotten")(x))

    assert "forgotten" in message(StateError, step)


# Results


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (
            lambda loss: (loss, loss),
            "train_step must return a dict of scalars, one scalar (its loss) or nothing; it "
            "returned a tuple: name its parts, as in return {'loss': loss, 'norm': norm}",
        ),
        (
            lambda loss: [loss],
            "train_step must return a dict of scalars, one scalar (its loss) or nothing; it "
            "returned a list",
        ),
        (
            lambda loss: {"loss": ops.stack([loss, loss])},
            "train_step returned 'loss' of shape (2,): only scalars can be logged; reduce it, for "
            "example with ops.mean, or keep it out",
        ),
        (
            lambda loss: {"loss": treadle.weighted(loss, ops.stack([loss, loss]))},
            "train_step returned the weight of 'loss' of shape (2,): only scalars can be logged; "
            "reduce it, for example with ops.mean, or keep it out",
        ),
        (
            lambda loss: {"loss": loss, "kind": object()},
            "train_step returned 'kind' of type object: only scalars can be logged",
        ),
    ],
)
def test_invalid_return_values_of_a_step(message: Message, result: Any, expected: str) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        return result(ops.mean(task.model(x)))

    assert message(StepError, step) == expected


def test_a_step_that_returns_other_names_than_before(message: Message) -> None:
    calls = []

    def step(task: Broken, x: Any, y: Any) -> Any:
        calls.append(1)
        return {"loss" if len(calls) == 1 else "other": ops.mean(task.model(x)), "same": 1.0}

    assert message(StepError, step) == (
        "train_step returned other names than before: missing ['loss'], new ['other']. Return the "
        "same names from every step"
    )


def test_a_python_value_that_the_step_changes(message: Message) -> None:
    def step(task: Broken, x: Any, y: Any) -> Any:
        task.calls = getattr(task, "calls", 0) + 1
        return {"loss": ops.mean(task.model(x))}

    task = Broken(step)
    task.calls = 0  # type: ignore[attr-defined]
    assert re.fullmatch(
        r"train_step changes Python values \(calls changed from \d+ to \d+\), which a compiled "
        r"step does only while it is traced: store changing values in a keras\.Variable",
        message(StepError, task),
    )


# Phases


class Trespassing(TwoModels):
    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        with treadle.phase("look", owns=[self.critic]):
            self.critic(batch[0])
            self.generator(batch[0], training=True)  # moves its BatchNorm statistics
        return logs


def test_a_phase_that_changes_what_it_does_not_own(message: Message) -> None:
    assert message(OwnershipError, Trespassing(), checked=True) == (
        "phase 'look' changed generator/layers/1/moving_mean, which it does not own; "
        "phase 'look' changed generator/layers/1/moving_variance, which it does not own: "
        "add it to owns=[…], or freeze it with trainable = False"
    )


def test_phases_promise_only_unless_checked(execution: str) -> None:
    run_steps(Trespassing(), BATCHES, treadle.Options(execution=execution))


# The user's own


class Mine(Exception):
    pass


def test_an_error_in_the_step_keeps_its_traceback(execution: str) -> None:
    def fails_here(task: Broken) -> None:
        if task.broken:
            raise Mine("out of cheese")

    def step(task: Broken, x: Any, y: Any) -> Any:
        def objective() -> Any:
            fails_here(task)
            return ops.mean(task.model(x))

        return treadle.minimize(objective, task.model, task.optimizer)

    for broken_from_the_start in (True, False):
        task = Broken(step)
        task.broken = broken_from_the_start  # type: ignore[attr-defined]
        with pytest.raises(Mine) as caught:
            if broken_from_the_start:
                run_steps(task, BATCHES, treadle.Options(execution=execution))
            else:
                runner = Runner(task, BATCHES[0], treadle.Options(execution=execution))
                task.broken = True  # type: ignore[attr-defined]
                runner.run(BATCHES)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert str(caught.value) == "out of cheese"
        assert frames[-1] == "fails_here"
        assert "objective" in frames


def test_after_an_error_the_next_step_works(execution: str) -> None:
    """Scopes, patches and contexts are left as they were found."""

    def step(task: Broken, x: Any, y: Any) -> Any:
        def objective() -> Any:
            with treadle.substituted(task.model, task.model.trainable_variables):
                return treadle.cond(treadle.step() >= 0, lambda: 1 / 0, lambda: 1.0)

        return treadle.gradients(objective, task.model)[0]

    with pytest.raises(ZeroDivisionError):
        run_steps(Broken(step), BATCHES, treadle.Options(execution=execution))
    good = Classifier([dense(), head()])
    run_steps(good, BATCHES, treadle.Options(execution=execution))
    w = keras.Variable(3.0)
    _, (slope,) = treadle.gradients(lambda: w * w, [w])
    assert float(ops.convert_to_numpy(slope)) == 6
