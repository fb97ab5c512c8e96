"""What a user writes: a `Task` with its steps, or plain functions made into one by `task`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import keras
from keras import ops

from ..core.identity import made_with
from ..errors import ConfigurationError, StepError
from .gradients import gradients
from .helpers import Weighted

Batch = Any
Returned = Any


class Task:
    """What learns, and what one step of learning is.

    Attributes are the state: models, optimizers, metrics, variables, seed generators, nested tasks,
    and lists, tuples, dicts and dataclasses of them are found, named by path, saved and restored.
    Python values are constants of the compiled step.

    Write `train_step`; `eval_step`, `predict_step` and `datasets` where they are wanted. A step
    returns a dict of scalars, one scalar (its loss), or nothing where metrics say it all.

    Example:
        >>> import keras, treadle
        >>> class Line(treadle.Task):
        ...     def __init__(self):
        ...         self.slope = keras.Variable(0.0)
        ...         self.optimizer = keras.optimizers.SGD(0.1)
        ...     def train_step(self, batch):
        ...         x, y = batch
        ...         def objective():
        ...             return keras.ops.mean((self.slope * x - y) ** 2)
        ...         return {"loss": treadle.minimize(objective, [self.slope], self.optimizer)}
    """

    # Not in `vars`, so that it is no state. Its layout is that of any class without slots.
    __slots__ = ("__dict__", "__weakref__", "_made_with")

    holds_state = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Make a task, and note what it is made with: that tells its runs from others."""
        new: Any = super().__new__
        if new is not object.__new__:
            task = new(cls, *args, **kwargs)
        elif (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        else:
            task = new(cls)
        object.__setattr__(task, "_made_with", made_with(cls.__init__, args, kwargs))
        return task

    def train_step(self, batch: Batch) -> Returned:
        """Learn from one batch: called once per step, compiled."""
        raise ConfigurationError(f"{type(self).__name__} has no train_step: write one")

    def eval_step(self, batch: Batch) -> Returned:
        """Measure one batch of a validation set; changes to variables are undone afterwards."""
        raise ConfigurationError(
            f"{type(self).__name__} has no eval_step: write one to evaluate or validate"
        )

    def predict_step(self, batch: Batch) -> Any:
        """Return outputs for one batch; the default calls `self.model` on its inputs."""
        model = getattr(self, "model", None)
        if model is None:
            raise ConfigurationError(
                f"{type(self).__name__} has neither a predict_step nor a model: write predict_step"
            )
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch, training=False)

    def datasets(self) -> "Datasets":
        """Return the data to train on; used by the command line."""
        raise ConfigurationError(
            f"{type(self).__name__} has no datasets: write `def datasets(self)` returning "
            "treadle.Datasets(train=…, validation=…)"
        )


@dataclass(frozen=True)
class Datasets:
    """The sources of a task.

    Attributes:
        train: What `Loop.fit` trains on.
        validation: One source, or a dict of named ones; None for no validation.
        test: What `treadle evaluate` measures beside the validation set.
    """

    train: Any
    validation: Any = None
    test: Any = None


class Supervised(Task):
    """A ready task: batches of `(x, y)` or `(x, y, sample_weight)`, a loss, an optimizer, metrics.

    Override `train_step` alone to change how it learns.

    Args:
        model: A Keras model.
        loss: A Keras loss, its name, or a function of `(y, outputs)` that returns one per example.
        optimizer: A Keras optimizer, or its name.
        metrics: Keras metrics or their names: a list (named by the metrics) or a dict.
            `"accuracy"` is the accuracy that fits a cross-entropy, as `compile` has it.

    Raises:
        ConfigurationError: `"accuracy"` with a loss that does not say which one.

    Example:
        >>> import keras, treadle
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        >>> loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        >>> task = treadle.Supervised(model, loss, "adam", ["sparse_categorical_accuracy"])
        >>> list(task.metrics)
        ['sparse_categorical_accuracy']
    """

    def __init__(self, model: Any, loss: Any, optimizer: Any, metrics: Any = ()) -> None:
        self.model = model
        found = keras.losses.get(loss)
        if not isinstance(found, keras.Loss):  # a function: per example, neither weighted nor mean
            name = getattr(found, "__name__", "loss")
            found = keras.src.losses.losses.LossFunctionWrapper(found, name=name)
        self.loss = found
        self.optimizer = keras.optimizers.get(optimizer)
        if isinstance(metrics, Mapping):
            self.metrics = {name: _metric(metric, found) for name, metric in metrics.items()}
        else:
            self.metrics = {m.name: m for m in (_metric(metric, found) for metric in metrics)}

    def train_step(self, batch: Batch) -> Returned:
        """Take one gradient step; returns the loss, regularization included."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)

        def objective() -> tuple[Any, Any]:
            outputs = self.model(x, training=True)
            return self.total_loss(y, outputs, sample_weight), outputs

        variables = self.model.trainable_variables
        if variables:
            (loss, outputs), grads = gradients(objective, variables)
            self.optimizer.apply(grads, self.model.trainable_variables)
        else:  # nothing to learn: metrics and callbacks work all the same, as under `fit`
            loss, outputs = objective()
        self.update_metrics(y, outputs, sample_weight)
        return {"loss": loss}

    def eval_step(self, batch: Batch) -> Returned:
        """Measure the loss and the metrics in inference mode."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = self.model(x, training=False)
        self.update_metrics(y, outputs, sample_weight)
        return {"loss": self.total_loss(y, outputs, sample_weight)}

    def total_loss(self, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
        """Return the loss with all that layers and regularizers add to it."""
        loss = self.loss(y, outputs, sample_weight=sample_weight)
        # Those of layers that compute in half precision are of it, too.
        extra = [ops.cast(x, loss.dtype) for x in self.model.losses]
        return loss + sum(extra) if extra else loss

    def update_metrics(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Update every metric."""
        for metric in self.metrics.values():
            metric.update_state(y, outputs, sample_weight=sample_weight)


ACCURACIES = {
    "sparse_categorical_crossentropy": "SparseCategoricalAccuracy",
    "categorical_crossentropy": "CategoricalAccuracy",
    "categorical_focal_crossentropy": "CategoricalAccuracy",
    "binary_crossentropy": "BinaryAccuracy",
    "binary_focal_crossentropy": "BinaryAccuracy",
}


def _metric(metric: Any, loss: Any) -> Any:
    """Return a metric by its name; of `accuracy` the one that fits the loss."""
    if not isinstance(metric, str) or metric not in ("accuracy", "acc"):
        return keras.metrics.get(metric)
    kind = ACCURACIES.get(getattr(getattr(loss, "fn", None), "__name__", ""))
    if kind is None:
        known = "sparse_categorical_accuracy, categorical_accuracy or binary_accuracy"
        raise ConfigurationError(
            f"{metric!r} does not say which accuracy fits the loss {loss.name!r}: write {known}"
        )
    if kind == "BinaryAccuracy" and getattr(loss, "from_logits", False):
        # Keras' own compares with 0.5, also where outputs are logits.
        fn = keras.metrics.binary_accuracy
        return keras.metrics.MeanMetricWrapper(fn, name=metric, threshold=0.0)
    return getattr(keras.metrics, kind)(name=metric)


class FunctionTask(Task):
    """A task made of plain functions; see `task`."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        eval_step: Callable[..., Any] | None,
        state: Mapping[str, Any],
    ) -> None:
        reserved = set(state) & {"train_step", "eval_step", "predict_step", "datasets"}
        if reserved:
            raise ConfigurationError(f"{sorted(reserved)[0]!r} cannot be the name of a state")
        vars(self).update(state)
        self.holds_eval_step = eval_step is not None
        self._train = _Bound(train_step, state)
        self._eval = _Bound(eval_step, state) if eval_step is not None else None

    def train_step(self, batch: Batch) -> Returned:
        """Call the user's function."""
        return self._train(batch)

    def eval_step(self, batch: Batch) -> Returned:
        """Call the user's function."""
        if self._eval is None:
            raise ConfigurationError(
                "this task has no eval_step: treadle.task(train_step, eval_step, …) takes one"
            )
        return self._eval(batch)


def task(
    train_step: Callable[..., Any], eval_step: Callable[..., Any] | None = None, **state: Any
) -> Task:
    """Make a task of functions as they stand in a script.

    Args:
        train_step: Called with each batch. A parameter that has the name of a state gets that
            state; the other parameters get the batch: one gets it whole, several get its parts.
            `@tf.function` is unwrapped; the loop compiles.
        eval_step: The same for evaluation.
        state: What holds variables: models, optimizers, metrics, also those that the functions use
            as globals.

    Returns:
        A task whose attributes are the states.

    Example:
        >>> import keras, treadle
        >>> slope, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.1)
        >>> def train_step(x, y):
        ...     def objective():
        ...         return keras.ops.mean((slope * x - y) ** 2)
        ...     return treadle.minimize(objective, [slope], optimizer)
        >>> line = treadle.task(train_step, slope=slope, optimizer=optimizer)
    """
    return FunctionTask(train_step, eval_step, state)


class _Bound:
    """A user's function with its states filled in, taking a batch."""

    def __init__(self, function: Callable[..., Any], state: Mapping[str, Any]) -> None:
        # `tf.function` keeps the original here; other decorators keep it in __wrapped__.
        self.function: Callable[..., Any] = getattr(function, "python_function", function)
        self.name = getattr(self.function, "__name__", "the step")
        parameters = inspect.signature(self.function).parameters.values()
        self.state = {p.name: state[p.name] for p in parameters if p.name in state}
        self.free = [
            p.name
            for p in parameters
            if p.name not in state and p.default is p.empty and p.kind is not p.VAR_KEYWORD
        ]
        if not self.free:
            raise ConfigurationError(
                f"{self.name} has no parameter left for the batch: all of {list(self.state)} are "
                "names of states"
            )

    def __call__(self, batch: Batch) -> Any:
        if len(self.free) == 1:
            return self.function(**{self.free[0]: batch}, **self.state)
        if isinstance(batch, Mapping):
            parts: dict[str, Any] = {str(k): v for k, v in batch.items()}
            found = f"names {list(parts)}"
        else:
            listed = list(batch) if isinstance(batch, (tuple, list)) else [batch]
            parts = dict(zip(self.free, listed, strict=False))
            parts = parts if len(listed) == len(self.free) else {}
            found = f"{len(listed)} part{'s' if len(listed) != 1 else ''}"
        if set(parts) != set(self.free):
            raise StepError(
                f"{self.name} takes {self.free} from a batch, but the batch has {found}: change "
                "its parameters, or pass states by name to treadle.task"
            )
        return self.function(**parts, **self.state)


def has_eval_step(candidate: Any) -> bool:
    """Say whether a task can be evaluated."""
    if isinstance(candidate, FunctionTask):
        return candidate.holds_eval_step
    return type(candidate).eval_step is not Task.eval_step


def step_outputs(result: Any, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read what a step returned: scalars by name, and the weights of those that have some.

    Raises:
        StepError: Something else than a dict of scalars, one scalar, or nothing.
    """
    if result is None:
        return {}, {}
    if not isinstance(result, Mapping):
        if isinstance(result, (tuple, list, str)):
            raise StepError(
                f"{name} must return a dict of scalars, one scalar (its loss) or nothing; it "
                f"returned a {type(result).__name__}"
            )
        result = {"loss": result}
    values: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Weighted):
            weights[str(key)] = _scalar(value.weight, f"the weight of {key!r}", name)
            value = value.value
        values[str(key)] = _scalar(value, repr(str(key)), name)
    return values, weights


def _scalar(value: Any, what: str, name: str) -> Any:
    try:
        tensor = ops.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise StepError(
            f"{name} returned {what} of type {type(value).__name__}: only scalars can be logged"
        ) from error
    if tuple(tensor.shape) != ():
        raise StepError(
            f"{name} returned {what} of shape {tuple(tensor.shape)}: only scalars can be logged; "
            "reduce it, for example with ops.mean, or keep it out"
        )
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    # Half precision has too few digits to be averaged.
    return ops.cast(tensor, "float32") if dtype in ("float16", "bfloat16") else tensor
