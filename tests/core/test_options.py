"""How steps are executed, and what is said before a run."""

import dataclasses
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.core import options, process_settings
from treadle.core.options import Options
from treadle.errors import BackendError, ConfigurationError

OTHER = "torch" if keras.config.backend() != "torch" else "jax"


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())
    keras.backend.clear_session()
    yield
    keras.config.set_dtype_policy("float32")
    keras.backend.clear_session()


def test_options_are_frozen_values_with_defaults() -> None:
    assert dataclasses.asdict(Options()) == {
        "execution": "auto",
        "window": None,
        "fused": None,
        "jit": None,
        "compiler": "auto",
        "data_on_device": None,
        "preflight": True,
        "checked": False,
        "skip_nonfinite": False,
    }
    assert Options(window=8) == Options(window=8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().window = 3  # type: ignore[misc]


def test_invalid_options_are_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Options(execution="eagre")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "unknown execution 'eagre'. Did you mean 'eager'? Known: auto, compiled, eager, measure."
    )
    with pytest.raises(ConfigurationError) as caught:
        Options(compiler="induktor")  # type: ignore[arg-type]
    assert str(caught.value) == (
        "unknown compiler 'induktor'. Did you mean 'inductor'? Known: auto, inductor, "
        "cuda-graph, captured."
    )
    for window in (0, -3):
        with pytest.raises(ConfigurationError, match=f"window must be at least 1, not {window}"):
            Options(window=window)
    for value, message in (("8", "'8': write window=8"), (2.5, r"2\.5")):
        with pytest.raises(ConfigurationError, match=f"^window must be .* number, not {message}$"):
            Options(window=value)  # type: ignore[arg-type]
    assert type(Options(window=np.int64(8)).window) is int


def test_a_backend_that_runs_may_be_named_again() -> None:
    treadle.setup(backend=keras.config.backend())
    assert options.backend_name() == keras.config.backend()


def test_another_backend_after_keras_was_imported() -> None:
    running = keras.config.backend()
    with pytest.raises(BackendError) as caught:
        treadle.setup(backend=OTHER)
    assert str(caught.value) == (
        f"Keras already runs on {running!r}, and cannot change to {OTHER!r} in this process: call "
        f"treadle.setup(backend={OTHER!r}) before importing keras, or set KERAS_BACKEND={OTHER}"
    )
    assert os.environ["KERAS_BACKEND"] == running


@pytest.mark.long
def test_a_backend_before_keras_is_imported() -> None:
    code = f"import treadle; treadle.setup(backend={OTHER!r}); import keras; print(keras.backend."
    code += "backend())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [OTHER]


def test_a_backend_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        process_settings, "find_spec", lambda name: found(name) if name != "jax" else None
    )
    with pytest.raises(BackendError) as caught:
        treadle.setup(backend="jax")
    assert str(caught.value) == (
        "the backend 'jax' is not installed: pip install jax (installed: tensorflow, torch)"
    )


def test_an_unknown_backend_and_an_unknown_precision() -> None:
    with pytest.raises(BackendError) as backend:
        treadle.setup(backend="tensorfolw")
    assert str(backend.value) == (
        "unknown backend 'tensorfolw'. Did you mean 'tensorflow'? Known: tensorflow, jax, torch."
    )
    with pytest.raises(ConfigurationError, match="unknown precision 'half'"):
        treadle.setup(precision="half")
    with pytest.raises(ConfigurationError) as narrow:
        treadle.setup(precision="bfloat16")
    assert str(narrow.value) == (
        "precision 'bfloat16' would keep weights in bfloat16, where most updates are too small to "
        "change them: use 'mixed_bfloat16', which keeps them in float32"
    )


@pytest.mark.parametrize("what", [{"seed": 0}, {"precision": "float32"}, {"devices": 2}])
def test_settings_after_layers_were_created_are_refused(what: dict[str, Any]) -> None:
    keras.layers.Dense(1)
    with pytest.raises(ConfigurationError) as caught:
        treadle.setup(**what)
    name = next(iter(what))
    assert str(caught.value) == (
        f"setup({name}=…) must come before anything is built: 'dense' exists already and would "
        "not be affected. Move treadle.setup to the top of the script, or call "
        "keras.backend.clear_session() first"
    )


def test_a_cell_of_a_notebook_may_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(get_ipython=lambda: object())
    monkeypatch.setitem(sys.modules, "IPython", shell)
    treadle.setup(seed=3)
    first = keras.layers.Dense(1)
    first.build((None, 2))
    treadle.setup(seed=3, precision="float32", devices=1)
    second = keras.layers.Dense(1)
    second.build((None, 2))
    assert keras.ops.all(first.kernel == second.kernel)
    with pytest.raises(ConfigurationError, match=r"setup\(precision=…\) must come before"):
        treadle.setup(precision="mixed_bfloat16")
    shell.get_ipython = lambda: None  # IPython is imported, and this is a script
    with pytest.raises(ConfigurationError, match=r"setup\(seed=…\) must come before"):
        treadle.setup(seed=3)


def test_the_run_s_seed_is_keras_own() -> None:
    keras.utils.set_random_seed(11)
    assert options.run_seed() == 11
    treadle.setup(seed=12)
    assert options.run_seed() == options.global_random_seed() == 12
