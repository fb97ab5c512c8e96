"""Flags with which XLA compiles in about half of the time.

`scripts/test` sets them without `--all`. With it, XLA optimizes fully, since optimizations decide
about every bit; processes whose results are compared within rounding, or only shown, need none.
"""

import os

# The newer emitters go through MLIR.
LESS_OPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)


def less_optimized() -> dict[str, str]:
    """Return the environment variable with these flags, in addition to those that are set."""
    return {"XLA_FLAGS": f"{LESS_OPTIMIZED} {os.environ.get('XLA_FLAGS', '')}".strip()}
