"""Reinforcement learning."""

import keras
import numpy as np
from keras import layers, ops

import treadle

from .base import wrong
from .part1 import dense

rng = np.random.default_rng(2)


def transitions(n=1024):
    """A small chain: moving right pays; observations are noisy positions."""
    s = rng.uniform(-1, 1, (n, 4)).astype("float32")
    a = rng.integers(0, 3, n).astype("int32")
    s2 = (s + 0.2 * (a[:, None] - 1) + 0.02 * rng.normal(size=s.shape)).astype("float32")
    r = s2.mean(1).astype("float32")
    done = (np.abs(s2[:, 0]) > 0.9).astype("float32")
    return {"obs": s, "action": a, "reward": r, "next_obs": s2, "done": done}


def rollouts(n=1024):
    t = transitions(n)
    returns = (t["reward"] + 0.5 * rng.normal(size=n)).astype("float32")
    logp = np.log(rng.uniform(0.2, 0.5, n)).astype("float32")
    adv = ((returns - returns.mean()) / returns.std()).astype("float32")
    return {"obs": t["obs"], "action": t["action"], "return": returns, "old_logp": logp, "adv": adv}


class DQN(treadle.Task):
    def __init__(self, gamma=0.95):
        self.q = dense(4, 32, 3)
        self.target = treadle.frozen_copy(self.q)
        self.optimizer = keras.optimizers.Adam(1e-3)
        self.huber = keras.losses.Huber()
        self.gamma = gamma

    def chosen(self, batch):
        return ops.sum(self.q(batch["obs"]) * ops.one_hot(batch["action"], 3), axis=-1)


@wrong(
    "the TD target is computed with the trained network within the objective: gradient through it",
    "the target has a gradient: stop_gradient is missing",
)
def dqn_target_not_stopped():
    class Through(DQN):
        def train_step(self, batch):
            def objective():
                following = ops.max(self.q(batch["next_obs"]), axis=-1)
                target = batch["reward"] + self.gamma * (1 - batch["done"]) * following
                return self.huber(target, self.chosen(batch))

            loss = treadle.minimize(objective, self.q, self.optimizer)
            treadle.blend(self.target, self.q, 0.01)
            return {"loss": loss}

    return Through(), treadle.data.from_arrays(transitions(), batch_size=64), None, None


@wrong(
    "the target network is never updated: it stays the random initial one",
    "target is used, but never changes",
)
def dqn_target_never_updated():
    class Stale(DQN):
        def train_step(self, batch):
            following = ops.max(self.target(batch["next_obs"]), axis=-1)
            target = batch["reward"] + self.gamma * (1 - batch["done"]) * following
            loss = treadle.minimize(
                lambda: self.huber(target, self.chosen(batch)), self.q, self.optimizer
            )
            return {"loss": loss, "q": ops.mean(target)}

    return Stale(), treadle.data.from_arrays(transitions(), batch_size=64), None, None


@wrong(
    "the policy-gradient loss has the wrong sign: good actions become less likely",
    "actions with positive advantage become less probable (sign)",
)
def policy_gradient_sign():
    policy, optimizer = dense(4, 32, 3), keras.optimizers.Adam(1e-3)

    def train_step(batch, policy, optimizer):
        def objective():
            logp = ops.log_softmax(policy(batch["obs"]), axis=-1)
            taken = ops.sum(logp * ops.one_hot(batch["action"], 3), axis=-1)
            entropy = -ops.mean(ops.sum(ops.exp(logp) * logp, axis=-1))
            return ops.mean(taken * batch["adv"]) - 0.01 * entropy, entropy

        loss, entropy = treadle.minimize(objective, policy, optimizer)
        return {"loss": loss, "entropy": entropy}

    data = treadle.data.from_arrays(rollouts(), batch_size=128)
    return treadle.task(train_step, policy=policy, optimizer=optimizer), data, None, None


@wrong(
    "the advantage is not stopped: the actor's loss trains the critic, too",
    "the advantage has a gradient: the policy loss changes the value head",
)
def actor_critic_advantage_not_stopped():
    class A2C(treadle.Task):
        def __init__(self):
            obs = keras.Input((4,))
            h = layers.Dense(32, activation="tanh")(obs)
            self.model = keras.Model(obs, [layers.Dense(3)(h), layers.Dense(1)(h)])
            self.optimizer = keras.optimizers.Adam(1e-3, clipnorm=0.5)

        def train_step(self, batch):
            def objective():
                logits, value = self.model(batch["obs"], training=True)
                value = ops.squeeze(value, -1)
                advantage = batch["return"] - value
                logp = ops.log_softmax(logits)
                taken = ops.take_along_axis(logp, batch["action"][:, None], axis=-1)[:, 0]
                actor = -ops.mean(taken * advantage)
                critic = ops.mean(advantage**2)
                return actor + 0.5 * critic, (actor, critic)

            loss, (actor, critic) = treadle.minimize(objective, self.model, self.optimizer)
            return {"loss": loss, "actor": actor, "critic": critic}

    return A2C(), treadle.data.from_arrays(rollouts(), batch_size=128), None, None


@wrong(
    "PPO recomputes the old log-probabilities from the current policy: the ratio is always 1",
    "the ratio is 1 / old_logp of the batch is unused / clipping has no effect",
)
def ppo_ratio_one():
    class PPO(treadle.Task):
        def __init__(self, clip=0.2):
            self.policy, self.clip = dense(4, 32, 3), clip
            self.optimizer = keras.optimizers.Adam(3e-4)

        def log_prob(self, batch):
            logp = ops.log_softmax(self.policy(batch["obs"]))
            return ops.take_along_axis(logp, batch["action"][:, None], axis=-1)[:, 0]

        def train_step(self, batch):
            losses = []
            for _ in range(3):  # updates per batch

                def objective():
                    new = self.log_prob(batch)
                    ratio = ops.exp(new - ops.stop_gradient(self.log_prob(batch)))
                    clipped = ops.clip(ratio, 1 - self.clip, 1 + self.clip)
                    gain = ops.minimum(ratio * batch["adv"], clipped * batch["adv"])
                    return -ops.mean(gain), ops.mean(ratio)

                losses.append(treadle.minimize(objective, self.policy, self.optimizer))
            return {"loss": losses[-1][0], "ratio": losses[-1][1]}

    return PPO(), treadle.data.from_arrays(rollouts(), batch_size=128), None, None


@wrong(
    "the critic's values have shape (n, 1), the returns (n,): the error is broadcast to (n, n)",
    "broadcast (n, 1) with (n,)",
)
def critic_broadcast():
    class Value(treadle.Task):
        def __init__(self):
            self.actor, self.critic = dense(4, 16, 3), dense(4, 16, 1)
            self.optimizers = {k: keras.optimizers.Adam(1e-3) for k in ("actor", "critic")}

        def train_step(self, batch):
            def objective():
                values = self.critic(batch["obs"])
                logp = ops.log_softmax(self.actor(batch["obs"]))
                taken = ops.sum(logp * ops.one_hot(batch["action"], 3), -1)
                return {
                    "critic": ops.mean(ops.square(batch["return"] - values)),
                    "actor": -ops.mean(taken * batch["adv"]),
                }

            nets = {"actor": self.actor, "critic": self.critic}
            return treadle.minimize(objective, nets, self.optimizers)

    return Value(), treadle.data.from_arrays(rollouts(), batch_size=64), None, None
