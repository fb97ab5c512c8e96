"""Eighty small programs, each in a sound form and with one mistake that trains on in silence.

Their author had seen neither the doctor nor its tests. `python -m tests.doctor.differences` says
how often the difference of two sheets names the culprit.
"""

# pyright: reportArgumentType=false, reportFunctionMemberAccess=false

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import treadle

Pair = tuple[Any, Any]
PAIRS: list[tuple[Any, tuple[str, ...]]] = []
BCE, LOGITS = keras.losses.BinaryCrossentropy, {"from_logits": True}
CE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def pair(*culprits: str) -> Any:
    """Enter a function in PAIRS with its culprits; both forms begin with the same weights."""

    def enter(build: Any) -> Any:
        def function(wrong: bool) -> Pair:
            keras.utils.set_random_seed(7)
            return build(wrong)

        function.__name__, function.__doc__ = build.__name__, build.__doc__
        function.__wrapped__ = build  # for inspect.getsource
        PAIRS.append((function, culprits))
        return function

    return enter


class Program(treadle.Task):
    """Minimizes `objective(task, batch)`, a loss or (loss, outputs), over the parts named `of`."""

    measure: Any = None
    after: Any = None

    def __init__(self, objective: Any, of: str, unreached: Any, optimizer: Any, parts: Any) -> None:
        for name, part in parts.items():
            setattr(self, name, part)
        self.objective, self.of, self.unreached = objective, of.split(), unreached
        self.optimizer = keras.optimizers.Adam(0.01) if optimizer is None else optimizer

    def train_step(self, batch: Any) -> Any:
        variables = variables_of(self, self.of)
        objective = lambda: self.objective(self, batch)
        result, grads = treadle.gradients(objective, variables, self.unreached)
        loss, outputs = result if isinstance(result, tuple) else (result, None)
        self.optimizer.apply(grads, variables)
        if self.measure is not None:
            self.measure(self, batch[1], outputs)
        if self.after is not None:
            self.after(self)
        return {"loss": loss}


class Evaluated(Program):
    """A program with an `eval_step`, whose loss is `evaluate(task, batch)`."""

    evaluate: Any

    def eval_step(self, batch: Any) -> Any:
        return {"loss": self.evaluate(self, batch)}


class Adversarial(treadle.Task):
    """A GAN: `losses(task, real, noise)` returns the losses "d" and "g"."""

    def __init__(self, losses: Any, d_of: str = "discriminator") -> None:
        self.generator, self.discriminator = stack(3, 8, 2), stack(2, 8, 1)
        self.g_optimizer, self.d_optimizer = (keras.optimizers.Adam(1e-3) for _ in range(2))
        self.seeds = keras.random.SeedGenerator(1)
        self.losses, self.d_of = losses, d_of.split()

    def train_step(self, batch: Any) -> Any:
        noise = keras.random.normal((batch.shape[0], 3), seed=self.seeds)
        owned = {"d": variables_of(self, self.d_of), "g": self.generator.trainable_variables}
        losses, grads = treadle.gradients(lambda: self.losses(self, batch, noise), owned, "zeros")
        self.d_optimizer.apply(grads["d"], owned["d"])
        self.g_optimizer.apply(grads["g"], owned["g"])
        return {"d_loss": losses["d"], "g_loss": losses["g"]}


def variables_of(task: Any, names: Any) -> list[Any]:
    parts = [getattr(task, name) for name in names]
    return [v for part in parts for v in getattr(part, "trainable_variables", [part])]


def program(
    source: Any, objective: Any, of: Any = "model", unreached: Any = "error", **parts: Any
) -> Pair:
    kind = Evaluated if "evaluate" in parts else Program
    return kind(objective, of, unreached, parts.pop("optimizer", None), parts), source


def fit(model: Any, loss: Any, source: Any, optimizer: Any = None) -> Pair:
    return treadle.Supervised(model, loss, optimizer or keras.optimizers.Adam(0.01)), source


def stack(inputs: int, *units: int, last: Any = None, hidden: Any = "relu") -> Any:
    body = [layers.Dense(n, hidden) for n in units[:-1]]
    return chain((inputs,), *body, layers.Dense(units[-1], last))


def chain(shape: Any, *parts: Any, dtype: Any = None) -> Any:
    return keras.Sequential([keras.Input(shape, dtype=dtype), *parts])


def language_model() -> Any:
    body = [layers.Embedding(8, 6), layers.GRU(6, return_sequences=True), layers.Dense(8)]
    return chain((8,), *body, dtype="int32")


def segmenter() -> Any:
    convolution = layers.Conv2D(4, 3, padding="same", activation="relu")
    return chain((8, 8, 1), convolution, layers.Conv2D(1, 1))


def teacher(x: Any, y: Any) -> Any:
    """Return a network whose last layer is fitted by least squares."""
    model = stack(4, 16, 3)
    hidden = ops.convert_to_numpy(model.layers[0](x))
    kernel = np.linalg.lstsq(hidden, 4 * one_hot(y), rcond=None)[0]
    model.layers[1].kernel.assign(kernel.astype("float32"))
    return model


def ce(y: Any, logits: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)


def mean_ce(y: Any, logits: Any) -> Any:
    return ops.mean(ce(y, logits))


def masked_ce(y: Any, logits: Any) -> Any:
    mask = ops.cast(y > 0, "float32")
    return ops.sum(mask * ce(y, logits)) / ops.sum(mask)


def soft_ce(p: Any, logits: Any) -> Any:
    return -ops.mean(ops.sum(p * ops.log_softmax(logits), axis=-1))


def bce(y: Any, logits: Any) -> Any:
    return ops.mean(ops.softplus(logits) - y * logits)


def rows(*arrays: Any, **how: Any) -> Any:
    return treadle.data.from_arrays(*arrays, **{"batch_size": 16, "seed": 1, **how})


def draw(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def whole(seed: int, low: int, high: int, *shape: int) -> Any:
    return np.random.default_rng(seed).integers(low, high, shape).astype("int32")


def blobs() -> Any:
    y = whole(1, 0, 3, 64)
    return 1.5 * draw(2, 3, 4)[y] + 0.7 * draw(3, 64, 4), y


def one_hot(y: Any) -> Any:
    return np.eye(3, dtype="float32")[y]


def binary(threshold: float = 0.0) -> Any:
    x = draw(1, 64, 4)
    score = x @ np.array([1.0, -1.0, 0.5, 0.7]) + 0.3 * draw(2, 64)
    return x, (score > threshold).astype("float32")[:, None]


def line() -> Any:
    x = draw(1, 64, 4)
    y = x @ draw(2, 4, 1) + 0.1 * draw(3, 64, 1)
    return x, y / y.std()


def pixels() -> Any:
    y = whole(1, 0, 3, 64)
    return np.clip(whole(2, 30, 220, 3, 16)[y] + 30 * draw(3, 64, 16), 0, 255).astype("uint8"), y


def scenes() -> Any:
    mask = np.zeros((32, 8, 8, 1), "float32")
    for row, (i, j) in enumerate(whole(1, 0, 5, 32, 2)):
        mask[row, i : i + 4, j : j + 4] = 1
    return 0.3 * draw(2, 32, 8, 8, 1) + mask, mask


def tokens(padded: bool = False) -> Any:
    text, follows = whole(1, 1, 8, 64, 9), np.random.default_rng(2).random((64, 9)) < 0.8
    for i in range(1, 9):
        text[:, i] = np.where(follows[:, i], text[:, i - 1] * 3 % 7 + 1, text[:, i])
    return np.where(np.arange(9) < whole(3, 4, 10, 64, 1), text, 0) if padded else text


def next_tokens(padded: bool = False) -> Any:
    return rows(tokens(padded)[:, :-1], tokens(padded)[:, 1:])


def walks() -> Any:
    x = draw(1, 64, 6, 2)
    return x, (x.sum(axis=(1, 2)) > 0).astype("int32")


def factors() -> Any:
    x = draw(1, 64, 2) @ draw(2, 2, 6) + 0.1 * draw(3, 64, 6)
    return x / x.std()


def circle() -> Any:
    points = draw(1, 64, 2)
    return points / np.linalg.norm(points, axis=1, keepdims=True)


@pair("batch[1]", "batch[0]")
def unpaired_labels(wrong: bool) -> Pair:
    """The rows of the inputs are shuffled, the labels are not."""
    x, y = blobs()
    order = np.random.default_rng(4).permutation(64)
    return fit(stack(4, 8, 3), CE, rows(x[order], y if wrong else y[order]))


@pair("batch[0]")
def raw_pixels(wrong: bool) -> Pair:
    """Pixels from 0 to 255 are not divided by 255."""
    x, y = pixels()
    return fit(stack(16, 8, 3), CE, rows(x.astype("float32") / (1 if wrong else 255), y))


@pair("data")
def sorted_classes(wrong: bool) -> Pair:
    """The file is sorted by class, and the source does not shuffle."""
    x, y = blobs()
    order = np.argsort(y, kind="stable")
    return fit(stack(4, 8, 3), CE, rows(x[order], y[order], shuffle=not wrong))


@pair("batch[0]")
def leaked_label(wrong: bool) -> Pair:
    """The column of the outcome has stayed in the table of features."""
    x, y = binary()
    x = np.concatenate([x, y if wrong else draw(3, 64, 1)], axis=1)
    return fit(stack(5, 8, 1), BCE(**LOGITS), rows(x, y))


@pair("batch[1]", "model/layers/1")
def labels_from_one(wrong: bool) -> Pair:
    """Labels count from 1, so the first of the outputs is never right."""
    x, y = blobs()
    y = y + 1 if wrong else y
    return fit(stack(4, 8, int(y.max()) + 1), CE, rows(x, y))


@pair("batch[1]")
def truncated_labels(wrong: bool) -> Pair:
    """Probabilities are cast to integers instead of compared with 0.5: all labels are 0."""
    x, score = line()
    p = 1 / (1 + np.exp(-score))
    return fit(stack(4, 8, 1), BCE(**LOGITS), rows(x, (p if wrong else p > 0.5).astype("int32")))


@pair("batch[1]", "loss")
def hinge_labels(wrong: bool) -> Pair:
    """A hinge loss for labels -1 and 1 gets labels 0 and 1."""
    x, y = binary()
    hinge = lambda t, b: ops.mean(ops.relu(1 - b[1] * t.model(b[0])))
    return program(rows(x, y if wrong else 2 * y - 1), hinge, model=stack(4, 8, 1))


@pair("batch[0]")
def integer_division(wrong: bool) -> Pair:
    """Images of uint8 are divided with //, which leaves only black ones."""
    x, y = pixels()
    return fit(stack(16, 8, 3), CE, rows((x // 255 if wrong else x / 255).astype("float32"), y))


@pair("batch[0]")
def reshaped_channels(wrong: bool) -> Pair:
    """Images with channels first are reshaped, not transposed, to channels last."""
    y = whole(1, 0, 3, 64)
    x = one_hot(y)[:, :, None, None] + 0.5 * draw(2, 64, 3, 8, 8)
    x = x.reshape(64, 8, 8, 3) if wrong else x.transpose(0, 2, 3, 1)
    body = [layers.Conv2D(4, 3, activation="relu"), layers.GlobalAveragePooling2D()]
    return fit(chain((8, 8, 3), *body, layers.Dense(3)), CE, rows(x, y))


@pair("data", "batch[0]")
def same_batch(wrong: bool) -> Pair:
    """Each step takes the first batch of a new iterator, so all steps see the same rows."""
    x, y = blobs()
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 64, 16)]
    return fit(stack(4, 8, 3), CE, [next(iter(batches)) if wrong else b for b in batches])


@pair("batch[1]", "loss")
def mask_of_255(wrong: bool) -> Pair:
    """Masks of a segmentation are 0 and 255, as in the files, instead of 0 and 1."""
    x, y = scenes()
    return fit(segmenter(), BCE(**LOGITS), rows(x, 255 * y if wrong else y, batch_size=8))


@pair("model/layers/0", "batch[0]")
def rescaled_twice(wrong: bool) -> Pair:
    """The data are divided by 255 already, and the model's first layer does it again."""
    x, y = pixels()
    body = [layers.Rescaling(1 / 255), layers.Dense(8, "relu"), layers.Dense(3)]
    return fit(chain((16,), *body), CE, rows(x.astype("float32") / (255 if wrong else 1), y))


@pair("model/layers/0", "batch[0]")
def not_adapted(wrong: bool) -> Pair:
    """The Normalization layer was never adapted to the data, so it changes nothing."""
    x, y = blobs()
    x, normalization = 300 + 40 * x, layers.Normalization()
    if not wrong:
        normalization.adapt(x)
    return fit(chain((4,), normalization, layers.Dense(8, "relu"), layers.Dense(3)), CE, rows(x, y))


@pair("batch[2]")
def frequent_class_weights(wrong: bool) -> Pair:
    """Weights of the classes are their frequencies, not the inverse: rare ones count less."""
    x, y = binary(threshold=1.5)
    frequency = np.where(y > 0, y.sum(), (1 - y).sum())[:, 0].astype("float32")
    weights = frequency if wrong else 1 / frequency
    return fit(stack(4, 8, 1), BCE(**LOGITS), rows(x, y, weights / weights.mean()))


@pair("model/layers/1", "loss")
def softmax_twice(wrong: bool) -> Pair:
    """The model ends in a softmax, and the loss applies another one (from_logits=True)."""
    return fit(stack(4, 8, 3, last="softmax" if wrong else None), CE, rows(*blobs()))


@pair("loss", "model/layers/1")
def logits_as_probabilities(wrong: bool) -> Pair:
    """The loss takes the outputs of a linear layer for probabilities (no from_logits=True)."""
    return fit(stack(4, 8, 1), BCE(from_logits=not wrong), rows(*binary()))


@pair("model/layers/1")
def softmax_of_labels(wrong: bool) -> Pair:
    """Independent labels of one example compete in a softmax instead of having sigmoids."""
    x = draw(1, 64, 4)
    y = (x @ draw(2, 4, 3) > 0).astype("float32")
    return fit(stack(4, 8, 3, last="softmax" if wrong else "sigmoid"), BCE(), rows(x, y))


@pair("model/layers/1")
def relu_output(wrong: bool) -> Pair:
    """The output of a regression has a relu, but half of the targets are negative."""
    return fit(stack(4, 8, 1, last="relu" if wrong else None), "mse", rows(*line()))


@pair("batch[1]", "loss")
def broadcast_targets(wrong: bool) -> Pair:
    """Targets of shape (n,) minus predictions of shape (n, 1) give an n × n matrix."""
    x, y = line()
    error = lambda t, b: ops.mean((b[1] - t.model(b[0])) ** 2)
    return program(rows(x, y[:, 0] if wrong else y), error, model=stack(4, 8, 1))


@pair("loss")
def softmax_over_batch(wrong: bool) -> Pair:
    """The log-softmax of a loss by hand goes over the examples instead of the classes."""
    x, y = blobs()
    log_p = lambda logits: ops.log_softmax(logits, axis=0 if wrong else -1)
    objective = lambda t, b: -ops.mean(ops.sum(b[1] * log_p(t.model(b[0])), axis=-1))
    return program(rows(x, one_hot(y)), objective, model=stack(4, 8, 3))


@pair("loss")
def rounded_predictions(wrong: bool) -> Pair:
    """The loss is computed from rounded predictions, through which no gradient flows."""
    rounded = ops.round if wrong else (lambda p: p)
    error = lambda t, b: ops.mean((rounded(ops.sigmoid(t.model(b[0]))) - b[1]) ** 2)
    return program(rows(*binary()), error, model=stack(4, 8, 1))


@pair("loss")
def minimized_likelihood(wrong: bool) -> Pair:
    """The log-likelihood is minimized: its minus sign is missing."""
    sign = 1 if wrong else -1
    likelihood = lambda t, b: ops.mean(ops.sum(b[1] * ops.log_softmax(t.model(b[0])), axis=-1))
    x, y = blobs()
    return program(rows(x, one_hot(y)), lambda t, b: sign * likelihood(t, b), model=stack(4, 8, 3))


@pair("loss")
def pinball_turned(wrong: bool) -> Pair:
    """The residual of a quantile loss is turned around: it fits the 10 % quantile, not 90 %."""
    pinball = lambda residual: ops.mean(ops.maximum(0.9 * residual, -0.1 * residual))
    residual = lambda y, guess: guess - y if wrong else y - guess
    objective = lambda t, b: pinball(residual(b[1], t.model(b[0])))
    return program(rows(*line()), objective, model=stack(4, 8, 1))


@pair("loss")
def residual_not_squared(wrong: bool) -> Pair:
    """The residual of a differential equation is averaged without a square."""

    def objective(t: Any, b: Any) -> Any:
        _, (slope,) = treadle.input_gradients(lambda s: ops.sum(t.model(s)), b)
        residual = slope + t.model(b)
        start = ops.mean((t.model(ops.zeros((1, 1))) - 1) ** 2)
        return ops.mean(residual if wrong else residual**2) + start

    return program(rows(np.abs(draw(1, 64, 1))), objective, model=stack(1, 8, 8, 1, hidden="tanh"))


@pair("loss", "model/layers/1")
def dice_of_logits(wrong: bool) -> Pair:
    """The dice loss of a segmentation is computed from logits instead of probabilities."""

    def objective(t: Any, b: Any) -> Any:
        p = t.model(b[0]) if wrong else ops.sigmoid(t.model(b[0]))
        both, each = (ops.sum(a, axis=(1, 2, 3)) for a in (p * b[1], p**2 + b[1]))
        return ops.mean(1 - (2 * both + 1) / (each + 1))

    return program(rows(*scenes(), batch_size=8), objective, model=segmenter())


@pair("batch[2]", "loss")
def mean_of_weights(wrong: bool) -> Pair:
    """Losses and sample weights are averaged separately, so the weights have no effect."""
    x, y = blobs()
    weights = np.array([0.5, 1.0, 3.0], "float32")[y]
    mean = lambda a, w: ops.mean(a) * ops.mean(w) if wrong else ops.mean(a * w)
    objective = lambda t, b: mean(ce(b[1], t.model(b[0])), b[2])
    return program(rows(x, y, weights), objective, model=stack(4, 8, 3))


def measured(source: Any, model: Any, loss: Any, measure: Any, **metric: Any) -> Pair:
    def objective(t: Any, b: Any) -> Any:
        logits = t.model(b[0])
        return loss(b[1], logits), logits

    return program(source, objective, measure=measure, model=model, **metric)


@pair("precision")
def precision_swapped(wrong: bool) -> Pair:
    """The metric gets predictions and labels in the wrong order: precision becomes recall."""
    order = lambda y, guess: (guess, y) if wrong else (y, guess)
    measure = lambda t, y, logits: t.precision.update_state(
        *order(y, ops.cast(logits > 0, "int32"))
    )
    metric = keras.metrics.Precision()
    return measured(rows(*binary(0.8)), stack(4, 8, 1), bce, measure, precision=metric)


@pair("accuracy")
def accuracy_of_logits(wrong: bool) -> Pair:
    """An accuracy with threshold 0.5 gets logits instead of probabilities."""
    score = (lambda logits: logits) if wrong else ops.sigmoid
    measure = lambda t, y, logits: t.accuracy.update_state(y, score(logits))
    metric = keras.metrics.BinaryAccuracy()
    return measured(rows(*binary()), stack(4, 8, 1), bce, measure, accuracy=metric)


@pair("accuracy")
def accuracy_of_one_hot(wrong: bool) -> Pair:
    """An accuracy for one-hot labels gets class numbers, of which it takes the argmax: 0."""
    x, y = blobs()
    measure = lambda t, y, logits: t.accuracy.update_state(y, logits)
    kinds = keras.metrics.SparseCategoricalAccuracy, keras.metrics.CategoricalAccuracy
    return measured(rows(x, y[:, None]), stack(4, 8, 3), mean_ce, measure, accuracy=kinds[wrong]())


@pair("accuracy")
def padded_accuracy(wrong: bool) -> Pair:
    """The loss leaves padding out, but the accuracy counts it."""
    weight = lambda y: None if wrong else ops.cast(y > 0, "float32")
    measure = lambda t, y, logits: t.accuracy.update_state(y, logits, sample_weight=weight(y))
    metric = keras.metrics.SparseCategoricalAccuracy()
    return measured(next_tokens(True), language_model(), masked_ce, measure, accuracy=metric)


@pair("eval_step", "model/layers/1")
def evaluated_in_training_mode(wrong: bool) -> Pair:
    """The evaluation calls the model with training=True, so its dropout is on."""
    model = chain((4,), layers.Dense(8, "relu"), layers.Dropout(0.3), layers.Dense(3))
    objective = lambda t, b: mean_ce(b[1], t.model(b[0], training=True))
    evaluate = lambda t, b: mean_ce(b[1], t.model(b[0], training=wrong))
    return program(rows(*blobs()), objective, evaluate=evaluate, model=model)


@pair("eval_step")
def evaluated_without_scaling(wrong: bool) -> Pair:
    """The training step divides pixels by 255, the evaluation forgets to."""
    x, y = pixels()
    objective = lambda t, b: mean_ce(b[1], t.model(b[0] / 255))
    evaluate = lambda t, b: mean_ce(b[1], t.model(b[0] if wrong else b[0] / 255))
    source = rows(x.astype("float32"), y)
    return program(source, objective, evaluate=evaluate, model=stack(16, 8, 3))


@pair("eval_step")
def evaluated_teacher(wrong: bool) -> Pair:
    """The evaluation of a distillation measures the fixed teacher instead of the student."""
    x, y = blobs()
    soft = lambda t, b: soft_ce(ops.softmax(t.teacher(b[0])), t.student(b[0]))
    objective = lambda t, b: mean_ce(b[1], t.student(b[0])) + soft(t, b)
    evaluate = lambda t, b: mean_ce(b[1], (t.teacher if wrong else t.student)(b[0]))
    parts = {"teacher": teacher(x, y), "student": stack(4, 4, 3), "evaluate": evaluate}
    return program(rows(x, y), objective, "student", **parts)


@pair("model/layers/1", "model/layers/2", "loss")
def trained_in_inference_mode(wrong: bool) -> Pair:
    """The training step calls the model with training=False: no dropout, fixed statistics."""
    body = [layers.Dense(8, "relu"), layers.BatchNormalization(), layers.Dropout(0.3)]
    objective = lambda t, b: mean_ce(b[1], t.model(b[0], training=not wrong))
    evaluate = lambda t, b: mean_ce(b[1], t.model(b[0], training=False))
    model = chain((4,), *body, layers.Dense(3))
    return program(rows(*blobs()), objective, evaluate=evaluate, model=model)


@pair("model/layers/0", "model/layers/0/kernel", "model/layers/1")
def equal_units(wrong: bool) -> Pair:
    """All weights begin with the same constant, so the hidden units stay equal for ever."""
    start = {"kernel_initializer": keras.initializers.Constant(0.1) if wrong else "glorot_uniform"}
    model = chain((4,), layers.Dense(8, "tanh", **start), layers.Dense(1, **start))
    return fit(model, "mse", rows(*line()))


@pair("b/layers/0", "a/layers/0", "b/layers/0/kernel")
def equal_members(wrong: bool) -> Pair:
    """Both members of an ensemble are initialized with the same seed, and are one network."""

    def member(seed: int) -> Any:
        start = {"kernel_initializer": keras.initializers.GlorotUniform(seed)}
        return chain((4,), layers.Dense(8, "tanh", **start), layers.Dense(1, **start))

    error = lambda t, b: sum(ops.mean((model(b[0]) - b[1]) ** 2) for model in (t.a, t.b))
    return program(rows(*line()), error, "a b", a=member(1), b=member(1 if wrong else 2))


@pair("model/layers/1")
def kept_share(wrong: bool) -> Pair:
    """Dropout gets the share of units to keep, 0.9, as the share to drop."""
    body = [layers.Dense(16, "relu"), layers.Dropout(0.9 if wrong else 0.1), layers.Dense(3)]
    return fit(chain((4,), *body), CE, rows(*blobs()))


@pair("model/layers/2")
def dropout_of_outputs(wrong: bool) -> Pair:
    """Dropout stands after the last layer, and drops logits, instead of before it."""
    ending = [layers.Dropout(0.3), layers.Dense(3)][:: -1 if wrong else 1]
    return fit(chain((4,), layers.Dense(8, "relu"), *ending), CE, rows(*blobs()))


@pair("model/layers/0", "model/layers/1")
def linear_stack(wrong: bool) -> Pair:
    """The hidden layers have no activation, so the deep network is a linear one."""
    x = draw(1, 64, 4)
    y = np.abs(x).sum(axis=1, keepdims=True) - 3
    return fit(stack(4, 8, 8, 1, hidden=None if wrong else "relu"), "mse", rows(x, y))


@pair("model/layers/1")
def pooled_channels(wrong: bool) -> Pair:
    """The global pooling averages the channels of each time instead of the times."""
    y = whole(1, 0, 3, 64)
    x = one_hot(y)[:, None] + draw(2, 64, 6, 3)
    order = "channels_first" if wrong else "channels_last"
    convolution = layers.Conv1D(5, 3, padding="same", activation="relu")
    body = [convolution, layers.GlobalAveragePooling1D(data_format=order), layers.Dense(3)]
    return fit(chain((6, 3), *body), CE, rows(x, y))


@pair("model/layers/2", "loss")
def normalized_over_time(wrong: bool) -> Pair:
    """A LayerNormalization of a causal model includes the axis of time, and shows the future."""
    normalization = layers.LayerNormalization(axis=[1, 2] if wrong else [2])
    body = [layers.Embedding(8, 6), layers.Conv1D(6, 2, padding="causal"), normalization]
    return fit(chain((8,), *body, layers.Dense(8), dtype="int32"), CE, next_tokens())


@pair("model/layers/2")
def normalized_single_unit(wrong: bool) -> Pair:
    """A LayerNormalization after the single output, which makes it a constant."""
    ending = [layers.LayerNormalization(), layers.Dense(1)][:: -1 if wrong else 1]
    return fit(chain((4,), layers.Dense(8, "relu"), *ending), "mse", rows(*line()))


@pair("decoder/layers/0", "decoder/layers/1", "optimizer")
def forgotten_decoder(wrong: bool) -> Pair:
    """The optimizer of an autoencoder gets the variables of the encoder only."""
    of, parts = "encoder decoder", {"encoder": stack(6, 4, 2), "decoder": stack(2, 4, 6)}
    error = lambda t, x: ops.mean((t.decoder(t.encoder(x)) - x) ** 2)
    return program(rows(factors()), error, "encoder" if wrong else of, **parts)


@pair("teacher/layers/0", "teacher/layers/1", "optimizer")
def trained_teacher(wrong: bool) -> Pair:
    """The teacher's variables are trained along with the student's."""
    x, y = blobs()
    soft = lambda t, b: ops.mean((t.teacher(b[0]) - t.student(b[0])) ** 2)
    objective = lambda t, b: mean_ce(b[1], t.student(b[0])) + soft(t, b)
    of, parts = "student", {"student": stack(4, 4, 3), "teacher": teacher(x, y)}
    return program(rows(x, y), objective, "student teacher" if wrong else of, **parts)


@pair("backbone/layers/1")
def moving_statistics(wrong: bool) -> Pair:
    """Only the head is trained, but the backbone runs with training=True and moves its means."""
    x, y = blobs()
    backbone = chain((4,), layers.Dense(8), layers.BatchNormalization(), layers.ReLU())
    features = ops.convert_to_numpy(backbone.layers[0](x))
    backbone.layers[1].moving_mean.assign(features.mean(axis=0))
    backbone.layers[1].moving_variance.assign(features.var(axis=0))
    objective = lambda t, b: mean_ce(b[1], t.head(t.backbone(b[0], training=wrong)))
    return program(rows(x, y), objective, "head", backbone=backbone, head=stack(8, 3))


@pair("encoder/layers/0", "encoder/layers/1", "loss")
def blocked_gradient(wrong: bool) -> Pair:
    """A stop_gradient between encoder and head, left from an experiment: no fine-tuning."""
    passed = ops.stop_gradient if wrong else (lambda features: features)
    objective = lambda t, b: mean_ce(b[1], t.head(passed(t.encoder(b[0]))))
    parts = {"encoder": stack(4, 8, 8, last="relu"), "head": stack(8, 3)}
    return program(rows(*blobs()), objective, "encoder head", "zeros", **parts)


@pair("loss", "batch[1]")
def padding_in_loss(wrong: bool) -> Pair:
    """The loss of a language model averages over padding, too."""
    objective = lambda t, b: (mean_ce if wrong else masked_ce)(b[1], t.model(b[0]))
    return program(next_tokens(True), objective, model=language_model())


@pair("model/layers/0", "model/layers/1")
def padding_in_model(wrong: bool) -> Pair:
    """The embedding has no mask_zero=True, so the recurrent layer reads the padding."""
    text = tokens(padded=True)
    last = (text > 0).sum(axis=1) - 1
    y = (text[np.arange(64), last] > 4).astype("float32")[:, None]
    body = [layers.Embedding(8, 6, mask_zero=not wrong), layers.GRU(5), layers.Dense(1)]
    return fit(chain((9,), *body, dtype="int32"), BCE(**LOGITS), rows(text, y))


@pair("model/layers/2", "loss")
def not_causal(wrong: bool) -> Pair:
    """The attention of a language model has no causal mask, and sees the next token."""
    inputs = keras.Input((8,), dtype="int32")
    hidden = layers.Embedding(8, 6)(inputs)
    seen = layers.MultiHeadAttention(2, 3)(hidden, hidden, use_causal_mask=not wrong)
    model = keras.Model(inputs, layers.Dense(8)(layers.Add()([hidden, seen])))
    return fit(model, CE, next_tokens())


@pair("batch[1]", "loss")
def unshifted_targets(wrong: bool) -> Pair:
    """The targets of a language model are not shifted: it predicts the token that it reads."""
    text = tokens()
    return fit(language_model(), CE, rows(text[:, :-1], text[:, :-1] if wrong else text[:, 1:]))


@pair("loss", "batch[0]", "rnn/layers/0")
def first_state(wrong: bool) -> Pair:
    """The classifier reads the first state of the recurrent layer instead of the last one."""
    objective = lambda t, b: mean_ce(b[1], t.head(t.rnn(b[0])[:, 0 if wrong else -1]))
    rnn = chain((6, 2), layers.GRU(5, return_sequences=True))
    return program(rows(*walks()), objective, "rnn head", rnn=rnn, head=stack(5, 2))


@pair("position/layers/0", "position/layers/0/embeddings")
def position_zero(wrong: bool) -> Pair:
    """All tokens get the embedding of position 0."""
    places = np.zeros((1, 9), "int32") if wrong else np.arange(9, dtype="int32")[None]
    text = tokens()
    y = (text[:, 0] > text[:, 8]).astype("float32")[:, None]
    parts = {n: chain((9,), layers.Embedding(9, 6), dtype="int32") for n in ("word", "position")}
    head = chain((9, 6), layers.Dense(6, "tanh"), layers.GlobalMaxPooling1D(), layers.Dense(1))
    objective = lambda t, b: bce(b[1], t.head(t.word(b[0]) + t.position(places)))
    return program(rows(text, y), objective, "word position head", head=head, **parts)


@pair("model/layers/0")
def carried_state(wrong: bool) -> Pair:
    """The recurrent layer is stateful, but each batch has other, shuffled sequences."""
    inputs = keras.Input(batch_shape=(16, 6, 2))
    model = keras.Sequential([inputs, layers.GRU(5, stateful=wrong), layers.Dense(2)])
    return fit(model, CE, rows(*walks()))


@pair("loss", "batch[0]")
def mixed_examples(wrong: bool) -> Pair:
    """A batch is reshaped, not transposed, to time first, which mixes the examples."""
    first = lambda x: ops.reshape(x, (6, 16, 2)) if wrong else ops.transpose(x, (1, 0, 2))
    objective = lambda t, b: mean_ce(b[1], t.head(ops.mean(t.encoder(first(b[0])), axis=0)))
    parts = {"encoder": chain((16, 2), layers.Dense(8, "relu")), "head": stack(8, 2)}
    return program(rows(*walks()), objective, "encoder head", **parts)


@pair("encoder/layers/0", "batch['source']", "loss")
def attention_to_itself(wrong: bool) -> Pair:
    """The cross attention of a decoder takes its keys from the decoder, not the encoder."""

    def objective(t: Any, b: Any) -> Any:
        states, queries = t.encoder(b["source"]), t.decoder(b["target"])
        keys = queries if wrong else states
        weights = ops.softmax(ops.matmul(queries, ops.transpose(keys, (0, 2, 1))) / 2)
        outputs = t.head(ops.concatenate([queries, ops.matmul(weights, keys)], axis=-1))
        return ops.mean((outputs - b["y"]) ** 2)

    data = {"source": draw(1, 64, 5, 3), "target": draw(2, 64, 4, 3)}
    data["y"] = data["target"][..., :1] + data["source"].mean(axis=1, keepdims=True)[..., :1]
    parts = {"encoder": chain((5, 3), layers.Dense(4)), "decoder": chain((4, 3), layers.Dense(4))}
    parts["head"] = chain((4, 8), layers.Dense(8, "relu"), layers.Dense(1))
    return program(rows(data), objective, "encoder decoder head", "zeros", **parts)


def vae(spread: Any = None, seed: Any = None, reduce: Any = ops.sum) -> Pair:
    def objective(t: Any, x: Any) -> Any:
        mean, log_variance = ops.split(t.encoder(x), 2, axis=-1)
        noise = keras.random.normal(mean.shape, seed=t.seeds if seed is None else seed)
        deviation = ops.exp(0.5 * log_variance) if spread is None else spread(log_variance)
        error = reduce((t.decoder(mean + deviation * noise) - x) ** 2, axis=-1)
        kl = 0.5 * ops.sum(mean**2 + ops.exp(log_variance) - log_variance - 1, axis=-1)
        return ops.mean(error + kl)

    parts = {"encoder": stack(6, 8, 4), "decoder": stack(2, 8, 6)}
    parts["seeds"] = keras.random.SeedGenerator(3)
    return program(rows(factors()), objective, "encoder decoder", **parts)


@pair("loss")
def vae_variance(wrong: bool) -> Pair:
    """The noise of a VAE is multiplied by the variance, not by the standard deviation."""
    return vae(spread=ops.exp if wrong else None)


@pair("loss", "seeds")
def vae_constant_noise(wrong: bool) -> Pair:
    """The noise of a VAE has an integer as its seed, so it is the same in every step."""
    return vae(seed=3 if wrong else None)


@pair("loss")
def vae_mean_error(wrong: bool) -> Pair:
    """The error of a VAE is a mean over pixels, the KL a sum over codes, which outweighs it."""
    return vae(reduce=ops.mean if wrong else ops.sum)


def gan(label: float = 1.0, d_of: str = "discriminator") -> Pair:
    def losses(t: Any, real: Any, noise: Any) -> Any:
        fake_score, real_score = t.discriminator(t.generator(noise)), t.discriminator(real)
        return {"d": bce(1.0, real_score) + bce(0.0, fake_score), "g": bce(label, fake_score)}

    return Adversarial(losses, d_of), rows(circle())


@pair("d_optimizer", "generator/layers/0", "d_loss")
def discriminator_moves_generator(wrong: bool) -> Pair:
    """The discriminator's optimizer also updates the generator, against its own loss."""
    return gan(d_of="discriminator generator" if wrong else "discriminator")


@pair("g_loss")
def generator_label(wrong: bool) -> Pair:
    """The generator is trained with the label of fakes, 0, so it learns to be recognized."""
    return gan(label=0.0 if wrong else 1.0)


@pair("d_loss")
def penalty_of_batch(wrong: bool) -> Pair:
    """The gradient penalty takes one norm of the whole batch instead of one per example."""

    def losses(t: Any, real: Any, noise: Any) -> Any:
        fake = t.generator(noise)
        share = keras.random.uniform((real.shape[0], 1), seed=t.seeds)
        points = ops.stop_gradient(share * real + (1 - share) * fake)
        _, (slope,) = treadle.input_gradients(lambda x: ops.sum(t.discriminator(x)), points)
        norms = ops.sqrt(ops.sum(slope**2, axis=None if wrong else -1) + 1e-12)
        fake_score, real_score = ops.mean(t.discriminator(fake)), ops.mean(t.discriminator(real))
        return {"d": fake_score - real_score + 10 * ops.mean((norms - 1) ** 2), "g": -fake_score}

    return Adversarial(losses), rows(circle())


@pair("encoder/layers/0", "loss", "encoder/layers/1")
def no_straight_through(wrong: bool) -> Pair:
    """A VQ-VAE decodes the nearest code without passing its gradient on to the encoder."""

    def objective(t: Any, x: Any) -> Any:
        z, stop = t.encoder(x), ops.stop_gradient
        distances = ops.sum((z[:, None] - t.codebook[None]) ** 2, axis=-1)
        code = ops.take(t.codebook, ops.argmin(distances, axis=-1), axis=0)
        error = ops.mean((t.decoder(code if wrong else z + stop(code - z)) - x) ** 2)
        return error + ops.mean((stop(z) - code) ** 2) + 0.25 * ops.mean((z - stop(code)) ** 2)

    parts = {"encoder": stack(6, 8, 2), "decoder": stack(2, 8, 6)}
    parts["codebook"] = keras.Variable(draw(4, 6, 2), name="codebook")
    return program(rows(factors()), objective, "encoder decoder codebook", **parts)


@pair("loss")
def other_noise(wrong: bool) -> Pair:
    """A diffusion model has to predict newly drawn noise instead of the noise in its input."""

    def objective(t: Any, x: Any) -> Any:
        level = keras.random.uniform((x.shape[0], 1), 0.05, 0.95, seed=t.seeds)
        noise, other = (keras.random.normal(x.shape, seed=t.seeds) for _ in range(2))
        noisy = ops.sqrt(level) * x + ops.sqrt(1 - level) * noise
        predicted = t.model(ops.concatenate([noisy, level], axis=-1))
        return ops.mean((predicted - (other if wrong else noise)) ** 2)

    seeds = keras.random.SeedGenerator(3)
    return program(rows(circle()), objective, model=stack(3, 16, 2), seeds=seeds)


def contrastive(exclude: bool = True, twice: bool = False) -> Pair:
    def objective(t: Any, x: Any) -> Any:
        first, second = (x + 0.3 * keras.random.normal(x.shape, seed=t.seeds) for _ in range(2))
        z = t.encoder(ops.concatenate([first, first if twice else second]))
        z, n = ops.normalize(z, axis=-1), z.shape[0]
        logits = ops.matmul(z, ops.transpose(z)) / 0.2 - (1e9 * ops.eye(n) if exclude else 0.0)
        return mean_ce(ops.roll(ops.arange(n), n // 2), logits)

    parts = {"encoder": stack(4, 8, 4), "seeds": keras.random.SeedGenerator(3)}
    return program(rows(blobs()[0]), objective, "encoder", **parts)


@pair("loss")
def own_similarity(wrong: bool) -> Pair:
    """The contrastive loss does not exclude the similarity of each view with itself."""
    return contrastive(exclude=not wrong)


@pair("loss", "batch")
def one_view(wrong: bool) -> Pair:
    """One view is made and used twice, so that positives are equal."""
    return contrastive(twice=wrong)


@pair("batch['negative']", "loss")
def negatives_of_own_class(wrong: bool) -> Pair:
    """The negatives of triplets are drawn from the class of the anchor."""

    def objective(t: Any, b: Any) -> Any:
        anchor, positive, negative = (
            ops.normalize(t.encoder(b[name]), axis=-1)
            for name in ("anchor", "positive", "negative")
        )
        near, far = (ops.sum((anchor - z) ** 2, axis=-1) for z in (positive, negative))
        return ops.mean(ops.relu(near - far + 0.5))

    (x, y), g = blobs(), np.random.default_rng(4)
    positive = [g.choice(np.flatnonzero(y == label)) for label in y]
    negative = [g.choice(np.flatnonzero((y == label) == wrong)) for label in y]
    source = rows({"anchor": x, "positive": x[positive], "negative": x[negative]})
    return program(source, objective, "encoder", encoder=stack(4, 8, 4))


@pair("loss")
def one_temperature(wrong: bool) -> Pair:
    """The teacher's logits are divided by the temperature, the student's are not."""

    def objective(t: Any, b: Any) -> Any:
        p, logits = ops.softmax(t.teacher(b[0]) / 4), t.student(b[0])
        return mean_ce(b[1], logits) + 16 * soft_ce(p, logits if wrong else logits / 4)

    x, y = blobs()
    return program(rows(x, y), objective, "student", student=stack(4, 4, 3), teacher=teacher(x, y))


def q_learning(
    value: Any = None, future: Any = None, after: Any = None, target: bool = True
) -> Pair:
    value = value or (lambda q, action: ops.sum(ops.one_hot(action, 2) * q, axis=-1))
    future = future or (lambda t, b: (1 - b["done"]) * ops.max(t.target(b["next"]), axis=-1))
    after = after or (lambda t: treadle.blend(t.target, t.model, 0.05))

    def objective(t: Any, b: Any) -> Any:
        goal = b["reward"] + 0.5 * future(t, b)
        return ops.mean((value(t.model(b["state"]), b["action"]) - goal) ** 2)

    data = {"state": draw(1, 64, 3), "action": whole(2, 0, 2, 64)}
    data["next"] = data["state"] + (data["action"][:, None] - 0.5).astype("float32")
    data["done"] = (draw(3, 64) > 0.7).astype("float32")
    data["reward"] = data["next"][:, 0] - data["state"][:, 0] + data["done"]
    parts = {"model": stack(3, 8, 2)}
    if target:
        parts |= {"target": treadle.frozen_copy(parts["model"]), "after": after}
    return program(rows(data), objective, **parts)


@pair("batch['action']", "loss")
def value_of_best_action(wrong: bool) -> Pair:
    """Q-learning updates the largest value instead of that of the action that was taken."""
    return q_learning(value=(lambda q, action: ops.max(q, axis=-1)) if wrong else None)


@pair("batch['done']", "loss")
def value_after_the_end(wrong: bool) -> Pair:
    """The target of Q-learning adds the value of the state after the end of an episode."""
    endless = lambda t, b: ops.max(t.target(b["next"]), axis=-1)
    return q_learning(future=endless if wrong else None)


@pair("loss")
def target_not_detached(wrong: bool) -> Pair:
    """The network gives its own target in Q-learning, which is differentiated, too."""
    detached = (lambda value: value) if wrong else ops.stop_gradient
    value = lambda t, b: (1 - b["done"]) * ops.max(t.model(b["next"]), axis=-1)
    return q_learning(future=lambda t, b: detached(value(t, b)), target=False)


@pair("target/layers/0", "model/layers/0")
def blended_backwards(wrong: bool) -> Pair:
    """Target and network are swapped in the moving average: the network follows its target."""
    backwards = lambda t: treadle.blend(t.model, t.target, 0.05)
    return q_learning(after=backwards if wrong else None)


@pair("loss", "model/layers/0")
def penalty_not_added(wrong: bool) -> Pair:
    """The layers have regularizers, but the loss of the step does not add model.losses."""
    error = lambda t, b: ops.mean((t.model(b[0]) - b[1]) ** 2)
    objective = error if wrong else (lambda t, b: error(t, b) + sum(t.model.losses))
    hidden = layers.Dense(8, "relu", kernel_regularizer=keras.regularizers.L2(0.01))
    return program(rows(*line()), objective, model=chain((4,), hidden, layers.Dense(1)))


@pair("optimizer")
def clipped_to_nothing(wrong: bool) -> Pair:
    """Gradients are clipped to a norm of 1e-5, as if it were a learning rate."""
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1e-5 if wrong else 1.0)
    return fit(stack(4, 8, 1), "mse", rows(*line()), optimizer)


@pair("optimizer")
def learning_rate_of_one(wrong: bool) -> Pair:
    """Adam has a learning rate of 1 instead of 0.01."""
    return fit(stack(4, 8, 3), CE, rows(*blobs()), keras.optimizers.Adam(1.0 if wrong else 0.01))


@pair("optimizer")
def schedule_in_epochs(wrong: bool) -> Pair:
    """The length of the decay is given in epochs, but counted in steps: 3, not 12."""
    epochs, steps_per_epoch = 3, 1 if wrong else 4
    decay = keras.optimizers.schedules.CosineDecay(0.01, epochs * steps_per_epoch)
    return fit(stack(4, 8, 3), CE, rows(*blobs()), keras.optimizers.Adam(decay))


class Micro(treadle.Task):
    """Gradients of four parts of a batch, and one update."""

    def __init__(self, overwrite: bool) -> None:
        self.model, self.optimizer = stack(4, 8, 3), keras.optimizers.SGD(0.1)
        self.overwrite = overwrite

    def train_step(self, batch: Any) -> Any:
        losses, total = [], [ops.zeros(v.shape) for v in self.model.trainable_variables]
        for i in range(0, 16, 4):
            x, y = batch[0][i : i + 4], batch[1][i : i + 4]
            objective = lambda x=x, y=y: mean_ce(y, self.model(x)) / 4
            loss, grads = treadle.gradients(objective, self.model)
            total = grads if self.overwrite else [a + b for a, b in zip(total, grads, strict=True)]
            losses.append(loss)
        self.optimizer.apply(total, self.model.trainable_variables)
        return {"loss": sum(losses)}


@pair("optimizer", "batch[0]", "loss")
def overwritten_gradients(wrong: bool) -> Pair:
    """Gradients of the parts of a batch replace one another instead of adding up."""
    return Micro(overwrite=wrong), rows(*blobs())


@pair("head_b/layers/0", "batch['b']", "loss")
def weight_of_zero(wrong: bool) -> Pair:
    """The weight of the second task is 1 // 2, which is 0."""
    weight = 1 // 2 if wrong else 1 / 2

    def objective(t: Any, b: Any) -> Any:
        hidden = t.body(b["x"])
        first = ops.mean((t.head_a(hidden) - b["a"]) ** 2)
        return first + weight * ops.mean((t.head_b(hidden) - b["b"]) ** 2)

    x, a = line()
    parts = {"body": stack(4, 8, last="relu"), "head_a": stack(8, 1), "head_b": stack(8, 1)}
    source = rows({"x": x, "a": a, "b": np.abs(x[:, :1]) - x[:, 1:2]})
    return program(source, objective, "body head_a head_b", **parts)


@pair("loss", "batch[1]")
def mixup_of_inputs(wrong: bool) -> Pair:
    """Mixup mixes the inputs, but not the labels."""

    def objective(t: Any, b: Any) -> Any:
        share = keras.random.uniform((b[0].shape[0], 1), seed=t.seeds)
        x, y = (share * part + (1 - share) * ops.roll(part, 1, axis=0) for part in b)
        return soft_ce(b[1] if wrong else y, t.model(x))

    x, y = blobs()
    seeds = keras.random.SeedGenerator(3)
    return program(rows(x, one_hot(y)), objective, model=stack(4, 8, 3), seeds=seeds)


@pair("batch[1]", "loss")
def noisy_target(wrong: bool) -> Pair:
    """A denoising autoencoder reconstructs its noisy input instead of the clean example."""
    source = rows(factors() + 0.5 * draw(4, 64, 6), factors())
    error = lambda t, b: ops.mean((t.model(b[0]) - b[0 if wrong else 1]) ** 2)
    return program(source, error, model=stack(6, 8, 2, 8, 6))


@pair("batch['item']", "item/layers/0")
def item_of_user(wrong: bool) -> Pair:
    """A recommender looks up its table of items with the numbers of the users."""

    def objective(t: Any, b: Any) -> Any:
        user, item = t.user(b["user"]), t.item(b["user" if wrong else "item"])
        return ops.mean((ops.sum(user * item, axis=-1) - b["rating"]) ** 2)

    user, item = whole(1, 0, 8, 64), whole(2, 0, 8, 64)
    rating = np.sum(draw(3, 8, 3)[user] * draw(4, 8, 3)[item], axis=-1)
    start = keras.initializers.RandomNormal
    tables = [chain((), layers.Embedding(8, 3, start(0, 0.5)), dtype="int32") for _ in range(2)]
    source = rows({"user": user, "item": item, "rating": rating / rating.std()})
    return program(source, objective, "user item", user=tables[0], item=tables[1])
