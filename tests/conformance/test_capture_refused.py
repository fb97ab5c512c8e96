"""PyTorch: what must not be captured is refused by name, and runs as it is."""

import copy
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, head
from keras import ops
from keras_versions import needs_keras
from own_step import CAPTURED, Steps, learn
from refusals import BATCHES, refusal

import treadle
from treadle.errors import StepError
from treadle.testing import run_steps

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's way to compile a step", allow_module_level=True)

import torch

Step = Callable[[Any, Any, Any], Any]
LINE = r", at test_capture_refused\.py:\d+: .*# this line"
PYTHON_VALUE = "it converts a tensor to a Python value"


def by_number(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * float(ops.mean(x)), y)}  # this line


def by_branch(task: Any, x: Any, y: Any) -> Any:
    if ops.mean(x) > 0:  # this line
        x = -x
    return {"loss": learn(task, x, y)}


def by_array(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * ops.convert_to_numpy(x).max(), y)}  # this line


def by_list(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * max(x[0].tolist()), y)}  # this line


def by_text(task: Any, x: Any, y: Any) -> Any:
    loss = learn(task, x, y)
    text = f"{loss}"  # this line
    return {"loss": loss, "characters": float(len(text) > 0)}


def by_copy(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x + copy.deepcopy(x), y)}  # this line


def by_variable(task: Any, x: Any, y: Any) -> Any:
    rate = float(task.optimizer.learning_rate)  # this line
    return {"loss": learn(task, x * rate, y)}


def by_variable_s_array(task: Any, x: Any, y: Any) -> Any:
    rate = task.optimizer.learning_rate.numpy()  # this line
    return {"loss": learn(task, x * float(rate), y)}


def by_step_number(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * int(treadle.step()), y)}  # this line


def by_comparison(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x, y), "same": 1.0 if torch.equal(x, -x) else 0.0}  # this line


def in_spite_of_an_exception(task: Any, x: Any, y: Any) -> Any:
    try:
        scale = float(ops.mean(x))  # this line
    except Exception:
        scale = 1.0
    return {"loss": learn(task, x * scale, y)}


@pytest.mark.parametrize(
    "step",
    [
        *(by_number, by_branch, by_array, by_list, by_text, by_copy),
        *(
            by_variable,
            by_variable_s_array,
            by_step_number,
            by_comparison,
            in_spite_of_an_exception,
        ),
    ],
)
def test_python_that_reads_a_value(step: Step) -> None:
    assert re.fullmatch(PYTHON_VALUE + LINE, refusal(lambda: Steps(step)))


def by_where(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x, y), "n": ops.sum(torch.nonzero(x))}  # this line


def by_mask(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x, y), "sum": ops.sum(x[x > 0])}  # this line


@pytest.mark.parametrize(
    ("step", "operator"), [(by_where, "aten.nonzero.default"), (by_mask, "aten.index.Tensor")]
)
def test_shapes_that_depend_on_values(step: Step, operator: str) -> None:
    why = f"{re.escape(operator)} returns a tensor whose shape depends on values"
    assert re.fullmatch(why + LINE, refusal(lambda: Steps(step)))


def test_a_mask_that_keeps_the_shape_is_fine() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        x = ops.where(x > 0, x, 0.0)
        x = x[:, torch.tensor([1, 0, 2, 3, 4, 5], device=x.device)]
        return {"loss": learn(task, x, y)}

    assert run_steps(Steps(step), BATCHES).plan == CAPTURED


def test_steps_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.backends.torch.capture.tape.LONGEST", 20)
    task = Steps(lambda task, x, y: {"loss": learn(task, x, y)})
    assert "it has more than 20 operations, at " in run_steps(task, BATCHES[:1]).plan


# Changes that would go unnoticed


def into_its_batch(task: Any, x: Any, y: Any) -> Any:
    x.mul_(2.0)  # this line
    return {"loss": learn(task, x, y)}


def into_a_tensor(task: Any, x: Any, y: Any) -> Any:
    task.box["sum"].add_(x.sum())  # this line
    return {"loss": learn(task, x, y), "sum": task.box["sum"]}


def into_statistics(task: Any, x: Any, y: Any) -> Any:
    mean, variance = task.box["mean"], torch.ones(FEATURES, device=x.device)
    x = torch.nn.functional.batch_norm(x, mean, variance, training=True)  # this line
    return {"loss": learn(task, x, y), "mean": ops.sum(mean)}


def into_the_step_number(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x, y), "next": treadle.step().add_(1)}  # this line


@pytest.mark.parametrize(
    ("step", "what"),
    [
        (into_its_batch, "aten.mul_.Tensor changes its batch in place"),
        (
            into_a_tensor,
            "aten.add_.Tensor changes a tensor that is part of neither the state nor its branch of "
            "cond in place",
        ),
        (
            into_statistics,
            "aten.native_batch_norm.default changes a tensor that is part of neither the state nor "
            "its branch of cond in place",
        ),
        (into_the_step_number, "aten.add_.Tensor changes the step's number in place"),
    ],
)
def test_in_place_changes_of_other_tensors_than_variables(step: Step, what: str) -> None:
    def zeros(*shape: int) -> Any:
        return ops.convert_to_tensor(np.zeros(shape, "float32"))  # on Keras' device

    def make() -> Any:
        return Steps(step, box={"sum": zeros(), "mean": zeros(FEATURES)})

    assert re.fullmatch(re.escape(what) + LINE, refusal(make))  # and nothing was added twice


def test_a_statistic_of_a_module_of_pytorchs() -> None:
    """Its buffers are no part of a task's state."""
    from treadle.testing.running import Runner

    needs_keras("3.10", "TorchModuleWrapper(output_shape=…)")
    norm = torch.nn.BatchNorm1d(FEATURES)
    layer = keras.layers.TorchModuleWrapper(norm, output_shape=(None, FEATURES))
    task = Classifier([keras.Input((FEATURES,)), layer, head()])
    plan = run_steps(task, BATCHES[:1]).plan
    assert "num_batches_tracked" not in Runner(task, BATCHES[0]).state.variables
    assert "changes a tensor that is part of neither the state" in plan


def test_a_generator_of_pytorchs() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        generator = task.box["generator"]
        noise = torch.randn(x.shape, generator=generator, device=x.device)  # this line
        return {"loss": learn(task, x + noise, y)}

    device = ops.convert_to_tensor(0.0).device

    def make() -> Any:
        return Steps(step, box={"generator": torch.Generator(device).manual_seed(1)})

    why = r"aten\.randn\.generator draws from a torch\.Generator that is not part of the state"
    assert re.fullmatch(why + LINE, refusal(make))


def test_a_step_that_calls_backward_itself() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        task.model.zero_grad()
        loss = task.loss(y, task.model(x))
        loss.backward()  # this line
        variables = task.model.trainable_variables
        with torch.no_grad():
            task.optimizer.apply([v.value.grad for v in variables], variables)
        return {"loss": loss}

    assert re.fullmatch("it calls backward\\(\\) itself" + LINE, refusal(lambda: Steps(step)))


def test_a_step_that_calls_torch_autograd_backward() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        loss = task.loss(y, task.model(x))
        torch.autograd.backward([loss])
        return {"loss": loss}

    task = Steps(step)
    assert "it calls backward() itself" in run_steps(task, BATCHES[:1]).plan


def test_a_variable_that_gets_another_tensor() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        task.scale._value = torch.nn.Parameter(task.scale._value + 1, requires_grad=False)
        return {"loss": learn(task, x, y), "scale": task.scale.value}

    def make() -> Any:
        return Steps(step, scale=keras.Variable(1.0, trainable=False))

    plan = run_steps(make(), BATCHES[:1]).plan
    assert "it replaces the tensor of a variable" in plan


# Branches


def test_a_condition_that_is_differentiated() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            loss = task.loss(y, task.model(x))
            return treadle.cond(loss > 1, lambda: loss * 2, lambda: loss)  # this line

        return treadle.minimize(objective, task.model, task.optimizer)

    assert refusal(lambda: Steps(step)).startswith("the result of a cond is differentiated, at ")


def test_a_condition_inside_an_objective_that_is_not_differentiated() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            loss = task.loss(y, task.model(x))
            big = treadle.cond(loss > 1, lambda: ops.ones(()), lambda: ops.zeros(()))
            return loss, big

        loss, big = treadle.minimize(objective, task.model, task.optimizer)
        return {"loss": loss, "big": big}

    trace = run_steps(Steps(step), BATCHES)
    assert trace.plan == CAPTURED
    assert trace.values["big"].tolist() == (trace.values["loss"] > 1).tolist()


def test_a_tensor_that_leaves_its_branch() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        left: list[Any] = []

        def then() -> Any:
            left.append(ops.sum(x))
            return left[0] * 2

        value = treadle.cond(treadle.step() >= 0, then, lambda: ops.sum(x))
        return {"loss": learn(task, x, y), "value": value + left[0]}  # this line

    why = "a tensor made in a branch of cond or in a row of for_each is used outside"
    assert re.fullmatch(why + LINE, refusal(lambda: Steps(step)))


def test_branches_of_different_forms() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        value = treadle.cond(treadle.step() >= 0, lambda: x, lambda: x[0])  # this line
        return {"loss": learn(task, x, y), "value": ops.sum(value)}

    why = (
        r"the branches of cond return \[\(\(8, 6\), torch\.float32\)\] and \[\(\(6,\), "
        r"torch\.float32\)\]"
    )
    assert re.fullmatch(why + LINE, refusal(lambda: Steps(step)))


def test_a_branch_that_changes_a_tensor_from_outside() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        total = ops.sum(x)

        def then() -> Any:
            return total.add_(1.0)  # this line

        value = treadle.cond(treadle.step() >= 0, then, lambda: total)
        return {"loss": learn(task, x, y), "value": value}

    assert "nor its branch of cond in place, at test_capture" in refusal(lambda: Steps(step))


# Errors of the step's own


def test_an_error_that_occurs_only_while_recording() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        from treadle.backends.torch.capture.recording import current

        if current() is not None:
            raise KeyError("nothing of the kind")
        return {"loss": learn(task, x, y)}

    assert refusal(lambda: Steps(step)) == "KeyError: 'nothing of the kind'"


@pytest.mark.parametrize("execution", ["auto", "compiled"])
def test_the_step_s_own_error_comes_first(execution: str) -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        loss = learn(task, x, y)
        if treadle.backends.step_context.context().build is None:
            raise ZeroDivisionError("as it must be")
        return {"loss": loss}

    task = Steps(step)
    before = task.model.get_weights()
    with pytest.raises(ZeroDivisionError, match="as it must be"):
        run_steps(task, BATCHES, treadle.Options(execution=execution))
    if execution == "compiled":
        assert all(map(np.array_equal, before, task.model.get_weights()))


def test_compiled_execution_reports_what_could_not_be_captured() -> None:
    with pytest.raises(StepError) as caught:
        run_steps(Steps(by_number), BATCHES[:1], treadle.Options(execution="compiled"))
    assert re.fullmatch(
        "train_step cannot be compiled: the step could not be captured: "
        + PYTHON_VALUE
        + LINE
        + r"\. Let it run as Python with Options\(execution='auto'\)",
        str(caught.value),
    )
