"""Data and the register of the trial."""
import keras
import numpy as np
from keras import layers, ops

import treadle

WRONG, SOUND = {}, {}


def wrong(mistake, must_say):
    def add(make):
        WRONG[make.__name__] = (make, mistake, must_say)
        return make
    return add


def sound(why):
    def add(make):
        SOUND[make.__name__] = (make, why, None)
        return make
    return add


def rng(seed=0):
    return np.random.default_rng(seed)


def blobs(n=256, features=8, classes=4, seed=0, spread=0.7):
    r, centers = rng(seed), rng(77).normal(size=(classes, features)) * 1.5
    y = r.integers(0, classes, n)
    return (centers[y] + r.normal(size=(n, features)) * spread).astype("float32"), y.astype("int32")


def line(n=256, features=6, seed=0, noise=0.1):
    r, w = rng(seed), rng(5).normal(size=features)
    x = r.normal(size=(n, features)).astype("float32")
    return x, (x @ w + noise * r.normal(size=n)).astype("float32")


def pictures(n=192, classes=3, size=12, seed=0):
    """Bars at places that depend on the class, in 0..255, uint8."""
    r = rng(seed)
    y = r.integers(0, classes, n)
    x = r.integers(0, 60, (n, size, size, 1))
    for i, c in enumerate(y):
        x[i, 2 + 3 * c : 4 + 3 * c, 1 : 7 + r.integers(0, 3)] += 180
    return x.astype("uint8"), y.astype("int32")


def masks(n=128, size=12, seed=0):
    """Images with a bright box on the left half, and the mask of that box."""
    r = rng(seed)
    x = r.normal(size=(n, size, size, 1)) * 0.3
    m = np.zeros((n, size, size, 1))
    for i in range(n):
        a, b = r.integers(0, size - 4), r.integers(0, size // 2 - 3)
        m[i, a : a + 4, b : b + 3] = 1
    return (x + 1.5 * m).astype("float32"), m.astype("float32")


def sentences(n=256, length=10, words=20, seed=0, shortest=3):
    """Right-padded sequences of 1..words-1 that follow a Markov chain; 0 is padding."""
    r = rng(seed)
    nxt = rng(3).permutation(words - 1) + 1
    lengths = r.integers(shortest, length + 1, n)
    x = np.zeros((n, length), "int32")
    for i in range(n):
        w = r.integers(1, words)
        for t in range(lengths[i]):
            x[i, t] = w
            w = nxt[w - 1] if r.random() < 0.85 else r.integers(1, words)
    return x, lengths


def batches(*arrays, size=32, **how):
    return treadle.data.from_arrays(*arrays, batch_size=size, **how)


def mlp(inputs, outputs, units=24, activation=None, dropout=0.0):
    parts = [keras.Input((inputs,)), layers.Dense(units, activation="relu")]
    if dropout:
        parts.append(layers.Dropout(dropout))
    return keras.Sequential([*parts, layers.Dense(outputs, activation=activation)])


__all__ = [k for k in globals() if not k.startswith("__")]
