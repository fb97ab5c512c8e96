"""Every recipe, shrunken, from its file to the end of a run, on the active backend."""

import keras
import numpy as np
import pytest

import treadle
from treadle.errors import BackendError
from treadle.recipes import find, resolve

NATIVE = [name for name, recipe in find().items() if recipe.backend]
SHAPES = {"mnist": (28, 28), "cifar10": (32, 32, 3)}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """Small data sets that can be learned: a picture for each class, and noise."""
    random = np.random.default_rng(0)
    for name, shape in SHAPES.items():
        pictures = random.integers(0, 200, (10, *shape))
        arrays = {}
        for split, rows in (("train", 400), ("test", 100)):
            y = np.arange(rows) % 10
            arrays[f"x_{split}"] = (pictures[y] + random.integers(0, 56, (rows, *shape))).astype(
                "uint8"
            )
            arrays[f"y_{split}"] = y.astype("uint8")
        np.savez(tmp_path / f"{name}.npz", **arrays)
    monkeypatch.setenv("TREADLE_DATA", str(tmp_path))


def run(name, *settings, **lasts):
    """Train a recipe as the command line does; returns what was made and the loop."""
    recipe = resolve(name)
    if recipe.backend not in (None, keras.config.backend()):
        pytest.skip(f"{name} runs on {recipe.backend} only")
    keras.backend.clear_session()
    treadle.setup(seed=0)
    made = recipe.make(recipe.settings(settings))
    datasets = made.datasets()
    with treadle.Loop(made.task, hooks=made.hooks(), console=False) as loop:
        loop.fit(datasets.train, datasets.validation, **(lasts or made.lasts))
    return made, loop


@pytest.mark.parametrize("name", NATIVE)
def test_a_native_recipe_says_what_it_runs_on(name):
    recipe = resolve(name)
    if recipe.backend == keras.config.backend():
        pytest.skip("this is its backend")
    with pytest.raises(BackendError, match=f"{name} runs on {recipe.backend} only"):
        recipe.make(recipe.settings([]))


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
    second = resolve("linear-native").make({})
    assert float(np.abs(first.task.bias.numpy()).max()) > 0
    assert float(np.abs(second.task.bias.numpy()).max()) == 0


def test_digits():
    _, loop = run("digits", epochs=4)
    assert loop.history["val_accuracy"][-1] > 0.9


@pytest.mark.slow
def test_digits_reaches_what_it_promises():
    _, loop = run("digits")
    assert loop.history["val_accuracy"][-1] > 0.96


def test_a_rate_that_was_found_trains_digits_in_three_epochs():
    made = resolve("digits").make(resolve("digits").settings([]))
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


@pytest.mark.parametrize("name", ["mnist-mlp", "mnist-mlp-native"])
def test_mnist_mlp(name):
    _, loop = run(name, "batch_size=16", epochs=4)
    losses = loop.history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert loop.history["val_accuracy"][-1] > loop.history["val_accuracy"][0]
    loss = loop.history.steps("loss")
    assert loss[0] > 5  # the start is wide


def test_both_forms_of_mnist_mlp_give_the_same_curve():
    curves = [
        run(name, "batch_size=16", epochs=2)[1].history
        for name in ("mnist-mlp-native", "mnist-mlp")
    ]
    np.testing.assert_allclose(curves[0].steps("loss"), curves[1].steps("loss"), rtol=1e-3)
    assert curves[0]["val_loss"] == pytest.approx(curves[1]["val_loss"], rel=1e-3)
    assert curves[0]["val_accuracy"] == pytest.approx(curves[1]["val_accuracy"], abs=0.011)


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
