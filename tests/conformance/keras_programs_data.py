"""Keras programs with features of `compile`, of layers and of data; see `keras_programs`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from tests.conformance.keras_programs import BACKEND, LABELS, WEIGHTS, Case, X, Y

HALF = X[:32], Y[:32]
TOKENS = np.random.default_rng(1).integers(1, 20, size=(48, 7))
TOKENS[::3, 4:] = 0  # padding


def half_precision(folder: Path) -> Case:
    """Layers that compute in bfloat16 with weights in float32."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="relu", dtype="mixed_bfloat16"),
            layers.Dense(1, dtype="float32"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return Case(model, {"x": X, "y": Y, "validation_data": HALF})


def scaled_loss(folder: Path) -> Case:
    """`LossScaleOptimizer` around an optimizer with slots."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "tanh"), layers.Dense(1)])
    inner = keras.optimizers.SGD(0.05, momentum=0.9)
    scaling = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0, dynamic_growth_steps=4)
    model.compile(scaling, "mse")
    return Case(model, {"x": X, "y": Y})


def language_model(folder: Path) -> Case:
    """Embeddings, causal attention, normalization and masked positions."""
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(20, 8, mask_zero=True)(tokens)
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1, seed=3)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization()(x + attended)
    model = keras.Model(tokens, layers.Dense(20)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01, clipnorm=1.0), loss, weighted_metrics=["accuracy"])
    return Case(model, {"x": TOKENS[:, :-1], "y": TOKENS[:, 1:], "batch_size": 16})


def recurrent(folder: Path) -> Case:
    """An LSTM over masked sequences, and a weight for each position."""
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 6, mask_zero=True),
            layers.LSTM(5, return_sequences=True),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.RMSprop(0.01), "mse", weighted_metrics=["mae"])
    y = (TOKENS[..., None] / 20).astype("float32")
    weights = np.random.default_rng(2).uniform(0.5, 1.5, size=(48, 7)).astype("float32")
    return Case(model, {"x": TOKENS, "y": y, "sample_weight": weights, "batch_size": 16})


def convolutional(folder: Path) -> Case:
    """Convolutions, pooling, augmentation and a frozen normalization."""
    images = np.random.default_rng(3).normal(size=(48, 8, 8, 2)).astype("float32")
    frozen = layers.BatchNormalization()
    frozen.trainable = False
    model = keras.Sequential(
        [
            keras.Input((8, 8, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            frozen,
            layers.MaxPooling2D(),
            layers.SpatialDropout2D(0.2, seed=5),
            layers.GlobalAveragePooling2D(),
            layers.Dense(3),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return Case(model, {"x": images, "y": LABELS[:48], "validation_split": 0.25})


def several_inputs(folder: Path) -> Case:
    """Named inputs of several kinds, a shared layer, and a model in a model."""
    left, right = keras.Input((3,), name="left"), keras.Input((3,), name="right")
    kind = keras.Input((), dtype="int32", name="kind")
    shared = keras.Sequential([keras.Input((3,)), layers.Dense(4, activation="relu")])
    embedded = layers.Embedding(3, 2)(kind)
    joined = layers.Concatenate()([shared(left), shared(right), embedded])
    model = keras.Model({"left": left, "right": right, "kind": kind}, layers.Dense(1)(joined))
    model.compile(keras.optimizers.Adagrad(0.1), keras.losses.Huber(0.5), metrics=["mse"])
    x = {"left": X[:, :3], "right": X[:, 3:], "kind": LABELS.astype("int32")}
    return Case(model, {"x": x, "y": Y, "sample_weight": WEIGHTS})


def many_metrics(folder: Path) -> Case:
    """Metrics that keep counts or matrices, and one whose result is a vector."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="softmax")])
    kinds = keras.metrics
    found = [kinds.Precision(), kinds.Recall(), kinds.TopKCategoricalAccuracy(2)]
    found += [kinds.F1Score(average="macro"), kinds.OneHotMeanIoU(3)]
    model.compile(keras.optimizers.Nadam(0.01), "categorical_crossentropy", metrics=found)
    y = keras.utils.to_categorical(LABELS, 3)
    return Case(model, {"x": X, "y": y, "class_weight": {0: 0.5, 2: 2.0}})


def averaged_weights(folder: Path) -> Case:
    """An optimizer that averages weights, constraints, and gradients summed over two steps."""
    model = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4, kernel_constraint="max_norm"), layers.Dense(1)]
    )
    optimizer = keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.9, gradient_accumulation_steps=2
    )
    model.compile(optimizer, "mse")
    return Case(model, {"x": X[:64], "y": Y[:64], "batch_size": 8})


def shorter_last_batch(folder: Path) -> Case:
    """Losses of two outputs whose last batch is shorter than the others."""
    inputs = keras.Input((6,))
    outputs = [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse", "mae"], loss_weights=[1.0, 0.5])
    return Case(model, {"x": X, "y": [Y, Y]})


def compiled_by_xla(folder: Path) -> Case:
    """`jit_compile=True` on backends that compile with XLA, `False` on the other."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], jit_compile=BACKEND != "torch")
    return Case(model, {"x": X, "y": Y})


def not_compiled_by_xla(folder: Path) -> Case:
    """`jit_compile=False`, and several steps in each execution."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)])
    steps = 1 if BACKEND == "torch" else 2  # Keras has no others there
    model.compile("adam", "mse", jit_compile=False, steps_per_execution=steps)
    return Case(model, {"x": X[:64], "y": Y[:64]})


class Sequences(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches by their number."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        rows = slice(16 * index, 16 * (index + 1))
        return X[rows], Y[rows], WEIGHTS[rows]


def py_dataset(folder: Path) -> Case:
    """A `PyDataset` with weights, and class weights for another data set of validation."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.Lion(0.01), "mse", weighted_metrics=["mae"])
    return Case(model, {"x": Sequences(), "validation_data": Sequences(), "validation_freq": 2})


def endless() -> Iterator[Any]:
    while True:
        for first in range(0, 64, 16):
            yield X[first : first + 16], Y[first : first + 16]


def generator(folder: Path) -> Case:
    """A generator that never ends, from which each epoch takes some batches."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.Adamax(0.01), "mse")
    return Case(model, {"x": endless(), "steps_per_epoch": 3})


def data_loader(folder: Path) -> Case:
    """A `DataLoader` on PyTorch; elsewhere tf.data or a list as batches of dicts."""
    inputs = keras.Input((6,), name="features")
    model = keras.Model({"features": inputs}, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", metrics=["mae"])
    if BACKEND == "torch":
        import torch

        model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
        pairs = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
        return Case(model, {"x": torch.utils.data.DataLoader(pairs, batch_size=16)})
    if BACKEND == "tensorflow":
        import tensorflow as tf

        data: Any = tf.data.Dataset.from_tensor_slices(({"features": X}, Y)).batch(16)
        return Case(model, {"x": data, "validation_data": data.take(2)})
    return Case(model, {"x": {"features": X}, "y": Y, "initial_epoch": 1, "epochs": 4})


class Warmed(keras.callbacks.Callback):  # type: ignore[misc]
    """Warms the learning rate up at each batch, and reads weights and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.seen = 0, []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        self.model.optimizer.learning_rate = 0.01 * min(self.steps, 5)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append(float(logs["loss"]))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["norm"] = float(np.linalg.norm(self.model.get_weights()[0]))
        logs["seen"] = self.seen[-1]


def own_callback(folder: Path) -> Case:
    """A callback of one's own at each batch, which sets the rate and adds values to the logs."""
    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0, nesterov=True, momentum=0.9), "mse")
    return Case(model, {"x": X, "y": Y, "callbacks": [Warmed()]})


CASES = {
    make.__name__: make
    for make in (
        *(half_precision, scaled_loss, language_model, recurrent, convolutional, several_inputs),
        *(many_metrics, averaged_weights, shorter_last_batch, compiled_by_xla),
        *(not_compiled_by_xla, py_dataset, generator, data_loader, own_callback),
    )
}
