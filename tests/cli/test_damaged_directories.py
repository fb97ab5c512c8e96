"""Commands on damaged run directories; `scripts/fuzz-directories --cases N` is longer."""

import subprocess
import sys
from pathlib import Path

import pytest

SEED, CASES = 1, 10  # about 3 of each kind: commands that train, that evaluate, that only list


@pytest.mark.long
def test_damaged_directories_give_equal_results_or_one_sentence():
    """In a process of its own: it forks for each command, which threads do not survive."""
    command = [sys.executable, "-m", "tests.directories", "--workers", "1"]
    command += ["--cases", str(CASES), "--seed", str(SEED)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    again = f"one case again: scripts/fuzz-directories --seed {SEED} --case N"
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}\n{again}"
    assert f"{CASES} cases, 0 failed" in done.stdout
