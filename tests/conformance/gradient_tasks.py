"""What a step may do with gradients: one small task for each, the same source on every backend."""

from typing import Any

import keras
from classifier import CLASSES, FEATURES, ROWS, Classifier, cross_entropy, dense, head
from keras import ops

import treadle


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


def schedule() -> Any:
    return keras.optimizers.schedules.CosineDecay(0.1, 10)


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

        variables = treadle.transforms.trainable(self.model, frozen="model/layers/0/*")
        loss, grads = treadle.gradients(objective, variables)
        norms = treadle.transforms.gradient_norms(grads, variables)
        grads = treadle.transforms.scaled_by(grads, variables, {"*classify*": 0.5, "*/bias": 2.0})
        grads = treadle.transforms.centralized(grads)
        grads = treadle.transforms.clip_by_norm(grads, 0.5)
        grads = treadle.transforms.clip_by_value(grads, 0.2)
        grads, norm = treadle.clip_by_global_norm(grads, 0.3)
        grads = treadle.transforms.with_noise(grads, self.noise, seed=self.seed)
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
