"""Runs a benchmark by name: `scripts/bench parity`."""

import sys
from importlib import import_module

# The module of each benchmark; it has a function of that name, or `main`.
MODULES = {
    "parity": "parity",
    "backends": "parity",
    "startup": "startup",
    "fitting": "fitting",
    "speed": "speed",
    "checkpoints": "against",
    "reliability": "reliability",
    "programs": "programs",
    "tuning": "parity",
    "remat": "memory",
    "against": "against",
    "health": "against",
    "single_steps": "calls",
    "evaluation": "calls",
    "reinforcement": "reinforcement",
    "memory": "memory",
    "streams": "streams",
    "inductor": "against",
    "accelerator": "accelerator",
    "logs": "memory",
    "opening": "memory",
    "processes": "processes",
    "scale": "scale",
    "messages": "messages",
    "forms": "forms",
    "exports": "exports",
    "convolutions": "convolutions",
}


def run(name: str, arguments: list[str]) -> None:
    """Run a benchmark with its options."""
    module = import_module(f"benchmarks.{MODULES[name]}")
    getattr(module, "main" if name == MODULES[name] else name)(arguments)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        sys.exit(f"usage: scripts/bench {{{','.join(MODULES)}}} [options]")
    run(sys.argv[1], sys.argv[2:])
