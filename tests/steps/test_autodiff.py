"""Functions that steps call, where no backend is involved; the rest is in tests/conformance."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from treadle.backends.step_context import Build, StepContext, context, running
from treadle.errors import GradientError, OwnershipError, StepError
from treadle.steps.helpers import raise_violations


def weight(value: Any = 2.0, name: str = "w") -> keras.Variable:
    return keras.Variable(value, name=name)


def number(tensor: Any) -> float:
    return float(ops.convert_to_numpy(tensor))


# Gradients


def test_variables_come_as_lists_tuples_models_or_alone() -> None:
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    a = weight(3.0)
    for variables in ([a], (a,), a):
        _, (gradient,) = treadle.gradients(lambda: a * a, variables)
        assert number(gradient) == 6
    _, grads = treadle.gradients(lambda: ops.sum(layer(ops.ones((1, 1)))), layer)
    assert [tuple(g.shape) for g in grads] == [(1, 1), (1,)]


def test_variables_that_listed_layers_share_come_once() -> None:
    layer = keras.layers.Dense(1)
    layer.build((None, 1))
    a, optimizer = weight(3.0), keras.optimizers.SGD(0.1)
    before = number(layer.bias[0])

    def objective() -> Any:
        return ops.sum(layer(ops.ones((1, 1)))) + a * a

    treadle.minimize(objective, [layer, a, keras.Sequential([layer]), layer.bias], optimizer)
    assert number(layer.bias[0]) == pytest.approx(before - 0.1)
    assert number(a) == pytest.approx(3.0 - 0.1 * 6)


def test_a_tuple_is_a_loss_and_anything() -> None:
    a = weight()
    result, _ = treadle.gradients(lambda: (a * a, "extra", [1, None]), [a])
    assert number(result[0]) == 4
    assert result[1:] == ("extra", [1, None])


@pytest.mark.parametrize("unreached", ["zero", None, True])
def test_unreached_is_one_of_two(unreached: Any) -> None:
    with pytest.raises(GradientError) as caught:
        treadle.gradients(lambda: weight(), [weight()], unreached=unreached)
    assert str(caught.value) == f"unreached must be 'error' or 'zeros', not {unreached!r}"


def test_the_loss_is_computed_by_a_function() -> None:
    a, sgd = weight(), keras.optimizers.SGD(0.1)
    message = (
        "the objective must be a function that computes the loss, not a .*: write lambda: self"
    )
    for call in (
        lambda: treadle.gradients(a * a, [a]),
        lambda: treadle.minimize(ops.square(a), [a], sgd),
    ):
        with pytest.raises(GradientError, match=message):
            call()
    expected = (
        "minimize got an optimizer in the place of the variables: write "
        "treadle.minimize(objective, self.model, self.optimizer)"
    )
    with pytest.raises(GradientError) as caught:
        treadle.minimize(lambda: a * a, sgd, [a])
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("variables", "whose"),
    [([], ""), (keras.layers.Dense(1), ""), ({"a": []}, " for 'a'")],
    ids=["list", "unbuilt", "dict"],
)
def test_no_variables(variables: Any, whose: str) -> None:
    with pytest.raises(GradientError) as caught:
        treadle.gradients(lambda: {"a": weight()}, variables)
    assert str(caught.value) == (
        f"gradients over no variables{whose}: pass the variables that the loss is to change, for "
        "example model.trainable_variables (a model that is not yet built, or with trainable = "
        "False, has none)"
    )


def test_input_gradients_need_inputs_of_floats() -> None:
    with pytest.raises(GradientError) as caught:
        treadle.input_gradients(lambda: 1.0)
    assert str(caught.value) == (
        "input_gradients needs at least one input: input_gradients(function, x)"
    )
    with pytest.raises(GradientError, match="input 1 has dtype bool: only float tensors have"):
        treadle.input_gradients(lambda a, b: a, 1.0, True)


@pytest.mark.parametrize(
    ("optimizers", "found"),
    [
        ({"a": 1}, "optimizers for ['a']"),
        ({"a": 1, "b": 2, "c": 3}, "optimizers for ['a', 'b', 'c']"),
        (keras.optimizers.SGD(), "optimizers for SGD"),
    ],
)
def test_minimize_needs_an_optimizer_for_each(optimizers: Any, found: str) -> None:
    with pytest.raises(GradientError) as caught:
        treadle.minimize(lambda: {}, {"a": [weight()], "b": [weight()]}, optimizers)
    assert str(caught.value) == (
        f"minimize got variables for ['a', 'b'] and {found}: pass a dict of optimizers with the "
        "same names"
    )


def test_minimize_gives_each_optimizer_its_own() -> None:
    a, b = weight(1.0, "a"), weight(1.0, "b")
    optimizers = {"a": keras.optimizers.SGD(0.1), "b": keras.optimizers.SGD(0.2)}
    losses = treadle.minimize(
        lambda: {"a": a * b, "b": 3.0 * a * b}, {"a": [a], "b": [b]}, optimizers
    )
    assert [number(losses[name]) for name in ("a", "b")] == [1, 3]
    assert number(a) == pytest.approx(0.9)
    assert number(b) == pytest.approx(0.4)


# Substituted values


def test_as_many_values_as_variables() -> None:
    with pytest.raises(StepError) as caught, treadle.substituted([weight()], [1.0, 2.0]):
        pass
    assert str(caught.value) == "substituted got 1 variables and 2 values: one for each"


def test_values_of_the_variables_shape_and_dtype() -> None:
    a = keras.Variable([1.0, 2.0], name="a")
    with pytest.raises(StepError) as caught, treadle.substituted([a], [ops.ones((3,))]):
        pass
    assert str(caught.value) == (
        "substituted value for a has shape (3,), but the variable has (2,)"
    )
    with treadle.substituted([a], [[5, 6]]):
        assert keras.backend.standardize_dtype(a.value.dtype) == "float32"
        assert ops.convert_to_numpy(a.value).tolist() == [5, 6]


def test_an_error_inside_leaves_the_variables_as_they_were() -> None:
    a = weight()
    with pytest.raises(ZeroDivisionError), treadle.substituted([a], [5.0]):
        _ = 1 / 0
    assert number(a) == 2


# Around a step


def test_outside_of_a_loop_there_is_a_bare_context() -> None:
    assert int(treadle.step()) == 0
    assert context() is context()
    with running(StepContext(number=7)):
        assert int(treadle.step()) == 7
        with running(StepContext(number=8)):
            assert int(treadle.step()) == 8
        assert int(treadle.step()) == 7
    assert context().depth == 0


def test_cond_of_python_booleans() -> None:
    assert treadle.cond(True, lambda: "then", lambda: "otherwise") == "then"
    assert treadle.cond(False, lambda: "then", lambda: "otherwise") == "otherwise"


def test_a_dry_run_executes_both_branches_and_differentiates_nothing() -> None:
    a, taken = weight(), []
    found = Build()
    with running(StepContext(build=found)):
        treadle.cond(True, lambda: taken.append("then"), lambda: taken.append("otherwise"))
        _, (gradient,) = treadle.gradients(lambda: a * a, [a])
        _, grads = treadle.gradients(lambda: {"a": a * a, "b": a * a}, {"a": [], "b": [a]})
        rows = treadle.for_each(lambda row: {"x": row}, ops.ones((3, 2)))
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(x), ops.ones((2,)))
    assert sorted(taken) == ["otherwise", "then"]
    assert number(gradient) == 0
    assert [len(part) for part in grads.values()] == [0, 1]
    assert tuple(rows["x"].shape) == (3, 2)
    assert tuple(slope.shape) == (2,)
    assert found.differentiated


# Phases


def phases(a: Any, b: Any, change: Any) -> list[str]:
    """The messages of what `change` changed while a phase owned `a` alone."""
    step = StepContext(checked=True, variables={"a": a, "b": b})
    with running(step), treadle.phase("first", owns=[a]):
        change()
    return [message for message, flag in step.violations if bool(ops.convert_to_numpy(flag))]


def test_a_phase_may_change_what_it_owns() -> None:
    a, b = weight(), weight([1.0, np.nan])
    assert phases(a, b, lambda: a.assign(5.0)) == []
    assert phases(a, b, lambda: b.assign(b.value * 1.0)) == []  # NaN stays NaN
    message = "phase 'first' changed b, which it does not own"
    assert phases(a, b, lambda: b.assign([1.0, 2.0])) == [message]
    assert phases(a, b, lambda: b.assign([np.nan, 2.0])) == [message]


def test_owning_takes_models_optimizers_lists_and_variables() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization()])
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    a = weight()
    everything = [*model.variables, *optimizer.variables, a]
    step = StepContext(checked=True, variables={str(i): v for i, v in enumerate(everything)})
    with running(step), treadle.phase("all", owns=[model, [optimizer, (a,)]]):
        pass
    assert step.violations == []


def test_violations_are_reported_together_and_once() -> None:
    raise_violations([])
    with pytest.raises(OwnershipError) as caught:
        raise_violations(["one", "two", "one"])
    assert str(caught.value) == (
        "one; two: add it to owns=[…], or freeze it with trainable = False"
    )


# Followers


def test_blend_needs_equal_variables() -> None:
    with pytest.raises(StepError) as caught:
        treadle.blend([weight(), weight()], [weight([1.0])], 0.5)
    assert str(caught.value) == (
        "blend needs equal variables on both sides: the target has 2 with shapes [(), ()], the "
        "source 1 with [(1,)]"
    )


@pytest.mark.parametrize("amount", [0.0, 0.25, 1.0])
def test_blend_moves_floats_and_copies_whole_numbers(amount: float) -> None:
    into = [weight(1.0), keras.Variable(3, dtype="int32", trainable=False)]
    treadle.blend(into, [weight(2.0), keras.Variable(8, dtype="int32", trainable=False)], amount)
    assert number(into[0]) == 1 + amount
    assert number(into[1]) == 8


def test_frozen_copies_need_a_built_model() -> None:
    with pytest.raises(StepError) as caught:
        treadle.frozen_copy(keras.Sequential([keras.layers.Dense(1)], name="net"))
    assert str(caught.value) == (
        "frozen_copy needs a built model, and 'net' is not: give it an Input, or call it once on "
        "data of the right shape"
    )
