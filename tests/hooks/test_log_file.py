"""Reading `log.jsonl` in columns: equal to JSON line by line, and compared with checkpoints."""

import hashlib
import json
import math
import os
import random

import numpy as np
import pytest

from tests.hook_loop import INF, NAN, Loop
from treadle import hooks
from treadle.core.logs import Record
from treadle.errors import DataError
from treadle.hooks import log_file
from treadle.hooks.log_file import ADVICE, Mark, read, read_log
from treadle.run.recorded_history import history_of, recorded_history

HEAD = {"kind": "epoch", "epoch": 1, "step": 3, "seconds": 1.0}


def lines_of(*lines):
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def numbered(count, **values):
    return [{"step": step, **values} for step in range(1, count + 1)]


def by_line(data):
    """What a JSON parser reads, line by line."""
    steps, records = [], []
    for text in data.splitlines():
        line = json.loads(text)
        line = {
            n: log_file.NON_FINITE.get(x, x) if isinstance(x, str) else x for n, x in line.items()
        }
        (records if "kind" in line else steps).append(line)
    return steps, records


def fault(path, **more):
    with pytest.raises(DataError) as caught:
        read(path, **more)
    assert str(caught.value).endswith(ADVICE)
    return str(caught.value).removesuffix(ADVICE)


KINDS = [
    lambda rng: rng.random() < 0.5,
    lambda rng: rng.randint(-5, 5),
    lambda rng: rng.randint(-(1 << 63), (1 << 63) - 1),
    lambda rng: rng.choice(
        [
            rng.random(),
            -rng.random() * 10 ** rng.randint(-300, 300),
            float(np.float32(rng.random())),
            float(rng.randint(-5, 5)),
            rng.choice(["NaN", "Infinity", "-Infinity"]),
        ]
    ),
]


@pytest.mark.parametrize("seed", range(40))
def test_columns_equal_json_line_by_line(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(log_file, "BLOCK", rng.choice([50, 1000, 1 << 20]))
    names = rng.sample(["loss", "e.5-1", 'a "b" %', "é", "N", "kind_", "step_", "P, M: 1"], 3)
    columns = {name: rng.choice([0, 1, 1, 1]) for name in names}
    kinds = {name: rng.choice(KINDS) for name in names}
    lines = []
    for step in range(rng.choice([1, 99]), rng.randint(100, 300)):
        if rng.random() < 0.02:
            columns[rng.choice(names)] ^= 1
        lines.append({"step": step, **{n: kinds[n](rng) for n in names if columns[n]}})
        if rng.random() < 0.05:
            value = rng.choice(KINDS)(rng)
            lines.append({**HEAD, "step": step, "note": "a\n{}\n{", "loss": value})
    data = lines_of(*lines)
    (tmp_path / "log.jsonl").write_bytes(data)
    steps, records = read_log(tmp_path / "log.jsonl")
    expected, of_records = by_line(data)
    assert list(map(repr, steps)) == list(map(repr, expected))
    assert list(map(repr, records)) == list(map(repr, of_records))
    log = read(tmp_path / "log.jsonl")
    assert log.last_step == expected[-1]["step"] and log.lines == len(lines)
    middle = expected[len(expected) // 2]
    assert repr(log.row(middle["step"])) == repr(middle) and log.row(10**6) == {}
    assert [line["step"] for line in log.up_to(150).rows()] == [
        line["step"] for line in expected if line["step"] <= 150
    ]


def test_numbers_of_several_types_become_floats(tmp_path):
    path = tmp_path / "log.jsonl"
    values = [0.5, 2, True, "NaN", 1 << 63]
    path.write_bytes(lines_of(*({"step": i, "a": value} for i, value in enumerate(values, 1))))
    [part] = read(path).parts
    np.testing.assert_array_equal(part.values["a"], [0.5, 2.0, 1.0, NAN, 2.0**63])
    path.write_bytes(lines_of({"step": 1, "a": (1 << 64) - 1}))
    assert read(path).row(1) == {"step": 1, "a": (1 << 64) - 1}


def test_what_the_hook_writes_is_parsed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(log_file, "parse_line", None)  # never called
    loop, hook = Loop(tmp_path), hooks.JSONLines()
    hook.start(loop)
    rng = np.random.default_rng(0)
    losses = rng.normal(size=50) * 10.0 ** rng.integers(-30, 30, 50)
    with np.errstate(all="ignore"):
        small = (losses * 1e9).astype("f4")
    losses[3:6] = NAN, INF, -INF
    loop.window(hook, loss=losses, small=small, n=np.arange(50) - 25)
    hook.end(loop, None)
    log = read(tmp_path / "log.jsonl")
    [part] = log.parts
    np.testing.assert_array_equal(part.values["loss"], losses)
    np.testing.assert_array_equal(part.values["small"].astype("f4"), small)
    assert part.values["n"].dtype == np.int64 and part.values["n"][0] == -25


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (b"[1, 2]", "it is a list; expected an object"),
        (b"secret words", "it is not JSON: Expecting value in line 1, column 1"),
        (b"\xff", "it is not a text in UTF-8 (byte 0)"),
        (b"", "it is not JSON: Expecting value in line 1, column 1"),
        (b"[" * 200_000, "it holds about 200,000 values; at most 100,000 are allowed"),
        (b"[" * 90_000, "it is nested more than 50 levels deep"),
        (b'{"loss": 0.5}', "step is missing"),
        (b'{"step": "5", "loss": 0.5}', "step is '5'; expected a whole number from 0 to"),
        (b'{"step": -5, "loss": 0.5}', "step is -5; expected a whole number from 0 to"),
        (b'{"step": 5, "loss": 1e400}', "it holds '1e400', which is too large for a"),
        (b'{"step": 5, "loss": "none"}', "'loss' is 'none'; expected a number"),
        (b'{"step": 5, "loss": null}', "'loss' is None; expected a number"),
        (b'{"step": 5, "loss": {"a": 1}}', "'loss' is an object; expected a number"),
        (b'{"step": 5, "loss": 36893488147419103232}', "'loss' is 36893488147419103232; expect"),
        (b'{"step": 5, "loss": 0.5 0.7}', "it is not JSON: Expecting ',' delimiter in line 1"),
        (b'{"step": 1, "loss": 0.5}', "step 1 follows step 4"),
        (b'{"kind": "epoch", "step": 5, "seconds": 1}', "epoch is missing"),
        (b'{"kind": ["epoch"], "epoch": 1, "step": 5, "seconds": 1}', "kind is a list; expected a"),
        (b'{"kind": "log", "epoch": 1, "step": 5, "seconds": 1e400}', "it holds '1e400', which is"),
        (b'{"kind": "log", "epoch": 1, "step": 5, "seconds": 1, "a": [1]}', "'a' is a list; exp"),
        (
            b'{"kind": "log", "epoch": 1, "step": 5, "batch": -1, "examples": 8, "seconds": 1}',
            "batch is -1; expected a whole number from 0 to",
        ),
    ],
)
def test_an_invalid_line_is_named_and_not_quoted(tmp_path, wrong, why):
    path = tmp_path / "log.jsonl"
    lines = lines_of(*numbered(4, loss=0.5))
    for before, after in ((lines, b'{"step": 6, "loss": 0.5}\n'), (lines, lines_of(HEAD))):
        path.write_bytes(before + wrong + b"\n" + after)
        text = fault(path)
        assert text.startswith(f"line 5 of {path} is not a line of a log: {why}"), text
        assert "secret" not in text and len(text) < len(str(path)) + 200


def test_a_line_is_not_read_under_other_names(tmp_path):
    """Lines that have as many numbers as their neighbours, in another order."""
    path = tmp_path / "log.jsonl"
    lines = [{"step": 1, "a": 1.5, "b": 2.5}, {"step": 2, "b": 3.5, "a": 4.5}]
    path.write_bytes(lines_of(*lines))
    assert read_log(path)[0] == lines
    path.write_bytes(
        b'{"step": 1, "a": 1.5}\n{"step": 2, "a": 2.5, 3}\n{"step": 3, "a": }\n{"step": 4}\n'
    )
    assert fault(path).startswith(f"line 2 of {path} is not a line of a log")


def test_an_invalid_name_in_the_first_line_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1, "a\\q": 0.5}\n' + lines_of({"step": 2, "a": 0.5}))
    assert fault(path) == (
        f"line 1 of {path} is not a line of a log: it is not JSON: Invalid \\escape in line 1, "
        "column 15"
    )


@pytest.mark.parametrize("tail", [b"{", b'{"step": 5, "lo', b"\xff\xfe\x00", b"\0" * 4096, b"{}\n"])
def test_an_invalid_last_line_is_left_out(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    for lines in ([], numbered(4, loss=0.5), [*numbered(4, loss=0.5), HEAD]):
        path.write_bytes(lines_of(*lines) + tail)
        assert read(path).lines == len(lines)
    whole = lines_of(*numbered(4, loss=0.5)).rstrip(b"\n")
    path.write_bytes(whole)
    assert read(path).last_step == 4


def test_a_log_of_many_forms_is_refused(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(lines_of(*({"step": i, f"a{i}": 1.0} for i in range(1, 1500))))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value) == (
        f"{path} holds more than 1,000 different sets of names, so it is not the log of a run"
    )


def test_a_line_without_end_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl"
    with path.open("wb") as file:
        file.truncate(10 << 30)
    assert fault(path) == (
        f"line 1 of {path} is not a line of a log: it has more than 16,777,216 bytes"
    )


def test_only_a_regular_file_is_read(tmp_path):
    path, other = tmp_path / "log.jsonl", tmp_path / "other"
    other.write_bytes(lines_of(*numbered(3)))
    for place, why in (
        (lambda: os.mkfifo(path), "it is a pipe, and not a file"),
        (lambda: path.symlink_to(other), "it is a symbolic link, which is not followed"),
        (lambda: path.symlink_to(tmp_path / "nothing"), "it is a symbolic link, which is not f"),
        (lambda: path.mkdir(), "it is a folder, and not a file"),
    ):
        place()
        for reading in (read, recorded_history):
            with pytest.raises(DataError) as caught:
                reading(path)
            assert str(caught.value).startswith(f"cannot read {path}: {why}")
        path.rmdir() if path.is_dir() else path.unlink()


# Marks of checkpoints


def marked(path, *steps):
    """A log of 40 steps, and the marks of checkpoints after some of them."""
    lines = numbered(40, loss=0.5)
    path.write_bytes(lines_of(*lines))
    marks = []
    for step in steps:
        data = lines_of(*lines[:step])
        marks.append(Mark(step, len(data), hashlib.sha256(data).hexdigest()))
    return marks


def test_a_log_as_noted_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    marks = marked(path, 10, 20, 30)
    assert read(path, marks).last_step == 40
    history, lost = recorded_history(path, marks[:2], step=20)
    assert len(history.steps("loss")) == 20 and not lost
    # Beyond the mark, anything may follow: the run that resumes removes it.
    path.write_bytes(path.read_bytes()[: marks[1].size] + b"[1]\n[2]\n")
    assert len(recorded_history(path, marks[:2], step=20)[0].steps("loss")) == 20


@pytest.mark.parametrize("step", [1, 10, 11, 20, 30])
def test_a_changed_number_is_found_between_two_checkpoints(tmp_path, step):
    path = tmp_path / "log.jsonl"
    marks = marked(path, 10, 20, 30)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[step - 1] = lines[step - 1].replace(b"0.5", b"0.4")
    path.write_bytes(b"".join(lines))
    first = (step - 1) // 10 * 10 + 1
    text = (
        f"{path} is damaged: one of the lines {first} to {first + 9} was changed after the "
        f"checkpoint of step {first + 9}"
    )
    assert fault(path, marks=marks) == text
    with pytest.raises(DataError) as caught:
        recorded_history(path, marks, step=30)
    assert str(caught.value) == text + ADVICE


def test_a_missing_or_additional_line_is_found(tmp_path):
    path = tmp_path / "log.jsonl"
    marks = marked(path, 10, 30)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4] + lines[5:]))
    assert fault(path, marks=marks).startswith(f"{path} is damaged: one of the lines 1 to ")
    path.write_bytes(whole + whole)
    assert fault(path, marks=marks) == (
        f"line 41 of {path} is not a line of a log: step 1 follows step 40"
    )
    path.write_bytes(b"".join(lines[:25]))
    size = sum(map(len, lines[:25]))
    assert fault(path, marks=marks) == (
        f"{path} is damaged: it has {size:,} bytes in 25 lines, and at step 30 it had "
        f"{marks[1].size:,}"
    )
    path.write_bytes(b"".join(lines[:10]) + lines[10][:-5])
    assert "is damaged: it has " in fault(path, marks=marks)


def test_an_invalid_line_before_a_mark_is_named(tmp_path):
    path = tmp_path / "log.jsonl"
    marks = marked(path, 30)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[29] = b"\0" * (len(lines[29]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    assert fault(path, marks=marks).startswith(f"line 30 of {path} is not a line of a log: it is")
    path.write_bytes(b"".join(lines[:30]))  # at the end, as a power loss leaves it
    assert fault(path, marks=marks) == (
        f"{path} is damaged: one of the lines 1 to 30 was changed after the checkpoint of step 30"
    )


def test_a_missing_log_is_reported(tmp_path):
    path = tmp_path / "log.jsonl"
    marks = marked(path, 10)
    path.unlink()
    history, lost = recorded_history(path, marks, step=10)
    assert not history.records and lost == (
        f"{path} is missing, so the values logged before are not in the history. The weights are "
        "not affected"
    )
    assert recorded_history(path, [], step=10)[1] == ""  # the run wrote no log
    assert recorded_history(tmp_path / "no" / "log.jsonl")[1] == ""


def test_the_log_of_a_finished_run_is_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    marks = marked(path, 30)
    assert len(recorded_history(path, marks, last=40)[0].steps("loss")) == 40
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:35]))
    with pytest.raises(DataError) as caught:
        recorded_history(path, marks, last=40)
    assert str(caught.value) == (
        f"{path} is damaged: it ends with step 35, and the run with step 40{ADVICE}"
    )


def test_marks_are_those_of_the_states_of_hooks():
    digest = "0" * 64
    states = {
        0: {"JSONLines": {"size": 0, "sha256": digest}},
        1: {"JSONLines": {"size": "3", "sha256": digest}},
        2: {"JSONLines": 3},
        3: {"JSONLines": {"size": 30, "sha256": digest}},
        4: {"JSONLines": {"size": -1, "sha256": digest}},
        6: {"JSONLines": {"size": 30}},
        5: {},
    }
    assert Mark.all_of(states) == [Mark(0, 0, digest), Mark(3, 30, digest)]


# The history


def test_the_history_is_that_of_the_log(tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [{"step": 1, "a": 1}, {"step": 2, "a": 2, "b": 0.5}, {"step": 3, "b": 1.5}]
    path.write_bytes(lines_of(*lines, {**HEAD, "b": 1.0, "note": "NaN"}))
    history = history_of(read(path))
    np.testing.assert_array_equal(history.steps("a"), [1.0, 2.0, NAN])
    np.testing.assert_array_equal(history.steps("b"), [NAN, 0.5, 1.5])
    [record] = history.records
    assert record.kind == "epoch" and record.progress.step == 3 and record.progress.epoch == 0
    assert record.values["b"] == 1.0 and math.isnan(record.values["note"])
    assert isinstance(record, Record)
    path.write_bytes(lines_of({"step": 4, "a": 1}, {"step": 5, "a": 2}))
    assert history_of(read(path)).steps("a").dtype == np.int64
    assert history_of(read(path)).first_step == 4
