"""Faults of the file system, to be put into what writes and reads checkpoints."""

import errno
import os
import struct
import threading
from dataclasses import fields
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.waiting import WATCHDOG
from treadle import checkpoint as files
from treadle.checkpoint import SavedState
from treadle.core.folder import FileSystem, Folder
from treadle.core.folder_operations import append, sync_file, sync_folder
from treadle.core.progress import Progress
from treadle.errors import CheckpointError

READING = (
    *("open_path", "open_subfolder", "open_file", "read_file"),
    *("list_names", "inspect", "free_bytes"),
)


def path_of(arguments):
    """The path of what an operation is done to."""
    match arguments:
        case [Folder() as folder, str(name), *_]:
            return folder.path / name
        case [Folder() as folder]:
            return folder.path
        case [Path() as path]:
            return path
        case [file, *_]:
            return Path(file.name)


def write(path, saved, system=None, whole=None):
    """Write a checkpoint into a folder; returns its own folder."""
    with Folder.open(path, error=CheckpointError, system=system) as folder:
        return path / files.write(folder, saved, whole)


def read(path, system=None):
    with Folder.open(path.parent, error=CheckpointError, system=system) as folder:
        return files.read(folder, path.name)


class Crash(BaseException):
    """The process is gone: no handler of errors runs."""


class Quick(FileSystem):
    """As files are, without waiting for a disk; knows what was done.

    Attributes:
        operations: The names of all operations so far.
        most: The most states that lay on the disk at once.
    """

    def __init__(self, root=None):
        self.operations, self.root, self.most = [], root, 0

    def perform(self, operation, *arguments):
        self.operations.append(operation.__name__)
        self.before(operation, *arguments)
        try:
            if operation not in (sync_file, sync_folder):
                return operation(*arguments)
        finally:
            if self.root is not None:
                self.most = max(self.most, sum(1 for _ in self.root.rglob("arrays.safetensors")))

    def before(self, operation, *arguments):
        pass


class Dies(Quick):
    """Dies at one operation, in the middle of it where it writes."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def before(self, operation, *arguments):
        if len(self.operations) == self.at and operation is append:
            file, piece = arguments
            append(file, piece[: len(piece) // 2])
        if len(self.operations) >= self.at:
            raise Crash


class Refuses(Quick):
    """Fails operations of one name whose path or file contains a text, as the system would."""

    def __init__(self, number, operation, text="", times=1):
        super().__init__()
        self.number, self.operation, self.text, self.times = number, operation, text, times

    def before(self, operation, *arguments):
        place = str(path_of(arguments))
        if self.times and operation.__name__ == self.operation and self.text in place:
            self.times -= 1
            raise OSError(self.number, os.strerror(self.number))


class Gated(Quick):
    """A disk that takes nothing until it is let."""

    def __init__(self):
        super().__init__()
        self.reached, self.gate = threading.Event(), threading.Event()

    def before(self, operation, *arguments):
        if operation is append:
            self.reached.set()
            assert self.gate.wait(WATCHDOG)


class Recording(Quick):
    """Keeps all that was done, to be done again on a `Disk`.

    Attributes:
        log: Operation and arguments; `("announce", step)` where a step was announced as saved.
        written: The paths of all files that were written or renamed.
    """

    def __init__(self):
        super().__init__()
        self.log, self.written = [], set()

    def perform(self, operation, *arguments):
        result = super().perform(operation, *arguments)
        name = operation.__name__
        if name == "sync_file" and path_of(arguments) not in self.written:
            self._written_by_others(path_of(arguments))
        if name not in READING:
            more = []
            if name in ("append", "truncate"):
                more = [bytes(arguments[1]) if name == "append" else arguments[1]]
            elif name == "replace":
                folder, _, new, to = (*arguments, None)[:4]
                more = [(to or folder).path / new]
            self.written.add(more[0] if name == "replace" else path_of(arguments))
            self.log.append((name, path_of(arguments), *more))
        return result

    def _written_by_others(self, path):
        """Record a file that a library wrote, as Keras does with models."""
        self.log += [("create_file", path), ("append", path, path.read_bytes())]


class _File:
    def __init__(self):
        self.now, self.safe = b"", b""


class _Folder:
    def __init__(self):
        self.now, self.safe = {}, {}


class Disk:
    """A disk with a cache that a power cut empties.

    Contents of a file are safe after a sync of the file, names in a folder after one of the folder.

    Args:
        root: The path of the folder that is on the disk; it is empty.
    """

    def __init__(self, root):
        self.root, self.top = root, _Folder()

    def load(self, path):
        """Start with what a folder contains; all of it is safe."""
        self._load(self.top, path)

    def _load(self, folder, path):
        for found in path.iterdir():
            entry = _Folder() if found.is_dir() else _File()
            if found.is_dir():
                self._load(entry, found)
            else:
                entry.now = entry.safe = found.read_bytes()
            folder.now[found.name] = folder.safe[found.name] = entry

    def do(self, name, path, *arguments):
        if name == "sync_folder":
            found = self._folder(path)
            found.safe = dict(found.now)
            return
        folder = self._folder(path.parent)
        if name == "make_folder":
            folder.now[path.name] = _Folder()
        elif name == "create_file":
            folder.now[path.name] = _File()
        elif name == "open_to_append":
            folder.now.setdefault(path.name, _File())
        elif name == "append":
            folder.now[path.name].now += arguments[0]
        elif name == "truncate":
            folder.now[path.name].now = folder.now[path.name].now[: arguments[0]]
        elif name == "sync_file":
            folder.now[path.name].safe = folder.now[path.name].now
        elif name == "replace":
            [new] = arguments
            self._folder(new.parent).now[new.name] = folder.now.pop(path.name)
        elif name in ("unlink", "remove_empty"):
            del folder.now[path.name]
        else:
            raise AssertionError(name)

    def lay_out(self, target, choose):
        """Make files of what a power cut leaves.

        `choose(0)` or `choose(1)` says whether what is not safe is there nevertheless: 0 asks for
        a name or the lack of one, 1 for the contents of a file. Instead, `choose(1)` may return a
        function of the safe and the unsafe contents that returns what is there.
        """
        self._lay_out(self.top, target, choose)

    def _lay_out(self, folder, target, choose):
        target.mkdir()
        for name in {**folder.safe, **folder.now}:
            safe, now = folder.safe.get(name), folder.now.get(name)
            found = now if now is not safe and choose(0) else safe
            if isinstance(found, _Folder):
                self._lay_out(found, target / name, choose)
            elif found is not None:
                is_there = choose(1) if found.now != found.safe else True
                content = found.now if is_there else found.safe
                if callable(is_there):
                    content = is_there(found.safe, found.now)
                (target / name).write_bytes(content)

    def _folder(self, path):
        found = self.top
        if path != self.root:
            for part in path.relative_to(self.root).parts:
                found = found.now[part]
        return found


def no_space(operation="append", text="arrays.safetensors"):
    return Refuses(errno.ENOSPC, operation, text)


def checkpoint(step, fixed=True, **more):
    """A small checkpoint whose every value depends on the step, but for what is fixed."""
    random = np.random.default_rng(step)
    state = {
        "model/kernel": random.standard_normal((3, 4)).astype("f4"),
        "model/bias": random.standard_normal(5).astype(ml_dtypes.bfloat16),
        "random/keras": random.integers(0, 1 << 32, 2, dtype=np.uint32),
    }
    if fixed:
        state["backbone/kernel"] = np.arange(20.0)
    return SavedState(
        Progress(step, step // 5, step % 5, 32 * step, 0.1 * step),
        state,
        frozenset(["backbone/kernel"]) if fixed else frozenset(),
        loop={"call": 0, "means": {"loss": [0.1 * step, step]}},
        hooks={"order": {"seen": np.arange(step)}},
        **more,
    )


def same(left, right):
    """Whether two values are equal in type and in every bit."""
    if isinstance(left, SavedState):
        names = [field.name for field in fields(left) if field.compare]  # wherever they lie
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, np.ndarray):
        return (left.dtype, left.shape, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.tobytes(),
        )
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return type(right) is float and struct.pack("d", left) == struct.pack("d", right)
    return type(left) is type(right) and left == right
