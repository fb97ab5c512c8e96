from common import *


# ---------------------------------------------------------------- classifiers
@wrong("softmax outputs with from_logits=True", "probabilities are given as logits (two softmaxes)")
def double_softmax():
    x, y = blobs()
    vx, vy = blobs(seed=1)
    model = mlp(8, 4, activation="softmax")
    task = treadle.Supervised(
        model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), "adam", ["accuracy"]
    )
    return task, batches(x, y), batches(vx, vy), None


class Churn(treadle.Task):
    def __init__(self):
        self.model = mlp(8, 1)
        self.bce = keras.losses.BinaryCrossentropy()
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.acc = keras.metrics.BinaryAccuracy()

    def train_step(self, batch):
        x, y = batch

        def objective():
            p = self.model(x, training=True)
            return self.bce(y, p), p

        loss, p = treadle.minimize(objective, self.model, self.optimizer)
        self.acc.update_state(y, p)
        return {"loss": loss}


@wrong("linear outputs with a loss that expects probabilities (no from_logits)", "logits given as probabilities")
def bce_on_logits():
    x, y = blobs(classes=2)
    return Churn(), batches(x, y[:, None].astype("float32")), None, None


@wrong("softmax over a single unit is always 1", "the output is constant / softmax over one unit")
def one_unit_softmax():
    x, y = blobs(classes=2)
    return (
        treadle.Supervised(mlp(8, 1, activation="softmax"), "binary_crossentropy", "adam", ["binary_accuracy"]),
        batches(x, y[:, None].astype("float32")), None, None,
    )


class HandBCE(treadle.Task):
    def __init__(self):
        self.net = mlp(8, 1)
        self.opt = keras.optimizers.Adam(0.01)

    def loss_of(self, x, y):
        z = self.net(x)
        y = ops.cast(y, "float32")
        return ops.mean(ops.maximum(z, 0.0) - z * y + ops.log1p(ops.exp(-ops.abs(z))))

    def train_step(self, batch):
        x, y = batch
        return treadle.minimize(lambda: self.loss_of(x, y), self.net, self.opt)

    def eval_step(self, batch):
        x, y = batch
        return {"loss": self.loss_of(x, y)}


@wrong("labels (n,) against outputs (n, 1) broadcast to (n, n) in a loss by hand", "broadcast of (n,1) with (n,)")
def broadcast_bce():
    x, y = blobs(classes=2)
    vx, vy = blobs(classes=2, seed=1)
    return HandBCE(), batches(x, y), batches(vx, vy), None


@wrong("several labels per example, with softmax and categorical crossentropy", "targets have several ones, sum is not 1; outputs exclude each other")
def multilabel_softmax():
    x, _ = line(features=8)
    y = (x @ rng(1).normal(size=(8, 5)) > 0).astype("float32")
    model = mlp(8, 5, activation="softmax")
    return treadle.Supervised(model, "categorical_crossentropy", "adam", ["accuracy"]), batches(x, y), None, None


class WeightedRows(treadle.Task):
    """Weights of examples, applied by hand."""

    def __init__(self):
        self.model = mlp(8, 2)
        self.optimizer = keras.optimizers.Adam(0.01)

    def train_step(self, batch):
        x, y, w = batch["x"], batch["y"], batch["weight"]

        def objective():
            logits = self.model(x, training=True)
            each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            return ops.mean(each * w)

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


@wrong("weights (n, 1) times losses (n,) broadcast: every example gets the mean weight", "weights broadcast / mix rows / weights without effect")
def weight_broadcast():
    x, y = blobs(classes=2)
    w = np.where(y == 1, 5.0, 0.5).astype("float32")[:, None]
    return WeightedRows(), batches({"x": x, "y": y, "weight": w}), None, None


@wrong("weights are cast to integers: 0.4 becomes 0, so the common class never counts", "weight of most examples is 0; class ignored")
def integer_weights():
    x, y = blobs(classes=2)
    keep = (y == 0) | (rng(9).random(len(y)) < 0.3)
    x, y = x[keep], y[keep]
    freq = np.bincount(y) / len(y)
    w = (0.5 / freq)[y].astype("int32")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(mlp(8, 2), loss, "adam", ["accuracy"]), batches(x, y, w), None, None


class Smoothed(treadle.Task):
    eps = 0.1

    def __init__(self):
        self.model = mlp(8, 4)
        self.optimizer = keras.optimizers.AdamW(0.01)
        self.accuracy = keras.metrics.CategoricalAccuracy()

    def train_step(self, batch):
        x, y = batch
        target = ops.one_hot(y, 4) * (1 - self.eps) + self.eps  # should be eps / 4

        def objective():
            logits = self.model(x, training=True)
            return -ops.mean(ops.sum(target * ops.log_softmax(logits), axis=-1)), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(ops.one_hot(y, 4), logits)
        return {"loss": loss}


@wrong("label smoothing adds eps and not eps / classes: targets sum to 1.3", "targets do not sum to 1")
def smoothing_sum():
    x, y = blobs()
    return Smoothed(), batches(x, y), None, None


class Mixup(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        self.model = mlp(8, 4)
        self.optimizer = keras.optimizers.Adam(0.01)
        self.cce = keras.losses.CategoricalCrossentropy(from_logits=True)
        self.seeds, self.seeds_y = keras.random.SeedGenerator(1), keras.random.SeedGenerator(2)

    def train_step(self, batch):
        x, y = batch
        y = ops.one_hot(y, 4)
        n = ops.shape(x)[0]
        lam = keras.random.beta((n, 1), 0.4, 0.4, seed=self.seeds)
        order = keras.random.shuffle(ops.arange(n), seed=self.seeds)
        other = order
        if self.kind == "two_orders":
            other = keras.random.shuffle(ops.arange(n), seed=self.seeds_y)
        mixed = lam * x + (1 - lam) * ops.take(x, order, axis=0)
        target = lam * y + (1 - lam) * ops.take(y, other, axis=0)
        if self.kind == "labels_unmixed":
            target = y

        def objective():
            return self.cce(target, self.model(mixed, training=True))

        return {"loss": treadle.minimize(objective, self.model, self.optimizer)}


@wrong("mixup mixes inputs and labels with different permutations", "inputs and labels of the mixture are unpaired")
def mixup_two_orders():
    x, y = blobs()
    return Mixup("two_orders"), batches(x, y), None, None


@wrong("mixup mixes the inputs but not the labels", "the loss of an example depends on inputs of another whose label does not enter")
def mixup_labels_unmixed():
    x, y = blobs()
    return Mixup("labels_unmixed"), batches(x, y), None, None


class Focal(treadle.Task):
    def __init__(self, gamma=2.0):
        self.gamma = gamma
        self.model = mlp(8, 1)
        self.optimizer = keras.optimizers.Adam(0.005)

    def focal(self, y, z):
        p = ops.clip(ops.sigmoid(z), 1e-6, 1 - 1e-6)
        pt = ops.where(y > 0.5, p, 1 - p)
        return -ops.mean(pt**self.gamma * ops.log(pt))  # should be (1 - pt)

    def train_step(self, batch):
        x, y = batch
        return {"loss": treadle.minimize(lambda: self.focal(y, self.model(x)), self.model, self.optimizer)}


@wrong("focal loss with pt**gamma in place of (1-pt)**gamma: wrong examples hardly count", "worse answers lower the loss / loss is not monotone in the answer")
def focal_inverted():
    x, y = blobs(classes=2)
    return Focal(), batches(x, y[:, None].astype("float32")), None, None


class PosWeight(treadle.Task):
    def __init__(self):
        self.model = mlp(8, 1, activation="sigmoid")
        self.optimizer = keras.optimizers.Adam(0.01)
        self.recall = keras.metrics.Recall()

    def train_step(self, batch):
        x, y = batch
        w = ops.where(y == 1, 1.0, 9.0)  # one in ten is positive; meant the other way round

        def objective():
            p = ops.clip(self.model(x, training=True), 1e-7, 1 - 1e-7)
            return ops.mean(-w * (y * ops.log(p) + (1 - y) * ops.log(1 - p))), p

        loss, p = treadle.minimize(objective, self.model, self.optimizer)
        self.recall.update_state(y, p)
        return {"loss": loss}


@wrong("the weight for rare positives is applied to the frequent negatives", "weights enlarge the imbalance")
def pos_weight_inverted():
    x, y = blobs(n=640, classes=2)
    keep = (y == 0) | (rng(9).random(len(y)) < 0.11)
    return PosWeight(), batches(x[keep], y[keep][:, None].astype("float32"), size=64), None, None


# ---------------------------------------------------------------- distillation, fine-tuning
class Distil(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        self.teacher = mlp(8, 4, units=64, dropout=0.5)
        self.student = mlp(8, 4, units=8)
        if kind != "both":
            self.teacher.trainable = False
        self.optimizer = keras.optimizers.Adam(0.01)
        self.ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.kl = keras.losses.KLDivergence()

    def train_step(self, batch):
        x, y = batch
        T = 3.0

        def objective():
            t = self.teacher(x, training=self.kind == "noisy")
            s = self.student(x, training=True)
            if self.kind == "logits":
                soft = self.kl(t / T, s / T)
            else:
                soft = self.kl(ops.softmax(t / T), ops.softmax(s / T)) * T * T
            return 0.3 * self.ce(y, s) + 0.7 * soft

        variables = self.student.trainable_variables
        if self.kind == "both":
            variables = self.trainable(self.student, self.teacher)
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}

    @staticmethod
    def trainable(*models):
        return [v for m in models for v in m.trainable_variables]


def taught(task):
    """A teacher that knows the blobs: one pass of Adam on them."""
    x, y = blobs(n=512, seed=4)
    flag, task.teacher.trainable = task.teacher.trainable, True
    helper = treadle.Supervised(
        task.teacher, keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.Adam(0.01)
    )
    with treadle.Loop(helper, console=False) as loop:
        loop.fit(batches(x, y), epochs=3)
    task.teacher.trainable = flag
    return task


@wrong("the teacher runs with training=True, so its dropout makes the soft targets noisy", "frozen model in training mode / random targets")
def distil_noisy_teacher():
    x, y = blobs()
    return taught(Distil("noisy")), batches(x, y), None, None


@wrong("the teacher is trained together with the student, towards the student", "targets get gradients / teacher changes")
def distil_teacher_trained():
    x, y = blobs()
    return taught(Distil("both")), batches(x, y), None, None


@wrong("KLDivergence gets logits, and not probabilities", "logits given where probabilities are expected")
def distil_kl_of_logits():
    x, y = blobs()
    return taught(Distil("logits")), batches(x, y), None, None


class FineTune(treadle.Task):
    def __init__(self, kind):
        self.backbone = keras.Sequential(
            [keras.Input((12, 12, 1)), layers.Conv2D(6, 3, activation="relu"), layers.MaxPooling2D(),
             layers.BatchNormalization(), layers.Flatten()], name="backbone")
        self.head = keras.Sequential([keras.Input((150,)), layers.Dense(16, activation="relu"), layers.Dense(3)])
        self.kind = kind
        if kind == "frozen_bn":
            self.backbone.trainable = False
        self.optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
        self.ce = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def forward(self, x, training):
        return self.head(self.backbone(ops.cast(x, "float32") / 255.0, training=training), training=training)

    def train_step(self, batch):
        x, y = batch

        def objective():
            logits = self.forward(x, True)
            return self.ce(y, logits), logits

        loss, logits = treadle.minimize(objective, self.backbone.trainable_variables, self.optimizer)
        self.accuracy.update_state(y, logits)
        return {"loss": loss}

    def eval_step(self, batch):
        x, y = batch
        self.accuracy.update_state(y, self.forward(x, False))


@wrong("only the backbone's variables are trained, the new head is forgotten", "head is not trained")
def head_forgotten():
    x, y = pictures()
    vx, vy = pictures(seed=1)
    return FineTune("head"), batches(x, y), batches(vx, vy), None


@wrong("raw pixels 0..255 into a network without any normalization", "inputs of large scale, unnormalized")
def raw_pixels():
    x, y = pictures()
    model = keras.Sequential(
        [keras.Input((12, 12, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten(), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(model, loss, keras.optimizers.SGD(0.01), ["accuracy"]), batches(x.astype("float32"), y), None, None


@wrong("the Normalization layer was never adapted, so raw columns go through", "inputs unnormalized / Normalization not adapted")
def unadapted():
    x, y = line()
    x = x * np.array([1, 300, 0.01, 5000, 1, 20], "float32") + np.array([0, 900, 0, 20000, 0, 3], "float32")
    inputs = keras.Input((6,))
    h = layers.Normalization()(inputs)
    h = layers.Dense(16, activation="relu")(h)
    model = keras.Model(inputs, layers.Dense(1)(h))
    return treadle.Supervised(model, "mse", "adam", ["mae"]), batches(x, y[:, None]), None, None


# ---------------------------------------------------------------- metrics, evaluation
class Logits(treadle.Task):
    """Binary classifier with logits, and metrics."""

    def __init__(self, metrics):
        self.model = mlp(8, 1, dropout=0.2)
        self.optimizer = keras.optimizers.Adam(0.01)
        self.bce = keras.losses.BinaryCrossentropy(from_logits=True)
        self.metrics = metrics

    def train_step(self, batch):
        x, y = batch
        loss = treadle.minimize(lambda: self.bce(y, self.model(x, training=True)), self.model, self.optimizer)
        return {"loss": loss}

    def eval_step(self, batch):
        x, y = batch
        z = self.model(x, training=False)
        for m in self.metrics:
            m.update_state(y, z)
        return {"loss": self.bce(y, z)}


@wrong("Precision and Recall with the threshold 0.5 get logits", "metric expects probabilities, gets logits")
def metric_threshold():
    x, y = blobs(classes=2)
    vx, vy = blobs(classes=2, seed=1)
    y, vy = y[:, None].astype("float32"), vy[:, None].astype("float32")
    return Logits([keras.metrics.Precision(), keras.metrics.Recall()]), batches(x, y), batches(vx, vy), None


class ByHandAccuracy(treadle.Task):
    def __init__(self, kind):
        self.kind = kind
        self.model = mlp(8, 4, dropout=0.3)
        self.optimizer = keras.optimizers.RMSprop(0.005)

    def train_step(self, batch):
        x, y = batch

        def objective():
            logits = self.model(x, training=True)
            return ops.mean(keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)), logits

        loss, _ = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss}

    def eval_step(self, batch):
        x, y = batch
        if self.kind == "train_mode":
            logits = self.model(x, training=True)
        else:
            logits = self.model(x, training=False)
        best = ops.argmax(logits, axis=-1)
        if self.kind == "shape":
            best = best[:, None]
        return {"accuracy": ops.mean(ops.cast(ops.equal(ops.cast(best, "int32"), ops.cast(y, "int32")), "float32"))}


@wrong("accuracy by hand compares (n, 1) with (n,), so each answer with each label", "broadcast in eval")
def accuracy_broadcast():
    x, y = blobs()
    vx, vy = blobs(seed=1)
    return ByHandAccuracy("shape"), batches(x, y), batches(vx, vy), None


@wrong("evaluation runs the model with training=True, dropout active", "eval in training mode")
def eval_training():
    x, y = blobs()
    vx, vy = blobs(seed=1)
    return ByHandAccuracy("train_mode"), batches(x, y), batches(vx, vy), None


@wrong("training images are divided by 255, validation images are not", "validation inputs have another scale")
def validation_scale():
    x, y = pictures()
    vx, vy = pictures(seed=1)
    model = keras.Sequential(
        [keras.Input((12, 12, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten(), layers.Dense(3, activation="softmax")])
    task = treadle.Supervised(model, "sparse_categorical_crossentropy", "adam", ["accuracy"])
    return task, batches(x / np.float32(255), y), batches(vx.astype("float32"), vy), None


@wrong("the validation rows are also in the training data", "validation rows are in training data")
def leaked_split():
    x, y = blobs(n=320)
    vx, vy = x[:64], y[:64]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(mlp(8, 4), loss, "adam", ["accuracy"]), batches(x, y), batches(vx, vy), None


class Averaged(treadle.Task):
    def __init__(self):
        self.model = mlp(6, 1)
        self.ema = treadle.frozen_copy(self.model)
        self.optimizer = keras.optimizers.Adam(0.01)
        self.mae = keras.metrics.MeanAbsoluteError()

    def train_step(self, batch):
        x, y = batch
        return {"loss": treadle.minimize(lambda: ops.mean(ops.square(self.model(x) - y)), self.model, self.optimizer)}

    def eval_step(self, batch):
        x, y = batch
        self.mae.update_state(y, self.ema(x, training=False))


@wrong("the average of the weights is evaluated but never updated", "evaluated model does not change in training")
def stale_average():
    x, y = line()
    vx, vy = line(seed=1)
    return Averaged(), batches(x, y[:, None]), batches(vx, vy[:, None]), None


# ---------------------------------------------------------------- data
@wrong("inputs and labels are shuffled separately", "inputs and labels unpaired")
def shuffled_apart():
    x, y = blobs(n=512)

    def pipeline():
        r = rng(11)
        xs, ys = r.permutation(x), r.permutation(y)
        for i in range(0, len(xs), 32):
            yield xs[i : i + 32], ys[i : i + 32]

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(mlp(8, 4), loss, "adam", ["accuracy"]), pipeline, None, None


@wrong("the data are sorted by class and not shuffled: each batch has one class", "batches hold one class, data sorted")
def sorted_batches():
    x, y = blobs(n=512)
    order = np.argsort(y, kind="stable")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(mlp(8, 4), loss, "adam", ["accuracy"]), batches(x[order], y[order], shuffle=False), None, None


@wrong("the generator is seeded anew for each batch: each batch is the same", "batches repeat")
def same_batch():
    x, y = blobs(n=512)

    def pipeline():
        for _ in range(16):
            chosen = np.random.default_rng(42).choice(len(x), 32, replace=False)
            yield x[chosen], y[chosen]

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(mlp(8, 4), loss, "adam", ["accuracy"]), pipeline, None, None


@wrong("integer division makes nearly all pixels 0", "inputs are constant/zero")
def integer_division():
    x, y = pictures()
    model = keras.Sequential(
        [keras.Input((12, 12, 1)), layers.Conv2D(8, 3, activation="relu"), layers.Flatten(), layers.Dense(3, activation="softmax")])
    task = treadle.Supervised(model, "sparse_categorical_crossentropy", "adam", ["accuracy"])
    return task, batches((x // 255).astype("float32"), y), None, None


@wrong("a column of the table is the target itself, under another unit", "target leaks into inputs")
def leaking_column():
    x, y = line()
    x = np.concatenate([x, (y * 2.2 + 1)[:, None]], axis=1)
    return treadle.Supervised(mlp(7, 1), "mse", "adam"), batches(x, y[:, None]), None, None
