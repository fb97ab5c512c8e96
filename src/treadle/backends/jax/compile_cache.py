"""Compiled programs are kept on disk, so that the next process need not compile them again.

JAX has a persistent compilation cache: it computes a key for each program, and serializes compiled
programs. Treadle turns it on, and keeps the files itself, because those of JAX are not written
atomically and not checksummed, and JAX limits their size only if another package is installed.

A file is trusted: it contains machine code that will run. The folder therefore belongs to the user
and only the user may write to it; no run directory, checkpoint or other file that Treadle reads
can name it. Nothing in it is pickled.

JAX's key contains the program, its compile options, the versions of JAX's libraries and the kind of
accelerator. It does not contain what a program for a CPU depends on: the processor, whose
instructions it uses, and the number of threads, for which its loops are divided. A program of
another processor would crash, or compute other bits. Both are part of the folder's name.
"""

import hashlib
import os
import platform
import stat
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
from jax import __version__ as jax_version
from jaxlib.version import __version__ as jaxlib_version

from ...core import compile_cache
from ...core.cores import cores
from ...errors import BackendError, TreadleWarning
from .patches import INTERNALS

# Programs that JAX and Keras compile for initial weights take 10 to 50 ms each, and reading one
# takes 3 ms. There are dozens of them before the first step, so all programs are kept.
_LEAST_SECONDS = 0.0
_LARGEST = 2**30  # bytes of all programs; those of a small network take 0.1 MB, of a large one 5 MB
_LEFT_BY_PRUNING = 0.8
_DIGEST = hashlib.sha256().digest_size
_SUFFIX, _TEMPORARY = ".program", ".tmp"
_STALE = 3600.0  # seconds after which a temporary file has lost its writer


class ProgramStore:
    """Serialized programs, one per file, with checksums and a limit of the total size.

    Implements the interface of JAX's file cache. No method raises an error: a program that cannot
    be read is compiled again, and the first failure to write is reported as a warning.

    Args:
        directory: The folder for programs of this machine and these versions.
        largest: Bytes of all programs in the parent folder; the least recently used are removed.
    """

    def __init__(self, directory: Path, largest: int = _LARGEST) -> None:
        self._path = directory
        self._largest = largest
        self._total: int | None = None
        self._writes = True
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        """Return a program, or None if it is absent, damaged, or programs are not kept now."""
        if compile_cache.folder() is None:
            return None
        file = self._file(key)
        try:
            content = file.read_bytes()
        except OSError:
            return None
        digest, program = content[:_DIGEST], content[_DIGEST:]
        if hashlib.sha256(program).digest() != digest:
            with suppress(OSError):
                file.unlink()
            return None
        with suppress(OSError):
            os.utime(file)  # most recently used
        return program

    def put(self, key: str, value: bytes) -> None:
        """Write a program atomically; after the first failure, write no more."""
        if compile_cache.folder() is None or not self._writes:
            return
        file = self._file(key)
        temporary = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}{_TEMPORARY}")
        try:
            temporary.write_bytes(hashlib.sha256(value).digest() + value)
            os.replace(temporary, file)
        except OSError as error:
            self._writes = False
            with suppress(OSError):
                temporary.unlink()
            _warn(self._path, f"cannot be written to: {error.strerror or error}")
            return
        with suppress(OSError):
            self._limit(_DIGEST + len(value))

    def _file(self, key: str) -> Path:
        """Return a program's file. The end of a key is its hash; names of functions may be long."""
        return self._path / f"{key[-100:]}{_SUFFIX}"

    def _limit(self, added: int) -> None:
        """Remove the least recently used programs once all together are too large."""
        with self._lock:
            if self._total is not None:
                self._total += added
            if self._total is not None and self._total <= self._largest:
                return
            found: list[tuple[float, int, Path]] = []
            for file in self._path.parent.glob("jax-*/*"):
                with suppress(OSError):  # other processes remove files too
                    facts = file.lstat()
                    if file.suffix == _SUFFIX:
                        found.append((facts.st_mtime, facts.st_size, file))
                    elif file.suffix == _TEMPORARY and facts.st_mtime < time.time() - _STALE:
                        file.unlink()
            self._total = sum(size for _, size, _ in found)
            if self._total <= self._largest:
                return
            for _, size, file in sorted(found):
                if self._total <= self._largest * _LEFT_BY_PRUNING:
                    break
                with suppress(OSError):
                    file.unlink()
                self._total -= size


def enable_compile_cache() -> None:
    """Let JAX keep compiled programs, unless the user has configured that or turned it off.

    Never raises an error: without the folder, programs are compiled as ever.
    """
    base = compile_cache.folder()
    config: Any = jax.config
    if base is None or config.jax_compilation_cache_dir or not config.jax_enable_compilation_cache:
        return
    directory = base / f"jax-{jax_version}-{jaxlib_version}-{machine()}"
    try:
        original: Any = INTERNALS["get_file_cache"].resolve()
        trouble = _make(base) or _make(directory)
    except (OSError, BackendError) as error:
        original, trouble = None, f"cannot be used: {getattr(error, 'strerror', None) or error}"
    if trouble:
        _warn(base, trouble)
        return
    largest = config.jax_compilation_cache_max_size
    store = ProgramStore(directory, largest if largest >= 0 else _LARGEST)

    def file_cache(path: str) -> Any:
        """Return the store for its folder, and JAX's own cache for any other."""
        return (store, path) if path == str(directory) else original(path)

    sys.modules[original.__module__].get_file_cache = file_cache  # type: ignore[attr-defined]
    config.update("jax_compilation_cache_dir", str(directory))
    config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def machine() -> str:
    """Return a hash of what compiled programs depend on and JAX's key does not contain.

    That is the processor with its features, for which XLA chooses instructions, and the number of
    threads, for which it divides loops.
    """
    threads = [os.environ.get(name, "") for name in ("NPROC", "PJRT_NPROC")]
    facts = [platform.system(), platform.machine(), *_processor(), str(cores()), *threads]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _processor() -> list[str]:
    """Return the facts about the processor that a compiler can choose instructions by."""
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags")
    names += ("Features", "CPU implementer", "CPU variant", "CPU part")  # ARM
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return [platform.processor(), platform.platform()]
    # Of the first core, as XLA does.
    pairs = [line.partition(":") for line in text.split("\n\n")[0].splitlines()]
    return [f"{name.strip()}={value.strip()}" for name, _, value in pairs if name.strip() in names]


def _make(directory: Path) -> str:
    """Make a folder that only the user may enter; return why an existing one is not safe, or ""."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    facts = directory.lstat()
    if not stat.S_ISDIR(facts.st_mode):
        return f"is not safe: {directory} is not a folder"
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        return f"is not safe: {directory} belongs to another user"
    if hasattr(os, "getuid") and facts.st_mode & 0o022:
        return f"is not safe: other users may write to {directory} (chmod 700 {directory})"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"cannot be written to: {directory} is read-only"
    return ""


def _warn(directory: Path, trouble: str) -> None:
    """Warn that programs are not kept; also where warnings are errors, this ends no run."""
    with suppress(Warning):
        warnings.warn(
            f"compiled programs are not kept for the next run: the folder {directory} {trouble}. "
            f"Set {compile_cache.VARIABLE} to another folder, or to off",
            TreadleWarning,
            stacklevel=2,
        )
