"""`treadle runs` and `treadle log`: what they print, also of foreign and damaged directories."""

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.cli_runs import treadle
from tests.run_content import write_record
from treadle.core.lock import Lock
from treadle.errors import DataError
from treadle.hooks import log_tail

PROGRESS = {"step": 4, "epoch": 2, "batch": 0, "examples": 16, "seconds": 1.5}
LOG = [
    {"step": 1, "loss": 3.0},
    {"step": 2, "loss": 2.0},
    {"kind": "epoch", "epoch": 1, "step": 2, "seconds": 1, "loss": 2.5, "val_loss": 1.0},
    {"step": 3, "loss": 1.0},
    {"step": 4, "loss": "NaN"},
    {"kind": "epoch", "epoch": 2, "step": 4, "seconds": 1.5, "loss": 1.0, "val_loss": 2.0},
]


def write_run(name, log=LOG, settings=None, **facts):
    folder = Path(name)
    folder.mkdir(parents=True)
    configuration = {"settings": settings or {}, "seed": 0, "recipe": "digits"}
    configuration |= {"backend": "jax", "precision": "float32", "execution": "auto"}
    run = {"configuration": configuration, "backend": "jax", "progress": PROGRESS, **facts}
    write_record(folder, {"id": "0a", "files": {}, **run})
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    return folder


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def four():
    times = {"started": "2020-01-02T03:04:05", "finished": "2020-01-02T03:05:00"}
    write_run("runs/a", settings={"units": 64, "depth": 2}, reason="done", **times)
    settings = {"units": 8, "depth": 2}
    write_run("runs/search/trials/b", settings=settings, error="ValueError: boom")
    write_run("runs/c", LOG[:3], error="KeyboardInterrupt", progress={**PROGRESS, "step": 2})
    write_run("runs/d", LOG[:4], progress={**PROGRESS, "step": 0, "epoch": 0})
    lock = Lock(Path("runs/d"))
    lock.acquire()
    yield
    lock.release()


def test_runs_lists_states_settings_and_best_values(four):
    printed = treadle("runs")
    rows = [line.split() for line in printed.stdout.splitlines()[1:]]
    states = {row[0]: row[1:4] for row in rows}
    assert states == {
        "runs/a": ["finished", "4", "2"],
        "runs/c": ["interrupted", "2", "2"],
        "runs/d": ["running", "3", "1"],
        "runs/search/trials/b": ["failed", "4", "2"],
    }
    assert rows[0][5:7] == ["d", "ago"] and int(rows[0][4]) > 365
    assert rows[0][7:] == ["units=64", "depth=2", "val_loss", "1", "in", "epoch", "1"]
    assert "runs/search/trials/b failed: ValueError: boom" in printed.stderr


def test_the_settings_of_a_function_task_fit_the_line(folder):
    layers = {str(i): {"class": "Dense", "units": 8, "activation": "linear"} for i in range(9)}
    settings = {
        **{"holds_eval_step": False, "train_step": "make.<locals>.train_step", "eval_step": None},
        "state": {"model": {"class": "Sequential", "layers": layers, "use_ema": False}},
    }
    write_run("runs/function", settings=settings)
    header, line = treadle("runs").stdout.splitlines()
    assert line.split()[-6:] == ["train_step=train_step", "val_loss", "1", "in", "epoch", "1"]
    assert max(len(header), len(line)) <= 100
    write_run("runs/other", settings={**settings, "state": {}})
    shown = treadle("runs").stdout
    assert "state.model.class=Sequential" in shown and "use_ema" not in shown  # what differs
    assert ".layers." not in shown


def test_settings_that_are_equal_in_all_runs_are_left_out(four):
    printed = treadle("runs", "runs/search")
    assert "units=8  depth=2" in printed.stdout  # a single run
    for name in "cd":
        shutil.rmtree(f"runs/{name}")
    printed = treadle("runs")
    assert "units=64" in printed.stdout and "units=8" in printed.stdout
    assert "depth" not in printed.stdout
    found = json.loads(treadle("runs", "--json").stdout)["runs"]
    assert [run["settings"]["depth"] for run in found] == [2, 2]


def test_nested_settings_differ_by_their_parts():
    for name, rate in ("a", 0.1), ("b", 0.2):
        settings = {"model": {"units": 4}, "optimizer": {"class": "SGD", "rate": rate}}
        write_run(f"runs/{name}", settings=settings)
    printed = treadle("runs", "--sort", "-optimizer.rate").stdout.splitlines()
    assert [line.split()[0] for line in printed[1:]] == ["runs/b", "runs/a"]
    assert "  optimizer.rate=0.2  " in printed[1]
    assert "class" not in printed[1] and "units" not in printed[1]


def test_the_best_value_names_the_epoch_of_the_log():
    """An unfinished epoch has a number too."""
    at = {"step": 3, "seconds": 1}
    log = [
        {"kind": "partial", "epoch": 1, **at, "loss": 9.0},
        {"kind": "epoch", "epoch": 2, **at, "loss": 2.0, "head/accuracy": 0.5},
        {"kind": "epoch", "epoch": 3, **at, "loss": 1.0, "head/accuracy": 0.2},
    ]
    write_run("runs/a", log, progress={**PROGRESS, "epoch": 1})
    [found] = json.loads(treadle("runs", "--json").stdout)["runs"]
    assert found["epoch"] == 3
    assert found["best"] == {
        "loss": {"value": 1.0, "epoch": 3},
        "head/accuracy": {"value": 0.5, "epoch": 2},
    }


@pytest.mark.parametrize(
    ("seconds", "shown"), [(5, "5 s"), (130, "2 min"), (7300, "2 h"), (90000, "1 d")]
)
def test_the_age_of_a_run_is_shown(seconds, shown, monkeypatch):
    class Stopped(datetime):
        @classmethod
        def now(cls, tz=None):
            return now

    now = datetime.now(UTC)
    monkeypatch.setattr("treadle.cli.watching.datetime", Stopped)
    started = now - timedelta(seconds=seconds)
    write_run("runs/a", started=started.isoformat(timespec="milliseconds"))
    assert f"{shown} ago" in treadle("runs").stdout


def test_runs_are_sorted(four):
    def order(by):
        return [Path(run["directory"]).name for run in runs(by)["runs"]]

    def runs(by):
        return json.loads(treadle("runs", "runs", "--json", "--sort", by).stdout)

    assert order("directory") == ["a", "c", "d", "b"]
    assert order("units") == ["b", "a", "c", "d"]
    assert order("-units") == ["a", "b", "c", "d"]
    assert order("loss")[-2:] == ["c", "d"]
    found = runs("-step")["runs"][0]
    assert (found["state"], found["last"]) == ("finished", {"loss": 1.0, "val_loss": 2.0})
    assert found["best"]["val_loss"] == {"value": 1.0, "epoch": 1}
    error = treadle("runs", "--sort", "size", code=2).stderr
    assert "--sort size: no run has 'size'. Choose one of directory, state, started" in error


def test_a_process_that_was_killed_is_not_running(four):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"],
                           capture_output=True, text=True, check=True)  # fmt: skip
    holder = {"pid": int(ended.stdout), "host": os.uname().nodename}
    Path("runs/c/.lock").write_text(json.dumps(holder))
    Path("runs/a/.lock").write_text('{"pid": 1, "host": "elsewhere"}')
    found = json.loads(treadle("runs", "--json").stdout)["runs"]
    assert [run["state"] for run in found[:2]] == ["finished", "interrupted"]


def test_damaged_runs_are_listed_and_explained(four):
    Path("runs/a/run.json").write_text("[" * 100_000)
    Path("runs/c/log.jsonl").unlink()
    os.mkfifo("runs/c/log.jsonl")
    (Path("runs/d/log.jsonl")).write_text('{"kind": "epoch"}\n')
    printed = treadle("runs")
    assert printed.stdout.count("unreadable") == 3
    assert "runs/a unreadable: runs/a/run.json is damaged" in printed.stderr
    assert "cannot read runs/c/log.jsonl: it is a pipe, and not a file" in printed.stderr
    assert "line 1 of runs/d/log.jsonl is not a line of a log: epoch is missing" in printed.stderr
    assert "Traceback" not in printed.output


def test_folders_without_runs():
    assert "there is no folder runs: name one that holds runs" in treadle("runs", code=2).stderr
    Path("runs").mkdir()
    printed = treadle("runs")
    assert (printed.stdout, "runs holds no runs" in printed.stderr) == ("", True)
    assert "runs holds no run: there is no run.json" in treadle("log", "runs", code=2).stderr


def test_log_prints_the_last_lines():
    write_run("here")
    assert treadle("log", "here").stdout.splitlines() == [
        "step 1  loss 3",
        "step 2  loss 2",
        "epoch 1  step 2  loss 2.5  val_loss 1",
        "step 3  loss 1",
        "step 4  loss nan",
        "epoch 2  step 4  loss 1  val_loss 2",
    ]
    assert treadle("log", "here", "--last", 1).stdout == "epoch 2  step 4  loss 1  val_loss 2\n"
    lines = treadle("log", "here", "--last", 2, "--json").stdout.splitlines()
    assert json.loads(lines[0]) == {"step": 4, "loss": None}


def test_log_prints_the_last_lines_of_a_long_log(monkeypatch):
    # Blocks and longest lines are those of a log of hundreds of megabytes, made smaller.
    monkeypatch.setattr(log_tail, "BLOCK", 64)
    monkeypatch.setattr(log_tail, "LONGEST_LINE", 512)
    folder = write_run("here", [{"step": step, "loss": 0.5} for step in range(1, 2001)])
    for last in (0, 1, 2, 3, 4, 99, 1999, 2000, 2001, 10**9):
        printed = treadle("log", "here", "--last", last).stdout.splitlines()
        assert printed == [f"step {step:,}  loss 0.5" for step in range(max(1, 2001 - last), 2001)]
    with (folder / "log.jsonl").open("a") as log:
        log.write('{"step": 2001, "lo')
    assert treadle("log", "here", "--last", 1).stdout == "step 2,000  loss 0.5\n"
    with (folder / "log.jsonl").open("a") as log:
        log.write("x" * 4000)
    message = treadle("log", "here", "--last", 9, code=2).stderr
    assert "a line of here/log.jsonl is not a line of a log: it has more than 512 bytes" in message


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
def test_the_records_of_a_log_are_found_in_blocks_of_any_size(monkeypatch, block):
    monkeypatch.setattr(log_tail, "BLOCK", block)
    epoch = {"kind": "epoch", "epoch": 1, "step": 3, "seconds": 1.0}
    lines = [epoch, {"step": 4, "kind_of": 2.0}, epoch, epoch, *LOG, {**epoch, "note": "kind" * 99}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    path = Path("log.jsonl")
    for rest in ("", '{"kind"', "x" * 99):  # an incomplete line
        path.write_text(text + rest)
        records, step = log_tail.read_records(path)
        assert (records, step) == ([line for line in lines if "kind" in line], 3)
    path.write_text(text + '{"step": 17, "loss": 0.5}\n')
    assert log_tail.read_records(path) == (records, 17)
    path.write_text("")
    assert log_tail.read_records(path) == ([], 0)
    for wrong, where in (("\n", "the last line"), ('{"kind"}\n{}\n', f"line {len(lines) + 1}")):
        path.write_text(text + wrong)
        with pytest.raises(DataError, match=f"{where} of log.jsonl is not a line of a log"):
            log_tail.read_records(path)


def test_log_and_runs_print_no_control_characters():
    line = {"kind": "a\x1b[2J", "epoch": 1, "step": 3, "seconds": 0, "b\x1b\n": "c\x9b\rd"}
    write_run("here", [*LOG, line], {"e\x1b": "\x07"}, error="f\x1b", started="\x1b[1m")
    for printed in (treadle("log", "here"), treadle("runs", "here")):
        assert not {"\x1b", "\x07", "\x9b", "\r"} & set(printed.output)
    assert r"step 3  a\x1b[2J  b\x1b\n: c\x9b\rd" in treadle("log", "here").stdout


def test_follow_prints_new_lines_until_the_run_ends(monkeypatch):
    folder = write_run("here", LOG[:2])
    lock = Lock(folder)
    lock.acquire()
    line = [json.dumps(one) + "\n" for one in LOG]
    steps = iter([line[2], line[3][:5], line[3][5:], "cut", line[1]])

    def passing(seconds):
        log = folder / "log.jsonl"
        text = next(steps, None)
        if text is None:
            lock.release()
        elif text == "cut":  # a rollback
            log.write_text(line[0])
        else:
            with log.open("a") as file:
                file.write(text)

    monkeypatch.setattr("treadle.cli.watching.sleep", passing)
    printed = treadle("log", "here", "--follow", "--last", 1)
    assert printed.stdout.splitlines() == [
        "step 2  loss 2",
        "epoch 1  step 2  loss 2.5  val_loss 1",
        "step 3  loss 1",
        "step 2  loss 2",
    ]
    assert printed.stderr.splitlines()[-1] == "interrupted"


def test_nothing_is_changed_and_no_framework_is_imported(four):
    before = {path: path.stat() for path in Path("runs").rglob("*")}
    code = (
        "import sys\nfrom treadle.cli import app\n"
        "for arguments in (['runs'], ['log', 'runs/a']):\n"
        "    app(arguments, standalone_mode=False)\n"
        "print([n for n in ('keras', 'torch', 'jax', 'tensorflow') if n in sys.modules])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert found.splitlines()[-1] == "[]"
    after = {path: path.stat() for path in Path("runs").rglob("*")}
    assert {p: (s.st_mtime_ns, s.st_ino) for p, s in before.items()} == {
        p: (s.st_mtime_ns, s.st_ino) for p, s in after.items()
    }


def test_a_log_that_is_a_link_is_not_shown():
    folder = write_run("here")
    Path("secret").write_text("password\n")
    (folder / "log.jsonl").unlink()
    (folder / "log.jsonl").symlink_to(Path("secret").absolute())
    for printed in (treadle("log", "here", code=2), treadle("runs", "here")):
        assert "it is a symbolic link, which is not followed" in printed.stderr
        assert "password" not in printed.output
