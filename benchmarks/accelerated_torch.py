"""Loops by hand on PyTorch for `scripts/bench accelerator`, with models of `torch.nn`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .accelerated import CLASSES, HALF, Epoch, Job, Size


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


TORCH: dict[str, Callable[[Job], Epoch]] = {
    "torch.nn": by_hand,
    "torch.nn, each loss read": lambda job: by_hand(job, reads=True),
    "torch.nn, torch.compile": lambda job: by_hand(job, compiled=True),
}
