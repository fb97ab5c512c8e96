"""The recipes learn, each shrunken, and their formulas are those of their papers."""

import keras
import numpy as np
import pytest
from recipe_runs import run

import treadle
from treadle.recipes import make, resolve


def test_mnist_mlp():
    _, loop = run("mnist-mlp", "batch_size=16", epochs=4)
    losses = loop.history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert loop.history["val_accuracy"][-1] > loop.history["val_accuracy"][0]


def test_digits():
    _, loop = run("digits", epochs=4)
    assert loop.history["val_accuracy"][-1] > 0.9


@pytest.mark.long
def test_digits_reaches_what_it_promises():
    _, loop = run("digits")
    assert loop.history["val_accuracy"][-1] > 0.96


def test_a_rate_that_was_found_trains_digits_in_three_epochs():
    made = make(resolve("digits"), resolve("digits").settings([]))
    found = treadle.doctor.find_learning_rate(made.task, made.datasets().train)
    _, loop = run("digits", f"learning_rate={found.suggestion}", epochs=3)
    assert loop.history["accuracy"][-1] >= 0.95


@pytest.mark.parametrize(
    ("policy", "rates"),
    [
        ("triangular", [0.0, 0.5, 1.0, 0.5, 0.0, 0.5, 1.0]),
        ("triangular2", [0.0, 0.5, 1.0, 0.5, 0.0, 0.25, 0.5]),
        ("exp_range", [0.0, 0.4975, 0.990025, 0.492537, 0.0, 0.487624, 0.970373]),
        ("one_cycle", [0.0, 1 / 207, 2 / 207, 3 / 207, 4 / 207, 5 / 207, 6 / 207]),
        ("constant", [1.0] * 7),
    ],
)
def test_cyclic_lr_follows_its_schedule(policy, rates):
    _, loop = run("cyclic-lr", f"policy={policy}", "low=0", "high=1", "step_size=2", steps=7)
    np.testing.assert_allclose(loop.history.steps("learning_rate"), rates, atol=1e-5)


def test_cyclic_lr_learns():
    _, loop = run("cyclic-lr", epochs=4)
    assert loop.history["val_accuracy"][-1] > 0.9


def test_mnist_functional():
    made, loop = run("mnist-functional", "batch_size=4")
    assert [layer.name for layer in made.task.model.layers][0::3] == ["digits", "predictions"]
    assert made.task.model.count_params() == 55_050
    (report,) = [record for record in loop.history.records if record.kind == "log"]
    assert report.progress.step == 200
    assert report.values["samples_seen"] == 800
    assert report.values["batch_loss"] == pytest.approx(loop.history.steps("loss")[199])
    losses = loop.history["val_loss"]
    assert losses[1] < losses[0]
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} <= set(loop.history.epochs[-1])


@pytest.mark.long
def test_cifar10_cnn():
    made, loop = run("cifar10-cnn", "batch_size=100", epochs=2)
    assert made.task.model.count_params() == 122_570
    assert "122,570" in made.describe()
    first, second = loop.history["loss"]
    assert second < first
    assert {"accuracy", "val_loss", "val_accuracy"} <= set(loop.history.epochs[-1])


def test_activity_regularization():
    _, loop = run("activity-regularization", "batch_size=64", epochs=3)
    penalty = loop.history.steps("regularization")
    assert penalty[0] > 1
    assert penalty[-1] < penalty[0]
    assert (loop.history.steps("loss") > penalty).all()
    assert len(loop.history["regularization"]) == 3


def test_custom_gradients():
    _, loop = run("custom-gradients", "batch_size=64", epochs=4)
    names = [name for name in loop.history.step_names if name.startswith("norm/")]
    assert names == [f"norm/model/layers/{i}/{name}" for i in (2, 3) for name in ("kernel", "bias")]
    assert all((loop.history.steps(name) > 0).all() for name in names)
    penalty = loop.history.steps("penalty")
    assert penalty[-1] != penalty[0]
    assert loop.history["val_accuracy"][-1] > 0.8


def lion_by_hand(w, m, gradient, rate, decay):
    """Algorithm 2 of Chen et al. 2023."""
    direction = 0.9 * m + 0.1 * gradient
    return w - rate * (np.sign(direction) + decay * w), 0.99 * m + 0.01 * gradient


def test_lion_follows_its_paper():
    from treadle.recipes.custom_optimizer import Lion

    w = keras.Variable([1.0, -2.0, 0.5])
    optimizer = Lion(0.1, weight_decay=0.5)
    expected, m = np.array([1.0, -2.0, 0.5]), np.zeros(3)
    slopes = [[1.0, -3.0, 0.0], [-0.05, 4.0, 2.0], [-20.0, 0.1, -0.1]]
    for slope in slopes:
        _, grads = treadle.gradients(lambda s=slope: keras.ops.sum(w * keras.ops.array(s)), [w])
        optimizer.apply(grads, [w])
        expected, m = lion_by_hand(expected, m, np.array(slope), 0.1, 0.5)
        np.testing.assert_allclose(keras.ops.convert_to_numpy(w), expected, rtol=1e-6)
    # The first step by hand: 1 - 0.1 * (1 + 0.5), -2 - 0.1 * (-1 - 1), 0.5 - 0.1 * (0 + 0.25).
    first = lion_by_hand(np.array([1.0, -2.0, 0.5]), np.zeros(3), np.array(slopes[0]), 0.1, 0.5)
    np.testing.assert_allclose(first[0], [0.85, -1.8, 0.475])


def test_sam_follows_its_paper():
    from treadle.recipes.custom_optimizer import CustomOptimizer

    class Quadratic(CustomOptimizer):
        """L(a, b) = 3 a² + 4 b, from a = 0.5, b = 1: small enough for a hand."""

        def __init__(self):
            class Model(keras.layers.Layer):
                def __init__(self):
                    super().__init__()
                    self.a = self.add_weight(shape=(), initializer="ones")
                    self.b = self.add_weight(shape=(), initializer="ones")

                def call(self, x, training=False):
                    return 3 * self.a**2 + 4 * self.b + 0 * keras.ops.sum(x)

            self.model = Model()
            self.model.a.assign(0.5)
            self.optimizer = keras.optimizers.SGD(0.1)
            self.loss = lambda y, logits: logits
            self.accuracy = keras.metrics.Mean()
            self.accuracy.update_state = lambda y, logits: None
            self.rho = 0.5

    task = Quadratic()
    x = np.ones((2, 1), "float32")
    logs = task.train_step((x, x))
    # Gradient (3, 4), norm 5; uphill (0.5 + 0.5 * 3/5, 1 + 0.5 * 4/5) = (0.8, 1.4), where the
    # gradient is (4.8, 4) and the loss 1.92 + 5.6 = 7.52, 2.77 above that of the start.
    assert float(logs["gradient_norm"]) == pytest.approx(5)
    assert float(logs["loss"]) == pytest.approx(4.75)
    assert float(logs["sharpness"]) == pytest.approx(2.77)
    assert float(task.model.a.numpy()) == pytest.approx(0.5 - 0.1 * 4.8, rel=1e-5)
    assert float(task.model.b.numpy()) == pytest.approx(1 - 0.1 * 4)


def test_custom_optimizer():
    _, loop = run("custom-optimizer", "learning_rate=0.003", "batch_size=64", epochs=4)
    assert loop.history["val_accuracy"][-1] > 0.9
    assert (loop.history.steps("sharpness") > 0).mean() > 0.9


class Calls(treadle.Hook):
    """Counts how many calls train an epoch."""

    def __init__(self):
        self.calls = [0]

    def steps(self, loop, logs):
        self.calls[-1] += 1

    def record(self, loop, record):
        if record.kind == "epoch":
            self.calls.append(0)


def whole_loop(**options):
    """Train the recipe for two epochs; returns the loop and how many calls trained each."""
    keras.backend.clear_session()
    treadle.setup(seed=0)
    made = make(resolve("whole-loop"), {"learning_rate": 1e-3, "batch_size": 60})
    datasets, calls = made.datasets(), Calls()
    options = treadle.Options(**options)
    with treadle.Loop(made.task, hooks=[calls], options=options, console=False) as loop:
        loop.fit(datasets.train, datasets.validation, epochs=2)
    return loop, calls.calls[:2]


@pytest.mark.long
def test_a_whole_epoch_as_one_call_is_the_same_as_step_by_step():
    whole, calls = whole_loop(window=23)
    assert calls == [1, 1]
    stepwise, calls = whole_loop(window=1)
    assert calls == [23, 23]
    assert whole.history.epochs == stepwise.history.epochs
    theirs = stepwise.state.arrays()
    for path, value in whole.state.arrays().items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)
    eager, _ = whole_loop(window=1, execution="eager")
    for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
        assert eager.history[name] == pytest.approx(whole.history[name], rel=1e-3)
    # Training moves statistics and draws for Dropout; validation sees each row by itself.
    before = whole.state.arrays()
    assert np.abs(before["model/layers/3/moving_mean"]).max() > 0
    digits = treadle.datasets.digits()
    halves = treadle.data.from_arrays(digits.x_test, digits.y_test, batch_size=180)
    assert whole.evaluate(halves)["loss"] == pytest.approx(whole.history["val_loss"][-1], rel=1e-5)
    after = whole.state.arrays()
    assert all((after[path] == value).all() for path, value in before.items())
