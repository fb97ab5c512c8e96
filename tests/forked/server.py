"""A process that has imported Keras, and forks for each client: `server.py SOCKET EXECUTABLE`.

The forked process returns from `serve`, and runs the client's program as the interpreter would, to
the interpreter's own end: exit codes, tracebacks, `atexit` and threads are the real ones.
"""

import fcntl
import gc
import importlib
import importlib.machinery
import io
import json
import os
import resource
import select
import selectors
import signal
import socket
import sys
import threading
import time
import types
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

IDLE_SECONDS = 120.0  # after which a server ends: each holds 250 to 700 MiB
LOOKS_EVERY = 2.0  # seconds, for whether the tests have ended


DEFAULTS = [*warnings.filters]  # of an interpreter without options


def load() -> None:
    """Import what programs import, and compute nothing: no thread and no device may be in use."""
    import keras  # noqa: F401

    for name in os.environ.get("FORKED_IMPORTS", "").split():
        importlib.import_module(name)

    import treadle

    for name in treadle.__all__:
        getattr(treadle, name)
    import treadle.cli
    from treadle.backends.base import active

    active()
    # A fork takes no thread along. BLAS has native ones, and prepares them for forks itself.
    assert threading.active_count() == 1, threading.enumerate()


def serve(address: str) -> dict[str, Any]:
    """Fork for each client. Returns, in a forked process, what its client asks for."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    for each in (listener, woken):
        selector.register(each, selectors.EVENT_READ)
    clients: dict[int, socket.socket] = {}
    used = time.monotonic()
    while True:
        events = selector.select(LOOKS_EVERY)
        if events or clients:
            used = time.monotonic()
        elif not os.path.exists(address) or (
            time.monotonic() - used > IDLE_SECONDS and _closed(listener, address)
        ):
            os._exit(0)
        for key, _ in events:
            if key.fileobj is woken:
                woken.recv(4096)
                _reap(clients, selector)
                _note_seconds(address)
            elif key.fileobj is listener:
                client, _ = listener.accept()
                request = _request(client)
                process = os.fork() if request else -1
                if process == 0:
                    signal.set_wakeup_fd(-1)
                    selector.close()
                    for each in (listener, woken, waker, client, *clients.values()):
                        each.close()
                    return request
                for stream in request.get("streams", ()):
                    os.close(stream)
                if request:
                    clients[process] = client
                    selector.register(client, selectors.EVENT_READ, process)
                    with suppress(OSError):  # it was killed, which the next event says
                        client.sendall(f"{process}\n".encode())
            elif key.data in clients:  # its client was killed
                _kill(key.data)
                selector.unregister(key.fileobj)


def _request(client: socket.socket) -> dict[str, Any]:
    """Return what a client asks for, with the streams that it has sent; empty if it was killed."""
    streams: list[int] = []
    with suppress(ValueError, OSError), client.makefile("r") as asked:
        streams = socket.recv_fds(client, 1, 3)[1]
        return {**json.loads(asked.readline()), "streams": streams}
    for stream in streams:
        os.close(stream)
    client.close()
    return {}


def _closed(listener: socket.socket, address: str) -> bool:
    """Remove the socket, unless a client is about to connect."""
    with open(f"{address}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if select.select([listener], [], [], 0)[0]:
            return False
        os.unlink(address)
        return True


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _reap(clients: dict[int, socket.socket], selector: selectors.BaseSelector) -> None:
    """Send the exit codes of the processes that have ended."""
    while clients:
        try:
            process, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not process:
            return
        client = clients.pop(process)
        if client in selector.get_map():
            selector.unregister(client)
        with suppress(OSError):  # it was killed
            client.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        client.close()


def _note_seconds(address: str) -> None:
    """Store how long this process and the forked ones computed, for which no process waits."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    written = Path(f"{address}.seconds.new")
    written.write_text(str(sum(u.ru_utime + u.ru_stime for u in used)))
    written.replace(f"{address}.seconds")  # it may be read at any time


def become(request: dict[str, Any], executable: str) -> list[str]:
    """Take over what a process inherits; returns the words that name its program."""
    for number, stream in enumerate(request["streams"]):
        os.dup2(stream, number)
        os.close(stream)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["directory"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    filter_warnings(request["warnings"])
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = sys.__stdin__ = open(0, encoding=sys.stdin.encoding, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, sys.stdout, at_once)
    sys.stderr = sys.__stderr__ = _writer(2, sys.stderr, at_once)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # as a process that imports it; `random` does it itself
    sys.executable = executable
    sys.orig_argv = [executable, *request["program"]]
    return request["program"]


def filter_warnings(options: list[str]) -> None:
    """Filter warnings as an interpreter with these options does; keep the filters of libraries."""
    added = [each for each in warnings.filters if each not in DEFAULTS]
    warnings.resetwarnings()
    warnings.filters.extend(DEFAULTS)
    warnings._processoptions(options)  # type: ignore[attr-defined]
    warnings.filters[:0] = added
    sys.warnoptions[:] = options


def _writer(number: int, before: Any, at_once: bool) -> io.TextIOWrapper:
    """Open a standard stream as the interpreter does."""
    raw = io.FileIO(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),  # type: ignore[arg-type]
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=not at_once and (raw.isatty() or number == 2),
        write_through=at_once,
    )


def run(words: list[str]) -> None:
    """Run a program as `python WORDS`."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    first, *rest = words
    if first == "-m":
        import runpy

        sys.path[0] = os.getcwd()
        sys.argv = ["-m", *rest[1:]]
        runpy._run_module_as_main(rest[0])  # what the interpreter itself calls
        return
    if first == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *rest[1:]]
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(first))
        sys.argv = words
        module.__file__ = os.path.abspath(first)
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", module.__file__)
        code = compile(Path(first).read_bytes(), module.__file__, "exec")
    exec(code, module.__dict__)


def main() -> None:
    address, executable = sys.argv[1:]
    load()
    gc.collect()
    gc.freeze()  # collections of the forked processes would copy the memory of all modules
    program = become(serve(address), executable)
    try:
        run(program)
    except BaseException as error:
        show, shown = sys.excepthook, error.__traceback__
        # A traceback begins with the program, not with this file.
        while shown is not None and shown.tb_frame.f_code.co_filename == __file__:
            shown = shown.tb_next
        sys.excepthook = lambda kind, value, _: show(kind, value.with_traceback(shown), shown)
        raise


if __name__ == "__main__":
    main()
