"""Who is timed on PyTorch: loops over Keras' layers and over `torch.nn`, and other frameworks."""

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .contestants import Contestant, Entry, Round, TreadleLoop, Values, checked, fit, sliced
from .torch_models import by_hand, like_keras
from .workloads import NOISE, Job, d_loss, g_loss

Step = Callable[..., None]
Batches = Iterable[Sequence[torch.Tensor]]
Backward = Callable[..., Any]


class Counted:
    """Sums on the device, fetched once an epoch."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            self._sums[name] = self._sums.get(name, 0) + value.detach()

    def fetch(self, steps: int) -> Values:
        """Return means per step, and reset."""
        values = {name: float(total) / steps for name, total in self._sums.items()}
        self._sums.clear()
        return values


def tensors(job: Job) -> list[torch.Tensor]:
    """Return the data; labels as PyTorch wants them."""
    found = [torch.tensor(array) for array in job.arrays]
    return [x.long() if x.dtype == torch.int32 else x for x in found]


def slices(job: Job) -> Callable[[], Batches]:
    """Return epochs of batches picked out of tensors: the fastest way to feed a loop."""
    arrays = tensors(job)

    def batches() -> Iterator[Sequence[torch.Tensor]]:
        for rows in torch.from_numpy(job.order()):
            yield [array[rows] for array in arrays]

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


def supervised_loss(model: nn.Module, counted: Counted, x: Any, y: Any) -> torch.Tensor:
    """Return the loss of a batch; it and the accuracy are counted."""
    logits = model(x)
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten())
    counted.add(loss=loss, accuracy=(logits.argmax(-1) == y).float().mean())
    return loss


def supervised(models: Any, optimizers: Any, counted: Counted, backward: Backward) -> Step:
    """Return the step that everybody writes with `torch.nn` and `torch.optim`."""
    (model,), (optimizer,) = models, optimizers

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss = supervised_loss(model, counted, x, y)
        optimizer.zero_grad()
        backward(loss)
        optimizer.step()

    return step


def adversarial(models: Any, optimizers: Any, counted: Counted, backward: Backward) -> Step:
    """Return the step of a GAN; each loss is differentiated by its own weights only."""
    discriminator, generator = models
    weights = [list(model.parameters()) for model in models]

    def step(real: torch.Tensor) -> None:
        real = real.permute(0, 3, 1, 2)
        with torch.no_grad():
            fake = generator(torch.randn(len(real), NOISE))
        real_logits, fake_logits = discriminator(real), discriminator(fake)
        d = nn.functional.softplus(-real_logits).mean()
        d = d + nn.functional.softplus(fake_logits).mean()
        optimizers[0].zero_grad()
        backward(d, inputs=weights[0])
        optimizers[0].step()
        g = nn.functional.softplus(-discriminator(generator(torch.randn(len(real), NOISE)))).mean()
        optimizers[1].zero_grad()
        backward(g, inputs=weights[1])
        optimizers[1].step()
        counted.add(d_loss=d, g_loss=g)

    return step


STEPS = {"supervised": supervised, "streaming": supervised, "gan": adversarial}


def torch_nn(
    job: Job, given: Any = None, compiled: bool = False, loaded: bool = False
) -> Contestant:
    """A hand-written `torch.nn` model and loop, over the job's arrays or the given batches."""
    models, optimizers = by_hand(job.name)
    if compiled:
        models = [torch.compile(model) for model in models]
    counted = Counted()
    step = STEPS[job.workload.kind](models, optimizers, counted, torch.Tensor.backward)
    given = given or (loader(job) if loaded else None)
    return looped(step, counted, slices(job) if given is None else given.__iter__, job.steps)


def reading_loss(job: Job) -> Callable[..., float]:
    """A loop over the task's own Keras layers and optimizer; the loss is read each time."""
    task = job.make()
    model, optimizer, loss_function = task.model, task.optimizer, task.loss
    optimizer.build(model.trainable_variables)
    weights, metrics = model.trainable_variables, job.metrics()

    def run(x: Any, y: Any) -> float:
        model.zero_grad()
        x, y = torch.from_numpy(x), torch.from_numpy(y)
        outputs = model(x, training=True)
        loss = loss_function(y, outputs)
        loss.backward()
        with torch.no_grad():
            optimizer.apply([v.value.grad for v in weights], weights)
            for metric in metrics.values():
                metric.update_state(y, outputs)
        return float(loss)

    return run


def evaluating_keras(job: Job) -> Contestant:
    """A loop over the task's own Keras layers and metrics, without gradients."""
    task = job.make()
    model, loss_function, arrays = task.model, task.loss, tensors(job)
    metrics = job.metrics()

    def run() -> Values:
        for metric in metrics.values():
            metric.reset_state()
        total, counted = torch.zeros(()), 0
        with torch.inference_mode():
            for x, y in sliced(arrays, job.batch_size):
                outputs = model(x, training=False)
                total += loss_function(y, outputs) * len(x)
                counted += len(x)
                for metric in metrics.values():
                    metric.update_state(y, outputs)
            results = {name: float(metric.result()) for name, metric in metrics.items()}
        return {"loss": float(total) / counted, **results}

    return Contestant(run, job.steps)


def evaluating_torch_nn(job: Job) -> Contestant:
    """A loop over a model written with `torch.nn`, which has the weights of the Keras model."""
    model, arrays = like_keras(job), tensors(job)

    def run() -> Values:
        total, correct, counted = torch.zeros(()), torch.zeros((), dtype=torch.long), 0
        with torch.inference_mode():
            for x, y in sliced(arrays, job.batch_size):
                outputs = model(x)
                counted += len(x)
                if y.is_floating_point():
                    loss = nn.functional.binary_cross_entropy(outputs, y)
                else:
                    loss = nn.functional.cross_entropy(outputs, y)
                    correct += (outputs.argmax(-1) == y).sum()
                total += loss * len(x)
        accuracy = {} if y.is_floating_point() else {"accuracy": int(correct) / counted}
        return {"loss": float(total) / counted, **accuracy}

    return Contestant(run, job.steps)


def predicting(job: Job, keras_layers: bool) -> Contestant:
    """A forward pass without gradients, whose outputs are collected and joined."""
    model = job.make().model if keras_layers else like_keras(job)
    arguments = {"training": False} if keras_layers else {}
    arrays = tensors(job)[:1]

    def run() -> Values:
        with torch.inference_mode():
            outputs = [model(x, **arguments) for (x,) in sliced(arrays, job.batch_size)]
            return checked(torch.cat(outputs).numpy())

    return Contestant(run, job.steps)


def accelerate(job: Job, given: Any = None) -> Contestant:
    """The same model and loop, driven through Accelerate."""
    from accelerate import Accelerator

    accelerator, counted = Accelerator(cpu=True), Counted()
    models, optimizers = by_hand(job.name)
    models = [accelerator.prepare(model) for model in models]
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    step = STEPS[job.workload.kind](models, optimizers, counted, accelerator.backward)
    return looped(step, counted, accelerator.prepare(given or loader(job)).__iter__, job.steps)


def ignite(job: Job) -> Contestant:
    """The same model and step, driven by Ignite's engine; no handlers."""
    from ignite.engine import Engine

    counted = Counted()
    step = STEPS[job.workload.kind](*by_hand(job.name), counted, torch.Tensor.backward)
    engine, batches = Engine(lambda engine, batch: step(*batch)), loader(job)

    def epoch() -> Values:
        engine.run(batches, max_epochs=1)
        return counted.fetch(job.steps)

    return Contestant(epoch, job.steps)


def _lightning_module(job: Job) -> Any:
    """Return hand-written models as Lightning wants them; counting itself costs least."""
    import lightning  # slow to import

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
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

    return Module()


class Lightning(Contestant):
    """`Trainer.fit` of the same model and step, with all that can be left out left out."""

    def __init__(self, job: Job, batches: Any = None) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        self.steps = job.steps
        self._module, self._batches = _lightning_module(job), batches or loader(job)
        self._fresh = True

    def round(self, epochs: int = 1) -> Round:
        """Train one epoch more than asked for: the first one holds what the call sets up."""
        more = 0 if self._fresh else 1
        self._fresh = False
        import lightning

        module = self._module
        trainer = lightning.Trainer(barebones=True, accelerator="cpu", max_epochs=epochs + more)
        module.ends = [time.perf_counter()]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the workers that a DataLoader could have
            trainer.fit(module, self._batches)
        values = module.counted.fetch((epochs + more) * self.steps)
        return Round(module.ends[-1] - module.ends[more], epochs * self.steps, values)


def keras_layers(job: Job, given: Any = None) -> Contestant:
    """Keras' guide for PyTorch: `backward`, then the Keras optimizer applies the gradients."""
    if job.workload.kind == "gan":
        counted = Counted()
        return looped(keras_gan_step(job.make(), counted), counted, slices(job), job.steps)
    task, counted = job.make(), Counted()
    model, loss_function, accuracy = task.model, task.loss, job.metrics()["accuracy"]

    def step(x: Any, y: Any) -> None:
        logits = model(x, training=True)
        loss = loss_function(y, logits)
        keras_apply(loss, model, task.optimizer)
        with torch.no_grad():
            accuracy.update_state(y, logits)
        counted.add(loss=loss)

    batches = slices(job) if given is None else given.__iter__
    inner = looped(step, counted, batches, job.steps)

    def epoch() -> Values:
        accuracy.reset_state()
        return {**inner.round().values, "accuracy": float(accuracy.result())}

    return Contestant(epoch, job.steps)


def keras_gan_step(task: Any, counted: Counted) -> Step:
    """Return the same for a GAN of Keras' layers."""
    discriminator, generator = task.discriminator, task.generator

    def step(real: torch.Tensor) -> None:
        with torch.no_grad():
            fake = generator(torch.randn(len(real), NOISE), training=True)
        d = d_loss(discriminator(real), discriminator(fake))
        keras_apply(d, discriminator, task.d_optimizer)
        g = g_loss(discriminator(generator(torch.randn(len(real), NOISE), training=True)))
        keras_apply(g, generator, task.g_optimizer)
        counted.add(d_loss=d, g_loss=g)

    return step


def keras_apply(loss: torch.Tensor, model: Any, optimizer: Any) -> None:
    """Differentiate a loss and apply it to a Keras model's weights."""
    weights = model.trainable_weights
    values = [weight.value for weight in weights]
    for value in values:
        value.grad = None
    loss.backward(inputs=values)
    with torch.no_grad():
        optimizer.apply([value.grad for value in values], weights)


LOOPS = [
    Entry("treadle", "treadle", TreadleLoop),
    Entry("torch.nn, tensor slices", "hand", torch_nn),
    Entry("torch.nn, torch.compile", "hand", partial(torch_nn, compiled=True)),
    Entry("torch.nn, DataLoader", "hand", partial(torch_nn, loaded=True)),
    Entry("Keras layers, tensor slices", "hand", keras_layers),
    Entry("Lightning", "framework", Lightning),
    Entry("Accelerate", "framework", accelerate),
    Entry("Ignite", "framework", ignite),
]
ENTRIES: dict[str, list[Entry]] = {"supervised": [*LOOPS, Entry("fit", "fit", fit)], "gan": LOOPS}


EVALUATING = {
    "Keras layers, `torch.inference_mode`": evaluating_keras,
    "`torch.nn`, `torch.inference_mode`": evaluating_torch_nn,
}
PREDICTING = {
    "Keras layers, `torch.inference_mode`": partial(predicting, keras_layers=True),
    "`torch.nn`, `torch.inference_mode`": partial(predicting, keras_layers=False),
}


def versions() -> dict[str, str]:
    from importlib.metadata import version

    names = ("torch", "lightning", "accelerate", "pytorch-ignite")
    return {name: version(name) for name in names}
