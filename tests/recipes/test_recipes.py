"""Every recipe, shrunken, from its file to the end of a run, on each backend."""

import itertools

import keras
import numpy as np
import pytest
from recipe_runs import run

from treadle.errors import BackendError
from treadle.recipes import find, make, resolve

# Settings that make each recipe small: three steps are to take about as long as compiling them.
SMALL = {
    "actor-critic": ("environments=4", "rollout_steps=8"),
    "adversarial-training": ("units=8", "attack_steps=2"),
    "char-lm": (
        "width=16",
        "depth=1",
        "heads=2",
        "context_length=16",
        "batch_size=4",
        "decay_updates=60",
    ),
    "distillation": ("teacher_steps=2", "units=8", "batch_size=50"),
    "dqn": ("epsilon_decay_steps=10", "environments=2"),
    "maml": ("tasks=4",),
    "reinforce": ("episodes=2",),
    "self-supervised": ("features=16", "projection_size=8", "batch_size=20"),
    "tabular": ("units=8",),
    "teacher-forcing": ("units=8", "batch_size=8"),
    "vae": ("units=16", "batch_size=50"),
    "wgan-gp": ("batch_size=20", "critic_steps=1"),
}
NATIVE = [name for name, recipe in find().items() if recipe.backend]


def in_turn():
    """Return the recipes as parameters: all on PyTorch, on TensorFlow and JAX a third in turn.

    XLA takes seconds to compile a recipe. With `--all`, each backend runs all.
    """
    backend = keras.config.backend()
    turns = itertools.cycle(("tensorflow", "jax", None, None, None, None))
    found = []
    for name, recipe in find().items():
        often = recipe.backend or backend == "torch"
        if not often and name != "self-supervised":  # its views take XLA 20 s
            often = backend == next(turns)
        found.append(pytest.param(name, marks=() if often else pytest.mark.long))
    return found


@pytest.mark.parametrize("name", in_turn())
def test_three_steps(name):
    """Each recipe trains on each backend; that it learns is shown on one, and in benchmarks."""
    made, loop = run(name, *SMALL.get(name, ()), steps=3)
    assert loop.progress.step == 3
    for values in loop.history.last.values():
        assert np.isfinite(values)
    assert made.task is loop.task


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_recipe_says_what_it_runs_on(name):
    recipe = resolve(name)
    if recipe.backend == keras.config.backend():
        pytest.skip("this is its backend")
    with pytest.raises(BackendError, match=f"{name} runs on {recipe.backend} only"):
        make(recipe, recipe.settings([]))


@pytest.mark.parametrize("name", ["linear", "linear-native"])
def test_linear(name):
    _, loop = run(name)
    loss = loop.history.steps("loss")
    assert len(loss) == 200
    assert loss[-1] < 0.01 * loss[0]
    reports = [record for record in loop.history.records if record.kind == "log"]
    assert [report.progress.step for report in reports] == [50, 100, 150, 200]
    last = reports[-1].values
    assert last["step_loss"] == pytest.approx(loss[-1])
    assert last["prediction_of_3"] == pytest.approx(3, abs=0.3)
    assert last["prediction_of_7"] == pytest.approx(7, abs=0.3)


def test_an_object_is_made_anew_each_time():
    first, _ = run("linear-native")
    second = make(resolve("linear-native"), {})
    assert float(np.abs(first.task.bias.numpy()).max()) > 0
    assert float(np.abs(second.task.bias.numpy()).max()) == 0


def test_mnist_mlp():
    _, loop = run("mnist-mlp-native", "batch_size=16", epochs=4)
    losses = loop.history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert loop.history["val_accuracy"][-1] > loop.history["val_accuracy"][0]
    loss = loop.history.steps("loss")
    assert loss[0] > 5  # the start is wide


@pytest.mark.long
def test_both_forms_of_mnist_mlp_give_the_same_curve():
    curves = [
        run(name, "batch_size=16", epochs=2)[1].history
        for name in ("mnist-mlp-native", "mnist-mlp")
    ]
    np.testing.assert_allclose(curves[0].steps("loss"), curves[1].steps("loss"), rtol=1e-3)
    assert curves[0]["val_loss"] == pytest.approx(curves[1]["val_loss"], rel=1e-3)
    assert curves[0]["val_accuracy"] == pytest.approx(curves[1]["val_accuracy"], abs=0.011)
