"""Replacing operations by their type, in graphs and in eager execution.

Types of operations and their arguments are public, as `tf.raw_ops`, and part of saved models. The
functions of TensorFlow that create an operation are many, and private.
"""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from inspect import signature
from threading import get_ident
from typing import Any

import tensorflow as tf

from .patches import INTERNALS

Replacement = Callable[..., Any]
"""Takes a function that runs the operation itself, and the operation's arguments by name. Returns
the tensor or tensors that the operation would return.
"""


class _Replaced:
    """The result of creating an operation that was replaced.

    TensorFlow records it on gradient tapes only if it has inputs, and the operations of the
    replacement are recorded already.
    """

    inputs = ()

    def __init__(self, found: Any) -> None:
        self.outputs = list(found) if isinstance(found, (list, tuple)) else [found]

    def __getattr__(self, attribute: str) -> Any:
        return lambda *_: None  # the values of its attributes, which are recorded too


@contextmanager
def replaced(replacements: Mapping[str, Replacement], required: bool = False) -> Generator[None]:
    """Replace operations in this context, in this thread.

    What a replacement creates is not replaced again in this context, but in those around it.

    Args:
        replacements: Replacements by types of operations.
        required: Raise an error if the installed version does not allow this.

    Raises:
        BackendError: It does not, and it is required.
    """
    within, thread = False, get_ident()
    # Not by `wrapped`, whose calls would add 40 % to each eager operation.
    create_op, execute_op = (
        INTERNALS[name].resolve() if required else INTERNALS[name].get()
        for name in ("create_op", "execute")
    )

    def stays(op: str) -> bool:
        return op not in replacements or within or get_ident() != thread

    def run(op: str, given: dict[str, Any]) -> Any:
        nonlocal within
        within = True
        try:
            return replacements[op](getattr(tf.raw_ops, op), **given)
        finally:
            within = False

    def create(graph: Any, op: str, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Without a definition, it is a copy of an operation, such as in `tf.vectorized_map`.
        if stays(op) or not kwargs.get("op_def"):
            return create_op(graph, op, inputs, *args, **kwargs)
        names, attributes = _arguments(op), kwargs["attrs"]
        given = dict(zip(names, inputs, strict=False))
        given |= {name: _value(attributes[name]) for name in names if name in attributes}
        return _Replaced(run(op, given))

    def execute(ctx: Any, op: str, name: Any, *args: Any) -> Any:
        if stays(op):
            return execute_op(ctx, op, name, *args)
        # Inputs, and then the names and values of attributes.
        count = next((i for i, arg in enumerate(args) if isinstance(arg, str)), len(args))
        given = dict(zip(_arguments(op), args[:count], strict=False))
        return run(op, given | dict(zip(args[count::2], args[count + 1 :: 2], strict=True)))

    with INTERNALS["create_op"].replaced(create), INTERNALS["execute"].replaced(execute):
        yield


def can_replace() -> bool:
    """Return whether the installed version allows to replace operations of graphs."""
    return INTERNALS["create_op"].get() is not None


@cache
def _arguments(op: str) -> tuple[str, ...]:
    """Return the names of an operation's arguments: its inputs, and then its attributes."""
    return tuple(signature(getattr(tf.raw_ops, op)).parameters)


def _value(attribute: Any) -> Any:
    """Return an attribute of a graph's operation: a type or a number."""
    kind = attribute.WhichOneof("value")
    found = getattr(attribute, kind)
    return tf.as_dtype(found) if kind == "type" else found
