"""Runs a benchmark by name: `scripts/bench parity`."""

import sys
from importlib import import_module

NAMES = (
    "parity",
    "backends",
    "startup",
    "speed",
    "checkpoints",
    "reliability",
    "programs",
    "tuning",
    "remat",
    "against",
    "health",
    "single_steps",
    "evaluation",
    "reinforcement",
    "memory",
    "streams",
    "inductor",
    "accelerator",
    "logs",
    "processes",
    "exports",
)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in NAMES:
        sys.exit(f"usage: scripts/bench {{{','.join(NAMES)}}} [options]")
    import_module(f"benchmarks.{sys.argv[1]}").main(sys.argv[2:])
