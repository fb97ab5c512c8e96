"""Sound programs of many kinds, in which an examination must find neither errors nor warnings."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle
from tests.doctor.doctor_programs import (
    BATCH,
    ROWS,
    Regression,
    classes,
    network,
    numbers,
    rng,
    seeded,
    source,
)
from treadle import Datasets

SOUND: list[Callable[[], Any]] = []


def sound(program: Callable[[], Any]) -> Callable[[], Any]:
    """Register a program: a function that returns a task and its data."""
    SOUND.append(seeded(program))
    return program


def adam(rate: float = 1e-3) -> Any:
    return keras.optimizers.Adam(rate)


def dense(inputs: int, *sizes: int, activation: Any = "relu", last: Any = None) -> Any:
    hidden = [layers.Dense(size, activation=activation) for size in sizes[:-1]]
    return keras.Sequential([keras.Input((inputs,)), *hidden, layers.Dense(sizes[-1], last)])


def stepping(train_step: Callable[..., Any], eval_step: Any = None, **parts: Any) -> Any:
    methods = {"train_step": train_step} | ({"eval_step": eval_step} if eval_step else {})
    task = type(train_step.__qualname__.partition(".")[0], (treadle.Task,), methods)()
    for name, part in parts.items():
        setattr(task, name, part)
    return task


@sound
def gan_with_two_optimizers() -> Any:
    def train_step(self: Any, real: Any) -> Any:
        count = ops.shape(real)[0]
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)

        def noise() -> Any:
            return keras.random.normal((count, 4), seed=self.seed)

        def d_loss() -> Any:
            fake = ops.stop_gradient(self.generator(noise(), training=True))
            ones, zeros = ops.ones((count, 1)), ops.zeros((count, 1))
            real_loss = cross_entropy(ones, self.critic(real, training=True))
            return real_loss + cross_entropy(zeros, self.critic(fake, training=True))

        def g_loss() -> Any:
            fake = self.critic(self.generator(noise(), training=True), training=True)
            return cross_entropy(ops.ones((count, 1)), fake)

        return {
            "d_loss": treadle.minimize(d_loss, self.critic, self.d_optimizer),
            "g_loss": treadle.minimize(g_loss, self.generator, self.g_optimizer),
        }

    parts = [layers.Dense(12), layers.BatchNormalization(), layers.LeakyReLU(), layers.Dense(6)]
    generator = keras.Sequential([keras.Input((4,)), *parts])
    critic = keras.Sequential(
        [keras.Input((6,)), layers.Dense(12, "relu"), layers.Dropout(0.3), layers.Dense(1)]
    )
    task = stepping(
        train_step,
        generator=generator,
        critic=critic,
        d_optimizer=adam(),
        g_optimizer=adam(),
        seed=keras.random.SeedGenerator(1),
    )
    return task, source(numbers()[0])


@sound
def critic_with_gradient_penalty(factor: float = 10.0) -> Any:
    def train_step(self: Any, real: Any) -> Any:
        fake = self.generator(keras.random.normal((BATCH, 4), seed=self.seed))

        def d_loss() -> Any:
            share = keras.random.uniform((BATCH, 1), seed=self.seed)
            mixed = share * real + (1 - share) * fake
            _, slopes = treadle.input_gradients(lambda x: ops.sum(self.critic(x)), mixed)
            norms = ops.sqrt(ops.sum(slopes[0] ** 2, -1) + 1e-12)
            of_real, of_fake = ops.mean(self.critic(real)), ops.mean(self.critic(fake))
            return of_fake - of_real + factor * ops.mean((norms - 1) ** 2)

        def g_loss() -> Any:
            noise = keras.random.normal((BATCH, 4), seed=self.seed)
            return -ops.mean(self.critic(self.generator(noise)))

        d = treadle.minimize(d_loss, self.critic, self.d_optimizer)
        g = treadle.minimize(g_loss, self.generator, self.g_optimizer)
        return {"d_loss": d, "g_loss": g, "score": ops.mean(self.critic(real))}

    task = stepping(
        train_step,
        generator=dense(4, 12, 6),
        critic=dense(6, 12, 1, activation="tanh"),
        d_optimizer=adam(),
        g_optimizer=adam(),
        seed=keras.random.SeedGenerator(1),
    )
    return task, source(numbers()[0], drop_last=True)


@sound
def q_learning_with_a_target_network() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        after = ops.max(self.target(batch["next_observations"]), -1)
        goal = batch["rewards"] + 0.99 * (1 - batch["terminations"]) * after

        def loss() -> Any:
            actions = ops.one_hot(batch["actions"], 2)
            chosen = ops.sum(self.model(batch["observations"]) * actions, -1)
            return ops.mean(keras.losses.huber(ops.stop_gradient(goal)[:, None], chosen[:, None]))

        result = treadle.minimize(loss, self.model, self.optimizer)
        treadle.blend(self.target, self.model, 0.01)
        return {"loss": result}

    x, y = rng(1).normal(size=(2, ROWS, 6)).astype("float32")
    model = dense(6, 16, 2)
    data = {
        "observations": x,
        "next_observations": y,
        "actions": rng(2).integers(0, 2, ROWS).astype("int32"),
        "rewards": np.ones(ROWS, "float32"),
        "terminations": (rng(3).random(ROWS) < 0.05).astype("float32"),
    }
    parts = {"model": model, "target": treadle.frozen_copy(model), "optimizer": adam()}
    return stepping(train_step, **parts), source(data)


@sound
def contrastive_pairs() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            a, b = (ops.normalize(self.model(x, training=True), axis=-1) for x in batch)
            logits = ops.matmul(a, ops.transpose(b)) / 0.2
            targets = ops.arange(ops.shape(a)[0])
            losses = keras.losses.sparse_categorical_crossentropy(targets, logits, from_logits=True)
            turned = ops.transpose(logits)
            other = keras.losses.sparse_categorical_crossentropy(targets, turned, from_logits=True)
            return ops.mean(losses + other) / 2

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    x, _ = numbers()
    views = (x + 0.1 * rng(i).normal(size=x.shape).astype("float32") for i in (4, 5))
    return stepping(train_step, model=dense(6, 16, 8), optimizer=adam()), source(*views)


@sound
def two_inputs_with_masks_and_weights() -> Any:
    tokens, extra = keras.Input((7,), dtype="int32"), keras.Input((3,))
    features = layers.Embedding(9, 8, mask_zero=True)(tokens)
    x = layers.LSTM(8)(features)
    x = layers.Concatenate()([x, extra])
    model = keras.Model([tokens, extra], layers.Dense(3, "softmax")(x))
    ids = rng(1).integers(1, 9, (ROWS, 7)).astype("int32")
    ids[np.arange(7)[None] >= rng(2).integers(3, 8, (ROWS, 1))] = 0
    y = (ids[:, 0] % 3).astype("int32")
    weights = rng(3).uniform(0.5, 2, ROWS).astype("float32")
    more = rng(4).normal(size=(ROWS, 3)).astype("float32")
    loss = keras.losses.SparseCategoricalCrossentropy()
    return treadle.Supervised(model, loss, adam(), ["accuracy"]), source((ids, more), y, weights)


@sound
def attention_with_padding() -> Any:
    tokens = keras.Input((7,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(tokens)
    attention = layers.MultiHeadAttention(2, 4, dropout=0.1)
    x = layers.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
    model = keras.Model(tokens, layers.Dense(9)(x))

    def train_step(self: Any, batch: Any) -> Any:
        ids, following = batch

        def loss() -> Any:
            losses = ops.sparse_categorical_crossentropy(
                following, self.model(ids, training=True), from_logits=True
            )
            mask = ops.cast(following != 0, losses.dtype)
            return ops.sum(losses * mask) / ops.sum(mask)

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    ids = rng(1).integers(1, 9, (ROWS, 8)).astype("int32")
    ids[np.arange(8)[None] >= rng(2).integers(3, 9, (ROWS, 1))] = 0
    return stepping(train_step, model=model, optimizer=adam()), source(ids[:, :-1], ids[:, 1:])


def load_weights(*parts: Any) -> None:
    """Give layers other kernels than those of their initializers, as a file would."""
    for layer in parts:
        layer.kernel.assign(rng(7).normal(size=layer.kernel.shape, scale=0.3).astype("float32"))


@sound
def frozen_backbone_with_a_regularizer() -> Any:
    penalty = keras.regularizers.L2(1e-4)
    body = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "relu", kernel_regularizer=penalty),
            layers.BatchNormalization(),
        ]
    )
    load_weights(body.layers[0])
    body.trainable = False
    inputs = keras.Input((6,))
    x = layers.Dropout(0.2)(body(inputs, training=False))
    model = keras.Model(inputs, layers.Dense(3)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = treadle.Supervised(model, loss, adam(), ["accuracy"])
    return task, Datasets(source(*classes()), source(*classes(seed=1)))


@sound
def frozen_by_name() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        variables = treadle.transforms.trainable(self.model, frozen="*layers/0/*")
        loss, grads = treadle.gradients(lambda: ops.mean((self.model(x) - y) ** 2), variables)
        self.optimizer.apply(grads, variables)
        return {"loss": loss}

    return stepping(train_step, model=dense(6, 8, 1), optimizer=adam()), source(*numbers())


@sound
def fine_tuning_with_pretrained_statistics() -> Any:
    normalization = layers.BatchNormalization()
    body = keras.Sequential([keras.Input((6,)), layers.Dense(8), normalization])
    normalization.moving_mean.assign(rng().normal(size=8))
    head = dense(8, 1)

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        variables = self.body.trainable_variables + self.head.trainable_variables
        loss, grads = treadle.gradients(
            lambda: ops.mean((self.head(self.body(x, training=False)) - y) ** 2), variables
        )
        self.optimizer.apply(grads, variables)
        return {"loss": loss}

    return stepping(train_step, body=body, head=head, optimizer=adam()), source(*numbers())


@sound
def average_teacher() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def loss() -> Any:
            noisy = x + 0.1 * keras.random.normal(ops.shape(x), seed=self.seed)
            outputs = self.model(noisy, training=True)
            aims = ops.stop_gradient(self.teacher(x, training=False))
            return ops.mean((outputs - y) ** 2) + 0.1 * ops.mean((outputs - aims) ** 2)

        result = treadle.minimize(loss, self.model, self.optimizer)
        treadle.blend(self.teacher, self.model, 0.05)
        return {"loss": result}

    def eval_step(self: Any, batch: Any) -> Any:
        x, y = batch
        return {"loss": ops.mean((self.teacher(x, training=False) - y) ** 2)}

    model = network(1, kernel_regularizer=None)
    parts = {"model": model, "teacher": treadle.frozen_copy(model)}
    task = stepping(
        train_step, eval_step, **parts, optimizer=adam(), seed=keras.random.SeedGenerator(1)
    )
    return task, Datasets(source(*numbers()), source(*numbers(seed=1)))


@sound
def two_losses_and_a_dict_of_variables() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x = batch["x"]

        def losses() -> Any:
            features = self.body(x)
            number = ops.mean((self.number(features)[:, 0] - batch["number"]) ** 2)
            kind = self.cross_entropy(batch["kind"], self.kind(features))
            return {"body": number + kind, "heads": number + kind}

        variables = {
            "body": self.body.trainable_variables,
            "heads": self.number.trainable_variables + self.kind.trainable_variables,
        }
        found, grads = treadle.gradients(losses, variables)
        self.slow.apply(grads["body"], variables["body"])
        self.fast.apply(grads["heads"], variables["heads"])
        return {"loss": found["body"]}

    x, kind = classes()
    data = {"x": x, "kind": kind, "number": numbers()[1][:, 0]}
    task = stepping(
        train_step,
        body=dense(6, 8, 8),
        number=dense(8, 1),
        kind=dense(8, 3, last="softmax"),
        slow=adam(1e-4),
        fast=adam(),
        cross_entropy=keras.losses.SparseCategoricalCrossentropy(),
    )
    return task, source(data)


def adapted(**options: Any) -> Any:
    """Return a model with a zero-initialized adapter next to a frozen layer."""

    class Adapted(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.base = layers.Dense(8, trainable=False)
            self.down = layers.Dense(4, use_bias=False)
            self.up = layers.Dense(8, use_bias=False, kernel_initializer="zeros")

        def build(self, shape: Any) -> None:
            self.base.build(shape)
            self.down.build(shape)
            self.up.build((None, 4))

        def call(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x))

    adapter, head = Adapted(), layers.Dense(1, trainable=False)
    model = keras.Sequential([keras.Input((6,)), adapter, head])
    load_weights(adapter.base, head)
    return model


@sound
def low_rank_adapters() -> Any:
    return Regression(adapted(), adam()), source(*numbers())


@sound
def adapters_with_an_accumulator() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        variables = self.model.trainable_variables
        loss, grads = treadle.gradients(lambda: ops.mean((self.model(x) - y) ** 2), variables)
        self.accumulator.add(grads, lambda mean: self.optimizer.apply(mean, variables))
        return {"loss": loss}

    parts = {"model": adapted(), "optimizer": adam(), "accumulator": treadle.Accumulator(8)}
    return stepping(train_step, **parts), source(*numbers())


@sound
def zero_initialized_last_layer() -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, "tanh"),
            layers.Dense(3, "softmax", kernel_initializer="zeros"),
        ]
    )
    loss = keras.losses.CategoricalCrossentropy(label_smoothing=0.1)
    x, y = classes()
    task = treadle.Supervised(model, loss, keras.optimizers.SGD(0.1), ["accuracy"])
    return task, source(x, np.eye(3, dtype="float32")[y])


@sound
def updates_now_and_then() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        loss = treadle.minimize(
            lambda: ops.mean((self.head(ops.stop_gradient(self.body(x))) - y) ** 2),
            self.head,
            self.optimizer,
        )

        def update() -> Any:
            return treadle.minimize(
                lambda: ops.mean((self.head(self.body(x)) - y) ** 2), self.body, self.slow
            )

        other = treadle.cond(treadle.step() % 4 == 3, update, lambda: ops.zeros(()))
        return {"loss": loss, "other": other}

    parts = {"body": dense(6, 8, 4, last="tanh"), "head": dense(4, 1)}
    return stepping(train_step, **parts, optimizer=adam(), slow=adam()), source(*numbers())


@sound
def autoencoder_of_one_array() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            return self.loss(batch, self.decoder(self.encoder(batch)))

        variables = self.encoder.trainable_variables + self.decoder.trainable_variables
        found, grads = treadle.gradients(loss, variables)
        clipped, norm = treadle.clip_by_global_norm(grads, 1.0)
        self.optimizer.apply(clipped, variables)
        return {"loss": found, "norm": norm}

    parts = {"encoder": dense(6, 8, 2), "decoder": dense(2, 8, 6, last="sigmoid")}
    loss = keras.losses.BinaryCrossentropy()
    x = rng().random((ROWS, 6)).astype("float32")
    return stepping(train_step, **parts, loss=loss, optimizer=adam()), source(x)


@sound
def standardized_targets() -> Any:
    x, y = numbers()
    y = 1000 + 300 * y
    y = (y - y.mean()) / y.std()
    normalization = layers.Normalization()
    normalization.adapt(x)
    hidden = layers.Dense(16, "relu", kernel_regularizer="l2")
    model = keras.Sequential([keras.Input((6,)), normalization, hidden, layers.Dense(1)])
    task = treadle.Supervised(model, "huber", adam(), ["mae", keras.metrics.R2Score()])
    return task, Datasets(source(x, y), source(x[:0:-1] + 0.01, y[:0:-1]))


@sound
def mixed_precision() -> Any:
    policy = keras.mixed_precision.DTypePolicy("mixed_bfloat16")
    model = keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(16, "relu", dtype=policy),
            layers.Dense(40, "softmax", dtype=policy),
        ]
    )
    x, y = classes()
    task = treadle.Supervised(model, "sparse_categorical_crossentropy", adam(), ["accuracy"])
    return task, source(x, y)


@sound
def logits_with_a_threshold_of_zero() -> Any:
    metrics = [keras.metrics.BinaryAccuracy(threshold=0.0), keras.metrics.AUC(from_logits=True)]
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    x, y = numbers()
    data = source(x, (y > 0).astype("float32"))
    return treadle.Supervised(network(1), loss, adam(), metrics), data


@sound
def batches_of_one_row() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = classes()
    held_out = treadle.data.from_arrays(*classes(seed=1), batch_size=1)
    data = Datasets(treadle.data.from_arrays(x, y, batch_size=1, seed=0), held_out)
    return treadle.Supervised(network(3), loss, keras.optimizers.SGD(0.01), ["accuracy"]), data


@sound
def regression_of_single_rows() -> Any:
    x, y = numbers()
    a, b = numbers(seed=1)
    a[0] /= 100  # by chance much smaller than the rows of the training data
    train = treadle.data.from_arrays(x, y, batch_size=1, seed=0)
    return Regression(), Datasets(train, treadle.data.from_arrays(a, b, batch_size=1))


@sound
def labels_that_are_zero_in_some_batches() -> Any:
    x, _ = classes()
    y = (np.arange(ROWS) == 5).astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    task = treadle.Supervised(network(2), loss, adam(), ["accuracy"])
    return task, treadle.data.from_arrays(x, y, batch_size=8, shuffle=False)


@sound
def two_samples_of_one_column() -> Any:
    """Two samples of a distribution that are compared as sets, not row by row."""

    def train_step(self: Any, batch: Any) -> Any:
        noise, real = batch

        def critic_loss() -> Any:
            fake = ops.stop_gradient(self.generator(noise))
            return ops.mean(ops.softplus(self.critic(fake))) + ops.mean(
                ops.softplus(-self.critic(real))
            )

        c = treadle.minimize(critic_loss, self.critic, self.c_optimizer)
        g = treadle.minimize(
            lambda: ops.mean(ops.softplus(-self.critic(self.generator(noise)))),
            self.generator,
            self.optimizer,
        )
        return {"c_loss": c, "g_loss": g}

    noise, real = rng(1).normal(size=(2, ROWS, 1)).astype("float32")
    parts = {"generator": dense(1, 8, 1), "critic": dense(1, 8, 1)}
    task = stepping(train_step, **parts, optimizer=adam(), c_optimizer=adam())
    return task, source(noise, 3 + real)


@sound
def reward_is_maximized() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        score, grads = treadle.gradients(
            lambda: -ops.mean((self.model(x) - y) ** 2), self.model.trainable_variables
        )
        self.optimizer.apply([-g for g in grads], self.model.trainable_variables)
        return {"score": score}

    return stepping(train_step, model=network(1), optimizer=adam()), source(*numbers())


@sound
def state_with_infinities() -> Any:
    task = Regression()
    task.best = keras.Variable(float("inf"), trainable=False)

    def train_step(self: Any, batch: Any) -> Any:
        loss = treadle.minimize(lambda: self.objective(batch), self.model, self.optimizer)
        return {"loss": loss, "best": self.best.value}

    task.__class__ = type("Best", (Regression,), {"train_step": train_step})
    return task, source(*numbers())


@sound
def time_as_a_feature_and_an_array() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, age, y = batch

        def loss() -> Any:
            weight = ops.exp(-age)
            return ops.sum(weight * (self.model(x)[:, 0] - y) ** 2) / ops.sum(weight)

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    x, y = numbers()
    x[:, 4] = rng(2).random(ROWS)
    return stepping(train_step, model=network(1), optimizer=adam()), source(x, x[:, 4], y[:, 0])


@sound
def slow_exponential_decay() -> Any:
    rate = keras.optimizers.schedules.ExponentialDecay(1e-3, 1000, 0.9)
    task = Regression(optimizer=keras.optimizers.Adam(rate))
    task.steps = 1000
    return task, source(*numbers())


@sound
def warmup_by_hand() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        rate = 1e-3 * ops.minimum(ops.cast(treadle.step(), "float32") / 100, 1.0)
        self.optimizer.learning_rate = rate
        loss = treadle.minimize(lambda: self.objective(batch), self.model, self.optimizer)
        return {"loss": loss}

    task = Regression(optimizer=keras.optimizers.SGD(1e-3))
    task.__class__ = type("Warmup", (Regression,), {"train_step": train_step})
    return task, source(*numbers())


@sound
def small_initial_embeddings() -> Any:
    table = layers.Embedding(50, 8, embeddings_initializer=keras.initializers.RandomNormal(0, 1e-3))
    model = keras.Sequential([keras.Input((2,), dtype="int32"), table, layers.Flatten()])
    model.add(layers.Dense(1))
    ids = rng(1).integers(0, 50, (ROWS, 2)).astype("int32")
    y = (ids.sum(1, keepdims=True) / 50 - 1).astype("float32")
    return Regression(model, adam(1e-2)), source(ids, y)


@sound
def few_distinct_rows() -> Any:
    x = rng(1).integers(0, 2, (ROWS, 4)).astype("float32")
    y = (x.sum(1) + rng(2).normal(size=ROWS)).astype("float32")[:, None]
    return Regression(dense(4, 8, 1)), Datasets(source(x[:96], y[:96]), source(x[96:], y[96:]))


@sound
def masked_labels() -> Any:
    x, y = numbers()
    y = np.concatenate([y > 0, y > 0.5], -1).astype("float32")
    weight = (rng(2).random(ROWS) > 0.3).astype("float32")
    y[weight == 0] = -1
    return treadle.Supervised(network(2, "sigmoid"), "mse", adam()), source(x, y, weight)


@sound
def weights_without_layers() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def loss() -> Any:
            hidden = ops.tanh(ops.matmul(x, self.first))
            return ops.mean((ops.matmul(hidden, self.second) - y) ** 2)

        return {"loss": treadle.minimize(loss, [self.first, self.second], self.optimizer)}

    x = rng().normal(size=(ROWS, 8)).astype("float32")
    sizes = enumerate([(8, 16), (16, 1)])  # so small that larger ones have a smaller error at first
    first, second = (
        keras.Variable(0.01 * rng(seed).normal(size=size).astype("float32")) for seed, size in sizes
    )
    task = stepping(train_step, first=first, second=second, optimizer=adam())
    return task, source(x, x[:, :1] - x[:, 1:2])


@sound
def classes_that_are_a_condition() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, labels, y = batch
        inputs = ops.concatenate([x, ops.one_hot(labels, 10)], -1)
        loss = treadle.minimize(
            lambda: ops.mean((self.model(inputs) - y) ** 2), self.model, self.optimizer
        )
        return {"loss": loss}

    model = dense(16, 10)
    # The largest output is that of the last class, with which all outputs are larger.
    kernel = np.concatenate([0.1 * rng().normal(size=(6, 10)), np.diag(np.arange(10.0))])
    model.set_weights([kernel, np.arange(10.0)])
    x, _ = numbers()
    y = np.repeat(x[:, :1], 10, axis=1)
    return (
        stepping(train_step, model=model, optimizer=adam()),
        source(x, rng(1).integers(0, 10, ROWS), y),
    )


@sound
def policy_gradient_with_normalized_returns() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, actions, returns = batch
        weights = (returns - ops.mean(returns)) / (ops.std(returns) + 1e-6)

        def loss() -> Any:
            chosen = ops.sum(ops.log_softmax(self.policy(x)) * ops.one_hot(actions, 3), -1)
            return -ops.mean(weights * chosen)

        return {"loss": treadle.minimize(loss, self.policy, self.optimizer)}

    keras.utils.set_random_seed(0)
    policy = dense(4, 32, 3, activation="tanh")
    x, moves = rng(3).normal(size=(256, 4)).astype("float32"), rng(4).integers(0, 3, 256)
    returns = (10 + rng(5).normal(size=256) + x[:, 0]).astype("float32")
    return stepping(train_step, policy=policy, optimizer=adam()), source(x, moves, returns)


@sound
def views_that_are_flipped_independently() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        def loss() -> Any:
            a, b = (ops.normalize(self.model(view), axis=-1) for view in batch)
            logits = ops.matmul(a, ops.transpose(b)) / 0.2
            own = ops.arange(ops.shape(logits)[0])
            return ops.mean(
                keras.losses.sparse_categorical_crossentropy(own, logits, from_logits=True)
            )

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    images = np.zeros((ROWS, 12, 12, 1), "float32")
    for image, (row, column) in zip(images, rng().integers(0, 7, (ROWS, 2)), strict=True):
        image[row : row + 5, column : column + 3] = 1
    views = [images.copy(), images.copy()]
    for seed, view in enumerate(views):
        flipped = rng(seed).random(ROWS) < 0.5
        view[flipped] = view[flipped][:, :, ::-1]
    parts = [layers.Conv2D(8, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(16)]
    model = keras.Sequential([keras.Input((12, 12, 1)), *parts])
    return stepping(train_step, model=model, optimizer=adam()), source(*views)


@sound
def correlations_of_features() -> Any:
    def loss_of(self: Any, batch: Any) -> Any:
        x, y = batch
        features = self.encoder(x)
        z = features - ops.mean(features, 0)
        z = z / ops.norm(z, axis=0, keepdims=True)
        unlike = ops.matmul(ops.transpose(z), z) - ops.eye(2 * BATCH)
        return ops.mean((self.head(features) - y) ** 2) + ops.mean(unlike**2)

    def train_step(self: Any, batch: Any) -> Any:
        variables = self.encoder.trainable_variables + self.head.trainable_variables
        return {"loss": treadle.minimize(lambda: loss_of(self, batch), variables, self.optimizer)}

    parts = {"encoder": dense(6, 2 * BATCH), "head": dense(2 * BATCH, 1), "optimizer": adam()}
    return stepping(train_step, **parts), source(*numbers())


@sound
def values_that_are_missing() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch
        x = ops.where(ops.isnan(x), ops.zeros_like(x), x)
        loss = treadle.minimize(
            lambda: ops.mean((self.model(x) - y) ** 2), self.model, self.optimizer
        )
        return {"loss": loss}

    x, y = numbers()
    x[::7, 2] = np.nan

    def batch(passed: np.random.Generator) -> Any:
        rows = passed.integers(0, ROWS, BATCH)
        return x[rows], y[rows]

    task = stepping(train_step, model=network(1), optimizer=adam())
    return task, treadle.data.from_function(batch, length=6)


@sound
def a_model_called_with_keyword_arguments() -> Any:
    def train_step(self: Any, batch: Any) -> Any:
        x, following, rewards = batch

        def loss() -> Any:
            after = ops.stop_gradient(self.model(following))
            return ops.mean((self.model(inputs=x) - rewards - 0.9 * after) ** 2)

        return {"loss": treadle.minimize(loss, self.model, self.optimizer)}

    x, y = numbers()
    model = keras.Model(inputs := keras.Input((6,), name="inputs"), layers.Dense(1)(inputs))
    return stepping(train_step, model=model, optimizer=adam()), source(x, numbers(seed=1)[0], y)


@sound
def nodes_of_one_graph() -> Any:
    size = 24
    random = np.random.default_rng(0)
    neighbours = (random.random((size, size)) < 0.3).astype("float32") + np.eye(size)
    neighbours = (neighbours / neighbours.sum(axis=1, keepdims=True)).astype("float32")

    def train_step(self: Any, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            outputs = self.model(ops.matmul(self.neighbours, x), training=True)
            return ops.mean((ops.matmul(self.neighbours, outputs) - y) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    x = random.normal(size=(size, 4)).astype("float32")
    task = stepping(train_step, model=dense(4, 8, 1), neighbours=neighbours, optimizer=adam(1e-2))
    return task, [(x, neighbours @ x[:, :1])] * 4


@sound
def rows_that_are_points_in_time() -> Any:
    """The first axis is time: what is at one point changes all later outputs."""

    def decay(length: int) -> Any:
        apart = np.arange(length)[:, None] - np.arange(length)
        return np.where(apart < 0, 0.0, 0.5 ** np.maximum(apart, 0)).astype("float32")

    class Leaky(layers.Layer):
        """Adds up its inputs over time, and forgets half at each point."""

        def call(self, x: Any) -> Any:
            return ops.einsum("ij,jbf->ibf", ops.convert_to_tensor(decay(x.shape[0])), x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    def batch(random: np.random.Generator) -> Any:
        x = random.normal(size=(24, 5, 4)).astype("float32")
        return x, np.einsum("ij,jbf->ibf", decay(24), x[..., :1] - x[..., 1:2])

    model = keras.Sequential([keras.Input((5, 4)), layers.Dense(8), Leaky(), layers.Dense(1)])
    return Regression(model), treadle.data.from_function(batch, length=6)


@sound
def nodes_of_a_graph_for_each_batch() -> Any:
    """Each row lists its neighbors, as points of a cloud do."""

    def train_step(self: Any, batch: Any) -> Any:
        x, neighbors, y = batch

        def objective() -> Any:
            around = ops.mean(ops.take(x, neighbors, axis=0), axis=1)
            return ops.mean((self.model(ops.concatenate([x, around], 1), training=True) - y) ** 2)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    def batch(random: np.random.Generator) -> Any:
        x = random.normal(size=(16, 3)).astype("float32")
        neighbors = random.integers(0, 16, (16, 4)).astype("int32")
        return x, neighbors, x[neighbors].mean(1)[:, :1] - x[:, 1:2]

    task = stepping(train_step, model=dense(6, 8, 1), optimizer=adam(1e-2))
    return task, treadle.data.from_function(batch, length=6)
