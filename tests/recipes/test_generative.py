"""The recipes that make pictures, shrunken, on the active backend."""

import inspect

import keras
import numpy as np
import pytest
from keras import ops
from recipe_runs import make, run

import treadle
from treadle.errors import OwnershipError

GRID = (8 * 28, 8 * 28, 1)
EAGER = treadle.Options(execution="eager")  # some steps of it take less time than compiling


def lines_of(*functions):
    return sum(len(inspect.getsource(function).splitlines()) for function in functions)


def weights_of(model):
    return [np.array(weight) for weight in model.get_weights()]


def moved(before, model):
    """Whether every weight is another one than before."""
    found = [
        np.any(old != new) for old, new in zip(before, model.get_weights(), strict=True) if old.size
    ]
    assert len(set(found)) == 1
    return bool(found[0])


def samples_of(loop, epochs):
    grids = loop.history["samples"]
    assert [grid.shape for grid in grids] == [GRID] * epochs
    assert np.any(grids[0].pixels != grids[-1].pixels)
    return grids


def test_mnist_gan():
    made, loop = run("mnist-gan", "batch_size=50", options=treadle.Options(checked=True), epochs=2)
    assert made.task.generator.count_params() == 100 * 128 + 128 + 128 * 784 + 784
    assert made.task.discriminator.count_params() == 784 * 128 + 128 + 128 + 1
    d_loss, g_loss = loop.history.steps("d_loss"), loop.history.steps("g_loss")
    assert d_loss[0] == pytest.approx(2 * np.log(2), abs=0.6)
    assert g_loss[0] == pytest.approx(np.log(2), abs=0.4)
    samples_of(loop, 2)
    assert lines_of(type(made.task).train_step) <= 30


@pytest.mark.parametrize("still", ["discriminator", "generator"])
def test_each_network_of_a_gan_follows_its_own_loss_alone(still):
    """Where one optimizer stands still, its network does not move, whatever the other one does."""
    made = make("mnist-gan", "batch_size=50")
    task = made.task
    networks = {"discriminator": task.discriminator, "generator": task.generator}
    optimizers = {"discriminator": task.d_optimizer, "generator": task.g_optimizer}
    optimizers[still].learning_rate = 0.0
    before = {name: weights_of(network) for name, network in networks.items()}
    with treadle.Loop(task, options=EAGER, console=False) as loop:
        loop.fit(made.datasets().train, steps=10)
    of_the_other = loop.history.steps("g_loss" if still == "discriminator" else "d_loss")
    assert of_the_other[-1] < of_the_other[0]
    for name, network in networks.items():
        assert moved(before[name], network) == (name != still)


def test_a_phase_that_updates_the_other_network_is_refused():
    made = make("mnist-gan", "batch_size=50")
    task = made.task
    rest = task.discriminator.trainable_variables
    # By mistake the second phase moves on the discriminator, by what its optimizer remembers.
    task.g_optimizer.apply = lambda gradients, variables: task.d_optimizer.apply(
        [ops.zeros(variable.shape) for variable in rest], rest
    )
    options = treadle.Options(checked=True, execution="eager")
    with (
        treadle.Loop(task, options=options, console=False) as loop,
        pytest.raises(OwnershipError, match=r"phase 'generator' changed discriminator/\S+, which"),
    ):
        loop.fit(made.datasets().train, steps=1)


@pytest.mark.long
def test_wgan_gp():
    settings, options = ("batch_size=20", "critic_steps=2"), treadle.Options(checked=True)
    made, loop = run("wgan-gp", *settings, options=options, epochs=4)
    task, steps = made.task, loop.progress.step
    assert steps == 4 * (400 // 20 // 2)
    assert int(task.c_optimizer.iterations) == 2 * int(task.g_optimizer.iterations) == 2 * steps
    samples_of(loop, 4)
    kind = type(task)
    assert lines_of(kind.train_step, kind.update_critic) <= 45
    slope = loop.history.steps("gradient_norm")
    assert np.abs(slope[-5:] - 1).max() < 0.5
    _, free = run("wgan-gp", *settings, "penalty_weight=0", epochs=4)
    assert free.history.steps("gradient_norm")[-1] > slope[-1] + 0.2


def test_the_penalty_is_that_of_the_paper():
    """Of a critic that is linear, the slope is the norm of its weights, wherever one looks."""
    made = make("wgan-gp", "batch_size=20", "critic_steps=1", "penalty_weight=3")
    task = made.task
    task.critic = keras.Sequential([keras.Input((784,)), keras.layers.Dense(1, use_bias=False)])
    norm = float(np.linalg.norm(task.critic.get_weights()[0]))
    with treadle.Loop(task, options=EAGER, console=False) as loop:
        logs = loop.step((np.zeros((20, 784), "float32"),))
    assert logs["gradient_norm"] == pytest.approx(norm, rel=1e-4)
    assert logs["gradient_penalty"] == pytest.approx((norm - 1) ** 2, rel=1e-3)


def test_vae():
    _, loop = run("vae", "units=64", "batch_size=50", "annealing_steps=10", epochs=4)
    weight = loop.history.steps("kl_weight")
    np.testing.assert_allclose(weight, np.minimum(np.arange(32) / 10, 1), rtol=1e-6)
    parts = [loop.history.steps(name) for name in ("loss", "reconstruction", "kl", "elbo")]
    loss, reconstruction, kl, elbo = parts
    np.testing.assert_allclose(loss, reconstruction + weight * kl, rtol=1e-4)
    np.testing.assert_allclose(elbo, -reconstruction - kl, rtol=1e-4)
    assert (kl > 0).all()
    assert elbo[-1] > elbo[0]
    assert loop.history["val_elbo"][-1] > loop.history["val_elbo"][0]
    samples_of(loop, 4)
