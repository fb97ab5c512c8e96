"""Several devices give what one gives: a program with virtual devices compares them."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from cases import CASES
from executions import long_to_compile
from keras_versions import needs_keras

import treadle
from tests.forked import python
from tests.xla import fully_optimized, less_optimized
from treadle.cli import environment
from treadle.errors import ConfigurationError

JAX = keras.config.backend() == "jax"
on_jax = pytest.mark.skipif(not JAX, reason="several devices are used on JAX only")
CLOSE = 1e-5
SHORT = ("two-models", "gradient-penalty")
# With `--all`, half of the cases: test_processes.py divides the rows of each of them.
DIVIDED = [name for i, name in enumerate(CASES) if name in SHORT or i % 2]
# A tanh of bfloat16 rounds differently where it is fused differently.
ROUGH = {"mixed-bfloat16": 2e-2}


def run(folder: Path, *checks: str, devices: int = 4) -> dict[str, Any]:
    """Run checks of `on_devices.py`, in a process with so many virtual devices."""
    exact = checks == RUNS  # others are compared within rounding
    flags = fully_optimized() if exact else less_optimized()["XLA_FLAGS"]
    flags += f" --xla_force_host_platform_device_count={devices}"
    here = Path(__file__).parent
    done = subprocess.run(
        [python(), str(here / "on_devices.py"), str(folder), *checks],
        env={**os.environ, "XLA_FLAGS": flags.strip(), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def succeeded(result: Any) -> Any:
    if isinstance(result, dict) and "error" in result:
        pytest.fail(result["error"])
    return result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of checks, which run in a few processes, as importing Keras takes long."""
    needs_keras("3.10", "training on several devices of JAX")

    @cache
    def of(*checks: str) -> dict[str, Any]:
        return run(tmp_path_factory.mktemp("devices"), *checks)

    return lambda name, *checks: succeeded(of(*checks)[name])


FIRST = ("reference", "draws", "noise", "divided-by-hand")
RUNS = ("windows-of-any-size", "resumed", "seeds-made-before")
MORE = (
    "fewer-rows-than-devices",
    *("short-batch-41", "streamed", "single-calls", "eager", "donated"),
    *("skipped-steps", "accumulating", "accumulating-in-parts"),
)


@on_jax
def test_four_devices_give_what_one_gives(found: Any) -> None:
    assert found("reference", *FIRST) <= CLOSE


@on_jax
def test_each_of_four_devices_draws_a_quarter_of_the_numbers(found: Any) -> None:
    assert found("draws", *FIRST) <= 0.26


@on_jax
def test_each_of_four_devices_computes_a_quarter_of_what_depends_on_noise(found: Any) -> None:
    assert found("noise", *FIRST) <= 0.4  # all of them draw seeds and update the weights


@on_jax
def test_random_numbers_in_a_function_that_divides_devices_itself(found: Any) -> None:
    assert found("divided-by-hand", *FIRST)


@on_jax
@pytest.mark.long
@pytest.mark.parametrize("name", MORE)
def test_however_steps_run_four_devices_give_what_one_gives(found: Any, name: str) -> None:
    assert found(name, *MORE) <= CLOSE


@on_jax
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in SHORT else pytest.mark.long) for x in DIVIDED]
)
def test_what_a_step_may_do_on_four_devices(found: Any, name: str, request: Any) -> None:
    chosen = DIVIDED if request.config.option.all else SHORT
    assert found(f"case-{name}", *(f"case-{x}" for x in chosen)) <= ROUGH.get(name, CLOSE)


@on_jax
@pytest.mark.long
def test_a_loss_scale_on_four_devices(found: Any) -> None:
    assert found("loss-scale", "loss-scale") <= 1e-2


@long_to_compile
@on_jax
def test_model_parallel(found: Any) -> None:
    names = "layouts-of-slots", "model-parallel"
    split = found("layouts-of-slots", *names)
    hidden, out = "model/layers/0", "model/layers/4"
    kept = ("", "optimizer/momentums/", "optimizer/velocities/")
    kept += ("optimizer/model_variables_moving_average/",)
    assert split == {
        **{f"{slot}{hidden}/kernel": [None, "model"] for slot in kept},
        **{f"{slot}{hidden}/bias": ["model"] for slot in kept},
        **{f"{slot}{out}/kernel": ["model", None] for slot in kept},
        # The bias of the hidden layer has the shape of the scale of the normalization.
        "accumulator/sums/0": [None, "model"],
        "accumulator/sums/4": ["model", None],
    }
    differences = found("model-parallel", *names)
    assert list(differences) == ["(2, 2)", "(1, 4)", "(4, 1)"]
    assert max(differences.values()) <= CLOSE, differences


@on_jax
@pytest.mark.long
def test_windows_of_any_size_have_the_same_bits_on_the_same_devices(found: Any) -> None:
    assert found("windows-of-any-size", *RUNS) == {"window=1": 0, "window=3": 0, "single steps": 0}


@on_jax
@pytest.mark.long
def test_a_run_resumes_on_the_same_devices_bit_for_bit_and_on_others(found: Any) -> None:
    result = found("resumed", *RUNS)
    assert result["same devices"] == 0
    assert result["warnings on the same devices"] == []
    assert result["other devices"] <= CLOSE
    sentence = (
        "this run resumes, but may not be bit-for-bit exact: devices was {!r}, now {!r}. All "
        "values were restored exactly from the checkpoint, and the batches are the same; later "
        "steps may round differently"
    )
    assert result["warnings on four"] == [sentence.format("2 × cpu", "4 × cpu")]
    assert result["warnings on one"] == [sentence.format("4 × cpu", "cpu")]
    assert result["devices"] == "4 × cpu"
    assert result["plan"] == "windows of up to 256, XLA, data on each of 4 devices"


@on_jax
@pytest.mark.long
def test_seeds_that_exist_before_the_distribution_are_placed_on_it(found: Any) -> None:
    assert found("seeds-made-before", *RUNS) == [None]


@on_jax
def test_what_cannot_be_distributed_is_refused(found: Any) -> None:
    before = (
        "call treadle.setup(devices=…), or keras.distribution.set_distribution(…), before the task "
        "is created"
    )
    kernel = "ConfigurationError: model/layers/0/kernel was created"
    assert found("errors", "errors") == {
        "too many": (
            "ConfigurationError: devices=9, but JAX has 4, cpu:0 to cpu:3: ask for at most 4; for "
            "a trial on a CPU, start the process with the environment variable "
            "XLA_FLAGS=--xla_force_host_platform_device_count=9, which divides it into virtual "
            "devices"
        ),
        "made before": (
            f"{kernel} before the keras.distribution over 4 devices was set, so it is on one "
            f"device: {before}"
        ),
        "made for others": (
            f"{kernel} under another distribution than the keras.distribution over 2 devices that "
            f"is set: {before}"
        ),
        "no longer set": (
            f"{kernel} for 4 devices by a keras.distribution that is not set: {before}, and keep "
            "it set"
        ),
        "splits nothing": (
            "ConfigurationError: training runs under a keras.distribution.ModelParallel that "
            "splits no variable: write keys of its LayoutMap as regular expressions that match the "
            "whole path of a variable. The paths are sequential/last/kernel, sequential/last/bias"
        ),
    }


def test_the_argument_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    keras.backend.clear_session()
    for wrong in (True, 4.0, "4", None.__class__):
        with pytest.raises(ConfigurationError) as caught:
            treadle.setup(devices=wrong)
        assert str(caught.value) == (
            "devices is the number of devices to train on, or a keras.distribution.DataParallel or "
            f"ModelParallel, not {wrong!r}"
        )
    for wrong in (0, -1):
        with pytest.raises(ConfigurationError, match=f"^devices must be at least 1, not {wrong}$"):
            treadle.setup(devices=wrong)
    treadle.setup(devices=1)
    assert keras.distribution.distribution() is None


@pytest.mark.skipif(JAX, reason="JAX has several devices")
def test_several_devices_are_refused_on_other_backends() -> None:
    keras.backend.clear_session()
    with pytest.raises(ConfigurationError) as caught:
        treadle.setup(devices=2)
    assert str(caught.value) == (
        "devices=2: Treadle trains on several devices on JAX only, and this process runs on "
        f"{keras.config.backend()}. Use treadle.setup(backend='jax', devices=…) before Keras is "
        "imported, or one device"
    )


@on_jax
def test_more_devices_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    keras.backend.clear_session()
    monkeypatch.setattr(keras.distribution, "list_devices", lambda: ["gpu:0"])
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    with pytest.raises(ConfigurationError) as caught:
        treadle.setup(devices=2)
    assert str(caught.value) == "devices=2, but JAX has 1, gpu:0: ask for at most 1"


def test_a_command_divides_a_cpu_unless_the_user_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--other")
    environment._divide_cpu(1)
    assert os.environ["XLA_FLAGS"] == "--other"
    environment._divide_cpu(4)
    flags = "--other --xla_force_host_platform_device_count=4"
    assert os.environ["XLA_FLAGS"] == flags
    environment._divide_cpu(8)
    assert os.environ["XLA_FLAGS"] == flags


def command(*words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "treadle", *words, "--json"],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


@on_jax
@pytest.mark.long
def test_a_command_trains_and_resumes_on_several_devices(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    command("run", "linear", "--devices", "2", "--steps", "8", "--directory", str(directory))
    record = json.loads((directory / "run.json").read_text())
    assert (record["configuration"]["devices"], record["devices"]) == (2, "2 × cpu")
    command("resume", str(directory), "--steps", "12")
    assert json.loads((directory / "run.json").read_text())["devices"] == "2 × cpu"
    told = command("resume", str(directory), "--steps", "16", "--devices", "4")
    assert told["progress"]["step"] == 16
    record = json.loads((directory / "run.json").read_text())
    assert (record["configuration"]["devices"], record["devices"]) == (4, "4 × cpu")


@on_jax
def test_several_devices_need_a_mesh_of_keras(monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.backends.jax import layouts

    old = SimpleNamespace(device_mesh=SimpleNamespace(devices=np.array(["cpu:0", "cpu:1"])))
    monkeypatch.setattr(keras.distribution, "distribution", lambda: old)
    expected = (
        "training on several devices of JAX needs Keras 3.10 or newer, but this is Keras "
        f"{keras.__version__}: install a newer version, or set no keras.distribution"
    )
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        layouts.active_layouts()
