"""Several processes that train one task: their files, signals, failures and resumed runs."""

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile, once
from keras_versions import needs_keras

from tests.forked import python
from treadle.checkpoint import Checkpoints
from treadle.checkpoint.run_files import learned
from treadle.core.directory import CHECKPOINTS, read_run
from treadle.distribute.environment import free_port

SCRIPT = str(Path(__file__).parent / "group_run.py")
GRACE = "300"
PATIENT_LAUNCHER = f"""
import sys
from treadle.cli import main
from treadle.distribute import launcher
launcher.GRACE_SECONDS = {GRACE}
sys.exit(main())
"""
LAST = re.compile(r"(?:\[\d\] )?(\d) (\d+) ([0-9a-f]{16})")


class Ended:
    """How a group of processes ended.

    Attributes:
        code: The exit code.
        errors: What was printed as errors.
        last: For each process, the step and the hash of all variables.
    """

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        self.code, self.errors = done.returncode, done.stderr
        found = (LAST.fullmatch(line) for line in done.stdout.splitlines())
        self.last = {int(m[1]): (int(m[2]), m[3]) for m in found if m}


def started(command: list[str], **variables: str) -> Ended:
    """Run a command, and wait."""
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600
    )
    return Ended(done)


def train(directory: Path, *options: str, workers: int = 2, **variables: str) -> Ended:
    """Train `group_run.py` in so many processes; in one without a launcher.

    All that are not killed end by themselves, however slowly: they save, and say what failed.
    """
    killed = variables.get("FAULT", "").startswith(("kill", "save"))
    launcher = ["-m", "treadle"] if killed else ["-c", PATIENT_LAUNCHER]
    launch = [*launcher, "launch", "--workers", str(workers), *options, "--"]
    command = [python(), *(launch if workers > 1 else []), SCRIPT, str(directory)]
    grace = {} if killed else {"GRACE": GRACE}
    return started(command, PYTHONWARNINGS="always::UserWarning", **grace, **variables)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """An uninterrupted run."""
    if keras.config.backend() == "jax":
        needs_keras("3.10", "training on several devices of JAX")
    directory = tmp_path_factory.mktemp("groups") / "whole"
    ended = train(directory)
    assert ended.code == 0, ended.errors
    return directory, ended


def lines(directory: Path) -> list[Any]:
    """The lines of the log, without times."""
    found = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in found]


@long_to_compile
def test_all_processes_have_equal_results_and_one_writes_the_files(
    whole: tuple[Path, Ended],
) -> None:
    directory, ended = whole
    assert set(ended.last) == {0, 1}
    assert ended.last[0] == ended.last[1]
    assert ended.last[0][0] == 35
    steps = [line["step"] for line in lines(directory) if "kind" not in line]
    assert steps == list(range(1, 36))
    assert read_run(directory)["finished"]


@pytest.mark.long
@once
def test_a_signal_to_one_process_saves_the_same_step_in_all(
    whole: tuple[Path, Ended], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    stopped = train(directory, FAULT="term@1@10")
    assert stopped.code == 143, stopped.errors
    saved = Checkpoints(directory / CHECKPOINTS).steps()[-1]
    assert 10 <= saved < 35
    resumed = train(directory)
    assert resumed.code == 0, resumed.errors
    assert resumed.last == whole[1].last
    assert lines(directory) == lines(whole[0])


# The processes are what is tested, more than the backend: PyTorch starts in half the time.
TORCH = keras.config.backend() == "torch"
KILLED = {
    "torch": ("kill@0@10", "save@0@14", "save@1@14"),
    "tensorflow": ("kill@1@10",),
    "jax": (),  # test_split_checkpoints.py kills processes of JAX
}[keras.config.backend()]
OTHERS = {"torch": ("torchrun", "SLURM", "Open MPI"), "tensorflow": ("TF_CONFIG",), "jax": ()}[
    keras.config.backend()
]


@pytest.mark.long
@pytest.mark.parametrize("fault", KILLED)
def test_a_group_with_a_killed_process_starts_again_bit_for_bit(
    whole: tuple[Path, Ended], tmp_path: Path, fault: str
) -> None:
    ended = train(tmp_path / "run", "--restarts", "1", FAULT=fault)
    assert ended.code == 0, ended.errors
    assert "ended with signal SIGKILL, so all are ended" in ended.errors
    assert "all 2 processes start again (0 restarts left)" in ended.errors
    assert ended.last == whole[1].last
    assert lines(tmp_path / "run") == lines(whole[0])


def by_hand(launcher: str, port: int) -> list[dict[str, str]]:
    """The variables that a launcher sets in each of two processes of this machine."""
    address, local = f"127.0.0.1:{port}", {"TREADLE_PORT": str(port)}
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    slurm = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost"}
    open_mpi = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    cluster = {"worker": [address, f"127.0.0.1:{free_port()}"]}
    return {
        "torchrun": [{**torchrun, "RANK": str(i), "LOCAL_RANK": str(i)} for i in range(2)],
        "SLURM": [{**slurm, **local, "SLURM_PROCID": str(i)} for i in range(2)],
        "Open MPI": [{**open_mpi, **local, "OMPI_COMM_WORLD_RANK": str(i)} for i in range(2)],
        "TF_CONFIG": [
            {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})}
            for i in range(2)
        ],
    }[launcher]


@pytest.mark.long
@pytest.mark.parametrize("launcher", OTHERS)
def test_processes_started_by_others_have_the_same_bits(
    whole: tuple[Path, Ended], tmp_path: Path, launcher: str
) -> None:
    """Nothing but environment variables says to a process which one it is."""
    found = by_hand(launcher, free_port())
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(
            lambda variables: started(
                [python(), SCRIPT, str(tmp_path / "run")], OMP_NUM_THREADS="1", **variables
            ),
            found,
        )
    assert (first.code, second.code) == (0, 0), first.errors + second.errors
    assert f"treadle: 2 processes, by {launcher}" in first.errors
    assert {**first.last, **second.last} == whole[1].last
    assert lines(tmp_path / "run") == lines(whole[0])


@pytest.mark.long
@pytest.mark.skipif(not TORCH, reason="torchrun is of PyTorch")
def test_torchrun_gives_the_same_bits(whole: tuple[Path, Ended], tmp_path: Path) -> None:
    torchrun = [python(), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    ended = started([*torchrun, SCRIPT, str(tmp_path / "run")], OMP_NUM_THREADS="1")
    assert ended.code == 0, ended.errors
    assert ended.last == whole[1].last


@pytest.mark.long
@pytest.mark.skipif(not TORCH, reason="torchrun is of PyTorch")
def test_a_command_has_the_same_bits_by_torchrun(tmp_path: Path) -> None:
    digits = ["run", "digits", "--steps", "20", "--quiet", "--directory"]
    launch = [python(), "-m", "treadle", "launch", "--workers", "2", "--"]
    torchrun = [python(), "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    for command in (
        [*launch, *digits, str(tmp_path / "launch")],
        [*torchrun, "-m", "treadle", *digits, str(tmp_path / "torchrun")],
    ):
        ended = started(command, OMP_NUM_THREADS="1")
        assert ended.code == 0, ended.errors
    found, expected = (
        (tmp_path / name / "state.safetensors").read_bytes() for name in ("torchrun", "launch")
    )
    assert found == expected


@pytest.mark.long
@once
def test_an_exception_in_one_process_is_named_in_the_others(tmp_path: Path) -> None:
    ended = train(tmp_path / "run", FAULT="raise@1@10")
    assert ended.code == 1
    assert "ValueError: planted" in ended.errors
    assert "ProcessError: process 1 failed: ValueError: planted. This process" in ended.errors


@pytest.mark.long
@once
def test_all_processes_roll_back_and_exclude_the_same_batch(tmp_path: Path) -> None:
    ended = train(tmp_path / "run", FAULT="nan@1@0")
    assert ended.code == 0, ended.errors
    assert ended.last[0] == ended.last[1]
    assert ended.last[0][0] == 30  # one of seven batches of each epoch is excluded
    assert [x["epoch"] for x in read_run(tmp_path / "run")["passed_over"]] == [0, 1, 2, 3, 4]


@pytest.mark.long
@once
@pytest.mark.parametrize("fault", ["body@1@10", "end@0@0"])
def test_an_exception_outside_of_steps_is_named_in_the_others(tmp_path: Path, fault: str) -> None:
    ended = train(tmp_path / "run", FAULT=fault)
    assert ended.code == 1
    rank = fault.split("@")[1]
    assert f"ProcessError: process {rank} failed: ValueError: planted. This process" in ended.errors


@pytest.mark.long
@once
def test_a_process_that_reads_slowly_reads_windows_of_equal_size(
    whole: tuple[Path, Ended], tmp_path: Path
) -> None:
    ended = train(tmp_path / "run", FAULT="reads@1@0")
    assert ended.code == 0, ended.errors
    assert ended.last[0] == ended.last[1]


@pytest.mark.long
@once
def test_other_data_in_one_process_is_refused(tmp_path: Path) -> None:
    ended = train(tmp_path / "run", FAULT="data@1@0")
    assert ended.code == 1
    assert "the call of the loop of process 1 and of process 0 differ: train." in ended.errors
    assert "train.examples is 96 in process 1, and 97 in process 0" in ended.errors


@pytest.mark.long
@once
def test_a_slow_process_and_intervals_of_time_do_not_hang(tmp_path: Path) -> None:
    """What is due by the clock is due at the same steps in all processes."""
    ended = train(tmp_path / "limit", FAULT="slow@1@0", EVERY="1 s", UNTIL="3 s")
    assert ended.code == 0, ended.errors
    assert ended.last[0] == ended.last[1]
    looked = [line["looked"] for line in lines(tmp_path / "limit") if "looked" in line]
    assert 1 <= len(looked) <= 4
    stopped = train(tmp_path / "stopped", FAULT="slow-term@1@10", EVERY="1 s", UNTIL="1 h")
    assert stopped.code == 143, stopped.errors
    newest = Checkpoints(tmp_path / "stopped" / CHECKPOINTS).steps()[-1]
    assert newest >= 10
    assert len([*(tmp_path / "stopped" / CHECKPOINTS).glob(f"step-{newest:012d}*")]) == 1


@pytest.mark.long
@once
def test_a_run_resumes_in_another_number_of_processes(
    whole: tuple[Path, Ended], tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    assert train(directory, FAULT="term@0@10").code == 143
    middle = train(directory, workers=4, FAULT="term@0@20")
    assert middle.code == 143, middle.errors
    assert "may not be bit-for-bit exact" in middle.errors
    assert "the batches are the same" in middle.errors
    ended = train(directory, workers=1)
    assert ended.code == 0, ended.errors
    assert ended.last[0][0] == 35
    for line, expected in zip(lines(directory), lines(whole[0]), strict=True):
        assert line == {
            name: pytest.approx(value, abs=1e-5) if isinstance(value, float) else value
            for name, value in expected.items()
        }
    state, of_two = (learned(path)[0] for path in (directory, whole[0]))
    assert set(state) == set(of_two)
    for path, value in of_two.items():
        assert np.allclose(state[path], value, rtol=1e-5, atol=1e-5), path
