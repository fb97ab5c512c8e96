"""Tasks and data that do not resume exactly, each for one reason; and some that do."""

import random
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
from classifier import FEATURES, Classifier, dense, head
from keras import ops

import treadle
from treadle import data

BATCHES = 4


class Line(treadle.Task):
    """The smallest task: one weight."""

    def __init__(self) -> None:
        self.weight = keras.Variable(0.5)
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_step(self, batch: Any) -> Any:
        x = batch["x"] + batch["y"] if isinstance(batch, dict) else batch

        def objective() -> Any:
            return ops.mean(ops.square(self.weight * x - 1.0))

        return {"loss": treadle.minimize(objective, [self.weight], self.optimizer)}


def numbers(first: float) -> np.ndarray:
    return np.array([first, 1.0, 0.5], "float32")


def random_batch(rng: np.random.Generator) -> np.ndarray:
    return rng.normal(size=3).astype("float32")


def fixed() -> Any:
    """Data of which nothing can be said."""
    return data.from_function(random_batch, BATCHES)


class Sound(Classifier):
    """Dropout, batch normalization, Adam with a moving average, a hook with a state."""

    def __init__(self, rate: float = 0.3) -> None:
        layers = [
            keras.Input((FEATURES,)),
            dense(),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(rate),
            head(),
        ]
        super().__init__(layers, keras.optimizers.Adam(1e-2, use_ema=True))

    def hooks(self) -> list[Any]:
        return [treadle.hooks.EarlyStopping("val_loss", patience=50)]

    def datasets(self) -> treadle.Datasets:
        return sound_data()


def sound_data() -> treadle.Datasets:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, FEATURES)).astype("float32")
    y = rng.integers(0, 3, size=40).astype("int32")
    return treadle.Datasets(
        train=data.from_arrays(x, y, batch_size=8),
        validation=data.from_arrays(x, y, batch_size=16, shuffle=False),
    )


def remembering_data() -> Any:
    """Batches depend on a list, and on a seeded generator of the source's own: on its past."""
    seen: list[int] = []
    dice = random.Random(5)

    def remembered(rng: np.random.Generator) -> dict[str, np.ndarray]:
        seen.append(len(seen))
        return {"x": numbers(len(seen) / 10), "y": numbers(dice.random()), "z": numbers(0.0)}

    return data.from_function(remembered, BATCHES)


def momentary_data() -> Any:
    """Batches depend on the time, and on a generator without a seed: on the moment."""
    rng = np.random.default_rng()

    def drawn(seeded: np.random.Generator) -> dict[str, np.ndarray]:
        return {"x": numbers(rng.normal()), "y": numbers(time.time() % 1), "z": numbers(0.0)}

    return data.from_function(drawn, BATCHES)


def spent_data() -> Iterator[Any]:
    """A generator, which is not begun again: epochs end, and it with the first of them."""
    return (numbers(i) for i in range(BATCHES))


class Growing(Line):
    """The step reads a Python value of the task that a hook changes, which is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch * self.factor)

    def hooks(self) -> list[Any]:
        return [treadle.every("2 steps", self.grow)]

    def grow(self, loop: Any) -> None:
        self.factor += 0.5

    def datasets(self) -> treadle.Datasets:
        return treadle.Datasets(train=fixed())


class Hooked(Line):
    """The step reads a number that a hook counts for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = keras.Variable(1.0, trainable=False)

    def train_step(self, batch: Any) -> Any:
        return super().train_step(batch * self.factor)

    def hooks(self) -> list[Any]:
        factor = [1.0]

        def grow(loop: Any) -> None:
            factor[0] += 0.5
            self.factor.assign(factor[0])

        return [treadle.every("2 steps", grow)]

    def datasets(self) -> treadle.Datasets:
        return treadle.Datasets(train=fixed())


class Counting(Line):
    """The step counts in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def train_step(self, batch: Any) -> Any:
        self.calls += 1
        return super().train_step(batch)


class Unseeded(Line):
    """Its weight begins anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.assign(np.random.default_rng().normal())


class Noisy(Line):
    """Training is exact; what a hook logs is not, since it counts in a list of its own."""

    def hooks(self) -> list[Any]:
        said: list[int] = []

        def say(loop: Any) -> Any:
            said.append(1)
            return {"said": float(len(said))}

        return [treadle.every("1 step", say)]
