"""Deterministic algorithms on accelerators: what frameworks read from the environment."""

import os
import sys

# https://docs.nvidia.com/cuda/cublas/#results-reproducibility
_CUBLAS, _WORKSPACE = "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
_XLA_FLAG = "--xla_gpu_deterministic_ops=true"

_on = _late = False


def is_deterministic() -> bool:
    """Return whether `treadle.setup(deterministic=True)` succeeded in this process."""
    return _on


def switched_on() -> None:
    """Note that the framework uses deterministic algorithms."""
    global _on
    _on = True


def prepare_environment() -> bool:
    """Set what frameworks read when they start on a GPU, and return whether that came too late.

    It is too late for a framework that has already started.
    """
    global _late
    os.environ.setdefault(_CUBLAS, _WORKSPACE)
    flags = os.environ.get("XLA_FLAGS", "")
    if _XLA_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_XLA_FLAG}".strip()
        _late = "keras" in sys.modules or "jax" in sys.modules
    return _late
