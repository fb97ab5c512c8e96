"""A GAN as a compiled Keras model with its own `train_step`, and as a task."""

from typing import Any

import keras
from keras import ops

import treadle

from .workloads import NOISE, SmallGAN, d_loss, g_loss


class Adversaries(keras.Model):
    """The networks of `SmallGAN`, both trained by each step, with one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        networks = SmallGAN()
        self.generator, self.discriminator = networks.generator, networks.discriminator
        self.seeds = keras.random.SeedGenerator(0)
        self.trackers = [keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")]
        self.built = True

    def losses_of(self, real: Any) -> tuple[Any, Any]:
        """Return the losses of both networks."""
        noise = keras.random.normal((ops.shape(real)[0], NOISE), seed=self.seeds)
        fake = self.generator(noise, training=True)
        judged = self.discriminator(fake)
        return d_loss(self.discriminator(real), judged), g_loss(judged)

    def parts(self) -> tuple[list[Any], list[Any]]:
        """Return the variables of the discriminator and those of the generator."""
        return self.discriminator.trainable_variables, self.generator.trainable_variables

    def logs(self, losses: tuple[Any, Any]) -> dict[str, Any]:
        """Count the losses, and return their means."""
        for tracker, loss in zip(self.trackers, losses, strict=True):
            tracker.update_state(loss)
        return {tracker.name: tracker.result() for tracker in self.trackers}


class AdversariesOnTensorFlow(Adversaries):
    """With a persistent tape."""

    def train_step(self, data: Any) -> Any:
        import tensorflow as tf

        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape(persistent=True) as tape:
            losses = self.losses_of(real)
        both = self.parts()
        found = [tape.gradient(loss, part) for loss, part in zip(losses, both, strict=True)]
        self.optimizer.apply([*found[0], *found[1]], [*both[0], *both[1]])
        return self.logs(losses)


class AdversariesOnTorch(Adversaries):
    """With two backward passes."""

    def train_step(self, data: Any) -> Any:
        import torch

        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        losses = self.losses_of(real)
        both, found = self.parts(), []
        for loss, part in zip(losses, both, strict=True):
            self.zero_grad()
            loss.backward(retain_graph=loss is losses[0])
            found.extend(v.value.grad for v in part)
        with torch.no_grad():
            self.optimizer.apply(found, [*both[0], *both[1]])
            return self.logs(losses)


class AdversariesOnJax(Adversaries):
    """Without state: variables are passed to the step, and it returns their new values."""

    def train_step(self, state: Any, data: Any) -> Any:
        import jax
        import jax.numpy as jnp

        trainable, other, slots, counters = state
        real, _, _ = keras.utils.unpack_x_y_sample_weight(data)

        def objective(trainable: Any) -> Any:
            mapping = [
                *zip(self.trainable_variables, trainable, strict=True),
                *zip(self.non_trainable_variables, other, strict=True),
            ]
            with keras.StatelessScope(mapping) as scope:
                losses = self.losses_of(real)
            return losses, [scope.get_current_value(v) for v in self.non_trainable_variables]

        losses, pullback, other = jax.vjp(objective, trainable, has_aux=True)
        one, zero = jnp.ones(()), jnp.zeros(())
        by_d, by_g = pullback((one, zero))[0], pullback((zero, one))[0]
        judges = {id(v) for v in self.discriminator.trainable_variables}
        variables = self.trainable_variables
        found = [d if id(v) in judges else g for v, d, g in zip(variables, by_d, by_g, strict=True)]
        trainable, slots = self.optimizer.stateless_apply(slots, found, trainable)
        mapping = list(zip(self.metrics_variables, counters, strict=True))
        with keras.StatelessScope(mapping) as scope:
            logs = self.logs(losses)
        counters = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (trainable, other, slots, counters)


OF_BACKEND = {
    "tensorflow": AdversariesOnTensorFlow,
    "torch": AdversariesOnTorch,
    "jax": AdversariesOnJax,
}


def adversaries() -> Adversaries:
    """Return the model, compiled for this backend."""
    keras.utils.set_random_seed(0)
    model = OF_BACKEND[keras.config.backend()]()
    model.compile(keras.optimizers.Adam(2e-4, beta_1=0.5))
    return model


class AdversariesTask(treadle.Task):
    """The same program as a task."""

    def __init__(self) -> None:
        keras.utils.set_random_seed(0)
        self.model = Adversaries()
        self.optimizer = keras.optimizers.Adam(2e-4, beta_1=0.5)

    def train_step(self, batch: Any) -> dict[str, Any]:
        (real,) = batch
        d, g = self.model.parts()

        def objective() -> dict[str, Any]:
            return dict(zip("dg", self.model.losses_of(real), strict=True))

        losses, found = treadle.gradients(objective, {"d": d, "g": g})
        self.optimizer.apply([*found["d"], *found["g"]], [*d, *g])
        return self.model.logs((losses["d"], losses["g"]))
