"""Lightning on PyTorch; it is slow to import, and gets a file of its own."""

import logging
import time
import warnings
from typing import Any

import lightning
import torch

from .contestants import Contestant, Round
from .contestants_torch import Counted, adversarial, loader, supervised_loss
from .torch_models import by_hand
from .workloads import Job


class Module(lightning.LightningModule):
    """Hand-written models as Lightning wants them; it counts by itself, which costs least."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.models, self._optimizers = by_hand(job.name)
        self.all = torch.nn.ModuleList(self.models)
        self.counted, self.ends = Counted(), [0.0]
        self.automatic_optimization = job.workload.kind != "gan"

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        if self.automatic_optimization:
            return supervised_loss(self.models[0], self.counted, *batch)
        step = adversarial(self.models, self.optimizers(), self.counted, self.manual_backward)
        return step(*batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return self._optimizers

    def on_train_epoch_end(self) -> None:
        self.ends.append(time.perf_counter())


class Lightning(Contestant):
    """`Trainer.fit` with all that Lightning can leave out left out."""

    def __init__(self, job: Job, batches: Any = None) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.steps = job.steps
        self._module, self._batches = Module(job), batches or loader(job)
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
