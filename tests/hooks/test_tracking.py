"""Hooks that send a run to a tracker: what is sent, once, and that training never waits."""

import json
import posixpath
import time

import numpy as np
import pytest

from tests import hook_loop
from treadle import Image
from treadle.core.logs import StepLogs
from treadle.errors import ConfigurationError, TreadleWarning
from treadle.hooks import MLflow, Wandb, tracking
from treadle.hooks.mlflow import _name as mlflow_name
from treadle.hooks.tracking import Tracker


class Server:
    """A tracker in memory, which may be unreachable or slow."""

    unsure = 0

    def __init__(self, fails=0, seconds=0.0):
        self.fails, self.seconds = fails, seconds
        self.values, self.runs, self.files, self.statuses, self.settings = [], [], [], [], {}

    def open(self, run, settings):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("refused")
        self.settings = settings
        self.runs.append(run or "first")
        return self.runs[-1]

    def send(self, values):
        time.sleep(self.seconds)
        self.values += values

    def upload(self, directory, files):
        self.files += files

    def close(self, status):
        self.statuses.append(status)

    def steps(self, name="loss"):
        return [v.step for v in self.values if name in v.numbers]


class Loop(hook_loop.Loop):
    """A loop whose history has the values of steps."""

    def window(self, hook, **values):
        first, steps = self.progress.step + 1, len(next(iter(values.values())))
        arrays = {name: np.array(column, "f4") for name, column in values.items()}
        after = self.progress.advanced(steps, 8 * steps)
        self.history.add_steps(StepLogs(first, arrays, arrays, 8, after))
        super().window(hook, **values)


class Tracked(Tracker):
    def __init__(self, server, upload=True, wait=5.0):
        super().__init__("json", upload, wait)  # a package that is always there
        self.server = server

    def client(self, directory):
        return self.server


@pytest.fixture
def begun(monkeypatch):
    monkeypatch.setattr(tracking, "FIRST_PAUSE", 0.01)
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


def resumed(loop, step):
    """Return the loop of a process that resumes from a checkpoint."""
    found = Loop(loop.directory, step=step)
    rows = [row["loss"] for _, row in loop.history.rows()][:step]
    if rows:
        values = {"loss": np.array(rows)}
        found.history.add_steps(StepLogs(1, values, values, 8, found.progress))
    for record in loop.history.records:
        if record.progress.step <= step:
            found.history.add(record)
    return found


def test_a_resumed_run_continues_the_tracked_run(begun, tmp_path):
    server = Server()
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=np.arange(10))
    loop.record(hook, "epoch", loss=1.0)
    hook.end(loop, None)  # all is sent, and then the process is killed
    assert json.loads((tmp_path / "json.json").read_text()) == {
        "run": "first",
        "step": 10,
        "closed": False,
    }
    again, loop = Tracked(server), resumed(loop, 6)
    again.start(loop)
    loop.window(again, loss=np.arange(6, 10))
    loop.record(again, "epoch", loss=1.0)
    loop.window(again, loss=np.arange(3))
    loop.record(again, "epoch", loss=1.0)
    finish(again, loop)
    assert server.runs == ["first", "first"]
    assert server.steps() == [*range(1, 11), *range(7, 14)]  # what runs again is sent again
    assert server.steps("epoch/loss") == [10, 10, 13]


@pytest.mark.parametrize("lost_from", [1, 4, 5, 7, 9])
def test_what_a_killed_process_lost_is_sent_again(begun, tmp_path, monkeypatch, lost_from):
    """The process was killed after a call of the client, or lost the last steps of it."""
    monkeypatch.setattr(tracking, "MOST_AT_ONCE", 1)
    server = Server()
    server.unsure = 3
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=np.arange(5))
    loop.record(hook, "log", mine=1.0)
    loop.window(hook, loss=np.arange(5, 7))
    loop.record(hook, "epoch", loss=1.0)
    loop.window(hook, loss=np.arange(7, 10))
    hook.end(loop, None)
    server.values = [value for value in server.values if value.step < lost_from]
    place = tmp_path / "json.json"
    place.write_text(json.dumps({"run": "first", "step": min(10, lost_from + 2)}))
    again, loop = Tracked(server), resumed(loop, 7)
    again.start(loop)
    loop.window(again, loss=np.arange(7, 10))
    finish(again, loop)
    assert set(server.steps()) == set(range(1, 11))
    assert set(server.steps("mine")) == {5} and set(server.steps("epoch/loss")) == {7}


def test_a_run_that_ended_sends_nothing_twice(begun, tmp_path):
    server = Server()
    server.unsure = 3
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=np.arange(5))
    finish(hook, loop)
    again = Tracked(server)
    again.start(loop)
    finish(again, loop)
    assert server.steps() == [1, 2, 3, 4, 5] and server.runs == ["first", "first"]


def test_the_end_waits_for_a_tracker_without_looking_again_and_again(begun, monkeypatch):
    looked, look = [], tracking._Sender._new
    monkeypatch.setattr(tracking, "FIRST_PAUSE", 1000.0)
    monkeypatch.setattr(tracking._Sender, "_new", lambda *a: (looked.append(1), look(*a))[1])
    hook, loop = begun(Server(fails=10**9), wait=0.3)
    loop.window(hook, loss=[1])
    with pytest.warns(TreadleWarning, match="could not be sent"):
        finish(hook, loop)
    assert len(looked) < 10


def test_a_damaged_note_begins_a_new_tracked_run(begun, tmp_path):
    (tmp_path / "json.json").write_text('{"run": 1')
    server = Server()
    hook, loop = begun(server, tmp_path)
    loop.window(hook, loss=[1, 2])
    finish(hook, loop)
    assert server.runs == ["first"] and server.steps() == [1, 2]


def test_what_a_killed_process_did_not_send_is_sent_from_the_history(begun, tmp_path):
    never, server = Server(fails=10**9), Server()
    hook, loop = begun(never, tmp_path)
    loop.window(hook, loss=np.arange(10))
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
    hook, loop = begun(Server(fails=10**9), wait=0.2)
    started = time.monotonic()
    for _ in range(200):
        loop.window(hook, loss=np.zeros(100))
    assert time.monotonic() - started < 5
    hook.end(loop, None)
    (warning,) = loop.warnings
    assert warning.startswith("Tracked: 20,000 steps and records of steps 1 to 20,000 were not")
    assert "the tracker could not be reached (ConnectionError: refused)" in warning
    assert warning.endswith("They are in the history and in log.jsonl")
    with pytest.warns(TreadleWarning, match="Tracked: the end of the run"):
        hook.after_end(loop, None)


def test_a_slow_tracker_is_not_waited_for(begun):
    hook, loop = begun(Server(seconds=0.5), wait=0.0)
    loop.window(hook, loss=np.zeros(500))
    hook.end(loop, None)
    (warning,) = loop.warnings
    assert (
        "500 steps and records of steps 1 to 500 were not sent, because the tracker was" in warning
    )


def test_calls_have_a_limited_number_of_values(begun):
    sizes, server = [], Server()
    server.send = lambda values: sizes.append(sum(value.size for value in values))
    hook, loop = begun(server)
    loop.window(hook, loss=np.zeros(900), accuracy=np.zeros(900))
    loop.window(hook, **{str(name): [0.0] for name in range(2000)})
    finish(hook, loop)
    assert sum(sizes) == 3800 and sizes.pop() == 2000  # a single step is not divided
    assert max(sizes) == 500


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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = rf"hook {kind.__name__} needs the package {extra}.*pip install {extra}$"
    with pytest.raises(ConfigurationError, match=message):
        kind()


def test_a_negative_time_to_wait_is_an_error():
    with pytest.raises(ConfigurationError, match=r"Tracked needs wait >= 0 seconds, not -1"):
        Tracked(Server(), wait=-1)


def test_names_have_the_characters_that_mlflow_allows():
    assert mlflow_name("norm/model[0] a.b:c-d") == "norm/model_0_ a.b:c-d"


def test_names_that_mlflow_would_reject_are_replaced_by_others():
    names = ["", ".", "..", "../a", "/a", "a/", "a//b", "a/../b", "./a", "x" * 300, "x" * 301]
    found = [mlflow_name(name) for name in names]
    assert len(set(found)) == len(names) and max(map(len, found)) == 250
    for name in found:  # the rule of MLflow
        assert name and posixpath.normpath(name) == name and not name.startswith((".", "/"))
    assert mlflow_name("a//b") == "a__b-7a9acf33" and mlflow_name("x" * 250) == "x" * 250
