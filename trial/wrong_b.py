from common import *


# ---------------------------------------------------------------- regression
class Regress(treadle.Task):
    def __init__(self, model, kind="mse"):
        self.model, self.kind = model, kind
        self.optimizer = keras.optimizers.Adam(0.01)

    def loss(self, y, out):
        if self.kind == "nll":
            mu, log_var = out[:, :1], out[:, 1:]
            return ops.mean(0.5 * ops.exp(log_var) * ops.square(y - mu) + 0.5 * log_var)  # exp(-log_var)
        if self.kind == "quantile":
            q, e = 0.9, out - y  # e = y - out
            return ops.mean(ops.maximum(q * e, (q - 1) * e))
        return ops.mean(ops.square(y - out))

    def train_step(self, batch):
        x, y = batch
        return {"loss": treadle.minimize(lambda: self.loss(y, self.model(x, training=True)), self.model, self.optimizer)}


@wrong("the last layer has relu, but half of the targets are negative", "output range does not contain the targets")
def relu_output():
    x, y = line()
    return Regress(mlp(6, 1, activation="relu")), batches(x, y[:, None]), None, None


@wrong("gaussian nll multiplies the squared error by exp(log_var) and not exp(-log_var)", "nll with wrong sign: log_var decreases for large errors, unbounded")
def nll_sign():
    x, y = line()
    return Regress(mlp(6, 2), "nll"), batches(x, y[:, None]), None, None


@wrong("quantile loss with the error's sign exchanged: estimates the 10 % quantile", "asymmetry reversed")
def quantile_sign():
    x, y = line(noise=1.0)
    return Regress(mlp(6, 1), "quantile"), batches(x, y[:, None]), None, None


class LogPrice(treadle.Task):
    """Train on log prices, measure in money."""

    def __init__(self):
        self.model = mlp(6, 1)
        self.optimizer = keras.optimizers.Adam(0.01)
        self.rmse = keras.metrics.RootMeanSquaredError()

    def train_step(self, batch):
        x, price = batch
        target = ops.log1p(price)
        return treadle.minimize(lambda: ops.mean(ops.abs(target - self.model(x))), self.model, self.optimizer)

    def eval_step(self, batch):
        x, price = batch
        self.rmse.update_state(price, self.model(x))  # expm1 forgotten


@wrong("trained on log1p(price), evaluated without expm1", "eval compares outputs with targets of another scale than training")
def log_target_eval():
    x, y = line()
    vx, vy = line(seed=1)
    return LogPrice(), batches(x, np.exp(y / 2 + 4)[:, None]), batches(vx, np.exp(vy / 2 + 4)[:, None]), None


# ---------------------------------------------------------------- segmentation, boxes
def unet():
    i = keras.Input((12, 12, 1))
    a = layers.Conv2D(8, 3, padding="same", activation="relu")(i)
    b = layers.MaxPooling2D()(a)
    b = layers.Conv2D(8, 3, padding="same", activation="relu")(b)
    c = layers.Concatenate()([layers.UpSampling2D()(b), a])
    return keras.Model(i, layers.Conv2D(1, 1, activation="sigmoid")(c))


class Segment(treadle.Task):
    def __init__(self, kind):
        self.kind, self.model = kind, unet()
        self.optimizer = keras.optimizers.Adam(0.01)
        self.seeds = keras.random.SeedGenerator(3)
        self.iou = keras.metrics.BinaryIoU(target_class_ids=[1])

    def dice(self, y, p):
        both = ops.sum(y * p, axis=(1, 2, 3))
        return ops.mean((2 * both + 1) / (ops.sum(y, axis=(1, 2, 3)) + ops.sum(p, axis=(1, 2, 3)) + 1))

    def train_step(self, batch):
        x, y = batch["image"], batch["mask"]
        if self.kind == "flip":
            flip = keras.random.uniform((ops.shape(x)[0], 1, 1, 1), seed=self.seeds) < 0.5
            x = ops.where(flip, ops.flip(x, axis=2), x)  # and the mask?

        def objective():
            p = self.model(x, training=True)
            bce = ops.mean(keras.losses.binary_crossentropy(y, p))
            return (bce + 1 - self.dice(y, p) if self.kind == "flip" else self.dice(y, p)), p

        loss, p = treadle.minimize(objective, self.model, self.optimizer)
        self.iou.update_state(y, p)
        return {"loss": loss}


@wrong("the dice coefficient is minimized, and not 1 - dice", "loss has the wrong sign: better answers increase it")
def dice_sign():
    x, m = masks()
    return Segment("dice"), batches({"image": x, "mask": m}, size=16), None, None


@wrong("random flips of the image but not of its mask", "augmentation moves inputs and not targets")
def flip_without_mask():
    x, m = masks()
    return Segment("flip"), batches({"image": x, "mask": m}, size=16), None, None


class FirstAxisSoftmax(treadle.Task):
    """Three-class segmentation."""

    def __init__(self):
        self.model = keras.Sequential(
            [keras.Input((12, 12, 1)), layers.Conv2D(8, 3, padding="same", activation="relu"),
             layers.Conv2D(3, 3, padding="same")])
        self.optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, batch):
        x, y = batch

        def objective():
            log_p = ops.log_softmax(self.model(x), axis=1)  # channels are last
            return -ops.mean(ops.sum(ops.one_hot(y, 3) * log_p, axis=-1))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


@wrong("log_softmax over the rows of the image and not over its classes", "softmax over the wrong axis")
def softmax_axis():
    x, m = masks()
    y = m[..., 0].astype("int32")
    y[:, 6:] *= 2
    return FirstAxisSoftmax(), batches(x, y, size=16), None, None


def boxes(n=192, seed=0):
    x, m = masks(n, seed=seed)
    target = np.zeros((n, 5), "float32")
    for i in range(n):
        rows, cols = np.where(m[i, ..., 0])
        target[i] = [1, rows.min() / 12, cols.min() / 12, rows.max() / 12, cols.max() / 12]
    empty = rng(seed + 50).random(n) < 0.5
    x[empty] -= 1.5 * m[empty]
    target[empty] = 0
    return x, target


class Detector(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        self.body = keras.Sequential([keras.Input((12, 12, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten()])
        self.score, self.box = layers.Dense(1), layers.Dense(4)
        self.score.build((None, 800)), self.box.build((None, 800))
        self.optimizer = keras.optimizers.Adam(0.003)

    def train_step(self, batch):
        x, t = batch
        there, box = t[:, :1], t[:, 1:]

        def objective():
            h = self.body(x)
            z, b = self.score(h), self.box(h)
            objectness = ops.mean(keras.losses.binary_crossentropy(there, z, from_logits=True))
            if self.kind == "rounded":
                b = ops.round(b * 12) / 12
                return objectness + ops.sum(there * ops.abs(b - box)) / (ops.sum(there) + 1e-6)
            return objectness + ops.mean(ops.abs(b - box))

        variables = [v for part in (self.body, self.score, self.box) for v in part.trainable_variables]
        loss, grads = treadle.gradients(objective, variables, unreached="zeros")
        self.optimizer.apply(grads, variables)
        return {"loss": loss}


@wrong("the box loss counts images without an object, whose box is all zeros", "box loss not masked: targets of absent objects count")
def boxes_of_background():
    x, t = boxes()
    return Detector("all"), batches(x, t), None, None


@wrong("predicted boxes are rounded to pixels before the loss: no gradient for the box head", "box head has no gradient")
def rounded_boxes():
    x, t = boxes()
    return Detector("rounded"), batches(x, t), None, None


# ---------------------------------------------------------------- sequences
class Causal(keras.layers.Layer):
    """A small decoder."""

    def __init__(self, vocabulary=20, width=24, causal=True, positions=True):
        super().__init__()
        self.causal, self.positions = causal, positions
        self.words, self.places = layers.Embedding(vocabulary, width), layers.Embedding(16, width)
        self.attention = layers.MultiHeadAttention(2, width // 2)
        self.norm1, self.norm2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.ff = keras.Sequential([layers.Dense(2 * width, activation="gelu"), layers.Dense(width)])
        self.out = layers.Dense(vocabulary)

    def call(self, tokens):
        h = self.words(tokens)
        if self.positions:
            h = h + self.places(ops.arange(tokens.shape[1]))
        n = self.norm1(h)
        h = h + self.attention(n, n, use_causal_mask=self.causal)
        h = h + self.ff(self.norm2(h))
        return self.out(h)


class LM(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        self.model = Causal(causal=kind != "future")
        self.optimizer = keras.optimizers.Adam(3e-3)

    def losses(self, tokens):
        if self.kind == "unshifted":
            inputs, targets = tokens[:, :-1], tokens[:, :-1]
        else:
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
        each = keras.losses.sparse_categorical_crossentropy(targets, self.model(inputs), from_logits=True)
        if self.kind == "padding":
            return ops.mean(each)
        keep = ops.cast(targets != 0, "float32")
        return ops.sum(each * keep) / ops.sum(keep)

    def train_step(self, batch):
        if not self.model.built:
            self.model(batch[:, :-1])
        loss = treadle.minimize(lambda: self.losses(batch), self.model, self.optimizer)
        return {"loss": loss, "perplexity": ops.exp(loss)}


@wrong("no causal mask: each position sees the token that it predicts", "future tokens leak into the prediction")
def no_causal_mask():
    return LM("future"), batches(sentences()[0], size=16), None, None


@wrong("the targets are not shifted: the model copies its input", "targets equal inputs")
def unshifted():
    return LM("unshifted"), batches(sentences()[0], size=16), None, None


@wrong("padding counts in the loss of a language model", "padding positions count in the loss")
def padding_counts():
    return LM("padding"), batches(sentences(length=14)[0], size=16), None, None


def sentiment(n=256, seed=0):
    x, lengths = sentences(n, 12, seed=seed)
    y = (x[np.arange(n), lengths - 1] > 9).astype("float32")  # the last word tells
    return x, y[:, None]


class Reader(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        self.words = layers.Embedding(20, 16)
        self.gru = layers.GRU(16, return_sequences=True)
        self.attend = layers.Dense(1)
        self.out = layers.Dense(1, activation="sigmoid")
        self.optimizer = keras.optimizers.Adam(0.005)
        self.bce, self.acc = keras.losses.BinaryCrossentropy(), keras.metrics.BinaryAccuracy(name="acc")

    def forward(self, x):
        h = self.gru(self.words(x))
        if self.kind == "last":
            return self.out(h[:, -1])
        scores = self.attend(h)[..., 0]
        scores = ops.where(x != 0, -1e9, scores)  # inverted
        weights = ops.softmax(scores, axis=-1)
        return self.out(ops.sum(weights[..., None] * h, axis=1))

    def train_step(self, batch):
        x, y = batch
        self.forward(x)
        parts = [self.words, self.gru, self.out] + ([self.attend] if self.kind != "last" else [])
        variables = [v for p in parts for v in p.trainable_variables]

        def objective():
            p = self.forward(x)
            return self.bce(y, p), p

        loss, p = treadle.minimize(objective, variables, self.optimizer)
        self.acc.update_state(y, p)
        return {"loss": loss}


@wrong("the state after the padding is read: h[:, -1] of right-padded sequences", "padding changes the answer")
def last_of_padded():
    return Reader("last"), batches(*sentiment()), None, None


@wrong("the attention mask is inverted: only padding is attended to", "padding is read, real tokens are ignored")
def inverted_mask():
    return Reader("attention"), batches(*sentiment()), None, None


class MaskedMean(keras.Model):
    def __init__(self):
        super().__init__()
        self.words, self.out = layers.Embedding(20, 16), layers.Dense(1)

    def call(self, batch):
        tokens = batch["tokens"]
        keep = ops.cast(tokens != 0, "float32")[..., None]
        return self.out(ops.mean(self.words(tokens) * keep, axis=1))  # divides by the padded length


@wrong("the mean of word vectors divides by the padded length", "answer depends on the amount of padding")
def mean_of_padded():
    x, _ = sentences(256, 14)
    y = np.array([np.mean(r[r > 0]) for r in x], "float32")[:, None] / 10 - 1
    return treadle.Supervised(MaskedMean(), "mse", "adam", ["mae"]), batches({"tokens": x}, y) if False else treadle.data.zipped(
        batches({"tokens": x}, shuffle=False), batches(y, shuffle=False)), None, None


# ---------------------------------------------------------------- several losses
class TwoHeads(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        i = keras.Input((8,))
        h = layers.Dense(24, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-2))(i)
        self.model = keras.Model(i, {"kind": layers.Dense(4)(h), "size": layers.Dense(1)(h)})
        self.log_vars = keras.Variable([0.0, 0.0], name="log_vars")
        self.optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, batch):
        x, y = batch["x"], batch["targets"]

        def objective():
            out = self.model(x, training=True)
            a = ops.mean(keras.losses.sparse_categorical_crossentropy(y["kind"], out["kind"], from_logits=True))
            b = ops.mean(ops.square(y["size"] - out["size"]))
            if self.kind == "uncertainty":
                s = self.log_vars
                total = ops.exp(-s[0]) * a + ops.exp(-s[1]) * b + ops.sum(s) + sum(self.model.losses)
            else:
                total = a + b  # model.losses forgotten
            return total, (a, b)

        loss, (a, b) = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss, "kind": a, "size": b}


def two_targets():
    x, y = blobs()
    return batches({"x": x, "targets": {"kind": y, "size": x[:, :1] * 2 + x[:, 1:2]}})


@wrong("the learned weights of the two losses are not among the trained variables", "log_vars is not trained")
def untrained_uncertainty():
    return TwoHeads("uncertainty"), two_targets(), None, None


@wrong("the L2 penalties of the layers are not added to the loss", "regularization losses are not in the loss")
def penalties_forgotten():
    return TwoHeads("plain"), two_targets(), None, None
