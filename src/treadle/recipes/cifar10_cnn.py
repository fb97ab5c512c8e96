"""A convolutional network on CIFAR-10 with the ready-made task `treadle.Supervised`.

It logs loss and accuracy each epoch, and reaches about 76 % training accuracy after 10 epochs.
"""

import keras
from keras import layers

import treadle
from treadle import data, datasets


class Cifar10CNN(treadle.Supervised):
    """Classify CIFAR-10 with a small convolutional network (122,570 parameters) and Adam.

    Args:
        learning_rate: Learning rate of Adam.
        batch_size: Examples per step.
    """

    epochs = 10

    def __init__(self, learning_rate: float = 1e-3, batch_size: int = 64) -> None:
        model = keras.Sequential(
            [
                keras.Input((32, 32, 3)),
                layers.Rescaling(1 / 255),
                layers.Conv2D(32, 3, activation="relu"),
                layers.MaxPooling2D(2),
                layers.Conv2D(64, 3, activation="relu"),
                layers.MaxPooling2D(2),
                layers.Conv2D(64, 3, activation="relu"),
                layers.Flatten(),
                layers.Dense(64, activation="relu"),
                layers.Dense(10),
            ]
        )
        super().__init__(
            model,
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            keras.optimizers.Adam(learning_rate),
            {"accuracy": keras.metrics.SparseCategoricalAccuracy()},
        )
        self.batch_size = batch_size

    def describe(self) -> str:
        """Return the model's summary, which the command line prints before training."""
        lines: list[str] = []
        self.model.summary(print_fn=lines.append)
        return "\n".join(lines)

    def datasets(self) -> treadle.Datasets:
        """Return CIFAR-10 as integers; the model scales pixels to [0, 1]."""
        cifar10 = datasets.cifar10()
        return treadle.Datasets(
            train=data.from_arrays(cifar10.x_train, cifar10.y_train, batch_size=self.batch_size),
            validation=data.from_arrays(
                cifar10.x_test, cifar10.y_test, batch_size=self.batch_size, shuffle=False
            ),
        )
