"""Flags with which XLA compiles in about half of the time.

`scripts/test` sets them, except with `--all` for the tests of equal bits, of which optimizations
decide; processes whose results are compared within rounding, or only shown, need none.
"""

import os

# The newer emitters go through MLIR.
LESS_OPTIMIZED = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true "
    "--xla_cpu_use_fusion_emitters=false"
)


def less_optimized() -> dict[str, str]:
    """Return the environment variable with these flags, in addition to those that are set."""
    flags = os.environ.get("XLA_FLAGS", "")
    # Once: forks of processes with equal flags come from one server, which imports Keras once.
    return {"XLA_FLAGS": flags if LESS_OPTIMIZED in flags else f"{LESS_OPTIMIZED} {flags}".strip()}


def fully_optimized() -> str:
    """Return the flags that are set, without these."""
    return os.environ.get("XLA_FLAGS", "").replace(LESS_OPTIMIZED, "").strip()
