"""The data of the workloads, as arrays of so many examples."""

from typing import Any

import numpy as np

from treadle import datasets

Arrays = tuple[np.ndarray, ...]

LENGTH, VOCABULARY = 64, 64


def cut(arrays: Arrays, examples: int) -> Arrays:
    """Return the first examples, copied; the data are repeated where there are too few."""
    rows = np.arange(examples) % len(arrays[0])
    return tuple(array[rows] for array in arrays)


def digit_rows(examples: int) -> Arrays:
    """MNIST as rows of 784 numbers from 0 to 1, and labels."""
    mnist = datasets.mnist()
    x = mnist.x_train.reshape(-1, 784).astype("float32") / 255
    return cut((x, mnist.y_train.astype("int32")), examples)


def digit_images_in_rows(examples: int) -> Arrays:
    """MNIST as sequences of 28 rows of 28 numbers, and labels."""
    x, y = digit_rows(examples)
    return x.reshape(-1, 28, 28), y


def digit_images(examples: int) -> Arrays:
    """MNIST as images of shape (28, 28, 1) from -1 to 1, no labels."""
    return ((digit_rows(examples)[0].reshape(-1, 28, 28, 1) * 2 - 1),)


def photographs(examples: int) -> Arrays:
    """CIFAR-10 as images of bytes, and labels."""
    cifar10 = datasets.cifar10()
    return cut((cifar10.x_train, cifar10.y_train.astype("int32")), examples)


def tokens(examples: int) -> Arrays:
    """Sequences in which a token mostly determines the next one, and the same shifted by one."""
    rng = np.random.default_rng(0)
    follower = rng.permutation(VOCABULARY)
    found = np.empty((examples, LENGTH + 1), "int32")
    found[:, 0] = rng.integers(VOCABULARY, size=examples)
    for i in range(LENGTH):
        surprise = rng.random(examples) < 0.2
        drawn = rng.integers(VOCABULARY, size=examples)
        found[:, i + 1] = np.where(surprise, drawn, follower[found[:, i]])
    return np.ascontiguousarray(found[:, :-1]), np.ascontiguousarray(found[:, 1:])


def augmented(arrays: Arrays, batch_size: int) -> Any:
    """Return a `tf.data` pipeline: shuffled, randomly flipped and cropped, batched, prefetched."""
    import tensorflow as tf

    def augment(image: Any, label: Any) -> Any:
        image = tf.image.random_flip_left_right(image)
        image = tf.pad(image, [[4, 4], [4, 4], [0, 0]])
        return tf.image.random_crop(image, [32, 32, 3]), label

    dataset = tf.data.Dataset.from_tensor_slices(arrays).shuffle(1024)
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.batch(batch_size, drop_remainder=True).prefetch(tf.data.AUTOTUNE)
