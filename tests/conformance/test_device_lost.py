"""An assertion on the device ends a process: what the error says, with a stand-in for a device."""

from pathlib import Path
from typing import Any

import keras
import pytest
from classifier import Classifier, batches, dense, head

import treadle
from treadle.backends.base import active

ASSERTION = (
    "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported "
    "at some other API call, so the stacktrace below might be incorrect."
)
LOST = (
    "An assertion failed on the device, most likely because an index or a label is out of range. "
    "This process has lost its device: the weights there can no longer be read, and every later "
    "operation fails. Start the program again in a new process; treadle.Options(checked=True) "
    "finds such integers before they reach the device"
)


def device_error() -> Exception:
    if keras.config.backend() == "torch":
        import torch

        return torch.AcceleratorError(ASSERTION)
    return RuntimeError(ASSERTION)


class Fails(Classifier):
    """Fails in a step as a device does: afterwards no variable can be read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__([dense(), head()])
        self.patch = patch

    def train_step(self, batch: Any) -> Any:
        if batch[0].shape[0] == 5:
            for name in ("read", "stage", "keep", "finite"):
                self.patch.setattr(type(active()), name, self.fail)
            self.fail()
        return super().train_step(batch)

    def fail(self, *_: Any) -> Any:
        raise device_error()


def lost(directory: Path | None, patch: pytest.MonkeyPatch) -> list[str]:
    x, y = batches(4)
    train = [(x[i], y[i]) for i in range(3)] + [(x[3][:5], y[3][:5])]
    every = treadle.hooks.Checkpoint(every="2 steps")
    hooks = [every] if directory else []
    with (
        patch.context() as changed,
        pytest.raises(Exception, match="device-side assert triggered") as caught,
        treadle.Loop(Fails(changed), directory, hooks, console=False) as loop,
    ):
        loop.fit(train, epochs=1)
    assert isinstance(caught.value, type(device_error()))
    return caught.value.__notes__


def test_the_error_explains_what_happened_and_what_the_run_resumes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = lost(tmp_path, monkeypatch)
    assert LOST in notes
    assert any(note.startswith("in train_step, step 4 (epoch 1, batch 4)") for note in notes)
    assert (
        "the newest checkpoint is that of step 2: start the same script again, and the run in "
        f"{tmp_path} resumes from it"
    ) in notes


def test_without_a_checkpoint_the_run_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        "there is no checkpoint: the next process starts from step 0. To lose less, train with a "
        "run directory, and save more often with treadle.hooks.Checkpoint"
    ) in lost(None, monkeypatch)
