"""Hooks that send a run to a tracker: what is sent, once, and that training never waits."""

import json
import threading

import numpy as np
import pytest

from tests.hook_loop import Loop
from tests.waiting import WATCHDOG, until
from treadle.core.images import Image
from treadle.core.logs import StepLogs
from treadle.errors import ConfigurationError, TreadleWarning
from treadle.hooks import MLflow, Wandb, tracking, tracking_sender
from treadle.hooks.mlflow import _name as mlflow_name
from treadle.hooks.tracking import Tracker
from treadle.hooks.tracking_sender import Sent

pytestmark = pytest.mark.any_backend


class Server:
    """A tracker in memory, which may be unreachable, or not answer until `answers` is set."""

    keeps_last_step = False
    arrived = None

    def __init__(self, fails=0):
        self.fails, self.says, self.answers = fails, None, threading.Event()
        self.answers.set()
        self.values, self.runs, self.files, self.statuses, self.settings = [], [], [], [], {}

    def open(self, run, settings):
        assert self.answers.wait(WATCHDOG)
        if self.fails:
            self.fails -= 1
            raise ConnectionError("refused")
        self.settings = settings
        self.runs.append(run or "first")
        return self.runs[-1], self.says

    def received(self, run, sent):
        return self.arrived or sent

    def send(self, values):
        assert self.answers.wait(WATCHDOG)
        self.values += values

    def upload(self, directory, files):
        self.files += files

    def close(self, status):
        self.statuses.append(status)

    def steps(self, name="loss"):
        return [v.step for v in self.values if name in v.numbers]


class Tracked(Tracker):
    def __init__(self, server, upload=True, wait=WATCHDOG):
        super().__init__("json", upload, wait)  # a package that is always there
        self.server = server

    def client(self, directory):
        return self.server


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setattr(tracking_sender, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(tracking, "recorded_settings", lambda loop: {"rate": 0.1})

    def begin(server, directory=None, step=0, **how):
        hook, loop = Tracked(server, **how), Loop(directory, step)
        hook.start(loop)
        return hook, loop

    return begin


def finish(hook, loop, error=None):
    hook.end(loop, error)
    hook.after_end(loop, error)


def test_steps_records_images_texts_and_files_are_sent_in_order(begun, tmp_path):
    (tmp_path / "model.keras").write_text("weights")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "1").write_text("left out")
    server = Server()
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=[3, 2])
    loop.record(hook, "log", plane=Image(np.eye(8)), note="a text", mine=4)
    loop.window(hook, loss=[1])
    loop.record(hook, "epoch", step=3, loss=2.0, val_loss=5.0)
    finish(hook, loop)
    assert server.steps() == [1, 2, 3] and server.settings == {"rate": 0.1}
    log, epoch = server.values[2], server.values[-1]
    assert list(log.images) == ["plane"] and log.texts == {"note": "a text"}
    assert log.numbers == {"mine": 4.0} and log.step == 2
    assert epoch.numbers == {"epoch/loss": 2.0, "val_loss": 5.0} and epoch.step == 3
    assert "model.keras" in server.files and not any("checkpoints" in f for f in server.files)
    assert server.statuses == ["finished"] and loop.warnings == []


def test_means_of_an_unfinished_epoch_do_not_repeat_the_last_step(begun):
    server = Server()
    hook, loop = begun(server)
    loop.window(hook, loss=[3, 2])
    loop.record(hook, "validation", step=2, loss=2.5, val_loss=5.0)  # as `steps=2` ends
    finish(hook, loop)
    assert server.steps() == [1, 2]
    assert server.steps("epoch/loss") == server.steps("val_loss") == [2]


def test_a_killed_and_resumed_run_sends_each_step_once(begun, tmp_path):
    server = Server()
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=np.arange(10))
    loop.record(hook, "epoch", loss=1.0)
    hook.end(loop, None)  # all is sent, and then the process is killed
    again, loop = begun(server, tmp_path, step=6)  # from a checkpoint before
    loop.window(again, loss=np.arange(6, 10))
    loop.record(again, "epoch", loss=1.0)
    loop.window(again, loss=np.arange(3))
    loop.record(again, "epoch", loss=1.0)
    finish(again, loop)
    assert server.steps() == list(range(1, 14)) and server.runs == ["first", "first"]
    assert len(server.steps("epoch/loss")) == 2


def test_the_last_step_is_sent_again_if_a_killed_process_lost_it(begun, tmp_path):
    server = Server()
    server.keeps_last_step = True
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=np.arange(10))
    loop.record(hook, "epoch", loss=1.0)
    hook.end(loop, None)  # and then the process is killed
    server.values = [value for value in server.values if value.step < 10]
    again, loop = begun(server, tmp_path, step=6)
    loop.window(again, loss=np.arange(6, 10))
    loop.record(again, "epoch", loss=1.0)
    finish(again, loop)
    assert server.steps() == list(range(1, 11)) and server.steps("epoch/loss") == [10]
    assert json.loads((tmp_path / "json.json").read_text())["step"] == 10


@pytest.mark.parametrize("server_says", [False, True])
@pytest.mark.parametrize("lost_from", [1, 4, 7, 9])
def test_what_a_tracker_lost_is_sent_again(begun, tmp_path, monkeypatch, server_says, lost_from):
    monkeypatch.setattr(tracking_sender, "MOST_AT_ONCE", 1)
    server = Server()
    server.keeps_last_step = True
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=np.arange(5))
    loop.record(hook, "log", mine=1.0)
    loop.window(hook, loss=np.arange(5, 7))
    loop.record(hook, "epoch", loss=1.0)
    loop.window(hook, loss=np.arange(7, 10))
    hook.end(loop, None)  # and then the process is killed
    server.values = [value for value in server.values if value.step < lost_from]
    arrived = Sent(lost_from - 1)
    server.arrived = Sent(0) if server_says else arrived
    server.says = arrived if server_says else None
    again, resumed = Tracked(server), Loop(tmp_path, step=5)  # from a checkpoint
    resumed.history.add_steps(StepLogs(1, {"loss": np.arange(5.0)}, {}, 8, resumed.progress))
    resumed.history.add(loop.history.records[0])
    again.start(resumed)
    resumed.window(again, loss=np.arange(5, 7))
    resumed.record(again, "epoch", loss=1.0)
    resumed.window(again, loss=np.arange(7, 10))
    finish(again, resumed)
    assert server.steps() == list(range(1, 11))
    assert server.steps("mine") == [5] and server.steps("epoch/loss") == [7]
    # In order, because some trackers refuse a step below the last one.
    assert [v.step for v in server.values] == sorted(v.step for v in server.values)


def test_what_a_killed_process_did_not_send_is_sent_from_the_history(begun, tmp_path):
    never, server = Server(fails=10**9), Server()
    hook, loop = begun(never, tmp_path)
    loop.window(hook, loss=np.arange(10))
    loop.history.add_steps(StepLogs(1, {"loss": np.arange(10.0)}, {}, 8, loop.progress))
    loop.record(hook, "epoch", loss=1.0)
    again = Tracked(server)
    again.start(loop)
    finish(again, loop)
    assert server.steps() == list(range(1, 11)) and server.steps("epoch/loss") == [10]
    assert [v.numbers["loss"] for v in server.values[:10]] == list(range(10))


def test_a_second_call_of_fit_without_a_directory_continues_the_tracked_run(begun):
    server = Server()
    hook, loop = begun(server)
    loop.window(hook, loss=[1, 2])
    finish(hook, loop)
    hook.start(loop)
    loop.window(hook, loss=[3])
    finish(hook, loop)
    assert server.steps() == [1, 2, 3] and server.runs == ["first", "first"]


def test_an_unreachable_tracker_is_tried_again(begun):
    server = Server(fails=3)
    hook, loop = begun(server)
    loop.window(hook, loss=[1, 2])
    finish(hook, loop)
    assert server.steps() == [1, 2] and loop.warnings == []


def test_what_was_not_sent_is_logged_and_training_does_not_wait(begun):
    server = Server(fails=10**9)
    server.answers.clear()
    hook, loop = begun(server, wait=0.2)
    for _ in range(200):  # the tracker answers only after them
        loop.window(hook, loss=np.zeros(100))
    server.answers.set()
    until(lambda: server.fails <= 10**9 - 2, "a second attempt")  # the first has failed
    hook.end(loop, None)
    (warning,) = loop.warnings
    assert warning.startswith("Tracked: 20,000 steps and records of steps 1 to 20,000 were not")
    assert "the tracker could not be reached (ConnectionError: ['refused'])" in warning
    assert warning.endswith("They are in the history and in log.jsonl")
    with pytest.warns(TreadleWarning, match="Tracked: the end of the run"):
        hook.after_end(loop, None)


def test_a_full_queue_drops_values_and_the_log_says_how_many(begun, monkeypatch):
    monkeypatch.setattr(tracking_sender, "MOST_VALUES", 100)
    server = Server()
    server.answers.clear()
    hook, loop = begun(server, wait=0.0)
    loop.window(hook, loss=np.zeros(500))
    hook.end(loop, None)
    (warning,) = loop.warnings
    assert "500 were not sent, because the tracker was too slow" in warning
    server.answers.set()


@pytest.mark.parametrize(
    ("error", "unfinished", "status"),
    [
        (None, True, "interrupted"),
        (ValueError(), False, "failed"),
        (KeyboardInterrupt(), False, "interrupted"),
    ],
)
def test_the_status_is_that_of_the_run(begun, error, unfinished, status):
    server = Server()
    hook, loop = begun(server)
    loop.unfinished = unfinished
    finish(hook, loop, error)
    assert server.statuses == [status]


@pytest.mark.parametrize(("kind", "extra"), [(MLflow, "mlflow"), (Wandb, "wandb")])
def test_a_missing_package_is_an_error_that_names_the_extra(kind, extra, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    message = rf"hook {kind.__name__} needs the package {extra}.*pip install 'treadle\[{extra}\]'"
    with pytest.raises(ConfigurationError, match=message):
        kind()


def test_a_negative_time_to_wait_is_an_error():
    with pytest.raises(ConfigurationError, match=r"Tracked needs wait >= 0 seconds, not -1"):
        Tracked(Server(), wait=-1)


def test_names_have_the_characters_that_mlflow_allows():
    assert mlflow_name("norm/model[0] a.b:c-d") == "norm/model_0_ a.b:c-d"
