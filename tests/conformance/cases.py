"""What a step may do: one small task for each, the same source on every backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from classifier import CLASSES, FEATURES, Classifier, batches, cross_entropy, dense, head
from gradient_tasks import (
    Accumulated,
    ConditionalApply,
    CriticSteps,
    ForEach,
    GradientPenalty,
    GradientToolkit,
    OneForwardPass,
    PartsOfOneModel,
    Substituted,
    TwoHeads,
    TwoModels,
    schedule,
)
from keras import ops
from keras_versions import needs_keras

import treadle


class ActivityLoss(keras.layers.Layer):
    def call(self, inputs: Any) -> Any:
        self.add_loss(1e-2 * ops.sum(ops.abs(inputs)))
        return inputs


class KerasRandom(Classifier):
    """Unseeded and seeded `keras.random` in the step and in the objective."""

    def __init__(self) -> None:
        super().__init__([dense(), head()])
        self.noise = keras.random.SeedGenerator(7)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        x = x + 0.1 * keras.random.normal(ops.shape(x), seed=self.noise)

        def objective() -> Any:
            jitter = 0.1 * keras.random.uniform(ops.shape(x))
            return self.loss(y, self.model(x + jitter, training=True))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


class Embedding(Classifier):
    def __init__(self) -> None:
        super().__init__(
            [keras.layers.Embedding(10, 4), keras.layers.GlobalAveragePooling1D(), head()],
            keras.optimizers.Adam(1e-2),
        )

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        return super().train_step((ops.cast(ops.clip(x * 3 + 5, 0, 9), "int32"), y))


class Convolution(Classifier):
    def __init__(self) -> None:
        super().__init__(
            [
                keras.layers.Reshape((3, 2, 1)),
                keras.layers.Conv2D(4, 2, padding="same", activation="relu"),
                keras.layers.Flatten(),
                head(),
            ]
        )


class MomentumEncoder(Classifier):
    """A frozen copy that follows, and a plain copy by `assign`."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.slow = treadle.frozen_copy(self.model)
        self.target = treadle.frozen_copy(self.model)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        target = ops.softmax(self.slow(x, training=False))

        def objective() -> Any:
            logits = self.model(x, training=True)
            agree = -ops.mean(ops.sum(target * ops.log_softmax(logits), axis=-1))
            return self.loss(y, logits) + agree

        loss = treadle.minimize(objective, self.model, self.optimizer)
        treadle.blend(self.slow, self.model, 0.1)
        for target, online in zip(self.target.weights, self.model.weights, strict=True):
            target.assign(online)
        return {"loss": loss}


class Weighted(Classifier):
    """A mean over tokens, and integers among the logs."""

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            self.accuracy.update_state(y, logits)
            each = ops.sparse_categorical_crossentropy(y, logits, from_logits=True)
            count = ops.cast(y, each.dtype)  # of tokens in each example
            mean = ops.sum(each * count) / ops.maximum(ops.sum(count), 1)
            return treadle.weighted(mean, ops.sum(y))

        loss = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss, "step": treadle.step()}


class SelfAttention(keras.layers.Layer):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 3, dropout=rate, seed=6)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.attention(inputs, inputs, training=training)


def attention(rate: float = 0.2) -> Classifier:
    sequence = keras.layers.Reshape((3, 2))
    return Classifier([sequence, SelfAttention(rate), keras.layers.Flatten(), head()])


def gru(rate: float = 0.2) -> Classifier:
    sequence = keras.layers.Reshape((3, 2))
    return Classifier([sequence, keras.layers.GRU(4, dropout=rate, seed=8), head()])


class MetricsOnly(Classifier):
    """Two metrics that training and evaluation share; the steps return nothing."""

    def __init__(self) -> None:
        super().__init__([dense(), head()])
        self.mean_loss = keras.metrics.Mean()

    def train_step(self, batch: Any) -> Any:
        self.mean_loss.update_state(super().train_step(batch)["loss"])

    def eval_step(self, batch: Any) -> Any:
        self.mean_loss.update_state(super().eval_step(batch)["loss"])


@dataclass
class Pair:
    """What a task may keep its state in, in addition to lists and dicts."""

    scale: Any
    layers: tuple[Any, ...]


class Holders(treadle.Task):
    """State in a dataclass, a tuple, a list, a dict, a nested task, and one variable held twice."""

    def __init__(self) -> None:
        self.pair = Pair(keras.Variable(1.0), (dense(), dense()))
        self.heads = {"a": [head()], "b": [head()]}
        self.nested = PartsOfOneModel()
        self.optimizer = keras.optimizers.SGD(0.1)
        self.loss = cross_entropy()
        self.again = self.pair.scale

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        layers = [*self.pair.layers, self.heads["a"][0], self.heads["b"][0]]

        def objective() -> Any:
            features = x * self.again
            for layer in self.pair.layers:
                features = layer(features)
            return self.loss(y, layers[2](features) + layers[3](features))

        def variables() -> list[Any]:
            return [self.pair.scale, *(v for layer in layers for v in layer.trainable_variables)]

        loss, grads = treadle.gradients(objective, variables())
        self.optimizer.apply(grads, variables())
        return {"loss": loss, "nested": self.nested.train_step(batch)["loss"]}


class SignedMomentum(keras.optimizers.Optimizer):
    """An optimizer of the user's own, written as Keras' guide says."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.averages = [self.add_variable_from_reference(v, "average") for v in variables]

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        average = self.averages[self._get_variable_index(variable)]
        self.assign(average, 0.9 * average + 0.1 * gradient)
        self.assign_sub(variable, learning_rate * ops.sign(ops.convert_to_tensor(average)))


def several_optimizers() -> Any:
    """Keras' own way to give each part of a model its optimizer."""
    needs_keras("3.15", "keras.optimizers.MultiOptimizer")
    parts = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.Adam(1e-2))
    parts[".*classify.*"] = keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.MultiOptimizer(parts)


def frozen_layer() -> Classifier:
    task = Classifier([keras.Input((FEATURES,)), dense(), dense(), head()])
    task.model.layers[0].trainable = False
    return task


def supervised() -> treadle.Task:
    needs_keras("3.14", "a dict of metrics for one output")
    metrics = {"accuracy": "sparse_categorical_accuracy"}
    return treadle.Supervised(keras.Sequential([dense(), head()]), cross_entropy(), "adam", metrics)


def two_outputs() -> treadle.Task:
    needs_keras("3.12", "metrics by the keys of a dict of outputs")
    hidden = dense()(inputs := keras.Input((FEATURES,)))
    model = keras.Model(inputs, {"kind": head()(hidden), "size": keras.layers.Dense(1)(hidden)})
    losses = {"kind": cross_entropy(), "size": "mse"}
    metrics = {"metrics": {"size": ["mae"]}, "weighted_metrics": {"kind": ["accuracy"]}}
    weights = {"loss_weights": {"kind": 1.0, "size": 0.5}}
    return treadle.Supervised(model, losses, "adam", **metrics, **weights)


@dataclass(frozen=True)
class Case:
    """A task, and what is special about it.

    Attributes:
        make: Makes the task.
        steady: Makes the same without random numbers, which every backend draws in its own way;
            None where they are all it is about. By default `make`.
        batch: Makes a batch of inputs (rows, features) and labels (rows,).
        rtol: How far compiled and eager results may differ.
        phases: The step has phases, which are checked compiled as well.
    """

    make: Callable[[], treadle.Task]
    steady: Callable[[], treadle.Task] | None
    batch: Callable[[Any, Any], Any] = lambda x, y: (x, y)
    rtol: float = 1e-4
    phases: bool = False


def case(make: Callable[[], treadle.Task], **kwargs: Any) -> Case:
    return Case(make, **{"steady": make, **kwargs})


def classifier(*layers: Any, optimizer: Any = None) -> Case:
    """A classifier whose layers and optimizer are made by functions, once per task."""
    return case(lambda: Classifier([make() for make in layers], optimizer() if optimizer else None))


def batches_of(name: str, count: int) -> list[Any]:
    """The batches that a case learns from."""
    return [CASES[name].batch(x, y) for x, y in zip(*batches(count), strict=True)]


CASES: dict[str, Case] = {
    "unbuilt": classifier(dense, head),
    "supervised": case(supervised, batch=lambda x, y: (x, y, None)),
    "sample-weight": case(
        two_outputs, batch=lambda x, y: (x, {"kind": y, "size": x[:, 1:2]}, np.abs(x[:, 0]))
    ),
    "adam": classifier(dense, head, optimizer=lambda: keras.optimizers.Adam(1e-2)),
    "momentum": classifier(dense, head, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "nadam": classifier(dense, head, optimizer=lambda: keras.optimizers.Nadam(1e-2)),
    "rmsprop-clip": classifier(
        dense, head, optimizer=lambda: keras.optimizers.RMSprop(1e-2, global_clipnorm=0.5)
    ),
    "own-optimizer": classifier(dense, head, optimizer=lambda: SignedMomentum(1e-2)),
    "multi-optimizer": classifier(
        dense, lambda: keras.layers.Dense(CLASSES, name="classify"), optimizer=several_optimizers
    ),
    "schedule": classifier(dense, head, optimizer=lambda: keras.optimizers.AdamW(schedule())),
    "ema": classifier(
        dense,
        head,
        optimizer=lambda: keras.optimizers.Adam(1e-2, use_ema=True, ema_overwrite_frequency=3),
    ),
    "accumulation": classifier(
        dense, head, optimizer=lambda: keras.optimizers.Adam(1e-2, gradient_accumulation_steps=2)
    ),
    "batchnorm": classifier(dense, keras.layers.BatchNormalization, head),
    "dropout-seeded": case(
        lambda: Classifier([dense(), keras.layers.Dropout(0.4, seed=2), head()]), steady=None
    ),
    "dropout-unseeded": case(
        lambda: Classifier([dense(), keras.layers.Dropout(0.4), head()]), steady=None
    ),
    "keras-random": case(KerasRandom, steady=None),
    "add-loss": classifier(dense, ActivityLoss, dense, head),
    "regularizer": classifier(lambda: dense(kernel_regularizer="l2"), head),
    "cond": case(ConditionalApply, steady=lambda: ConditionalApply(0.0)),
    # Without BatchNorm too: of eight rows it multiplies rounding, a hundred times in three steps.
    "substituted": case(Substituted, steady=lambda: Substituted(noisy=False)),
    "for-each": case(ForEach, steady=lambda: ForEach(0.0)),
    "two-models": case(TwoModels, phases=True),
    "one-forward-pass": case(OneForwardPass),
    "two-heads": case(TwoHeads),
    "parts-of-one-model": case(PartsOfOneModel),
    "accumulator": case(Accumulated),
    "gradient-toolkit": case(GradientToolkit, steady=lambda: GradientToolkit(0.0)),
    "critic-steps": case(CriticSteps, phases=True),
    "gradient-penalty": case(GradientPenalty),
    "float64-inputs": case(
        lambda: Classifier([dense(), head()]), batch=lambda x, y: (x.astype("float64"), y)
    ),
    "spectral": classifier(lambda: keras.layers.SpectralNormalization(dense()), head),
    "embedding": case(Embedding),
    "convolution": case(Convolution),
    "lstm": classifier(lambda: keras.layers.Reshape((3, 2)), lambda: keras.layers.LSTM(4), head),
    "gru": case(gru, steady=lambda: gru(0.0)),
    "attention": case(attention, steady=lambda: attention(0.0)),
    "momentum-encoder": case(MomentumEncoder),
    # Eight bits of mantissa: where compiled steps round, and what they fuse, shows.
    "mixed-bfloat16": case(lambda: Classifier([dense(dtype="mixed_bfloat16"), head()]), rtol=2e-2),
    "frozen-layer": case(frozen_layer),
    "weighted": case(lambda: Weighted([dense(), head()])),
    "metrics-only": case(MetricsOnly),
    "holders": case(Holders),
}
