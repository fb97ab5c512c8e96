"""Steps that a Keras model has itself: their backward pass, and the mode of their modules."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import keras
import torch

from ...core.internals import in_this_thread
from ...errors import StepError
from .patches import INTERNALS


@contextmanager
def recorded_backward(model: Any) -> Generator[None]:
    """Let `loss.backward()` compute gradients by an operation, which a captured step can repeat.

    The step's gradients are in `.grad`; at its end, `.grad` is what it was before.

    Args:
        model: The model. Its parameters are collected before the step assigns any.
    """
    leaves = [p for p in model.parameters() if p.requires_grad]
    before = [p.grad for p in leaves]
    # `zero_grad` must remove these before the backward pass. Otherwise gradients of the step before
    # would be added, which no checkpoint holds.
    zeros: dict[Any, Any] = {}
    marks: dict[int, Any] = {}
    for leaf in leaves:
        kind = leaf.dtype, leaf.device
        if kind not in zeros:
            zeros[kind] = torch.zeros((), dtype=leaf.dtype, device=leaf.device)
        leaf.grad = marks[id(leaf)] = zeros[kind].expand(leaf.shape)

    def backward(
        loss: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        wanted = leaves if inputs is None else [*inputs]
        graph: Any = {"retain_graph": retain_graph, "create_graph": create_graph}
        found: Any = torch.autograd.grad(loss, wanted, gradient, allow_unused=True, **graph)
        for parameter, new in zip(wanted, found, strict=True):
            if new is None:
                continue
            if parameter.grad is not None and parameter.grad is marks.get(id(parameter)):
                raise StepError(
                    "train_step calls loss.backward() before zero_grad(), so that gradients would "
                    "be summed over steps in `.grad`, which no checkpoint holds: call "
                    "self.zero_grad() first, without set_to_none=False, or sum them in variables "
                    "of the model"
                )
            parameter.grad = new if parameter.grad is None else parameter.grad + new

    try:
        with INTERNALS["backward"].replaced(in_this_thread(backward, torch.Tensor.backward)):
            yield
    finally:
        for parameter, gradient in zip(leaves, before, strict=True):
            parameter.grad = gradient


@contextmanager
def in_mode(model: Any, training: bool) -> Generator[None]:
    """Set the mode of the modules of a model, as `model.train()` does, and restore it."""
    changed = [module for module in model.modules() if module.training is not training]
    for module in changed:
        vars(module)["training"] = training
    try:
        yield
    finally:
        for module in changed:
            vars(module)["training"] = not training


def is_of_keras(model: Any, method: str) -> bool:
    """Return whether a model has a method of `keras.Model`, which its class does not override."""
    kind: Any = keras.Model
    return getattr(type(model), method) is getattr(kind, method)
