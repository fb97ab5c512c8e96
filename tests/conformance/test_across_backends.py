"""The same 50 steps from the same start on every backend, each in a process of its own.

A process writes what it computed where the others find it, and compares with what it finds there:
the last backend to run compares with all.
"""

import hashlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import keras
import pytest
import runs
from cases import CASES

import treadle
from treadle.testing import agree, load_trace, save_trace

STEPS = 50
BACKENDS = ("tensorflow", "jax", "torch")
STEADY = [name for name, case in CASES.items() if case.steady is not None]


@cache
def folder() -> Path:
    """Where traces lie: in the folder that is set, or in one for this code and checkout."""
    chosen = os.environ.get("TREADLE_CONFORMANCE_DIR")
    if chosen:
        return Path(chosen)
    root = Path(__file__).parents[2]
    checkout = hashlib.sha256(str(root).encode()).hexdigest()[:12]
    base = Path(tempfile.gettempdir()) / f"treadle-conformance-{checkout}"
    code = hashlib.sha256()
    sources = [*Path(treadle.__file__).parent.rglob("*.py"), *Path(__file__).parent.glob("*.py")]
    for source in sorted(sources):
        code.update(source.read_bytes())
    mine = base / code.hexdigest()[:12]
    for old in base.glob("*"):  # older code computes something else
        if old != mine:
            shutil.rmtree(old, ignore_errors=True)
    return mine


@pytest.mark.parametrize("name", runs.cases(STEADY))
def test_agrees_with_other_backends(name: str) -> None:
    trace = runs.from_same_start(name, STEPS)
    mine = keras.config.backend()
    folder().mkdir(parents=True, exist_ok=True)
    partial = folder() / f"partial-{os.getpid()}.safetensors"
    save_trace(trace, partial)
    partial.rename(folder() / f"{name}-{mine}.safetensors")
    others = [folder() / f"{name}-{backend}.safetensors" for backend in BACKENDS if backend != mine]
    found = [load_trace(file) for file in others if file.exists()]
    if not found:
        pytest.skip(f"no other backend has run yet: there is no other trace in {folder()}")
    for other in found:
        assert set(trace.state) == set(other.state)
        agree(trace, other, rtol=CASES[name].rtol, state=False)
