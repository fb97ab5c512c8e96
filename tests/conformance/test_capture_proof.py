"""PyTorch: what only the proof of a captured step can see is refused by name, and runs as it is."""

import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import Classifier, dense, head
from keras import ops
from own_step import CAPTURED, Steps, learn
from refusals import BATCHES, refusal

import treadle
from treadle.backends.step_context import context
from treadle.errors import StepError
from treadle.testing import run_steps

if keras.config.backend() != "torch":
    pytest.skip("PyTorch's way to compile a step", allow_module_level=True)

import random

import torch

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
        return {"loss": learn(task, x + torch.randn_like(x), y)}

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
        if held._value.device.type != "cpu":
            pytest.skip("assumes a CPU: NumPy has no view of other memory")
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


@pytest.mark.usefixtures("assumes_cpu")  # else a device is lost
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
def on_gpu(monkeypatch: pytest.MonkeyPatch, assumes_cpu: None) -> None:
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
