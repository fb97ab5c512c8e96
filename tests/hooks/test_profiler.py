"""The profiler's trace and table."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle import data
from treadle.backends.traces import TraceEvent, own_times, read_trace, write_trace
from treadle.errors import ConfigurationError
from treadle.hooks import Profiler


class Sizes(treadle.Hook):
    def __init__(self) -> None:
        self.ends: list[int] = []

    def steps(self, loop: Any, logs: Any) -> None:
        self.ends.append(loop.progress.step)


def train(directory: Any, hooks: list[Any], steps: int = 12) -> treadle.Loop:
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(1)])
    task = treadle.Supervised(model, "mse", "sgd")
    x = np.ones((64, 8), "float32")
    source = data.from_arrays(x, x[:, :1], batch_size=8)
    with treadle.Loop(task, directory, hooks, console=False) as loop:
        loop.fit(source, source, steps=steps)
    return loop


def test_a_trace_and_a_table(tmp_path: Path) -> None:
    sizes = Sizes()
    loop = train(tmp_path, [Profiler("4:7"), sizes])
    assert {4, 7} <= {*sizes.ends}
    spans = read_trace(tmp_path / "profile")
    assert len(spans) > 3 and all(span.duration >= 0 for span in spans)
    (table,) = loop.history["profile"]
    lines = table.splitlines()
    assert lines[0].startswith("where the time went: ")
    assert [line.split("  ")[1] for line in lines[1:6]] == [
        "running steps",
        "compiling",
        "waiting for data",
        "validation",
        "hooks, checkpoints, the rest",
    ]
    seconds = [float(line.split(" s ")[0].split()[-1]) for line in lines[1:6]]
    assert sum(seconds) == pytest.approx(float(lines[0].split()[-2]), abs=0.06)
    path = tmp_path / "profile" / "trace.json.gz"
    assert lines[6] == f"steps 5 to 7: {path} (ui.perfetto.dev opens it)"
    assert 1 <= len(lines[7:]) <= 8 and all(line.endswith("×") for line in lines[7:])
    if keras.config.backend() != "torch":  # what TensorBoard's profile page shows
        assert list((tmp_path / "profile" / "plugins" / "profile").glob("*/*.xplane.pb"))


def test_a_trace_that_the_run_ends(tmp_path: Path) -> None:
    loop = train(None, [Profiler("2:100", tmp_path)], steps=4)
    assert "steps 3 to 4: " in loop.history["profile"][0]
    assert read_trace(tmp_path)


def test_only_the_table() -> None:
    loop = train(None, [Profiler("")], steps=4)
    assert len(loop.history["profile"][0].splitlines()) == 6


@pytest.mark.parametrize("steps", ["100", "5:5", "7:3", "a:b", "1:2:3", "4:"])
def test_invalid_ranges_of_steps(steps: str) -> None:
    with pytest.raises(ConfigurationError, match=r"must be two numbers of steps, the second"):
        Profiler(steps)


def test_without_a_directory() -> None:
    with pytest.raises(ConfigurationError, match=r"pass Profiler\(directory='profile'\), or a d"):
        train(None, [Profiler("1:2")], steps=4)


def test_traces_are_read_as_they_were_written(tmp_path: Path) -> None:
    spans = [
        TraceEvent("host", "main", "step", 0, 10),
        TraceEvent("gpu", "stream", "matmul", 2.5, 4),
    ]
    write_trace(spans, tmp_path)
    found = read_trace(tmp_path)
    assert [(s.name, s.begin, s.duration) for s in found] == [("step", 0, 10), ("matmul", 2.5, 4)]
    assert found[0].process.startswith("host") and found[1].thread.startswith("stream")


def test_own_times_of_spans_within_spans() -> None:
    line = [("a", 0, 10), ("b", 1, 4), ("c", 2, 1), ("b", 6, 2), ("a", 20, 5)]
    found = own_times([TraceEvent("p", "t", name, at, long) for name, at, long in line])
    assert found == {"a": (9, 2), "b": (5, 2), "c": (1, 1)}
