"""What may be done with gradients, by hand on small numbers."""

from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile
from keras import ops

import treadle
from treadle import transforms
from treadle.errors import GradientError
from treadle.testing import run_steps

pytestmark = long_to_compile


def numbers(x: Any) -> Any:
    return np.asarray(ops.convert_to_numpy(ops.cast(x, "float32"))).tolist()


def grads() -> list[Any]:
    return [ops.array([[3.0, 0.0], [0.0, 4.0]]), ops.array([-12.0])]


def variables(*names: str) -> list[Any]:
    return [keras.Variable(np.zeros(2), name=name) for name in names]


def close(found: Any, *expected: Any) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(numbers(a), b, rtol=1e-6)


def test_clip_by_value() -> None:
    close(transforms.clip_by_value(grads(), 3.5), [[3, 0], [0, 3.5]], [-3.5])


def test_clip_by_norm_is_each_gradients_own() -> None:
    close(transforms.clip_by_norm(grads(), 2.5), [[1.5, 0], [0, 2]], [-2.5])
    close(transforms.clip_by_norm(grads(), 10.0), [[3, 0], [0, 4]], [-10])


def test_clip_by_global_norm_keeps_the_direction() -> None:
    clipped, norm = treadle.clip_by_global_norm(grads(), 6.5)  # the norm is 13
    assert numbers(norm) == 13
    close(clipped, [[1.5, 0], [0, 2]], [-6])
    same, _ = treadle.clip_by_global_norm(grads(), 13.5)
    close(same, [[3, 0], [0, 4]], [-12])


def test_gradients_of_zeros_stay_zeros() -> None:
    zeros = [ops.zeros((2,))]
    close(transforms.clip_by_norm(zeros, 1.0), [0, 0])
    clipped, norm = treadle.clip_by_global_norm(zeros, 1.0)
    close(clipped, [0, 0])
    assert numbers(norm) == 0


def test_an_infinite_gradient_is_not_hidden() -> None:
    clipped, norm = treadle.clip_by_global_norm([ops.array([1.0, np.inf])], 1.0)
    assert numbers(norm) == np.inf
    assert np.isnan(numbers(clipped[0])[1])


def test_a_limit_may_be_scheduled() -> None:
    close(transforms.clip_by_value(grads(), ops.array(2.0)), [[2, 0], [0, 2]], [-2])
    close(transforms.clip_by_norm(grads(), ops.array(5.0)), [[3, 0], [0, 4]], [-5])


@pytest.mark.parametrize("name", ["clip_by_value", "clip_by_norm", "clip_by_global_norm"])
@pytest.mark.parametrize("limit", [0, -1.0])
def test_a_limit_is_positive(name: str, limit: Any) -> None:
    with pytest.raises(GradientError) as caught:
        getattr(transforms, name)(grads(), limit)
    assert str(caught.value) == f"{name} needs a positive limit, not {limit!r}"


def test_each_list_of_a_dict_is_treated_by_itself() -> None:
    both = {"a": [ops.array([3.0, 4.0])], "b": [ops.array([0.6]), ops.array([0.8])]}
    clipped, norms = treadle.clip_by_global_norm(both, 2.5)
    assert {name: numbers(norm) for name, norm in norms.items()} == {"a": 5, "b": pytest.approx(1)}
    close(clipped["a"], [1.5, 2])
    close(clipped["b"], [0.6], [0.8])
    close(transforms.clip_by_norm(both, 2.5)["a"], [1.5, 2])
    close(transforms.clip_by_value(both, 3.0)["a"], [3, 3])
    close(transforms.centralized(both)["b"], [0.6], [0.8])
    assert list(transforms.with_noise(both)) == ["a", "b"]


def test_half_precision_has_a_norm_of_32_bits_and_stays_half() -> None:
    many = [ops.ones((1000,), "bfloat16")]
    clipped, norm = treadle.clip_by_global_norm(many, 1.0)
    assert numbers(norm) == pytest.approx(1000**0.5)
    assert keras.backend.standardize_dtype(norm.dtype) == "float32"
    for part in (clipped, transforms.with_noise(many), transforms.clip_by_value(many, 0.5)):
        assert keras.backend.standardize_dtype(part[0].dtype) == "bfloat16"


def test_norms_by_path() -> None:
    a, b = variables("a", "b")
    found = transforms.gradient_norms([ops.array([3.0, 4.0]), ops.array([0.0, 2.0])], [a, b])
    assert {name: numbers(norm) for name, norm in found.items()} == {"norm/a": 5, "norm/b": 2}
    found = transforms.gradient_norms({"x": [ops.ones(())], "y": [ops.ones(())]}, {"x": a, "y": b})
    assert list(found) == ["norm/x/a", "norm/y/b"]


def test_norms_of_a_model_that_the_first_step_builds() -> None:
    class Task(treadle.Task):
        def __init__(self) -> None:
            self.model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.SGD(0.1)

        def train_step(self, batch: Any) -> Any:
            variables = self.model.trainable_variables
            loss, grads = treadle.gradients(lambda: ops.mean(self.model(batch) ** 2), variables)
            variables = self.model.trainable_variables
            norms = transforms.gradient_norms(grads, variables)
            self.optimizer.apply(grads, variables)
            return {"loss": loss, **norms}

    trace = run_steps(Task(), [np.ones((4, 3), "float32")] * 2)
    assert list(trace.values) == [
        "loss",
        *(f"norm/model/layers/{i}/{name}" for i in (0, 1) for name in ("kernel", "bias")),
    ]


def test_factors_go_by_the_first_pattern_that_matches() -> None:
    owners = variables("body_kernel", "head_kernel", "head_bias")
    ones = [ops.ones((2,)) for _ in owners]
    scaled = transforms.scaled_by(ones, owners, {"*bias": 0.0, "head*": ops.array(3.0)})
    close(scaled, [1, 1], [3, 3], [0, 0])
    named = transforms.scaled_by({"a": ones[:1]}, {"a": owners[:1]}, {"body*": 2})
    close(named["a"], [2, 2])


def test_patterns_match_paths_in_the_task_and_names_of_layers() -> None:
    class Task(treadle.Task):
        def __init__(self) -> None:
            self.model = keras.Sequential(
                [keras.layers.Dense(2, name="body"), keras.layers.Dense(1, name="head")]
            )
            self.optimizer = keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)

        def train_step(self, batch: Any) -> Any:
            chosen = transforms.trainable(
                self.model, only=["model/layers/1/*", "*/body/kernel"], frozen="*/head/bias"
            )
            loss = treadle.minimize(
                lambda: ops.mean(self.model(batch) ** 2), chosen, self.optimizer
            )
            return {"loss": loss}

    trace = run_steps(Task(), [np.ones((4, 3), "float32")] * 2)
    weights = {path for path in trace.changed if path.startswith("model")}
    assert weights == {"model/layers/0/kernel", "model/layers/1/kernel"}
    slots = [path for path in trace.state if path.startswith("optimizer/momentums")]
    assert len(slots) == 2  # what is frozen has none


def test_a_pattern_that_matches_nothing() -> None:
    owners = variables("body", "head")
    message = "the pattern 'haed' matches no variable. Did you mean 'head'? Known: body, head."
    with pytest.raises(GradientError) as caught:
        transforms.scaled_by([ops.ones(2), ops.ones(2)], owners, {"haed": 2.0})
    assert str(caught.value) == f"scaled_by: {message}"
    for how in ({"only": "haed"}, {"frozen": ["haed"]}):
        with pytest.raises(GradientError) as caught:
            transforms.trainable(owners, **how)
        assert str(caught.value) == f"trainable: {message}"


def test_gradients_and_variables_that_do_not_belong_together() -> None:
    with pytest.raises(GradientError) as caught:
        transforms.gradient_norms([ops.ones(2)], variables("a", "b"))
    assert str(caught.value) == (
        "there are 1 gradients, but 2 variables: pass the variables that treadle.gradients was "
        "given, in the same order"
    )
    with pytest.raises(GradientError) as caught:
        transforms.scaled_by({"a": [ops.ones(2)]}, variables("a"), {"a": 1.0})
    assert str(caught.value) == (
        "there are gradients for ['a'], but variables for list: pass what treadle.gradients was "
        "given"
    )


def test_noise_has_the_papers_variance_and_fades() -> None:
    zeros, seed = [ops.zeros((40_000,))], keras.random.SeedGenerator(0)
    for eta, gamma, step in ((0.3, 0.55, 0), (1.0, 0.55, 99), (4.0, 1.0, ops.array(3))):
        (noise,) = transforms.with_noise(zeros, eta, gamma, step, seed)
        noise = ops.convert_to_numpy(noise)
        expected = eta / (1 + int(step)) ** gamma
        assert noise.var() == pytest.approx(expected, rel=0.05)
        assert abs(noise.mean()) < 0.03


def test_noise_goes_by_the_running_step_and_differs_between_gradients() -> None:
    class Task(treadle.Task):
        def __init__(self) -> None:
            self.seed, self.w = keras.random.SeedGenerator(0), keras.Variable(np.zeros(5000))

        def train_step(self, batch: Any) -> Any:
            first, second = transforms.with_noise(
                [ops.zeros((5000,))] * 2, eta=1.0, gamma=1.0, seed=self.seed
            )
            self.w.assign(first)
            return {"variance": ops.var(first), "apart": ops.mean(ops.abs(first - second))}

    trace = run_steps(Task(), [np.ones(2, "float32")] * 4)
    np.testing.assert_allclose(trace.values["variance"], [1, 1 / 2, 1 / 3, 1 / 4], rtol=0.1)
    assert (trace.values["apart"] > 0.1).all()


def test_a_number_is_no_seed_of_noise() -> None:
    with pytest.raises(GradientError) as caught:
        transforms.with_noise(grads(), seed=1)
    assert str(caught.value) == (
        "with_noise(seed=1) would add the same noise in each step: keep a "
        "keras.random.SeedGenerator in the task and pass it"
    )


def test_centralized_subtracts_the_mean_of_each_output() -> None:
    kernel = np.arange(12, dtype="float32").reshape(2, 3, 2)  # as of a convolution
    found = transforms.centralized([ops.array(kernel), ops.array([1.0, 5.0]), ops.array(2.0)])
    close(found, kernel - kernel.mean(axis=(0, 1)), [1, 5], 2)
