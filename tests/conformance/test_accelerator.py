"""What only an accelerator can show, each run in a process of its own.

`scripts/test --accelerator` runs these on a GPU; they are skipped elsewhere. The program that they
run is `accelerated_run.py`, which a test here runs on a CPU as well.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import keras
import pytest
from executions import once

from tests.forked import python

PROGRAM = Path(__file__).with_name("accelerated_run.py")
BACKEND = keras.config.backend()


def run(directory: Path, epochs: int, *words: str) -> dict[str, Any]:
    """Run the program, and return what it prints; an empty dict if it was stopped."""
    done = subprocess.run(
        [python(), str(PROGRAM), str(directory), str(epochs), *words],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TREADLE_COMPILE_CACHE": "off"},
    )
    lines = done.stdout.splitlines()
    assert lines or (done.returncode == 0 and "stop" in words), done.stderr
    return json.loads(lines[-1]) if lines else {}


@pytest.mark.long
@once
def test_the_program_of_these_tests_runs_and_resumes(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 1)
    run(tmp_path / "stopped", 1, "stop")
    assert run(tmp_path / "stopped", 1)["bits"] == whole["bits"]


@pytest.mark.usefixtures("accelerator")
def test_deterministic_runs_give_the_same_bits(tmp_path: Path) -> None:
    first, second = (run(tmp_path / name, 3) for name in "ab")
    assert "repeats" not in first["plan"]
    assert first["bits"] == second["bits"]


@pytest.mark.usefixtures("accelerator")
def test_the_plan_says_that_others_may_differ_in_rounding(tmp_path: Path) -> None:
    plan = run(tmp_path, 1, "nondeterministic")["plan"]
    assert plan.endswith("repeats up to the order of sums")


@pytest.mark.usefixtures("accelerator")
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", 2)
    run(tmp_path / "stopped", 2, "stop")
    assert run(tmp_path / "stopped", 2)["bits"] == whole["bits"]


@pytest.mark.usefixtures("accelerator")
@pytest.mark.skipif(BACKEND != "torch", reason="other frameworks assert nothing on the device")
def test_a_device_side_assert_is_explained_and_the_run_resumes(tmp_path: Path) -> None:
    found = run(tmp_path, 1, "wrong")
    assert "device-side assert triggered" in found["error"]
    assert any("This process has lost its device" in note for note in found["notes"])
    assert any("the newest checkpoint is that of step" in note for note in found["notes"])
    assert "bits" in run(tmp_path, 1)


@pytest.mark.usefixtures("accelerator")
def test_memory_on_the_device_does_not_grow(tmp_path: Path) -> None:
    used = run(tmp_path, 12, "memory")["bytes"]
    assert used[2] > 0
    assert max(used[6:]) <= 1.05 * used[2]
