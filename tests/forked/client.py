"""The executable that `python()` returns: it has a server fork, and ends as the forked process."""

import fcntl
import hashlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress

# A library reads these when it is imported, or the interpreter when it starts. The forked process
# itself sets filters of warnings.
EARLY = (
    *("PYTHON", "KERAS_", "TF_", "JAX_", "XLA_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "VECLIB_", "NUMEXPR_", "MALLOC_"),
    *("LD_", "LC_", "LANG", "HOME", "TREADLE_COMPILE_CACHE", "FORKED_IMPORTS"),
)
PATIENCE = 600.0  # seconds until a server has imported Keras: this only ends what hangs
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


def parsed(words: list[str]) -> tuple[list[str], list[str]]:
    """Divide arguments into those of the interpreter, and the program with its own."""
    place = 0
    while place < len(words) and words[place].startswith("-"):
        if words[place] in ("-c", "-m"):
            break
        place += 2 if words[place] in ("-W", "-X") else 1
    return words[:place], words[place:]


def warning_options(options: list[str]) -> tuple[list[str], list[str]]:
    """Divide the interpreter's options into those for warnings, in its order, and the others."""
    variable = os.environ.get("PYTHONWARNINGS", "")
    found, others = [text for text in variable.split(",") if text], list[str]()
    place = 0
    while place < len(options):
        if options[place] == "-W":
            place += 1
            found.append(options[place])
        else:
            others.append(options[place])
        place += 1
    return list(dict.fromkeys(found)), others  # as the interpreter, which ignores repeated ones


def connect(folder: str, executable: str, options: list[str]) -> socket.socket:
    """Connect to the server for these options and this environment; start it if there is none."""
    early = sorted(
        (name, value)
        for name, value in os.environ.items()
        if name.startswith(EARLY) and name != "PYTHONWARNINGS"
    )
    key = hashlib.sha256(json.dumps([options, early]).encode()).hexdigest()[:16]
    address = os.path.join(folder, key)
    with open(f"{address}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # also while it starts: a second client waits
        connection = _connected(address)
        if connection is None:
            with open(f"{address}.log", "wb") as log:
                program = os.path.join(os.path.dirname(__file__), "server.py")
                server = subprocess.Popen(
                    [executable, *options, program, address, os.path.join(folder, "python")],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    # Nothing of the first client's own may change what is imported for all.
                    env={"PATH": os.environ.get("PATH", os.defpath), **dict(early)},
                    start_new_session=True,
                )
            until = time.monotonic() + PATIENCE
            while connection is None and server.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
                connection = _connected(address)
        if connection is None:
            with open(f"{address}.log", errors="replace") as log:
                sys.exit(f"the server of forked processes did not start:\n{log.read()}")
    return connection


def _connected(address: str) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        return None
    return connection


def main(folder: str, executable: str) -> None:
    """Run a program as `executable` would."""
    options, program = parsed(sys.argv[1:])
    if not program:
        sys.exit("forked processes run -c CODE, -m MODULE or a file")
    waiting: list[int] = []
    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: waiting.append(number))
    warnings, options = warning_options(options)
    connection = connect(folder, executable, options)
    _open_streams()
    request = {
        "program": program,
        "warnings": warnings,
        "directory": os.getcwd(),
        "environment": dict(os.environ),
        "umask": _umask(),
        "ignored": [n for n in FORWARDED if signal.getsignal(n) == signal.SIG_IGN],
    }
    socket.send_fds(connection, [b"\n"], [0, 1, 2])
    connection.sendall(json.dumps(request).encode() + b"\n")
    answers = connection.makefile("r")
    process = int(answers.readline())
    # The forked process alone decides when the streams end.
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)

    def forward(number: int, _: object = None) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, number)

    for number in FORWARDED:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    for number in waiting:
        forward(number)
    code = int(answers.readline() or -signal.SIGKILL)  # a server that is gone has left no code
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _open_streams() -> None:
    """Open what the caller has closed: three descriptors are sent."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
