"""Who is timed on a PyTorch `DataLoader`: Treadle, loops by hand, Lightning and Accelerate."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from .contestants import Contestant, TreadleLoop
from .contestants_lightning import Lightning
from .contestants_torch import accelerate, keras_layers, torch_nn
from .workloads import Job


class Photographs(Dataset[Any]):
    """Images that are flipped and cropped at random, one by one."""

    def __init__(self, job: Job) -> None:
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


def loader(job: Job, workers: int) -> DataLoader[Any]:
    """Return a loader whose workers, if any, live as long as it does."""
    return DataLoader(
        Photographs(job),
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def makers(job: Job, workers: int) -> dict[str, Callable[[], Contestant]]:
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
