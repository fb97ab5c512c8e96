"""PyTorch: what must not be captured is refused by name, and runs as it is."""

import copy
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cases import FEATURES, Classifier, batches, dense, head
from keras import ops
from own_step import CAPTURED, Steps, learn

import treadle
from treadle.backends.step_context import context
from treadle.errors import StepError
from treadle.testing import Trace, run_steps
from treadle.testing.trace import compare

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's way to compile a step", allow_module_level=True)

import random

import torch

BATCHES = list(zip(*batches(6), strict=True))
Step = Callable[[Any, Any, Any], Any]


def refusal(make: Callable[[], Any]) -> str:
    """Why a task's step is not captured; checks that it then does what it does eagerly."""
    found: list[Trace] = []
    for execution in ("auto", "eager"):
        keras.utils.set_random_seed(3)
        found.append(run_steps(make(), BATCHES, treadle.Options(execution=execution)))
    compare(*found, "not captured", "run eagerly", tolerance=None)
    plan = re.fullmatch(r"eager \(the step could not be captured: (.*)\)", found[0].plan)
    assert plan is not None, found[0].plan
    return plan[1]


LINE = r", at test_capture_refused\.py:\d+: .*# this line"
PYTHON_VALUE = "it converts a tensor to a Python value"


def by_number(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * float(ops.mean(x)), y)}  # this line


def by_item(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * ops.mean(x).item(), y)}  # this line


def by_branch(task: Any, x: Any, y: Any) -> Any:
    if ops.mean(x) > 0:  # this line
        x = -x
    return {"loss": learn(task, x, y)}


def by_array(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * ops.convert_to_numpy(x).max(), y)}  # this line


def by_list(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * max(x[0].tolist()), y)}  # this line


def by_index(task: Any, x: Any, y: Any) -> Any:
    return {"loss": learn(task, x * range(9)[y[0]], y)}  # this line


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
        *(by_number, by_item, by_branch, by_array, by_list, by_index, by_text, by_copy),
        *(
            by_variable,
            by_variable_s_array,
            by_step_number,
            by_comparison,
            in_spite_of_an_exception,
        ),
    ],
)
def test_python_that_looks_at_a_value(step: Step) -> None:
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
        x = x[:, torch.tensor([1, 0, 2, 3, 4, 5])]
        return {"loss": learn(task, x, y)}

    assert run_steps(Steps(step), BATCHES).plan == CAPTURED


# Changes that would go unnoticed


def into_its_batch(task: Any, x: Any, y: Any) -> Any:
    x.mul_(2.0)  # this line
    return {"loss": learn(task, x, y)}


def into_a_tensor(task: Any, x: Any, y: Any) -> Any:
    task.box["sum"].add_(x.sum())  # this line
    return {"loss": learn(task, x, y), "sum": task.box["sum"]}


def into_statistics(task: Any, x: Any, y: Any) -> Any:
    mean, variance = task.box["mean"], torch.ones(FEATURES)
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
def test_changes_of_what_is_no_variable(step: Step, what: str) -> None:
    def make() -> Any:
        return Steps(step, box={"sum": torch.zeros(()), "mean": torch.zeros(FEATURES)})

    assert re.fullmatch(re.escape(what) + LINE, refusal(make))  # and nothing was added twice


def test_a_statistic_of_a_module_of_pytorchs() -> None:
    """Its buffers are no part of a task's state."""
    from treadle.testing.running import Runner

    norm = torch.nn.BatchNorm1d(FEATURES)
    layer = keras.layers.TorchModuleWrapper(norm, output_shape=(None, FEATURES))
    task = Classifier([keras.Input((FEATURES,)), layer, head()])
    plan = run_steps(task, BATCHES[:1]).plan
    assert "num_batches_tracked" not in Runner(task, BATCHES[0]).state.variables
    assert "changes a tensor that is part of neither the state" in plan


def test_a_generator_of_pytorchs() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        noise = torch.randn(x.shape, generator=task.box["generator"])  # this line
        return {"loss": learn(task, x + noise, y)}

    def make() -> Any:
        return Steps(step, box={"generator": torch.Generator().manual_seed(1)})

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


def test_backward_where_it_cannot_be_seen() -> None:
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


# What only the proof can see


class Counter:
    """Python that the task's state knows nothing of."""

    def __init__(self) -> None:
        self.count, self.last = 0, None

    def next(self) -> int:
        self.count += 1
        return self.count


def test_a_number_that_python_counts() -> None:
    def make() -> Any:
        counter = Counter()
        return Steps(lambda task, x, y: {"loss": learn(task, x, y), "count": float(counter.next())})

    plan = run_steps(make(), BATCHES).plan
    assert plan == (
        "eager (the step could not be captured: when replayed, it returns a different 'count', in "
        "step 1 of the proof)"
    )


def test_a_count_that_scales_the_gradient() -> None:
    def make() -> Any:
        counter = Counter()
        return Steps(lambda task, x, y: {"loss": learn(task, x * float(counter.next()), y)})

    plan = run_steps(make(), BATCHES).plan
    assert "when replayed, it computes a different model/layers/0/kernel, in step 1" in plan


def test_a_tensor_kept_from_the_step_before() -> None:
    def make() -> Any:
        kept = Counter()

        def step(task: Any, x: Any, y: Any) -> Any:
            before, kept.last = kept.last, ops.mean(x)
            return {"loss": learn(task, x, y), "before": ops.mean(x) if before is None else before}

        return Steps(step)

    assert "the step could not be captured: " in run_steps(make(), BATCHES, windows=(6,)).plan


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(random.random, "Python's random"), (np.random.random, "numpy.random")],
    ids=["python", "numpy"],
)
def test_random_numbers_of_others(draw: Callable[[], float], whose: str) -> None:
    """A step that always draws them is refused before; this one begins later."""

    def step(task: Any, x: Any, y: Any) -> Any:
        scale = draw() if treadle.backends.step_context.context().build is None else 1.0
        return {"loss": learn(task, x * scale, y)}

    why = f"it draws from {whose}, which a captured step would do only once"
    assert refusal(lambda: Steps(step)) == why


def test_random_numbers_whose_number_varies() -> None:
    def make() -> Any:
        counter = Counter()

        def step(task: Any, x: Any, y: Any) -> Any:
            for _ in range(counter.next()):
                torch.rand(())
            return {"loss": learn(task, x, y)}

        return Steps(step)

    plan = run_steps(make(), BATCHES).plan
    assert "when replayed, it draws different random numbers, in step 1 of the proof" in plan


def test_a_rate_that_changes_slowly_is_no_constant() -> None:
    """It would change the last bits of weights alone."""

    def make() -> Any:
        counter = Counter()

        def rate() -> float:
            return 1e-4 * (1 - 1e-4 * counter.next())

        return Classifier([dense(), head()], keras.optimizers.Adam(rate))

    assert "when replayed, it computes a different " in run_steps(make(), BATCHES).plan


def test_seeds_set_in_the_step() -> None:
    def step(task: Any, x: Any, y: Any) -> Any:
        torch.manual_seed(4)
        return {"loss": learn(task, x + torch.randn(x.shape), y)}

    assert "when replayed, it computes a different " in refusal(lambda: Steps(step))


def test_memory_that_is_recomputed_with_other_random_numbers() -> None:
    """PyTorch's checkpointing puts its generator back where no operation can be seen."""

    def step(task: Any, x: Any, y: Any) -> Any:
        def objective() -> Any:
            hidden = torch.utils.checkpoint.checkpoint(
                lambda x: torch.dropout(task.model.layers[0](x), 0.5, True), x, use_reentrant=False
            )
            return task.loss(y, task.model.layers[1](hidden))

        return treadle.minimize(objective, task.model, task.optimizer)

    assert "the proof" in refusal(lambda: Steps(step))


def test_steps_that_are_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.backends.torch.capture.tape.LONGEST", 20)
    task = Steps(lambda task, x, y: {"loss": learn(task, x, y)})
    assert "it has more than 20 operations, at " in run_steps(task, BATCHES[:1]).plan


# What only the proof's later steps can see: Python that reads a variable where nothing records it


class Viewed:
    """A step that reads a variable by a NumPy view of its memory.

    Args:
        value: The variable's value.
        dtype: Its dtype.
        use: A function of the task, the view and the batch's inputs that returns the inputs.
        added: What each step adds to the variable.
    """

    def __init__(self, value: Any, dtype: str, use: Callable[..., Any], added: float = 1) -> None:
        self.arguments = value, dtype, use, added

    def __call__(self) -> Any:
        value, dtype, use, added = self.arguments
        held = keras.Variable(value, dtype=dtype, trainable=False)
        view = held._value.detach().numpy()

        def step(task: Any, x: Any, y: Any) -> Any:
            x = use(task, view, x)
            task.held.assign_add(added)
            return {"loss": learn(task, x, y)}

        return Steps(step, held=held)


def larger(task: Any, view: Any, x: Any) -> Any:
    return x * 2.0 if view > 500 else x


@pytest.mark.parametrize(
    "make",
    [
        Viewed(0, "int32", larger),
        Viewed(0, "int64", larger, 0),
        Viewed(0.0, "float32", larger),
        Viewed(0.0, "float32", larger, 2.5),
        Viewed(0.8, "float32", lambda task, view, x: x * 2.0 if view < 0.5 else x, 0.0),
        Viewed(0.0, "float32", lambda task, view, x: x * 2.0 if view > 0.5 else x, 0.0),
    ],
    ids=["count", "set-by-others", "float-count", "float-steps", "temperature", "weight"],
)
def test_a_schedule_of_any_scalar_of_the_state(make: Viewed) -> None:
    why = refusal(make)
    assert why.startswith("when replayed, it computes a different "), why
    assert why.endswith(", in step 4 of the proof"), why


def test_an_error_that_only_a_later_step_raises() -> None:
    def use(task: Any, view: Any, x: Any) -> Any:
        if view >= 1 and context().build is None:
            raise ValueError("past the end")
        return x

    for execution in ("auto", "eager"):
        with pytest.raises(ValueError, match="past the end"):
            run_steps(
                Viewed(0, "int32", use)(), BATCHES, treadle.Options(execution=execution), (6,)
            )
    with pytest.raises(StepError) as caught:
        options = treadle.Options(execution="compiled")
        run_steps(Viewed(0, "int32", use)(), BATCHES, options, (6,))
    assert (
        "the step could not be captured: it fails when it runs eagerly: ValueError: past the end, "
        "in step 2 of the proof"
    ) in str(caught.value)


def test_an_error_that_only_a_far_step_raises() -> None:
    def use(task: Any, view: Any, x: Any) -> Any:
        if view >= 500:
            raise ValueError("past the end")
        return x

    assert refusal(Viewed(0, "int32", use)) == (
        "it fails when it runs eagerly: ValueError: past the end, in step 4 of the proof"
    )


def from_table(length: int, index: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a maker of a task that takes a number from a table, at an index of the state."""

    def step(task: Any, x: Any, y: Any) -> Any:
        scale = ops.take(task.table.value, index(task))
        task.held.assign_add(1)
        return {"loss": learn(task, x * scale, y)}

    def make() -> Any:
        table = keras.Variable(np.linspace(1, 2, length, dtype="float32"), trainable=False)
        return Steps(step, table=table, held=keras.Variable(0, dtype="int32", trainable=False))

    return make


def test_a_table_that_ends_before_the_proof_does() -> None:
    """Replays fail there too; but of the optimizer's count, some later step must be compared."""
    iterations, own = (lambda task: task.optimizer.iterations), (lambda task: task.held.value)
    assert run_steps(from_table(40, iterations)(), BATCHES[:3]).plan == CAPTURED
    assert run_steps(from_table(40, own)(), BATCHES[:3]).plan == CAPTURED
    assert run_steps(from_table(6, own)(), BATCHES[:3]).plan == CAPTURED
    plan = run_steps(from_table(6, iterations)(), BATCHES[:3]).plan
    assert "it fails when it runs eagerly: IndexError: " in plan
    assert plan.endswith(", in step 3 of the proof)")


# On another device: its kind is set here, and the steps run on a CPU


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treadle.backends.torch.capture.trials.device", lambda: "cuda")


def test_a_step_that_repeats_on_another_device_is_captured(on_gpu: None) -> None:
    deterministic: list[bool] = []

    def step(task: Any, x: Any, y: Any) -> Any:
        deterministic.append(torch.are_deterministic_algorithms_enabled())
        return {"loss": learn(task, x, y)}

    assert run_steps(Steps(step, keras.layers.Dropout(0.5)), BATCHES).plan == CAPTURED
    assert any(deterministic) and not deterministic[0]
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_step_that_does_not_repeat_on_another_device(on_gpu: None) -> None:
    """The order of a sum may change the last bits, as this does."""

    def make() -> Any:
        counter = Counter()

        def step(task: Any, x: Any, y: Any) -> Any:
            return {"loss": learn(task, x * (1 + 1e-6 * counter.next()), y)}

        return Steps(step)

    plan = run_steps(make(), BATCHES).plan
    assert re.fullmatch(
        r"eager \(the step could not be captured: when run twice on cuda, it computes a different "
        r"\S+, in step 1 of the proof\)",
        plan,
    ), plan


def test_last_bits_count_on_another_device(on_gpu: None) -> None:
    make = Viewed(0, "int32", lambda task, view, x: x * (1 + 1e-6 * float(view)))
    plan = run_steps(make(), BATCHES).plan
    assert "the step could not be captured: when replayed, it computes a different " in plan


# Errors of the step's own


def test_an_error_that_comes_only_where_it_is_recorded() -> None:
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


def test_compiled_execution_tells_what_could_not_be_captured() -> None:
    with pytest.raises(StepError) as caught:
        run_steps(Steps(by_number), BATCHES[:1], treadle.Options(execution="compiled"))
    assert re.fullmatch(
        "train_step cannot be compiled: the step could not be captured: "
        + PYTHON_VALUE
        + LINE
        + r"\. Let it run as Python with Options\(execution='auto'\)",
        str(caught.value),
    )
