"""`KerasTask`: the task of a compiled Keras model, with the steps that the model has itself."""

import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Final
from weakref import finalize

import keras
from keras import ops

from ..backends.base import active
from ..core.identity import described
from ..core.keras_lists import layers_in
from ..core.options import Options
from ..core.user_code import attributes_of
from ..errors import ConfigurationError
from .probes import shadowed
from .task import Batch, Returned, Task

# Keras' methods that call the steps: a loop calls the steps itself.
_CALLERS: Final = {
    "make_train_function": "train_step",
    "make_test_function": "test_step",
    "make_predict_function": "predict_step",
}

_made_as: Final[dict[int, Any]] = {}  # by the id of an optimizer, see `_noted`


class ModelMetrics:
    """All metrics of a compiled model as one object, which its steps update."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def variables(self) -> list[Any]:
        """Return the variables of all metrics."""
        return list(self._model.metrics_variables)

    def reset(self) -> None:
        """Reset all metrics with the model's own method."""
        self._model.reset_metrics()

    def result(self, last: Mapping[str, float]) -> dict[str, float]:
        """Return the values that `fit` of Keras reports for the steps since the last reset.

        If the step returns the names of the metrics, these are their results; a metric that was not
        updated has the value of the last step. Otherwise all are values of the last step.

        Args:
            last: The values that the last step returned.
        """
        if not last:
            return {}
        found: dict[str, float] = {}
        for name, tensor in as_scalars(self._model.get_metrics_result()).items():
            found[name] = float(active().to_numpy(tensor))
        if found.keys() != last.keys():
            return dict(last)
        idle = {name for name, mean in self.means().items() if not float(mean.count.numpy())}
        used = {name: value for name, value in found.items() if name not in idle}
        return {name: used.get(name, value) for name, value in last.items()}

    def means(self) -> dict[str, Any]:
        """Return the metrics that are means and have variables, by the names of their results."""
        found: dict[str, Any] = {}
        for metric in self._model.metrics:
            parts = getattr(metric, "metrics", None)
            if not isinstance(parts, list):
                found[metric.name] = metric
            elif metric.built:  # the metrics of `compile`
                names = list(metric.result())
                # Otherwise they cannot be told apart, and have the values that the step returns.
                found |= zip(names, parts, strict=True) if len(names) == len(parts) else ()
        return {name: metric for name, metric in found.items() if _is_mean(metric)}


class KerasTask(Task):
    """A compiled Keras model as a task: its own steps, loss, metrics and optimizer.

    The model trains, evaluates and predicts with its `train_step`, `test_step` and `predict_step`,
    also where a subclass overrides them. The values of an epoch are those of the model's metrics at
    its end, as in `fit` of Keras.

    The log has the value of each step alone, where `fit` shows the mean since the epoch began. For
    a metric that is a mean, it is the difference of the metric's sums before and after the step,
    if the step calls the metric's `update_state`.
    Its relative error is at most 1e-7 for each step of the epoch so far: 0.1 % after 10,000 steps.
    If a step returns other names than those of the model's metrics, its values are logged as it
    returns them.

    Raises:
        ConfigurationError: `model` is no Keras model, or is not compiled.

    Example:
        >>> import keras, numpy as np, treadle
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        >>> model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
        >>> data = treadle.data.from_arrays(np.ones((8, 2)), np.ones((8, 1)), batch_size=4)
        >>> with treadle.Loop(treadle.KerasTask(model), console=False) as loop:
        ...     history = loop.fit(data, epochs=2)
        >>> sorted(history.epochs[0])
        ['loss', 'mae']
    """

    needs_compile = True
    scales_losses = True  # the optimizer of the model does

    def __init__(self, model: Any) -> None:
        kind: Any = keras.Model
        if not isinstance(model, kind):
            raise ConfigurationError(
                f"KerasTask needs a compiled keras.Model, but got a {type(model).__name__}; a "
                "treadle.Task is trained by treadle.Loop(task).fit(source, epochs=…)"
            )
        if self.needs_compile and not model.compiled:
            raise ConfigurationError(
                f"the model {model.name!r} ({type(model).__name__}) is not compiled: write "
                'model.compile(optimizer="adam", loss="mse") before, or use '
                "treadle.Supervised(model, loss, optimizer)"
            )
        for method, step in _CALLERS.items():
            if getattr(type(model), method) is not getattr(kind, method):
                raise ConfigurationError(
                    f"{type(model).__name__} overrides {method}, which has no effect, since a loop "
                    f"calls {step} itself: move what it does to {step}, or use model.fit"
                )
        self.model = model
        _ = self._compiled_with  # noted before training

    @property
    def _compiled_with(self) -> dict[str, Any] | None:
        """The loss, its weights and the optimizers of the model, as they were before training."""
        if not self.needs_compile:
            return None
        kinds: Any = keras.optimizers.Optimizer
        held = attributes_of(self.model).items()
        made = {name: _noted(x) for name, x in held if isinstance(x, kinds)}
        loss = described(getattr(self.model, "loss", None))
        return {"loss": loss, "loss_weights": _loss_weights(self.model), **made}

    def metrics_of_epoch(self) -> ModelMetrics:
        """Return all metrics of the model."""
        return ModelMetrics(self.model)

    def default_options(self) -> Options:
        """Return the options by which a model compiled with `run_eagerly=True` runs as Python."""
        return Options(execution="eager") if self.model.run_eagerly else Options()

    def build_for(self, batch: Batch) -> None:
        """Create the variables of the model, its metrics and its optimizer, if they are missing."""
        active().build_model(self.model, batch)

    def train_step(self, batch: Batch) -> Returned:
        """Call the model's `train_step`."""
        means = self.metrics_of_epoch().means()
        before = _sums(means.values())
        with _updates(means) as updated:
            logs = as_scalars(active().model_step(self.model, "train_step", batch))
        if set(logs) != set(as_scalars(self.model.get_metrics_result())):
            return logs  # of which `fit` reports those of the last step, see `ModelMetrics.result`
        if updated:
            alone = ops.unstack(_gained(before, _sums(means.values())), len(means))
            alone = dict(zip(means, alone, strict=True))
            logs |= {name: alone[name] for name in means if name in updated and name in logs}
        return logs

    def eval_step(self, batch: Batch) -> Returned:
        """Call the model's `test_step`."""
        return as_scalars(active().model_step(self.model, "test_step", batch))

    def predict_step(self, batch: Batch) -> Any:
        """Call the model's `predict_step`."""
        if not all(layer.built for layer in layers_in(self.model)):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
            return self.model(x)  # in the first dry run, which creates the variables
        return active().model_step(self.model, "predict_step", batch)

    def unreached_parts(self) -> dict[str, Any]:
        """Return the metrics that `compile` made, which no attribute of yours holds."""
        model: Any = self.model
        loss = getattr(model, "_compile_loss", None)
        # Not `model.metrics`, which the class may override.
        metrics: Any = keras.Model.metrics
        parts = {
            "loss": metrics.fget(model)[0] if model.compiled else None,
            "compiled": getattr(model, "_compile_metrics", None),
            "losses": None if loss is None else list(loss.metrics),
        }
        return {name: part for name, part in parts.items() if part is not None}


def _loss_weights(model: Any) -> Any:
    """Return the weights of the losses of several outputs, or None."""
    with warnings.catch_warnings(), suppress(Exception):  # of losses that have no configuration
        warnings.simplefilter("ignore")
        weights = model.get_compile_config()["loss_weights"]
        # As pairs, since names that only one of two descriptions has are not compared.
        return described(sorted(weights.items()) if isinstance(weights, Mapping) else weights)
    return None


def _noted(optimizer: Any) -> Any:
    """Return the description of an optimizer as it was when this was first called.

    Training changes learning rates, so of an optimizer that was trained before, as one of a model
    that was loaded, only the class is known.
    """
    key = id(optimizer)
    if key not in _made_as:
        trained = bool(int(ops.convert_to_numpy(optimizer.iterations)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Keras warns of a rate that is a lambda
            whole = {"class": type(optimizer).__name__} if trained else described(optimizer)
        _made_as[key] = _rounded(whole)
        finalize(optimizer, _made_as.pop, key, None).atexit = False
    return _made_as[key]


def _rounded(value: Any) -> Any:
    """Round the numbers of a description to six digits: learning rates are of float32."""
    if isinstance(value, dict):
        return {name: _rounded(part) for name, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def flat(logs: Any) -> dict[str, Any]:
    """Return the logs of a step without nested dicts, in Keras' order.

    Example:
        >>> flat({"loss": 1.0, "compile_metrics": {"mae": 2.0}})
        {'mae': 2.0, 'loss': 1.0}
    """
    if not isinstance(logs, Mapping):
        return {} if logs is None else {"loss": logs}
    found: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        found |= flat(value) if isinstance(value, Mapping) else {str(name): value}
    return found


def as_scalars(logs: Any) -> dict[str, Any]:
    """Return the logs of a step as `flat` does, with a name and an index for each item of a vector.

    A vector of one item keeps its name.
    """
    found: dict[str, Any] = {}
    for name, value in flat(logs).items():
        if not len(getattr(value, "shape", ())):  # before Keras 3.15, it may be a Python number
            found[name] = value
            continue
        items = ops.reshape(value, (-1,))
        several = items.shape[0] > 1
        found |= {f"{name}_{i}" if several else name: items[i] for i in range(items.shape[0])}
    return found


def _is_mean(metric: Any) -> bool:
    """Return whether the result of a metric is its total, a number, divided by its count."""
    mean: Any = keras.metrics.Mean
    if not isinstance(metric, mean) or type(metric).result is not mean.result:
        return False
    return metric.total.shape == metric.count.shape == ()


@contextmanager
def _updates(means: Mapping[str, Any]) -> Generator[set[str]]:
    """Yield a set to which the names of metrics are added that are updated in this context."""
    found = set[str]()

    def noted(name: str, update_state: Any, /, *args: Any, **kwargs: Any) -> Any:
        found.add(name)
        return update_state(*args, **kwargs)

    with ExitStack() as stack:
        for name, mean in means.items():
            watched = partial(noted, name, mean.update_state)
            stack.enter_context(shadowed(mean, "update_state", watched))
        yield found


def _sums(means: Iterable[Any]) -> Any:
    """Return the totals and counts of means, as an array of two rows.

    One array for all of them, since PyTorch takes as long for one number as for many.
    """
    sums = zip(*((mean.total, mean.count) for mean in means), strict=True)
    both = [variable.value for row in sums for variable in row]
    return ops.reshape(ops.stack(both), (2, -1)) if both else None


def _gained(before: Any, now: Any) -> Any:
    """Return the means of what was added to sums, or of all so far where nothing was added."""
    added = now - before
    total, count = ops.unstack(ops.where(ops.equal(added[1], 0), now, added), 2)
    return total / (count + ops.cast(ops.equal(count, 0), count.dtype))
