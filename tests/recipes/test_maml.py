"""Meta-learning, shrunken, on the active backend, and its gradient against finite differences."""

import inspect

import keras
import numpy as np
import pytest
from recipe_runs import make, run

import treadle
from treadle.recipes.maml import COLORS, MAML, MEASURED_STEPS, draw, mean_squared_error

ERRORS = [f"val_error_{step}" for step in MEASURED_STEPS]
SMALL = ("tasks=10", "learning_rate=0.005")


@pytest.mark.long
def test_maml():
    """It learns a new curve within few steps, which training on all curves does not lead to."""
    errors = {}
    for inner in (0, 1):  # no inner steps: a network trained on all curves alike
        _, loop = run("maml", *SMALL, f"inner_steps={inner}", steps=300)
        errors[inner] = [loop.history.last[name] for name in ERRORS]
    before, one, five, ten = errors[1]
    assert ten < five < one < 0.5 * before
    assert one < 0.7 * errors[0][1] and ten < 0.7 * errors[0][3]
    own = (MAML.train_step, MAML.adapt, MAML.error, mean_squared_error)
    assert sum(len(inspect.getsource(function).splitlines()) for function in own) <= 45


def test_the_curves_are_those_of_the_paper():
    task = make("maml", "tasks=1000").task
    (known_x, known_y), (asked_x, asked_y) = task.curves(np.random.default_rng(0), 10)
    assert known_x.shape == known_y.shape == asked_x.shape == asked_y.shape == (1000, 10, 1)
    x, y = np.concatenate([known_x, asked_x], 1)[..., 0], np.concatenate([known_y, asked_y], 1)
    assert -5 <= x.min() < -4.99 and 4.99 < x.max() <= 5
    # Each curve is a sum of a sine and a cosine: a sin(x - p) = a cos(p) sin(x) - a sin(p) cos(x).
    parts = np.stack([np.sin(x), np.cos(x)], -1)
    found = np.linalg.pinv(parts) @ y
    np.testing.assert_allclose(parts @ found, y, atol=1e-8)
    amplitude, phase = np.hypot(*found[:, :, 0].T), np.arctan2(-found[:, 1, 0], found[:, 0, 0])
    assert 0.1 <= amplitude.min() < 0.2 and 4.9 < amplitude.max() <= 5
    assert 0 <= phase.min() < 0.02 and np.pi - 0.02 < phase.max() <= np.pi


def test_held_out_curves_are_always_the_same_and_never_trained_on():
    first, again = (make("maml").datasets() for _ in range(2))

    def seen(source, epoch):
        return source.read(epoch, seed=0).take(1).batches[0][0]

    held_out = seen(first.validation, 0)
    np.testing.assert_array_equal(held_out, seen(again.validation, 0))
    assert not np.isin(held_out, seen(first.train, 0)).any()
    assert not np.isin(seen(first.train, 1), seen(first.train, 0)).any()


def test_a_curve_is_drawn_without_gaps_over_earlier_ones():
    x = np.linspace(-5, 5, 400)[:, None]
    pixels = draw([4 * np.sin(x), x, *[np.full_like(x, 9.0)] * 3]).pixels
    assert pixels.shape == (240, 400, 3)
    grey, yellow = (tuple(bytes.fromhex(color[1:])) for color in COLORS[:2])
    assert (pixels == yellow).all(-1)[:, 1:-1].any(axis=0).all()  # x = y, in each column
    assert np.argmax((pixels == yellow).all(-1)[:, 10]) > np.argmax(
        (pixels == yellow).all(-1)[:, 390]
    )
    rows, columns = np.nonzero((pixels == grey).all(-1))
    np.testing.assert_allclose(5 - rows / 23.9, 4 * np.sin(x[columns, 0]), atol=0.12)
    assert set(map(tuple, pixels.reshape(-1, 3).tolist())) == {grey, yellow, (255, 255, 255)}


def forward(weights, x):
    """Return the layers' outputs of the network, in NumPy."""
    w1, b1, w2, b2, w3, b3 = weights
    first = np.maximum(x @ w1 + b1, 0)
    second = np.maximum(first @ w2 + b2, 0)
    return first, second, second @ w3 + b3


def error(weights, points):
    x, y = points
    return np.mean((forward(weights, x)[2] - y) ** 2)


def slopes(weights, points):
    """Return the gradients of the error, by the chain rule."""
    x, y = points
    _, _, w2, _, w3, _ = weights
    first, second, found = forward(weights, x)
    to_found = 2 * (found - y) / len(x)
    to_second = to_found @ w3.T * (second > 0)
    to_first = to_second @ w2.T * (first > 0)
    parts = ((x, to_first), (first, to_second), (second, to_found))
    return [part for inputs, to in parts for part in (inputs.T @ to, to.sum(0))]


def left(weights, curve, steps, rate, constant=None):
    """Return the error that is left after gradient steps on a curve's known points.

    Args:
        weights: Where they begin.
        curve: Its known points, and those that the error is of.
        steps: How many gradient steps.
        rate: Their learning rate.
        constant: The gradients to take, if they do not follow from the weights.
    """
    known, asked = curve
    for step in range(steps):
        found = slopes(weights, known) if constant is None else constant[step]
        weights = [w - rate * slope for w, slope in zip(weights, found, strict=True)]
    return error(weights, asked)


def differences(function, weights, width=1e-6):
    """Return the gradient of a function of weights by central differences."""
    found = []
    for i, weight in enumerate(weights):
        gradient = np.zeros_like(weight)
        for place in np.ndindex(*weight.shape):
            ends = []
            for sign in (1, -1):
                moved = [w.copy() if i == j else w for j, w in enumerate(weights)]
                moved[i][place] += sign * width
                ends.append(function(moved))
            gradient[place] = (ends[0] - ends[1]) / (2 * width)
        found.append(gradient)
    return found


def small_task(*settings):
    task = make("maml", "inner_learning_rate=0.1", "tasks=2", *settings).task
    units = [keras.layers.Dense(6, activation="relu") for _ in range(2)]
    task.model = keras.Sequential([keras.Input((1,)), *units, keras.layers.Dense(1)])
    random = np.random.default_rng(0)
    weights = [random.normal(0, 0.7, w.shape).astype("float32") for w in task.model.get_weights()]
    task.model.set_weights(weights)
    return task, [w.astype("float64") for w in weights]


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("first_order", [False, True])
def test_the_gradient_is_that_of_finite_differences(steps, first_order):
    """Of a step compiled in float32, against differences in float64, in NumPy, of every weight.

    The differences are good to 1e-8. Float32 numbers have relative errors of 6e-8, which sums over
    ten points, three layers and several gradient steps make larger by less than three orders of
    magnitude: hence 1e-4 of the largest number in a gradient. What the first-order variant leaves
    out is a hundred times as much.
    """
    task, weights = small_task(f"inner_steps={steps}", f"first_order={str(first_order).lower()}")
    task.optimizer = keras.optimizers.SGD(1.0)  # the step is minus the gradient
    batch = task.curves(np.random.default_rng(1), 10)
    batch = keras.tree.map_structure(lambda x: x.astype("float32"), batch)
    with treadle.Loop(task, console=False) as loop:
        logs = loop.step(batch)
    found = [w - new for w, new in zip(weights, task.model.get_weights(), strict=True)]
    curves = [
        keras.tree.map_structure(lambda x, i=i: x[i].astype("float64"), batch) for i in range(2)
    ]

    def constant(curve):
        taken, at = [], weights
        for _ in range(steps):
            taken.append(slopes(at, curve[0]))
            at = [w - 0.1 * slope for w, slope in zip(at, taken[-1], strict=True)]
        return taken

    fixed = [constant(curve) for curve in curves]

    def expected(first):
        def mean(weights):
            given = fixed if first else [None] * len(curves)
            return np.mean(
                [left(weights, c, steps, 0.1, f) for c, f in zip(curves, given, strict=True)]
            )

        return mean

    assert logs["loss"] == pytest.approx(expected(first_order)(weights), rel=1e-4)
    largest = max(np.abs(g).max() for g in found)
    for gradient, by_differences in zip(
        found, differences(expected(first_order), weights), strict=True
    ):
        np.testing.assert_allclose(gradient, by_differences, rtol=1e-4, atol=1e-4 * largest)
    others = differences(expected(not first_order), weights)
    apart = max(np.abs(g - o).max() for g, o in zip(found, others, strict=True))
    assert apart > 1e-2 * largest
