"""`Supervised`, a task with the losses and metrics that `compile` of a Keras model makes."""

from collections.abc import Generator
from contextlib import contextmanager
from inspect import getmro
from typing import Any

import keras
from keras import ops, tree

from ..core import keras_internals
from ..errors import ConfigurationError, StepError
from .gradients import gradients
from .task import Batch, Returned, Task

BY_SHAPE = ("crossentropy", "ce")  # names of losses that Keras chooses by the shapes of a batch
ACCURACY = ("accuracy", "acc")


class Compiled:
    """The losses and metrics of a model, as `compile` of Keras makes them from its arguments.

    Keras' own objects compute them. Which losses and metrics there are depends on the structure of
    the outputs, so the first call of each method makes them.

    Attributes:
        arguments: The arguments of `compile`, as they were given.
        loss: The loss, or a structure of losses; each is a `keras.Loss`, or None.
        metrics: The metrics by the names under which `fit` logs them, with the means of the losses
            of several outputs. Empty before the first batch.
        is_partial: Whether some outputs have no loss; a guess before the first batch.

    Args:
        model: A Keras model, which need not be built.
        loss: As for `compile`, and so are the other arguments.
        loss_weights: Factors of the losses.
        metrics: Metrics that ignore sample weights.
        weighted_metrics: Metrics that use sample weights.

    Raises:
        ConfigurationError: An argument does not fit the outputs of the model.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
    ) -> None:
        if not isinstance(model, keras.Layer):
            raise ConfigurationError(f"model={model!r} is no Keras model: pass a keras.Model")
        self.arguments = {
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
        }
        self.metrics: dict[str, Any] = {}
        self._unnamed = {"loss", "metrics"}  # until a batch has made them
        self._output_names = getattr(model, "output_names", None)
        self._count = sum(x is not None for x in tree.flatten(loss))
        self.is_partial = not self._count
        with self._checked("loss"):
            self.loss = tree.map_structure(_loss, loss)
        self._check(_symbolic_outputs(model))
        self._losses, self._metrics = self._new_losses(), self._new_metrics()

    def _new_losses(self) -> Any:
        if not self._count:
            return None
        weights = self.arguments["loss_weights"]
        return _new_loss(self.loss, weights, output_names=self._output_names)

    def _new_metrics(self) -> Any:
        given = [self.arguments[name] or None for name in ("metrics", "weighted_metrics")]
        if given == [None, None]:
            return None
        return _new_metric(*given, output_names=self._output_names)

    def _check(self, outputs: Any) -> None:
        """Check that losses and metrics fit the outputs, if these are known before a batch is."""
        with self._checked("loss"):
            losses = _new_loss(self.loss, output_names=self._output_names)
            if self._count and outputs is not None:
                self._refuse_other_length(outputs)
                losses.build(outputs, outputs)
        with self._checked("loss_weights"):
            losses = self._new_losses()
            if losses is not None and outputs is not None:
                losses.build(outputs, outputs)
        for name in ("metrics", "weighted_metrics"):
            with self._checked(name):
                given = {"metrics": None, "weighted_metrics": None, name: self.arguments[name]}
                metrics = _new_metric(**given, output_names=self._output_names)
                if outputs is not None:
                    metrics.build(outputs, outputs)

    def _refuse_other_length(self, outputs: Any) -> None:
        """Reject a list of losses that Keras would apply to some outputs, or use a part of.

        Raises:
            ValueError: It has another length than the outputs.
        """
        leaves = len(tree.flatten(outputs))
        lengths = (leaves, len(outputs) if tree.is_nested(outputs) else 1)
        if isinstance(self.loss, (list, tuple)) and len(self.loss) not in lengths:
            raise ValueError(
                f"its length is {len(self.loss)}, and there are {leaves} outputs. None stands for "
                "an output without a loss"
            )

    @contextmanager
    def _checked(self, argument: str, using: Any = None) -> Generator[None]:
        """Report an error of Keras as one of an argument.

        Args:
            argument: The argument's name.
            using: What Keras made of it, whose errors are those of a batch once it is built.

        Raises:
            ConfigurationError: Keras raised an error.
        """
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if using is not None and using.built:
                raise
            text = str(error.args[0] if error.args else error).partition("\nReceived")[0]
            text = " ".join(text.split()).rstrip(".")  # Keras' messages have several lines
            names = f", whose outputs are {self._output_names}" if self._output_names else ""
            raise ConfigurationError(
                f"{argument}={self.arguments[argument]!r} does not fit the "
                f"{'model' if using is None else 'batch and the model'}{names} ({text}): pass the "
                "structure of the outputs, as `compile` of Keras takes it"
            ) from error

    def compute_loss(self, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
        """Return the weighted sum of the losses of all outputs; None if no output has a loss."""
        if self._losses is None:
            return None
        is_new = "loss" in self._unnamed
        with self._checked("loss", self._losses), _labels_needed(y, outputs, "loss"):
            if is_new:
                self._refuse_other_length(outputs)
            total = self._losses(y, outputs, sample_weight)
        if is_new:
            self.is_partial = tree.is_nested(self.loss) and self._count < len(tree.flatten(outputs))
            means: list[Any] = self._losses.metrics
            named = {mean.name: mean for mean in means}
            # Of losses with the same name, `fit` logs the last. Keras skips those that are None.
            means[:] = [mean if named[mean.name] is mean else None for mean in means]
            self.metrics |= named
            self._unnamed.remove("loss")
        return total

    def update_metrics(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Update every metric."""
        if self._metrics is None:
            return
        argument = "metrics" if self.arguments["metrics"] else "weighted_metrics"
        with self._checked(argument, self._metrics), _labels_needed(y, outputs, "metrics"):
            self._metrics.update_state(y, outputs, sample_weight)
        if "metrics" in self._unnamed:
            names = list(self._metrics.result())  # by which `fit` logs them
            if len(tree.flatten(outputs)) == 1:
                names = [own or name for own, name in zip(self._own_names(), names, strict=True)]
            self.metrics |= zip(names, self._metrics.metrics, strict=True)
            self._unnamed.remove("metrics")

    def _own_names(self) -> list[str]:
        """Return a name for each metric of a single output, in Keras' order; empty if it has none.

        Keras ignores the keys of a dict of metrics if there is a single output.
        """
        given = [self.arguments[name] or {} for name in ("metrics", "weighted_metrics")]
        paths = [path for part in given for path, _ in tree.flatten_with_path(part)]
        outputs = self._output_names or ()
        is_name = [len(p) == 1 and isinstance(p[0], str) and p[0] not in outputs for p in paths]
        return [path[0] if own else "" for path, own in zip(paths, is_name, strict=True)]


def _new_loss(*args: Any, **kwargs: Any) -> Any:
    return keras_internals.compiled_classes()[0](*args, **kwargs)


def _new_metric(*args: Any, **kwargs: Any) -> Any:
    return keras_internals.compiled_classes()[1](*args, **kwargs)


class Supervised(Task):
    """A task for supervised learning: a model with losses, an optimizer and metrics.

    It trains as `compile` and `fit` do, with Keras' own objects for losses and metrics, and logs
    the same names and values. Batches are `x`, `(x, y)` or `(x, y, sample_weight)`. Override only
    `train_step` to change how the model is trained.

    Args:
        model: A Keras model with one or several outputs.
        loss: A Keras loss, its name, or a function of `(y, outputs)` that returns one loss per
            example. For several outputs: one loss for all of them, or a list or dict of losses
            with the structure of the outputs; an output without a loss has None. None for no loss:
            the losses that layers add are minimized.
        optimizer: A Keras optimizer, or its name.
        metrics: A list of Keras metrics, names or functions of `(y, outputs)`, which ignore sample
            weights. For several outputs: a list or dict, with the metrics of each output. For one
            output, a dict names the metrics in the logs.
        loss_weights: Factors of the losses of several outputs: a list or dict.
        weighted_metrics: The same as `metrics`, for metrics that use sample weights.

    Attributes:
        loss: The losses, as given; those given by name or as functions are `keras.Loss` objects.
        metrics: The metrics by the names under which they are logged, and the mean loss of each of
            several outputs. The first batch makes them.

    Raises:
        ConfigurationError: The losses or metrics do not fit the outputs of the model. If these are
            known only after the first batch, the step fails.

    Example:
        >>> import keras, numpy as np, treadle
        >>> inputs = keras.Input((4,))
        >>> outputs = {"kind": keras.layers.Dense(3)(inputs), "size": keras.layers.Dense(1)(inputs)}
        >>> losses = {"kind": keras.losses.SparseCategoricalCrossentropy(True), "size": "mse"}
        >>> model = keras.Model(inputs, outputs)
        >>> task = treadle.Supervised(model, losses, "adam", {"kind": ["accuracy"]})
        >>> y = {"kind": np.zeros(8, "int32"), "size": np.zeros((8, 1))}
        >>> batches = treadle.data.from_arrays(np.ones((8, 4), "float32"), y, batch_size=4)
        >>> with treadle.Loop(task, console=False) as loop:
        ...     sorted(loop.evaluate(batches))
        ['kind_accuracy', 'kind_loss', 'loss', 'size_loss']
    """

    built_by_steps = ("metrics",)

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        metrics: Any = (),
        *,
        loss_weights: Any = None,
        weighted_metrics: Any = None,
    ) -> None:
        found = [_with_thresholds(given, loss) for given in (metrics, weighted_metrics)]
        self.model = model
        self.compiled = Compiled(model, loss, loss_weights, *found)
        self.loss = self.compiled.loss
        self.optimizer = keras.optimizers.get(optimizer)
        self.metrics = self.compiled.metrics

    def train_step(self, batch: Batch) -> Returned:
        """Take one gradient step and return the loss, including regularization losses."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)

        def objective() -> tuple[Any, Any]:
            outputs = self.model(x, training=True)
            masks = [keras_internals.masking.get_keras_mask(leaf) for leaf in tree.flatten(outputs)]
            return self.total_loss(y, outputs, sample_weight), (outputs, masks)

        variables = self.model.trainable_variables
        if variables:
            # Weights that only outputs without a loss depend on are not trained, as in `fit`.
            unreached = "zeros" if self.compiled.is_partial else "error"
            (loss, (outputs, masks)), grads = gradients(objective, variables, unreached)
            for leaf, mask in zip(tree.flatten(outputs), masks, strict=True):
                keras_internals.masking.set_keras_mask(
                    leaf, mask
                )  # which tensors lose on their way out of an objective
            self.optimizer.apply(grads, self.model.trainable_variables)
        else:  # nothing to train: metrics and callbacks work nevertheless, as in Keras' `fit`
            loss, (outputs, _) = objective()
        self.update_metrics(y, outputs, sample_weight)
        return {"loss": loss}

    def eval_step(self, batch: Batch) -> Returned:
        """Compute the loss and update the metrics in inference mode."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        outputs = self.model(x, training=False)
        self.update_metrics(y, outputs, sample_weight)
        return {"loss": self.total_loss(y, outputs, sample_weight)}

    def total_loss(self, y: Any, outputs: Any, sample_weight: Any = None) -> Any:
        """Return the weighted sum of the losses, plus those added by layers and regularizers.

        Raises:
            StepError: There are no losses; or a loss needs labels, and the batch has none.
            ConfigurationError: `loss` or `metrics` was replaced after `__init__`.
        """
        for name in ("loss", "metrics"):
            if getattr(self, name) is not getattr(self.compiled, name):
                raise ConfigurationError(
                    f"{type(self).__name__}.{name} was replaced, which changes nothing in the "
                    f"compiled losses and metrics: pass {name} to __init__"
                )
        loss = self.compiled.compute_loss(y, outputs, sample_weight)
        # Layers that compute in half precision return their losses in half precision.
        dtype = keras.config.floatx() if loss is None else loss.dtype
        losses = [] if loss is None else [loss]
        losses += [ops.cast(ops.sum(x), dtype) for x in self.model.losses]
        if not losses:
            raise StepError(
                f"{type(self).__name__} has nothing to minimize: no output has a loss, and no "
                "layer of the model adds one (add_loss, or a regularizer). Pass a loss"
            )
        return sum(losses[1:], losses[0])

    def update_metrics(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
        """Update every metric."""
        self.compiled.update_metrics(y, outputs, sample_weight)


_FunctionLoss: Any = getmro(keras.losses.MeanSquaredError)[1]  # of the losses that are functions


def _loss(loss: Any) -> Any:
    """Return a loss by name, or a function, as a `keras.Loss`."""
    if isinstance(loss, str) and loss.lower() in BY_SHAPE:
        return loss
    found = keras.losses.get(loss)
    if found is None or isinstance(found, keras.Loss):
        return found
    named = loss if isinstance(loss, str) else getattr(found, "__name__", type(found).__name__)
    return _FunctionLoss(found, name=named)


def _with_thresholds(metrics: Any, loss: Any) -> Any:
    """Return metrics with an accuracy of logits where that is the right one.

    Keras' BinaryAccuracy has a threshold of 0.5, even if the loss takes the outputs for logits.
    """
    kinds = keras.losses.BinaryCrossentropy, keras.losses.BinaryFocalCrossentropy
    if not isinstance(loss, kinds) or not loss.from_logits:
        return metrics

    def fitting(metric: Any) -> Any:
        if not isinstance(metric, str) or metric.lower() not in ACCURACY:
            return metric
        fn = keras.metrics.binary_accuracy
        return keras.metrics.MeanMetricWrapper(fn, name=metric, threshold=0.0)

    return tree.map_structure(fitting, metrics)


def _parts(value: Any) -> str:
    """Describe the parts of labels or outputs.

    Example:
        >>> _parts({"a": 0, "b": 0}), _parts([0]), _parts(0)
        ("the outputs ['a', 'b']", '1 output', '1 output')
    """
    if isinstance(value, dict):
        return f"the outputs {sorted(map(str, value))}"  # type: ignore[reportUnknownArgumentType]
    count = _count(value)
    return f"{count} output{'s' if count != 1 else ''}"


def _count(value: Any) -> int:
    return len(tree.flatten(value))


def _symbolic_outputs(model: Any) -> Any:
    """Return the symbolic outputs of a functional model; None if there are none yet."""
    if isinstance(model, keras.Sequential):
        outputs = getattr(model, "outputs", ())
        return outputs[0] if len(outputs) == 1 else None
    return model.output if hasattr(model, "output_names") else None


@contextmanager
def _labels_needed(y: Any, outputs: Any, what: str) -> Generator[None]:
    """Explain an error in losses or metrics that got no labels, or not those of each output.

    Raises:
        StepError: They raised an error, and `y` is None or has another number of parts.
    """
    try:
        yield
    except Exception as error:
        if y is not None:
            named = isinstance(y, dict) and isinstance(outputs, dict)
            if y.keys() == outputs.keys() if named else _count(y) == _count(outputs):
                raise
            raise StepError(
                f"the batch has labels for {_parts(y)}, and the model has {_parts(outputs)}: give "
                "labels in the structure of the outputs"
            ) from error
        raise StepError(
            f"the {what} failed on a batch without labels (x alone): give batches (x, y), or pass "
            f"{'loss=None' if what == 'loss' else 'no metrics'}"
        ) from error
