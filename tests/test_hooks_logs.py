"""`JSONLines` and `CSV`: the files that log values, also those of a resumed run."""

import csv
import dataclasses
import json
import math
import re

import numpy as np
import pytest

from tests.hook_loop import INF, NAN, Loop
from treadle import hooks
from treadle.core import file_operations as operations
from treadle.core.logs import Record
from treadle.errors import ConfigurationError, DataError
from treadle.hooks.lines import read_log

# JSONLines


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_json_lines_are_strict_and_exact(tmp_path):
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    losses = np.array([0.1, 1 / 3, 1e-45], np.float32)
    loop.window(hook, loss=losses, norm=np.array([NAN, INF, -INF]), n=np.arange(3))
    loop.record(hook, "epoch", loss=1 / 3, val_loss=NAN, note='a "text"\n', image=np.zeros((2, 2)))
    path = tmp_path / "log.jsonl"
    text = path.read_text()  # flushed while the run continues
    assert strict(text) == [
        {"step": 1, "loss": float(losses[0]), "norm": "NaN", "n": 0},
        {"step": 2, "loss": float(losses[1]), "norm": "Infinity", "n": 1},
        {"step": 3, "loss": float(losses[2]), "norm": "-Infinity", "n": 2},
        {
            "kind": "epoch",
            "epoch": 1,
            "step": 3,
            "seconds": 0.25,
            "loss": 1 / 3,
            "val_loss": "NaN",
            "note": 'a "text"\n',
        },
    ]
    hook.end(loop, None)
    steps, records = read_log(path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["norm"] for step in steps][1:] == [INF, -INF] and math.isnan(steps[0]["norm"])
    assert [np.float32(step["loss"]) for step in steps] == losses.tolist()
    assert records[0]["loss"] == 1 / 3 and math.isnan(records[0]["val_loss"])


def test_json_lines_of_odd_names_and_values(tmp_path):
    loop, hook = Loop(), hooks.JSONLines(tmp_path / "new" / "folder.jsonl")
    hook.start(loop)
    odd = {'a "b" %d é': [1.0], "step": [2.0], "ok": np.array([True])}
    loop.window(hook, **odd)
    loop.window(hook)
    values = {"kind": 1, "done": np.bool_(False), "none": None}
    hook.record(loop, Record("log", loop.progress, values))
    hook.end(loop, None)
    assert strict((tmp_path / "new" / "folder.jsonl").read_text()) == [
        {"step": 1, 'a "b" %d é': 1.0, "step_": 2.0, "ok": True},
        {"step": 2},
        {"kind": "log", "epoch": 1, "step": 2, "seconds": 0.25, "kind_": 1, "done": False},
    ]


def test_a_window_is_one_write(tmp_path, monkeypatch):
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    written = []
    monkeypatch.setattr(operations, "append", lambda _, text: written.append(text))
    loop.window(hook, loss=np.arange(50.0))
    assert len(written) == 1 and written[0].count(b"\n") == 50
    hook.end(loop, None)


def test_json_lines_need_a_place():
    with pytest.raises(ConfigurationError) as caught:
        hooks.JSONLines().start(Loop())
    assert str(caught.value) == (
        "JSONLines() writes log.jsonl into the run directory, but this run has none: pass "
        "JSONLines('log.jsonl'), or a directory to the loop"
    )


LOG = b"""{"step": 1, "loss": 0.5}
{"step": 2, "loss": 0.5}
{"kind": "log", "epoch": 1, "step": 2, "seconds": 1.0, "text": "NaN"}
{"step": 3, "loss": 0.5}
{"kind": "epoch", "epoch": 1, "step": 3, "seconds": 1.0}
"""


def test_an_incomplete_last_line_is_skipped(tmp_path):
    path = tmp_path / "log.jsonl"
    whole = LOG.rstrip()
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        steps, records = read_log(path)
        complete = whole[: length + 1].count(b"\n") + (length == len(whole))
        assert len(steps) + len(records) == complete, length


@pytest.mark.parametrize("tail", [b"", b"{", b'{"step": 4, "lo', b"\xff\xfe\x00"])
@pytest.mark.parametrize(("step", "lines"), [(0, 0), (1, 1), (2, 3), (3, 5), (9, 5)])
def test_a_log_continues_at_the_step_of_the_resume(tmp_path, step, lines, tail):
    path = tmp_path / "log.jsonl"
    path.write_bytes(LOG + tail)
    loop, hook = Loop(tmp_path, step=step), hooks.JSONLines()
    hook.start(loop)
    loop.window(hook, loss=[1.0])
    hook.end(loop, None)
    kept = b"".join(LOG.splitlines(keepends=True)[:lines])
    assert path.read_bytes() == kept + b'{"step": %d, "loss": 1.0}\n' % (step + 1)


def test_a_log_whose_last_line_has_no_end_keeps_it(tmp_path):
    (tmp_path / "log.jsonl").write_bytes(b'{"step": 1}')
    hook = hooks.JSONLines()
    hook.start(Loop(tmp_path, step=1))
    assert (tmp_path / "log.jsonl").read_bytes() == b'{"step": 1}\n'
    hook.end(Loop(), None)


# CSV


def test_csv_is_a_row_per_epoch(tmp_path):
    loop, hook = Loop(tmp_path), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=np.float64(1 / 3), note="a, b", image=np.zeros(3))
    loop.record(hook, "validation", step=15, val_loss=1.0)
    loop.record(hook, "log", step=15, other=1.0)
    loop.record(hook, "epoch", step=20, note="c", loss=np.float32(0.5))
    hook.end(loop, None)
    assert (tmp_path / "epochs.csv").read_text() == (
        'epoch,step,seconds,loss,note\n2,10,2.5,0.3333333333333333,"a, b"\n3,20,5.0,0.5,c\n'
    )


def test_csv_grows_columns(tmp_path):
    loop, hook = Loop(), hooks.CSV(tmp_path / "table.csv")
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=2.0)
    loop.record(hook, "epoch", step=20, loss=1.0, val_loss=3.0, step_size=1)
    loop.record(hook, "epoch", step=30, val_loss=2.0, epoch=7)
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["epoch", "step", "seconds", "loss", "val_loss", "step_size", "epoch_"],
        ["2", "10", "2.5", "2.0", "", "", ""],
        ["3", "20", "5.0", "1.0", "3.0", "1", ""],
        ["4", "30", "7.5", "", "2.0", "", "7"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"]


def test_csv_is_rewritten_once_for_a_new_column(tmp_path, monkeypatch):
    loop, hook = Loop(tmp_path), hooks.CSV()
    replaced, replace = [], operations.replace
    monkeypatch.setattr(operations, "replace", lambda *a: (replaced.append(a), replace(*a)))
    hook.start(loop)
    for step in range(1, 9):
        loop.record(hook, "epoch", step=step, loss=1.0, **({"val_loss": 1.0} if step > 4 else {}))
    assert len(replaced) == 2


@pytest.mark.parametrize(("step", "kept"), [(0, 0), (10, 1), (19, 1), (20, 2), (99, 2)])
@pytest.mark.parametrize("tail", ["", "4,3", "4,30,1.0,0.5,0."])
def test_csv_continues_at_the_epoch_of_the_resume(tmp_path, step, kept, tail):
    table = "epoch,step,seconds,loss,val_loss\n2,10,2.5,2.0,\n3,20,5.0,1.0,3.0\n"
    path = tmp_path / "epochs.csv"
    path.write_text(table + tail)
    loop, hook = Loop(tmp_path, step=step), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=100, loss=0.0)
    rows = "".join(table.splitlines(keepends=True)[: kept + 1])
    expected = f"{rows}11,100,25.0,0.0,\n" if kept else "epoch,step,seconds,loss\n11,100,25.0,0.0\n"
    assert path.read_text() == expected


def test_csv_warns_if_its_rows_are_lost(tmp_path):
    table, loop = hooks.CSV(), Loop(tmp_path, step=30)
    table.restore({"rows": 3, "checksums": []})
    table.start(loop)
    text = f"{tmp_path / 'epochs.csv'} is missing, so the rows of earlier epochs are lost"
    assert loop.warnings == [f"{text}. The weights are not affected"]


def test_csv_is_no_other_table(tmp_path):
    path = tmp_path / "epochs.csv"
    path.write_text("name,price\nbread,3\n")
    with pytest.raises(ConfigurationError) as caught:
        hooks.CSV().start(Loop(tmp_path))
    assert str(caught.value) == (
        f"{path} is not a table of epochs: its first columns are not epoch, step and "
        "seconds. Choose another path, or move it away"
    )
    assert path.read_text() == "name,price\nbread,3\n"


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (b"3,2x,5.0,1.0", "its step is '2x'; expected a whole number"),
        (b"3", "its step is None; expected a whole number"),
        (b"3,-4,5.0,1.0", "its step is '-4'; expected a whole number"),
        (b"3,\x1b[2J,5.0,1.0", r"its step is '\x1b[2J'; expected a whole number"),
        (b"3,\xff,5.0,1.0", "it is not a text in UTF-8"),
        (b"3,20,5.0,1.0,7", "it has more values than the 4 columns"),
        (b"3,20,5.0," + b"1" * 200_000, "field larger than field limit (131072)"),
    ],
)
def test_csv_names_a_damaged_row(tmp_path, row, why):
    path = tmp_path / "epochs.csv"
    content = b"epoch,step,seconds,loss\n2,10,2.5,2.0\n" + row + b"\n4,30,6.0,0.5\n"
    path.write_bytes(content)
    loop, hook = Loop(tmp_path, step=30), hooks.CSV()
    hook.restore({"rows": 3, "checksums": []})
    with pytest.raises(DataError) as caught:
        hook.start(loop)
    assert str(caught.value) == (
        f"line 3 of {path} is not a row of an epoch: {why}. Restore a copy of the file, or move it "
        "away: the run then resumes, and writes the later epochs into a new one"
    )
    assert path.read_bytes() == content
    path.rename(tmp_path / "away.csv")
    hook.start(loop)
    loop.record(hook, "epoch", step=40, loss=0.5)
    assert path.read_text().splitlines()[1].startswith("5,40,")


def test_csv_removes_damaged_rows_of_later_epochs(tmp_path):
    path = tmp_path / "epochs.csv"
    path.write_text("epoch,step,seconds,loss\n2,10,2.5,2.0\n3,2x,5.0,1.0\n")
    hook = hooks.CSV()
    hook.restore({"rows": 1, "checksums": []})
    hook.start(Loop(tmp_path, step=10))
    assert path.read_text() == "epoch,step,seconds,loss\n2,10,2.5,2.0\n"


def saved_table(directory, later_column=False):
    """A table of three epochs, and the state of the hook after the second."""
    loop, hook = Loop(directory), hooks.CSV()
    hook.start(loop)
    loop.record(hook, "epoch", step=10, loss=1 / 3, note="a, b")
    loop.record(hook, "epoch", step=20, loss=0.5, note="")
    state = hook.state()
    loop.record(hook, "epoch", step=30, loss=0.25, **({"val_loss": 1.0} if later_column else {}))
    return directory / "epochs.csv", state


@pytest.mark.parametrize("later_column", [False, True])
@pytest.mark.parametrize("tail", ["", "5,40", "5,4x,1.0\n"])
def test_csv_cuts_only_what_follows_the_checkpoint(tmp_path, later_column, tail):
    path, state = saved_table(tmp_path, later_column)
    kept = path.read_text().splitlines(keepends=True)[:3]
    path.write_text(path.read_text().replace("0.25", "9.9") + tail)
    hook = hooks.CSV()
    hook.restore(state)
    hook.start(Loop(tmp_path, step=20))
    assert path.read_text() == "".join(kept)
    assert hook.state()["checksums"].tolist() == state["checksums"].tolist()


@pytest.mark.parametrize(
    ("old", "new", "line", "later_column"),
    [
        ("0.3333333333333333", "0.3333333333333334", 2, False),
        ("0.3333333333333333", "0.3333333333333334", 2, True),
        ('"a, b"', "", 2, False),
        ("3,20,5.0,0.5,", "3,20,5.0,,0.5", 3, False),
        ("3,20,5.0,0.5,", "3,20,5.0,0.5,x", 3, False),
        ("epoch,step,seconds,loss", "epoch,step,seconds,lost", 2, False),
        ("3,20,5.0", "2,20,5.0", 3, False),
    ],
)
def test_csv_names_a_changed_row(tmp_path, old, new, line, later_column):
    path, state = saved_table(tmp_path, later_column)
    content = path.read_text().replace(old, new)
    assert content != path.read_text()
    path.write_text(content)
    hook = hooks.CSV()
    hook.restore(state)
    with pytest.raises(DataError) as caught:
        hook.start(Loop(tmp_path, step=20))
    wanted = state["checksums"][line - 2]
    assert re.fullmatch(
        re.escape(
            f"line {line} of {path}, or the name of a column, was changed after the checkpoint: "
            "the row has the checksum "
        )
        + "[0-9a-f]{8}, "
        + re.escape(
            f"and the run wrote one with {wanted:08x}. Restore a copy of the file, or move it "
            "away: the run then resumes, and writes the later epochs into a new one"
        ),
        str(caught.value),
    )
    assert path.read_text() == content


def test_the_state_of_a_table_does_not_depend_on_times(tmp_path):
    states = []
    for number, seconds in enumerate((1.0, 2.0)):
        loop, hook = Loop(tmp_path / str(number)), hooks.CSV()
        hook.start(loop)
        progress = dataclasses.replace(loop.progress, step=10, seconds=seconds)
        hook.record(loop, Record("epoch", progress, {"loss": 0.5}))
        states.append(hook.state()["checksums"].tolist())
    assert states[0] == states[1]


@pytest.mark.parametrize("rows", [0, 1])
def test_csv_names_missing_rows(tmp_path, rows):
    path, state = saved_table(tmp_path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[: rows and rows + 1]))
    hook = hooks.CSV()
    hook.restore(state)
    with pytest.raises(DataError) as caught:
        hook.start(Loop(tmp_path, step=20))
    assert str(caught.value).startswith(
        f"{path} is damaged: it has {rows} rows, and at the checkpoint it had 2. Restore a copy"
    )


@pytest.mark.parametrize("value", ["2", -1, [2], 2.5])
def test_logs_refuse_a_damaged_state(value):
    for hook, name in ((hooks.JSONLines(), "size"), (hooks.CSV(), "rows")):
        with pytest.raises(ValueError, match=f"{name} is .*; expected a whole number from 0 to"):
            hook.restore({name: value})
    with pytest.raises(TypeError):
        hooks.CSV().restore({"rows": 2, "checksums": ["x"]})


def test_csv_needs_a_place():
    with pytest.raises(
        ConfigurationError, match=r"CSV\(\) writes epochs.csv into the run directory"
    ):
        hooks.CSV().start(Loop())
