"""Compiled programs are kept on disk, so that the next process need not compile them again.

JAX has a persistent compilation cache, with a key for each program. Treadle turns it on, in a
folder of its own, which is trusted: its files contain machine code that will run. The folder
therefore belongs to the user and only the user may write to it; no run directory, checkpoint or
other file that Treadle reads can name it.

JAX's key contains the program, its compile options, the versions of JAX's libraries and the kind of
accelerator. It does not contain what a program for a CPU depends on: the processor, whose
instructions it uses, and the number of threads, for which its loops are divided. A program of
another processor would crash, or compute other bits. Both are part of the folder's name.
"""

import hashlib
import os
import platform
import stat
import warnings
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

import jax
from jax import __version__ as jax_version
from jax.experimental.compilation_cache.compilation_cache import reset_cache
from jaxlib.version import __file__ as jaxlib_version_file
from jaxlib.version import __version__ as jaxlib_version

from ...core import process_settings
from ...core.process_settings import cores
from ...errors import TreadleWarning

LARGEST: Final = 2**30
"""Bytes of all programs; those of a small network take 0.1 MB, of a large one 5 MB. JAX limits
them itself only if another package is installed, and then reads a second file for each program."""
LEFT_BY_PRUNING: Final = 0.8
RIGHT_SINCE: Final = (0, 6, 1)
"""The version of JAX since which a program read from the cache gives the values of a compiled one.

On CPUs, windows of steps read by JAX 0.5.1, 0.5.3 and 0.6.0 return zeros, without an error."""


def enable_compile_cache() -> None:
    """Let JAX keep compiled programs, unless the user has configured that or turned it off.

    Never raises an error: without the folder, programs are compiled as ever.
    """
    process_settings.when_switched = _switch
    base = process_settings.compile_cache_folder()
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return
    if jax.__version_info__ < RIGHT_SINCE:
        if config.jax_compilation_cache_dir:
            warnings.warn(
                f"JAX {jax_version} may compute other values with a program that it reads from "
                f"{config.jax_compilation_cache_dir}: install JAX 0.6.1 or newer, or unset "
                "jax_compilation_cache_dir",
                TreadleWarning,
                stacklevel=2,
            )
        return
    if base is None or config.jax_compilation_cache_dir:
        return
    directory = base / f"jax-{jax_version}-{jaxlib_version}-{machine()}"
    try:
        trouble = _make(base) or _make(directory)
    except OSError as error:
        trouble = f"cannot be used: {error.strerror or error}"
    if trouble:
        _warn(base, trouble)
        return
    prune(base)
    config.update("jax_compilation_cache_dir", str(directory))
    # Programs that JAX and Keras compile for initial weights take 10 to 50 ms each, and reading one
    # takes 3 ms. There are dozens of them before the first step, so all programs are kept.
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    _directories.append(str(directory))


_directories: list[str] = []  # that JAX was given


def _switch(on: bool) -> None:
    if jax.config.jax_compilation_cache_dir in _directories:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_enable_compilation_cache", on)
        reset_cache()  # JAX looks at the setting once
    elif on:
        enable_compile_cache()


def prune(base: Path, largest: int = LARGEST) -> None:
    """Remove the oldest programs of all versions and machines if together they are too large."""
    found: list[tuple[float, int, Path]] = []
    for file in base.glob("jax-*/*"):
        with suppress(OSError):  # other processes remove files too
            facts = file.lstat()
            found.append((facts.st_mtime, facts.st_size, file))
    total = sum(size for _, size, _ in found)
    most = total if total <= largest else largest * LEFT_BY_PRUNING
    for _, size, file in sorted(found):
        if total <= most:
            return
        with suppress(OSError):
            file.unlink()
        total -= size


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


_NOT_OPTIMIZED: Final = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_FLAG: Final = "xla_cpu_use_fusion_emitters"


def compile_fast() -> None:
    """Let XLA generate code for CPUs in half the time, if JAX is set not to optimize it.

    XLA reads its flags once, when it starts, and ends the process at one that it does not know. So
    the name is looked for in its library.
    """
    if os.environ.get(_NOT_OPTIMIZED) != "1" or _FLAG in (flags := os.environ.get("XLA_FLAGS", "")):
        return
    folder = Path(jaxlib_version_file).parent
    for library in (*folder.glob("libjax_common.*"), *folder.glob("xla_extension.*")):
        with library.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as content:
            if content.find(_FLAG.encode()) >= 0:
                os.environ["XLA_FLAGS"] = f"{flags} --{_FLAG}=false".strip()


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
            f"Set {process_settings.COMPILE_CACHE} to another folder, or to off",
            TreadleWarning,
            stacklevel=2,
        )
