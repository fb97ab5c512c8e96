"""Settings of this folder's tests."""

import fcntl
import getpass
import os
import tempfile
from pathlib import Path

import keras
import pytest
from keras_versions import keep_fit_on_jax, seed_as_newer_versions

if keras.config.backend() == "jax":
    import jax

    from treadle.backends.jax.compile_cache import machine

    def own_cache() -> Path:
        """Return a folder that no other process uses now: JAX reads what is half written.

        Programs of another kind of processor are not found in it.
        """
        root = Path(tempfile.gettempdir())
        name = f"treadle-jax-{jax.__version__}-{machine()[:12]}-{getpass.getuser()}"
        number = 0
        while True:
            folder = root / f"{name}-{number}"
            folder.mkdir(exist_ok=True)
            lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR)  # it ends with this process
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                number += 1
            else:
                return folder

    # Most of the time on JAX goes into compiling the same programs as last time. Only for this
    # process: what processes that tests start agree on must not come out of one cache.
    cache = own_cache()
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

if keras.config.backend() == "torch":
    import torch

    # These tensors are tiny: threads only wait for one another, for long where tests of two
    # backends share two cores (measured: 167 s instead of 24 s).
    torch.set_num_threads(1)


def pytest_ignore_collect(collection_path, config):
    """Leave tests of other folders to those, on PyTorch, unless these alone run on a device."""
    if collection_path.name.startswith("test_smoke") and keras.config.backend() == "torch":
        return not config.option.accelerator or None
    return None


@pytest.fixture(scope="session", autouse=True)
def as_newer_versions():
    """What tests compare with is the same on every Keras: unseeded numbers, and `fit`."""
    with pytest.MonkeyPatch.context() as patch:
        seed_as_newer_versions(patch)
        keep_fit_on_jax(patch)
        yield
