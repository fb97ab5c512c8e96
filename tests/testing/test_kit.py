"""The conformance kit itself: what it finds, how it says so, and what it leaves alone."""

from pathlib import Path
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
from cases import batches_of
from classifier import Classifier, dense, head
from gradient_tasks import Substituted

import treadle
from treadle.checkpoint.arrays import write_arrays
from treadle.errors import ConfigurationError, StateError, StepError
from treadle.testing import (
    Trace,
    agree,
    compiled_equals_eager,
    fused_equals_unfused,
    load_trace,
    run_steps,
    same_start,
    save_trace,
)
from treadle.testing.trace import compare

BATCHES = batches_of("unbuilt", 4)


def make() -> treadle.Task:
    return Classifier([dense(), keras.layers.BatchNormalization(), head()])


class Remembers(Classifier):
    """Has a function with a list of its own, which grows with every call of Python."""

    def __init__(self) -> None:
        super().__init__([dense(), head()])
        seen: list[int] = []

        def remember() -> float:
            if treadle.backends.step_context.context().build is None:
                seen.append(len(seen))
            return float(len(seen))

        self.remember = remember

    def train_step(self, batch: Any) -> Any:
        return {"loss": super().train_step(batch)["loss"] + self.remember()}


def trace(loss: Any = (1.0, 0.5), weights: Any = None, dtype: str = "float32", **state: Any) -> Any:
    values = {"loss": np.array(loss, dtype)}
    arrays = {path.replace("__", "/"): np.array(value) for path, value in state.items()}
    return Trace(values, weights or {}, arrays, arrays, "jax", "a plan")


def test_a_correct_task_passes_the_kit() -> None:
    fused_equals_unfused(make, BATCHES)
    compiled_equals_eager(make, BATCHES)


def test_state_outside_of_variables_is_found() -> None:
    # Where a step is captured, what it keeps is seen before anything is compared.
    kept = r"step \d: loss is \d.* (but|in)|train_step changes Python values \(.*seen changed"
    with pytest.raises((AssertionError, StepError), match=kept):
        fused_equals_unfused(Remembers, BATCHES)
        compiled_equals_eager(Remembers, BATCHES)


def test_a_scalar_that_differs_in_one_bit_is_named() -> None:
    a, b = trace((1.0,), scale=0.0), trace((1.0,), scale=-0.0)
    with pytest.raises(
        AssertionError, match=r"^after 1 steps: scale is 0\.0 one, but -0\.0 other$"
    ):
        compare(a, b, "one", "other", None)


def test_the_first_difference_is_named_with_both_numbers() -> None:
    a = trace((1.0, 0.5, 0.25), model__kernel=[[1.0, 2.0], [3.0, 4.0]])
    cases = {
        "step 2: loss is 0.5 on jax, but 0.75 on jax": trace((1.0, 0.75, 0.5)),
        "after 3 steps: model/kernel[1, 0] is 3.0 on jax, but 5.0 on jax "
        "(2 of its 4 numbers differ)": trace(
            (1.0, 0.5, 0.25), model__kernel=[[1.0, 2.0], [5.0, 6.0]]
        ),
        "the state holds different names: only on jax: model/kernel; only on jax: other": trace(
            (1.0, 0.5, 0.25), other=1.0
        ),
        "model/kernel is float64 of shape (2, 2) on jax, but float64 of shape (2,) on jax": trace(
            (1.0, 0.5, 0.25), model__kernel=[1.0, 2.0]
        ),
        "loss is float32 of shape (3,) on jax, but int64 of shape (3,) on jax": trace(
            (1, 0, 0), dtype="int64"
        ),
    }
    for message, b in cases.items():
        with pytest.raises(AssertionError) as caught:
            agree(a, b)
        assert str(caught.value) == message


def test_weights_of_values_are_compared() -> None:
    by = [{"loss": np.array([1.0, 2.0])}, {"loss": np.array([1.0, 3.0])}]
    with pytest.raises(AssertionError, match=r"step 2: the weight of loss is 2.0 on jax, but 3.0"):
        agree(trace(weights=by[0]), trace(weights=by[1]))


def test_rounding_agrees_and_whole_numbers_must_be_equal() -> None:
    agree(trace((1.0, 0.5), w=[100.0, 1e-3]), trace((1.00005, 0.5), w=[100.0, 2e-3]))
    agree(trace(n=np.int32(3)), trace(n=np.uint32(3)))
    agree(trace((np.nan, np.inf)), trace((np.nan, np.inf)))
    agree(trace(w=1.0), trace(w=2.0), state=False)
    with pytest.raises(AssertionError, match="n is 3 on jax, but 4"):
        agree(trace(n=3), trace(n=4))
    for other in (0.0, np.inf):
        with pytest.raises(AssertionError, match="loss is nan"):
            agree(trace((np.nan, 1.0)), trace((other, 1.0)))


def test_traces_survive_their_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.safetensors"
    half = np.array([1.0, 2.5], ml_dtypes.bfloat16)
    kept = trace(model__half=half, flag=True, counter=np.uint32(7), empty=np.zeros((0, 3)))
    kept.weights["loss"] = np.array([3.0, 4.0])
    save_trace(kept, file)
    found = load_trace(file)
    assert (found.backend, found.plan) == ("jax", "a plan")
    for part in ("values", "weights", "start", "state"):
        before, after = getattr(kept, part), getattr(found, part)
        assert list(before) == list(after)
        for name in before:
            assert before[name].dtype == after[name].dtype
            assert before[name].shape == after[name].shape
            np.testing.assert_array_equal(before[name], after[name])
    write_arrays(file, {"a": half})
    with pytest.raises(StateError) as caught:
        load_trace(file)
    assert str(caught.value) == (
        f"{file} holds arrays, but no trace (KeyError: 'about'). Name a file that "
        "treadle.testing.save_trace wrote"
    )
    with pytest.raises(StateError, match=r"trace\.npz is not the name of a file of arrays"):
        save_trace(kept, tmp_path / "trace.npz")


def test_changed_names_what_changed_in_any_bit() -> None:
    start = {"a": np.array(0.0), "b": np.array([1.0])}
    end = {"a": np.array(-0.0), "b": np.array([1.0])}
    assert Trace({}, {}, start, end, "jax", "").changed == {"a"}


def test_same_start_draws_what_was_drawn_and_nothing_else() -> None:
    found = []
    for seed in (1, 2):
        keras.utils.set_random_seed(seed)
        task = Classifier([keras.Input((6,)), dense(), keras.layers.BatchNormalization(), head()])
        task.frozen = treadle.frozen_copy(task.model)
        before = treadle.steps.state.State.discover(task).arrays()
        same_start(task, seed=5)
        after = treadle.steps.state.State.discover(task).arrays()
        kernels = {path for path in after if path.endswith("kernel")}
        assert len(kernels) == 4
        for path in before:
            assert np.array_equal(before[path], after[path]) == (path not in kernels), path
        found.append(after)
    for path in kernels:
        np.testing.assert_array_equal(found[0][path], found[1][path])
    limit = np.sqrt(6 / (6 + 5))
    kernel = found[0]["model/layers/0/kernel"]
    assert limit / 2 < np.abs(kernel).max() <= limit


def test_same_start_needs_built_layers() -> None:
    with pytest.raises(StateError, match=r"same_start needs built layers, and 'sequential.*' is"):
        same_start(make())


def test_run_steps_continues_from_the_current_state_of_the_task() -> None:
    task = make()
    first = run_steps(task, BATCHES, start=1)
    second = run_steps(task, BATCHES)
    assert second.start["optimizer/iterations"] == len(BATCHES)
    for path, array in first.state.items():
        np.testing.assert_array_equal(array, second.start[path])
    assert second.backend == keras.config.backend()
    assert second.plan


def test_arguments_that_cannot_be_run() -> None:
    for check in (
        fused_equals_unfused,
        compiled_equals_eager,
        lambda make, x: run_steps(make(), x),
    ):
        with pytest.raises(ConfigurationError, match="there are no batches to run a step on"):
            check(make, [])
    for windows in ((), (0,), (2, 0)):
        with pytest.raises(ConfigurationError, match="windows must be sizes of at least 1, not"):
            run_steps(make(), BATCHES, windows=windows)


def test_random_states_outside_are_as_before_a_check() -> None:
    from cases import CASES

    fused_equals_unfused(CASES["dropout-unseeded"].make, BATCHES[:3])
    fused_equals_unfused(Substituted, BATCHES[:2], partitions=((2,),))
