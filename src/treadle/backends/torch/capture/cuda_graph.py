"""Replaying a compiled part of a step as a CUDA graph.

A CUDA graph launches all kernels of a part at once. It reads and writes fixed addresses: variables
are used where they are, other inputs are copied to tensors of the graph, and outputs, as well as
inputs that the part changes, are copied from them. A part draws no random numbers and reads no
numbers from the device (`split` leaves both outside), so it can be a graph.

The first call runs the function, which initializes libraries and kernels. The second call captures
it, which runs nothing, and then replays the graph. Both happen within the proof of the step, which
compares replays with the first call bit for bit, and with the uncompiled step. If the memory of a
variable is replaced later, the part is captured again.

This was tested with a stand-in for the graph, and not on a GPU.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from ...plans import RefusedError
from ..patches import get_device
from .trials import in_one_line

CUDA_GRAPH: Final = "cuda-graph"

KIND = "cuda"
"""The kind of device that has such graphs."""


def captured_on_device(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Any, Any]:
    """Capture a function as a graph, without running it.

    Returns:
        The graph, and the outputs that its `replay` overwrites.
    """
    graph = torch.cuda.CUDAGraph()
    # If it fails, `torch.cuda.graph` would leave its own stream as the current one, in which later
    # operations would not wait for those of other threads.
    with (
        torch.cuda.stream(torch.cuda.current_stream(get_device())),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),  # other threads copy batches
    ):
        outputs = function(*inputs)
    return graph, outputs


class GraphReplay:
    """Calls a compiled function, and replays it as a graph from the second call on.

    Args:
        function: The compiled function, which returns a tuple of tensors.
        are_state: For each input, whether it is a variable.
        are_changed: For each input, whether the function changes it in place.

    Attributes:
        refusal: Why it is not replayed, as a clause; empty if it is, or was not called twice.
    """

    def __init__(
        self, function: Callable[..., Any], are_state: Sequence[bool], are_changed: Sequence[bool]
    ) -> None:
        self._function = function
        self._state = [i for i, is_state in enumerate(are_state) if is_state]
        self._copied = [i for i, is_state in enumerate(are_state) if not is_state]
        self._copied_back = [i for i in self._copied if are_changed[i]]
        self._is_warm = False
        self._graph: Any = None
        self._static: list[Any] = []
        self._outputs: Any = None
        self._pointers: list[int] = []
        self.refusal = ""

    @property
    def replays(self) -> bool:
        """Whether a graph was captured."""
        return self._graph is not None

    def give_up(self, reason: str) -> None:
        """Call the compiled function from now on."""
        self.refusal = reason
        self._graph = self._outputs = None
        self._static = []

    def __call__(self, *inputs: Any) -> Any:
        """Return the outputs, in memory of their own."""
        if self.refusal:
            return self._function(*inputs)
        if not self._is_warm:
            self._is_warm = True
            return self._function(*inputs)
        # Tensors are compared by address: a variable may get other memory and stay the same object.
        pointers = [inputs[i].data_ptr() for i in self._state]
        if not self.replays or pointers != self._pointers:
            try:
                self._capture(inputs)
            except Exception as error:  # of many types; nothing has run yet
                self.give_up(in_one_line(error))
                return self._function(*inputs)
            self._pointers = pointers
        for i in self._copied:
            static = self._static[i]
            if static.shape != inputs[i].shape:  # `copy_` would repeat rows
                raise ValueError(f"expected an input of shape {static.shape}: {inputs[i].shape}")
            _distinct(static).copy_(_distinct(inputs[i]))
        self._graph.replay()
        for i in self._copied_back:
            inputs[i].copy_(self._static[i])
        return tuple([x.clone() for x in self._outputs])

    def _capture(self, inputs: Sequence[Any]) -> None:
        self._graph = self._outputs = None  # frees its memory first
        self._static = list(inputs)
        for i in self._copied:
            x = inputs[i]
            self._static[i] = like(x)
            _distinct(self._static[i]).copy_(_distinct(x))
        self._graph, self._outputs = captured_on_device(self._function, self._static)


def like(x: Any) -> Any:
    """Return a tensor of the same form, not filled."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


def check_devices(tensors: Sequence[Any]) -> None:
    """Check that the inputs and outputs of a part allow to replay it as a graph.

    Raises:
        RefusedError: A tensor is on another kind of device, where a graph would read it only while
            it is captured.
    """
    for x in tensors:
        if x.device.type != KIND:
            raise RefusedError(f"it computes with a tensor on the {x.device.type}")


def _distinct(x: Any) -> Any:
    """Return a view of each element of a tensor once: an expanded tensor repeats elements."""
    if 0 not in x.stride():
        return x
    shape = [1 if stride == 0 else size for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(shape, x.stride())
