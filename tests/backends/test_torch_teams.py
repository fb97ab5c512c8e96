"""On PyTorch only the thread that computes keeps a team of OpenMP."""

import math
import os
import sys
import threading
import time
from collections.abc import Generator
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.backends import background

pytestmark = [
    pytest.mark.skipif(keras.config.backend() != "torch", reason="teams of PyTorch's OpenMP"),
    pytest.mark.skipif(sys.platform != "linux", reason="counts the threads in /proc"),
]

LENGTHS = (8, 8, 8, 12, 12, 12, 16, 16, 8)  # the last one is rare, and runs as Python


@pytest.fixture(autouse=True)
def two_threads() -> Generator[None]:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def unknown() -> set[int]:
    """Return the threads that Python does not know: those of teams, and some others."""
    known = {thread.native_id for thread in threading.enumerate()}
    return {int(name) for name in os.listdir("/proc/self/task")} - known


def members() -> int:
    """Return their number, without threads that start or end just now."""
    first = unknown()
    time.sleep(0.02)
    return len(first & unknown())


class Data(keras.utils.PyDataset):
    """Large batches of a few shapes."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return np.ones((4096, LENGTHS[index], 2), "float32"), np.ones((4096, 1), "float32")


class Counts(treadle.Hook):
    """Counts the most members of teams, at different times."""

    def __init__(self) -> None:
        self._first, self.most = members(), dict[str, int]()

    def count(self, when: str) -> None:
        self.most[when] = max(self.most.get(when, 0), members() - self._first)

    def steps(self, loop: Any, logs: Any) -> None:
        self.count("steps")
        if loop.progress.epoch == 0:
            loop.call(keras.ops.exp, np.ones((4096, 64), "float32"))
            self.count("call")


@pytest.mark.parametrize(
    ("least", "children", "most"), [(-math.inf, 0, 1), (math.inf, 0, 2), (-math.inf, 1, 2)]
)
def test_a_team_is_released_before_another_thread_computes(
    monkeypatch: pytest.MonkeyPatch, least: float, children: int, most: int
) -> None:
    """It is kept where reading takes long, or other processes read."""
    import torch

    monkeypatch.setattr(background, "_AWAITED", least)
    monkeypatch.setattr(background, "_was_awaited", least < 0)
    monkeypatch.setattr(background, "active_children", lambda: [None] * children)

    background.take_back()
    if background._release()() is None:
        pytest.skip("the OpenMP library is not GNU's")
    counts = Counts()
    layers = keras.layers
    model = keras.Sequential([layers.Dense(16), layers.GlobalAveragePooling1D(), layers.Dense(1)])
    model.compile("sgd", "mse")
    treadle.fit(model, Data(), epochs=2, hooks=[counts])
    assert any("treadle-window" in thread.name for thread in threading.enumerate())
    counts.count("trained")
    torch.ones(10**6).exp()
    counts.count("own operation")
    monkeypatch.setattr(background, "_was_awaited", True)
    monkeypatch.setattr(background, "active_children", list)
    background.hand_over()
    counts.count("handed over")
    background.take_back()
    assert counts.most == {
        "steps": most,
        "call": 1,
        "trained": most - 1,
        "own operation": 1,
        "handed over": 0,
    }
