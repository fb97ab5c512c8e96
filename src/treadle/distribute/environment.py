"""Which process of how many this is, as launchers say in environment variables."""

import json
import os
import re
import socket
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.processes import process_group
from ..errors import ConfigurationError

PORT_VARIABLE = "TREADLE_PORT"
JOINED_VARIABLE = "TREADLE_JOINED"
"""The id of the process that joined the others. Processes that it starts, such as those that load
data, inherit its variables, but are no members of the group."""
# Of SLURM and Open MPI, which do not choose a port: one for each job, below the ports that Linux
# gives to outgoing connections (32768 to 60999).
_FIRST_PORT, _PORTS = 12_000, 20_000
_INTERACTIVE = ("bash", "zsh", "sh", "interactive", "sys/dashboard")
RAY_TRAIN, _RAY = "Ray Train", "Ray"
_RAY_WORKER = "RAY_RAYLET_PID"  # which the daemon of a node of Ray sets in its workers
_WITHIN_RAY = (
    "TREADLE_LAUNCHED",
    "TORCHELASTIC_RUN_ID",
)  # of launchers that a worker of Ray starts


@dataclass(frozen=True)
class Place:
    """The place of this process among those that train together.

    Attributes:
        rank: The number of this process, from 0.
        size: The number of processes.
        host: The address of the machine of process 0.
        port: The port on which process 0 listens for the others.
        launcher: What set the variables, for messages.
    """

    rank: int
    size: int
    host: str
    port: int
    launcher: str

    def __str__(self) -> str:
        return f"process {self.rank} of {self.size}, by {self.launcher}"


def found_place(variables: Mapping[str, str] | None = None) -> Place | None:
    """Return the place of this process, or None if it trains alone.

    In this order: TensorFlow's `TF_CONFIG`, on any backend; the variables of torchrun (which
    `treadle launch` and Ray Train also set), of Flux, LSF's jsrun, Open MPI, SLURM. Those of
    torchrun count only with `LOCAL_RANK`, since other programs set `RANK` and `WORLD_SIZE` too.
    Interactive jobs of SLURM do not count, nor processes that a member starts. A worker of Ray
    inherits the variables of the job in which Ray's node was started, so those of Flux, jsrun, Open
    MPI and SLURM do not count there.

    Args:
        variables: The environment variables; by default those of this process.

    Raises:
        ConfigurationError: A variable is missing, or is not a number in range.

    Example:
        >>> rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        >>> print(found_place({**rank, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}))
        process 1 of 2, by torchrun
        >>> found_place({"RANK": "0", "WORLD_SIZE": "8"}) is None
        True
    """
    given = os.environ if variables is None else variables
    if given.get(JOINED_VARIABLE, str(os.getpid())) != str(os.getpid()):
        return None
    env = _Variables(given)
    place = next((place for find in _finders(env) if (place := find(env)) is not None), None)
    return place if place is not None and place.size > 1 else None


def found_launcher(variables: Mapping[str, str] | None = None) -> str:
    """Return what started this process, also if it trains alone; empty if nothing is known.

    Example:
        >>> found_launcher({"RAY_RAYLET_PID": "7"}), found_launcher({})
        ('Ray', '')
    """
    env = _Variables(os.environ if variables is None else variables)
    place = next((place for find in _finders(env) if (place := find(env)) is not None), None)
    if place is not None:
        return place.launcher
    return _RAY if is_in_ray(variables) else ""


def is_in_ray(variables: Mapping[str, str] | None = None) -> bool:
    """Return whether Ray started this process as a worker: it then runs code in threads.

    A program that such a worker starts, such as `treadle launch`, inherits its variables, and has
    a main thread of its own.
    """
    env = _Variables(os.environ if variables is None else variables)
    return _RAY_WORKER in env and not any(name in env for name in _WITHIN_RAY)


def free_port() -> int:
    """Return a port that no program uses now."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def check_joined() -> None:
    """Check that a process that was started as one of several has joined the others.

    Raises:
        ConfigurationError: It has not, so it would train alone, and the others the same.
    """
    place = found_place() if process_group().size == 1 else None
    # Tasks of SLURM and Open MPI may be meant to train apart.
    if place is not None and place.launcher in ("treadle launch", "torchrun", RAY_TRAIN):
        raise ConfigurationError(
            f"this is {place}, but it has not joined the others, and would train alone: call "
            "treadle.setup() at the top of the script"
        )


def single_process_only(why: str) -> None:
    """Raise an error if several processes train together.

    Args:
        why: The message; `{}` stands for their number.

    Raises:
        ConfigurationError: They do.
    """
    if process_group().size > 1:
        raise ConfigurationError(why.format(process_group().size))


class _Variables:
    """Environment variables, read with checks."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = given

    def __contains__(self, name: str) -> bool:
        return bool(self.given.get(name))

    def text(self, name: str, launcher: str) -> str:
        """Return a variable.

        Raises:
            ConfigurationError: It is not set.
        """
        if name not in self:
            raise ConfigurationError(
                f"{launcher} started this process as one of several, but the environment variable "
                f"{name} is not set: set it to the same value in all processes"
            )
        return self.given[name]

    def number(self, name: str, launcher: str, least: int = 0, below: int = 1 << 20) -> int:
        """Return a variable that is a whole number.

        Raises:
            ConfigurationError: It is not set, not a number, or not in range.
        """
        text = self.text(name, launcher)
        if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) < below:
            raise ConfigurationError(
                f"{launcher} started this process with {name}={text!r}: expected a whole number "
                f"of at least {least} and less than {below}"
            )
        return int(text)

    def port(self, default: int) -> int:
        """Return the port of `TREADLE_PORT`, or a default."""
        if PORT_VARIABLE not in self:
            return default
        return self.number(PORT_VARIABLE, "the environment", 1, 1 << 16)

    def place(self, launcher: str, rank: str, size: int, host: str, port: int) -> Place:
        """Return the place whose number a variable gives; `TREADLE_PORT` replaces the port."""
        return Place(self.number(rank, launcher, 0, size), size, host, self.port(port), launcher)


def _finders(env: _Variables) -> Sequence[Callable[[_Variables], Place | None]]:
    """Return what finds the place of this process, in order."""
    if _RAY_WORKER in env:
        return _tf_config, _torchrun
    # Within a job of SLURM, the daemons of the others may be tasks of srun, whose variables the
    # processes inherit. jsrun may set those of Open MPI too.
    return _tf_config, _torchrun, _flux, _jsrun, _open_mpi, _slurm


def _tf_config(env: _Variables) -> Place | None:
    """Return the place that `TF_CONFIG` gives: the chief is process 0, if there is one.

    Without a cluster, as services set it for a single process, it gives none.

    Raises:
        ConfigurationError: It is not valid, or this task does not train.
    """
    if "TREADLE_LAUNCHED" in env or "TF_CONFIG" not in env:
        return None
    text = env.text("TF_CONFIG", "TensorFlow")
    try:
        given: Any = json.loads(text)
        cluster = given.get("cluster")
        if not cluster:
            return None
        task = given["task"]
        addresses = [str(x) for kind in ("chief", "worker") for x in cluster.get(kind, [])]
        kind, index = task["type"], int(str(task["index"]))  # no float, which may be infinite
        rank = index + (len(cluster.get("chief", [])) if kind == "worker" else 0)
        host, _, port = addresses[0].rpartition(":")
        if not (kind in ("chief", "worker") and 0 <= index < len(cluster[kind])):
            raise ValueError(kind)
        if not (host and 0 < int(port) < 1 << 16):
            raise ValueError(port)
        name = RAY_TRAIN if _RAY_WORKER in env else "TF_CONFIG"
        return Place(rank, len(addresses), host, env.port(int(port)), name)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"TF_CONFIG={text!r:.300} does not give the place of this process: expected JSON such "
            'as {"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", '
            '"index": 0}}, where the type is chief or worker'
        ) from error


def _torchrun(env: _Variables) -> Place | None:
    if "LOCAL_RANK" not in env or "RANK" not in env:
        return None
    name = "treadle launch" if "TREADLE_LAUNCHED" in env else "torchrun"
    if is_in_ray(env.given):  # programs that start actors set no number of the machine
        name = RAY_TRAIN if "NODE_RANK" in env else _RAY
    size = env.number("WORLD_SIZE", name, 1)
    # torchrun itself may listen on its port, so process 0 takes the next one.
    master = env.number("MASTER_PORT", name, 1, (1 << 16) - 1)
    return env.place(name, "RANK", size, env.text("MASTER_ADDR", name), master + 1)


def _slurm(env: _Variables) -> Place | None:
    if not all(name in env for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")):
        return None
    if "SLURM_STEP_NODELIST" not in env:
        return None  # not started by srun
    if "SLURM_JOB_NAME" in env and env.text("SLURM_JOB_NAME", "SLURM") in _INTERACTIVE:
        return None  # a shell in an allocation
    size = env.number("SLURM_NTASKS", "SLURM", 1)
    job = env.number("SLURM_JOB_ID", "SLURM", 0, 10**9)
    host = _first_host(env.text("SLURM_STEP_NODELIST", "SLURM"))
    return env.place("SLURM", "SLURM_PROCID", size, host, _FIRST_PORT + job % _PORTS)


def _open_mpi(env: _Variables) -> Place | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    size = env.number("OMPI_COMM_WORLD_SIZE", "Open MPI", 1)
    host, job = "127.0.0.1", 0
    if "OMPI_MCA_orte_hnp_uri" in env:  # 1531576320.0;tcp://10.96.0.1,10.148.0.1:34911
        uri = env.text("OMPI_MCA_orte_hnp_uri", "Open MPI")
        found = re.match(r"(\d+)\.\d+;tcp://([^,:]+)", uri)
        if found:
            host, job = found[2], int(found[1])
    elif size > env.number("OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI", 1):
        host = env.text("MASTER_ADDR", "Open MPI")
    host = env.text("MASTER_ADDR", "Open MPI") if "MASTER_ADDR" in env else host
    port = _FIRST_PORT + job % _PORTS
    return env.place("Open MPI", "OMPI_COMM_WORLD_RANK", size, host, port)


def _jsrun(env: _Variables) -> Place | None:
    """Return the place that LSF's Job Step Manager gives; it names no machine of process 0."""
    if "JSM_NAMESPACE_RANK" not in env or "JSM_NAMESPACE_SIZE" not in env:
        return None
    size = env.number("JSM_NAMESPACE_SIZE", "jsrun", 1)
    job = env.number("LSB_JOBID", "jsrun", 0, 10**9)
    host = env.text("MASTER_ADDR", "jsrun") if size > 1 else ""
    return env.place("jsrun", "JSM_NAMESPACE_RANK", size, host, _FIRST_PORT + job % _PORTS)


def _flux(env: _Variables) -> Place | None:
    """Return the place that Flux gives; it names no machine of process 0."""
    if "FLUX_TASK_RANK" not in env or "FLUX_JOB_SIZE" not in env:
        return None
    size = env.number("FLUX_JOB_SIZE", "Flux", 1)
    apart = size > 1 and env.text("FLUX_JOB_NNODES", "Flux") != "1"
    host = env.text("MASTER_ADDR", "Flux") if apart else "127.0.0.1"
    # The name of a job, such as f23bMEYgY, is no number.
    job = zlib.crc32(env.text("FLUX_JOB_ID", "Flux").encode())
    return env.place("Flux", "FLUX_TASK_RANK", size, host, _FIRST_PORT + job % _PORTS)


def _first_host(nodes: str) -> str:
    """Return the first host of a list of nodes as SLURM writes it.

    Example:
        >>> _first_host("gpu[003-005,9],login1"), _first_host("a1,a2")
        ('gpu003', 'a1')
    """
    found = re.match(r"([^\[,]+)(?:\[([0-9]+))?", nodes)
    return nodes if found is None else found[1] + (found[2] or "")
