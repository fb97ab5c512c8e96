"""Help, wrong usage, and what the command prints as it starts."""

import contextlib
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli_runs import TASK, apart, run_tiny, treadle  # noqa: F401
from tests.waiting import WATCHDOG
from treadle import __version__
from treadle.cli import output
from treadle.recipes import find


def test_help_names_the_commands_and_exit_codes():
    text = treadle("--help").output
    commands = ("recipes", "run", "resume", "evaluate", "replay", "certify", "find-lr", "schedule")
    commands += ("tune", "runs", "log", "env")
    for word in (*commands, "Exit codes"):
        assert word in text
    assert treadle("--version").output.startswith(f"treadle {__version__} (")


@pytest.mark.parametrize(
    ("command", "limited"),
    [("run", True), ("resume", True), ("evaluate", False), ("replay", False)],
)
def test_help_lists_only_exit_codes_that_the_command_has(command, limited):
    text = " ".join(treadle(command, "--help").output.split())
    assert "Exit codes: 0 done" in text
    assert ("3 time limit reached" in text) == limited


def test_recipes_lists_each_with_its_settings():
    text = treadle("recipes").output
    for name in find():
        assert name in text
    assert "learning_rate=0.001" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["digit"], "Did you mean 'digits'?"),
        (["none.py:Task"], "there is no file"),
        (["digits", "--set", "unit=3"], "Did you mean 'units'?"),
        (["digits", "--set", "units=x"], "expected int"),
        (["digits", "--until", "20 steps"], "--until takes a time"),
        (["digits", "--until", "soon"], "cannot read 'soon'"),
        (["digits", "--backend", "numpy"], "unknown backend 'numpy'"),
        (["digits", "--precision", "float17"], "unknown precision 'float17'"),
        (["digits", "--data-dir", "nowhere"], "there is no such folder"),
        (["linear-native", "--backend", "jax"], "runs on tensorflow only, but --backend is jax"),
        (
            ["mine.py:Tiny", "--set", "rate=0.1", "fails=init"],
            "unexpected argument 'fails=init': repeat --set for each setting, as --set fails=init",
        ),
        (["mine.py:Tiny", "more"], "unexpected argument 'more': see --help"),
        (["mine.py:Endless"], "does not define how long it trains"),
        (["mine.py:number"], "is no task, but int"),
        (["mine.py:Tiny", "--set", "fails=datasets"], "must return treadle.Datasets"),
    ],
)
def test_what_cannot_be_meant_is_one_red_line(arguments, message):
    result = treadle("run", *arguments, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
    assert not Path("runs").exists() or not any(Path("runs").iterdir())


@pytest.mark.parametrize(
    "arguments", [["--epochs", "0"], ["--seed", "-1"], ["--window", "0"], ["--nonsense"]]
)
def test_wrong_usage_exits_with_2(arguments):
    treadle("run", "digits", *arguments, code=2)


@pytest.mark.long
def test_the_command_starts_without_chatter():
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TF_CPP")}
    result = subprocess.run(
        [sys.executable, "-c", "from treadle.cli import main; main()", "run", "linear", "--json"],
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert abs(json.loads(result.stdout)["last"]["prediction_of_3"] - 3) < 0.5


def test_help_shows_no_types_of_flags_and_has_examples():
    for command in (
        "run",
        "resume",
        "evaluate",
        "replay",
        "certify",
        "doctor",
        "find-lr",
        "schedule",
        "tune",
        "runs",
        "log",
        "env",
    ):
        text = treadle(command, "--help").output
        assert "<bool>" not in text and "<str>" not in text and "<path>" not in text
        assert f"treadle {command} " in text[text.index("Examples:") :]
    assert "<bool>" not in treadle("--help").output


@pytest.mark.parametrize("command", [[], ["run"], ["tune"], ["certify"]])
def test_examples_are_wrapped_with_an_indent(command, monkeypatch):
    for columns in ("60", "200", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        lines = treadle(*command, "--help").output.split("\n")
        first = next(i for i, line in enumerate(lines) if "Examples:" in line)
        examples = lines[first + 1 : lines.index(" " * int(columns), first)]
        assert all(line.startswith(("   treadle ", " " * 7)) for line in examples)
        assert sum(line.startswith("   treadle ") for line in examples) >= 2
        if columns == "200":
            assert all(line.startswith("   treadle ") for line in examples)


def test_help_of_a_task_lists_its_settings():
    text = treadle("run", "digits", "--help").output
    assert "Settings of digits, given as --set NAME=VALUE:" in text
    assert re.search(r"batch_size +int, default 64, searched by tune in 16,32,64,128", text)
    own = treadle("run", "mine.py:Tiny", "--epochs", 2, "--help").output
    assert re.search(r"rate +float, default 0.1\n", own)
    assert "Settings of" not in treadle("run", "--help").output
    assert "mine.py" not in treadle("run", "none.py", "--help").output


@pytest.mark.parametrize("option", [["--batch-size", "32"], ["--batch-size=32"]])
def test_an_option_that_is_a_setting_gets_a_hint(option):
    text = " ".join(treadle("run", "digits", *option, code=2).output.replace("│", " ").split())
    assert (
        "No such option: --batch-size. It is a setting of the task digits: use --set batch_size=32"
    ) in text
    text = treadle("run", "digits", "--nonsense", "32", code=2).output
    assert "No such option: --nonsense" in text and "--set" not in text


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "treadle", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"treadle {__version__} (")


WRONG = [
    (["replay", "here", "--step", "99"], "there is no step 99 in here: its steps are 1 to 4"),
    (["replay", "here"], "specify the step: either --step N, or a condition"),
    (["replay", "here", "--bisect", "los > 5"], "names 'los', which is neither a value"),
    (["replay", "here", "--bisect", "loss >"], "cannot read the condition 'loss >'"),
    (["replay", "here", "--bisect", "loss > 1e9"], "holds for none of the 4 steps in"),
    (["resume", "here", "more"], "unexpected argument 'more': see --help"),
    (["launch", "--workers", "2"], "there is nothing to launch: give a command of treadle"),
]
REFUSE = """
import contextlib, io, json, sys
from treadle.cli import main

answers = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["treadle", *arguments]
    printed, code = io.StringIO(), None
    with contextlib.redirect_stderr(printed):
        try:
            main()
        except SystemExit as end:
            code = end.code
    answers.append([code, "keras" in sys.modules, printed.getvalue()])
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def refused(tmp_path_factory):
    """Exit code, whether Keras was imported, and what was printed, of each of `WRONG`.

    All of them in one process: a second one would take most of its time to import.
    """
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "mine.py").write_text(textwrap.dedent(TASK))
    with contextlib.chdir(folder):
        run_tiny("--quiet", "--directory", "here")
    arguments = json.dumps([arguments for arguments, _ in WRONG])
    done = subprocess.run(
        [sys.executable, "-c", REFUSE, arguments],
        capture_output=True,
        text=True,
        timeout=WATCHDOG,
        cwd=folder,
        check=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("number", range(len(WRONG)), ids=[" ".join(each) for each, _ in WRONG])
def test_wrong_arguments_are_refused_without_importing_keras(number, refused):
    code, imported, printed = refused[number]
    assert WRONG[number][1] in printed
    assert (code, imported) == (2, False)


def test_lines_of_a_terminal_are_broken_between_words(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = SimpleNamespace(isatty=lambda: True)
    text = "error: one sentence with a/path/that/is/longer/than/the/terminal at the end"
    assert output.fitted(text, stream).split("\n") == [
        "error: one sentence with",
        "a/path/that/is/longer/than/the/terminal",
        "at the end",
    ]
    assert output.fitted(text, SimpleNamespace(isatty=lambda: False)) == text
