"""Probes: see what a step calls while it runs, and change what these calls return.

A `Probe` gets each call of a layer, loss, metric or optimizer, each random draw, and each call of
Treadle's functions that differentiate, clip gradients or branch. `treadle.doctor`, replay and
`GradientHealth` are built on it::

    class Layers(Probe):
        def see(self, call, values):
            if call.kind == LAYER:
                print(call.path)
            return values["outputs"]

    with probing(Layers(), state):
        step.run(window, 0)

| kind | path | values |
| --- | --- | --- |
| `LAYER` | of the layer | `inputs`, `outputs` |
| `LOSS` | the name of a `keras.losses` object | `y_true`, `y_pred`, `sample_weight`, `outputs` |
| `CROSS_ENTROPY` | the function of `keras.ops` | `y_true`, `y_pred`, `outputs` |
| `ACTIVATION` | the function of `keras.ops` | `inputs`, `outputs` |
| `ADDED_LOSS` | the name of the layer | `outputs`: the loss |
| `METRIC` | of the metric | `y_true`, `y_pred`, `sample_weight`, `outputs` (None) |
| `DRAW` | the function of `keras.random` | `outputs` |
| `CLIP` | the function of `treadle.transforms` | `inputs`, `outputs` |
| `BRANCH` | `cond` or `for_each` | `outputs` (None) |
| `GRADIENTS` | the name of the loss | `loss`, `outputs`: a gradient for each variable |
| `SLOPES` | the name of the loss | `outputs`: the gradients with respect to outputs of layers |
| `INPUT_GRADIENTS` | | `inputs`, `value`, `outputs` |
| `APPLY` | of the optimizer | `outputs`: the gradients that it applies |
"""

import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from pathlib import Path
from typing import Any, Final, Protocol

import keras
from keras import ops

from ..backends.records import Records, recording_layers
from ..backends.step_context import context, recorded_by
from ..backends.types import Tensor
from ..core import structures
from ..core.keras_internals import INTERNALS
from ..core.tracebacks import COMMANDS, MACHINERY, PACKAGE, RECIPES

_REST: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

LAYER: Final = "layer"
LOSS: Final = "loss"
CROSS_ENTROPY: Final = "cross-entropy"
ACTIVATION: Final = "activation"
ADDED_LOSS: Final = "added loss"
METRIC: Final = "metric"
DRAW: Final = "draw"
CLIP: Final = "clip"
BRANCH: Final = "branch"
GRADIENTS: Final = "gradients"
SLOPES: Final = "slopes"
INPUT_GRADIENTS: Final = "input gradients"
APPLY: Final = "apply"
ALL: Final = frozenset(
    (
        *(LAYER, LOSS, CROSS_ENTROPY, ACTIVATION, ADDED_LOSS, METRIC, DRAW, CLIP, BRANCH),
        *(GRADIENTS, SLOPES, INPUT_GRADIENTS, APPLY),
    )
)

CROSS_ENTROPIES: Final = (
    *("sparse_categorical_crossentropy", "categorical_crossentropy", "binary_crossentropy"),
)
ACTIVATIONS: Final = ("sigmoid", "softmax", "log_softmax", "relu", "tanh")
DRAWS: Final = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "dropout"),
    *("beta", "binomial", "gamma", "shuffle"),
)


class Probed(Protocol):
    """What is probed: the state of a task has these paths."""

    @property
    def layer_paths(self) -> Mapping[int, str]:
        """The paths of the layers, by id."""
        ...

    @property
    def metrics(self) -> Mapping[str, Any]:
        """The metrics by name."""
        ...

    @property
    def optimizers(self) -> Mapping[str, Any]:
        """The optimizers by path."""
        ...


Key = tuple[int, ...]
"""The number of a call: those of the calls of `gradients` around it, and its own among calls of
its kind. It is the same each time that a step runs."""


@dataclass(frozen=True, eq=False)
class ProbedCall:
    """A call that a step made.

    Attributes:
        kind: The kind, such as `LAYER`.
        path: The path or the name of what was called; see the table of the module.
        key: The number of the call.
        of: The layer, loss, metric or optimizer; None for functions.
        line: The line of the user's code, as `file.py:12`; empty if `Probe.lines` is false.
        facts: Further Python values: of a layer `outer`, whether no other layer called it, and
            `training`; of gradients and updates `paths`, those of the variables; of gradients
            `objective`, the number that the calls in it begin with; of slopes also `taps`, the
            number of a layer's call and the name of its output for each; of an activation its
            `axis`, of a cross-entropy `from_logits`, of a draw its `seed`.
    """

    kind: str
    path: str
    key: Key
    of: Any = None
    line: str = ""
    facts: Mapping[str, Any] = field(default_factory=lambda: {})


class Probe(Records):
    """Sees the calls of a step, and may change what they return; see `probing`.

    Override `see`. Steps that JAX or TensorFlow trace pass tensors without values. On JAX those of
    an objective have values only after it: append what is to be kept to `self.met`.

    Attributes:
        lines: Whether calls name the line of the user's code, which takes time to find.
        enters: Whether the branch of `cond` that is taken runs as Python, so that it is seen.
        kinds: The kinds of calls that it sees; `probing` sets them, and `layer_paths`.
        tapped: For each outermost call of a layer whose `SLOPES` are wanted, by number, its float
            outputs by name, as zeros.
    """

    lines = False
    enters = False
    kinds: frozenset[str] = ALL
    tapped: Mapping[Key, Mapping[str, Any]] = {}  # replaced, and not changed

    def __init__(self) -> None:
        super().__init__()
        self._leaves: dict[Key, dict[str, Tensor]] = {}
        self.depth = 0

    def see(self, call: ProbedCall, values: dict[str, Any]) -> Any:
        """See a call, and return what it returns to the step.

        Args:
            call: The call.
            values: Its tensors, and structures of them, by name.
        """
        return values["outputs"]

    def report(
        self, kind: str, path: str, values: dict[str, Any], of: Any = None, **facts: Any
    ) -> Any:
        """Make a call out of what a function was given and returned, and `see` it."""
        if kind not in self.kinds or not self.in_place or context().build is not None:
            return values["outputs"]
        line = user_line() if self.lines else ""
        return self.see(ProbedCall(kind, path, self.numbered(kind), of, line, facts), values)

    def taps(self) -> list[tuple[Key, str, Tensor]]:
        """Return zeros for the outputs whose slopes the next call of `gradients` is to give."""
        inside = self.next_number("")
        return [
            (key, name, ops.convert_to_tensor(zeros))
            for key, parts in self.tapped.items()
            if key[:-1][: len(inside)] == inside
            for name, zeros in parts.items()
        ]

    @contextmanager
    def tapping(self, taps: Sequence[tuple[Key, str, Tensor]]) -> Generator[None]:
        """Add tensors to the outputs of layers, so that the loss depends on them."""
        before, self._leaves = self._leaves, {}
        for key, name, tensor in taps:
            self._leaves.setdefault(key, {})[name] = tensor
        try:
            yield
        finally:
            self._leaves = before

    def layer(self, layer: Any, args: Any, kwargs: Any, outputs: Any, path: str) -> Any:
        """Report the call of a layer."""
        outer = self.depth == 0
        key = self.next_number(LAYER)
        if outer and key in self._leaves and self.in_place:
            added = self._leaves[key]
            outputs = changed_outputs(outputs, lambda name, x: x + added[name], added)
        training = kwargs.get("training")
        inputs = args[0] if len(args) == 1 else args or {**kwargs}
        values = {"inputs": inputs, "outputs": outputs}
        return self.report(LAYER, path, values, layer, outer=outer, training=training)


def changed_outputs(outputs: Any, change: Callable[[str, Any], Any], names: Any = None) -> Any:
    """Return outputs with each float tensor changed; masks that Keras attaches are kept.

    Args:
        outputs: A structure of tensors.
        change: Returns another tensor, given the name of an output and the output.
        names: The names of those to change; default: all.
    """
    masking = INTERNALS["masking"].resolve()
    found: list[Any] = []
    for keys, value in structures.with_paths(outputs):
        name = structures.text_of(tuple(keys))
        if is_float(value) and (names is None or name in names):
            new, mask = change(name, value), masking.get_keras_mask(value)
            if mask is not None and new is not value:
                masking.set_keras_mask(new, mask)
            value = new
        found.append(value)
    return structures.pack(outputs, found)


def is_float(value: Any) -> bool:
    """Return whether a value is a tensor of a float dtype."""
    return ops.is_tensor(value) and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(value.dtype)
    )


def reported(kind: str, path: str, outputs: Any, **values: Any) -> Any:
    """Let the running step's probe, if there is one, see a call of one of Treadle's functions."""
    probe = context().recorder
    if not isinstance(probe, Probe):
        return outputs
    return probe.report(kind, path, {**values, "outputs": outputs})


@contextmanager
def probing(probe: Probe, state: Probed, kinds: frozenset[str] = ALL) -> Generator[None]:
    """Let a probe see the calls of the running step, or else of the steps that run inside.

    Those steps must run uncompiled. Functions that the step's module has imported by name, as by
    `from keras.random import normal`, are not seen. Threads may probe different tasks at the same
    time; each probe sees the steps of its thread.

    Args:
        probe: The probe.
        state: The state of the task, which has the paths of layers, metrics and optimizers.
        kinds: The kinds of calls to see.

    Raises:
        ConfigurationError: Another probe sees the steps of this thread already.
    """
    with ExitStack() as stack:
        stack.enter_context(recorded_by(probe))
        probe.kinds, probe.layer_paths = kinds, state.layer_paths
        if LAYER in kinds:
            stack.enter_context(_shared(LAYER, recording_layers))
        for holder, name, spied in _functions(kinds):
            replaced = partial(_replaced, holder, name, spied)
            stack.enter_context(_shared((id(holder), name), replaced))
        if METRIC in kinds:
            for path, metric in state.metrics.items():
                stack.enter_context(_metric(path, metric))
        if APPLY in kinds:
            for path, optimizer in state.optimizers.items():
                stack.enter_context(_optimizer(path, optimizer))
        yield


_lock = threading.Lock()
_open: dict[Any, tuple[int, ExitStack]] = {}


@contextmanager
def _shared(key: Any, made: Callable[[], AbstractContextManager[None]]) -> Generator[None]:
    """Enter a context that the first of several threads enters, and the last one leaves."""
    with _lock:
        count, stack = _open.pop(key, (0, ExitStack()))
        if not count:
            stack.enter_context(made())
        _open[key] = count + 1, stack
    try:
        yield
    finally:
        with _lock:
            count, stack = _open.pop(key)
            if count > 1:
                _open[key] = count - 1, stack
            else:
                stack.close()


def _functions(kinds: frozenset[str]) -> Iterator[tuple[Any, str, Any]]:
    """Yield public functions to replace: the module or class, the name, and the wrapper."""
    if ADDED_LOSS in kinds:
        yield keras.layers.Layer, "add_loss", _added_losses
    if LOSS in kinds:
        yield keras.losses.Loss, "__call__", _losses
    if CROSS_ENTROPY in kinds:
        # The losses of Keras call those of the module that defines them.
        of_losses = sys.modules[keras.ops.binary_crossentropy.__module__.rpartition(".")[0]]
        for name in CROSS_ENTROPIES:
            yield keras.ops, name, _cross_entropy
            yield of_losses, name, _cross_entropy
    if ACTIVATION in kinds:
        for name in ACTIVATIONS:
            yield keras.ops, name, _activation
            yield keras.activations, name, _activation
    if DRAW in kinds:
        for name in DRAWS:
            yield keras.random, name, _draw


def _probe() -> Probe | None:
    found = context().recorder
    return found if isinstance(found, Probe) else None


def _added_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def add_loss(self: Any, loss: Any) -> Any:
        probe = _probe()
        if probe is not None and ops.is_tensor(loss):
            loss = probe.report(ADDED_LOSS, self.name, {"outputs": loss}, self)
        return original(self, loss)

    return add_loss


def _losses(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        result = original(self, y_true, y_pred, sample_weight)
        probe = _probe()
        if probe is None:
            return result
        values = {"y_true": y_true, "y_pred": y_pred, "sample_weight": sample_weight}
        return probe.report(LOSS, self.name, {**values, "outputs": result}, self)

    return called


def _cross_entropy(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(
        target: Any, output: Any, from_logits: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(target, output, from_logits, *args, **kwargs)
        probe = _probe()
        if probe is None:
            return result
        values = {"y_true": target, "y_pred": output, "outputs": result}
        return probe.report(CROSS_ENTROPY, original.__name__, values, from_logits=bool(from_logits))

    return called


def _activation(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(x: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(x, *args, **kwargs)
        probe = _probe()
        if probe is None or not ops.is_tensor(x):
            return outputs
        axis = kwargs.get("axis", args[0] if args else -1)
        values = {"inputs": x, "outputs": outputs}
        return probe.report(ACTIVATION, original.__name__, values, axis=axis)

    return called


def _draw(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        outputs, probe = original(*args, **kwargs), _probe()
        if probe is None:
            return outputs
        seed = kwargs.get("seed")
        seed = seed if isinstance(seed, int) else None
        return probe.report(
            DRAW, f"keras.random.{original.__name__}", {"outputs": outputs}, seed=seed
        )

    return called


def _of_metric(
    signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return what a metric is updated with, by Keras' names of the arguments."""
    names = ("y_true", "y_pred", "sample_weight")
    own = [x for x in signature.parameters.values() if x.kind not in _REST]
    if not own:  # it passes on what it is called with
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        return {name: given.get(name) for name in names}
    given = signature.bind(*args, **kwargs).arguments
    if any(x.name in names[:2] for x in own):
        return {name: given.get(name) for name in names}
    # A mean, or a metric of the user, which names its arguments as it likes.
    is_mean = sum(x.default is inspect.Parameter.empty for x in own) == 1
    keys = names[1:] if is_mean else names
    found = {key: given.get(x.name) for key, x in zip(keys, own, strict=False)}
    return {name: found.get(name) for name in names}


def _metric(name: str, metric: Any) -> AbstractContextManager[Any]:
    original = metric.update_state

    def update_state(*args: Any, **kwargs: Any) -> Any:
        probe = _probe()
        if probe is not None:
            values = _of_metric(inspect.signature(original), args, kwargs)
            probe.report(METRIC, name, {**values, "outputs": None}, metric)
        return original(*args, **kwargs)

    return shadowed(metric, "update_state", update_state)


def _optimizer(path: str, optimizer: Any) -> AbstractContextManager[Any]:
    original = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        probe, grads = _probe(), list(grads)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)
        if probe is not None:
            variables: Any = trainable_variables or optimizer._trainable_variables
            paths = [context().path_of(v) for v in variables]
            grads = probe.report(APPLY, path, {"outputs": grads}, optimizer, paths=paths)
        return original(grads, trainable_variables)

    return shadowed(optimizer, "apply", apply)


@contextmanager
def shadowed(thing: Any, name: str, replacement: Any) -> Generator[None]:
    """Give an object an attribute that shadows the one of its class, without Keras tracking it."""
    before = vars(thing).get(name)
    object.__setattr__(thing, name, replacement)
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(thing, name)
        else:
            object.__setattr__(thing, name, before)


@contextmanager
def _replaced(
    holder: Any, name: str, spied: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Generator[None]:
    """Replace a public function of a module or class by what `spied` makes of it."""
    original = getattr(holder, name)
    setattr(holder, name, spied(original))
    try:
        yield
    finally:
        setattr(holder, name, original)


def user_line() -> str:
    """Return the file and line of the innermost frame of the user's code, as `file.py:12`."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        file = frame.f_code.co_filename
        if file.startswith(COMMANDS):  # what called it is no code of the user
            return ""
        ours = file.startswith(PACKAGE) and not file.startswith(RECIPES)
        if not ours and module not in MACHINERY and module not in ("importlib", "numpy"):
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
