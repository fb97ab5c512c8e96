"""Runs against a real MLflow server and the real package of Weights & Biases: `scripts/trackers`.

The suite uses trackers in memory, see `hooks/test_tracking.py`; these packages have hundreds of
dependencies. Each training is a process of its own, because some are killed.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

pytestmark = pytest.mark.timeout(7200)  # several processes, each of which imports PyTorch

STEPS, EVERY, KILLED = 300, 20, (33, 150, 151, 275)  # steps, a checkpoint each, where a run dies


def train(directory, kind, place, kill=0, pause=0.02, wait=1200.0):
    """Train digits for 300 steps with a tracker; at step `kill`, the process kills itself."""
    import keras

    import treadle
    from treadle.recipes.digits import Digits

    treadle.setup(seed=0)
    tracker = {
        "mlflow": lambda: treadle.hooks.MLflow("digits", uri=place, wait=wait),
        "wandb": lambda: treadle.hooks.Wandb("digits", mode=place, wait=wait),
    }[kind]()

    class Slow(treadle.Hook):
        """Gives the thread that sends time to be in the middle of something when the run dies."""

        def steps(self, loop, logs):
            time.sleep(pause)
            if kill and loop.progress.step >= kill:
                os.kill(os.getpid(), signal.SIGKILL)

    def picture(loop):
        pixels = loop.task.model.trainable_variables[0]
        return {
            "weights": treadle.Image(abs(keras.ops.convert_to_numpy(pixels)) % 1),
            "note": "<b>text</b>",
        }

    hooks = [
        tracker,
        Slow(),
        treadle.hooks.Checkpoint(every=f"{EVERY} steps"),
        treadle.every("100 steps", picture),
        treadle.every("11 steps", lambda loop: None),  # windows end between checkpoints
    ]
    task = Digits()
    data = task.datasets()
    with treadle.Loop(task, directory, hooks=hooks, console=False) as loop:
        loop.fit(data.train, data.validation, steps=STEPS)


def process(*arguments):
    """Run `train` in a process of its own, and return its exit status and its output."""
    run = [sys.executable, "-m", "tests.tracking_servers", json.dumps(arguments)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=1800)
    return done.returncode, done.stdout + done.stderr


def killed_and_resumed(directory, kind, place):
    """Train with several kills; the run before each one goes on from its last checkpoint."""
    for kill in KILLED:
        status, text = process(str(directory), kind, place, kill)
        assert status == -signal.SIGKILL, text
    status, text = process(str(directory), kind, place)
    assert status == 0, text


def logged(directory):
    """Return the loss of each step, as the log in the run directory has it."""
    import treadle

    history = treadle.load_run(directory).history
    assert history.first_step == 1
    return history.steps("loss").tolist()


class Server:
    """An MLflow server with an SQLite file."""

    def __init__(self, folder):
        self.folder = folder
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            self.port = found.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process = None

    def start(self):
        store = [f"sqlite:///{self.folder}/runs.db", "--artifacts-destination", f"{self.folder}/a"]
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            "127.0.0.1",
            "--workers",
            "1",
        ]
        command += ["--port", str(self.port), "--backend-store-uri", *store]
        with open(self.folder / "server.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        for _ in range(600):
            time.sleep(0.5)
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=60).close()
                return
            except OSError:
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
        raise AssertionError("the server does not answer")

    def stop(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def client(self):
        from mlflow.tracking import MlflowClient

        return MlflowClient(self.uri)

    def run(self):
        """Return the only run of the experiment."""
        client = self.client()
        experiment = client.get_experiment_by_name("digits")
        (run,) = client.search_runs([experiment.experiment_id])
        return run

    def values(self, name):
        found = self.client().get_metric_history(self.run().info.run_id, name)
        return [m.step for m in found], [m.value for m in sorted(found, key=lambda m: m.step)]

    def files(self, path=None):
        found = self.client().list_artifacts(self.run().info.run_id, path)
        return {f.path for f in found if not f.is_dir}


@pytest.fixture
def server(tmp_path):
    (tmp_path / "server").mkdir()
    server = Server(tmp_path / "server")
    server.start()
    yield server
    server.stop()


def check_mlflow(server, directory):
    run = server.run()
    steps, values = server.values("loss")
    assert set(steps) == set(range(1, STEPS + 1)) and len(steps) < 1.5 * STEPS
    assert dict(zip(sorted(steps), values, strict=True)) == pytest.approx(
        dict(enumerate(logged(directory), 1))
    )
    epochs, _ = server.values("val_loss")
    assert len(set(epochs)) == STEPS // 23 + 1
    assert run.info.status == "FINISHED"
    assert run.data.params["settings.units"] == "64" and run.data.params["task"]


def test_mlflow_shows_a_run_that_was_killed_and_resumed_once(server, tmp_path):
    directory = tmp_path / "killed"
    killed_and_resumed(directory, "mlflow", server.uri)
    check_mlflow(server, directory)
    assert {f"images/weights-{n}.png" for n in (100, 200, 300)} <= server.files("images")
    assert len(server.files("texts")) == 3
    assert {"run/run.json", "run/log.jsonl"} <= server.files("run")


def test_mlflow_gets_everything_from_a_server_that_was_away(server, tmp_path):
    directory = tmp_path / "away"
    server.stop()
    arguments = json.dumps((str(directory), "mlflow", server.uri, 0, 0.3))
    with subprocess.Popen([sys.executable, "-m", "tests.tracking_servers", arguments]) as training:
        while not (directory / "log.jsonl").exists():
            time.sleep(0.1)
        server.start()
    assert training.returncode == 0
    check_mlflow(server, directory)


def test_training_does_not_wait_for_a_server_that_never_answers(tmp_path):
    with socket.socket() as silent:  # it accepts connections and says nothing
        silent.bind(("127.0.0.1", 0))
        silent.listen(100)
        place = f"http://127.0.0.1:{silent.getsockname()[1]}"
        status, text = process(str(tmp_path / "silent"), "mlflow", place, 0, 0, 1.0)
    assert status == 0, text
    assert len(logged(tmp_path / "silent")) == STEPS
    assert "MLflow: " in text and "were not sent" in (tmp_path / "silent/log.jsonl").read_text()


def test_wandb_writes_a_run_that_was_killed_and_resumed(tmp_path):
    directory = tmp_path / "offline"
    killed_and_resumed(directory, "wandb", "offline")
    files = sorted(directory.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == len(KILLED) + 1 and len({file.name for file in files}) == 1
    assert all(file.stat().st_size > 1000 for file in files)


if __name__ == "__main__":
    train(*json.loads(sys.argv[1]))
