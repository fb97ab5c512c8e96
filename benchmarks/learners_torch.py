"""Reinforcement learning by hand on PyTorch: `torch.nn` and `torch.optim`, without Keras."""

from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from .reinforcement import DISCOUNT, ENTROPY, RATES, TARGET_RATE


def _network(units: int, outputs: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(4, units), activation(), nn.Linear(units, units), activation()),
        nn.Linear(units, outputs),
    )


def _tensors(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in batch.items()}


@torch.inference_mode()
def _outputs(model: nn.Module, observations: Any) -> Any:
    return model(torch.from_numpy(observations)).numpy()


class ActorCritic:
    """The networks of the actor-critic and their update."""

    def __init__(self) -> None:
        self._actor, self._critic = _network(64, 2, nn.Tanh), _network(64, 1, nn.Tanh)
        models = self._actor, self._critic
        # Fused was the fastest Adam here, and one over both networks faster than two.
        groups = [
            {"params": model.parameters(), "lr": rate}
            for model, rate in zip(models, RATES, strict=True)
        ]
        self._optimizer = torch.optim.Adam(groups, eps=1e-7, fused=True)

    def logits(self, observations: Any) -> Any:
        """Return the logits of the policy."""
        return _outputs(self._actor, observations)

    def values(self, observations: Any) -> Any:
        """Return the estimates of the critic."""
        return _outputs(self._critic, observations)[:, 0]

    def update(self, batch: dict[str, Any]) -> list[float]:
        """Update both networks, and return their losses."""
        given = _tensors(batch)
        logs = functional.log_softmax(self._actor(given["observations"]), -1)
        chosen = logs.gather(1, given["actions"].long()[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1).mean()
        policy = -(given["advantages"] * chosen).mean() - ENTROPY * entropy
        values = self._critic(given["observations"])[:, 0]
        value = functional.mse_loss(values, given["targets"])
        self._optimizer.zero_grad()
        (policy + value).backward()
        self._optimizer.step()
        return [float(policy.detach()), float(value.detach())]


class DQN:
    """The networks of the DQN and their update."""

    def __init__(self) -> None:
        self._model = _network(128, 2, nn.ReLU)
        self._target = deepcopy(self._model)
        self._optimizer = torch.optim.Adam(self._model.parameters(), 1e-3, eps=1e-7, fused=True)

    def q_values(self, observations: Any) -> Any:
        """Return the values of the actions."""
        return _outputs(self._model, observations)

    def update(self, batch: dict[str, Any]) -> float:
        """Update both networks, and return the loss."""
        given = _tensors(batch)
        with torch.no_grad():
            following = given["next_observations"]
            best = self._model(following).argmax(-1)
            values = self._target(following).gather(1, best[:, None])[:, 0]
            targets = given["rewards"] + DISCOUNT["dqn"] * (1 - given["terminations"]) * values
        q = self._model(given["observations"])
        q = q.gather(1, given["actions"].long()[:, None])[:, 0]
        loss = functional.huber_loss(q, targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        with torch.no_grad():
            slow, fast = list(self._target.parameters()), list(self._model.parameters())
            torch._foreach_lerp_(slow, fast, TARGET_RATE)
        return float(loss.detach())
