"""Checkpoints of weights that several processes hold together: written and read in parts."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.forked import python
from tests.xla import less_optimized
from treadle.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.skipif(keras.config.backend() != "jax", reason="JAX alone splits weights"),
    pytest.mark.long,
]
PROGRAM = str(Path(__file__).parent / "on_split.py")
DEVICES = "--xla_force_host_platform_device_count=2"
CLOSE = 1e-5


def run(*runs: str, workers: int = 2, backend: str = "jax", restarts: int = 0) -> dict[str, Any]:
    """Do runs in so many processes; in one with one device without a launcher."""
    how = ["--workers", str(workers), "--restarts", str(restarts)]
    launch = ["-m", "treadle", "launch", *how, "--"] if workers > 1 else []
    flags = less_optimized().get("XLA_FLAGS", "")  # bits are compared between runs that have it too
    flags += f" {DEVICES}" if workers > 1 else ""
    done = subprocess.run(
        [python(), *launch, PROGRAM, *runs],
        env={
            **os.environ,
            "KERAS_BACKEND": backend,
            "PYTHONWARNINGS": "always::UserWarning",
            "XLA_FLAGS": flags,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))
    return {
        name.replace(f"{Path(name.rsplit(':', 2)[0]).parent}/", ""): x for name, x in found.items()
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Runs of two processes with two devices each."""
    folder = tmp_path_factory.mktemp("split")
    names = ("whole:1x4:18", "moved:2x2t:6", "moved:1x4:12", "moved:4x1:15", "moved:2x2:18")
    return folder, run(*(f"{folder}/{name}" for name in names))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def checkpoints(directory: Path) -> list[Path]:
    """Their folders; one that was due while another was written is missing."""
    return sorted((directory / "checkpoints").glob("step*"))


def test_each_process_writes_its_parts_and_no_other_file(saved: Any) -> None:
    folder, found = saved
    place = checkpoints(folder / "whole")[-1]
    parts = [f"part-{rank:05d}.safetensors" for rank in range(2)]
    assert files(place) == ["arrays.safetensors", "manifest.json", "manifest.sha256", *parts]
    record = json.loads((place / "manifest.json").read_text())
    kernel = record["state"]["optimizer/momentums/model/layers/0/kernel"]
    assert (kernel["shape"], kernel["starts"]) == ([6, 8], [[0], [0, 2, 4, 6]])
    assert [owner for owner, _ in kernel["parts"]] == [0, 0, 1, 1]
    assert record["state"]["model/layers/1/gamma"]["file"] == "arrays"
    assert not any(name.startswith(".partial") for name in files(place.parent))
    assert found["whole:1x4:18"]["steps"][-1] == 18


def test_a_run_moves_from_mesh_to_mesh(saved: Any) -> None:
    """From a mesh on which processes hold the same parts to others, also to whole weights."""
    _, found = saved
    moved = found["moved:2x2:18"]
    assert np.allclose(moved["losses"], found["whole:1x4:18"]["losses"], rtol=0, atol=CLOSE)
    [warning] = [text for text in moved["warnings"] if "bit-for-bit" in text]
    assert "the batches are the same" in warning


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_one_device_of_any_backend_resumes_from_parts(
    saved: Any, tmp_path: Path, backend: str
) -> None:
    folder, found = saved
    shutil.copytree(folder / "whole", tmp_path / "run")
    first, *others = checkpoints(tmp_path / "run")[1:]
    for later in others:
        shutil.rmtree(later)
    read = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert read is not None and read.path == first and read.progress.step < 18
    losses = run(f"{tmp_path}/run:1:24", workers=1, backend=backend)["run:1:24"]["losses"]
    expected = found["whole:1x4:18"]["losses"]
    assert len(losses) == 24
    assert np.allclose(losses[:18], expected, rtol=0, atol=CLOSE)


def test_a_damaged_part_makes_all_processes_use_the_checkpoint_before(
    saved: Any, tmp_path: Path
) -> None:
    folder, found = saved
    shutil.copytree(folder / "whole", tmp_path / "run")
    part = checkpoints(tmp_path / "run")[-1] / "part-00001.safetensors"
    part.write_bytes(part.read_bytes()[:-1])
    resumed = run(f"{tmp_path}/run:1x4:21")["run:1x4:21"]
    [warning] = [text for text in resumed["warnings"] if "skipped checkpoint" in text]
    assert f"{part} is damaged: it has " in warning
    assert resumed["losses"][:18] == found["whole:1x4:18"]["losses"]


def test_a_process_that_is_killed_while_it_writes_leaves_the_checkpoint_before(
    saved: Any, tmp_path: Path
) -> None:
    """Process 1 in the middle of a file, and process 0 before it renames all.

    All are started again each time, and go on bit for bit.
    """
    _, found = saved
    faults = ("1-parts@6", "0-rename@12")
    run_again = run(f"{tmp_path}/killed:1x4:18", *faults, restarts=len(faults))["killed:1x4:18"]
    starts = [json.loads(line) for line in (tmp_path / "killed.starts").read_text().splitlines()]
    assert len(starts) == 1 + len(faults) and starts[0] == {"steps": [], "read": None, "left": []}
    for fault, start in zip(faults, starts[1:], strict=True):
        killed_at = int(fault.partition("@")[2])
        assert start["read"] == start["steps"][-1] < killed_at
        assert all(name.startswith(".partial-step-") for name in start["left"]) and start["left"]
    whole = found["whole:1x4:18"]
    assert run_again["losses"] == whole["losses"] and run_again["ends"] == whole["ends"]
    assert [text for text in run_again["warnings"] if "bit-for-bit" in text] == []
    assert not [name for name in files(tmp_path / "killed" / "checkpoints") if "partial" in name]
