"""What a step may do: one small task for each, the same source on every backend."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

import treadle

FEATURES, CLASSES, ROWS = 6, 3, 8


def batches(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Stacked batches (count, rows, features) and labels (count, rows)."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(count, ROWS, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=(count, ROWS)).astype("int32")


def cross_entropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Classifier(treadle.Task):
    """A model, an optimizer, a metric: what the other cases vary."""

    def __init__(self, layers: list[Any], optimizer: Any = None) -> None:
        self.model = keras.Sequential(layers)  # not built: the first step builds it
        self.optimizer = optimizer or keras.optimizers.SGD(0.1)
        self.loss = cross_entropy()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits) + sum(self.model.losses), logits

        (loss, logits), grads = treadle.gradients(objective, self.model.trainable_variables)
        self.optimizer.apply(grads, self.model.trainable_variables)
        self.accuracy.update_state(y, logits)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        logits = self.model(x, training=False)
        self.accuracy.update_state(y, logits)
        return {"loss": self.loss(y, logits)}


def dense(units: int = 5, **kwargs: Any) -> Any:
    return keras.layers.Dense(units, activation="tanh", **kwargs)


def head() -> Any:
    return keras.layers.Dense(CLASSES)


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


class TwoModels(treadle.Task):
    """A tiny adversarial pair: two optimizers, phases, losses of their own."""

    def __init__(self) -> None:
        self.generator = keras.Sequential(
            [dense(), keras.layers.BatchNormalization(), keras.layers.Dense(FEATURES)]
        )
        self.critic = keras.Sequential([dense(), keras.layers.Dense(1)])
        self.optimizers = {
            "generator": keras.optimizers.Adam(1e-2),
            "critic": keras.optimizers.Adam(1e-2),
        }

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        with treadle.phase("critic", owns=[self.critic, self.optimizers["critic"]]):
            fake = self.generator(x, training=False)
            critic_loss = treadle.minimize(
                lambda: ops.mean(self.critic(fake)) - ops.mean(self.critic(x)),
                self.critic,
                self.optimizers["critic"],
            )
        with treadle.phase("generator", owns=[self.generator, self.optimizers["generator"]]):
            generator_loss = treadle.minimize(
                lambda: -ops.mean(self.critic(self.generator(x, training=True))),
                self.generator,
                self.optimizers["generator"],
            )
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


class OneForwardPass(TwoModels):
    """Two losses of one forward pass, each for its own variables."""

    def train_step(self, batch: Any) -> Any:
        x, _ = batch

        def objective() -> Any:
            fake = self.critic(self.generator(x, training=True))
            real = self.critic(x)
            return {
                "critic": ops.mean(fake) - ops.mean(real) + ops.mean(real**2 + fake**2),
                "generator": -ops.mean(fake),
            }

        models = {"critic": self.critic, "generator": self.generator}
        return treadle.minimize(objective, models, self.optimizers)


class ConditionalApply(Classifier):
    """`cond` around `apply`: every third step learns, with Dropout inside the branch."""

    def __init__(self, rate: float = 0.3) -> None:
        super().__init__([dense(), keras.layers.Dropout(rate, seed=1), head()])
        self.updates = keras.Variable(0, dtype="int32", trainable=False)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def learn() -> Any:
            self.updates.assign_add(1)
            return treadle.minimize(
                lambda: self.loss(y, self.model(x, training=True)), self.model, self.optimizer
            )

        def look() -> Any:
            return self.loss(y, self.model(x, training=False))

        loss = treadle.cond(treadle.step() % 3 == 0, learn, look)
        return {"loss": loss, "updates": self.updates.value}


class Substituted(Classifier):
    """One inner gradient step in substituted variables (MAML), Dropout and BatchNorm inside."""

    def __init__(self, noisy: bool = True) -> None:
        noise = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2, seed=3)]
        super().__init__([dense(), *(noise if noisy else []), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        variables = self.model.trainable_variables

        def objective() -> Any:
            inner, grads = treadle.gradients(
                lambda: self.loss(y, self.model(x, training=True)), variables, unreached="zeros"
            )
            adapted = [
                ops.convert_to_tensor(v) - 0.5 * g for v, g in zip(variables, grads, strict=True)
            ]
            with treadle.substituted(variables, adapted):
                outer = self.loss(y, self.model(x, training=True))
                _, again = treadle.gradients(
                    lambda: self.loss(y, self.model(x, training=False)), variables
                )
                adapted = [a - 0.1 * g for a, g in zip(adapted, again, strict=True)]
            with treadle.substituted(variables, adapted):
                return outer + self.loss(y, self.model(x, training=False)), inner

        (loss, inner), grads = treadle.gradients(objective, variables, unreached="zeros")
        self.optimizer.apply(grads, variables)
        return {"loss": loss, "inner": inner}


class ForEach(Classifier):
    """A gradient per example, with a seed that moves on from row to row."""

    def __init__(self, rate: float = 0.2) -> None:
        super().__init__([dense(), keras.layers.Dropout(rate, seed=5), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        variables = self.model.trainable_variables

        def one(row: Any) -> Any:
            x, y = row
            loss, grads = treadle.gradients(
                lambda: self.loss(y[None], self.model(x[None], training=True)), variables
            )
            return {"loss": loss, "grads": grads}

        rows = treadle.for_each(one, (x, y))
        self.optimizer.apply([ops.mean(g, axis=0) for g in rows["grads"]], variables)
        return {"loss": ops.mean(rows["loss"])}


class GradientPenalty(TwoModels):
    """The gradient of a gradient: a penalty on the critic's slope at its inputs."""

    def train_step(self, batch: Any) -> Any:
        x, _ = batch

        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.critic(x)), x)
            penalty = ops.mean((ops.sqrt(ops.sum(slope**2, axis=-1) + 1e-8) - 1) ** 2)
            return ops.mean(self.critic(x) ** 2) + 10 * penalty, penalty

        loss, penalty = treadle.minimize(objective, self.critic, self.optimizers["critic"])
        return {"loss": loss, "penalty": penalty}


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


class FrozenTeacher(Classifier):
    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.teacher = keras.Sequential([keras.Input((FEATURES,)), dense(), head()])
        self.teacher.trainable = False

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits) + ops.mean((logits - self.teacher(x)) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


class Weighted(Classifier):
    """A mean over tokens, and integers among the logs."""

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        return {"loss": treadle.weighted(logs["loss"], ops.sum(batch[1])), "step": treadle.step()}


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


class Adversarial(Classifier):
    """Learns from inputs moved along their own gradient (FGSM)."""

    def __init__(self) -> None:
        super().__init__([dense(), keras.layers.BatchNormalization(), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        clean, (slope,) = treadle.input_gradients(
            lambda x: self.loss(y, self.model(x, training=False)), x
        )
        logs = super().train_step((x + 0.1 * ops.sign(slope), y))
        return {**logs, "clean": clean}


class TwoHeads(treadle.Task):
    """Two losses over all variables, neither of which reaches the other's head."""

    def __init__(self) -> None:
        self.body = dense()
        self.heads = [head(), keras.layers.Dense(1)]
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.loss = cross_entropy()

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            features = self.body(x)
            kind, size = self.heads[0](features), self.heads[1](features)
            sizes = ops.sum(x, axis=-1, keepdims=True)
            return {"kind": self.loss(y, kind), "size": ops.mean((size - sizes) ** 2)}

        layers = [self.body, *self.heads]
        variables = [v for layer in layers for v in layer.trainable_variables]
        losses, grads = treadle.gradients(
            objective, {"kind": variables, "size": variables}, unreached="zeros"
        )
        # Gradient surgery (PCGrad) begins like this: each loss' gradient over all variables.
        both = [a + 0.5 * b for a, b in zip(grads["kind"], grads["size"], strict=True)]
        self.optimizer.apply(both, variables)
        return losses


class PartsOfOneModel(Classifier):
    """Two optimizers, one for the body and one for the head of the same model."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.head_optimizer = keras.optimizers.Adam(1e-2)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        first, last = self.model.layers
        loss = treadle.minimize(
            lambda: {"body": (loss := self.loss(y, self.model(x, training=True))), "head": loss},
            {"body": first, "head": last},
            {"body": self.optimizer, "head": self.head_optimizer},
        )
        return {"loss": loss["body"]}


class Accumulated(Classifier):
    """One update for two batches: clipping, decay, schedule and EMA are the update's."""

    def __init__(self) -> None:
        super().__init__(
            [dense(), head()],
            keras.optimizers.AdamW(
                schedule(), global_clipnorm=0.5, use_ema=True, ema_overwrite_frequency=2
            ),
        )
        self.accumulator = treadle.Accumulator(steps=2)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss, grads = treadle.gradients(
            lambda: self.loss(y, self.model(x, training=True)), self.model.trainable_variables
        )
        updated = self.accumulator.add(
            grads, lambda mean: self.optimizer.apply(mean, self.model.trainable_variables)
        )
        return {"loss": loss, "updated": updated}


class GradientToolkit(Classifier):
    """Everything that can be done with gradients on their way to the optimizer."""

    def __init__(self, noise: float = 1e-4) -> None:
        super().__init__([dense(), dense(), keras.layers.Dense(CLASSES, name="classify")])
        self.noise, self.seed = noise, keras.random.SeedGenerator(4)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return self.loss(y, self.model(x, training=True))

        variables = treadle.trainable(self.model, frozen="model/layers/0/*")
        loss, grads = treadle.gradients(objective, variables)
        norms = treadle.gradient_norms(grads, variables)
        grads = treadle.scaled_by(grads, variables, {"*classify*": 0.5, "*/bias": 2.0})
        grads = treadle.centralized(grads)
        grads = treadle.clip_by_norm(grads, 0.5)
        grads = treadle.clip_by_value(grads, 0.2)
        grads, norm = treadle.clip_by_global_norm(grads, 0.3)
        grads = treadle.with_noise(grads, self.noise, seed=self.seed)
        self.optimizer.apply(grads, variables)
        return {"loss": loss, "norm": norm, **norms}


class CriticSteps(TwoModels):
    """Two critic steps for each step of the generator, each clipped by its own norm."""

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        norms: dict[str, Any] = {}

        def learn(name: str, model: Any, objective: Any) -> Any:
            optimizer = self.optimizers[name]
            with treadle.phase(name, owns=[model, optimizer]):
                loss, grads = treadle.gradients(objective, model.trainable_variables, "zeros")
                grads, norms[f"{name}_norm"] = treadle.clip_by_global_norm(grads, 0.1)
                optimizer.apply(grads, model.trainable_variables)
            return loss

        for real in (x[: ROWS // 2], x[ROWS // 2 :]):

            def estimate(real: Any = real) -> Any:
                fake = self.generator(real, training=False)
                return ops.mean(self.critic(fake)) - ops.mean(self.critic(real))

            learn("critic", self.critic, estimate)
        learn(
            "generator",
            self.generator,
            lambda: -ops.mean(self.critic(self.generator(x, training=True))),
        )
        return norms


class DictBatch(Classifier):
    """A batch with names, one of which stands for nothing."""

    def __init__(self) -> None:
        super().__init__([dense(), head()])

    def train_step(self, batch: Any) -> Any:
        assert batch["weight"] is None
        return super().train_step((batch["inputs"]["x"], batch["y"]))


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
    parts = keras.optimizers.OptimizerMap(default_optimizer=keras.optimizers.Adam(1e-2))
    parts[".*classify.*"] = keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.MultiOptimizer(parts)


def frozen_layer() -> Classifier:
    task = Classifier([keras.Input((FEATURES,)), dense(), dense(), head()])
    task.model.layers[0].trainable = False
    return task


def supervised() -> treadle.Task:
    metrics = {"accuracy": "sparse_categorical_accuracy"}
    return treadle.Supervised(keras.Sequential([dense(), head()]), cross_entropy(), "adam", metrics)


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


def schedule() -> Any:
    return keras.optimizers.schedules.CosineDecay(0.1, 10)


CASES: dict[str, Case] = {
    "unbuilt": classifier(dense, head),
    "supervised": case(supervised, batch=lambda x, y: (x, y, None)),
    "sample-weight": case(supervised, batch=lambda x, y: (x, y, np.abs(x[:, 0]))),
    "adam": classifier(dense, head, optimizer=lambda: keras.optimizers.Adam(1e-2)),
    "momentum": classifier(dense, head, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9)),
    "nadam": classifier(dense, head, optimizer=lambda: keras.optimizers.Nadam(1e-2)),
    "rmsprop-clip": classifier(
        dense, head, optimizer=lambda: keras.optimizers.RMSprop(1e-2, global_clipnorm=0.5)
    ),
    "own-optimizer": classifier(dense, head, optimizer=lambda: SignedMomentum(1e-2)),
    "multi-optimizer": classifier(
        dense,
        lambda: keras.layers.Dense(CLASSES, name="classify"),
        optimizer=several_optimizers,
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
    "adversarial": case(Adversarial),
    "spectral": classifier(lambda: keras.layers.SpectralNormalization(dense()), head),
    "embedding": case(Embedding),
    "convolution": case(Convolution),
    "lstm": classifier(lambda: keras.layers.Reshape((3, 2)), lambda: keras.layers.LSTM(4), head),
    "gru": case(gru, steady=lambda: gru(0.0)),
    "attention": case(attention, steady=lambda: attention(0.0)),
    "momentum-encoder": case(MomentumEncoder),
    "frozen-teacher": case(FrozenTeacher),
    "frozen-layer": case(frozen_layer),
    "weighted": case(lambda: Weighted([dense(), head()])),
    "metrics-only": case(MetricsOnly),
    "holders": case(Holders),
    "dict-batch": case(DictBatch, batch=lambda x, y: {"y": y, "inputs": {"x": x}, "weight": None}),
    "float64-inputs": case(
        lambda: Classifier([dense(), head()]), batch=lambda x, y: (x.astype("float64"), y)
    ),
    # Eight bits of mantissa: where compiled steps round, and what they fuse, shows.
    "mixed-bfloat16": case(lambda: Classifier([dense(dtype="mixed_bfloat16"), head()]), rtol=2e-2),
}
