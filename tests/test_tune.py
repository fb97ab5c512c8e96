"""Searches over settings: what is tried, what comes next, and what survives."""

import doctest
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Annotated, Literal

import keras
import numpy as np
import pytest
import sqlalchemy
from keras import ops
from typer.testing import CliRunner

import treadle
from treadle import cli, ranges
from treadle.errors import ConfigurationError, DirectoryError, TreadleError
from treadle.ranges import Choice, Range, fitted
from treadle.recipes import Parameter, resolve
from treadle.tuning import Trial, Tuned, orders, results, search, space, study, workers
from treadle.tuning.orders import Order, Outcome
from treadle.tuning.study import Study, Wanted

SPACES = {"rate": Range(1e-4, 1.0, log=True), "units": Range(8, 64), "kind": Choice("a", "b")}


@pytest.fixture(autouse=True, scope="module")
def quick():
    """Let databases not wait for the disk: no power is cut here."""

    def connected(connection, record):
        connection.execute("pragma synchronous = off")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", connected)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", connected)


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())


# What is tried


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Range(512, 64), "Range(low=512, high=64, log=False, step=None): the first bound"),
        (lambda: Range(3, 3), "3 is not less than 3"),
        (lambda: Range(0, 1, log=True), "a range with log=True must begin above 0, not at 0"),
        (lambda: Range(1, 9, log=True, step=2), "has either log=True or a step, not both"),
        (lambda: Range(1, 9, step=0), "a range needs a step > 0"),
        (lambda: Range(1, float("inf")), "inf is no finite number"),
        (lambda: Range("1", 2), "'1' is no finite number"),
        (lambda: Choice("relu"), "Choice('relu'): a choice is between two or more different values"),
        (lambda: Choice(1, 1), "two or more different values"),
        (lambda: Choice([1], 2), "[1] is neither a number nor a text"),
        (lambda: fitted("units", Range(0.5, 2), (int,), "int"), "its range 0.5..2 needs whole"),
        (lambda: fitted("name", Range(1, 2), (str,), "str"), "name is of type str, which has no"),
        (lambda: fitted("units", Choice(1, "x"), (int,), "int"), "of type int, which 'x' is not"),
    ],
)
def test_spaces_that_cannot_be_meant(make, message):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert message in str(caught.value)


def test_what_a_space_holds():
    assert 8 in Range(8, 64) and 64 in Range(8, 64) and 65 not in Range(8, 64)
    assert True not in Range(0, 2) and "8" not in Range(8, 64)
    assert 1 in Choice(1, 2) and True not in Choice(1, 2)
    assert fitted("rate", Range(1, 8, step=2), (float, None), "float | None").step == 2.0


PARAMETERS = (
    Parameter("units", "int", (int,), 16),
    Parameter("rate", "float", (float,), 0.1),
    Parameter("kind", "str", (str,), "a"),
    Parameter("bias", "bool", (bool,), True),
)


@pytest.mark.parametrize(
    "text", ["units=64..512 log", "units=64..512 step 64", "rate=0.5..1.5", "kind=a,b", "units=1,2"]
)
def test_a_search_is_read_as_it_is_told(text):
    [(name, found)] = space.read([text], PARAMETERS, "Mine").items()
    assert f"{name}={found}" == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("units", "cannot read the search 'units': write it as 'units=64..512 log'"),
        ("units=64..", "cannot read the search 'units=64..'"),
        ("units=1..2 lgo", "cannot read the search"),
        ("units=1..9 step", "cannot read the search"),
        ("unit=1..2", "Mine has no setting 'unit'. Did you mean 'units'?"),
        ("units=a,b", "units=a: expected int, found 'a'"),
        ("units=2..1", "2 is not less than 1"),
    ],
)
def test_a_search_that_cannot_be_read(text, message):
    with pytest.raises(ConfigurationError) as caught:
        space.read([text], PARAMETERS, "Mine")
    assert message in str(caught.value)


def test_what_is_searched_is_what_is_not_fixed():
    found = space.chosen(PARAMETERS, {"rate": Range(1, 2)}, {}, "Mine")
    assert found == {"rate": Range(1.0, 2.0), "bias": Choice(False, True)}
    assert list(space.chosen(PARAMETERS, {"rate": Range(1, 2)}, {"bias": True}, "Mine")) == ["rate"]


@pytest.mark.parametrize(
    ("wanted", "fixed", "message"),
    [
        ({}, {"bias": True}, "nothing says what to search in Mine: annotate a setting, as `units: "),
        ({}, {"bias": True}, "Settings that are not fixed: units, rate, kind"),
        ({"unit": Range(1, 2)}, {}, "Mine has no setting 'unit'. Did you mean 'units'?"),
        ({}, {"rates": 1}, "Mine has no setting 'rates'. Did you mean 'rate'?"),
        ({"units": Range(1, 2)}, {"units": 3}, "units is both searched (1..2) and fixed (3)"),
        ({"units": (1, 2)}, {}, "(1, 2), which is neither a treadle.Range nor a treadle.Choice"),
    ],
)
def test_a_search_that_cannot_be_meant(wanted, fixed, message):
    with pytest.raises(ConfigurationError) as caught:
        space.chosen(PARAMETERS, wanted, fixed, "Mine")
    assert message in str(caught.value)


ANNOTATED = """
    raise SystemExit("this file must not be run")
    from typing import Annotated, Literal
    import treadle
    from treadle import Choice

    class Mine(treadle.Task):
        def __init__(
            self,
            units: Annotated[int, treadle.Range(64, 512, log=True)] = 64,
            rate: "Annotated[float | None, 'documented', treadle.Range(1e-4, 1)]" = None,
            kind: Annotated[str, Choice("a", "b")] = "a",
            depth: Literal[1, 2] = 1,
            bias: bool = True,
            name: str = "x",
        ): ...
"""


def test_spaces_are_read_without_running_the_file():
    Path("mine.py").write_text(textwrap.dedent(ANNOTATED))
    recipe = resolve("mine.py")
    assert {p.name: p.space and str(p.space) for p in recipe.parameters} == {
        "units": "64..512 log",
        "rate": "0.0001..1.0",
        "kind": "a,b",
        "depth": "1,2",
        "bias": "False,True",
        "name": None,
    }
    # A range is what is searched; what is set may lie outside.
    assert recipe.settings(["units=8", "rate=7", "kind=c"])["units"] == 8
    assert [str(p) for p in recipe.parameters[:2]] == ["units=64", "rate=None"]
    assert recipe.parameters[0].kind == "int"


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ("Annotated[int, treadle.Range(512, 64)]", "units: Range(low=512, high=64"),
        ("Annotated[str, treadle.Range(1, 2)]", "units is of type str, which has no range"),
        ("Annotated[int, treadle.Range(LOW, 64)]", "units: cannot read treadle.Range(LOW, 64), si"),
        ("Annotated[int, treadle.Range(1)]", "units: cannot read treadle.Range(1)"),
    ],
)
def test_spaces_in_a_file_that_cannot_be_meant(annotation, message):
    text = f"class Mine(treadle.Task):\n    def __init__(self, units: {annotation} = 64): ..."
    Path("mine.py").write_text(text)
    with pytest.raises(ConfigurationError) as caught:
        resolve("mine.py")
    assert message in str(caught.value)


def test_spaces_of_a_function_are_those_of_its_file():
    class Mine:
        def __init__(
            self,
            units: Annotated[int, treadle.Range(64, 512, log=True)],
            rate: Annotated[float | None, treadle.Range(1e-4, 1)] = None,
            depth: Literal[1, 2] = 1,
            bias: bool = True,
            untyped=3,
            **more: int,
        ) -> None: ...

    found = space.parameters_of(Mine)
    assert [(p.name, p.kind, p.required) for p in found] == [
        ("units", "int", True),
        ("rate", "float | None", False),
        ("depth", "Literal[1, 2]", False),
        ("bias", "bool", False),
        ("untyped", "int", False),
    ]
    assert list(map(str, (p.space for p in found))) == [
        "64..512 log",
        "0.0001..1.0",
        "1,2",
        "False,True",
        "None",
    ]


# What comes next: nothing is trained here


def wanted(**more):
    asked = {
        "task": "mine",
        "spaces": SPACES,
        "fixed": {"name": "x"},
        "defaults": {"rate": 0.5, "units": 16, "kind": "a"},
        "lasts": {"epochs": 6},
        "monitor": "val_loss",
        "direction": "min",
        "pruning": True,
        "seed": 0,
        "options": {},
        "data": {},
        **more,
    }
    return Wanted(**asked)


def values(order):
    """Six values that fall, to a height that follows from the settings."""
    settings = order.settings
    height = np.log10(settings["rate"] / 0.01) ** 2 + settings["units"] / 64 + (settings["kind"] == "a")
    return [float(height + 1 / (at + 1)) for at in range(6)]


class Killed(Exception):
    pass


def go_through(trials, folder=None, kill=None, **more):
    """Search as a process would, which may be killed in trial N at report K, or before or after."""
    number, at_last = kill or (None, None)
    found = Study(wanted(**more), trials, folder, fresh=False)
    try:
        while (order := found.next()) is not None:
            if (order.number, "begun") == kill:
                raise Killed
            ended, value = "complete", None
            for at, value in enumerate(values(order)):
                stop = found.report(order.number, at, value)
                if order.number == number and at == at_last:
                    raise Killed
                if stop:
                    ended = "pruned"
                    break
            found.end(order.number, Outcome(ended, value, seed=0))
        return found.results()
    finally:
        found.close()


def facts(trials):
    return [(t.number, t.ended, t.value, dict(t.parameters), t.reports) for t in trials]


def test_a_search_gets_better_and_ends_bad_trials_early():
    found = Tuned("val_loss", "min", go_through(40))
    assert facts(found.trials)[0][3] == {"rate": 0.5, "units": 16, "kind": "a"}  # the defaults
    pruned = [trial for trial in found.trials if trial.ended == "pruned"]
    assert pruned and all(trial.reports == 3 for trial in pruned)
    assert found.best.number > 10 and found.value < 0.6 * found.trials[0].value
    assert found.parameters["kind"] == "b"
    assert facts(go_through(40)) == facts(found.trials)
    assert facts(go_through(12, seed=1))[1:] != facts(found.trials)[1:12]


@pytest.mark.parametrize(
    "kills",
    [
        [(0, 2), (6, "begun"), (11, 1)],
        [(n, 2) for n in range(6, 12)],  # where some are pruned
    ],
    ids=["reports", "pruning"],
)
def test_what_goes_on_suggests_what_would_have_been_suggested(tmp_path, kills):
    straight = go_through(13)
    for kill in kills:
        with pytest.raises(Killed):
            go_through(13, tmp_path, kill)
    assert facts(go_through(13, tmp_path)) == facts(straight)
    assert facts(go_through(9, tmp_path)) == facts(straight)  # there are more already


def test_a_longer_search_is_the_shorter_one_and_more(tmp_path):
    go_through(4, tmp_path)
    assert facts(go_through(13, tmp_path)) == facts(go_through(13))


def test_another_search_is_refused_with_what_differs(tmp_path):
    go_through(2, tmp_path)
    more = {**SPACES, "rate": Range(1e-3, 1.0, log=True)}
    with pytest.raises(DirectoryError) as caught:
        go_through(4, tmp_path, spaces=more, monitor="loss", seed=3)
    message = str(caught.value)
    assert f"{tmp_path} holds another search: search.rate was '0.0001..1.0 log'" in message
    assert "now '0.001..1.0 log'; monitor was 'val_loss', now 'loss'; seed was 0, now 3" in message
    assert "Choose another directory, or begin anew there with fresh=True (--fresh)" in message
    assert len(go_through(4, tmp_path)) == 4  # nothing was changed
    begun = Study(wanted(seed=3), 4, tmp_path, fresh=True)
    assert begun.results() == ()
    begun.close()


def test_a_search_in_which_nothing_ended_gives_way_to_another(tmp_path):
    with pytest.raises(Killed):
        go_through(4, tmp_path, (0, 1))
    assert facts(go_through(4, tmp_path, seed=5)) == facts(go_through(4, seed=5))


def test_two_searches_cannot_be_in_one_directory(tmp_path):
    first = Study(wanted(), 4, tmp_path, fresh=False)
    with pytest.raises(DirectoryError, match="another loop of this process"):
        Study(wanted(), 4, tmp_path, fresh=False)
    first.close()
    Study(wanted(), 4, tmp_path, fresh=False).close()


def test_a_database_that_is_none(tmp_path):
    (tmp_path / study.DATABASE).write_text("these are no tables, but more than a hundred bytes" * 9)
    with pytest.raises(DirectoryError, match=r"cannot use .*study\.db as the database of a search"):
        Study(wanted(), 4, tmp_path, fresh=False)
    Study(wanted(), 4, tmp_path, fresh=True).close()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match="cannot make the directory"):
        Study(wanted(), 4, tmp_path / "file" / "inside", fresh=False)


def test_parallel_trials_differ(tmp_path):
    found = Study(wanted(), 3, tmp_path, fresh=False)
    handed = [found.next() for _ in range(4)]
    assert handed[3] is None and len({order.settings["rate"] for order in handed[:3]}) == 3
    assert handed[1].directory == str(tmp_path / "trials" / "0001")
    for order in reversed(handed[:3]):
        found.end(order.number, Outcome("complete", values(order)[-1], seed=0))
    assert [trial.ended for trial in found.results()] == ["complete"] * 3
    found.close()


def test_trials_that_fail_and_diverge_are_results(tmp_path):
    found = Study(wanted(), 4, tmp_path, fresh=False)
    outcomes = [Outcome("failed", error="ValueError: no"), Outcome("diverged", error="NaN")]
    for outcome in [*outcomes, Outcome("complete", 1.0), Outcome("failed", error="OSError: no")]:
        found.end(found.next().number, outcome)
    assert [(t.ended, t.value, t.error) for t in found.results()] == [
        ("failed", None, "ValueError: no"),
        ("diverged", None, "NaN"),
        ("complete", 1.0, None),
        ("failed", None, "OSError: no"),
    ]
    assert found.finished
    found.close()


def test_a_search_whose_first_trials_all_fail_is_given_up(tmp_path):
    found = Study(wanted(), 9, tmp_path, fresh=False)
    for _ in range(2):
        found.end(found.next().number, Outcome("failed", error="ValueError: no"))
    with pytest.raises(TreadleError) as caught:
        found.end(found.next().number, Outcome("failed", error="ValueError: no"))
    assert str(caught.value) == (
        f"the first 3 trials have failed, the last with ValueError: no; see {tmp_path}/trials/0000/"
        "output.txt"
    )
    found.close()


def test_optuna_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(study, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        treadle.tune("digits")
    assert str(caught.value) == (
        "searching for settings needs Optuna, which is not installed: pip install 'treadle[tune]'"
    )


def test_the_database_is_plain(tmp_path):
    """Whatever stands in it is a number or JSON: loading it runs no code."""
    import sqlite3

    go_through(3, tmp_path)
    with sqlite3.connect(tmp_path / study.DATABASE) as opened:
        tables = opened.execute("select name from sqlite_master where type = 'table'").fetchall()
        for (table,) in tables:
            columns = [column[1] for column in opened.execute(f"pragma table_info({table})")]
            for row in opened.execute(f"select * from {table}"):
                for name, value in zip(columns, row, strict=True):
                    assert not isinstance(value, bytes)
                    if name.endswith("_json"):
                        json.loads(value)
    opened.close()
