"""`scripts/bench accelerator`: its contestants run on each backend, and its tables hold them."""

import json
import math
from pathlib import Path
from typing import Any

import keras
import pytest
from executions import long_to_compile, once

from benchmarks import END, accelerator
from benchmarks.accelerator import SMALL, Job, Size, contestants, treadle_loop

BACKEND = keras.config.backend()


def test_the_command_knows_every_contestant() -> None:
    assert {*accelerator.COMMON, *accelerator.OTHERS[BACKEND]} == set(contestants())


# `torch.compile` compiles for a minute; the long test below runs it.
BY_HAND = [
    name
    for name in accelerator.OTHERS[BACKEND]
    if not name.startswith("treadle") and "compile" not in name
]


@long_to_compile
def test_loops_by_hand_learn_as_treadle_does(monkeypatch: pytest.MonkeyPatch) -> None:
    keras.utils.set_random_seed(0)
    monkeypatch.setitem(SMALL, "mlp", Size(8, 4, 16))  # so few examples are learned by heart
    job = Job.of("mlp", small=True)
    for epoch in (treadle_loop(job), *(contestants()[name](job) for name in BY_HAND)):
        losses = [epoch() for _ in range(4)]
        assert losses[-1] < losses[0]
        assert 1.5 < losses[0] < 5.0  # about log(10), since the labels are random


@pytest.mark.long
@once
@pytest.mark.parametrize("workload", ["resnet18", "transformer"])
def test_the_other_networks_train(workload: str) -> None:
    keras.utils.set_random_seed(0)
    assert math.isfinite(treadle_loop(Job.of(workload, small=True))())


@pytest.mark.long
@once
@pytest.mark.usefixtures("started_at_once")
def test_the_command_measures_each_contestant_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accelerator, "LONGEST", 400)  # only what hangs takes as long
    words = ["--small", "--backend", BACKEND, "--workload", "mlp", "--rounds", "2"]
    words += ["--seconds", "800"]
    words += ["--contestant", "fit", "--contestant", "treadle, cuda-graph"]
    accelerator.main([*words, "--results", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert set(found) == {"torch/mlp/fit", "torch/mlp/treadle, cuda-graph"}
    assert math.isfinite(found["torch/mlp/fit"]["loss"])
    failed = found["torch/mlp/treadle, cuda-graph"].get("failed", "")
    assert not failed or "not replayed as a CUDA graph" in failed


@once
def test_tables_are_written_and_what_is_measured_is_kept(
    tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    asked: list[str] = []

    def measured(key: str, rounds: int, small: bool, seconds: float) -> dict[str, Any] | None:
        asked.append(key)
        if "compile" in key:
            return {"failed": "not done in 240 s"}
        if "scan" in key:
            return None  # no time was left
        times = [50.0, 100.0, 150.0] if key.endswith("windows") else [300.0] * 3
        return {"per_step": times, "first": 2.0, "peak": 330.4, "loss": 1.0, "device": "H100"}

    page = tmp_path / "page.md"
    begin = "<!-- scripts/bench accelerator --write -->"
    page.write_text(f"before\n\n{begin}\nold\n\n{END}\nafter\n")
    monkeypatch.setattr(accelerator, "PAGE", page)
    monkeypatch.setattr(accelerator, "_in_process", measured)
    words = ["--workload", "mlp", "--results", str(tmp_path / "found.json"), "--write"]
    accelerator.main(words)
    assert "not measured yet: jax/mlp/raw lax.scan\nrun the same command again" in (
        capsys.readouterr().out
    )
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "**jax, mlp** (784-512-512-10, batch 128, float32) on H100:" in text
    assert "| treadle, windows | 100 (50 to 150) | 1.00 | 330 | 2 |" in text
    assert "| fit | 300 (300 to 300) | 3.00 | 330 | 2 |" in text
    assert "| torch.nn, torch.compile | failed: not done in 240 s | | | |" in text
    asked.clear()
    accelerator.main(words)
    assert asked == ["jax/mlp/raw lax.scan"]
    asked.clear()
    accelerator.main([*words, "--seconds", "0"])
    assert not asked
