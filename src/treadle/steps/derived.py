"""Derived state: attributes that objects compute from variables with their `finalize_state` method.

`keras.layers.Normalization` keeps its mean and variance as tensors next to its variables, and an
object of your own may do the same. Such attributes are neither variables nor constants:

- A step computes them from its variables, at its beginning, and again in each call of a layer whose
  variables it changes. So a compiled step has the right values, whoever assigned the variables.
- Outside of steps, they are computed again when Treadle assigns a variable that they depend on.
"""

import functools
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import ref

import keras
from keras import ops

from ..backends.scope import DirectScope
from ..backends.types import Variable
from ..core.keras_lists import layers_in
from ..errors import StepError

_ABSENT: Final = object()
_Kept = list[tuple[dict[str, Any], str, Any]]  # attributes of an object, a name, the earlier value


@dataclass(frozen=True)
class _Record:
    """An object with derived state, the attributes that are it, and what it depends on."""

    thing: Callable[[], Any]
    names: frozenset[str]
    reads: tuple[Variable, ...]


# By id, since a dataclass with `__eq__` has no hash.
_records: dict[int, _Record] = {}
_changing: dict[int, tuple[Callable[[], Any], set[str]]] = {}


def is_derived(thing: Any) -> bool:
    """Return whether an object has derived state, which is computed when it is first met.

    Raises:
        StepError: It has no `__dict__`, in which steps replace its attributes.
    """
    if not callable(getattr(thing, "finalize_state", None)) or isinstance(thing, type):
        return False
    if not hasattr(thing, "__dict__"):
        raise StepError(
            f"{type(thing).__name__} has finalize_state(), and keeps its attributes in __slots__, "
            "where a step cannot replace them: define the class without slots"
        )
    if id(thing) not in _records:
        _compute(thing)
    return id(thing) in _records


def excluded(holder: Any) -> Collection[str]:
    """Return the attributes of an object that are derived state, or that steps replace."""
    key = id(holder)
    derived = _records[key].names if key in _records else ()
    return (*derived, *_changing[key][1]) if key in _changing else derived


def exclude(holder: Any, name: str) -> None:
    """Do not treat an attribute as a constant, because steps replace it themselves."""
    key = id(holder)
    if key not in _changing:
        _changing[key] = ref(holder, lambda _: _changing.pop(key, None)), set()
    _changing[key][1].add(name)


def assigned(variables: Iterable[Variable]) -> None:
    """Compute derived state again after an assignment of variables outside of a step."""
    if _records:
        known = {id(variable) for variable in variables}
        for record in list(_records.values()):
            if any(id(variable) in known for variable in record.reads):
                _compute(record.thing())


def assigned_in(model: Any) -> None:
    """Compute the derived state of a model or a list of variables, and what depends on these."""
    for layer in layers_in(model) if isinstance(model, keras.Layer) else ():
        is_derived(layer)
    assigned(model.variables if hasattr(model, "variables") else model)


def dependent(things: Mapping[str, Any], changed: Iterable[Variable]) -> list[Any]:
    """Return the objects whose derived state depends on variables that change."""
    ids = {id(variable) for variable in changed}
    return [x for x in things.values() if any(id(v) in ids for v in _records[id(x)].reads)]


def deriving(
    function: Callable[..., Any], things: Mapping[str, Any], changing: Iterable[Any]
) -> Callable[..., Any]:
    """Return a function that runs with derived state computed from the current variables.

    Afterwards, the attributes are what they were before: inside of a compiled step, they are
    tensors without values.

    Args:
        function: A step.
        things: The objects with derived state, by path.
        changing: Those whose variables the step changes. Layers compute it again in each call.
    """
    if not things:
        return function
    again = {id(thing) for thing in changing}

    @functools.wraps(function)
    def run(*inputs: Any) -> Any:
        with _restoring() as kept:
            for path, thing in things.items():
                kept += _traced(path, thing)
                if id(thing) in again and callable(getattr(thing, "call", None)):
                    kept.append((vars(thing), "call", vars(thing).get("call", _ABSENT)))
                    vars(thing)["call"] = _with_current(path, thing)
            return function(*inputs)

    return run


def _with_current(path: str, layer: Any) -> Callable[..., Any]:
    """Return `call` of a layer, which computes the derived state first."""
    original = layer.call

    @functools.wraps(original)
    def call(*inputs: Any, **named: Any) -> Any:
        with _restoring() as kept:
            kept += _traced(path, layer)
            return original(*inputs, **named)

    return call


@contextmanager
def _restoring() -> Generator[_Kept]:
    """Give attributes their earlier values at the end."""
    kept: _Kept = []
    try:
        yield kept
    finally:
        for held, name, value in reversed(kept):
            if value is _ABSENT:
                held.pop(name, None)
            else:
                held[name] = value


def _traced(path: str, thing: Any) -> _Kept:
    """Compute derived state in a step, perhaps while it is traced; return the earlier values.

    Raises:
        StepError: The method fails, for example because it needs values of tensors.
    """
    before = dict(vars(thing))
    try:
        thing.finalize_state()
    except Exception as error:
        vars(thing).update(before)
        raise StepError(
            f"{path or 'the task'}.finalize_state() ({type(thing).__name__}) failed in a step with "
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}. It must "
            "compute from variables with keras.ops, since it is compiled with the step"
        ) from error
    return _changed(thing, before)


def _changed(thing: Any, before: Mapping[str, Any]) -> _Kept:
    """Return the attributes that changed, whose tensors then carry no gradient."""
    held, kept = vars(thing), _Kept()
    for name, value in list(held.items()):
        if before.get(name, _ABSENT) is not value:
            kept.append((held, name, before.get(name, _ABSENT)))
            if ops.is_tensor(value):
                held[name] = ops.stop_gradient(value)
    return kept


def _compute(thing: Any) -> None:
    """Compute the derived state of an object outside of steps, and record what it depends on.

    A method that reads no variable is not called again, and what it changed is restored: it may
    end an adaptation (`Discretization`) or fill a table. One that fails before the object is
    built is called again later.
    """
    if thing is None or not list(getattr(thing, "variables", (None,))):
        return
    before = dict(vars(thing))
    with _restoring() as kept:
        try:
            with DirectScope() as scope:
                thing.finalize_state()
        except Exception:
            kept += _changed(thing, before)
            if getattr(thing, "built", False):
                raise
            return
        changed = _changed(thing, before)
        if not scope.foreign:
            kept += changed
            return
    key, earlier = id(thing), _records.get(id(thing))
    names = {name for _, name, _ in changed} | (earlier.names if earlier else frozenset())
    thing_of = earlier.thing if earlier else ref(thing, lambda _: _records.pop(key, None))
    _records[key] = _Record(thing_of, frozenset(names), tuple(scope.foreign.values()))
