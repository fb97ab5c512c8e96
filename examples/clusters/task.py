"""The task of these examples, for one process or several: python task.py DIRECTORY [SEED]."""

import sys

import keras

import treadle


def train(directory, hooks=(), seed=0, units=64, learning_rate=1e-2, epochs=5):
    """Train a classifier of handwritten digits; replace this function with yours."""
    treadle.setup(seed=seed)  # joins the other processes: before any layer is created
    digits, made = treadle.datasets.digits(), treadle.data.from_arrays
    layers = [keras.layers.Flatten(), keras.layers.Dense(units, "relu"), keras.layers.Dense(10)]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(learning_rate)
    task = treadle.Supervised(keras.Sequential(layers), loss, optimizer, metrics=["accuracy"])
    with treadle.Loop(task, directory, hooks=hooks) as loop:
        return loop.fit(
            made(digits.x_train / 16, digits.y_train, batch_size=64),
            validation=made(digits.x_test / 16, digits.y_test, batch_size=64, shuffle=False),
            epochs=epochs,
        )


if __name__ == "__main__":
    train(sys.argv[1], seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
