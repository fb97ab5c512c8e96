"""Gradients and what goes with them, by hand on small numbers, outside of any loop.

That the same holds inside compiled steps is what test_matrix.py shows.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from cases import ActivityLoss
from executions import long_to_compile
from keras import ops

import treadle


def number(x: Any) -> float:
    return float(ops.convert_to_numpy(x))


def slope_of(function: Callable[[float], float], at: float, width: float = 1e-2) -> float:
    """A central difference."""
    return (function(at + width) - function(at - width)) / (2 * width)


def test_losses_of_one_forward_pass_each_for_its_own_variables() -> None:
    a, b, calls = keras.Variable(2.0), keras.Variable(3.0), []

    def objective() -> Any:
        calls.append(1)
        return {"product": a * b, "square": b * b}, "extra"

    (losses, extra), grads = treadle.gradients(objective, {"product": [a, b], "square": [b]})
    assert len(calls) <= 2  # JAX traces it for its form first
    assert {name: number(loss) for name, loss in losses.items()} == {"product": 6, "square": 9}
    assert extra == "extra"
    assert [number(g) for g in grads["product"]] == [3, 2]
    assert [number(g) for g in grads["square"]] == [6]


def test_weighted_losses_have_the_gradients_of_their_values() -> None:
    a, b = keras.Variable(2.0), keras.Variable(3.0)

    def objective() -> Any:
        losses = {"product": treadle.weighted(a * b, a), "square": b * b}
        return losses, treadle.weighted(a, 5)

    (losses, extra), grads = treadle.gradients(objective, {"product": [a, b], "square": [b]})
    assert (number(losses["product"].value), number(losses["product"].weight)) == (6, 2)
    assert (number(extra.value), extra.weight) == (2, 5)
    assert [number(g) for g in grads["product"]] == [3, 2]
    _, (outer,) = treadle.gradients(lambda: losses["product"].value * a, [a])
    assert number(outer) == 6  # the returned value is a constant


def test_weights_that_are_no_numbers() -> None:
    w = keras.Variable(2.0)
    cases = {
        "the weight of the loss must be a number, not NoneType: pass the number of items": None,
        "the weight of the loss must be a number, not str": "many",
        "the weight of the loss must be a scalar, but has shape": ops.ones((2,)),
    }
    for message, weight in cases.items():
        with pytest.raises(treadle.errors.GradientError, match=message):
            treadle.gradients(lambda weight=weight: treadle.weighted(w * w, weight), [w])
    with pytest.raises(
        treadle.errors.GradientError, match="the loss is weighted twice: call treadle"
    ):
        treadle.gradients(lambda: treadle.weighted(treadle.weighted(w * w, 2), 3), [w])


def test_weighted_scalars_do_not_leave_branches_and_loops() -> None:
    w, one = keras.Variable(2.0), ops.ones(())
    calls: dict[str, Callable[[], Any]] = {
        "branch of cond": lambda: treadle.cond(
            one > 0, lambda: treadle.weighted(w * w, 2.0), lambda: treadle.weighted(one, 0.0)
        ),
        "function of for_each": lambda: treadle.for_each(
            lambda x: treadle.weighted(x, x), ops.ones((2,))
        ),
        "function of remat": lambda: treadle.remat(lambda x: treadle.weighted(x * w, 2))(one),
    }
    for what, call in calls.items():
        with pytest.raises(
            treadle.errors.StepError, match=rf"a {what} returned treadle.weighted\(…\)"
        ):
            call()


def test_an_infinite_loss_does_not_leak_into_the_others_gradient() -> None:
    a = keras.Variable(2.0)
    _, grads = treadle.gradients(
        lambda: {"finite": a * a, "infinite": ops.log(a - 2.0)}, {"finite": [a], "infinite": [a]}
    )
    assert number(grads["finite"][0]) == 4
    assert not np.isfinite(number(grads["infinite"][0]))


def test_a_variable_named_twice_has_its_gradient_twice() -> None:
    a = keras.Variable(2.0)
    _, grads = treadle.gradients(lambda: a * a, [a, a])
    assert [number(g) for g in grads] == [4, 4]


def test_zeros_have_the_form_of_their_variables() -> None:
    a, b = keras.Variable(2.0), keras.Variable(np.ones((2, 3)), dtype="bfloat16")
    _, (_, zeros) = treadle.gradients(lambda: a * a, [a, b], unreached="zeros")
    assert tuple(zeros.shape) == (2, 3)
    assert keras.backend.standardize_dtype(zeros.dtype) == "bfloat16"
    assert not ops.convert_to_numpy(ops.any(ops.cast(zeros, "bool")))


def test_variables_reached_without_effect_have_zero_gradients_and_no_error() -> None:
    a = keras.Variable(-2.0)
    _, (gradient,) = treadle.gradients(lambda: ops.relu(a) + 0.0 * a, [a])
    assert number(gradient) == 0


def test_extras_are_constants_outside() -> None:
    a = keras.Variable(2.0)

    def outer() -> Any:
        (_, squared), _ = treadle.gradients(lambda: (a * 3.0, a * a), [a])
        return a + ops.stop_gradient(squared)

    loss, (gradient,) = treadle.gradients(outer, [a])
    assert number(loss) == 6
    assert number(gradient) == 1


def test_embeddings_have_dense_gradients() -> None:
    layer = keras.layers.Embedding(4, 2)
    layer.build()
    _, (gradient,) = treadle.gradients(lambda: ops.sum(layer(ops.array([1, 1, 3]))), layer)
    assert ops.convert_to_numpy(gradient).tolist() == [[0, 0], [2, 2], [0, 0], [1, 1]]


def test_input_gradients_of_several_inputs_and_their_gradient() -> None:
    a = keras.Variable(3.0)
    x, y = ops.array([1.0, 2.0]), ops.array([3.0, 4.0])
    (value, extra), (dx, dy) = treadle.input_gradients(
        lambda x, y: (ops.sum(a * x * y), "extra"), x, y
    )
    assert (number(value), extra) == (33, "extra")
    assert ops.convert_to_numpy(dx).tolist() == [9, 12]
    assert ops.convert_to_numpy(dy).tolist() == [3, 6]

    def penalty() -> Any:
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(a * a * x), x)
        return ops.sum(slope)

    _, (gradient,) = treadle.gradients(penalty, [a])
    assert number(gradient) == pytest.approx(2 * 2 * 3)


def test_a_step_of_meta_learning_agrees_with_finite_differences() -> None:
    weight, bias = keras.Variable(0.7), keras.Variable(-0.2)
    x, y = ops.array([0.5, 1.0, -1.5]), ops.array([1.0, 0.0, 0.5])

    def loss() -> Any:
        return ops.mean((ops.tanh(weight * x + bias) - y) ** 2)

    def adapted_loss() -> Any:
        variables = [weight, bias]
        _, grads = treadle.gradients(loss, variables)
        values = [ops.convert_to_tensor(v) - 0.5 * g for v, g in zip(variables, grads, strict=True)]
        with treadle.substituted(variables, values):
            return loss()

    def at(value: float) -> float:
        weight.assign(value)
        return number(adapted_loss())

    expected = slope_of(at, 0.7)
    weight.assign(0.7)
    _, (gradient,) = treadle.gradients(adapted_loss, [weight])
    assert number(gradient) == pytest.approx(expected, rel=1e-3)


def of_a_variance() -> Callable[[Any], Any]:
    x = ops.array([0.5, 1.0, 3.0])
    return lambda a: ops.moments(ops.sin(a * x), axes=[0])[1]


def of_normalization() -> Callable[[Any], Any]:
    x = ops.array([[0.5, 1.0, 3.0], [1.0, 2.0, 0.3], [0.2, 0.1, 0.9]])
    weights = ops.array([1.0, 2.0, 4.0])
    first, second = keras.layers.LayerNormalization(), keras.layers.BatchNormalization()
    for layer in (first, second):
        layer.build((3, 3))
    return lambda a: ops.mean(weights * second(first(ops.sin(a * x)), training=True) ** 3)


@pytest.mark.parametrize(
    ("make", "rtol"),
    [(of_a_variance, 1e-2), pytest.param(of_normalization, 2e-2, marks=long_to_compile)],
)
def test_second_derivatives(make: Any, rtol: float) -> None:
    a, loss = keras.Variable(1.0), make()

    def slope() -> Any:
        return treadle.gradients(lambda: loss(a), [a])[1][0]

    def at(value: float) -> float:
        a.assign(value)
        return number(slope())

    expected = slope_of(at, 1.0)
    a.assign(1.0)
    _, (second,) = treadle.gradients(slope, [a])
    assert number(second) == pytest.approx(expected, rel=rtol)


def test_assignments_inside_an_objective_are_kept() -> None:
    a, count = keras.Variable(2.0), keras.Variable(0, dtype="int32", trainable=False)
    norm, noise = keras.layers.BatchNormalization(), keras.random.SeedGenerator(1)
    norm.build((2, 3))
    mean = keras.metrics.Mean()

    def objective() -> Any:
        count.assign_add(1)
        x = keras.random.normal((2, 3), seed=noise)
        loss = ops.mean(norm(a * x + 1.0, training=True)) + a
        mean.update_state(ops.stop_gradient(loss))
        return loss

    treadle.gradients(objective, [a])
    assert number(count) == 1
    assert ops.convert_to_numpy(noise.state)[1] == 1
    assert np.abs(ops.convert_to_numpy(norm.moving_mean)).min() > 0
    assert number(mean.result()) == pytest.approx(2, abs=1e-5)


def test_an_assigned_variable_is_differentiated_at_its_new_value() -> None:
    a = keras.Variable(3.0)

    def objective() -> Any:
        a.assign(2.0)
        return a * a

    loss, (gradient,) = treadle.gradients(objective, [a])
    assert number(loss) == 4
    assert number(gradient) == 4
    assert number(a) == 2


def test_losses_that_layers_add() -> None:
    model = keras.Sequential([keras.Input((2,)), ActivityLoss()])
    scale = keras.Variable(2.0)

    def objective() -> Any:
        model(scale * ops.ones((1, 2)))
        return sum(model.losses)

    loss, (gradient,) = treadle.gradients(objective, [scale])
    assert number(loss) == pytest.approx(1e-2 * 4)
    assert number(gradient) == pytest.approx(1e-2 * 2)


def test_substituted_restores_its_variables_and_keeps_other_changes() -> None:
    a, count = keras.Variable(2.0), keras.Variable(0.0, trainable=False)
    with treadle.substituted([a], [5.0]):
        assert number(a) == 5
        count.assign(number(a))
        a.assign(7.0)
        assert number(a) == 7
        with treadle.substituted([a], [9.0]):
            count.assign_add(number(a))
        assert number(a) == 7
    assert number(a) == 2
    assert number(count) == 14


def test_variables_stand_in_for_one_another_and_for_themselves() -> None:
    """As the weights do that no inner step of meta-learning has changed yet."""
    a, b = keras.Variable(2.0), keras.Variable(5.0)
    with treadle.substituted([a, b], [b, a]):
        assert (number(a), number(b)) == (5, 2)
        b.assign(7.0)
        assert number(a) == 5

    def objective() -> Any:
        with treadle.substituted([a], [a]):
            return a * a * b

    loss, (gradient,) = treadle.gradients(objective, [a])
    assert (number(loss), number(gradient)) == (20, 20)


def test_cond_takes_one_branch_and_what_it_changes_survives() -> None:
    a = keras.Variable(1.0)
    taken: list[float] = []
    for predicate in (True, False, ops.array(3) > 2, ops.array(1) > 2):
        treadle.cond(predicate, lambda: a.assign_add(10.0) and None, lambda: None)
        taken.append(number(a))
    assert taken == [11, 11, 21, 21]


def test_for_each_carries_what_it_changes_from_row_to_row() -> None:
    total = keras.Variable(0.0)

    def row(x: Any) -> Any:
        total.assign_add(x["a"])
        return {"so_far": ops.convert_to_tensor(total), "twice": 2.0 * x["b"]}

    rows = treadle.for_each(row, {"a": ops.array([1.0, 2.0, 3.0]), "b": ops.ones((3, 2))})
    assert ops.convert_to_numpy(rows["so_far"]).tolist() == [1, 3, 6]
    assert ops.convert_to_numpy(rows["twice"]).tolist() == [[2, 2]] * 3
    assert number(total) == 6
