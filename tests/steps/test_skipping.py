"""Steps that are skipped because something is not finite, poisoned checkpoints, and hung runs."""

import faulthandler
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS
from keras import ops

import treadle
from treadle import data
from treadle.checkpoint import Checkpoints
from treadle.errors import ConfigurationError, StepError
from treadle.hooks import Checkpoint, NonFinite, Watchdog


class Line(treadle.Task):
    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(0.05)
        self.error = keras.metrics.MeanSquaredError()

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss = treadle.minimize(
            lambda: ops.mean((self.model(x) - y) ** 2), self.model, self.optimizer
        )
        self.error.update_state(y, self.model(x))
        return {"loss": loss}


def arrays(rows: int = 48) -> Any:
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype("float32")
    return x, x[:, :1].copy()


def trained(x: Any, y: Any, *hooks: Any, batches: Any = None, **how: Any) -> treadle.Loop:
    keras.utils.set_random_seed(0)
    source = batches or data.from_arrays(x, y, batch_size=8, shuffle=False)
    with treadle.Loop(Line(), hooks=hooks, console=False, **how) as loop:
        loop.fit(source, epochs=1)
    return loop


@EXECUTIONS
def test_a_skipped_step_is_as_if_its_batch_had_not_come(execution: Any) -> None:
    x, y = arrays()
    bad = x.copy()
    bad[17, 1] = np.nan  # batch 3, row 1
    options = treadle.Options(execution=execution)
    loop = trained(bad, y, NonFinite(action="skip"), options=options)
    without = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8) if i != 16]
    other = trained(x, y, NonFinite(action="skip"), batches=without, options=options)
    theirs = other.state.arrays()
    for path, value in loop.state.arrays().items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)
    assert loop.history.steps("undone").tolist() == [0, 0, 1, 0, 0, 0]
    assert np.isnan(loop.history.steps("loss")[2])
    assert loop.history.epochs[0]["loss"] == other.history.epochs[0]["loss"]
    assert loop.history.epochs[0]["error"] == other.history.epochs[0]["error"]
    (warning,) = loop.history["warning"]
    assert "skipped step 3, after which something was not finite: its batch held" in warning
    assert "row 1 (1 of " in warning and warning.endswith(" so far)")


@EXECUTIONS
def test_the_logs_of_a_skipped_step_are_nan(execution: Any) -> None:
    x, y = arrays()
    x[17, 1] = np.nan  # batch 3
    source = data.from_arrays(x, y, batch_size=8, shuffle=False)
    options = treadle.Options(execution=execution)

    def logged(every: str) -> tuple[treadle.Loop, list[float]]:
        keras.utils.set_random_seed(0)
        hooks = [NonFinite(action="skip")]
        with treadle.Loop(Line(), hooks=hooks, options=options, console=False) as loop:
            found = [(logs["loss"], logs["error"], *logs) for logs in loop.steps(source, every)]
            assert all(np.isfinite(error) and "loss" in names for _, error, *names in found)
            batch = x[16:24], y[16:24]
            assert np.isnan(loop.step(batch)["loss"])
        return loop, [loss for loss, *_ in found]

    loop, losses = logged("1 step")
    steps = loop.history.steps("loss")[:6]
    np.testing.assert_array_equal(np.float32(losses), steps)
    assert np.isnan(losses).tolist() == [False, False, True, False, False, False]
    _, means = logged("2 steps")  # of the steps that were not skipped
    np.testing.assert_allclose(means, [steps[:2].mean(), steps[3], steps[4:].mean()], rtol=1e-6)


def test_the_count_of_skipped_steps_is_restored(tmp_path: Path) -> None:
    x, y = arrays()
    x[[9, 41], 0] = np.nan  # in batches 2 and 6

    def run(directory: Path, die: bool = False) -> list[str]:
        def leave(loop: Any) -> None:
            if die:
                raise OSError("killed")

        hooks = [Checkpoint(every="4 steps"), NonFinite(action="skip")]
        try:
            loop = trained(x, y, *hooks, treadle.at("5 steps", leave), directory=directory)
        except OSError:
            return []
        return loop.history["warning"]

    run(tmp_path / "cut", die=True)
    told = run(tmp_path / "cut")
    assert told == run(tmp_path / "straight")
    assert len(told) == 2 and told[1].endswith("(2 of 6 so far)")


def test_finite_batches_train_as_without_the_hook() -> None:
    x, y = arrays()
    skipping, raising = trained(x, y, NonFinite(action="skip")), trained(x, y)
    theirs = raising.state.arrays()
    for path, value in skipping.state.arrays().items():
        np.testing.assert_allclose(value, theirs[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_undone_is_no_name_for_a_value() -> None:
    class Named(Line):
        def train_step(self, batch: Any) -> Any:
            return {**super().train_step(batch), "undone": 0.0}

    with (
        pytest.raises(StepError, match="train_step returned 'undone', but skipping"),
        treadle.Loop(Named(), hooks=[NonFinite(action="skip")], console=False) as loop,
    ):
        loop.fit(data.from_arrays(*arrays(), batch_size=8), epochs=1)


def test_a_poisoned_state_is_never_saved(tmp_path: Path) -> None:
    def poison(loop: Any) -> None:
        loop.task.optimizer.variables[-1].assign(
            np.full(loop.task.optimizer.variables[-1].shape, np.nan)
        )

    x, y = arrays()
    hooks = [Checkpoint(every="1 step"), treadle.at("4 steps", poison), NonFinite(action="stop")]
    loop = trained(x, y, *hooks, directory=tmp_path)
    assert max(Checkpoints(tmp_path / "checkpoints").steps()) < 4  # of those that had their turn
    told = [text for text in loop.history["warning"] if "no checkpoint of step" in text]
    assert told and "holds values that are not finite" in told[0]


@pytest.mark.long
def test_a_watchdog_shows_where_a_run_hangs() -> None:
    # Until it hangs, the timer is only noted: compiling may take longer than it on a busy machine.
    code = """
        import faulthandler, threading, keras, numpy as np, treadle
        later, noted = faulthandler.dump_traceback_later, []
        faulthandler.dump_traceback_later = lambda *seconds, **how: noted.append((seconds, how))
        def stuck():
            yield np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
            (seconds, how), = {str(x): x for x in noted}.values()
            later(*seconds, **how)
            threading.Event().wait()
            yield None
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        watchdog = treadle.hooks.Watchdog(after="4 s", leave=True)
        with treadle.Loop(treadle.Supervised(model, "mse", "sgd"), hooks=[watchdog]) as loop:
            loop.fit(stuck, epochs=1)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 1
    assert "Timeout (0:00:04)" in done.stderr and "in stuck" in done.stderr


def test_a_watchdog_watches_for_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"Watchdog\(after='5 steps'\) must be a time"):
        Watchdog(after="5 steps")

    timers: list[float | None] = []
    set_timer, cancel = faulthandler.dump_traceback_later, faulthandler.cancel_dump_traceback_later

    def noted(seconds: float, **how: Any) -> None:
        timers.append(seconds)
        set_timer(seconds, **how)

    def cancelled() -> None:
        timers.append(None)
        cancel()

    monkeypatch.setattr(faulthandler, "dump_traceback_later", noted)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", cancelled)
    trained(*arrays(), Watchdog(after="1 h"))
    assert set(timers[:-1]) == {3600.0}
    assert timers[-1] is None  # it does not come any more
