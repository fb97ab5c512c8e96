from common import *
from wrong_a import Distil, FineTune, Mixup, taught
from wrong_b import Causal, boxes, sentiment, unet

SCE = lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class By(treadle.Task):
    """A model, and a loss written in the subclass."""

    def __init__(self, model, rate=0.01):
        self.model, self.optimizer = model, keras.optimizers.Adam(rate)

    def train_step(self, batch):
        return {"loss": treadle.minimize(lambda: self.loss(batch, True), self.model, self.optimizer)}

    def eval_step(self, batch):
        return {"loss": self.loss(batch, False)}


@sound("multi-label with rare labels and sigmoid")
def rare_multilabel():
    x, _ = line(n=320, features=8)
    y = (x @ rng(1).normal(size=(8, 6)) > 4).astype("float32")
    m = [keras.metrics.AUC(multi_label=True, num_labels=6, name="auc")]
    return treadle.Supervised(mlp(8, 6, activation="sigmoid"), "binary_crossentropy", "adam", m), batches(x, y), None, None


@sound("a frozen backbone with BatchNormalization called with training=True, only the head is trained")
def frozen_backbone():
    task = FineTune("frozen_bn")

    def step(x, y):
        def objective():
            return task.ce(y, task.forward(x, True))
        return treadle.minimize(objective, task.head, task.optimizer)

    def evaluate(x, y):
        task.accuracy.update_state(y, task.forward(x, False))

    x, y = pictures()
    vx, vy = pictures(seed=1)
    made = treadle.task(step, evaluate, backbone=task.backbone, head=task.head, optimizer=task.optimizer, accuracy=task.accuracy)
    return made, batches(x, y), batches(vx, vy), None


@sound("class weights through sample_weight")
def weighted_classes():
    x, y = blobs(n=640, classes=2)
    keep = (y == 0) | (rng(9).random(len(y)) < 0.15)
    x, y = x[keep], y[keep]
    w = (0.5 / (np.bincount(y) / len(y)))[y].astype("float32")
    return treadle.Supervised(mlp(8, 2), SCE(), "adam", ["accuracy"]), batches(x, y, w), None, None


class GoodLM(By):
    def loss(self, tokens, training):
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        each = keras.losses.sparse_categorical_crossentropy(targets, self.model(inputs), from_logits=True)
        keep = ops.cast(targets != 0, "float32")
        return ops.sum(each * keep) / ops.sum(keep)


@sound("a causal language model with padding, masked in the loss but not in the attention")
def language_model():
    model = Causal()
    model(np.zeros((1, 9), "int32"))
    return GoodLM(model, 0.003), batches(sentences()[0], size=16), batches(sentences(64, seed=1)[0], size=16), None


class MaskedLM(By):
    def __init__(self, model):
        super().__init__(model, 0.003)
        self.seeds = keras.random.SeedGenerator(0)

    def loss(self, tokens, training):
        chosen = (keras.random.uniform(ops.shape(tokens), seed=self.seeds) < 0.3) & (tokens != 0)
        logits = self.model(ops.where(chosen, 20, tokens))
        each = keras.losses.sparse_categorical_crossentropy(tokens, logits, from_logits=True)
        w = ops.cast(chosen, "float32")
        return ops.sum(each * w) / ops.maximum(ops.sum(w), 1.0)


@sound("masked language model: looks both ways, loss only at masked places")
def masked_words():
    model = Causal(vocabulary=21, causal=False)
    model(np.zeros((1, 10), "int32"))
    return MaskedLM(model), batches(sentences()[0], size=16), None, None


class Bag(keras.Model):
    def __init__(self):
        super().__init__()
        self.words, self.out = layers.Embedding(20, 16), layers.Dense(1)

    def call(self, tokens):
        keep = ops.cast(tokens != 0, "float32")[..., None]
        return self.out(ops.sum(self.words(tokens) * keep, axis=1) / ops.maximum(ops.sum(keep, axis=1), 1.0))


@sound("bag of words: order and padding do not matter")
def bag_of_words():
    x, _ = sentences(256, 14)
    y = np.array([np.mean(r[r > 0]) for r in x], "float32")[:, None] / 10 - 1
    return treadle.Supervised(Bag(), "huber", "adam", ["mae"]), batches(x, y), None, None


@sound("mixup within the step, with smoothing")
def mixup():
    x, y = blobs()
    task = Mixup("right")
    task.cce = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    return task, batches(x, y), None, None


@sound("distillation with a trained, frozen teacher in inference mode")
def distillation():
    x, y = blobs()
    return taught(Distil("right")), batches(x, y), None, None


class Standardized(By):
    def __init__(self, mean, std):
        super().__init__(mlp(6, 1))
        self.mean, self.std = float(mean), float(std)
        self.mae = keras.metrics.MeanAbsoluteError()

    def loss(self, batch, training):
        x, y = batch
        return ops.mean(ops.square((y - self.mean) / self.std - self.model(x)))

    def eval_step(self, batch):
        x, y = batch
        self.mae.update_state(y, self.model(x) * self.std + self.mean)


@sound("regression on standardized targets, evaluated in the original unit")
def standardized():
    x, y = line()
    vx, vy = line(seed=1)
    y, vy = y[:, None] * 900 + 4000, vy[:, None] * 900 + 4000
    return Standardized(y.mean(), y.std()), batches(x, y), batches(vx, vy), None


@sound("Poisson regression: counts, many zeros, exponential output")
def counts():
    x, y = line()
    y = rng(2).poisson(np.exp(y / 4 - 0.5)).astype("float32")[:, None]
    return treadle.Supervised(mlp(6, 1, activation="exponential"), "poisson", "adam"), batches(x, y), None, None


class Quantiles(By):
    q = (0.1, 0.5, 0.9)

    def loss(self, batch, training):
        x, y = batch
        e = y - self.model(x)  # (n, 1) - (n, 3), on purpose
        q = ops.array(self.q)
        return ops.mean(ops.maximum(q * e, (q - 1) * e))


@sound("three quantiles of one target: (n, 1) against (n, 3)")
def quantiles():
    x, y = line(noise=1.0)
    return Quantiles(mlp(6, 3)), batches(x, y[:, None]), None, None


class GoodDetector(By):
    def loss(self, batch, training):
        x, t = batch
        z, b = self.model(x)
        there, box = t[:, 0], t[:, 1:]
        score = ops.mean(keras.losses.binary_crossentropy(t[:, :1], z, from_logits=True))
        return score + ops.sum(there * ops.mean(ops.abs(b - box), axis=-1)) / ops.maximum(ops.sum(there), 1.0)


@sound("box loss only where there is an object")
def detector():
    i = keras.Input((12, 12, 1))
    h = layers.Flatten()(layers.Conv2D(8, 3, activation="relu")(i))
    return GoodDetector(keras.Model(i, [layers.Dense(1)(h), layers.Dense(4, activation="sigmoid")(h)]), 0.003), batches(*boxes()), None, None


class Ignore(By):
    def loss(self, batch, training):
        x, y = batch
        keep = y != 255
        each = keras.losses.sparse_categorical_crossentropy(ops.where(keep, y, 0), self.model(x), from_logits=True)
        keep = ops.cast(keep, "float32")
        return ops.sum(each * keep) / ops.sum(keep)


@sound("segmentation with the label 255 for pixels to ignore")
def ignored_pixels():
    x, m = masks()
    y = m[..., 0].astype("int32")
    y[rng(3).random(y.shape) < 0.2] = 255
    model = keras.Sequential([keras.Input((12, 12, 1)), layers.Conv2D(8, 3, padding="same", activation="relu"), layers.Conv2D(2, 1)])
    return Ignore(model), batches(x, y, size=16), None, None


class MonteCarlo(treadle.Supervised):
    def eval_step(self, batch):
        x, y = batch
        p = sum(ops.softmax(self.model(x, training=True)) for _ in range(8)) / 8
        self.metrics["sparse_categorical_accuracy"].update_state(y, p)


@sound("Monte Carlo dropout: evaluation averages 8 passes in training mode, on purpose")
def monte_carlo():
    x, y = blobs()
    vx, vy = blobs(seed=1)
    return MonteCarlo(mlp(8, 4, dropout=0.3), SCE(), "adam", ["sparse_categorical_accuracy"]), batches(x, y), batches(vx, vy), None


class Partial(By):
    def loss(self, batch, training):
        out = self.model(batch["x"], training=training)
        known = ops.cast(batch["known"], "float32")
        e = ops.square(ops.where(batch["known"], batch["y"], 0.0) - out) * known
        return ops.sum(e) / ops.maximum(ops.sum(known), 1.0)


@sound("three targets per row, most of them missing (stored as -999) and masked")
def missing_targets():
    x, _ = line(features=6)
    y = (x @ rng(4).normal(size=(6, 3))).astype("float32")
    known = rng(6).random(y.shape) < 0.4
    return Partial(mlp(6, 3)), batches({"x": x, "y": np.where(known, y, -999).astype("float32"), "known": known}), None, None


@sound("warmup that starts at a learning rate of 0")
def warmup():
    x, y = blobs()
    rate = keras.optimizers.schedules.CosineDecay(0.0, 500, warmup_target=3e-3, warmup_steps=100)
    return treadle.Supervised(mlp(8, 4, activation="softmax"), "sparse_categorical_crossentropy", keras.optimizers.AdamW(rate), ["accuracy"]), batches(x, y), None, None


class GoodNLL(By):
    def loss(self, batch, training):
        x, y = batch
        out = self.model(x)
        var = ops.softplus(out[:, 1:]) + 1e-4
        return ops.mean(0.5 * ops.square(y - out[:, :1]) / var + 0.5 * ops.log(var))


@sound("Gaussian negative log-likelihood, which may be negative")
def gaussian():
    x, y = line()
    return GoodNLL(mlp(6, 2)), batches(x, y[:, None]), None, None


@sound("Embedding(mask_zero) and a bidirectional LSTM on padded sequences")
def masked_lstm():
    model = keras.Sequential([keras.Input((12,)), layers.Embedding(20, 12, mask_zero=True),
                              layers.Bidirectional(layers.LSTM(8)), layers.Dense(1, activation="sigmoid")])
    x, y = sentiment()
    return treadle.Supervised(model, "binary_crossentropy", keras.optimizers.Adam(0.01), ["accuracy"]), batches(x, y), None, None


class Deep(treadle.Task):
    """An auxiliary head that only training uses."""

    def __init__(self):
        i = keras.Input((8,))
        a = layers.Dense(16, activation="relu")(i)
        b = layers.Dropout(0.2)(layers.Dense(16, activation="relu")(a))
        self.model = keras.Model(i, [layers.Dense(4)(b), layers.Dense(4)(a)])
        self.optimizer, self.ce = keras.optimizers.Adam(0.01), SCE()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(self, batch):
        x, y = batch

        def objective():
            main, aside = self.model(x, training=True)
            return self.ce(y, main) + 0.3 * self.ce(y, aside)

        return treadle.minimize(objective, self.model, self.optimizer)

    def eval_step(self, batch):
        x, y = batch
        self.accuracy.update_state(y, self.model(x, training=False)[0])


@sound("deep supervision: evaluation does not use the auxiliary head")
def deep_supervision():
    return Deep(), batches(*blobs()), batches(*blobs(seed=1)), None


class Flipped(treadle.Task):
    """Segmentation with paired flips, and evaluation by the mean over flips."""

    def __init__(self):
        self.model, self.optimizer = unet(), keras.optimizers.Adam(0.01)
        self.seeds = keras.random.SeedGenerator(5)
        self.iou = keras.metrics.BinaryIoU(target_class_ids=[1])

    def train_step(self, batch):
        x, y = batch
        flip = keras.random.uniform((ops.shape(x)[0], 1, 1, 1), seed=self.seeds) < 0.5
        x, y = ops.where(flip, ops.flip(x, axis=2), x), ops.where(flip, ops.flip(y, axis=2), y)

        def objective():
            p = self.model(x, training=True)
            inter = ops.sum(y * p)
            return 1 - (2 * inter + 1) / (ops.sum(y) + ops.sum(p) + 1) + ops.mean(keras.losses.binary_crossentropy(y, p))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}

    def eval_step(self, batch):
        x, y = batch
        p = (self.model(x) + ops.flip(self.model(ops.flip(x, axis=2)), axis=2)) / 2
        self.iou.update_state(y, p)


@sound("flips of image and mask; test-time augmentation in evaluation")
def paired_flips():
    return Flipped(), batches(*masks(), size=16), batches(*masks(seed=1), size=16), None
