"""Names of logged values: what is read from a file has the names and the progress of the run."""

import csv
import json
import random

import keras
import numpy as np
import pytest

import treadle
from tests.hook_loop import Loop
from treadle import Image, hooks
from treadle.core.directory import LOG
from treadle.core.history import History
from treadle.core.logs import (
    COLUMNS,
    HEAD,
    Record,
    StepLogs,
    column_of,
    name_of,
    record_of,
    values_of,
)
from treadle.core.progress import Progress
from treadle.hooks.log_file import read
from treadle.hooks.log_tail import LogTail, read_records
from treadle.hooks.tracking import Tracker
from treadle.report import reading
from treadle.run.recorded_history import history_of

NAMES = [
    *("loss", "val_loss", "step", "epoch", "kind", "seconds", "batch", "examples", "progress"),
    *("step_", "step__", "_step", "kind_", "batch_", "examples__", "val_step", "epoch/loss"),
    *("", " ", "_", "__", "a/b", "a//b", "../a", "a.b", "NaN", "null", "x" * 300),
    *(
        "é☃𝄞",
        "日本",
        "\u202e",
        'q"\\',
        "%s %d {0}",
        "a, b: 1",
        "a\nb",
        "a\r\nb",
        "\x00",
        "\x1b[31m",
    ),
]
PARTS = [*COLUMNS, "batch", "examples", "val", "_", "_", "_", "/", "é", "\n", '"', ",", "%", "{"]


def some_names(seed):
    rng = random.Random(seed)
    drawn = ["".join(rng.choices(PARTS, k=rng.randint(1, 4))) for _ in range(100)]
    return list(dict.fromkeys([*NAMES, *drawn]))


@pytest.mark.parametrize("columns", [COLUMNS, HEAD])
def test_no_column_is_taken_twice_and_each_gives_its_name(columns):
    names = some_names(0)
    found = [column_of(name, columns) for name in names]
    assert len({*found, *columns}) == len(names) + len(columns)
    assert [name_of(column, columns) for column in found] == names
    plain = [n for n in names if n.rstrip("_") not in columns]
    assert [column_of(name, columns) for name in plain] == plain and plain


def logged(directory, names):
    """Log values of these names to `log.jsonl` and `epochs.csv`, and return the history."""
    loop = Loop(directory)
    written = hooks.JSONLines(), hooks.CSV()
    for hook in written:
        hook.start(loop)
    for count in (3, 2):
        values = {n: np.arange(count) + i / 8 for i, n in enumerate(names)}
        at = loop.progress.advanced(count, 8 * count).after_seconds(0.25 * count)
        steps = StepLogs(loop.progress.step + 1, values, values, 8, at)
        loop.progress = at
        loop.history.add_steps(steps)
        written[0].steps(loop, steps)
        for kind in ("log", "validation", "epoch", "partial"):
            record = Record(kind, at, {n: i + count / 8 for i, n in enumerate(names)})
            loop.history.add(record)
            for hook in written:
                hook.record(loop, record)
        loop.progress = at.at_epoch(at.epoch + 1)
    for hook in written:
        hook.end(loop, None)
    return loop.history


def require_equal(found: History, expected: History) -> None:
    assert found.step_names == expected.step_names and found.names() == expected.names()
    for name in expected.step_names:
        np.testing.assert_array_equal(found.steps(name), expected.steps(name))
    assert found.records == expected.records


@pytest.mark.parametrize("seed", range(3))
def test_a_log_and_a_table_are_read_under_the_names_that_were_logged(tmp_path, seed):
    names = some_names(seed)
    history = logged(tmp_path, names)
    log = read(tmp_path / LOG)
    require_equal(history_of(log), history)
    for step, row in history.rows():
        assert values_of(log.row(step)) == row
    assert read_records(tmp_path / LOG) == (list(log.records), 5)
    lines = list(LogTail(tmp_path / LOG, 100).lines())
    assert [[*values_of(line)] for line in lines] == [names] * (5 + 8)
    with (tmp_path / "epochs.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header[:3] == ["epoch", "step", "seconds"]
    assert [name_of(column) for column in header[3:]] == names
    epochs = [record for record in history.records if record.kind == "epoch"]
    assert [list(map(float, row[3:])) for row in rows] == [[*x.values.values()] for x in epochs]


def test_a_log_of_an_older_version_is_read():
    head = {"kind": "epoch", "epoch": 2, "step": 8, "seconds": 1.5}
    history = History()
    for line in (
        {**head, "step_": 0.5, "batch": 3, "examples": 4, "examples_": 5},
        {**head, "examples": 4.5},
        {**head, "kind": "log", "batch": "a text"},
    ):
        record = record_of(line)
        assert record.progress == Progress(8, 1, seconds=1.5)
        history.add(record)
    assert [dict(record.values) for record in history.records] == [
        {"step": 0.5, "batch": 3, "examples": 4, "examples_": 5},
        {"examples": 4.5},
        {"batch": "a text"},
    ]


class Named(treadle.Task):
    """Returns a value of each name."""

    def __init__(self):
        self.w = keras.Variable(0.0)

    def train_step(self, batch):
        self.w.assign_add(1.0)
        return {name: self.w + float(i) for i, name in enumerate(NAMES)}


class Tracked(Tracker):
    """Keeps the names that a tracker gets."""

    unsure = 0

    def __init__(self):
        super().__init__("json", False, 60.0)
        self.names = {}

    def client(self, directory):
        return self

    def open(self, run, settings):
        return "first"

    def send(self, values):
        for one in values:
            self.names.setdefault(one.step, set()).update(one.numbers)

    def close(self, status):
        pass


def trained(directory, die_at=None):
    keras.backend.clear_session()
    treadle.setup(seed=0)

    def log(loop):
        loop.log({name: float(i) for i, name in enumerate(NAMES)})
        loop.log({f"picture {name}"[:40]: Image(np.eye(2)) for name in NAMES[:5]})
        if loop.progress.step == die_at:
            raise OSError("killed")

    tracked = Tracked()
    given = [treadle.every("3 steps", log), hooks.Checkpoint(every="2 steps"), tracked]
    batches = treadle.data.from_arrays(np.zeros((8, 1), "float32"), batch_size=2)
    eager = treadle.Options(execution="eager")
    with treadle.Loop(Named(), directory, hooks=given, options=eager, console=False) as loop:
        loop.fit(batches, epochs=2)
    return loop, tracked


def test_a_run_has_its_names_and_its_progress_after_a_resume(tmp_path):
    whole, whole_tracked = trained(tmp_path / "whole")
    with pytest.raises(OSError, match="killed"):
        trained(tmp_path / "killed", die_at=6)
    resumed, tracked = trained(tmp_path / "killed")
    read_again = treadle.load_run(tmp_path / "killed")
    for loop in (resumed, read_again):
        assert loop.history.step_names == whole.history.step_names
        for name in NAMES:
            np.testing.assert_array_equal(loop.history.steps(name), whole.history.steps(name))
            assert loop.history[name] == whole.history[name]
        places = [(x.kind, x.progress.after_seconds(0.0)) for x in loop.history.records]
        assert places == [(x.kind, x.progress.after_seconds(0.0)) for x in whole.history.records]
        assert any(at.batch and at.examples for _, at in places)
    assert {image.name for image in read_again.images} == {f"picture {n}" for n in NAMES[:5]}
    assert read_again.last["step"] == whole.history.last["step"]
    assert {5, 6, 7, 8} <= tracked.names.keys()  # of step 4, only records are sent again
    for step in (5, 6, 7, 8):
        assert tracked.names[step] == whole_tracked.names[step] >= {*NAMES}
    curves = reading.read_run(tmp_path / "killed", 100, 1 << 20)["curves"]
    of_steps = [curve["name"] for curve in curves if curve["kind"] == "steps"]
    assert of_steps == [reading._name(name) for name in NAMES] and "step" in of_steps
    rows = [json.loads(x) for x in (tmp_path / "killed" / LOG).read_text().splitlines()]
    assert rows[0]["step"] == 1 and rows[0]["step_"] == whole.history.steps("step")[0]
