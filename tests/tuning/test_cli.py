"""`treadle tune`, whose trials run in processes."""

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.cli_runs import treadle as command
from tests.core.test_lock import locked
from tests.tune_searches import apart, quick  # noqa: F401
from tests.waiting import WATCHDOG, until
from treadle.tuning import Tuned, results

FILE = """
    import signal, sys, time
    from pathlib import Path
    from typing import Annotated
    import keras
    import numpy as np
    import treadle
    from keras import ops

    def hold(loop):
        # Wait for a signal in a trial that a file names.
        asked, before = [], signal.getsignal(signal.SIGTERM)

        def handle(number, frame):
            asked.append(number)
            before(number, frame)

        if loop.directory is None or not Path("hold", loop.directory.name).exists():
            return
        signal.signal(signal.SIGTERM, handle)
        while not asked:
            time.sleep(0.01)
        signal.signal(signal.SIGTERM, before)

    class Line(treadle.Task):
        epochs = 3

        def __init__(
            self,
            rate: Annotated[float, treadle.Range(0.01, 0.5, log=True)] = 0.01,
            faults: str = "",
            shape: object = (b"no JSON", 1),
        ):
            assert shape == (b"no JSON", 1) and sys.stdin.read() == ""
            self.slope = keras.Variable(0.0)
            self.optimizer = keras.optimizers.SGD(rate)
            print("a line of the task's own")
            if faults:
                with open(faults, "a+") as file:
                    file.write("x")
                    if file.tell() == 2:
                        raise KeyError("my own mistake")

        def hooks(self):
            return [treadle.every("1 epoch", hold)]

        def loss(self, batch):
            x, y = batch
            return ops.mean((self.slope * x - y) ** 2)

        def train_step(self, batch):
            return treadle.minimize(lambda: self.loss(batch), [self.slope], self.optimizer)

        def eval_step(self, batch):
            return self.loss(batch)

        def datasets(self):
            x = np.linspace(-1, 1, 32, dtype="float32")
            train = treadle.data.from_arrays(x, 2 * x, batch_size=8)
            return treadle.Datasets(train=train, validation=[(x[::3], 2 * x[::3])])
"""


@pytest.fixture
def mine():
    Path("mine.py").write_text(textwrap.dedent(FILE))


@pytest.mark.long
def test_the_command_tells_what_came_of_each_trial(mine):
    asked = ("tune", "mine.py:Line", "--set", "faults=made", "--trials", 3, "--directory", "there")
    lines = command(*asked).stdout.splitlines()
    lines = [line for line in lines if "ended in this call" not in line]  # each 30 seconds
    assert lines[0] == "searching rate 0.01..0.5 log"
    assert lines[1].startswith("trial 0000  val_loss ") and lines[1].endswith("  rate=0.01")
    assert lines[2].startswith("trial 0001  failed: KeyError: 'my own mistake'  rate=")
    assert lines[3].startswith("trial 0002  val_loss ")
    assert lines[4].split() == ["trial", "val_loss", "step", "rate", "seconds"]
    assert {lines[5].split()[0], lines[6].split()[0]} == {"0000", "0002"}
    assert lines[7:9] == ["not shown: 1 failed", "runs and database: there"]
    printed = Path("there/trials/0001/output.txt").read_text()
    assert "a line of the task's own\n" in printed and "KeyError: 'my own" in printed

    found = json.loads(command(*asked, "--json").stdout)
    assert found["before"] and [t["ended"] for t in found["trials"]] == [
        "complete",
        "failed",
        "complete",
    ]
    # The printed command trains the best trial again, to the same value.
    assert lines[9] == f"rerun the best: {found['command']}"
    again = found["command"].replace("faults=made", "faults=")
    run = json.loads(command(*again.split()[1:], "--json").stdout)
    assert run["last"]["val_loss"] == found["best"]["value"]
    assert "nothing was done" in command(*asked).stdout.splitlines()[1]


def test_the_command_tells_that_all_was_tried(capsys):
    from treadle.cli.tuning import _print

    done = results.Trial(3, "complete", 0.5, 4, {"kind": "a"}, 1, 2.0, None, "there/trials/0003")
    _print(Tuned("loss", "min", (done,), "there", "treadle run mine", exhausted=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "every combination was tried"
    assert lines[2].split() == ["0003", "0.5", "4", "a", "2.0"]


def started(*arguments):
    code = "from treadle.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True)


@pytest.mark.long
def test_a_search_survives_an_interrupt_and_a_kill(mine):
    asked = ("tune", "mine.py", "--trials", 6, "--epochs", 5, "--directory")
    folder = Path("there")
    Path("hold").mkdir()
    for number, sent, code in ((1, signal.SIGINT, 130), (3, signal.SIGKILL, -signal.SIGKILL)):
        trial = f"{number:04}"
        Path("hold", trial).touch()  # it ends neither before the signal nor by itself
        process = started(*asked, folder)
        record = folder / "trials" / trial / "run.json"
        until(lambda file=record, process=process: file.exists() or process.poll() is not None)
        process.send_signal(sent)
        assert process.wait(WATCHDOG) == code
        assert not json.loads(record.read_text())["finished"]
        until(lambda place=record.parent: not locked(place))  # a killed one leaves its worker alone
        Path("hold", trial).unlink()
    found = json.loads(command(*asked, folder, "--json").stdout)
    straight = json.loads(command(*asked, "other", "--json").stdout)
    for name in ("number", "ended", "value", "parameters", "reports", "error"):
        assert [t[name] for t in found["trials"]] == [t[name] for t in straight["trials"]], name
    assert len(found["trials"]) == 6 and found["command"] == straight["command"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear"], "linear has no search space: annotate a setting"),
        (["digit"], "Did you mean 'digits'?"),
        (["digits", "--set", "unit=3"], "digits has no setting 'unit'. Did you mean 'units'?"),
        (["digits", "--search", "units=9..3"], "9 is not less than 3"),
        (["digits", "--data-dir", "nowhere"], "--data-dir nowhere: there is no such folder"),
        (["digits", "units=3"], "repeat --set for each setting, as --set units=3"),
    ],
)
def test_what_cannot_be_meant_is_one_red_line(arguments, message):
    result = command("tune", *arguments, code=2)
    assert message in result.stderr and result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
