"""The workloads' models once more, written with `torch.nn` by hand, begun as Keras begins."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .workloads import LENGTH, NOISE, VOCABULARY

Made = tuple[list[nn.Module], list[torch.optim.Optimizer]]


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )


def bn_dropout() -> nn.Module:
    def hidden(inputs: int) -> list[nn.Module]:
        norm = nn.BatchNorm1d(256, eps=1e-3, momentum=0.01)  # Keras' defaults
        return [nn.Linear(inputs, 256), norm, nn.ReLU(), nn.Dropout(0.3)]

    return nn.Sequential(*hidden(784), *hidden(256), nn.Linear(256, 10))


class CNN(nn.Module):
    """Takes bytes of shape (batch, height, width, channels), as the data lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.permute(0, 3, 1, 2).float() / 255)


class SmallCNN(nn.Module):
    """Takes bytes of shape (batch, height, width, channels), as the data lie."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.permute(0, 3, 1, 2).float() / 255)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(28, 64, batch_first=True), nn.Linear(64, 10)
        nn.init.orthogonal_(self.lstm.weight_hh_l0)
        nn.init.xavier_uniform_(self.lstm.weight_ih_l0)
        with torch.no_grad():
            self.lstm.bias_ih_l0.zero_()[64:128] = 1  # the forget gate is open
        nn.init.zeros_(self.lstm.bias_hh_l0).requires_grad_(False)  # Keras has one bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    def __init__(self, width: int = 64, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Parameter(torch.empty(LENGTH, width).uniform_(-0.05, 0.05))
        nn.init.uniform_(self.embedding.weight, -0.05, 0.05)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("causal", causal)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x, src_mask=self.causal, is_causal=True)
        return self.head(self.norm(x))


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 7 * 7 * 32),
        nn.BatchNorm1d(7 * 7 * 32, eps=1e-3, momentum=0.01),
        nn.LeakyReLU(0.2),
        nn.Unflatten(1, (32, 7, 7)),
        nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1),
        nn.BatchNorm2d(16, eps=1e-3, momentum=0.01),
        nn.LeakyReLU(0.2),
        nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 32, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, 1),
    )


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-7)  # Keras' epsilon


def slow_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2e-4, betas=(0.5, 0.999), eps=1e-7)


MODELS: dict[str, tuple[list[Callable[[], nn.Module]], Callable[[Any], torch.optim.Optimizer]]] = {
    "mlp-sgd": ([mlp], sgd),
    "mlp-adam": ([mlp], adam),
    "bn-dropout": ([bn_dropout], adam),
    "cifar10-cnn": ([CNN], adam),
    "streaming": ([SmallCNN], adam),
    "gan": ([discriminator, generator], slow_adam),
    "transformer": ([Transformer], adam),
    "lstm": ([LSTM], adam),
}


def by_hand(workload: str) -> Made:
    """Return the models and an optimizer for each."""
    torch.manual_seed(0)
    makers, optimizer = MODELS[workload]
    models = [make() for make in makers]
    for module in (module for model in models for module in model.modules()):
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return models, [optimizer([p for p in m.parameters() if p.requires_grad]) for m in models]


def autoencoder() -> nn.Module:
    def dense(inputs: int, units: int, activation: nn.Module) -> list[nn.Module]:
        return [nn.Linear(inputs, units), activation]

    return nn.Sequential(
        *dense(784, 128, nn.ReLU()),
        *dense(128, 16, nn.ReLU()),
        *dense(16, 128, nn.ReLU()),
        *dense(128, 784, nn.Sigmoid()),
    )


def like_keras(job: Any) -> nn.Module:
    """Return the model of a job by hand, with the weights of the Keras model."""
    makers = {"mlp": mlp, "autoencoder": autoencoder, "cnn": CNN, "lstm": LSTM}
    model, weights = makers[job.name](), iter(job.make().model.get_weights())
    channels = 0
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.weight.copy_(torch.from_numpy(next(weights)).permute(3, 2, 0, 1))
                module.bias.copy_(torch.from_numpy(next(weights)))
                channels = module.out_channels
            elif isinstance(module, nn.Linear):
                kernel = torch.from_numpy(next(weights)).T
                if channels:  # Keras flattens images with the channels last, PyTorch first
                    kernel = kernel.unflatten(1, (-1, channels)).transpose(1, 2).flatten(1)
                    channels = 0
                module.weight.copy_(kernel)
                module.bias.copy_(torch.from_numpy(next(weights)))
            elif isinstance(module, nn.LSTM):
                module.weight_ih_l0.copy_(torch.from_numpy(next(weights)).T)
                module.weight_hh_l0.copy_(torch.from_numpy(next(weights)).T)
                module.bias_ih_l0.copy_(torch.from_numpy(next(weights)))
    return model
