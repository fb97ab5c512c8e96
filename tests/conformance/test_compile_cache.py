"""Compiled JAX programs are kept for the next process, which computes the same bits with them."""

import json
import os
import re
import stat
import subprocess
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from tests.forked import python
from treadle.core import process_settings
from treadle.core.process_settings import COMPILE_CACHE
from treadle.errors import TreadleWarning

if keras.config.backend() != "jax":
    pytest.skip("only JAX's programs are kept", allow_module_level=True)

from jax.experimental.compilation_cache.compilation_cache import reset_cache

from treadle.backends.jax import compile_cache
from treadle.backends.jax.compile_cache import compile_fast, enable_compile_cache, machine, prune

SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)
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
    monkeypatch.setenv(COMPILE_CACHE, str(tmp_path / "programs"))


def trained(**variables: str) -> dict[str, Any]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [python(), "-W", "error::treadle.errors.TreadleWarning", "-c", TRAINING],
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
    assert trained(**{COMPILE_CACHE: "off"}) == {"bits": first["bits"], "hits": 0, "misses": 0}
    assert second["bits"] == first["bits"]
    folder = tmp_path / "programs"
    for each in (folder, *folder.glob("jax-*")):
        assert stat.S_IMODE(each.stat().st_mode) == 0o700
    for file in folder.glob("jax-*/*"):
        file.write_bytes(file.read_bytes()[:-7])
    damaged = trained()  # compiled again
    assert damaged["bits"] == first["bits"] and damaged["hits"] == 0


@pytest.mark.long
def test_a_users_own_folder_is_left_alone(tmp_path: Path) -> None:
    trained(JAX_COMPILATION_CACHE_DIR=str(tmp_path / "own"))
    assert not (tmp_path / "programs").exists()


# The files


def test_the_oldest_programs_are_removed_at_the_start_of_a_process(tmp_path: Path) -> None:
    for number in range(4):
        file = tmp_path / f"jax-{number % 2}" / f"jit_f-{number}-cache"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(200))
        then = time.time() - 100 + number
        os.utime(file, (then, then))
    prune(tmp_path, largest=800)
    assert len(list(tmp_path.glob("jax-*/*"))) == 4
    prune(tmp_path, largest=700)
    assert {file.name for file in tmp_path.glob("jax-*/*")} == {"jit_f-2-cache", "jit_f-3-cache"}


def test_no_more_programs_are_kept_once_it_is_turned_off(monkeypatch: Any, tmp_path: Path) -> None:
    import jax

    before = {name: getattr(jax.config, name) for name in SETTINGS}
    monkeypatch.setattr(process_settings, "when_switched", process_settings.when_switched)
    monkeypatch.setenv(COMPILE_CACHE, str(tmp_path / "programs"))
    try:
        jax.config.update("jax_enable_compilation_cache", True)
        jax.config.update("jax_compilation_cache_dir", None)
        reset_cache()
        enable_compile_cache()
        jax.jit(lambda x: x + 1234.5)(1.0)
        kept = len(list(tmp_path.glob("programs/jax-*/*")))
        assert kept
        process_settings.keep_compiled(on=False)
        jax.jit(lambda x: x + 2345.6)(1.0)
        assert len(list(tmp_path.glob("programs/jax-*/*"))) == kept
        process_settings.keep_compiled(on=True)
        monkeypatch.setenv(COMPILE_CACHE, str(tmp_path / "programs"))  # which was `off` meanwhile
        jax.jit(lambda x: x + 3456.7)(1.0)
        assert len(list(tmp_path.glob("programs/jax-*/*"))) > kept
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        reset_cache()


# The configuration


class Config:
    """A stand-in for `jax.config`."""

    def __init__(self, **settings: Any) -> None:
        self.jax_compilation_cache_dir = None
        self.jax_enable_compilation_cache = True
        vars(self).update(settings)

    def update(self, name: str, value: Any) -> None:
        setattr(self, name, value)


@pytest.fixture
def jax(monkeypatch: Any) -> Any:
    stand_in = SimpleNamespace(config=Config(), __version_info__=(0, 9, 0))
    monkeypatch.setattr(compile_cache, "jax", stand_in)
    monkeypatch.setattr(process_settings, "when_switched", process_settings.when_switched)
    return stand_in


def test_it_is_on_by_default(jax: Any) -> None:
    enable_compile_cache()
    folder = jax.config.jax_compilation_cache_dir
    assert folder.startswith(
        os.path.join(os.environ[COMPILE_CACHE], f"jax-{compile_cache.jax_version}-")
    )
    assert folder.endswith(f"-{machine()}")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert jax.config.jax_persistent_cache_min_entry_size_bytes == -1


def test_versions_that_read_programs_wrongly_keep_none(jax: Any) -> None:
    jax.__version_info__ = (0, 6, 0)
    enable_compile_cache()
    assert not jax.config.jax_compilation_cache_dir
    jax.config.jax_compilation_cache_dir = "own"
    expected = (
        f"JAX {compile_cache.jax_version} may compute other values with a program that it reads "
        "from own: install JAX 0.6.1 or newer, or unset jax_compilation_cache_dir"
    )
    with pytest.warns(TreadleWarning, match=f"^{re.escape(expected)}$"):
        enable_compile_cache()


@pytest.mark.parametrize(
    "settings", [{"jax_compilation_cache_dir": "own"}, {"jax_enable_compilation_cache": False}]
)
def test_what_the_user_configured_stays(jax: Any, settings: dict[str, Any]) -> None:
    jax.config = Config(**settings)
    enable_compile_cache()
    assert vars(jax.config) == vars(Config(**settings))
    assert not Path(os.environ[COMPILE_CACHE]).exists()


def test_it_stays_off(jax: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv(COMPILE_CACHE, "off")
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
    monkeypatch.setenv(COMPILE_CACHE, str(tmp_path / "file" / "programs"))
    assert refused(jax).startswith("cannot be used: ")


def refused(jax: Any) -> str:
    """Return why the folder is not used; warnings that are errors do not end a run."""
    with pytest.warns(TreadleWarning) as caught:
        enable_compile_cache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        enable_compile_cache()
    assert vars(jax.config) == vars(Config())
    start = (
        f"compiled programs are not kept for the next run: the folder {os.environ[COMPILE_CACHE]} "
    )
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


@pytest.mark.parametrize(
    ("setting", "flags", "expected"),
    [
        ("1", "", "--xla_cpu_use_fusion_emitters=false"),
        ("1", "--xla_a=1", "--xla_a=1 --xla_cpu_use_fusion_emitters=false"),
        ("1", "--xla_cpu_use_fusion_emitters=true", "--xla_cpu_use_fusion_emitters=true"),
        ("0", "", ""),
    ],
)
def test_code_is_generated_fast_where_jax_is_set_not_to_optimize(
    monkeypatch, setting, flags, expected
):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", setting)
    monkeypatch.setenv("XLA_FLAGS", flags)
    compile_fast()
    assert os.environ["XLA_FLAGS"] == expected


def test_a_flag_that_xla_does_not_know_is_not_set(monkeypatch):
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(compile_cache, "_FLAG", "xla_cpu_use_" + "unknown_emitters")
    compile_fast()
    assert os.environ["XLA_FLAGS"] == ""
