"""Advice on how to make a run faster, for this machine and this task."""

import math
from pathlib import Path
from typing import Any

from ..core.options import precision_name

CPU = Path("/proc/cpuinfo")  # exists on Linux only; no advice is given elsewhere
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}
# Smallest kernel sizes, in elements, with a measured speedup from bfloat16: 1.2 to 1.9 times (see
# docs/precision.md).
CONVOLUTION, MATRIX = 2**14, 2**18


def on_precision(task: Any) -> str | None:
    """Return the advice to try mixed_bfloat16, or None if no speedup is expected."""
    import keras

    from ..backends.base import active
    from ..steps.state import State

    if precision_name() != "float32" or not computes_bfloat16():
        return None
    if not active().bfloat16_pays or "cpu" not in active().computes_on()["devices"]:
        return None
    convolutions = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
    for layer in State.discover(task).layers:
        kernel = getattr(layer, "kernel", None) if layer.built else None
        least = CONVOLUTION if isinstance(layer, convolutions) else MATRIX
        if kernel is not None and math.prod(kernel.shape) >= least:
            return (
                "this CPU has instructions for bfloat16: --precision mixed_bfloat16 is worth trying"
            )
    return None


def computes_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16."""
    try:
        lines = CPU.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not INSTRUCTIONS.isdisjoint(flags.split())
