"""Gradient transforms, applied between `treadle.gradients` and `optimizer.apply`.

They take gradients as returned by `treadle.gradients`: a list of tensors, or a dict of such lists,
one for each optimizer. For a dict, each list is transformed separately, and a dict of results is
returned.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import keras
from keras import ops

from ..backends.step_context import context
from ..backends.types import Tensor, Variable
from ..core.float64 import wide
from ..errors import GradientError, did_you_mean
from .gradients import listed
from .helpers import step as running_step
from .probes import CLIP, reported

Gradients = Any  # a list of tensors, or a dict of such lists
Variables = Any  # a list of variables, or a model, layer or metric


def clip_by_value(grads: Gradients, limit: float | Tensor) -> Gradients:
    """Clip every element of the gradients to the range from `-limit` to `limit`.

    Args:
        grads: A list of tensors, or a dict of such lists.
        limit: A positive number, or a scalar tensor.

    Raises:
        GradientError: The limit is not positive.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> (g,) = clip_by_value([ops.array([-3.0, 0.5])], 1.0)
        >>> [float(x) for x in g]
        [-1.0, 0.5]
    """
    _check_limit("clip_by_value", limit)

    def clipped(g: Tensor) -> Tensor:
        most = ops.cast(limit, g.dtype)
        return ops.maximum(ops.minimum(g, most), -most)

    found = _map_lists(lambda part: [clipped(g) for g in part], grads)
    return reported(CLIP, "clip_by_value", found, inputs=grads)


def clip_by_norm(grads: Gradients, limit: float | Tensor) -> Gradients:
    """Clip each gradient to a norm of at most `limit`, independently of the others.

    Args:
        grads: A list of tensors, or a dict of such lists.
        limit: A positive number, or a scalar tensor.

    Raises:
        GradientError: The limit is not positive.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> long, short = clip_by_norm([ops.array([3.0, 4.0]), ops.array([0.5])], 1.0)
        >>> [round(float(x), 3) for x in long], float(short[0])
        ([0.6, 0.8], 0.5)
    """
    _check_limit("clip_by_norm", limit)
    found = _map_lists(lambda part: [_scale_down(g, _norm([g]), limit) for g in part], grads)
    return reported(CLIP, "clip_by_norm", found, inputs=grads)


def clip_by_global_norm(grads: Gradients, limit: float | Tensor) -> tuple[Gradients, Any]:
    """Scale all gradients by the same factor, so that their global norm is at most `limit`.

    Args:
        grads: A list of tensors, or a dict of such lists, of which each has its own global norm.
        limit: A positive number, or a scalar tensor.

    Returns:
        The clipped gradients, and the global norm before clipping, for example to log it: a float32
        scalar, or for a dict a dict of scalars.

    Raises:
        GradientError: The limit is not positive.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> (a, b), norm = treadle.clip_by_global_norm([ops.array(3.0), ops.array(4.0)], 1.0)
        >>> round(float(a), 3), round(float(b), 3), float(norm)
        (0.6, 0.8, 5.0)
    """
    _check_limit("clip_by_global_norm", limit)
    norm = global_norm(grads)
    if isinstance(grads, Mapping):
        parts: Mapping[str, Any] = grads
        found: Any = {n: [_scale_down(g, norm[n], limit) for g in p] for n, p in parts.items()}
    else:
        found = [_scale_down(g, norm, limit) for g in grads]
    return reported(CLIP, "clip_by_global_norm", found, inputs=grads), norm


def global_norm(grads: Gradients) -> Any:
    """Return the global norm of gradients: the square root of the sum of all squared elements.

    Args:
        grads: A list of tensors, or a dict of such lists.

    Returns:
        A float32 scalar; for a dict, a dict of scalars.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> float(global_norm([ops.array([3.0]), ops.array(4.0)]))
        5.0
    """
    return _map_lists(_norm, grads)


def gradient_norms(grads: Gradients, variables: Any) -> dict[str, Tensor]:
    """Return the norm of each gradient by its variable's path, to be returned by a step.

    Args:
        grads: A list of tensors, or a dict of such lists.
        variables: Their variables, as passed to `treadle.gradients`.

    Returns:
        `{"norm/model/layers/0/kernel": …}`, with float32 scalars. For a dict of gradients, its
        names precede the paths.

    Raises:
        GradientError: The numbers of gradients and variables differ.

    Example:
        >>> import keras, treadle
        >>> w = keras.Variable([3.0, 4.0], name="w")
        >>> _, grads = treadle.gradients(lambda: keras.ops.sum(w**2), [w])
        >>> {name: float(norm) for name, norm in gradient_norms(grads, [w]).items()}
        {'norm/w': 10.0}
    """
    path_of = context().path_of
    found: dict[str, Tensor] = {}
    for name, (part, owners) in _paired(grads, variables).items():
        prefix = f"norm/{name}/" if name else "norm/"
        found |= {prefix + path_of(v): _norm([g]) for g, v in zip(part, owners, strict=True)}
    return found


def scaled_by(grads: Gradients, variables: Any, factors: Mapping[str, float | Tensor]) -> Gradients:
    """Multiply gradients by factors, chosen by patterns of the paths of their variables.

    A pattern (`fnmatch`) is matched against the path in the task, such as `model/layers/2/kernel`,
    and against Keras' path, such as `sequential/head/kernel`, which contains the names of the
    layers. The first matching pattern applies; gradients without a matching pattern are not
    changed. Optimizers that normalize gradients, such as Adam, cancel a constant factor: use a
    separate optimizer with another learning rate instead.

    Args:
        grads: A list of tensors, or a dict of such lists.
        variables: Their variables, as passed to `treadle.gradients`.
        factors: Factors by pattern, such as `{"*head*": 0.1}`.

    Raises:
        GradientError: A pattern matches no variable, or the numbers of gradients and variables
            differ.

    Example:
        >>> import keras, treadle
        >>> body, head = keras.Variable(1.0, name="body"), keras.Variable(1.0, name="head")
        >>> _, grads = treadle.gradients(lambda: body + head, [body, head])
        >>> [float(g) for g in scaled_by(grads, [body, head], {"head": 0.1})]
        [1.0, 0.10000000149011612]
    """
    pairs = _paired(grads, variables)
    every = [v for _, owners in pairs.values() for v in owners]
    for pattern in factors:
        _check_pattern_matches("scaled_by", pattern, every)

    def scaled(g: Tensor, variable: Variable) -> Tensor:
        factor = next((f for p, f in factors.items() if _matches(variable, p)), None)
        return g if factor is None else g * ops.cast(factor, g.dtype)

    results = {
        name: [scaled(g, v) for g, v in zip(part, owners, strict=True)]
        for name, (part, owners) in pairs.items()
    }
    return results if isinstance(grads, Mapping) else results[""]


def trainable(
    variables: Variables,
    only: str | Collection[str] | None = None,
    frozen: str | Collection[str] = (),
) -> list[Variable]:
    """Return the variables to train, selected by patterns of their paths.

    The other variables are fully frozen: no gradient is computed for them, and the optimizer does
    not change them by weight decay, momentum or averaging, as it would with a gradient of zeros.

    Args:
        variables: A list of variables, or a model: its trainable variables.
        only: Patterns of the variables to train, as for `scaled_by`; default: all.
        frozen: Patterns of the variables not to train.

    Raises:
        GradientError: A pattern matches no variable.

    Example:
        >>> import keras, treadle
        >>> body, head = keras.Variable(1.0, name="body"), keras.Variable(1.0, name="head")
        >>> [v.name for v in trainable([body, head], frozen="body")]
        ['head']
    """
    every = listed(variables)
    wanted = None if only is None else _patterns(only)
    for pattern in (*(wanted or ()), *_patterns(frozen)):
        _check_pattern_matches("trainable", pattern, every)
    return [
        v
        for v in every
        if (wanted is None or any(_matches(v, p) for p in wanted))
        and not any(_matches(v, p) for p in _patterns(frozen))
    ]


def with_noise(
    grads: Gradients,
    eta: float = 0.01,
    gamma: float = 0.55,
    step: int | Tensor | None = None,
    seed: Any = None,
) -> Gradients:
    """Add Gaussian noise with a decaying variance of `eta / (1 + step) ** gamma`.

    Neelakantan et al. 2015, https://arxiv.org/abs/1511.06807, who tried `eta` of 0.01, 0.3 and 1.

    Args:
        grads: A list of tensors, or a dict of such lists.
        eta: The variance in step 0.
        gamma: The exponent of the decay.
        step: The step's number; default: `treadle.step()`. If the optimizer does not update in
            every step, pass its `iterations`.
        seed: A `keras.random.SeedGenerator` that is an attribute of the task; default: Keras'
            global seed generator.

    Raises:
        GradientError: The seed is a number, which would give the same noise in every step.

    Example:
        >>> import keras, treadle
        >>> from keras import ops
        >>> seed = keras.random.SeedGenerator(0)
        >>> (g,) = with_noise([ops.zeros((10_000,))], eta=4.0, gamma=1.0, step=3, seed=seed)
        >>> round(float(ops.std(g)), 1)  # the root of 4 / (1 + 3)
        1.0
    """
    if seed is not None and not isinstance(seed, keras.random.SeedGenerator):
        raise GradientError(
            f"with_noise(seed={seed!r}) would add the same noise in each step: keep a "
            "keras.random.SeedGenerator in the task and pass it"
        )
    number = ops.cast(running_step() if step is None else step, wide())
    spread = ops.sqrt(eta / (1.0 + number) ** gamma)

    def noisy(g: Tensor) -> Tensor:
        noise = keras.random.normal(tuple(g.shape), dtype=wide(), seed=seed)
        return g + ops.cast(spread * noise, g.dtype)

    return _map_lists(lambda part: [noisy(g) for g in part], grads)


def centralized(grads: Gradients) -> Gradients:
    """Centralize gradients: subtract from each kernel's gradient its mean per output unit.

    Yong et al. 2020, https://arxiv.org/abs/2004.01461. The mean is over all axes except the last,
    which is the output axis of Keras' kernels. Gradients with fewer than two dimensions (biases)
    are not changed.

    Args:
        grads: A list of tensors, or a dict of such lists.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> (g,) = centralized([ops.array([[1.0, 10.0], [3.0, 30.0]])])
        >>> [[float(x) for x in row] for row in g]
        [[-1.0, -10.0], [1.0, 10.0]]
    """

    def central(g: Tensor) -> Tensor:
        axes = tuple(range(len(g.shape) - 1))
        return g - ops.mean(g, axis=axes, keepdims=True) if axes else g

    return _map_lists(lambda part: [central(g) for g in part], grads)


def _map_lists(function: Callable[[Sequence[Tensor]], Any], grads: Gradients) -> Any:
    """Call a function with a list of gradients, or with each list of a dict."""
    if isinstance(grads, Mapping):
        return {name: function(part) for name, part in grads.items()}
    return function(grads)


def _paired(grads: Gradients, variables: Any) -> dict[str, tuple[Sequence[Tensor], list[Variable]]]:
    """Return each list of gradients with its variables, by name; a single list is named `""`."""
    named: Mapping[str, Any] = grads if isinstance(grads, Mapping) else {"": grads}
    owners: Any = variables if isinstance(grads, Mapping) else {"": variables}
    if not isinstance(owners, Mapping) or set(owners) != set(named):
        got = sorted(owners) if isinstance(owners, Mapping) else type(owners).__name__
        raise GradientError(
            f"there are gradients for {sorted(named)}, but variables for {got}: pass what "
            "treadle.gradients was given"
        )
    pairs = {name: (part, listed(owners[name])) for name, part in named.items()}
    for part, of in pairs.values():
        if len(part) != len(of) and context().build is None:
            raise GradientError(
                f"there are {len(part)} gradients, but {len(of)} variables: pass the variables "
                "that treadle.gradients was given, in the same order"
            )
    # While a model is being built, there may be more variables than gradients.
    return {name: (part[: len(of)], of[: len(part)]) for name, (part, of) in pairs.items()}


def _patterns(given: str | Collection[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


def _matches(variable: Variable, pattern: str) -> bool:
    return any(fnmatchcase(path, pattern) for path in _paths(variable))


def _paths(variable: Variable) -> tuple[str, str]:
    """Return a variable's path in the task, and Keras' path, which contains layer names."""
    return context().path_of(variable), str(getattr(variable, "path", variable.name))


def _check_pattern_matches(name: str, pattern: str, variables: Sequence[Variable]) -> None:
    # While a model is being built, not all of its paths are known.
    if context().build is None and not any(_matches(v, pattern) for v in variables):
        known = dict.fromkeys(path for v in variables for path in _paths(v))
        raise GradientError(
            f"{name}: the pattern {pattern!r} matches no variable.{did_you_mean(pattern, known)}"
        )


def _check_limit(name: str, limit: float | Tensor) -> None:
    if isinstance(limit, (int, float)) and not limit > 0:
        raise GradientError(f"{name} needs a positive limit, not {limit!r}")


def _norm(grads: Sequence[Tensor]) -> Tensor:
    kinds = {keras.backend.standardize_dtype(g.dtype) for g in grads}
    wide = "float64" if "float64" in kinds else "float32"
    squares = [ops.sum(ops.square(ops.cast(g, wide))) for g in grads]
    return ops.sqrt(sum(squares, ops.zeros((), wide)))


def _scale_down(gradient: Tensor, norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return a gradient times `limit / norm` if that is below 1; for a norm of 0 it is not."""
    factor = ops.minimum(1.0, ops.cast(limit, norm.dtype) / norm)
    return gradient * ops.cast(factor, gradient.dtype)
