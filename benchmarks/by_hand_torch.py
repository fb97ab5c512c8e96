"""Loops by hand on PyTorch for single benchmarks; others are in `contestants_torch.py`."""

from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from . import workloads
from .accelerator import CLASSES, HALF, Epoch, Job, Size
from .contestants import Contestant, TreadleLoop
from .contestants_torch import Lightning, accelerate, keras_layers, torch_nn
from .memory import HIDDEN, INPUTS, Parts
from .reinforcement import DISCOUNT, ENTROPY, RATES, TARGET_RATE

# On an accelerator: models of `torch.nn`


class Residual(nn.Module):
    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm2d(before), nn.BatchNorm2d(width)])
        self.first = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.skip = nn.Conv2d(before, width, 1, stride, bias=False) if before != width else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](x))
        skipped = x if self.skip is None else self.skip(y)
        return self.second(F.relu(self.norms[1](self.first(y)))) + skipped


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.inputs(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.outputs(attended.transpose(1, 2).flatten(2))
        return x + self.hidden(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.words, size.width)
        self.places = nn.Parameter(torch.zeros(size.tokens, size.width))
        heads = max(1, size.width // 64)
        self.blocks = nn.Sequential(*[Block(size.width, heads) for _ in range(size.depth)])
        self.head = nn.Sequential(nn.LayerNorm(size.width), nn.Linear(size.width, size.words))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x) + self.places))


def _model(job: Job) -> nn.Module:
    width = job.size.width
    if job.name == "transformer":
        return Transformer(job.size)
    if job.name == "mlp":
        return nn.Sequential(
            *[nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()],
            nn.Linear(width, CLASSES),
        )
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False)]
    before = width
    for stage in range(4):
        for stride in (2 if stage else 1, 1):
            blocks.append(Residual(before, width * 2**stage, stride))
            before = width * 2**stage
    blocks += [nn.BatchNorm2d(before), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*blocks, nn.Linear(before, CLASSES))


def by_hand(job: Job, compiled: bool = False, reads: bool = False) -> Epoch:
    """Return an epoch of a hand-written loop, whose data is on the device."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    model = _model(job).to(kind)
    fused = True if kind == "cuda" else None
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)
    x, y = (torch.tensor(array).to(kind) for array in job.arrays)
    x = x.permute(0, 3, 1, 2).contiguous() if job.name == "resnet18" else x

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16, enabled=job.name in HALF):
            logits = model(x)
        return F.cross_entropy(logits.float().flatten(0, -2), y.long().flatten())

    run: Callable[..., Any] = torch.compile(loss_of) if compiled else loss_of

    def epoch() -> float:
        loss: Any = 0.0
        for rows in torch.from_numpy(job.order()).to(kind):
            loss = run(x[rows], y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss = loss.item() if reads else loss.detach()
        return float(loss)

    return epoch


ACCELERATED: dict[str, Callable[[Job], Epoch]] = {
    "torch.nn": by_hand,
    "torch.nn, each loss read": lambda job: by_hand(job, reads=True),
    "torch.nn, torch.compile": lambda job: by_hand(job, compiled=True),
}


# Reinforcement learning: `torch.nn` and `torch.optim`, without Keras


def _policy_network(units: int, outputs: int, activation: type[nn.Module]) -> nn.Module:
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
        self._actor, self._critic = _policy_network(64, 2, nn.Tanh), _policy_network(64, 1, nn.Tanh)
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
        logs = F.log_softmax(self._actor(given["observations"]), -1)
        chosen = logs.gather(1, given["actions"].long()[:, None])[:, 0]
        entropy = -(logs.exp() * logs).sum(-1).mean()
        policy = -(given["advantages"] * chosen).mean() - ENTROPY * entropy
        values = self._critic(given["observations"])[:, 0]
        value = F.mse_loss(values, given["targets"])
        self._optimizer.zero_grad()
        (policy + value).backward()
        self._optimizer.step()
        return [float(policy.detach()), float(value.detach())]


class DQN:
    """The networks of the DQN and their update."""

    def __init__(self) -> None:
        self._model = _policy_network(128, 2, nn.ReLU)
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
        loss = F.huber_loss(q, targets)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        with torch.no_grad():
            slow, fast = list(self._target.parameters()), list(self._model.parameters())
            torch._foreach_lerp_(slow, fast, TARGET_RATE)
        return float(loss.detach())


# Memory


def memory_parts(width: int) -> Parts:
    """`torch.nn` and `torch.optim`, without Keras."""
    sizes = [INPUTS, *[width] * (HIDDEN + 1)]
    hidden = [
        layer
        for before, after in pairwise(sizes)
        for layer in (nn.Linear(before, after), nn.ReLU())
    ]
    model = nn.Sequential(*hidden, nn.Linear(width, 10))
    optimizer, loss_function = torch.optim.Adam(model.parameters(), 1e-5), nn.CrossEntropyLoss()

    def loss_of(x: Any, y: Any) -> torch.Tensor:
        return loss_function(model(torch.from_numpy(x)), torch.from_numpy(y).long())

    def train(x: Any, y: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    def evaluate(x: Any, y: Any) -> float:
        with torch.inference_mode():
            return float(loss_of(x, y))

    def save(path: Path) -> None:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    return train, evaluate, save


# Streams: a `DataLoader`


class Photographs(Dataset[Any]):
    """Images that are flipped and cropped at random, one by one."""

    def __init__(self, job: workloads.Job) -> None:
        images, labels = job.arrays
        self._images = torch.from_numpy(images)
        self._labels = torch.from_numpy(labels).long()

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        image = self._images[index]
        if torch.rand(()) < 0.5:
            image = image.flip(1)
        image = torch.nn.functional.pad(image, (0, 0, 4, 4, 4, 4))
        top, left = torch.randint(0, 9, (2,)).tolist()
        return image[top : top + 32, left : left + 32], self._labels[index]


def loader(job: workloads.Job, workers: int) -> DataLoader[Any]:
    """Return a loader whose workers, if any, live as long as it does."""
    return DataLoader(
        Photographs(job),
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def streaming(job: workloads.Job, workers: int) -> dict[str, Callable[[], Contestant]]:
    """Return the contestants by name; each has a loader of its own."""

    def made(make: Callable[..., Contestant]) -> Callable[[], Contestant]:
        return lambda: make(job, loader(job, workers))

    return {
        "treadle": made(TreadleLoop),
        "torch.nn by hand": made(torch_nn),
        "Keras layers by hand": made(keras_layers),
        "Lightning": made(Lightning),
        "Accelerate": made(accelerate),
    }
