"""`setup(deterministic=True)`: the switches of each framework, and what its run records."""

import os
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.line import Line
from treadle.backends.base import active
from treadle.core import process_settings
from treadle.core.directory import read_run
from treadle.errors import ConfigurationError, DirectoryError

BATCHES = [np.ones((2, 3), "float32")]

BACKEND = keras.config.backend()


@pytest.fixture(autouse=True)
def cleared() -> Any:
    keras.backend.clear_session()
    yield
    keras.backend.clear_session()


@pytest.fixture
def switched(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return the calls of the framework's switch, which does nothing."""
    monkeypatch.setattr(process_settings, "_deterministic", False)
    monkeypatch.setattr(process_settings, "_too_late", False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    found: list[bool] = []
    if BACKEND == "torch":
        monkeypatch.setattr("torch.use_deterministic_algorithms", found.append)
    elif BACKEND == "tensorflow":  # which has no public way back
        name = "tensorflow.config.experimental.enable_op_determinism"
        monkeypatch.setattr(name, lambda: found.append(True))
    return found


def test_deterministic_algorithms_are_switched_on_before_the_framework_starts(
    switched: list[bool],
) -> None:
    treadle.setup(seed=0)
    assert not process_settings.is_deterministic() and "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    treadle.setup(deterministic=True)
    assert process_settings.is_deterministic()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    flags = "--xla_cpu_max_isa=AVX2 --xla_gpu_deterministic_ops=true"
    assert os.environ["XLA_FLAGS"] == flags
    treadle.setup(deterministic=True)
    assert os.environ["XLA_FLAGS"] == flags
    assert switched == ([] if BACKEND == "jax" else [True, True])


@pytest.mark.skipif(BACKEND != "jax", reason="XLA reads its flags only once")
def test_on_jax_deterministic_algorithms_must_be_asked_for_early(
    switched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(ConfigurationError, match="must come before Keras is imported, since XLA"):
        treadle.setup(deterministic=True)
    with pytest.raises(ConfigurationError, match="must come before Keras is imported, since XLA"):
        treadle.setup(deterministic=True)  # again: the flag is in the environment, but not read
    assert not process_settings.is_deterministic()
    monkeypatch.setattr(process_settings, "_too_late", False)  # a process that starts with the flag
    treadle.setup(deterministic=True)
    assert process_settings.is_deterministic()


def test_a_run_continues_only_with_the_same_choice(switched: list[bool], tmp_path: Any) -> None:
    with treadle.Loop(Line(), tmp_path, console=False) as loop:
        loop.fit(BATCHES, epochs=1)
    keras.backend.clear_session()
    treadle.setup(deterministic=True)
    with pytest.raises(DirectoryError, match="deterministic was None, now True"):
        treadle.Loop(Line(), tmp_path, console=False)
    with treadle.Loop(Line(), tmp_path, fresh=True, console=False) as loop:
        loop.fit(BATCHES, epochs=1)
    assert read_run(tmp_path)["configuration"]["deterministic"] is True


@pytest.mark.usefixtures("assumes_cpu")  # its stand-in for an accelerator replaces a CPU
def test_the_plan_says_that_an_accelerator_does_not_repeat(
    switched: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan() -> str:
        with treadle.Loop(Line(), console=False) as loop:
            loop.fit(BATCHES, epochs=1)
            return loop.plan

    assert "repeats" not in plan()
    computes_on = {"devices": "1 × gpu", "threads": 2}
    monkeypatch.setattr(type(active()), "computes_on", lambda self: computes_on)
    assert plan().endswith(", repeats up to the order of sums")
    keras.backend.clear_session()
    treadle.setup(deterministic=True)
    assert "repeats" not in plan()


@pytest.mark.skipif(BACKEND != "tensorflow", reason="XLA is a choice of TensorFlow's")
def test_xla_adds_in_a_fixed_order_on_a_cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def plan() -> str:
        with treadle.Loop(Line(), console=False, options=treadle.Options(jit=True)) as loop:
            loop.fit(BATCHES, epochs=1)
            return loop.plan

    windows = "treadle.backends.tensorflow.windows"
    monkeypatch.setattr(f"{windows}.is_op_determinism_enabled", lambda: True)
    assert "XLA" in plan()
    monkeypatch.setattr(f"{windows}.device", lambda: "gpu")
    assert "graph (TensorFlow's op determinism is enabled)" in plan()
