"""Copies of streamed batches to a CUDA device, which run while the steps before them run.

Copies from pinned memory run next to kernels if they are in another stream. Three rules make that
safe:

- The host's memory: PyTorch's allocator of pinned memory notes each copy, and does not hand out a
  block again before its copies have ended. So pinned tensors need not be kept.
- The order: the stream of the steps waits for an event that is recorded behind the copies.
- The device's memory belongs to the stream of the copies. So each tensor is recorded on the stream
  of the steps too, or the next copies could overwrite it while a step still reads it.

Each thread has a current device, and on each device a current stream. A thread starts with device 0
and its default streams, so the stream of the steps is that of the thread that calls the executor,
also if they run in the background.

This was tested with a stand-in for the device, and not on a GPU.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeVar

import keras
import numpy as np
import torch

from ....core import structures
from ....core.float64 import CONVERTED
from ..patches import get_device
from .trials import device

Made = TypeVar("Made")

SAME_TYPE = frozenset(
    np.dtype(name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32")
)
"""The types of arrays that Keras converts to tensors of the same type."""


class CopyStream:
    """The stream of copies to a device, and the operations of PyTorch that they need.

    Args:
        index: The number of the CUDA device.
    """

    def __init__(self, index: int) -> None:
        self._device = torch.device("cuda", index)
        self._stream: Any = torch.cuda.Stream(self._device)

    def active(self) -> AbstractContextManager[Any]:
        """Return a context whose operations are in the stream of the copies."""
        return torch.cuda.stream(self._stream)

    def copied(self, array: Any) -> Any:
        """Start to copy an array to the device."""
        pinned = torch.from_numpy(np.require(array, requirements=["C", "W"])).pin_memory()
        return pinned.to(self._device, non_blocking=True)

    def event(self) -> Any:
        """Return an event behind the copies that were started."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def wait(self, event: Any, tensors: list[Any]) -> None:
        """Let the calling thread's stream on the device wait, and use the tensors after it."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)


_streams = cache(CopyStream)


def copy_stream() -> CopyStream:
    """Return the stream of copies to the device of Keras' tensors."""
    index: Any = torch.device(get_device()).index
    return _streams(torch.cuda.current_device() if index is None else index)


def in_this_stream(function: Callable[[], Made]) -> Callable[[], Made]:
    """Return a function to call in another thread, which uses the stream of this thread there."""
    if not on_accelerator():
        return function
    stream: Any = torch.cuda.current_stream(get_device())

    def run() -> Made:
        with torch.cuda.stream(stream):  # its device becomes the current one too
            return function()

    return run


def on_accelerator() -> bool:
    """Return whether batches are copied to the device while other steps run."""
    return device() == "cuda"


def start_copies(arrays: Any, to_device: Callable[[Any], Any]) -> tuple[Any, Callable[[], None]]:
    """Start to copy a structure of arrays.

    Args:
        arrays: The arrays.
        to_device: A function that converts an array of another type to a tensor.

    Returns:
        The tensors, and a function to call in the thread that uses them, before it does.
    """
    stream = copy_stream()
    tensors: list[Any] = []

    def copied(array: Any) -> Any:
        if array.dtype in CONVERTED:
            array = array.astype(keras.config.floatx())
        tensors.append(stream.copied(array) if array.dtype in SAME_TYPE else to_device(array))
        return tensors[-1]

    with stream.active():
        held = structures.mapped(copied, arrays)
        event = stream.event()
    return held, lambda: stream.wait(event, tensors)
