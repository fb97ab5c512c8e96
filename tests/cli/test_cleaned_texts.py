"""Control characters of names, settings and errors from files do not reach the terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console as Screen

from tests.cli_runs import treadle
from treadle.core.terminal import Waiting, printable
from treadle.errors import TreadleWarning
from treadle.hooks.console import show
from treadle.run.reporter import Reporter

HOSTILE = "a\x1b]0;title\x07\x1b[2Jb\r\u202ec\x9b1m"
CLEANED = r"a\x1b]0;title\x07\x1b[2Jb\r\u202ec\x9b1m"


def test_lines_stay_lines():
    assert printable(f"one\n\t{HOSTILE}") == f"one\n\t{CLEANED}"
    assert printable("one two", 4) == "one\ntwo"


@pytest.mark.parametrize("terminal", [False, True])
def test_the_console(terminal):
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=terminal, width=80, color_system=None)
    show(screen, HOSTILE)
    Waiting("reading", screen).print(HOSTILE)
    assert file.getvalue() == f"{CLEANED}\n{CLEANED}\n"


def test_warnings():
    with pytest.warns(TreadleWarning) as found:
        Reporter().warn(HOSTILE)
    assert str(found[0].message) == CLEANED


def test_errors_of_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = Path("\x1b[2Jhere")
    folder.mkdir()
    (folder / "run.json").write_text('{"configuration": 3}')
    printed = treadle("evaluate", folder, code=2)
    assert r"error: \x1b[2Jhere/run.json is damaged" in printed.stderr
    assert "\x1b" not in printed.stderr


def test_the_report_of_a_replay():
    from treadle.doctor.findings import _plain, _row, _table  # pyright: ignore

    table = _table("layer", "class")
    _row(table, 0, HOSTILE, "Dense\n")
    file = io.StringIO()
    screen = Screen(file=file, width=120, color_system=None)
    screen.print(_plain(HOSTILE))
    screen.print(table)
    assert file.getvalue().count(CLEANED) == 2
    assert r"Dense\n" in file.getvalue()
