"""Benchmarks, which `scripts/bench` runs by name."""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any


def parser_of(name: str, description: str | None) -> ArgumentParser:
    """Return the parser of a benchmark's options; `--help` shows the description as it is."""
    return ArgumentParser(
        prog=f"scripts/bench {name}",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )


def in_process(name: str, backend: str, *options: str) -> Any:
    """Run `scripts/bench NAME --child OPTIONS` in a process; return the JSON of its last line.

    A backend is fixed when Keras is imported, so each needs a process.
    """
    environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "benchmarks", name, "--child", *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        told = f"{done.stdout}{done.stderr[-3000:]}"
        sys.exit(f"{name} {' '.join(options)} on {backend} failed:\n{told}")
    return json.loads(done.stdout.splitlines()[-1])
