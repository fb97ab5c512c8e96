"""Lightning on PyTorch; it is slow to import, and gets a file of its own."""

import time
import warnings
from typing import Any

import lightning
import torch
from torch import nn

from .contestants import Contestant, Round
from .contestants_torch import Counted, hits, loader
from .torch_models import by_hand
from .workloads import Job


class Module(lightning.LightningModule):
    """A hand-written model as Lightning wants it; it counts by itself, which costs least."""

    def __init__(self, workload: str) -> None:
        super().__init__()
        self.model, self._optimizer = by_hand(workload)
        self.counted, self.ends = Counted(), [0.0]

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        logits = self.model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        self.counted.add(loss=loss, accuracy=hits(logits, y))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._optimizer

    def on_train_epoch_end(self) -> None:
        self.ends.append(time.perf_counter())


class Lightning(Contestant):
    """`Trainer.fit` with all that Lightning can leave out left out."""

    def __init__(self, job: Job) -> None:
        self.steps = job.steps
        self._module, self._batches = Module(job.name), loader(job)
        self._fresh = True

    def round(self, epochs: int = 1) -> Round:
        """Train one epoch more than asked for: the first one holds what the call sets up."""
        more = 0 if self._fresh else 1
        self._fresh = False
        module = self._module
        trainer = lightning.Trainer(barebones=True, accelerator="cpu", max_epochs=epochs + more)
        module.ends = [time.perf_counter()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the workers that a DataLoader could have
            trainer.fit(module, self._batches)
        values = module.counted.fetch((epochs + more) * self.steps)
        return Round(module.ends[-1] - module.ends[more], epochs * self.steps, values)
