"""The workloads' models once more, written with `torch.nn` by hand."""

from collections.abc import Callable

import torch
from torch import nn


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def sgd(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-7)  # Keras' epsilon


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., torch.optim.Optimizer]]] = {
    "mlp-sgd": (mlp, sgd),
    "mlp-adam": (mlp, adam),
}


def by_hand(workload: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, begun as Keras begins its layers, and its optimizer."""
    torch.manual_seed(0)
    make, optimizer = MODELS[workload]
    model = make()
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model, optimizer(model.parameters())
