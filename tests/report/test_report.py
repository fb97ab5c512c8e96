"""Reports: what the data of a page holds, reduced curves, and harmless pages."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import treadle
from tests.report_directories import RUN, data_in, log_of, pattern, record, write_health, write_run
from treadle.doctor.sheets.sheet import SCHEMA
from treadle.errors import DirectoryError
from treadle.hooks.images import source_of
from treadle.report import page
from treadle.report.curves import MOST_POINTS, reduced
from treadle.report.reading import read_run

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&amp;\u2028\u2029\ud800'\"`"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(path, points=MOST_POINTS, image_bytes=1 << 20):
    return read_run(Path(path), points, image_bytes)


def titles(data):
    return {chart["title"]: chart["curves"] for chart in data["charts"]}


# Curves


def test_no_spike_and_no_gap_is_lost():
    steps = np.arange(1, 100_001)
    values = np.sin(steps / 5000)
    values[[777, 50_000, 99_998]] = 50.0, -60.0, 70.0
    values[30_000], values[60_000:60_003] = np.nan, np.inf
    found = reduced(steps, values)
    known = dict(zip(found["x"], found["y"], strict=True))
    assert len(known) <= MOST_POINTS + 2
    assert [known[778], known[50_001], known[99_999]] == [50.0, -60.0, 70.0]
    assert [known[30_001], known[60_001]] == [None, None]
    assert found["x"] == sorted(found["x"])
    means = np.array(found["my"])
    assert np.abs(means - np.sin(np.array(found["mx"]) / 5000)).max() < 2.0


def test_a_short_curve_is_kept():
    found = reduced(np.array([1, 5]), np.array([0.123456789, np.nan]))
    assert found == {"x": [1, 5], "y": [0.123457, None]}


def test_a_curve_without_a_finite_value_is_a_gap():
    found = reduced(np.arange(10), np.full(10, np.nan), points=4)
    assert found["y"] == [None, None] and found["my"] == [None, None]


def test_buckets_of_one_step():
    values = np.arange(7.0)
    assert reduced(np.arange(7), values, points=6)["y"] == [0.0, 1.0, 2.0, 3.0, 4.0, 6.0]


# What is read


def test_training_and_validation_of_one_name_share_a_chart():
    log = log_of([4.0, 3.0, 2.0, 1.0], (2, 4), penalty=0.5)
    log.append({**record("validation", 4), "val_easy_accuracy": 0.5, "accuracy": 0.1})
    log[-1]["seconds"] = 4.0
    log.append(record("log", 4, probe=7))
    write_run("run", log)
    data = page.report_data([Path("run")])
    curves = data["runs"][0]["curves"]
    found = {
        title: [(curves[c]["kind"], label, curves[c]["y"]) for _, c, label in chart]
        for title, chart in titles(data).items()
    }
    assert found == {
        "loss": [("steps", "training", [4.0, 3.0, 2.0, 1.0]), ("epochs", "validation", [3.0, 1.5])],
        "penalty": [("steps", "training", [0.5] * 4)],
        "accuracy": [("epochs", "training", [0.4, 0.8]), ("epochs", "validation, easy", [0.5])],
        "probe": [("log", "probe", [7.0])],
        "steps per second": [("rate", "steps per second", [1.0, 1.0])],
    }


def test_the_head_of_a_run():
    call = {"epochs": 2, "steps": None, "train": {"examples": 32, "length": 4}}
    settings = {"units": 64, "optimizer": {"rate": 0.1}}
    run = read(write_run("run", settings=settings, calls=[{"epochs": 1}, call]))
    assert (run["state"], run["task"], run["steps"], run["seconds"]) == ("finished", "Tiny", 8, 4.0)
    assert run["best"]["val_loss"] == {"value": 1.5, "epoch": 2}
    assert run["settings"] == {
        **{"units": "64", "optimizer.rate": "0.1", "seed": "0", "backend": "torch"},
        **{"precision": "float32", "execution": "auto"},
        **{"fit.epochs": "2", "data.examples": "32"},
    }
    assert run["clock"] == {
        **{"steps": [0, 4, 8], "seconds": [0.0, 2.0, 4.0]},
        **{"epoch_steps": [0, 4, 8], "epochs": [0.0, 1.0, 2.0]},
    }
    assert run["costs"] == {"compiling": 1.0, "waiting": 0.5}
    assert [one["command"] for one in run["commands"]] == [
        "treadle resume run --epochs 4",
        "treadle replay run --step 8",
        "treadle evaluate run",
    ]


def test_a_reason_to_stop_is_not_shown_as_a_fault_and_restored_weights_are_named():
    note = "the weights are those of step 4, the best val_loss: 1"
    log = [*log_of([1.0, 2.0, 3.0, 4.0], (4,)), record("log", 4, note=note)]
    run = read(write_run("run", log, reason="val_loss did not improve in the last 2 records"))
    assert run["state"] == "finished" and run["why"].startswith("val_loss did not improve")
    assert {"step": 4, "kind": "note", "text": note} in run["events"]
    script, style = (
        (Path(page.__file__).parent / "assets" / name).read_text()
        for name in ("report.js", "report.css")
    )
    assert 'startsWith("the weights are those of ")' in script
    assert 'className: run.state === "finished" ? "why" : `why ${run.state}`' in script
    [rule] = [line for line in style.splitlines() if line.startswith(".why {")]
    assert "color" not in rule


def test_events_of_a_run():
    log = [*log_of([1.0, "NaN", 2.0, 3.0], (4,)), record("log", 4, warning="low memory")]
    log.append(record("log", 4, hint="more", samples="images/samples-4.png"))
    write_run(
        "run",
        log,
        **{"finished": None, "error": "NonFiniteError: loss is nan"},
        resumed=[{"step": 1, "at": "2026-01-01"}],
        passed_over=[{"epoch": 0, "batch": 2, "step": 2, "why": "loss is nan"}],
    )
    (Path("run/checkpoints") / "step-000000000003").mkdir(parents=True)
    run = read("run")
    assert [(event["step"], event["kind"], event["text"]) for event in run["events"]] == [
        (1, "resume", "resumed at 2026-01-01"),
        (2, "warning", "loss is not finite for the first time"),
        (3, "rollback", "rolled back, and excluded the batch of epoch 1, batch 3: loss is nan"),
        (3, "checkpoint", "checkpoint"),
        (4, "warning", "low memory"),
        (4, "warning", "run/images: expected a folder, but found none"),
        (4, "note", "hint: more"),
        (8, "end", "failed: NonFiniteError: loss is nan"),
    ]
    commands = {one["what"]: one["command"] for one in run["commands"]}
    assert commands["resume"] == "treadle resume run"
    assert commands["run step 2 again"] == "treadle replay run --step 2"


def test_commands_of_a_script():
    path = write_run("it's", finished=None, configuration={"task": "Tiny", "units": 3})
    commands = [one["command"] for one in read(path)["commands"]]
    assert commands == [
        "start the same script again",
        """print(treadle.doctor.replay(task, train, "it's", step=8))""",
    ]
    path = write_run("a run")
    assert read(path)["commands"][0]["command"] == "treadle resume 'a run' --epochs 4"


def test_images_are_embedded_and_those_in_between_left_out():
    names = [f"samples-{step}.png" for step in range(1, 9)]
    log = [record("log", step, samples=f"images/{name}") for step, name in enumerate(names, 1)]
    log.append(record("log", 9, other="images/missing-9.png", escaping="images/../run-1.png"))
    # Neither is the name of an image: the system has no such names, and no such long ones.
    log.append(record("log", 9, odd="images/\ud800-9.png", long=f"images/{'x' * 300}-9.png"))
    write_run("run", [*log], images=names)
    Path("run/images/samples-4.png").write_text("no image")
    run = read("run")
    assert [image["step"] for image in run["images"]] == [1, 2, 3, 5, 6, 7, 8]
    assert run["images_left_out"] == 2
    prefix, _, content = run["images"][0]["source"].partition(",")
    assert (prefix, base64.b64decode(content)) == (
        "data:image/png;base64",
        pattern("samples-1.png"),
    )
    run = read("run", image_bytes=len(pattern("samples-1.png")) * 4)  # shared by two names
    assert [image["step"] for image in run["images"]] == [1, 8]


def test_findings_and_facts_of_the_doctor():
    path = write_run("run")
    finding = {"code": "L-unpaired", "where": "y", "seen": "x", "why": "w"}
    fact = {"group": "batch", "subject": "batch[1]", "text": "from 0 to 1", "mark": ""}
    facts = {
        "schema": SCHEMA,
        "findings": [{**finding, "other": 3}],
        "lines": [{**fact, "value": 3}],
    }
    (path / "doctor.json").write_text(json.dumps(facts))
    assert read("run")["findings"] == [finding]
    assert read("run")["sheet"] == [["batch", "batch[1]", "from 0 to 1", ""]]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ({"findings": [{"code": 3}], "lines": []}, f"no schema, and .* reads schema {SCHEMA}"),
        ({"schema": 1, "findings": [], "lines": []}, f"schema 1, and .* reads schema {SCHEMA}"),
        (
            {"schema": SCHEMA, "findings": [{"code": 3}], "lines": []},
            r"findings\[0\].seen is missing",
        ),
        ([], "no schema"),
        ("{", "it is not JSON|Expecting|JSON"),
    ],
)
def test_a_sheet_of_another_version_is_left_out_of_the_report(content: Any, why: str) -> None:
    path = write_run("run")
    text = content if isinstance(content, str) else json.dumps(content)
    (path / "doctor.json").write_text(text)
    run = read("run")
    assert run["state"] != "unreadable"
    assert (run["findings"], run["sheet"]) == (None, [])
    (event,) = [event["text"] for event in run["events"] if "doctor.json" in event["text"]]
    assert re.search(f"doctor.json was not read.*{why}.*Remove it, or write it again", event)


def test_health_of_the_layers():
    path = write_run("run")
    assert read("run")["health"] is None
    write_health(path)
    health = read("run")["health"]
    assert [layer["path"] for layer in health["layers"]] == [f"model/layers/{i}" for i in range(3)]
    assert health["steps"] == [1, 2, 101]
    assert health["gradient"][0] == [1e-9, 0.5, 1e300]
    assert health["ratio"][0] == [0.0, 0.5, None]
    assert health["dead"][0] == [None, 0.25, 1.0]
    assert health["verdicts"][0]["text"] == "model/layers/0 vanishes"
    assert health["notes"] == ["a note"]


def test_health_of_many_steps_is_thinned():
    path = write_run("run")
    write_health(path, steps=range(1, 8001))
    steps = read("run")["health"]["steps"]
    assert (steps[0], steps[-1]) == (1, 8000) and len(steps) < 7000


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "health", "step": 1, "gradient": {}, "weight": [], "update": [], "dead": []}',
        '{"kind": ["health"]}',
        '{"kind": "layers", "layers": [{"path": 3}]}',
        '{"kind": "verdict", "step": -1, "verdict": "dead", "layers": [], "text": ""}',
        "[" * 100_000,
        "\x00",
    ],
)
def test_invalid_lines_of_the_health_are_left_out(line):
    path = write_run("run")
    write_health(path)
    expected = read("run")["health"]
    content = (path / "health.jsonl").read_text()
    (path / "health.jsonl").write_text(f"{line}\n{content}")
    assert read("run")["health"] == expected


# The page


def test_a_page_is_one_file_that_requests_nothing():
    write_run("run")
    path = treadle.report.write("run")
    assert path == Path("run/report.html")
    text = path.read_text()
    assert "Permission is hereby granted" in text  # uPlot's license, with each copy of it
    assert not re.search(r"""(src|href|action)\s*=\s*["']?(https?:|//)""", text)
    assert "@import" not in text and "url(" not in text
    assert len(text) < 150_000


class Elements(HTMLParser):
    """Collects what matters of a page: the policy, scripts, styles and attributes."""

    def __init__(self):
        super().__init__()
        self.policy, self.scripts, self.styles, self.inside = "", [], [], ""
        self.attributes = []

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.attributes += found
        self.inside = tag
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag == "script":
            self.scripts.append((found.get("type", ""), ""))
        elif tag == "style":
            self.styles.append("")

    def handle_data(self, data):
        if self.inside == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = kind, text + data
        elif self.inside == "style":
            self.styles[-1] += data

    def handle_endtag(self, tag):
        self.inside = ""


def parsed(text):
    parser = Elements()
    parser.feed(text)
    return parser


def hashes(texts):
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return {f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests}


def test_the_policy_allows_only_the_scripts_and_styles_of_the_page():
    write_run("run")
    found = parsed(treadle.report.write("run").read_text())
    rules = dict(rule.split(" ", 1) for rule in found.policy.split("; "))
    assert rules["default-src"] == rules["connect-src"] == rules["base-uri"] == "'none'"
    assert rules["form-action"] == "'none'" and rules["img-src"] == "data:"
    assert rules["require-trusted-types-for"] == "'script'"
    scripts = [text for kind, text in found.scripts if kind != "application/json"]
    assert set(rules["script-src"].split()) == hashes(scripts) and len(scripts) == 3
    assert set(rules["style-src"].split()) == hashes(found.styles) and len(found.styles) == 2
    assert not [name for name in found.attributes if name.startswith("on") or name == "style"]


def evil_run(path):
    """Write a run whose names and texts try to inject a script wherever one is possible."""
    log = [
        {"step": 1, EVIL: 1.0, "loss": 2.0},
        {"step": 2, EVIL: 2.0, "loss": 1.0},
        {**record("epoch", 2), EVIL: 1.0, f"val_{EVIL}": 2.0, "loss": 1.0},
        record("log", 2, warning=EVIL, **{EVIL: EVIL}),
        record("log", 2, **{f"{EVIL}2": "images/a-2.png"}),
    ]
    facts = {
        "plan": EVIL,
        "error": EVIL,
        "finished": None,
        "devices": EVIL,
        "started": EVIL,
        "versions": {EVIL: EVIL},
        "overridden": [EVIL],
        "resumed": [{"step": 1, "at": EVIL}],
        "passed_over": [{"epoch": 0, "batch": 0, "step": 0, "why": EVIL}],
        "costs": {EVIL: 1.0},
    }
    found = write_run(path, log, {EVIL: {EVIL: EVIL}}, ["a-2.png"], **facts)
    finding = dict.fromkeys(("code", "where", "seen", "why", "fix", "line"), EVIL)
    fact = dict.fromkeys(("group", "subject", "text", "mark"), EVIL)
    (found / "doctor.json").write_text(
        json.dumps({"schema": SCHEMA, "findings": [finding], "lines": [fact]})
    )
    write_health(found)
    text = (found / "health.jsonl").read_text().replace("model/layers/0", json.dumps(EVIL)[1:-1])
    (found / "health.jsonl").write_text(text)
    return found


def test_names_and_texts_of_a_directory_cannot_leave_the_data():
    evil_run("run")
    text = treadle.report.write("run").read_text()
    found = parsed(text)
    assert [kind for kind, _ in found.scripts] == ["application/json", "", "", ""]
    data = found.scripts[0][1]
    assert data.isascii() and not set(data) & set("<>&")
    assert text.count("alert(1)") == data.count("alert(1)") > 20
    run = json.loads(data)["runs"][0]
    assert "</script>" in run["plan"] and run["state"] == "failed"


def test_a_marker_of_the_template_in_a_text_stays():
    write_run("run", plan="{{scripts}} {{data}}")
    assert data_in(treadle.report.write("run"))["runs"][0]["plan"] == "{{scripts}} {{data}}"


def test_long_texts_are_cut_and_control_characters_shown():
    write_run("run", plan="x" * 100_000, devices="\x1b[2J")
    run = read("run")
    assert len(run["plan"]) == 2000 and run["devices"] == r"\x1b[2J"


# Several runs


def test_a_comparison_is_written_into_the_common_folder():
    write_run("runs/a", settings={"units": 8})
    write_run("runs/search/trials/b", settings={"units": 9})
    path = treadle.report.write(["runs/a", "runs/search"])
    assert path == Path("runs/report.html").absolute()
    data = data_in(path)
    assert [run["name"] for run in data["runs"]] == ["a", "search/trials/b"]
    assert titles(data)["loss"] == [
        *([0, 0, "training"], [0, 3, "validation"]),
        *([1, 0, "training"], [1, 3, "validation"]),
    ]
    assert treadle.report.write("runs", "other/page.html").read_text().count("<title>") == 1


def test_a_damaged_run_of_a_comparison_is_explained():
    write_run("runs/a")
    write_run("runs/b")
    Path("runs/b/run.json").write_text("[")
    data = data_in(treadle.report.write("runs"))
    assert [run["state"] for run in data["runs"]] == ["finished", "unreadable"]
    assert "runs/b/run.json is damaged" in data["runs"][1]["why"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("none", "there is no folder none: name a run directory, or a folder that holds some"),
        ("empty", "empty holds no run: name a run directory, or a folder that holds some"),
        ("damaged", "damaged/run.json is damaged"),
        ([], "no run directory was given: name at least one"),
    ],
)
def test_what_is_no_run_is_explained(given, message):
    Path("empty").mkdir()
    write_run("damaged")
    Path("damaged/run.json").write_text("[")
    with pytest.raises(DirectoryError, match=message):
        treadle.report.write(given)


def test_of_too_many_runs_the_newest_are_shown(monkeypatch):
    monkeypatch.setattr(page, "MOST_RUNS", 2)
    for i in (3, 1, 2):
        write_run(f"runs/{i}", started=f"2026-01-0{i}T00:00:00")
    data = data_in(treadle.report.write("runs"))
    assert [run["name"] for run in data["runs"]] == ["2", "3"]
    assert data["runs_left_out"] == 1


# Size and time


def long_run(path, steps=100_000, names=4):
    rng = np.random.default_rng(0)
    values = np.exp(-np.arange(steps) / 2e4)[:, None] + 0.1 * rng.normal(size=(steps, names))
    values[40_000 % steps, 0] = 1234.5
    text = [
        f'{{"step": {i}, ' + ", ".join(f'"v{j}": {x!r}' for j, x in enumerate(row)) + "}\n"
        for i, row in enumerate(values.tolist(), 1)
    ]
    found = write_run(path, [], progress={"step": steps, "epoch": 0, "batch": steps,
                                         "examples": steps, "seconds": 100.0})  # fmt: skip
    (found / "log.jsonl").write_text("".join(text))
    return found


def test_a_long_run_is_small_and_keeps_its_spike():
    long_run("run")
    path = treadle.report.write("run")
    assert path.stat().st_size < 1_500_000
    curve = data_in(path)["runs"][0]["curves"][0]
    assert curve["y"][curve["x"].index(40_001)] == 1234.5


@pytest.mark.long
def test_a_comparison_of_many_long_curves_is_below_the_limit():
    for i in range(3):
        long_run(f"runs/{i}", steps=2000, names=60)
    path = treadle.report.write("runs")
    assert 1_000_000 < path.stat().st_size <= page.MOST_BYTES


def test_extreme_runs_are_below_the_limit(monkeypatch):
    long = "<" * 1900
    log = [record("log", step, warning=f"{step}{long}") for step in range(1, 301)]
    for i in range(3):
        path = write_run(f"runs/{i}", log, {f"{j}": long for j in range(900)})
        write_health(path)
    data = data_in(path := treadle.report.write("runs"))
    assert path.stat().st_size <= page.MOST_BYTES
    assert data["parts_left_out"] == ["health", "images", "findings", "events", "settings"]
    monkeypatch.setattr(page, "_ALL_POINTS", 600)
    long_run("many", steps=300, names=20)
    assert len(page.report_data([Path("many")])["runs"][0]["curves"]) == 6
    monkeypatch.setattr(page, "MOST_DATA_BYTES", 1000)
    assert data_in(treadle.report.write("many"))["parts_left_out"][-1] == "curves"


def odd_run(path, chance):
    """Write a run with far more of something than a run has, or far less."""
    long = chance.choice(["x", "<" * 1000, "\U0001f600" * 1000])
    many = chance.choice([1, 30, 20_000])
    steps = chance.choice([1, 3] if many > 30 else [1, 3000 // many])
    value = chance.choice([0.1234567, "NaN", 1e300, -(1 << 63)])
    names = {f"{chance.choice(['', 'val_'])}loss {i} {long[:40]}": value for i in range(many)}
    log = [{"step": step, **names} for step in range(1, steps + 1)]
    log.append(record("epoch", steps, **{f"{name} loss": 0.5 for name in names}, note=long))
    log += [record("log", steps, warning=f"{i} {long}") for i in range(chance.choice([0, 400]))]
    sizes = [chance.choice([8, 550, 700]) for _ in range(chance.choice([0, 1, 5]))]
    log += [record("log", steps, **{f"i{i}": f"images/i{i}-1.png"}) for i in range(len(sizes))]
    texts = {name: long for name in ("plan", "started", "finished", "reason", "backend", "devices")}
    texts["precision"] = long
    write_run(
        path,
        log,
        {f"{i}": long for i in range(chance.choice([0, 2000]))},
        **chance.choice([{}, texts]),
        costs={f"{i}": 1e9 for i in range(chance.choice([0, 9000]))},
        overridden=[long] * chance.choice([0, 500]),
        versions={f"{i}": long for i in range(chance.choice([0, 500]))},
        learning_rates={"steps": [1, 2], "rates": {f"{i}{long[:100]}": [0.1, None] for i in "ab"}},
    )
    for i, size in enumerate(sizes):
        (path / "images").mkdir(exist_ok=True)
        pixels = np.random.default_rng(i).integers(0, 256, (size, size, 3), "uint8")
        png = treadle.Image(pixels).png(source_of(RUN, f"i{i}-1.png"))
        (path / "images" / f"i{i}-1.png").write_bytes(png)


@pytest.mark.parametrize("seed", range(5))
def test_a_report_of_any_runs_is_below_the_limit(seed, monkeypatch):
    chance = Random(seed)
    for number in range(chance.choice([1, 1, 2, 5])):
        odd_run(Path(f"runs/{number}"), chance)
    path = treadle.report.write("runs")
    assert path.stat().st_size <= page.MOST_BYTES
    monkeypatch.setattr(page, "MOST_DATA_BYTES", 40_000)  # besides styles and scripts
    path = treadle.report.write("runs")
    assert path.stat().st_size <= 240_000
    assert data_in(path)["runs"]


def test_neither_keras_nor_a_framework_is_imported():
    write_run("run")
    code = (
        "import sys, treadle; treadle.report.write('run'); from treadle import cli; "
        "found = {'keras', 'torch', 'jax', 'tensorflow', 'matplotlib'} & set(sys.modules); "
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
