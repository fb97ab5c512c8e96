"""The `Task` base class, and `task`, which makes a task from plain functions."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ..core.identity import made_with
from ..core.options import Options, backend_name
from ..errors import ConfigurationError, StepError

Batch = Any
Returned = Any
_OTHER_NAMES = {"train_step": ("training_step",), "eval_step": ("validation_step", "test_step")}


class Task:
    """Base class for tasks: the state to train, and the steps that train and evaluate it.

    The attributes are the state. Treadle finds models, optimizers, metrics, variables, seed
    generators, nested tasks, and lists, tuples, dicts and dataclasses of these, names them by path,
    and saves and restores them. Python values are constants of the compiled step.

    Override `train_step`, and as needed `eval_step`, `predict_step`, `datasets` and `hooks`. A step
    returns a dict of scalars, one scalar (its loss), or nothing if it only updates metrics.

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

    # A slot, so that it is not in `vars` and not part of the state. `__dict__` and `__weakref__`
    # give the class the layout of a class without slots.
    __slots__ = ("__dict__", "__weakref__", "_made_with", "_own_values")

    holds_state = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a task and record its constructor arguments, which identify its runs."""
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
        """Train on one batch. Called once per step, compiled."""
        raise ConfigurationError(missing_step(self, "train_step"))

    def eval_step(self, batch: Batch) -> Returned:
        """Evaluate one batch; changes to variables are undone after the evaluation."""
        raise ConfigurationError(missing_step(self, "eval_step"))

    def predict_step(self, batch: Batch) -> Any:
        """Return the outputs for one batch; by default, those of `self.model` on its inputs."""
        model = getattr(self, "model", None)
        if model is None:
            raise ConfigurationError(
                f"{type(self).__name__} has neither a predict_step nor a model: write predict_step"
            )
        return model(batch[0] if isinstance(batch, (tuple, list)) else batch, training=False)

    def datasets(self) -> "Datasets":
        """Return the data sets of the task. Used by the command line."""
        raise ConfigurationError(
            f"{type(self).__name__} has no datasets: write `def datasets(self)` returning "
            "treadle.Datasets(train=…, validation=…), or call loop.fit(train) or "
            "treadle.doctor.inspect(task, train) in your script"
        )

    def hooks(self) -> list[Any]:
        """Return the hooks of the task, none by default. Used by the command line."""
        return []

    # The members below are for tasks that adapt programs of another library, such as `KerasTask`.

    scales_losses = False
    """Whether optimizers of the task scale their losses themselves, so that Treadle must not."""

    def build_for(self, batch: Batch) -> None:
        """Create variables from the shapes of a batch of arrays, before the first dry run."""

    def unreached_parts(self) -> Mapping[str, Any]:
        """Return parts of the state that no attribute reaches, by the first part of their path."""
        return {}

    def metrics_of_epoch(self) -> "EpochMetrics | None":
        """Return the object that computes the values of an epoch or an evaluation.

        None computes them from the values that steps return and the metrics that they update.
        """
        return None

    def default_options(self) -> Options:
        """Return the execution options of a loop that is given none."""
        return Options()


class EpochMetrics(Protocol):
    """All metrics of a task as one object, which its steps update."""

    def variables(self) -> list[Any]:
        """Return the variables of all metrics."""
        ...

    def reset(self) -> None:
        """Reset all metrics, before an epoch or an evaluation."""
        ...

    def result(self, last: Mapping[str, float]) -> dict[str, float]:
        """Return the values for the steps since the last reset.

        Args:
            last: The values that the last step returned.
        """
        ...


@dataclass(frozen=True)
class Datasets:
    """The training, validation and test data of a task.

    Attributes:
        train: The source that `Loop.fit` trains on.
        validation: One source, or a dict of named sources; None for no validation.
        test: A source that `treadle evaluate` evaluates in addition to the validation set.
        predict: A source for `predict_step`, if its batches differ from those of the other sets, as
            noise for a generator. `treadle export` takes its example batch from it.

    Example:
        >>> import numpy as np, treadle
        >>> x = np.ones((8, 2), "float32")
        >>> batches = treadle.data.from_arrays(x, batch_size=4)
        >>> found = treadle.Datasets(train=batches, validation={"easy": batches, "hard": batches})
        >>> found.train.length, sorted(found.validation), found.test
        (2, ['easy', 'hard'], None)
    """

    train: Any
    validation: Any = None
    test: Any = None
    predict: Any = None


class FunctionTask(Task):
    """A task made from plain functions; see `task`."""

    def __init__(
        self,
        train_step: Callable[..., Any],
        eval_step: Callable[..., Any] | None,
        state: Mapping[str, Any],
    ) -> None:
        reserved = set(state) & {"train_step", "eval_step", "predict_step", "datasets", "hooks"}
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
            raise ConfigurationError(missing_step(self, "eval_step"))
        return self._eval(batch)


def task(
    train_step: Callable[..., Any],
    eval_step: Callable[..., Any] | None = None,
    *unnamed: Any,
    **state: Any,
) -> Task:
    """Make a task from plain functions.

    Args:
        train_step: Called with each batch. A parameter named like one of the `state` arguments
            receives that object; the other parameters receive the batch: a single one the whole
            batch, several its parts. A `@tf.function` becomes a part of the compiled step; on
            another backend, it is the Python function.
        eval_step: The same for evaluation.
        unnamed: Must be empty: objects are passed by name.
        state: All objects that hold variables: models, optimizers, metrics, including those that
            the functions use as globals.

    Returns:
        A task with the `state` arguments as its attributes.

    Raises:
        ConfigurationError: An object has no name, or a function does not take a batch.

    Example:
        >>> import keras, treadle
        >>> slope, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.1)
        >>> def train_step(x, y):
        ...     def objective():
        ...         return keras.ops.mean((slope * x - y) ** 2)
        ...     return treadle.minimize(objective, [slope], optimizer)
        >>> line = treadle.task(train_step, slope=slope, optimizer=optimizer)
    """
    if unnamed or not (eval_step is None or callable(eval_step)):
        raise ConfigurationError(
            "treadle.task takes functions, and what they use by name: write "
            "treadle.task(train_step, eval_step, model=model, optimizer=optimizer)"
        )
    return FunctionTask(train_step, eval_step, state)


class _Bound:
    """A user's function with its state arguments bound, called with a batch."""

    def __init__(self, function: Callable[..., Any], state: Mapping[str, Any]) -> None:
        # `tf.function` keeps the original here; other decorators keep it in __wrapped__.
        python: Callable[..., Any] = getattr(function, "python_function", function)
        of_backend = type(function).__module__.partition(".")[0] == backend_name()
        self.function = function if of_backend else python
        self.name = getattr(python, "__name__", "the step")
        parameters = inspect.signature(python).parameters.values()
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


def check_eval_step(candidate: Any) -> None:
    """Check that a task can be evaluated.

    Raises:
        ConfigurationError: If it has no `eval_step`.
    """
    if not has_eval_step(candidate):
        raise ConfigurationError(missing_step(candidate, "eval_step"))


def missing_step(candidate: Any, name: str) -> str:
    """Return a message that a step is missing, or has its name in Keras or Lightning."""
    kind = type(candidate).__name__
    other = next((n for n in _OTHER_NAMES[name] if hasattr(candidate, n)), None)
    if name == "eval_step":
        if isinstance(candidate, FunctionTask):
            return "this task has no eval_step: treadle.task(train_step, eval_step, …) takes one"
        if other is None:
            return (
                f"{kind} has no eval_step: write `def eval_step(self, batch):` to evaluate or "
                "validate"
            )
        return f"{kind} has no eval_step, but a {other}: rename it, and let it take one batch"
    if other is None:
        return (
            f"{kind} has no train_step: write `def train_step(self, batch):` in a class that "
            "inherits from treadle.Task, or pass a function to treadle.task(train_step, model=…)"
        )
    return (
        f"{kind} has no train_step, but a {other}: rename it, let it take one batch, and update "
        "the model in it with treadle.minimize(objective, self.model, self.optimizer); optimizers "
        "are attributes of the task, and configure_optimizers is not called"
    )


def adapter(candidate: Any) -> Task:
    """Return the object with a task's members for adapters.

    An object that is no `Task`, but has a `train_step`, has their defaults.
    """
    return candidate if isinstance(candidate, Task) else _DEFAULTS


_DEFAULTS = Task()


def has_eval_step(candidate: Any) -> bool:
    """Return whether a task can be evaluated."""
    if isinstance(candidate, FunctionTask):
        return candidate.holds_eval_step
    return getattr(type(candidate), "eval_step", None) not in (None, Task.eval_step)
