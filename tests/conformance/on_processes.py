"""Programs on several processes, compared with the same in one.

The file starts itself once for each process. It prints as JSON how far the results are from those
of one process, and where; for programs that fail, it prints the messages:

    python on_processes.py SIZE reference short-batch-3 …
"""

import hashlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy as np

sys.path.insert(1, str(Path(__file__).parents[2]))  # the tests' own modules, which checks use
from process_checks import CHECKS, Results
from process_mistakes import MESSAGES, message_of

from treadle.backends.base import active
from treadle.core import processes
from treadle.distribute.channel import Channel, connect, listen
from treadle.distribute.environment import free_port
from treadle.distribute.joining import connect_framework

JAX = keras.config.backend() == "jax"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


class Group(Channel):
    """A group that goes on after a program that fails in all of its processes."""

    def fail(self, error: BaseException) -> None:
        pass


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """The largest difference and where it is, infinite if whole numbers differ; NaN equals NaN.

    That of an array with entries above 1 is relative to its largest one.
    """
    assert list(found) == list(expected)
    worst = 0.0, ""
    for name, value in expected.items():
        same, other = np.asarray(found[name]), np.asarray(value)
        assert same.shape == other.shape, name
        if other.dtype.kind == "f":
            assert (np.isnan(same) == np.isnan(other)).all(), name
            size = max(1.0, float(np.nanmax(np.abs(other), initial=0)))
            worst = max(worst, (float(np.nanmax(np.abs(same - other), initial=0)) / size, name))
        elif not (same == other).all():
            return float("inf"), name
    return worst


def digest(found: Results) -> str:
    raw = hashlib.sha256()
    for name, value in found.items():
        raw.update(name.encode() + np.asarray(value).tobytes())
    return raw.hexdigest()


def result_of(name: str, group: Group, folder: Path) -> Any:
    """Write the results of a check, which must be equal in all processes; return an error or None.

    Of a program that fails, return the messages.
    """
    distribution = keras.distribution.distribution()
    keras.backend.clear_session()
    if JAX:
        keras.distribution.set_distribution(distribution)
    try:
        if name in MESSAGES:
            return group.exchange(message_of(name), "a message")
        found = CHECKS[name]()
        equal = len(set(group.exchange(digest(found), "a digest"))) == 1
    except Exception:
        return {"error": traceback.format_exc()}
    if not equal:
        return {"error": "the processes have different results"}
    if group.rank == 0:
        arrays = {str(i): np.asarray(value) for i, value in enumerate(found.values())}
        np.savez(folder / f"{name}.npz", names=list(found), **arrays)
    return None


def member(rank: int, size: int, port: int, folder: Path, names: list[str]) -> None:
    """Run the checks in one of the processes."""
    if rank == 0:
        links = {other: link for other, (link, _) in listen("127.0.0.1", port, size).items()}
    else:
        links = {0: connect("127.0.0.1", port, {"rank": rank})}
    group = Group(rank, size, links)
    processes.join(group)
    group.agree_on_time()
    address = group.exchange(f"127.0.0.1:{free_port()}", "the address")[0]
    connect_framework(group, address, active())
    results = {name: result_of(name, group, folder) for name in names}
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    group.exchange(None, "the end")


def compared(name: str, folder: Path) -> Any:
    """The difference of the results of several processes from those of this one."""
    try:
        with np.load(folder / f"{name}.npz") as found:
            arrays = {path: found[str(i)] for i, path in enumerate(found["names"].tolist())}
        keras.backend.clear_session()
        return difference(arrays, CHECKS[name]())
    except Exception:
        return {"error": traceback.format_exc()}


def main() -> None:
    names = sys.argv[2:]
    if os.environ.get("MEMBER"):
        rank, size, port, folder = os.environ["MEMBER"].split(maxsplit=3)
        member(int(rank), int(size), int(port), Path(folder), names)
        return
    size, port = int(sys.argv[1]), free_port()
    with TemporaryDirectory() as folder:
        members = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__)), *sys.argv[1:]],
                env={**os.environ, "MEMBER": f"{rank} {size} {port} {folder}", **ONE_THREAD},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(size)
        ]
        try:
            codes = [each.wait(timeout=580) for each in members]
        finally:
            for each in members:
                each.kill()
        if any(codes):
            sys.exit(max(map(abs, codes)))
        results = json.loads((Path(folder) / "results.json").read_text())
        print(json.dumps({name: x or compared(name, Path(folder)) for name, x in results.items()}))


if __name__ == "__main__":
    main()
