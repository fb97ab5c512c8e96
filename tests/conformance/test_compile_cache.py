"""Compiled JAX programs are kept for the next process, which computes the same bits with them."""

import json
import os
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from treadle.core.compile_cache import VARIABLE
from treadle.errors import TreadleWarning

if keras.config.backend() != "jax":
    pytest.skip("only JAX's programs are kept", allow_module_level=True)

from treadle.backends.jax import compile_cache
from treadle.backends.jax.compile_cache import ProgramStore, enable_compile_cache, machine

TRAINING = """
import hashlib, json, sys
import keras, numpy as np, treadle
treadle.setup(seed=1)

class Learned(treadle.Task):
    def __init__(self):
        self.model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="tanh"),
                                       keras.layers.Dropout(0.2), keras.layers.Dense(4)])
        self.optimizer = keras.optimizers.Adam(1e-2)
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train_step(self, batch):
        x, y = batch
        loss, grads = treadle.gradients(
            lambda: self.loss(y, self.model(x, training=True)), self.model.trainable_variables)
        self.optimizer.apply(grads, self.model.trainable_variables)
        return {"loss": loss}

import jax
counted = {"hits": 0, "misses": 0}

def count(event, **facts):
    for name in counted:
        counted[name] += event == f"/jax/compilation_cache/cache_{name}"

jax.monitoring.register_event_listener(count)
random = np.random.default_rng(0)
x, y = random.normal(size=(48, 8)), random.integers(0, 4, 48)
task = Learned()
with treadle.Loop(task, console=False) as loop:
    loop.fit(treadle.data.from_arrays(x, y, batch_size=8), epochs=3)
bits = hashlib.sha256(b"".join(np.asarray(w) for w in task.model.get_weights())).hexdigest()
print(json.dumps({"bits": bits, **counted}))
"""


@pytest.fixture(autouse=True)
def on(monkeypatch: Any, tmp_path: Path) -> None:
    """Programs are kept in a folder of the test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))


def trained(**variables: str) -> dict[str, Any]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-W", "error::treadle.errors.TreadleWarning", "-c", TRAINING],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.long
def test_a_second_process_compiles_nothing_and_computes_the_same_bits(tmp_path: Path) -> None:
    first, second = trained(), trained()
    assert first["misses"] > 0
    assert second["hits"] > 0 and second["misses"] == 0
    assert trained(**{VARIABLE: "off"}) == {"bits": first["bits"], "hits": 0, "misses": 0}
    assert second["bits"] == first["bits"]
    folder = tmp_path / "programs"
    for each in (folder, *folder.glob("jax-*")):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    for file in folder.glob("jax-*/*"):
        file.write_bytes(file.read_bytes()[:-7])
    assert trained() == first
    assert trained() == second


@pytest.mark.long
def test_a_users_own_folder_is_left_alone(tmp_path: Path) -> None:
    trained(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert not (tmp_path / "programs").exists()


# The files


def test_a_program_is_read_back() -> None:
    store = ProgramStore(made(Path(os.environ[VARIABLE], "jax-1")))
    assert store.get("jit_f-1") is None
    store.put("jit_f-1", b"program")
    store.put("jit_f-1", b"another")
    assert store.get("jit_f-1") == b"another"
    assert store.get("jit_f-2") is None
    long = "jit_" + "f" * 400 + "-abc"
    store.put(long, b"long")
    assert store.get(long) == b"long"


def test_nothing_is_read_or_written_once_it_is_turned_off(monkeypatch: Any) -> None:
    store = ProgramStore(made(Path(os.environ[VARIABLE], "jax-1")))
    store.put("jit_f-1", b"program")
    monkeypatch.setenv(VARIABLE, "off")
    assert store.get("jit_f-1") is None
    store.put("jit_f-2", b"program")
    monkeypatch.undo()
    assert len(list(store._path.iterdir())) == 1


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 100])
def test_a_damaged_program_is_removed(content: bytes) -> None:
    store = ProgramStore(made(Path(os.environ[VARIABLE], "jax-1")))
    store.put("jit_f-1", b"program")
    (file,) = store._path.iterdir()
    file.write_bytes(content)
    assert store.get("jit_f-1") is None
    assert not file.exists()


def test_the_first_failure_to_write_is_a_warning(monkeypatch: Any) -> None:
    store = ProgramStore(made(Path(os.environ[VARIABLE], "jax-1")))

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.warns(TreadleWarning) as caught:
        store.put("jit_f-1", b"program")
    assert str(caught[0].message) == (
        f"compiled programs are not kept for the next run: the folder {store._path} cannot be "
        f"written to: No space left on device. Set TREADLE_COMPILE_CACHE to another folder, or to "
        "off"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        store.put("jit_f-2", b"program")
        ProgramStore(store._path).put("jit_f-3", b"program")  # no error, though warnings are
    assert not list(store._path.iterdir())


def test_the_least_recently_used_programs_are_removed() -> None:
    folder = Path(os.environ[VARIABLE])
    old = ProgramStore(made(folder / "jax-1"))
    new = ProgramStore(made(folder / "jax-2"), largest=1000)
    for number in range(4):
        old.put(f"jit_f-{number}", bytes(200))
        aged(old._path / f"jit_f-{number}.program", 100 - number)
    for age, name in ((9000, "stale.1-1.tmp"), (0, "written.2-2.tmp")):
        (old._path / name).touch()
        aged(old._path / name, age)
    assert old.get("jit_f-0") is not None  # used just now
    new.put("jit_g", bytes(200))
    left = {file.name for file in folder.glob("jax-*/*")}
    assert left == {"jit_f-0.program", "jit_f-3.program", "jit_g.program", "written.2-2.tmp"}
    for number in range(3):
        new.put(f"jit_h-{number}", bytes(200))
    assert sum(file.stat().st_size for file in folder.glob("jax-*/*")) <= 1000


# The configuration


class Config:
    """A stand-in for `jax.config`."""

    def __init__(self, **settings: Any) -> None:
        self.jax_compilation_cache_dir = None
        self.jax_enable_compilation_cache = True
        self.jax_compilation_cache_max_size = -1
        vars(self).update(settings)

    def update(self, name: str, value: Any) -> None:
        setattr(self, name, value)


@pytest.fixture
def jax(monkeypatch: Any) -> Any:
    """A stand-in for JAX, and for its function that makes a file cache."""
    stand_in = SimpleNamespace(config=Config())
    monkeypatch.setattr(compile_cache, "jax", stand_in)
    from jax._src import compilation_cache  # type: ignore[import-untyped]

    monkeypatch.setattr(compilation_cache, "get_file_cache", lambda path: ("JAX's own", path))
    return stand_in


def test_it_is_on_by_default(jax: Any) -> None:
    from jax._src import compilation_cache  # type: ignore[import-untyped]

    original = compilation_cache.get_file_cache
    compilation_cache.get_file_cache.__module__ = compilation_cache.__name__
    enable_compile_cache()
    folder = jax.config.jax_compilation_cache_dir
    assert folder.startswith(
        os.path.join(os.environ[VARIABLE], f"jax-{compile_cache.jax_version}-")
    )
    assert folder.endswith(f"-{machine()}")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1
    assert isinstance(compilation_cache.get_file_cache(folder)[0], ProgramStore)
    assert compilation_cache.get_file_cache("/other") == original("/other")


@pytest.mark.parametrize(
    "settings", [{"jax_compilation_cache_dir": "own"}, {"jax_enable_compilation_cache": False}]
)
def test_what_the_user_configured_stays(jax: Any, settings: dict[str, Any]) -> None:
    jax.config = Config(**settings)
    enable_compile_cache()
    assert vars(jax.config) == vars(Config(**settings))
    assert not Path(os.environ[VARIABLE]).exists()


def test_it_stays_off(jax: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    enable_compile_cache()
    assert vars(jax.config) == vars(Config())


def shared(folder: Path) -> str:
    folder.mkdir()
    folder.chmod(0o777)
    return f"is not safe: other users may write to {folder} (chmod 700 {folder})"


def linked(folder: Path) -> str:
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    return f"is not safe: {folder} is not a folder"


@pytest.mark.parametrize("make", [shared, linked])
def test_an_unsafe_folder_is_refused(jax: Any, tmp_path: Path, make: Any) -> None:
    trouble = make(tmp_path / "programs")
    assert refused(jax) == trouble


def test_a_folder_of_another_user_is_refused(jax: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "programs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert refused(jax) == f"is not safe: {tmp_path / 'programs'} belongs to another user"


def test_a_read_only_folder_is_refused(jax: Any, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "programs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "access", lambda *arguments: False)
    assert refused(jax) == f"cannot be written to: {tmp_path / 'programs'} is read-only"


def test_a_folder_that_cannot_be_made_is_refused(
    jax: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "programs"))
    assert refused(jax).startswith("cannot be used: ")


def test_another_version_of_jax_keeps_no_programs(
    jax: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    from jax._src import compilation_cache  # type: ignore[import-untyped]

    monkeypatch.delattr(compilation_cache, "get_file_cache")
    assert refused(jax).startswith("cannot be used: JAX ")


def refused(jax: Any) -> str:
    """Return why the folder is not used; warnings that are errors do not end a run."""
    with pytest.warns(TreadleWarning) as caught:
        enable_compile_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_compile_cache()
    assert vars(jax.config) == vars(Config())
    start = f"compiled programs are not kept for the next run: the folder {os.environ[VARIABLE]} "
    end = ". Set TREADLE_COMPILE_CACHE to another folder, or to off"
    message = str(caught[0].message)
    assert message.startswith(start) and message.endswith(end)
    return message.removeprefix(start).removesuffix(end)


def test_a_program_belongs_to_a_processor_and_a_number_of_threads(monkeypatch: Any) -> None:
    found = machine()
    assert machine() == found
    monkeypatch.setattr(compile_cache, "cores", lambda: 4096)
    assert machine() != found
    monkeypatch.undo()
    monkeypatch.setenv("NPROC", "4096")
    assert machine() != found
    monkeypatch.undo()
    text = "processor: 0\nflags\t: fpu avx\ncpu MHz: 1\n\nprocessor: 1\nflags: fpu avx\n"
    hashes: list[str] = []
    for written in (text, text.replace("MHz: 1", "MHz: 2"), text.replace("avx", "avx512f")):
        monkeypatch.setattr(Path, "read_text", lambda path, written=written: written)
        hashes.append(machine())
    assert hashes[0] == hashes[1] != hashes[2]


def made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def aged(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))
