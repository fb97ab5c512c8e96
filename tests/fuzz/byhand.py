"""What a step calls, written by hand in eager Keras with the backend's own autodiff.

Each function means what the one of the same name in Treadle means, in the simplest way there is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope

from treadle.core.options import without_tensorflow

BACKEND = keras.config.backend()


class Hook:
    """The base class of hooks, which has nothing to do."""


class Ops:
    """`keras.ops`, in which control flow is Python's: Keras' own loses what functions assign."""

    def __getattr__(self, name: str) -> Any:
        return getattr(keras.ops, name)

    def cond(self, predicate: Any, then: Any, otherwise: Any) -> Any:
        return cond(predicate, then, otherwise)

    def switch(self, index: Any, branches: Any, *operands: Any) -> Any:
        return branches[int(index)](*operands)

    def map(self, function: Any, xs: Any) -> Any:
        return for_each(function, xs)

    def scan(self, function: Any, init: Any, xs: Any) -> Any:
        made: list[Any] = []
        for i in range(xs.shape[0]):
            init, y = function(init, xs[i])
            made.append(y)
        return init, keras.ops.stack(made)

    def fori_loop(self, lower: int, upper: int, body: Any, value: Any) -> Any:
        for i in range(lower, upper):
            value = body(i, value)
        return value

    def while_loop(self, goes_on: Any, body: Any, values: Any) -> Any:
        while bool(goes_on(*values)):
            values = body(*values)
        return values


ops: Any = Ops()


def mapped(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """Return a structure with the results of a function of its arrays, and of those of others."""
    if structure is None:
        return None
    kind: Any = type(structure)
    if isinstance(structure, dict):
        pairs = [(k, mapped(function, x, *(o[k] for o in others))) for k, x in structure.items()]
        return kind(pairs)
    if is_dataclass(structure):
        names = [field.name for field in fields(structure)]
        each = [[getattr(x, name) for x in (structure, *others)] for name in names]
        return kind(*(mapped(function, *parts) for parts in each))
    if isinstance(structure, (list, tuple)):
        parts = [mapped(function, *each) for each in zip(structure, *others, strict=True)]
        return kind(*parts) if hasattr(structure, "_fields") else kind(parts)
    return function(structure, *others)


def leaves_of(structure: Any) -> list[Any]:
    """Return the arrays of a structure."""
    found: list[Any] = []
    mapped(found.append, structure)
    return found


class Run:
    """Where the running loop stands.

    Attributes:
        step: The number of the running step.
        examples: Rows of its batch.
        scale: The loss scale, or None.
        finite: Whether every gradient of the step was finite, where losses are scaled.
        depth: How many objectives the running code is inside of.
    """

    step, examples, depth = 0, 0, 0
    scale: "LossScale | None" = None
    finite = True


class Scope(keras.StatelessScope):
    """Variables have other values within it; keeps which variables were assigned."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        outer: Any = get_stateless_scope() if in_stateless_scope() else None
        around = list(outer.known.values()) if outer is not None else []
        super().__init__(state_mapping=None, collect_losses=True)
        self.known: dict[int, tuple[Any, Any]] = {}
        self.assigned: dict[int, tuple[Any, Any]] = {}
        for variable, value in [*around, *pairs]:
            self.known[id(variable)] = variable, value
            self.state_mapping[id(variable)] = value

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        variable = update[0]
        pair = variable, self.state_mapping[id(variable)]
        self.known[id(variable)] = self.assigned[id(variable)] = pair


def variables_of(thing: Any) -> list[Any]:
    if hasattr(thing, "trainable_variables"):
        return list(thing.trainable_variables)
    return list(thing)


def differentiated(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
    """Return what a function of tensors returns, and a function from a loss's name to gradients.

    The function returns `(losses, anything)`, where `losses` is a dict of scalars.
    """
    Run.depth += 1
    try:
        if BACKEND == "jax":
            return _with_jax(function, leaves)
        if BACKEND == "torch":
            return _with_torch(function, leaves)
        return _with_tensorflow(function, leaves)
    finally:
        Run.depth -= 1


def _with_jax(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
    import jax

    def pure(leaves: list[Any]) -> Any:
        with Scope([]) as scope:
            losses, rest = function(leaves)
        changed.clear()
        changed.extend(variable for variable, _ in scope.assigned.values())
        values = [value for _, value in scope.assigned.values()]
        return losses, (rest, values)

    changed: list[Any] = []
    losses, pull, (rest, values) = jax.vjp(pure, leaves, has_aux=True)
    for variable, value in zip(changed, values, strict=True):
        variable.assign(value)

    def gradients(name: str) -> list[Any]:
        ones = {key: ops.cast(float(key == name), loss.dtype) for key, loss in losses.items()}
        return pull(ones)[0]

    return losses, rest, gradients


def _with_torch(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
    import torch

    with torch.enable_grad():
        leaves = [x if x.requires_grad else x.detach().requires_grad_() for x in leaves]
        losses, rest = function(leaves)

    def gradients(name: str) -> list[Any]:
        found = torch.autograd.grad(
            losses[name], leaves, retain_graph=True, create_graph=Run.depth > 0, allow_unused=True
        )
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    return losses, rest, gradients


def _with_tensorflow(function: Callable[[list[Any]], Any], leaves: list[Any]) -> Any:
    import tensorflow as tf

    with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
        for leaf in leaves:
            tape.watch(leaf)
        losses, rest = function(leaves)

    def gradients(name: str) -> list[Any]:
        zeros = tf.UnconnectedGradients.ZERO
        found = tape.gradient(losses[name], leaves, unconnected_gradients=zeros)
        return [tf.convert_to_tensor(g) for g in found]

    return losses, rest, gradients


def gradients(objective: Callable[[], Any], of: Any) -> Any:
    several = isinstance(of, Mapping)
    named = {key: variables_of(part) for key, part in (of.items() if several else [("", of)])}
    variables = list({id(v): v for part in named.values() for v in part}.values())
    positions = {id(v): i for i, v in enumerate(variables)}
    factor = Run.scale.value if Run.scale is not None and Run.depth == 0 else 1.0

    def function(leaves: list[Any]) -> Any:
        if BACKEND == "jax":  # the others differentiate by the variables as they are
            for variable, leaf in zip(variables, leaves, strict=True):
                # Not assigned: a value of this scope alone.
                scope: Any = get_stateless_scope()
                scope.known[id(variable)] = variable, leaf
                scope.state_mapping[id(variable)] = leaf
        losses = objective()
        outline.clear()
        if isinstance(losses, tuple):  # with something else
            losses, more = losses
            outline.append(more)
        losses = losses if several else {"": losses}
        names[:] = losses
        return {key: factor * loss for key, loss in losses.items()}, leaves_of(outline)

    names: list[str] = []
    outline: list[Any] = []
    losses, more, by_name = differentiated(function, [v.value for v in variables])
    # In the order in which the objective returned them, which JAX does not keep.
    losses = {key: losses[key] / factor for key in names}
    found: dict[str, list[Any]] = {}
    for key, part in named.items():
        all_of_it = by_name(key)
        found[key] = [all_of_it[positions[id(v)]] / factor for v in part]
        if Run.scale is not None and Run.depth == 0:
            finite = [bool(np.isfinite(ops.convert_to_numpy(g)).all()) for g in found[key]]
            Run.finite &= all(finite)
    if BACKEND == "torch" and Run.depth == 0:
        losses = {key: loss.detach() for key, loss in losses.items()}
        more = [x.detach() for x in more]
    result: Any = losses if several else losses[""]
    if outline:
        following = iter(more)
        result = (result, mapped(lambda _: next(following), outline[0]))
    return result, found if several else found[""]


def input_gradients(function: Callable[..., Any], *inputs: Any) -> Any:
    def first(xs: list[Any]) -> Any:
        found = function(*xs)
        return {"": found[0] if isinstance(found, tuple) else found}, None

    value, _, by_name = differentiated(first, list(inputs))
    return value[""], by_name("")


def minimize(objective: Callable[[], Any], of: Any, optimizer: Any) -> Any:
    losses, grads = gradients(objective, of)
    if isinstance(of, Mapping):
        for key, part in of.items():
            optimizer[key].apply(grads[key], variables_of(part))
    else:
        optimizer.apply(grads, variables_of(of))
    return losses


@contextmanager
def substituted(variables: Sequence[Any], values: Sequence[Any]) -> Iterator[None]:
    pairs = list(zip(variables, map(ops.convert_to_tensor, values), strict=True))
    with Scope(pairs) as scope:
        yield
    own = {id(v) for v in variables}
    for variable, value in scope.assigned.values():
        if id(variable) not in own:
            variable.assign(value)


def cond(predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    return then() if bool(predicate) else otherwise()


def for_each(function: Callable[[Any], Any], inputs: Any) -> Any:
    count = leaves_of(inputs)[0].shape[0]
    rows = [function(mapped(lambda x: x[i], inputs)) for i in range(count)]  # noqa: B023
    return mapped(lambda *xs: ops.stack(xs), *rows)


def clip_by_global_norm(grads: Sequence[Any], norm: float) -> Any:
    found = ops.sqrt(sum(ops.sum(g**2) for g in grads))
    factor = norm / max(float(found), norm)
    return [g * factor for g in grads], found


def blend(target: Any, source: Any, amount: float) -> None:
    for slow, fast in zip(target.weights, source.weights, strict=True):
        if "float" in slow.dtype:
            slow.assign(slow + amount * (fast - slow))
        else:
            slow.assign(fast)
    derive(target)


def derive(model: Any) -> None:
    """Let the layers of a model compute again what they derive from their variables."""
    for layer in getattr(model, "layers", ()):
        if hasattr(layer, "finalize_state"):
            layer.finalize_state()


def frozen_copy(model: Any) -> Any:
    with without_tensorflow():  # which takes seconds to import
        copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    derive(copy)
    copy.trainable = False
    return copy


def step() -> int:
    return Run.step


class Accumulator:
    def __init__(self, steps: int) -> None:
        self.steps, self.waiting = steps, []

    def add(self, grads: Sequence[Any], update: Callable[[list[Any]], Any]) -> None:
        self.waiting = [*self.waiting, (Run.examples, list(grads))]
        if len(self.waiting) == self.steps:
            total = sum(weight for weight, _ in self.waiting)
            weighed = [[weight * g for g in grads] for weight, grads in self.waiting]
            self.waiting = []
            update([sum(each) / total for each in zip(*weighed, strict=True)])


class LossScale:
    def __init__(self, initial: float, growth_steps: int) -> None:
        self.value, self.growth_steps, self.good = initial, growth_steps, 0
        Run.scale = self

    def end_step(self) -> None:
        self.good = self.good + 1 if Run.finite else 0
        if not Run.finite:
            self.value /= 2
        elif self.good == self.growth_steps:
            self.value, self.good = self.value * 2, 0


class Supervised:
    """Learns several outputs: the sum of their losses, times their weights."""

    def __init__(
        self, model: Any, loss: Any, optimizer: Any, loss_weights: Any = None, **metrics: Any
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.losses, self.loss_weights = loss, loss_weights

    def train_step(self, batch: Any) -> Any:
        x, targets, *weights = batch
        names = list(targets) if isinstance(targets, dict) else range(len(targets))

        def objective() -> Any:
            outputs = self.model(x, training=True)
            total = sum(self.model.losses)
            for name in names:
                loss: Any = self.losses
                if isinstance(loss, (dict, list)):
                    loss = self.losses.get(name) if isinstance(loss, dict) else loss[name]
                if loss is None:
                    continue
                loss = keras.losses.get(loss)
                if isinstance(loss, keras.losses.Loss):
                    value = loss(targets[name], outputs[name], *weights)
                else:
                    each = loss(targets[name], outputs[name])
                    value = ops.mean(each * weights[0] if weights else each)
                total += value if self.loss_weights is None else self.loss_weights[name] * value
            return total

        return {"loss": minimize(objective, self.model, self.optimizer)}


def parts_of(task: Any) -> dict[str, Any]:
    """Return what holds variables: networks, averages, optimizers, by attribute."""
    names = ("net", "slow", "opt", "head", "count", "model", "turns")
    return {name: part for name, part in vars(task).items() if name.startswith(names)}


def variables_in(part: Any) -> list[Any]:
    if isinstance(part, keras.Variable):
        return [part]
    inner: list[Any] = []
    mapped(inner.append, [getattr(part, "inner", None), getattr(part, "inside", None)])
    return [*part.variables, *(v for each in inner for v in variables_in(each))]


def is_seed(variable: Any) -> bool:
    return "seed_generator_state" in variable.path


def train(
    task: Any,
    batches: Sequence[Any],
    ends: Sequence[int],
    changes: Sequence[tuple[int, Callable[[Any], None]]] = (),
    skips: bool = False,
) -> dict[str, list[float]]:
    """Run a step once per batch and return what the steps returned, by name.

    Args:
        task: An object with a `train_step`, all of whose networks and optimizers are built.
        batches: Structures of NumPy arrays.
        ends: After how many batches a call of `fit` ends, where averages become the weights.
        changes: After how many steps to call what with the task.
        skips: Undo steps that return or leave behind what is not finite.
    """
    guarded = skips or Run.scale is not None
    kept = [v for part in parts_of(task).values() for v in variables_in(part) if not is_seed(v)]
    kept = list({id(v): v for v in kept}.values())
    history: dict[str, list[float]] = {}
    averaging = [x for x in vars(task).values() if getattr(x, "use_ema", False)]
    begun = updates_of(averaging)
    for number, batch in enumerate(batches):
        for after, change in changes:
            if after == number:
                change(task)
        Run.step, Run.finite, Run.depth = number, True, 0
        Run.examples = next(len(x) for x in leaves_of(batch) if x.ndim > 0)
        before = [np.array(ops.convert_to_numpy(v)) for v in kept] if guarded else []
        waiting = {key: x.waiting for key, x in vars(task).items() if isinstance(x, Accumulator)}
        values = task.train_step(mapped(tensor, batch))
        values = {key: float(ops.convert_to_numpy(value)) for key, value in values.items()}
        good = Run.finite
        if skips and Run.scale is None:
            floats = [ops.convert_to_numpy(v) for v in kept if "float" in v.dtype]
            good = all(np.isfinite(x).all() for x in [*values.values(), *floats])
        if guarded and not good:
            for variable, value in zip(kept, before, strict=True):
                variable.assign(value)
            for part in parts_of(task).values():
                derive(part)
            for key, value in waiting.items():
                getattr(task, key).waiting = value
        if Run.scale is not None:
            values["loss_scale"] = Run.scale.value
            Run.scale.end_step()
        if guarded:
            values["undone"] = float(not good)
        for key, value in values.items():
            history.setdefault(key, []).append(value)
        if number + 1 in ends:
            for optimizer, before_call, now in zip(
                averaging, begun, updates_of(averaging), strict=True
            ):
                if now != before_call:
                    optimizer.finalize_variable_values(optimizer._trainable_variables)
            begun = updates_of(averaging)
    for after, change in changes:
        if after == len(batches):
            change(task)
    return history


def tensor(array: Any) -> Any:
    """Return a tensor of an array, whose floats are of 64 bits if Keras' are."""
    wide = keras.config.floatx() == "float64" and array.dtype.name in ("float32", "float64")
    return ops.convert_to_tensor(array, "float64" if wide else None)


def updates_of(optimizers: Sequence[Any]) -> list[int]:
    """Return how many updates each optimizer has made."""
    return [int(ops.convert_to_numpy(optimizer.iterations)) for optimizer in optimizers]
