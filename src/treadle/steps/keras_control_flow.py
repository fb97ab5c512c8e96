"""Branches and loops of `keras.ops` in steps: they carry what they assign, on every backend.

Inside a step, the functions behind `keras.ops.cond`, `switch`, `scan`, `map`, `while_loop` and
`fori_loop` are replaced by those below. Where variables are assigned, Keras' own functions fail on
JAX, and `map` calls its function once more on TensorFlow. `vectorized_map` and `associative_scan`
have no order of calls, so that assignments inside of them are errors.

In a dry run every branch and every body runs at least once, so that all variables are found.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import keras
from keras import ops

from ..backends.base import active
from ..backends.scope import Scope, tried
from ..backends.step_context import context, unrecorded
from ..backends.types import Tensor
from ..core import structures
from ..core.keras_internals import INTERNALS, core, exports, in_symbolic_scope
from ..errors import StepError
from .control_flow import (
    Results,
    as_tensors,
    branched,
    every_branch,
    first_row,
    inside,
    known,
    mapped_rows,
    stacked,
    unchecked,
    unweighted,
)

Call = Callable[..., Any]

LONGEST_DRY: Final = 100
"""Iterations of a `while_loop` in a dry run, where optimizers change nothing."""


def _cond(pred: Any, true_fn: Call, false_fn: Call) -> Any:
    if isinstance(pred, keras.Variable):
        pred = ops.convert_to_tensor(pred)
    elif not ops.is_tensor(pred):  # a number, or a value of NumPy
        pred = bool(pred)
    return branched(pred, true_fn, false_fn, "keras.ops.cond")


def _switch(index: Any, branches: Sequence[Call], *operands: Any) -> Any:
    what = "all branches of keras.ops.switch"
    runs = [
        unweighted(inside(partial(f, *operands)), "branch of keras.ops.switch") for f in branches
    ]
    if context().build is not None:
        taken = known(int, index) or 0
        return every_branch(runs, min(max(taken, 0), len(runs) - 1), what)
    results = Results(what)
    with unrecorded():
        index = ops.convert_to_tensor(index, "int32")
        return results.packed(active().switch(index, [results.flat(run) for run in runs]))


def _scan(
    f: Call,
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> Any:
    what = "function of keras.ops.scan"
    function = unweighted(inside(f), what)
    carried, found = Results(f"what the {what} carries", init), Results(f"the {what}")
    rows, outline = as_tensors(structures.flatten(xs)), structures.outline(xs)
    if not rows and length is None:
        raise StepError("keras.ops.scan got neither xs nor length: pass one of them")
    count = int(rows[0].shape[0]) if length is None else int(length)

    def step(carry: list[Tensor], row: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        after, result = function(carried.packed(carry), structures.pack(outline, row))
        return carried.flattened(after), found.flattened(result)

    carry = as_tensors(structures.flatten(init))
    if count and (context().build is None or not _is_traced()):
        with unrecorded():
            carry, stacks = active().scan(step, carry, rows, count, reverse, unroll)
        return carried.packed(carry), found.packed(stacks)
    once = partial(step, carry, [first_row(x) for x in rows])
    after, row = once() if count else tried(once)[0]
    return carried.packed(after if count else carry), stacked(found.packed(row), count)


def _while_loop(
    cond: Call, body: Call, loop_vars: Any, maximum_iterations: int | None = None
) -> Any:
    several = isinstance(loop_vars, (tuple, list))
    start = tuple(loop_vars) if several else (loop_vars,)
    what = "body of keras.ops.while_loop"
    run, carried = unweighted(inside(body), what), Results(f"the {what}", start)

    def condition(values: list[Tensor]) -> Any:
        return inside(cond)(*carried.packed(values))

    def once(values: list[Tensor]) -> list[Tensor]:
        found = run(*carried.packed(values))
        return carried.flattened(tuple(found) if isinstance(found, (tuple, list)) else (found,))

    values = as_tensors(structures.flatten(start))
    if context().build is None:
        with unrecorded():
            values = active().while_loop(condition, once, values, maximum_iterations)
    else:
        values = _dry_while(condition, once, values, maximum_iterations)
    found = carried.packed(values)
    return found if several else found[0]


def _dry_while(condition: Call, once: Call, values: Any, maximum: int | None) -> Any:
    """Run a loop in a dry run; its body at least once, even if the condition is false."""
    longest = LONGEST_DRY if maximum is None else min(maximum, LONGEST_DRY)
    for number in range(longest + 1):
        more, scope = tried(partial(condition, values))
        _reject_assignments(
            scope,
            "the condition of keras.ops.while_loop",
            "which only its body can: assign variables and draw random numbers there",
        )
        is_true = known(bool, more)
        if is_true is None:  # it is traced
            return once(values)
        if not is_true or number == longest:
            if number == 0:
                tried(partial(once, values))
            return values
        values = once(values)
    return values


def _fori_loop(lower: Any, upper: Any, body_fun: Call, init_val: Any) -> Any:
    what = "body of keras.ops.fori_loop"
    run, carried = unweighted(inside(body_fun), what), Results(f"the {what}", init_val)

    def once(i: Any, values: list[Tensor]) -> list[Tensor]:
        return carried.flattened(run(i, carried.packed(values)))

    values = as_tensors(structures.flatten(init_val))
    first, last = known(int, lower), known(int, upper)
    is_empty = first is not None and last is not None and first >= last
    if context().build is None or not (is_empty or _is_traced()):
        with unrecorded():
            return carried.packed(active().fori_loop(lower, upper, once, values))
    iteration = partial(once, ops.convert_to_tensor(lower), values)
    if is_empty:
        tried(iteration)
        return carried.packed(values)
    return carried.packed(iteration())


def _vectorized_map(function: Call, elements: Any) -> Any:
    if context().build is None:
        with unrecorded():
            return _originals["vectorized_map"](function, elements)
    tensors, outline = as_tensors(structures.flatten(elements)), structures.outline(elements)
    with unchecked():
        rows = structures.pack(outline, map(first_row, tensors))
        row, scope = tried(lambda: function(rows))
    _reject_assignments(
        scope,
        "a function of keras.ops.vectorized_map",
        "which runs for all rows at once: use treadle.for_each or keras.ops.map, which run it for "
        "one row after another",
    )
    return stacked(row, tensors[0].shape[0])


def _associative_scan(f: Call, elems: Any, reverse: bool = False, axis: int = 0) -> Any:
    run = partial(_originals["associative_scan"], f, elems, reverse=reverse, axis=axis)
    if context().build is None:
        return run()
    result, scope = tried(run)
    _reject_assignments(
        scope,
        "the function of keras.ops.associative_scan",
        "which runs for many pairs at once: use keras.ops.scan, which runs one after another",
    )
    return result


def _reject_assignments(scope: Scope, what: str, instead: str) -> None:
    """Reject variables that a function without an order of calls has assigned.

    Raises:
        StepError: There are some.
    """
    names = [context().path_of(v) for v in scope.assigned.values()]
    if names:
        raise StepError(f"{what} assigns {', '.join(names[:5])}, {instead}")


def _is_traced() -> bool:
    """Return whether a dry run has no values, so that it runs a body once."""
    return active().place() is not None


_REPLACEMENTS: dict[str, Call] = {
    "cond": _cond,
    "switch": _switch,
    "map": lambda f, xs: mapped_rows(f, xs, "keras.ops.map"),
    "scan": _scan,
    "while_loop": _while_loop,
    "fori_loop": _fori_loop,
    "vectorized_map": _vectorized_map,
    "associative_scan": _associative_scan,
}
_originals: dict[str, Call] = {}
_lock = threading.Lock()
_steps = 0  # how many steps run now, in all threads
_in_thread = threading.local()


@contextmanager
def carrying() -> Generator[None]:
    """Replace Keras' branches and loops in this context, in this thread."""
    _enter()
    _in_thread.depth = getattr(_in_thread, "depth", 0) + 1
    try:
        yield
    finally:
        _in_thread.depth -= 1
        _exit()


def _enter() -> None:
    global _steps
    with _lock:
        _steps += 1
        if _steps == 1:
            unordered = INTERNALS["unordered"]
            known = unordered.members if unordered.get() else ()
            for name, function in _REPLACEMENTS.items():
                if name in unordered.members and name not in known:
                    continue
                _originals[name] = getattr(core, name)
                setattr(core, name, _chosen(_originals[name], function))
            exports.cond = core.cond


def _exit() -> None:
    global _steps
    with _lock:
        _steps -= 1
        if _steps == 0:
            for name, original in _originals.items():
                setattr(core, name, original)
            exports.cond = core.cond


def _chosen(original: Call, replacement: Call) -> Call:
    """Return a function that is the replacement in steps, and the original elsewhere."""

    def choose(*args: Any, **kwargs: Any) -> Any:
        in_step = getattr(_in_thread, "depth", 0) and not in_symbolic_scope()
        return (replacement if in_step else original)(*args, **kwargs)

    return choose
