"""Which process this is, by the variables of launchers; and `treadle launch`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

import treadle
from tests.waiting import WATCHDOG, until
from treadle import cli
from treadle.core.processes import process_group
from treadle.distribute import Place, found_place, joining, setup
from treadle.distribute.environment import found_launcher
from treadle.distribute.ray_train import ray_place
from treadle.errors import ConfigurationError

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "481234",
    "SLURM_JOB_NAME": "train",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[003-004,9]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
JSRUN = {"JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "4", "LSB_JOBID": "20005"}
FLUX = {
    "FLUX_TASK_RANK": "1",
    "FLUX_JOB_SIZE": "2",
    "FLUX_JOB_NNODES": "1",
    "FLUX_JOB_ID": "f23bMEYgY",
}
RAY = {"RAY_RAYLET_PID": "7"}


def tf_config(kind: str, index: int, **cluster: list[str]) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}


WORKERS = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        (tf_config("worker", 1, **WORKERS), Place(1, 2, "10.0.0.1", 2222, "TF_CONFIG")),
        (
            {**TORCHRUN, **tf_config("worker", 1, chief=["a:7"], **WORKERS)},
            Place(2, 3, "a", 7, "TF_CONFIG"),
        ),
        (tf_config("chief", 0, chief=["a:7"], **WORKERS), Place(0, 3, "a", 7, "TF_CONFIG")),
        (
            {**TORCHRUN, "TREADLE_LAUNCHED": "1", **tf_config("worker", 1, **WORKERS)},
            Place(3, 4, "10.0.0.1", 29501, "treadle launch"),
        ),
        (TORCHRUN, Place(3, 4, "10.0.0.1", 29501, "torchrun")),
        ({**TORCHRUN, "TREADLE_LAUNCHED": "1"}, Place(3, 4, "10.0.0.1", 29501, "treadle launch")),
        ({**TORCHRUN, "TREADLE_PORT": "7000"}, Place(3, 4, "10.0.0.1", 7000, "torchrun")),
        ({**SLURM, **TORCHRUN}, Place(3, 4, "10.0.0.1", 29501, "torchrun")),
        (SLURM, Place(5, 8, "gpu003", 13234, "SLURM")),
        (OPEN_MPI, Place(1, 2, "10.96.0.1", 28320, "Open MPI")),
        ({**OPEN_MPI, "MASTER_ADDR": "node1"}, Place(1, 2, "node1", 28320, "Open MPI")),
        ({**SLURM, **OPEN_MPI}, Place(1, 2, "10.96.0.1", 28320, "Open MPI")),  # mpirun in a job
        (
            {**OPEN_MPI, **JSRUN, "MASTER_ADDR": "node1"},
            Place(1, 4, "node1", 12005, "jsrun"),
        ),
        ({**SLURM, **FLUX}, Place(1, 2, "127.0.0.1", 21958, "Flux")),
        (
            {**FLUX, "FLUX_JOB_NNODES": "2", "MASTER_ADDR": "node1"},
            Place(1, 2, "node1", 21958, "Flux"),
        ),
        ({**RAY, **SLURM, **TORCHRUN}, Place(3, 4, "10.0.0.1", 29501, "Ray")),
        ({**RAY, **TORCHRUN, "NODE_RANK": "0"}, Place(3, 4, "10.0.0.1", 29501, "Ray Train")),
        (
            {**RAY, **tf_config("worker", 1, **WORKERS)},
            Place(1, 2, "10.0.0.1", 2222, "Ray Train"),
        ),
        (
            {**RAY, **TORCHRUN, "TORCHELASTIC_RUN_ID": "none"},
            Place(3, 4, "10.0.0.1", 29501, "torchrun"),
        ),
    ],
)
def test_launchers_say_which_process_this_is(variables: dict[str, str], place: Place) -> None:
    assert found_place(variables) == place


@pytest.mark.parametrize(
    "variables",
    [
        {},
        tf_config("worker", 0, worker=["10.0.0.1:2222"]),
        {"TF_CONFIG": '{"environment": "cloud"}'},
        tf_config("worker", 0),
        {"RANK": "0", "WORLD_SIZE": "8"},  # of another program
        {**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
        {**SLURM, "SLURM_JOB_NAME": "bash"},  # an interactive job
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"},  # not started by srun
        {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {**FLUX, "FLUX_TASK_RANK": "0", "FLUX_JOB_SIZE": "1"},
        {**RAY, **SLURM},  # a worker on a node of Ray that srun started
        {**RAY, **OPEN_MPI},
    ],
)
def test_a_process_that_trains_alone(variables: dict[str, str]) -> None:
    assert found_place(variables) is None


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "SLURM"),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, "torchrun"),
        ({**RAY, **SLURM}, "Ray"),
        (RAY, "Ray"),
        ({**RAY, "TREADLE_LAUNCHED": "1"}, ""),
        ({}, ""),
    ],
)
def test_the_launcher_of_one_process(variables: dict[str, str], launcher: str) -> None:
    assert found_launcher(variables) == launcher


def test_workers_of_ray_train_agree_on_the_address_of_process_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", "7")

    class Context:
        get_world_rank, get_world_size = staticmethod(lambda: 1), staticmethod(lambda: 2)

    sent: list[Any] = []

    def broadcast(mine: Any) -> Any:
        sent.append(mine)
        return ["10.0.0.1", 5000]

    train, ray = ModuleType("ray.train"), ModuleType("ray")
    assert ray_place() is None
    train.get_context = Context  # type: ignore[attr-defined]
    for name, part in {
        "ray": ray,
        "ray.train": train,
        "ray.train.collective": SimpleNamespace(broadcast_from_rank_zero=broadcast),
        "ray.util": SimpleNamespace(get_node_ip_address=lambda: "10.0.0.2"),
    }.items():
        monkeypatch.setitem(sys.modules, name, part)
    assert str(ray_place()) == "process 1 of 2, by Ray Train"
    assert sent[0][0] == "10.0.0.2"
    train.get_context = lambda: 1 / 0  # type: ignore[attr-defined]
    assert ray_place() is None  # in the process that starts the workers


def test_the_address_from_ray_counts_more_than_the_variables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place, joined = Place(3, 4, "10.0.0.1", 5000, "Ray Train"), list[Place]()
    for name, value in {**TORCHRUN, **RAY, "NODE_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"launcher": "", "in_thread": False}.items():
        monkeypatch.setattr(process_group(), name, value)
    monkeypatch.setattr(setup, "ray_place", lambda: place)
    monkeypatch.setattr(setup, "_existing_layer", lambda: None)  # of an earlier test
    monkeypatch.setattr(joining, "join_processes", lambda place, backend: joined.append(place))
    treadle.setup()
    assert joined == [place]
    assert (process_group().launcher, process_group().in_thread) == ("Ray Train", True)


def test_a_launched_script_without_setup_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    for more, launcher in (({}, "torchrun"), ({**RAY, "NODE_RANK": "0"}, "Ray Train")):
        for name, value in more.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(ConfigurationError) as raised:
            treadle.Loop(treadle.Task(), console=False)
        assert str(raised.value) == (
            f"this is process 3 of 4, by {launcher}, but it has not joined the others, and would "
            "train alone: call treadle.setup() at the top of the script"
        )


@pytest.mark.parametrize(
    "variables",
    [
        {"TF_CONFIG": "{"},
        {"TF_CONFIG": "[]"},
        {"TF_CONFIG": '{"cluster": {"worker": ["a:1", "b:1"]}}'},
        tf_config("worker", 1e999, **WORKERS),  # type: ignore[arg-type]
        tf_config("worker", 0.9, **WORKERS),  # type: ignore[arg-type]
        tf_config("worker", True, **WORKERS),
        tf_config("ps", 0, ps=["a:1"], **WORKERS),
        tf_config("evaluator", 0, **WORKERS),
        tf_config("worker", 2, **WORKERS),
        tf_config("worker", -1, **WORKERS),
        tf_config("worker", 0, worker=["a", "b"]),
    ],
)
def test_a_configuration_of_tensorflow_without_a_place(variables: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError) as raised:
        found_place(variables)
    assert str(raised.value) == (
        f"TF_CONFIG={variables['TF_CONFIG']!r} does not give the place of this process: expected "
        'JSON such as {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": '
        '"worker", "index": 0}}, where the type is chief or worker'
    )


def test_processes_that_a_member_starts_are_no_members() -> None:
    assert found_place({**TORCHRUN, "TREADLE_JOINED": str(os.getpid())}) is not None
    assert found_place({**TORCHRUN, "TREADLE_JOINED": str(os.getppid())}) is None


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {**TORCHRUN, "RANK": "4"},
            "torchrun started this process with RANK='4': expected a whole number of at least 0 "
            "and less than 4",
        ),
        (
            {**TORCHRUN, "MASTER_PORT": "70000"},
            "torchrun started this process with MASTER_PORT='70000': expected a whole number of "
            "at least 1 and less than 65535",
        ),
        (
            {k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"},
            "torchrun started this process as one of several, but the environment variable "
            "MASTER_ADDR is not set: set it to the same value in all processes",
        ),
        (
            {**SLURM, "SLURM_PROCID": "x"},
            "SLURM started this process with SLURM_PROCID='x': expected a whole number of at "
            "least 0 and less than 8",
        ),
        (
            JSRUN,
            "jsrun started this process as one of several, but the environment variable "
            "MASTER_ADDR is not set: set it to the same value in all processes",
        ),
        (
            {**FLUX, "FLUX_JOB_NNODES": "2"},
            "Flux started this process as one of several, but the environment variable "
            "MASTER_ADDR is not set: set it to the same value in all processes",
        ),
        (
            {**RAY, **TORCHRUN, "NODE_RANK": "0", "RANK": "4"},
            "Ray Train started this process with RANK='4': expected a whole number of at least 0 "
            "and less than 4",
        ),
        (
            {**TORCHRUN, "TREADLE_PORT": "0"},
            "the environment started this process with TREADLE_PORT='0': expected a whole number "
            "of at least 1 and less than 65536",
        ),
    ],
)
def test_invalid_variables_are_named(variables: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        found_place(variables)
    assert str(raised.value) == message


def launched(folder: Path, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run `treadle launch` with a script."""
    (folder / "script.py").write_text(script)
    return subprocess.run(
        [sys.executable, "-m", "treadle", "launch", *options, "--", "script.py", "--flag", "1"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
    )


def test_each_process_knows_its_place_and_gets_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)  # the launcher sets it
    script = (
        "import os, sys\n"
        "from treadle.distribute import found_place\n"
        "place = found_place()\n"
        # In one piece, also where PYTHONUNBUFFERED is set: both write into one pipe.
        "shown = [place, sys.argv[1:], os.environ['OMP_NUM_THREADS'].isdigit()]\n"
        "sys.stdout.write(' '.join(map(str, shown)) + '\\n')\n"
    )
    done = launched(tmp_path, script, "--workers", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[1] process 1 of 2, by treadle launch ['--flag', '1'] True",
        "process 0 of 2, by treadle launch ['--flag', '1'] True",
    ]


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    # Process 0 goes on for longer than this test waits for the end of all.
    script = (
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(7)\ntime.sleep(1000)\n"
    )
    done = launched(tmp_path, script, "--workers", "2")
    assert done.returncode == 7
    assert done.stderr == ("treadle launch: process 1 ended with exit code 7, so all are ended\n")


def test_all_start_again_as_often_as_allowed(tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "with open(f\"starts-{os.environ['RANK']}\", 'a') as file:\n"
        "    file.write('x')\n"
        "    count = file.tell()\n"
        "if os.environ['RANK'] == '0' and count < 3:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = launched(tmp_path, script, "--workers", "2", "--restarts", "3")
    assert done.returncode == 0, done.stderr
    killed = "treadle launch: process 0 ended with signal SIGKILL, so all are ended"
    assert done.stderr.splitlines() == [
        killed,
        "treadle launch: all 2 processes start again (2 restarts left)",
        killed,
        "treadle launch: all 2 processes start again (1 restart left)",
    ]
    assert (tmp_path / "starts-0").read_text() == "xxx"
    assert (tmp_path / "starts-1").exists()
    once = launched(tmp_path, "import sys; sys.exit(3)", "--workers", "2", "--restarts", "1")
    assert once.returncode == 3
    assert once.stderr.count("start again (0 restarts left)") == 1


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, signal, sys, time\n"
        "def end(*_):\n"
        "    open(f\"ended-{os.environ['RANK']}\", 'w').close()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "open(f\"ready-{os.environ['RANK']}\", 'w').close()\n"
        # Not one long sleep: a signal just before it would be handled after it.
        "for _ in range(1000):\n"
        "    time.sleep(1)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "treadle", "launch", "--workers", "2", "--", "script.py"],
        cwd=tmp_path,
        env=os.environ,
    )
    until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "the start of both processes")
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=WATCHDOG) == 143
    assert len(list(tmp_path.glob("ended-*"))) == 2


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            [],
            "there is nothing to launch: give a command of treadle or a Python file after --, such "
            "as treadle launch --workers 2 -- run digits",
        ),
        (
            ["replay", "runs/mine"],
            "treadle replay runs in one process, not in 2: leave out treadle launch",
        ),
        (
            ["certify", "digits"],
            "treadle certify runs in one process, not in 2: leave out treadle launch, or call "
            "treadle certify with --workers",
        ),
    ],
)
def test_what_cannot_be_launched(command: list[str], message: str) -> None:
    result = CliRunner().invoke(cli.app, ["launch", "--workers", "2", "--", *command])
    assert result.exit_code == 2
    assert " ".join(result.stderr.split()) == f"error: {message}"


def test_a_connection_of_jax_with_other_numbers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX would compute other rows than the group. Costs a second: it imports JAX."""
    import jax

    from treadle.core.processes import ProcessGroup
    from treadle.distribute.jax import check_connected

    group = ProcessGroup()
    group.rank, group.size = 1, 2
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigurationError) as caught:
        check_connected(group)
    assert str(caught.value) == (
        "JAX was connected as process 0 of 2, but this is process 1 of 2: leave "
        "jax.distributed.initialize to treadle.setup"
    )
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    check_connected(group)
