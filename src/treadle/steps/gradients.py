"""Gradients for steps, portable across backends."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import keras
from keras import ops

from ..backends.base import active
from ..backends.scope import Scope, hand_losses, hand_outward
from ..backends.step_context import Build, context
from ..backends.types import Losses, Tensor, Variable, Weighted, unweighted
from ..core import structures
from ..errors import GradientError, StepError
from .control_flow import inside
from .loss_scale import scaled, unscaled
from .probes import GRADIENTS, INPUT_GRADIENTS, SLOPES, Probe, reported

Variables = Any  # a model, layer or metric, or a list of these and of variables
Named = Mapping[str, Sequence[Variable]]  # the variables of each loss
ONLY = ""  # the internal name of a single, unnamed loss


def gradients(
    objective: Callable[[], Any],
    variables: Variables | Mapping[str, Variables],
    unreached: Literal["error", "zeros"] = "error",
) -> tuple[Any, Any]:
    """Compute a loss and its gradients with respect to variables.

    `objective` runs once. All its state changes are kept: BatchNorm statistics, seeds, metrics and
    `add_loss` losses. No gradients flow through the other values that it returns.

    Args:
        objective: Returns the loss, a scalar of a float dtype, or `(loss, aux)`, where `aux` is any
            structure. With a dict of variables: a dict of losses with the same names, or
            `(losses, aux)`. A loss may be `treadle.weighted(mean, count)`.
        variables: A list of variables, a model (its trainable variables), a list of models and
            layers, or `{name: variables}` to differentiate several losses of one forward pass, each
            with respect to its own variables.
        unreached: What to do if the loss does not depend on a variable: `"error"` raises an error
            that names the variable, `"zeros"` returns a gradient of zeros.

    Returns:
        `(what the objective returned, gradients)`: dense tensors of the variables' shapes and
        dtypes, as a list in the order of `variables`, or a dict of such lists.

    Raises:
        GradientError: The objective is no function; there are no variables; the loss is not a
            scalar or not of a float dtype; the names of losses and variables differ; or the loss
            does not depend on a variable.

    Example:
        >>> import keras, treadle
        >>> w = keras.Variable(3.0)
        >>> loss, (slope,) = treadle.gradients(lambda: w * w, [w])
        >>> float(slope)
        6.0
    """
    _check_arguments(objective, unreached)
    objective = inside(objective)
    several = isinstance(variables, Mapping)
    parts: Mapping[str, Variables] = variables if several else {ONLY: variables}
    named = {str(name): listed(part) for name, part in parts.items()}
    union = list({id(v): v for part in named.values() for v in part}.values())
    index = {id(variable): i for i, variable in enumerate(union)}
    step = context()
    if step.build is not None:
        result, grads = _dry_gradients(objective, named, several, step.build)
        return result, grads if several else grads[ONLY]
    _check_variables(named, union)
    groups = {name: [index[id(v)] for v in part] for name, part in named.items()}
    names = list(named) if several else None
    probe = step.recorder
    if isinstance(probe, Probe) and step.depth == 0:
        result, found = _tapped(probe, objective, names, union, groups)
    else:
        result, found = _differentiate(lambda _: objective(), names, union, (), groups)
    grads = {name: _reached(found[name], part, name, unreached) for name, part in named.items()}
    if isinstance(probe, Probe):
        _show(probe, named, _losses(result, names), grads)
    return result, grads if several else grads[ONLY]


def _check_arguments(objective: Any, unreached: str) -> None:
    if unreached not in ("error", "zeros"):
        raise GradientError(f"unreached must be 'error' or 'zeros', not {unreached!r}")
    if not callable(objective):
        raise GradientError(
            f"the objective must be a function that computes the loss, not a "
            f"{type(objective).__name__}: write lambda: self.loss(y, self.model(x)) in its place"
        )


def _show(
    probe: Probe, named: Named, losses: Mapping[str, Any], grads: dict[str, list[Tensor]]
) -> None:
    """Report losses and their gradients to a probe, which may replace the gradients."""
    path_of = context().path_of
    for name, part in named.items():
        values = {"loss": unweighted(losses[name]), "outputs": grads[name]}
        facts = {"paths": [path_of(v) for v in part], "objective": probe.latest}
        grads[name] = probe.report(GRADIENTS, name, values, **facts)


def _tapped(
    probe: Probe,
    objective: Callable[[], Any],
    names: list[str] | None,
    union: Sequence[Variable],
    groups: Mapping[str, Sequence[int]],
) -> tuple[Any, dict[str, list[Tensor | None]]]:
    """Differentiate; also with respect to the outputs of layers whose slopes a probe wants."""
    taps, count = probe.taps(), len(union)
    further = range(count, count + len(taps))

    def function(leaves: Sequence[Tensor]) -> Any:
        with probe.tapping([(*tap[:2], x) for tap, x in zip(taps, leaves, strict=True)]):
            return objective()

    every = {name: [*group, *further] for name, group in groups.items()}
    inputs = [zeros for _, _, zeros in taps]
    result, found = _differentiate(function, names, union, inputs, every)
    if taps:
        labels = [tap[:2] for tap in taps]
        for name, group in groups.items():
            slopes = found[name][len(group) :]
            facts = {"taps": labels, "objective": probe.latest}
            probe.report(SLOPES, name, {"outputs": slopes}, **facts)
    return result, {name: found[name][: len(group)] for name, group in groups.items()}


def input_gradients(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, list[Tensor]]:
    """Compute a function and its gradients with respect to its inputs.

    Inside an objective, the gradients can be differentiated again (for gradient penalties).

    Args:
        function: Takes the inputs; returns a scalar, or `(scalar, aux)`, where `aux` is any
            structure.
        inputs: Float tensors of any shape.

    Returns:
        `(what the function returned, one gradient per input)`. Each gradient has the shape and
        dtype of its input, except that it is float32 for a float16 input, since small gradients
        underflow in float16.

    Raises:
        GradientError: There are no inputs, an input is not of a float dtype, the result is not a
            scalar, or it does not depend on an input.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> _, (slope,) = treadle.input_gradients(lambda x: ops.sum(x**2), ops.ones((3,)))
        >>> [float(s) for s in slope]
        [2.0, 2.0, 2.0]
    """
    tensors = [ops.convert_to_tensor(x) for x in inputs]
    if not tensors:
        raise GradientError(
            "input_gradients needs at least one input: input_gradients(function, x)"
        )
    for i, tensor in enumerate(tensors):
        if "float" not in keras.backend.standardize_dtype(tensor.dtype):
            raise GradientError(
                f"input {i} has dtype {keras.backend.standardize_dtype(tensor.dtype)}: only float "
                "tensors have gradients; cast it with ops.cast(x, 'float32')"
            )
    function = inside(function)
    step = context()
    if step.build is not None:
        step.build.differentiated = True
        with active().undifferentiated():
            result = function(*tensors)
        _losses(result, None)
        return _outside(result), [ops.zeros_like(x, _dtype_of_gradient(x)) for x in tensors]

    groups = {ONLY: list(range(len(tensors)))}
    result, found = _differentiate(lambda leaves: function(*leaves), None, (), tensors, groups)
    grads: list[Tensor] = []
    for i, (gradient, x) in enumerate(zip(found[ONLY], tensors, strict=True)):
        if gradient is None:
            raise GradientError(f"the function's result does not depend on input {i}")
        grads.append(ops.cast(gradient, _dtype_of_gradient(x)))
    value = result[0] if isinstance(result, tuple) else result
    return result, reported(INPUT_GRADIENTS, "", grads, inputs=tensors, value=value)


def minimize(objective: Callable[[], Any], of: Any, optimizer: Any) -> Any:
    """Compute the gradients of a loss and apply them: `gradients` and `optimizer.apply` in one.

    Args:
        objective: Returns the loss, as for `gradients`.
        of: The variables to update: a model, a list of variables, models and layers, or a dict.
        optimizer: A Keras optimizer; if `of` is a dict, a dict of optimizers with the same names.

    Returns:
        What the objective returned.

    Raises:
        GradientError: As for `gradients`, or the names in the two dicts differ.

    Example:
        >>> import keras, treadle
        >>> w = keras.Variable(3.0)
        >>> _ = treadle.minimize(lambda: w * w, [w], keras.optimizers.SGD(0.1))
        >>> round(float(w.numpy()), 3)
        2.4
    """
    if isinstance(of, Mapping):
        if not isinstance(optimizer, Mapping) or set(optimizer) != set(of):
            got = sorted(optimizer) if isinstance(optimizer, Mapping) else type(optimizer).__name__
            raise GradientError(
                f"minimize got variables for {sorted(of)} and optimizers for {got}"
                ": pass a dict of optimizers with the same names"
            )
        result, grads = gradients(objective, of)
        for name, part in of.items():
            optimizer[name].apply(grads[name], listed(part))
        return result
    if isinstance(of, keras.optimizers.Optimizer):
        raise GradientError(
            "minimize got an optimizer in the place of the variables: write "
            "treadle.minimize(objective, self.model, self.optimizer)"
        )
    # The list is read again after the objective ran: it may have built the model.
    result, grads = gradients(objective, of)
    variables = listed(of)
    if len(grads) != len(variables):  # placeholders for a model that the objective has just built
        grads = [ops.zeros(v.shape, v.dtype) for v in variables]
    optimizer.apply(grads, variables)
    return result


@contextmanager
def substituted(variables: Variables, values: Sequence[Tensor]) -> Generator[None]:
    """Temporarily replace the values of variables, as a context manager.

    Inside the context, models compute with `values`, and `gradients` differentiates at them.
    Afterwards the variables have their own values again. Assignments to other variables (BatchNorm
    statistics, seeds, metrics) are kept. Results are differentiable with respect to `values`, as
    meta-learning needs (MAML, https://arxiv.org/abs/1703.03400).

    Args:
        variables: A list of variables, or a model: its trainable variables.
        values: One tensor of the same shape per variable. If a value is itself a variable, its
            current value is used.

    Raises:
        StepError: The numbers or the shapes of variables and values differ.

    Example:
        >>> import keras, treadle
        >>> w = keras.Variable(3.0)
        >>> with treadle.substituted([w], [5.0]):
        ...     print(float(w.numpy()))
        5.0
        >>> float(w.numpy())
        3.0
    """
    chosen = listed(variables)
    if len(chosen) != len(values):
        raise StepError(
            f"substituted got {len(chosen)} variables and {len(values)} values: one for each"
        )
    path_of = context().path_of
    pairs: list[tuple[Variable, Tensor]] = []
    for variable, value in zip(chosen, values, strict=True):
        # A variable may be substituted for itself and assigned inside the context: copy its value.
        if isinstance(value, keras.Variable):
            value = ops.copy(value)
        tensor = ops.convert_to_tensor(value, dtype=variable.dtype)
        if tuple(tensor.shape) != tuple(variable.shape):
            raise StepError(
                f"substituted value for {path_of(variable)} has shape {tuple(tensor.shape)}, but "
                f"the variable has {tuple(variable.shape)}"
            )
        pairs.append((variable, tensor))
    with Scope(pairs) as scope:
        yield
    hand_outward(scope.changed(), keep=[id(v) for v, _ in pairs])
    hand_losses(scope)


def listed(variables: Variables) -> list[Variable]:
    """Return the given variables as a list; of models and layers, their trainable variables."""
    if hasattr(variables, "trainable_variables"):
        return list(variables.trainable_variables)
    if not isinstance(variables, (list, tuple)):
        return [variables]
    if any(hasattr(each, "trainable_variables") for each in variables):  # layers may share some
        return list({id(v): v for each in variables for v in listed(each)}.values())
    return list(variables)


def _dry_gradients(
    objective: Callable[[], Any], named: Named, several: bool, build: Build
) -> tuple[Any, dict[str, list[Tensor]]]:
    """Run an objective in a dry run, where only variables and shapes matter.

    Returns:
        What the objective returned, and gradients of zeros.
    """
    build.differentiated = True
    with active().undifferentiated():
        result = objective()
    _losses(result, list(named) if several else None)
    result = _outside(result)
    return result, {
        name: [ops.zeros(v.shape, v.dtype) for v in part] for name, part in named.items()
    }


def _check_variables(named: Named, union: Sequence[Variable]) -> None:
    """Check that there are variables for each loss, of float dtypes.

    Raises:
        GradientError: There are none, or one has another dtype.
    """
    for name, part in named.items():
        if not part:
            raise GradientError(
                f"gradients over no variables{f' for {name!r}' if name else ''}: pass the "
                "variables that the loss is to change, for example model.trainable_variables (a "
                "model that is not yet built, or with trainable = False, has none)"
            )
    for variable in union:
        dtype = keras.backend.standardize_dtype(variable.dtype)
        if "float" not in dtype:
            raise GradientError(
                f"{context().path_of(variable)} is of dtype {dtype}, and only float variables have "
                "gradients: leave it out of the variables"
            )


def _outside(result: Any) -> Any:
    """Stop gradients through everything that an objective returned."""

    def stopped(x: Any) -> Any:
        if isinstance(x, Weighted):
            return Weighted(stopped(x.value), stopped(x.weight))
        return ops.stop_gradient(x) if ops.is_tensor(x) else x

    return structures.mapped(stopped, result)


def _losses(result: Any, names: list[str] | None) -> Losses:
    """Extract the loss or losses from an objective's return value and check them."""
    if names is None:
        loss = result[0] if isinstance(result, tuple) and result else result
        rest = result[1:] if isinstance(result, tuple) else ()
        swapped = any(ops.is_tensor(x) and tuple(x.shape) == () for x in rest)
        return {ONLY: _scalar_loss(loss, "the loss", swapped)}
    losses = result[0] if isinstance(result, tuple) and result else result
    if not isinstance(losses, Mapping) or set(losses) != set(names):
        got = sorted(losses) if isinstance(losses, Mapping) else type(losses).__name__
        raise GradientError(
            f"the objective must return a dict of losses named {sorted(names)}, as the variables "
            f"are, or (that dict, anything); it returned {got}"
        )
    return {name: _scalar_loss(losses[name], f"the loss {name!r}") for name in names}


def _scalar_loss(loss: Any, what: str, swapped: bool = False) -> Tensor | Weighted:
    if isinstance(loss, Weighted):
        items = "the number of items that the loss is a mean of, for example ops.sum(mask)"
        if loss.weight is None or isinstance(loss.weight, (str, Mapping, Weighted)):
            kind = type(loss.weight).__name__
            raise GradientError(f"the weight of {what} must be a number, not {kind}: pass {items}")
        weight = ops.convert_to_tensor(loss.weight)
        if tuple(weight.shape) != ():
            shape = tuple(weight.shape)
            raise GradientError(
                f"the weight of {what} must be a scalar, but has shape {shape}: pass {items}"
            )
        if isinstance(loss.value, Weighted):
            raise GradientError(f"{what} is weighted twice: call treadle.weighted once")
        return Weighted(_scalar_loss(loss.value, what), weight)
    if loss is None or isinstance(loss, (str, Mapping, list)):
        raise GradientError(
            f"{what} must be a scalar tensor, but the objective returned {type(loss).__name__}"
        )
    tensor = ops.convert_to_tensor(loss)
    if tuple(tensor.shape) != ():
        raise GradientError(
            f"{what} must be a scalar, but has shape {tuple(tensor.shape)}: "
            + (
                "return the loss first, as (loss, anything)"
                if swapped
                else "reduce it, for example with ops.mean"
            )
        )
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    if "float" not in dtype:
        raise GradientError(f"{what} must be of a float type, but is {dtype}")
    return tensor


def _differentiate(
    function: Callable[[Sequence[Tensor]], Any],
    names: list[str] | None,
    variables: Sequence[Variable],
    inputs: Sequence[Tensor],
    groups: Mapping[str, Sequence[int]],
) -> tuple[Any, dict[str, list[Tensor | None]]]:
    """Run a function and differentiate its losses, with loss scaling if the step uses it."""
    step = context()
    scale = step.loss_scale
    factor = None if scale is None else scale.factor(nested=step.depth > 0)

    recorder = step.recorder

    def losses(leaves: Sequence[Tensor]) -> tuple[Losses, Any]:
        if recorder is not None:
            recorder.begin()
        result = function(leaves)
        found = _losses(result, names)
        if factor is not None:
            found = {name: _scaled(loss, factor) for name, loss in found.items()}
        return found, (result, () if recorder is None else recorder.taken())

    (result, met), found = active().differentiate(losses, variables, inputs, groups)
    if recorder is not None:
        recorder.give(met)
    if scale is None:
        return result, found
    scale.look([g for part in found.values() for g in part if g is not None])
    dtypes = [*(v.dtype for v in variables), *map(_dtype_of_gradient, inputs)]
    return result, {
        name: [
            None if gradient is None else unscaled(gradient, factor, dtypes[i])
            for i, gradient in zip(groups[name], part, strict=True)
        ]
        for name, part in found.items()
    }


def _scaled(loss: Tensor | Weighted, factor: Tensor) -> Tensor | Weighted:
    if isinstance(loss, Weighted):
        return Weighted(scaled(loss.value, factor), loss.weight)
    return scaled(loss, factor)


def _dtype_of_gradient(tensor: Tensor) -> str:
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return "float32" if dtype == "float16" else dtype


def _reached(
    gradients: Sequence[Tensor | None], variables: Sequence[Variable], name: str, unreached: str
) -> list[Tensor]:
    """Return the gradients of a loss, with zeros for variables that it does not depend on."""
    reached: list[Tensor] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        if gradient is None and unreached == "error":
            path = context().path_of(variable)
            loss = f"the loss {name!r}" if name else "the loss"
            raise GradientError(
                f"no gradient for {path}: {loss} does not depend on it. Leave it out of the "
                "variables, or pass unreached='zeros' for a gradient of zeros"
            )
        if gradient is None:
            gradient = ops.zeros(variable.shape, variable.dtype)
        reached.append(gradient)
    return reached
