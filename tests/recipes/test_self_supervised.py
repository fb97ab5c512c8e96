"""The recipe that learns without labels, shrunken, on the active backend."""

import keras
import numpy as np
import pytest
from recipe_runs import make, run

import treadle
from treadle.recipes.self_supervised import normalized, nt_xent, probe_accuracy

EAGER = treadle.Options(execution="eager")  # some steps of it take less time than compiling


@pytest.mark.long
def test_it_learns_to_find_the_positive_pair():
    small = ("features=32", "projection_size=16", "batch_size=40", "learning_rate=0.003")
    alike = ("min_crop_size=0.9", "erase_size=0.1")
    _, loop = run("self-supervised", *small, *alike, epochs=4)
    found = loop.history.steps("contrastive_accuracy")
    assert found[0] < 0.3
    assert loop.history["contrastive_accuracy"][-1] > loop.history["contrastive_accuracy"][0] + 0.05
    assert loop.history["loss"][-1] < loop.history["loss"][0]
    for name, count in (("pixels_accuracy", 1), ("untrained_accuracy", 1), ("probe_accuracy", 4)):
        accuracies = loop.history[name]
        assert len(accuracies) == count
        assert all(0 <= accuracy <= 1 for accuracy in accuracies)


def test_no_label_is_trained_on():
    made = make("self-supervised", "batch_size=40")
    images = made.datasets().train.read(0, seed=0).take(1).batches[0]
    assert images.shape == (40, 28, 28, 1)
    assert images.min() >= 0
    assert images.max() <= 1


def by_hand(projections, temperature):
    """Equation 1 of Chen et al. 2020, by hand: for each view, over all others of the batch."""
    directions = projections / np.linalg.norm(projections, axis=1, keepdims=True)
    count = len(directions)
    losses, found = [], []
    for i in range(count):
        partner = (i + count // 2) % count
        likeness = {j: directions[i] @ directions[j] / temperature for j in range(count) if j != i}
        losses.append(-likeness[partner] + np.log(sum(np.exp(s) for s in likeness.values())))
        found.append(max(likeness, key=likeness.__getitem__) == partner)
    return np.mean(losses), np.mean(found)


def test_the_loss_is_that_of_the_paper():
    projections = np.random.default_rng(0).normal(size=(12, 5)).astype("float32")
    projections[6:9] = projections[:3] + 0.1
    loss, found = (float(x) for x in nt_xent(keras.ops.array(projections), 0.2))
    expected, often = by_hand(projections, 0.2)
    assert loss == pytest.approx(expected, rel=1e-5)
    assert found == pytest.approx(often)
    assert 0 < often < 1


def seen(images, *settings):
    """Views of images, as a step makes them."""
    task = make("self-supervised", *settings).task
    with treadle.Loop(task, options=EAGER, console=False) as loop:
        return loop.call(task.augment, images)


def test_a_view_of_the_whole_is_the_image():
    images = np.random.default_rng(0).random((3, 28, 28, 1)).astype("float32")
    views = seen(images, "min_crop_size=1", "erase_size=0")
    np.testing.assert_allclose(views, images, atol=1e-5)


def test_each_image_has_its_own_erased_square():
    images = np.ones((20, 28, 28, 1), "float32")
    views = seen(images, "min_crop_size=1", "erase_size=0.5")[..., 0]
    erased = views == 0
    np.testing.assert_array_equal(views[~erased], 1)
    assert (erased.sum(axis=(1, 2)) == 14 * 14).all()
    assert len({tuple(np.argwhere(view)[0]) for view in erased}) > 10


def test_a_crop_is_stretched_to_the_whole():
    """In an image that rises from top to bottom, or to the right, a part of it rises less."""
    rising = np.broadcast_to(np.arange(28, dtype="float32")[:, None], (28, 28))
    images = np.stack([rising, rising.T] * 10)[..., None]
    views = seen(images, "min_crop_size=0.5", "erase_size=0")[..., 0]
    found = []
    for i, view in enumerate(views[:, 4:-4, 4:-4]):  # beyond the image nothing rises
        slopes = np.diff(view, axis=i % 2)
        np.testing.assert_allclose(slopes, slopes[0, 0], atol=1e-3)
        np.testing.assert_allclose(np.diff(view, axis=1 - i % 2), 0, atol=1e-4)
        found.append(slopes[0, 0])
    assert 0.5 <= min(found) < 0.7 < 0.8 < max(found) <= 1


def parts_of(rows):
    return rows[:100], rows[100:]


def test_a_linear_probe_learns_linearly_separable_classes():
    random = np.random.default_rng(0)
    middles = 3 * random.normal(size=(10, 20))
    digits = np.arange(300) % 10
    rows = (middles[digits] + random.normal(size=(300, 20))).astype("float32")
    assert probe_accuracy(parts_of(rows), parts_of(digits)) > 0.95
    noise = random.normal(size=(300, 20)).astype("float32")
    assert probe_accuracy(parts_of(noise), parts_of(digits)) < 0.3


def test_pixels_are_from_0_to_1():
    images = normalized(np.array([[[0, 255]]], "uint8"))
    assert images.shape == (1, 1, 2, 1)
    assert images.dtype == np.float32
    assert images.ravel().tolist() == [0, 1]
