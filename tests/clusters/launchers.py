"""The launchers of `scripts/clusters`, each on this machine: its daemons, and how it starts a run.

What is started is ended by its process id: other programs of the same name may run here.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

PATIENCE = 600  # seconds for one run


class Failed(Exception):
    """A run fails; the message ends with the end of its output."""


class Launcher(ABC):
    """Starts the files of examples/clusters in a folder.

    Attributes:
        name: The launcher's name, as `run.json` has it.
        backends: What it can train on.
        needs: The programs that must be installed.
        example: The file of examples/clusters.
    """

    name: ClassVar[str]
    backends: ClassVar[Sequence[str]] = ("torch", "tensorflow", "jax")
    needs: ClassVar[Sequence[str]] = ()
    example: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.variables: dict[str, str] = {}

    def missing(self) -> list[str]:
        """Return the programs that are not installed."""
        return [name for name in self.needs if shutil.which(name) is None]

    @abstractmethod
    def version(self) -> str:
        """Return the version of the launcher."""

    @abstractmethod
    def command(self, directory: Path, backend: str) -> list[str]:
        """Return the command that trains in a directory."""

    @contextmanager
    def running(self) -> Generator[None]:
        """Run the launcher's daemons, as a context manager."""
        yield

    def run_directory(self, directory: Path) -> Path:
        """Return where the run is if a directory is given to the example."""
        return directory

    def train(self, directory: Path, backend: str) -> str:
        """Train in a directory, and return what was printed.

        Raises:
            Failed: The command fails.
        """
        return called(self.command(directory, backend), self.folder, backend, self.variables)


def called(
    command: Sequence[str], folder: Path, backend: str, variables: dict[str, str] | None = None
) -> str:
    """Run a command in a folder, and return what it prints.

    Raises:
        Failed: It ends with an error, or takes too long.
    """
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "KERAS_BACKEND": backend,
        "OMP_NUM_THREADS": "1",  # as Ray sets it
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "NO_COLOR": "1",
        **(variables or {}),
    }
    with (folder / "output.txt").open("w+") as output:
        try:
            code = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=output, timeout=PATIENCE
            ).returncode
        except subprocess.TimeoutExpired:
            code = 124
        output.seek(0)
        text = output.read()
    if code:
        raise Failed(f"{' '.join(command)} ended with code {code}: {text[-2000:]}")
    return text


def first_line(*command: str) -> str:
    """Return the first line that a command prints."""
    return subprocess.run(command, capture_output=True, text=True).stdout.partition("\n")[0]


class OneProcess(Launcher):
    name, example = "", "task.py"

    def version(self) -> str:
        return ""

    def command(self, directory: Path, backend: str) -> list[str]:
        return ["python", "task.py", str(directory)]


class RayTrain(Launcher):
    name, example = "Ray Train", "ray_train.py"

    def version(self) -> str:
        import ray  # pyright: ignore[reportMissingImports]

        return ray.__version__

    @contextmanager
    def running(self) -> Generator[None]:
        """Run two nodes of Ray, of one processor each."""
        from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

        small: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 100 << 20}
        os.environ.update(OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="3", RAY_DEDUP_LOGS="0")
        cluster = Cluster(
            initialize_head=True, head_node_args={**small, "include_dashboard": False}
        )
        try:
            cluster.add_node(**small)
            self.variables["RAY_ADDRESS"] = cluster.address
            yield
        finally:
            cluster.shutdown()

    def command(self, directory: Path, backend: str) -> list[str]:
        return ["python", "ray_train.py", str(directory), backend]


class OpenMPI(Launcher):
    name, needs, example = "Open MPI", ("mpirun",), "mpi.sh"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def version(self) -> str:
        return first_line("mpirun", "--version").split()[-1]

    def command(self, directory: Path, backend: str) -> list[str]:
        return ["./mpi.sh", str(directory), "2", "--oversubscribe", "-x", "OMP_NUM_THREADS"]


class Torchrun(Launcher):
    name, backends, example = "torchrun", ("torch",), "torchrun.sh"

    def version(self) -> str:
        import torch

        return torch.__version__

    def command(self, directory: Path, backend: str) -> list[str]:
        return ["./torchrun.sh", str(directory)]


SLURM_CONF = """
ClusterName=treadle
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={port}
SlurmdPort={port_of_node}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm(Launcher):
    name, example = "SLURM", "slurm.sbatch"
    needs = ("munged", "slurmctld", "slurmd", "sbatch", "srun")

    def version(self) -> str:
        return first_line("slurmctld", "-V").split()[-1]

    @contextmanager
    def running(self) -> Generator[None]:
        """Run munge, the controller and the daemon of one node."""
        folder = self.folder / "slurm"
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = [free_port(), free_port()]
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(
                host=socket.gethostname().split(".")[0],
                folder=folder,
                port=ports[0],
                port_of_node=ports[1],
                cores=max(2, os.cpu_count() or 1),
            )
        )
        self.variables["SLURM_CONF"] = str(folder / "slurm.conf")
        environment = {**os.environ, **self.variables}
        files = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in MUNGE_FILES]
        daemons: list[subprocess.Popen[bytes]] = []
        try:
            for command in (["munged", "-F", "-f", *files], ["slurmctld", "-D"], ["slurmd", "-D"]):
                with (folder / f"{command[0]}.txt").open("w") as output:
                    daemons.append(
                        subprocess.Popen(command, env=environment, stdout=output, stderr=output)
                    )
                time.sleep(2)
            yield
        finally:
            for daemon in reversed(daemons):
                daemon.terminate()
                daemon.wait()

    def command(self, directory: Path, backend: str) -> list[str]:
        return [
            "sbatch",
            "--array=0-1",
            f"--output={directory}.txt",
            "slurm.sbatch",
            str(directory),
        ]

    def run_directory(self, directory: Path) -> Path:
        """Return the folder of the first seed."""
        return directory / "0"

    def train(self, directory: Path, backend: str) -> str:
        """Train in a directory: wait until no job is left, since a job may be queued again."""
        found = super().train(directory, backend)
        job, end = re.sub(r"\D", "", found), time.monotonic() + PATIENCE
        # A job that is not in the queue any more is an error of squeue if it is asked for by name.
        while called(["squeue", "-h"], self.folder, backend, self.variables).strip():
            if time.monotonic() > end:
                called(["scancel", job], self.folder, backend, self.variables)
                raise Failed(f"job {job} takes more than {PATIENCE} s")
            time.sleep(1)
        return Path(f"{directory}.txt").read_text()


MUNGE_FILES = ("socket", "key-file", "pid-file", "log-file", "seed-file")
LAUNCHERS = {"ray": RayTrain, "mpi": OpenMPI, "slurm": Slurm, "torchrun": Torchrun}


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
