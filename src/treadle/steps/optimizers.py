"""Building optimizers with the union of the variables that a task's steps apply them to."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import keras

from ..backends.base import active
from ..backends.types import Variable
from ..core.keras_internals import multi_optimizers
from ..errors import StateError, listed
from .state import State


@dataclass(frozen=True)
class _Built:
    """The changes that `build` made to the attributes of an optimizer.

    Attributes:
        replaced: The old values of the attributes that it replaced.
        made: The names of the attributes that it created.
        items: The items or keys that it added, by the name of the list or dict.
        parts: The optimizers inside of it that were built by the same call.
    """

    replaced: dict[str, Any]
    made: list[str]
    items: dict[str, list[Any]]
    parts: list[Any]


_built: WeakKeyDictionary[Any, _Built] = WeakKeyDictionary()
"""The optimizers that were built by Treadle."""


def build_optimizers(
    task: Any, applied: Iterable[tuple[Any, Sequence[Variable]]], step_name: str
) -> bool:
    """Build each optimizer with all variables that it is applied to.

    If Treadle built an optimizer with fewer variables before, it is built again with all of them.
    Its iterations and existing slots keep their values, so the result is the same as if it had been
    built with all variables from the start.

    Args:
        task: The task that holds the optimizers.
        applied: Pairs of an optimizer and the variables of one call of its `apply`, in the order of
            the calls.
        step_name: The name of the step, for messages.

    Returns:
        Whether any optimizer was built.

    Raises:
        StateError: An optimizer was not built by Treadle, and lacks some of the variables.
    """
    optimizers: dict[int, Any] = {}
    wanted: dict[int, dict[int, Variable]] = {}
    for optimizer, variables in applied:
        optimizers[id(optimizer)] = optimizer
        wanted.setdefault(id(optimizer), {}).update({id(v): v for v in variables})
    changed = False
    for key, optimizer in optimizers.items():
        # Before Keras 3.12, a LossScaleOptimizer keeps no list of its own.
        lists = [getattr(optimizer, "inner_optimizer", optimizer), optimizer]
        known = {id(v): v for x in lists if optimizer.built for v in x._trainable_variables}
        missing = [v for i, v in wanted[key].items() if i not in known]
        if not missing:
            continue
        if optimizer.built:
            _extend(task, optimizer, list(known.values()), missing, step_name)
        else:
            _build(task, optimizer, missing)
        changed = True
    return changed


def build_as_saved(task: Any, arrays: Mapping[str, Any]) -> bool:
    """Build optimizers also with the variables for which a checkpoint holds slots.

    A run may have trained a layer and frozen it again, so that its step no longer applies the
    optimizer to all variables of which it holds slots.

    Args:
        task: The task that holds the optimizers.
        arrays: The values in the checkpoint, by path.

    Returns:
        Whether any optimizer was built.
    """
    state = State.discover(task)
    applied: list[tuple[Any, list[Variable]]] = []
    for path, optimizer in state.all_optimizers.items():
        unknown = [p for p in arrays if p.startswith(f"{path}/") and p not in state.variables]
        # After the optimizer's path follow the name of the slot and the path of the variable.
        owners = [slot.removeprefix(f"{path}/").partition("/")[2] for slot in unknown]
        variables = [state.variables[p] for p in dict.fromkeys(owners) if p in state.variables]
        if variables and optimizer in _built:
            applied.append((optimizer, variables))
    return build_optimizers(task, applied, "train_step")


def _build(task: Any, optimizer: Any, variables: list[Variable]) -> None:
    """Build an optimizer, and record the changes so that `_unbuild` can undo them."""
    known = State.discover(task).all_optimizers
    path = next((p for p, x in known.items() if x is optimizer), "\0")
    inside = [x for p, x in known.items() if p.startswith(f"{path}/") and not x.built]
    before = [(x, _kept(x)) for x in (optimizer, *inside)]
    with keras.name_scope(optimizer.name):
        optimizer.build(variables)
    parts = [x for x in inside if x.built]
    for x, attributes in before:
        if x.built:
            _built[x] = _changes(x, attributes, parts if x is optimizer else [])


def _kept(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes, with copies of lists and dicts."""
    return {
        name: list(value) if isinstance(value, (list, dict)) else value
        for name, value in _attributes(optimizer).items()
    }


def _changes(optimizer: Any, before: Mapping[str, Any], parts: list[Any]) -> _Built:
    """Return how an optimizer differs from its earlier attributes."""
    replaced: dict[str, Any] = {}
    items: dict[str, list[Any]] = {}
    for name, value in _attributes(optimizer).items():
        if name in before and isinstance(value, (list, dict)):
            known = {id(item) for item in before[name]}
            items[name] = [item for item in value if id(item) not in known]
        elif name in before and value is not before[name]:
            replaced[name] = before[name]
    made = [name for name in _attributes(optimizer) if name not in before]
    return _Built(replaced, made, items, parts)


def _unbuild(optimizer: Any) -> None:
    """Undo what `_build` did; later changes of other attributes, such as `clipnorm`, are kept."""
    done = _built[optimizer]
    for part in done.parts:
        _unbuild(part)
    for name in done.made:
        delattr(optimizer, name)
    for name, value in done.replaced.items():
        setattr(optimizer, name, value)
    attributes = _attributes(optimizer)
    for name, items in done.items.items():
        added = {id(item) for item in items}
        if isinstance(attributes[name], dict):
            for key in [key for key in attributes[name] if id(key) in added]:
                del attributes[name][key]
        else:  # in place, because Keras' tracker holds a reference to the list
            attributes[name][:] = [x for x in attributes[name] if id(x) not in added]


def _attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes without TensorFlow's tracking, which updates itself."""
    return {k: v for k, v in vars(optimizer).items() if not k.startswith("_self_")}


def _extend(
    task: Any, optimizer: Any, known: list[Variable], new: list[Variable], step_name: str
) -> None:
    """Build an optimizer again with more variables; its existing slots keep their values.

    Raises:
        StateError: The optimizer was not built by Treadle, or its slots cannot be matched to
            variables.
    """
    state, backend = State.discover(task), active()
    path = next((p for p, x in state.all_optimizers.items() if x is optimizer), "")
    parts = _built[optimizer].parts if optimizer in _built else []
    own = {id(v) for x in (optimizer, *parts) for v in x.variables}
    before = {p: backend.read(v) for p, v in state.variables.items() if id(v) in own}
    unnamed = any(p.startswith(f"{path}/variables/") for p in before)
    several = isinstance(optimizer, multi_optimizers())
    if not path or unnamed or several or optimizer not in _built:
        paths = listed([state.path_of(v) for v in new], 5)
        raise StateError(
            f"{step_name} applies the optimizer {path or repr(optimizer.name)} "
            f"({type(optimizer).__name__}) to {paths}, but it was built with {len(known)} "
            f"other variables before. Build it with all variables that it trains: call "
            f"{path or 'optimizer'}.build([…]) in the task's __init__"
            + ("" if known else ", where the model is built, as by a keras.Input")
        )
    _unbuild(optimizer)
    _build(task, optimizer, [*known, *new])
    after = State.discover(task)
    for slot, value in before.items():
        backend.write(after.variables[slot], value)
    for x in (optimizer, *parts):
        if x.use_ema:  # the average of a variable that was not updated yet is its value
            averages = zip(x._trainable_variables, x._model_variables_moving_average, strict=True)
            for variable, average in averages:
                if average is not None and any(variable is other for other in new):
                    backend.write(average, backend.read(variable))
