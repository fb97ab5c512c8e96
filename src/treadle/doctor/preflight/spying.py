"""Spies: make layers, losses, metrics, optimizers and `keras.random` report to a step's recorder.

They record only in a step that has a `StepRecorder`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, Final

import keras
import numpy as np

from ...backends.base import active
from ...backends.step_context import context
from ...core import structures
from ...core.keras_internals import INTERNALS
from ...steps import gradients, transforms
from ...steps.gradients import listed
from .recording import (
    ACTIVATION,
    ADDED_LOSS,
    APPLY,
    BRANCH,
    CLIP,
    DRAW,
    ENTROPY,
    FROZEN,
    LAYER,
    LOOP,
    LOSS,
    METRIC,
    Info,
    StepRecorder,
    user_line,
)

CROSS_ENTROPIES: Final = (
    "sparse_categorical_crossentropy",
    "categorical_crossentropy",
    "binary_crossentropy",
)
DRAWS: Final = (
    *("normal", "uniform", "truncated_normal", "randint", "categorical", "dropout"),
    *("beta", "binomial", "gamma", "shuffle"),
)
ACTIVATIONS: Final = ("sigmoid", "softmax", "log_softmax", "relu", "tanh")


def _recorder() -> StepRecorder | None:
    found = context().recorder
    return found if isinstance(found, StepRecorder) else None


class OuterCalls:
    """Numbers the calls of layers that are not inside of another layer's call, in a real step."""

    def __init__(self) -> None:
        self._depth, self._count = 0, 0

    @contextmanager
    def entered(self) -> Generator[int | None]:
        """Enter a call; yields its number, or None inside of another call and in dry runs."""
        if context().build is not None:
            yield None
            return
        number = self._count if self._depth == 0 else None
        self._count += self._depth == 0
        self._depth += 1
        try:
            yield number
        finally:
            self._depth -= 1


@contextmanager
def spying(
    recorder: StepRecorder,
    layer_paths: Mapping[int, str],
    metrics: Mapping[str, Any],
    optimizers: Mapping[str, Any],
    inlined: bool = False,
) -> Generator[None]:
    """Make layers, losses, metrics, optimizers and `keras.random` report to the step's recorder.

    Args:
        recorder: The recorder of the step.
        layer_paths: The paths of the layers, by id; other layers are ignored.
        metrics: The metrics by name.
        optimizers: The optimizers by path.
        inlined: Whether to record in the branches of `cond` that are taken, and in `for_each`.
    """
    with ExitStack() as stack:
        stack.enter_context(_layers(layer_paths))
        stack.enter_context(replaced(keras.layers.Layer, "add_loss", _added_losses))
        stack.enter_context(replaced(keras.losses.Loss, "__call__", _losses))
        stack.enter_context(_branches(recorder, inlined))
        stack.enter_context(_loops(recorder, inlined))
        for name in CROSS_ENTROPIES:
            stack.enter_context(_cross_entropy(name))
        for name in ACTIVATIONS:
            # Only those that the user calls: Keras' layers do not compute with the public ones.
            stack.enter_context(replaced(keras.ops, name, _activations))
            stack.enter_context(replaced(keras.activations, name, _activations))
        stack.enter_context(replaced(transforms, "_check_limit", _clips))
        stack.enter_context(replaced(transforms, "trainable", _frozen))
        for name in DRAWS:
            stack.enter_context(replaced(keras.random, name, _draws))
        for path, metric in metrics.items():
            stack.enter_context(_metric(path, metric))
        for path, optimizer in optimizers.items():
            stack.enter_context(_optimizer(path, optimizer))
        yield


@contextmanager
def _layers(paths: Mapping[int, str]) -> Generator[None]:
    layer_call = INTERNALS["layer_call"]
    original = layer_call.resolve()
    outer = OuterCalls()

    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        with outer.entered() as number:
            outputs = original(self, *args, **kwargs)
        recorder = _recorder()
        if recorder is not None and id(self) in paths:
            more = {"outer": number, "nested": context().depth > 1}
            info = Info(paths[id(self)], type(self).__name__, user_line(), self, more)
            recorder.add(LAYER, info, inputs=args[:1], outputs=outputs)
        return outputs

    with layer_call.replaced(called):
        yield


def _added_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_loss(self: Any, loss: Any) -> Any:
        recorder = _recorder()
        if recorder is not None:
            recorder.add(ADDED_LOSS, Info(self.name, type(self).__name__, user_line(), self))
        return original(self, loss)

    return add_loss


def _losses(original: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        result = original(self, y_true, y_pred, sample_weight)
        recorder = _recorder()
        if recorder is not None:
            info = Info(self.name, type(self).__name__, user_line(), self)
            recorder.add(LOSS, info, true=y_true, pred=y_pred, weight=sample_weight, result=result)
        return result

    return called


@contextmanager
def _cross_entropy(name: str) -> Generator[None]:
    """Record a cross-entropy; the classes and functions of `keras.losses` call it too."""

    def spied(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def called(
            target: Any, output: Any, from_logits: bool = False, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(target, output, from_logits, *args, **kwargs)
            recorder = _recorder()
            if recorder is not None:
                info = Info(name, name, user_line(), more={"from_logits": bool(from_logits)})
                recorder.add(ENTROPY, info, true=target, pred=output)
            return result

        return called

    with (
        replaced(keras.ops, name, spied),
        replaced(INTERNALS["ops"].resolve(), name, spied),
    ):
        yield


@contextmanager
def _branches(recorder: StepRecorder, inlined: bool) -> Generator[None]:
    """Record calls of `cond`, in whose branches a step has no recorder unless they are inlined."""
    backend = active()
    original = backend.cond

    def cond(predicate: Any, then: Any, otherwise: Any) -> Any:
        recorder.add(BRANCH, Info("cond", "cond", user_line()))
        if not inlined or not recorder.in_place:
            return original(predicate, then, otherwise)
        step = context()
        step.recorder = recorder
        try:
            return (then if bool(predicate) else otherwise)()
        finally:
            step.recorder = None  # as `steps.control_flow.cond` has set it

    with _shadowed(backend, "cond", cond):
        yield


@contextmanager
def _loops(recorder: StepRecorder, inlined: bool) -> Generator[None]:
    """Record calls of `for_each`; if they are inlined, also what each of their rows does."""
    backend = active()
    original = backend.scan

    def scan(
        function: Any, carry: Any, inputs: Any, count: int, reverse: bool = False, *how: Any
    ) -> Any:
        recorder.add(LOOP, Info("for_each", "for_each", user_line()))
        if not inlined or not recorder.in_place:
            return original(function, carry, inputs, count, reverse, *how)
        step = context()
        step.recorder = recorder
        rows: dict[int, Any] = {}
        try:
            for i in range(count)[::-1] if reverse else range(count):
                carry, rows[i] = function(carry, [x[i] for x in inputs])
        finally:
            step.recorder = None  # as `steps.control_flow.for_each` has set it
        columns = zip(*(rows[i] for i in range(count)), strict=True)
        return carry, [keras.ops.stack(column) for column in columns]

    with _shadowed(backend, "scan", scan):
        yield


@contextmanager
def other_branches() -> Generator[None]:
    """Make every `cond` take the other branch."""
    backend = active()
    original = backend.cond

    def cond(predicate: Any, then: Any, otherwise: Any) -> Any:
        return original(predicate, otherwise, then)

    with _shadowed(backend, "cond", cond):
        yield


def _activations(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(x: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(x, *args, **kwargs)
        recorder = _recorder()
        if recorder is not None:
            name, axis = original.__name__, kwargs.get("axis", args[0] if args else -1)
            info = Info(name, name, user_line(), more={"axis": axis})
            recorder.add(ACTIVATION, info, inputs=x, outputs=outputs)
        return outputs

    return called


def _draws(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        seed = kwargs.get("seed")
        if recorder is not None and isinstance(seed, int):
            name = f"keras.random.{original.__name__}"
            recorder.add(DRAW, Info(name, name, user_line(), more={"seed": seed}))
        return original(*args, **kwargs)

    return called


def _frozen(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record which variables `treadle.trainable` leaves out, on purpose."""

    @wraps(original)
    def called(model: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = original(model, *args, **kwargs)
        recorder, path_of = _recorder(), context().path_of
        if recorder is not None:
            ids = {id(variable) for variable in chosen}
            paths = [path_of(v) for v in listed(model) if id(v) not in ids]
            recorder.add(FROZEN, Info("treadle.trainable", "", user_line(), more={"paths": paths}))
        return chosen

    return called


def _clips(original: Callable[..., Any]) -> Callable[..., Any]:
    """Record a clipping function by its check, since `from treadle import …` binds the function."""

    def called(name: str, limit: Any) -> None:
        recorder = _recorder()
        if recorder is not None:
            recorder.add(CLIP, Info(f"treadle.{name}", name, user_line()))
        original(name, limit)

    return called


@contextmanager
def halved_clips() -> Generator[None]:
    """Make the clipping functions return half of the gradients, or less."""

    def scaled(factor: float) -> Callable[..., Any]:
        def spied(original: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                return structures.mapped(lambda x: factor * x, result)

            return called

        return spied

    # Their helpers, since `from treadle import …` binds the functions. Half of `_map_lists` is also
    # half the global norm, which makes `_scale_down` scale by twice as much.
    with (
        replaced(transforms, "_scale_down", scaled(0.25)),
        replaced(transforms, "_map_lists", scaled(0.5)),
    ):
        yield


@contextmanager
def without_updates(optimizers: Mapping[str, Any]) -> Generator[None]:
    """Make optimizers leave all variables as they are."""
    with ExitStack() as stack:
        for optimizer in optimizers.values():
            stack.enter_context(_shadowed(optimizer, "apply", lambda *args, **kwargs: None))
        yield


class _FixedScale:
    """Stands for a `LossScale` that never changes."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def factor(self, nested: bool) -> Any:
        return keras.ops.convert_to_tensor(self._scale**0.5 if nested else self._scale, "float32")

    def look(self, gradients: Any) -> None:
        """Ignore gradients that are not finite."""


@contextmanager
def scaled_losses(scale: float) -> Generator[None]:
    """Multiply losses before they are differentiated, and divide the gradients afterwards.

    In float32 the gradients stay the same. Steps with a loss scale of their own are left alone.
    """

    def spied(original: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            step = context()
            own = step.loss_scale
            step.loss_scale = _FixedScale(scale) if own is None else own
            try:
                return original(*args, **kwargs)
            finally:
                step.loss_scale = own

        return called

    with replaced(gradients, "_differentiate", spied):
        yield


@contextmanager
def _metric(name: str, metric: Any) -> Generator[None]:
    original = metric.update_state

    def update_state(*args: Any, **kwargs: Any) -> Any:
        recorder = _recorder()
        if recorder is not None:
            given = dict(zip(("y_true", "y_pred", "sample_weight"), args, strict=False)) | kwargs
            info = Info(name, type(metric).__name__, user_line(), metric)
            if "y_pred" in given:
                recorder.add(
                    METRIC,
                    info,
                    true=given.get("y_true"),
                    pred=given["y_pred"],
                    weight=given.get("sample_weight"),
                )
        return original(*args, **kwargs)

    with _shadowed(metric, "update_state", update_state):
        yield


@contextmanager
def _optimizer(path: str, optimizer: Any) -> Generator[None]:
    original = optimizer.apply

    def apply(grads: Any, trainable_variables: Any = None) -> Any:
        recorder, grads = _recorder(), list(grads)
        if recorder is not None:
            into: Iterator[Any] = iter(
                optimizer._trainable_variables
                if trainable_variables is None
                else (trainable_variables := list(trainable_variables))
            )
            path_of = context().path_of
            kept = [_copied(g) if recorder.in_place else g for g in grads]
            pairs = {path_of(v): g for v, g in zip(into, kept, strict=False)}
            info = Info(path, type(optimizer).__name__, user_line(), optimizer)
            recorder.add(APPLY, info, **pairs)
        return original(grads, trainable_variables)

    with _shadowed(optimizer, "apply", apply):
        yield


def _copied(gradient: Any) -> Any:
    """Return a copy, since PyTorch may empty an accumulator in place before the step ends."""
    if not keras.ops.is_tensor(gradient):
        return gradient
    return np.array(active().to_numpy(keras.ops.stop_gradient(gradient)))


@contextmanager
def _shadowed(thing: Any, name: str, replacement: Any) -> Generator[None]:
    """Give an object an attribute that shadows the one of its class."""
    before = vars(thing).get(name)
    object.__setattr__(thing, name, replacement)  # Keras' own would track it
    try:
        yield
    finally:
        if before is None:
            object.__delattr__(thing, name)
        else:
            object.__setattr__(thing, name, before)


@contextmanager
def replaced(
    holder: Any, name: str, spied: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Generator[None]:
    """Replace a function of a module or class by what `spied` makes of it."""
    original = getattr(holder, name)
    setattr(holder, name, spied(original))
    try:
        yield
    finally:
        setattr(holder, name, original)
