"""Deterministic algorithms on accelerators: what frameworks read from the environment."""

import os
import sys

# https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS, _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_XLA_FLAG = "--xla_gpu_deterministic_ops=true"

_on = False


def is_deterministic() -> bool:
    """Return whether `treadle.setup(deterministic=True)` was called in this process."""
    return _on


def prepare_environment() -> bool:
    """Set what frameworks read when they start on a GPU, and return whether that came too late.

    It is too late for a framework that Keras has already started.
    """
    global _on
    _on = True
    os.environ.setdefault(_CUBLAS, _WORKSPACE)
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_FLAG in flags:
        return False
    os.environ["XLA_FLAGS"] = f"{flags} {_XLA_FLAG}".strip()
    return "keras" in sys.modules
