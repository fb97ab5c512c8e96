"""Rematerialization, branches and loops for steps, portable across backends."""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras import ops

from ..backends.base import active
from ..backends.recomputing import without_losses
from ..backends.scope import tried
from ..backends.step_context import context, unrecorded
from ..backends.types import Tensor, Weighted
from ..core import structures
from ..errors import StepError
from .probes import BRANCH, Probe, reported


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """Recompute a function in the backward pass instead of storing its intermediate activations.

    This is gradient checkpointing (Chen et al. 2016, https://arxiv.org/abs/1604.06174). It saves
    memory and costs additional computation. Unlike with `keras.remat`, the function may contain
    Dropout or BatchNormalization layers: the recomputation uses the same random numbers, and
    variables are updated only once. The objective must not assign variables that the function
    reads.

    Args:
        function: A layer, or a function of structures of tensors that returns one. It is
            differentiated with respect to its arguments and to variables. On TensorFlow it is not
            differentiated with respect to other tensors of the step, which is an error in graphs.

    Returns:
        A function with the same signature; keyword arguments are not differentiated.

    Raises:
        StepError: When it is called, if a layer in it calls `add_loss`.

    Example:
        >>> import keras, treadle
        >>> layer = keras.layers.Dense(1, kernel_initializer="ones")
        >>> x = keras.ops.ones((1, 3))
        >>> _ = layer(x)
        >>> loss, _ = treadle.gradients(lambda: keras.ops.sum(treadle.remat(layer)(x)), layer)
        >>> float(loss)
        3.0
    """

    @functools.wraps(function, updated=())
    def recomputed(*inputs: Any, **settings: Any) -> Any:
        what = "function of remat"
        run = unweighted(inside(functools.partial(function, **settings)), what)
        if context().build is not None:
            return run(*inputs)
        results, outline = Results(f"the {what}"), structures.outline(inputs)
        flat = results.flat(lambda *leaves: run(*structures.pack(outline, leaves)))
        with unrecorded():
            return results.packed(
                active().remat(without_losses(flat), as_tensors(structures.flatten(inputs)))
            )

    return recomputed


def cond(predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """Run one of two branches; both may assign variables and apply optimizers.

    Args:
        predicate: A scalar boolean tensor, or a Python bool.
        then: Called if `predicate` is true; takes no arguments, returns a structure of tensors or
            None.
        otherwise: Called if `predicate` is false; returns the same structure, shapes and dtypes.

    Returns:
        What the branch returned.

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> float(treadle.cond(ops.array(2) > 1, lambda: ops.array(1.0), lambda: ops.array(0.0)))
        1.0
    """
    return branched(predicate, then, otherwise, "cond")


def for_each(function: Callable[[Any], Any], inputs: Any) -> Any:
    """Map a function over the first axis, one row after another.

    The function may compute gradients and assign variables. State changes (seeds, statistics) carry
    over from row to row. Use `keras.ops.vectorized_map`, which is faster, if it supports the
    function.

    Args:
        function: Takes one row of `inputs`, returns a structure of tensors.
        inputs: A tensor, or a structure of tensors with the same first dimension: (n, …).

    Returns:
        The results, stacked: (n, …).

    Example:
        >>> import treadle
        >>> from keras import ops
        >>> [float(x) for x in treadle.for_each(lambda x: x * x, ops.array([1.0, 2.0]))]
        [1.0, 4.0]
    """
    return mapped_rows(function, inputs, "for_each")


def branched(
    predicate: Any, then: Callable[[], Any], otherwise: Callable[[], Any], name: str
) -> Any:
    """Run one of two branches, as `cond` does.

    Args:
        predicate: A scalar boolean tensor, or a Python bool.
        then: The branch for true.
        otherwise: The branch for false.
        name: What the user called, for messages.
    """
    branches = [unweighted(inside(f), f"branch of {name}") for f in (then, otherwise)]
    what = f"both branches of {name}"
    if context().build is not None:
        return every_branch(branches, 0 if known(bool, predicate) is not False else 1, what)
    if isinstance(predicate, bool):
        return branches[0 if predicate else 1]()
    probe = context().recorder
    if isinstance(probe, Probe):
        probe.report(BRANCH, name, {"outputs": None})
        taken = known(bool, predicate) if probe.enters and probe.in_place else None
        if taken is not None:  # as Python, so that the probe sees what it calls
            return branches[0 if taken else 1]()
    results = Results(what)
    with unrecorded():
        predicate = ops.convert_to_tensor(predicate)
        return results.packed(active().cond(predicate, *map(results.flat, branches)))


def mapped_rows(function: Callable[[Any], Any], inputs: Any, name: str) -> Any:
    """Map a function over rows, as `for_each` does; `name` is what the user called."""
    function = unweighted(inside(function), f"function of {name}")
    tensors, outline = as_tensors(structures.flatten(inputs)), structures.outline(inputs)
    if not tensors:
        raise StepError(f"{name} got no tensor: pass a structure of tensors of shape (n, …)")
    count = tensors[0].shape[0]
    if context().build is not None or count == 0:
        rows = structures.pack(outline, map(first_row, tensors))
        return stacked(function(rows) if count else tried(lambda: function(rows))[0], count)
    reported(BRANCH, name, None)
    results = Results(f"the function of {name}")

    def one(carry: list[Tensor], leaves: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        # Copied, since the function may return a variable's buffer, which the next row overwrites.
        found = function(structures.pack(outline, leaves))
        return [], results.flattened(structures.mapped(ops.copy, found))

    with unrecorded():
        return results.packed(active().scan(one, [], tensors, count)[1])


def every_branch(branches: Sequence[Callable[[], Any]], taken: int, what: str) -> Any:
    """Run every branch in a dry run, so that it creates its variables.

    Only the branch that is taken changes variables, and its result is returned.

    Raises:
        StepError: The branches return different structures.
    """
    results: dict[int, Any] = {}
    with _unsure():
        for i in sorted(range(len(branches)), key=lambda i: i == taken):  # that one is the last
            results[i] = branches[i]() if i == taken else tried(branches[i])[0]
    for i in range(1, len(branches)):
        _aligned(results[i], results[0], what)
    return results[taken]


def known(kind: Callable[[Any], Any], value: Any) -> Any:
    """Return a tensor's value as a Python `bool` or `int`; None if it is only traced."""
    try:
        return kind(value)
    except Exception:  # each framework raises its own
        return None


def first_row(x: Tensor) -> Tensor:
    """Return the first row of a tensor, or zeros if it has no rows."""
    return x[0] if x.shape[0] else ops.zeros(x.shape[1:], x.dtype)


def stacked(row: Any, count: int) -> Any:
    """Return a structure with each leaf of `row` repeated along a new first axis."""
    return structures.mapped(lambda x: ops.repeat(ops.convert_to_tensor(x)[None], count, 0), row)


def inside(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that `context().inside` is above zero while it runs.

    Used for objectives, branches and mapped functions. Their assignments leave them, so the checks
    of indices and labels continue there.
    """
    ranges = context().ranges
    continues = ranges is not None and ranges.place == active().place()

    def run(*arguments: Any) -> Any:
        step = context()
        step.inside += 1
        before = ranges.place if ranges is not None else None
        if ranges is not None and continues:
            ranges.place = active().place()
        try:
            return function(*arguments)
        finally:
            step.inside -= 1
            if ranges is not None:
                ranges.place = before

    return run


def unweighted(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Reject weighted scalars that a function returns, which frameworks cannot pass on."""

    def checked(*arguments: Any) -> Any:
        found = function(*arguments)
        if any(isinstance(x, Weighted) for x in structures.flatten(found)):
            raise StepError(
                f"a {what} returned treadle.weighted(…), and may return tensors only: return its "
                "value and its weight, and call treadle.weighted outside"
            )
        return found

    return checked


@contextmanager
def _unsure() -> Generator[None]:
    """Do not check indices and labels, in branches of which a real run takes only one."""
    ranges = context().ranges
    if ranges is None:
        yield
        return
    before, ranges.unsure = ranges.unsure, True
    try:
        yield
    finally:
        ranges.unsure = before


@contextmanager
def unchecked() -> Generator[None]:
    """Do not check indices and labels, as in transformations of the framework."""
    ranges = context().ranges
    before = ranges.place if ranges is not None else None
    if ranges is not None:
        ranges.place = object()
    try:
        yield
    finally:
        if ranges is not None:
            ranges.place = before


class Results:
    """The structure of what functions return, which frameworks pass on as lists of tensors.

    Args:
        what: The functions, for messages.
        *like: A structure that all results must have; without one, that of the first result.
    """

    def __init__(self, what: str, *like: Any) -> None:
        self._what = what
        self._outline: list[Any] = [structures.outline(x) for x in like]

    def flat(self, function: Callable[..., Any]) -> Callable[..., list[Tensor]]:
        """Wrap a function so that it returns the leaves of its result as a list of tensors.

        A returned variable or number would be a constant of a compiled branch.
        """

        def run(*arguments: Any) -> list[Tensor]:
            return self.flattened(function(*arguments))

        return run

    def flattened(self, found: Any) -> list[Tensor]:
        """Return the leaves of a result as tensors, in the order of the first result."""
        if not self._outline:
            self._outline.append(structures.outline(found))
        return as_tensors(_aligned(found, self._outline[0], self._what))

    def packed(self, tensors: Sequence[Tensor]) -> Any:
        """Return tensors in the structure of the first result."""
        return structures.pack(self._outline[0], tensors)


def _aligned(result: Any, like: Any, what: str) -> list[Any]:
    """Return the leaves of a result in the order of another one.

    Raises:
        StepError: The results have different structures.
    """
    try:
        return structures.aligned(result, like)
    except ValueError as error:
        raise StepError(f"{what} must always return the same structure: {error}") from error


def as_tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """Convert leaves to tensors; those of variables are copies, which assignments do not change."""
    return [
        ops.copy(x) if isinstance(x, keras.Variable) else ops.convert_to_tensor(x) for x in leaves
    ]
