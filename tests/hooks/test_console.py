"""`Console` in plain text, as in a file or a pipe."""

import io
import threading
import time

import numpy as np
import pytest
import rich.console

from tests.console_runs import Clock, Run, stopped_clock  # noqa: F401
from treadle.hooks import Console


@pytest.fixture
def plain_text(clock_):
    return lambda **kwargs: Run(clock_, rich.console.Console(file=io.StringIO()), **kwargs)


def test_plain_text_is_a_line_per_epoch_and_one_every_ten_seconds(plain_text):
    run = plain_text()
    for _ in range(9):
        run.window(seconds=2.0)
    run.window(seconds=2.0)
    run.record("epoch", seconds=5.0, loss=0.6, accuracy=0.875, val_loss=0.7, val_noisy_loss=1234567)
    run.window(steps=100, seconds=1.0)
    run.record("epoch", loss=0.5, accuracy=0.9)
    run.end()
    assert run.lines == [
        "plan: one plan",
        "epoch 1/2  step 60/100  loss 0.75  accuracy 0.9  320 examples/s  0:28 left",
        "epoch 1/2  25.0 s  loss 0.6  accuracy 0.875  val_loss 0.7  val_noisy_loss 1,234,567",
        "epoch 2/2  step 100/100  loss 0.75  accuracy 0.9  640 examples/s  0:00 left",
        "epoch 2/2  1.00 s  loss 0.5  accuracy 0.9",
        "finished: 200 steps in 26.0 s",
    ]
    assert "\x1b" not in run.file.getvalue() and "\r" not in run.file.getvalue()


def test_long_lines_of_plain_text_are_not_broken(plain_text):
    run = plain_text()
    run.record("log", note="word " * 60)
    assert run.lines[1:] == ["step 0  note: " + "word " * 60]


def test_a_log_record_is_a_line(plain_text):
    run = plain_text()
    run.window(steps=200)
    run.record("log", loss=np.float32(0.512), samples=12800)
    run.record("log", poem="one\ntwo", image=np.zeros((28, 28, 3)), done=True)
    assert run.lines[1:] == [
        "step 200  loss 0.512  samples 12,800",
        "step 200  poem:",
        "one",
        "two  image <ndarray 28x28x3>  done True",
    ]


def test_a_validation_is_printed_once(plain_text):
    run = plain_text()
    run.window(steps=50)
    run.record("validation", loss=0.6, val_loss=0.7)
    assert run.lines == ["plan: one plan"]  # an epoch's line may follow that says the same
    run.window(steps=50)
    assert run.lines[1:] == ["step 50  loss 0.6  val_loss 0.7"]
    run.record("validation", loss=0.5, val_loss=0.6)
    run.record("epoch", loss=0.5)
    assert run.lines[2:] == ["epoch 1/2  0.00 s  loss 0.5  val_loss 0.6"]
    run.window(steps=20)
    run.record("validation", val_loss=0.5)
    run.end()
    assert run.lines[3:] == ["step 120  val_loss 0.5", "finished: 120 steps in 0.00 s"]


def test_the_plan_is_printed_once_when_it_is_known(plain_text):
    run = plain_text(plan="")
    assert run.lines == []
    run.plan = "8 steps per call"
    run.window()
    run.window(seconds=11)
    assert run.lines[0] == "plan: 8 steps per call"
    assert len(run.lines) == 2


def test_a_resumed_run_reports_its_step(plain_text):
    run = plain_text(at=31)
    assert run.lines[0] == "resuming after step 31"


def test_the_last_line_says_why_it_ended(plain_text):
    def last(error=None, reason=None, seconds=0.0):
        run = plain_text()
        run.window(steps=1, seconds=seconds)
        run.reason = reason
        run.end(error)
        return run.lines[-1]

    assert last(seconds=75) == "finished: 1 step in 1:15"
    assert last(reason="enough") == (
        "stopped after step 1, epoch 1, batch 1: enough; 1 step in 0.00 s"
    )
    assert last(KeyboardInterrupt()) == (
        "interrupted after step 1, epoch 1, batch 1; 1 step in 0.00 s"
    )
    assert last(ValueError("boom")) == "ValueError after step 1, epoch 1, batch 1; 1 step in 0.00 s"


def test_quiet_and_unstarted_consoles_show_nothing(plain_text):
    run = plain_text(quiet=True)
    run.window()
    run.record("epoch", loss=1.0)
    run.end()
    assert run.lines == []
    Console().end(run, None)


def test_a_sentence_is_printed_without_a_run(plain_text):
    run = plain_text()
    run.hook.print("done before")
    assert run.lines[-1] == "done before"
    Console(quiet=True, to=rich.console.Console(file=run.file)).print("nothing")
    assert run.lines[-1] == "done before"


def test_plain_text_shows_activities_that_take_long(plain_text):
    run = plain_text()
    run.hook.validation(run, None)
    run.clock.now += 31
    run.hook._call.show_activity(run, run.clock.now)
    assert run.lines[-1] == "validating … 31 s"


def test_the_thread_of_a_run_ends_with_it(clock_, monkeypatch):
    monkeypatch.undo()
    before = set(threading.enumerate())  # some may end meanwhile
    run = Run(Clock(), rich.console.Console(file=io.StringIO()))
    [started] = set(threading.enumerate()) - before
    run.end()
    assert not started.is_alive()


def test_seconds_of_an_epoch_include_its_validation():
    import keras

    import treadle

    keras.backend.clear_session()
    seconds = []

    class Watching(treadle.Hook):
        def validation(self, loop, results):
            seconds.append(loop.progress.seconds)
            time.sleep(0.05)

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    data = treadle.data.from_arrays(np.ones((4, 1)), np.ones((4, 1)), batch_size=4)
    loop = treadle.Loop(treadle.Supervised(model, "mse", "sgd"), hooks=[Watching()], console=False)
    history = loop.fit(data, data, epochs=1)
    assert loop.progress.seconds >= seconds[0] + 0.1
    assert history.records[-1].progress.seconds >= seconds[0] + 0.1
