"""Who is timed on PyTorch: loops over Keras' layers and over `torch.nn`, and other frameworks."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .contestants import Contestant, Values, fit, treadle_loop
from .torch_models import by_hand
from .workloads import Job

Step = Callable[..., None]
Batches = Iterable[tuple[torch.Tensor, ...]]


class Counted:
    """Sums on the device, fetched once an epoch."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()

    def fetch(self, steps: int) -> Values:
        """Return means per step, and begin anew."""
        values = {name: float(total) / steps for name, total in self._sums.items()}
        self._sums.clear()
        return values


def hits(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the accuracy of a batch."""
    return (logits.argmax(-1) == y).float().mean()


def tensors(job: Job) -> list[torch.Tensor]:
    """Return the data; labels as PyTorch wants them."""
    found = [torch.from_numpy(array) for array in job.arrays]
    return [x.long() if x.dtype == torch.int32 else x for x in found]


def slices(job: Job) -> Callable[[], Batches]:
    """Return epochs of batches picked out of tensors: the fastest way to feed a loop."""
    arrays = tensors(job)

    def batches() -> Iterator[tuple[torch.Tensor, ...]]:
        for rows in torch.from_numpy(job.order()):
            yield tuple(array[rows] for array in arrays)

    return batches


def loader(job: Job) -> DataLoader[Any]:
    """Return what PyTorch's users feed their loops with."""
    return DataLoader(TensorDataset(*tensors(job)), batch_size=job.batch_size, shuffle=True)


def looped(step: Step, counted: Counted, batches: Callable[[], Batches], steps: int) -> Contestant:
    """Return a contestant that runs a step over all batches."""

    def epoch() -> Values:
        for batch in batches():
            step(*batch)
        return counted.fetch(steps)

    return Contestant(epoch, steps)


def keras_layers(job: Job) -> Contestant:
    """Keras' guide for PyTorch: `backward`, then the Keras optimizer applies the gradients."""
    task, counted = job.make(), Counted()
    model, optimizer, loss_function = task.model, task.optimizer, task.loss
    accuracy = task.metrics["accuracy"]
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> None:
        logits = model(x, training=True)
        loss = loss_function(y, logits)
        model.zero_grad()
        loss.backward()
        weights = model.trainable_weights
        gradients = [v.value.grad for v in weights]
        with torch.no_grad():
            optimizer.apply(gradients, weights)
            accuracy.update_state(y, logits)
        counted.add(loss=loss)

    inner = looped(step, counted, slices(job), job.steps)

    def epoch() -> Values:
        accuracy.reset_state()
        return {**inner.round().values, "accuracy": float(accuracy.result())}

    return Contestant(epoch, job.steps)


def hand_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    counted: Counted,
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
) -> Step:
    """Return the step that everybody writes with `torch.nn` and `torch.optim`."""

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        logits = model(x)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()
        counted.add(loss=loss, accuracy=hits(logits, y))

    return step


def torch_nn(job: Job, compiled: bool = False, loaded: bool = False) -> Contestant:
    """A hand-written `torch.nn` model and loop."""
    model, optimizer = by_hand(job.name)
    counted = Counted()
    step = hand_step(torch.compile(model) if compiled else model, optimizer, counted)
    batches = loader(job).__iter__ if loaded else slices(job)
    return looped(step, counted, batches, job.steps)


def accelerate(job: Job) -> Contestant:
    """The same model and loop, driven through Accelerate."""
    from accelerate import Accelerator

    accelerator, counted = Accelerator(cpu=True), Counted()
    model, optimizer, batches = accelerator.prepare(*by_hand(job.name), loader(job))
    step = hand_step(model, optimizer, counted, accelerator.backward)
    return looped(step, counted, batches.__iter__, job.steps)


def ignite(job: Job) -> Contestant:
    """The same model and step, driven by Ignite's engine; no handlers."""
    from ignite.engine import Engine

    model, optimizer = by_hand(job.name)
    counted = Counted()
    step = hand_step(model, optimizer, counted)
    engine, batches = Engine(lambda engine, batch: step(*batch)), loader(job)

    def epoch() -> Values:
        engine.run(batches, max_epochs=1)
        return counted.fetch(job.steps)

    return Contestant(epoch, job.steps)


def lightning(job: Job) -> Contestant:
    """The same model and step, driven by Lightning."""
    from .contestants_lightning import Lightning

    return Lightning(job)


SUPERVISED: dict[str, Callable[[Job], Contestant]] = {
    "treadle": treadle_loop,
    "torch.nn, tensor slices": torch_nn,
    "torch.nn, torch.compile": partial(torch_nn, compiled=True),
    "torch.nn, DataLoader": partial(torch_nn, loaded=True),
    "Keras layers, tensor slices": keras_layers,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "Ignite": ignite,
    "fit": fit,
}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "lightning", "accelerate", "pytorch-ignite")
    return {name: version(name) for name in names}
