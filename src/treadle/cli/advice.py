"""What would make a run faster, in one sentence, where it is true of this machine and this task."""

import math
from pathlib import Path
from typing import Any

from ..core.options import precision_name

CPU = Path("/proc/cpuinfo")  # elsewhere than on Linux nothing is said
INSTRUCTIONS = {"avx512_bf16", "amx_bf16"}
# Elements of a kernel from which bfloat16 was seen to pay: 1.2 to 1.9 times, docs/precision.md.
CONVOLUTION, MATRIX = 2**14, 2**18


def on_precision(task: Any) -> str | None:
    """Return the advice to try mixed_bfloat16, or None where it would not pay."""
    import keras

    from ..backends.base import active
    from ..steps.state import State

    if precision_name() != "float32" or not active().bfloat16_pays() or not computes_bfloat16():
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
    """Say whether the processor has instructions for bfloat16."""
    try:
        lines = CPU.read_text().splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not INSTRUCTIONS.isdisjoint(flags.split())
