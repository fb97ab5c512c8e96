"""Sources of which each process reads its own share: what is read, resumed, moved and refused.

That the results are those of one process that reads the same batches is tested in `test_processes`.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import keras
import pytest

from tests.forked import python
from treadle.doctor.recorded import Recorded
from treadle.errors import DirectoryError

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        keras.config.backend() != "torch", reason="test_processes has a test on each backend"
    ),
]
PROGRAM = str(Path(__file__).parent / "on_shards.py")
OF_BOTH = {
    "other-forms": (
        "the batches of process 1 have the form ['array', '<f4', [0, 4]], and those of process 0 "
        "['array', '<f4', [0, 3]]: all shares need the same arrays, with equal shapes after the "
        "first axis, and equal dtypes"
    ),
    "of-other-keys": (
        "a batch is a dict: in a sharded source, batches consist of dicts with strings as keys, "
        "lists, tuples and dataclasses, which hold the arrays"
    ),
    "without-rows": "a share has a batch without examples: leave it out",
}
OF_PROCESS_1 = {
    "without-axis": (
        "DataError: the second array of a batch has the shape (), but the batch has 2 examples: in "
        "a sharded source, all arrays need the examples on their first axis"
    ),
    "empty": "DataError: the source gave no batch in epoch 1: is it empty or exhausted?",
    "failing": "OSError: the disk is gone",
}


def run(*runs: str, workers: int = 2) -> dict[str, Any]:
    launch = ["-m", "treadle", "launch", "--workers", str(workers), "--"] if workers > 1 else []
    done = subprocess.run(
        [python(), *launch, PROGRAM, *runs],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("sharded")
    names = [f"{folder}/{name}" for name in ("whole:21", "cut:5", "cut:9", "cut:16", "cut:21")]
    names += [f"{folder}/{name}" for name in ("limited:11", "limited-cut:5", "limited-cut:11")]
    return folder, run(*names, *OF_BOTH, *OF_PROCESS_1)


def test_each_process_reads_its_share_only(found: Any) -> None:
    _, results = found
    whole = results["whole:21"]
    first, second = map(set, whole["read"])
    assert len(first) >= 21 and 4 * 3 <= len(second) <= 4 * 4 and not first & second
    # Epochs of six batches of 8, 8, 8, 5, 4 and 2 rows: each row of both shares, once.
    assert whole["examples"] == 3 * 35 + 24
    assert "sharded over 2 processes (inexact on another number of processes)" in whole["plan"]


def test_steps_of_shares_are_not_run_again_in_one_process(found: Any) -> None:
    directory = found[0] / "whole"
    with pytest.raises(DirectoryError) as error:
        Recorded(directory)
    assert str(error.value) == (
        f"{directory} holds a run of 2 processes, each of which read its own share of the data "
        "(treadle.data.sharded): steps run again in one process, which cannot read their batches"
    )


def test_the_same_number_of_processes_resumes_bit_for_bit(found: Any) -> None:
    """At an uneven batch, after a share has ended, and at the end of an epoch."""
    folder, results = found
    whole, cut = results["whole:21"], results["cut:21"]
    assert cut["losses"] == whole["losses"] and cut["ends"] == whole["ends"]
    assert cut["warnings"] == []
    whole, cut = results["limited:11"], results["limited-cut:11"]
    assert cut["losses"] == whole["losses"] and cut["ends"] == whole["ends"]
    record = json.loads((folder / "cut" / "run.json").read_text())
    assert "sharded over 2 processes (inexact" in record["plan"]
    assert record["calls"][0]["train"] == {"sharded": True}


@pytest.mark.parametrize("workers", [1, 4])
def test_another_number_of_processes_resumes_with_other_batches_and_says_so(
    found: Any, tmp_path: Path, workers: int
) -> None:
    folder, results = found
    shutil.copytree(folder / "cut", tmp_path / "run")
    moved = run(f"{tmp_path}/run:24", workers=workers)["run:24"]
    assert moved["losses"][:21] == results["whole:21"]["losses"] and len(moved["losses"]) == 24
    [warning] = moved["warnings"]
    assert re.search(
        r"sharded over 2 processes.*All values were restored exactly from the checkpoint, but the "
        r"batches differ from here on, since treadle\.data\.sharded divides the data among "
        r"another number of processes",
        warning,
    )


@pytest.mark.parametrize("name", OF_BOTH)
def test_batches_that_cannot_be_put_together_are_refused(found: Any, name: str) -> None:
    assert found[1][name] == [f"DataError: {OF_BOTH[name]}"] * 2


@pytest.mark.parametrize("name", OF_PROCESS_1)
def test_what_one_process_cannot_read_ends_all(found: Any, name: str) -> None:
    expected = OF_PROCESS_1[name]
    assert found[1][name] == [f"DataError: process 1 cannot read its share: {expected}", expected]
