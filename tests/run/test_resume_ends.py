"""Runs whose process ends when all steps are done, but not what comes after them."""

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.dying import Dying, DyingAtTheEnd
from tests.run import test_resume
from tests.run.test_resume import Noisy, bare_steps, fit_twice, own_epochs, same_run, source
from treadle.checkpoint.arrays import read_arrays
from treadle.errors import Terminated
from treadle.hooks import Checkpoint, EarlyStopping, JSONLines

# How steps run does not matter here, and capturing one would take most of the time.
run = partial(test_resume.run, options=treadle.Options(execution="eager"))


def by_epochs(loop: treadle.Loop) -> None:
    loop.fit(source(), validation=source(5), epochs=2)


def by_steps(loop: treadle.Loop) -> None:
    """Ends in the midst of an epoch, with a validation."""
    loop.fit(source(), validation=source(5), steps=9, validate_every="1 epoch")


def stopping_early(loop: treadle.Loop) -> None:
    loop.fit(source(), validation=source(5), epochs=30)


def patient(body: Any) -> list[Any]:
    return [EarlyStopping("val_loss", patience=1)] if body is stopping_early else []


def require_finished(cut: treadle.Loop, straight: treadle.Loop) -> None:
    """Every variable, in memory and in the file, every record: as if it had never been cut."""
    same_run(cut, straight)
    assert cut.directory is not None and straight.directory is not None
    assert json.loads((cut.directory / "run.json").read_text())["finished"]
    theirs = read_arrays(straight.directory / "state.safetensors")
    for path, value in read_arrays(cut.directory / "state.safetensors").items():
        assert value.tobytes() == theirs[path].tobytes(), path


@pytest.mark.long
@pytest.mark.parametrize("body", [by_epochs, by_steps, stopping_early, fit_twice, bare_steps])
def test_a_process_may_end_while_hooks_end(tmp_path: Path, body: Any) -> None:
    straight = run(tmp_path / "straight", body, hooks=patient(body))
    for _ in range(2):
        with pytest.raises(OSError, match="killed"):
            run(tmp_path / "cut", body, hooks=[*patient(body), DyingAtTheEnd()])
        assert not (tmp_path / "cut" / "state.safetensors").exists()
    require_finished(run(tmp_path / "cut", body, hooks=patient(body)), straight)


@pytest.mark.long
def test_a_hand_written_loop_over_completed_epochs_has_their_weights(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", own_epochs)
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", own_epochs, hooks=[DyingAtTheEnd()])
    cut = run(tmp_path / "cut", own_epochs)
    theirs = straight.state.arrays()
    for path, value in cut.state.arrays().items():
        assert value.tobytes() == theirs[path].tobytes(), path


@pytest.mark.long
def test_the_next_call_starts_from_the_best_weights(tmp_path: Path) -> None:
    def both(loop: treadle.Loop) -> None:
        stopping_early(loop)
        loop.fit(source(10), validation=source(), epochs=2)

    straight = run(tmp_path / "straight", both, hooks=patient(stopping_early))
    first = run(tmp_path / "first", stopping_early, hooks=patient(stopping_early))
    with pytest.raises(OSError, match="killed"):  # before the second call has saved anything
        run(tmp_path / "cut", both, die_at=first.progress.step + 1, hooks=patient(stopping_early))
    require_finished(run(tmp_path / "cut", both, hooks=patient(stopping_early)), straight)


@pytest.mark.long
def test_a_call_with_longer_epochs_resumes_after_one_with_shorter_epochs(tmp_path: Path) -> None:
    def growing(loop: treadle.Loop) -> None:
        loop.fit(source(10), epochs=1)  # 4 batches
        loop.fit(source(2), epochs=1)  # 20 batches

    straight = run(tmp_path / "straight", growing)
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", growing, die_at=16)
    require_finished(run(tmp_path / "cut", growing), straight)
    assert run(tmp_path / "cut", growing).reason == "it was finished before"


def test_a_signal_in_the_last_validation_loses_nothing(tmp_path: Path) -> None:
    class Asking(treadle.Hook):
        def record(self, loop: Any, record: Any) -> None:
            if record.kind == "epoch" and loop.progress.epoch == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    straight = run(tmp_path / "straight", by_epochs, every="1 h")
    with pytest.raises(Terminated):
        run(tmp_path / "cut", by_epochs, every="1 h", hooks=[Asking()])
    found = treadle.checkpoint.Checkpoints(tmp_path / "cut" / "checkpoints").latest()
    assert found is not None and found.progress.step == 10
    require_finished(run(tmp_path / "cut", by_epochs, every="1 h"), straight)


def test_a_signal_does_not_undo_a_requested_stop(tmp_path: Path) -> None:
    class Both(treadle.Hook):
        def __init__(self, signalled: bool) -> None:
            self.signalled = signalled

        def steps(self, loop: Any, logs: Any) -> None:
            if loop.progress.step == 6:
                loop.stop("enough")
                if self.signalled:
                    os.kill(os.getpid(), signal.SIGTERM)

    straight = run(tmp_path / "straight", by_epochs, hooks=[Both(False)])
    assert straight.reason == "enough"
    with pytest.raises(Terminated):
        run(tmp_path / "cut", by_epochs, hooks=[Both(True)])
    cut = run(tmp_path / "cut", by_epochs, hooks=[Both(False)])
    assert cut.reason == "enough"
    require_finished(cut, straight)


@pytest.mark.long
def test_the_history_is_restored_from_a_log_at_another_path(tmp_path: Path) -> None:
    def logging(folder: str) -> Any:
        return JSONLines(tmp_path / folder / "mine.jsonl")

    straight = run(tmp_path / "straight", by_epochs, hooks=[logging("straight")])
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", by_epochs, die_at=8, hooks=[logging("cut")])
    cut = run(tmp_path / "cut", by_epochs, hooks=[logging("cut")])
    np.testing.assert_array_equal(cut.history.steps("loss"), straight.history.steps("loss"))
    assert cut.history.epochs == straight.history.epochs


@pytest.mark.long
def test_the_history_continues_if_the_step_returns_other_values(tmp_path: Path) -> None:
    class Changing(Noisy):
        def __init__(self) -> None:
            super().__init__()
            self.extra = True

        def train_step(self, batch: Any) -> Any:
            values = super().train_step(batch)
            return {**values, "aux": values["loss"]} if self.extra else values

    def loop(die_at: int | None) -> treadle.Loop:
        keras.utils.set_random_seed(1)
        hooks = [Checkpoint(every="2 steps"), Dying(die_at)]
        made = treadle.Loop(Changing(), tmp_path, hooks=hooks, console=False)
        with made:
            for logs in made.steps(source(), every="1 step"):
                made.task.extra = logs.step < 2
        return made

    with pytest.raises(OSError, match="killed"):
        loop(die_at=5)
    history = loop(None).history.steps("aux")
    assert np.isfinite(history[:2]).all() and np.isnan(history[2:4]).all()
