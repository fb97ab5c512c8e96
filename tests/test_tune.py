"""Searches over settings: what is tried, what comes next, and what survives."""

import doctest
import json
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import keras
import numpy as np
import pytest
import sqlalchemy
from keras import ops
from typer.testing import CliRunner

import treadle
from treadle import cli
from treadle.core import ranges
from treadle.core.ranges import Choice, Range, fitted
from treadle.errors import (
    CheckpointError,
    ConfigurationError,
    DataError,
    DirectoryError,
    TreadleError,
    TreadleWarning,
)
from treadle.recipes import Parameter, resolve
from treadle.tuning import Tuned, results, search, space, study, workers
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
        (lambda: Range(1, float("inf")), "inf is not a finite number"),
        (lambda: Range("1", 2), "'1' is not a finite number"),
        (
            lambda: Choice("relu"),
            "Choice('relu'): a choice is between two or more different values",
        ),
        (lambda: Choice(1, 1), "two or more different values"),
        (lambda: Choice(1, True), "Choice(1, True): a choice is between two or more different"),
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
    assert Range(8, 64, step=10).last == 58 and Range(0.0, 1.0, step=0.1).last == 1.0
    assert 18 in Range(8, 64, step=10) and 20 not in Range(8, 64, step=10)
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
    assert found == {"rate": Range(1.0, 2.0)}  # a bare bool is a switch
    asked = {"bias": Choice(False, True), "rate": Range(1, 2)}
    assert list(space.chosen(PARAMETERS, asked, {"units": 3}, "Mine")) == ["rate", "bias"]
    assert space.read(["bias=no,yes"], PARAMETERS, "Mine") == {"bias": Choice(False, True)}


@pytest.mark.parametrize(
    ("wanted", "fixed", "message"),
    [
        (
            {},
            {"bias": True},
            "Mine has no search space: annotate a setting, as `units: ",
        ),
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
            fast: Annotated[bool, Choice(False, True)] = True,
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
        "bias": None,
        "fast": "False,True",
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
        "None",
        "None",
    ]


def test_annotations_that_cannot_be_looked_up():
    def line(rate: "Missing" = 1): ...  # noqa: F821

    with pytest.raises(ConfigurationError) as caught:
        space.parameters_of(line)
    assert "cannot read the annotations of test_annotations_that_cannot_be_looked_up.<loc" in str(
        caught.value
    )
    assert "name 'Missing' is not defined. Import it outside of `if TYPE_CHECKING`" in str(
        caught.value
    )


def test_what_is_called_by_a_partial_says_what_is_tried():
    def line(units: Annotated[int, Range(1, 3)], rate: float): ...

    bound = partial(line, rate=0.5)
    assert [(p.name, p.required, str(p.space)) for p in space.parameters_of(bound)] == [
        ("units", True, "1..3"),
        ("rate", False, "None"),
    ]
    assert space.name_of(bound) == line.__qualname__


# What comes next: nothing is trained here


def wanted(**more):
    asked = {
        "task": "mine",
        "spaces": SPACES,
        "fixed": {"name": "x"},
        "others": {"bias": True},
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
    height = (
        np.log10(settings["rate"] / 0.01) ** 2 + settings["units"] / 64 + (settings["kind"] == "a")
    )
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
                assert type(stop) is bool  # it is sent as JSON
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
    assert "Choose another directory, or replace the search there with fresh=True" in message
    assert len(go_through(4, tmp_path)) == 4  # nothing was changed
    begun = Study(wanted(seed=3), 4, tmp_path, fresh=True)
    assert begun.results() == ()
    begun.close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fixed": {"name": "y"}}, "fixed.name was 'x', now 'y'"),
        ({"others": {"bias": False}}, "fixed.bias was True, now False"),
        (
            {"spaces": {**SPACES, "kind": Choice(1, 2)}},
            "search.kind was \"Choice('1', '2')\", now 'Choice(1, 2)'",
        ),
        (
            {"data": {"validation": {"validation": {"length": 3}}}},
            "validation.validation.length was 2, now 3",
        ),
    ],
)
def test_what_makes_it_another_search(tmp_path, more, message):
    data = {"validation": {"validation": {"length": 2}}}
    before = {"spaces": {**SPACES, "kind": Choice("1", "2")}, "defaults": {}, "data": data}
    begun = Study(wanted(**before), 4, tmp_path, fresh=False)
    begun.end(begun.next().number, Outcome("complete", 1.0, seed=0))
    begun.close()
    with pytest.raises(DirectoryError) as caught:
        Study(wanted(**{**before, **more}), 4, tmp_path, fresh=False)
    assert message in str(caught.value)


def test_the_facts_of_a_search_are_those_of_all_its_data():
    x = np.zeros((8, 1), "float32")
    train, held_out = (treadle.data.from_arrays(x[:count], batch_size=2) for count in (8, 4))
    found = search._facts(train, {"near": held_out, "far": train})
    assert found["train"]["length"] == 4
    assert {name: part["length"] for name, part in found["validation"].items()} == {
        "near": 2,
        "far": 4,
    }
    assert search._facts(None, None) == {} and list(search._facts(None, held_out)) == ["validation"]


def test_no_seed_is_that_of_the_trials(tmp_path):
    def once(seed, ran_with):
        found = Study(wanted(seed=seed), 9, tmp_path, fresh=False)
        try:
            asked = found.next()
            found.end(asked.number, Outcome("complete", 1.0, seed=ran_with))
            return asked.seed
        finally:
            found.close()

    assert once(None, 0) is None and once(0, 0) == 0
    assert once(None, 0) == 0  # all train from one seed
    Study(wanted(), 4, tmp_path, fresh=True).close()
    assert once(None, 7) is None and once(None, 7) == 7
    with pytest.raises(DirectoryError, match="seed was 7, the task's own, now 0"):
        once(0, 0)


def test_checkpoints_of_a_trial_that_runs_do_not_give_way(tmp_path):
    with pytest.raises(Killed):
        go_through(4, tmp_path, (0, 1))
    saved = tmp_path / "trials" / "0000" / "checkpoints" / "step-8"
    saved.mkdir(parents=True)
    with pytest.raises(DirectoryError, match="holds another search: seed was 0, now 5"):
        go_through(4, tmp_path, seed=5)
    assert saved.is_dir()
    Study(wanted(seed=5), 4, tmp_path, fresh=True).close()
    assert not saved.exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_folder_that_is_no_search_is_left_as_it_is(tmp_path, fresh):
    (tmp_path / "trials").mkdir()
    (tmp_path / "trials" / "notes.txt").write_text("mine")
    with pytest.raises(DirectoryError) as caught:
        Study(wanted(), 4, tmp_path, fresh)
    assert str(caught.value) == (
        f"{tmp_path}/trials exists without study.db next to it, so it does not belong to a search "
        "and is not used. Choose another directory (--directory), or move it away"
    )
    assert (tmp_path / "trials" / "notes.txt").read_text() == "mine"


def test_only_the_database_goes_with_a_search(tmp_path):
    Study(wanted(), 4, tmp_path, fresh=False).close()
    kept = tmp_path / "study.db.backup"
    kept.touch()
    Study(wanted(), 4, tmp_path, fresh=True).close()
    assert kept.exists()


def test_a_directory_whose_name_means_something_in_an_address(tmp_path):
    folder = tmp_path / "a?b#c%20{d}"
    Study(wanted(), 4, folder, fresh=False).close()
    assert (folder / study.DATABASE).is_file()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


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


def test_data_that_does_not_fit_is_a_result_once_other_settings_did(tmp_path):
    found = Study(wanted(), 9, tmp_path, fresh=False)
    first = found.next()
    nothing = Outcome("failed", error="DataError: no batch", stops="DataError")
    with pytest.raises(DataError, match=r"^no batch$"):
        found.end(first.number, nothing)
    found.end(first.number, Outcome("complete", 1.0))
    assert found.end(found.next().number, nothing).ended == "failed"
    full = Outcome("failed", error="CheckpointError: disk full", stops="CheckpointError")
    with pytest.raises(CheckpointError, match=r"^disk full$"):
        found.end(found.next().number, full)
    found.close()


def test_suggestions_keep_away_from_what_diverged_late(tmp_path):
    found = Study(wanted(), 3, tmp_path, fresh=False)
    pruned, diverged = found.next().number, found.next().number
    for number, reports in ((pruned, 3), (diverged, 6)):
        for at in range(reports):
            found.report(number, at, 1.0)
    found.end(pruned, Outcome("pruned"))
    found.end(diverged, Outcome("diverged"))
    one, other = (study._for_sampler(trial) for trial in found._trials("PRUNED"))
    # Optuna: (-last step, last value), and (1, 0) where there is none, which is the worst.
    assert len(one.intermediate_values) == 3 and other.intermediate_values == {}
    assert found.results()[1].reports == 6
    found.close()


def test_a_search_ends_where_every_combination_was_tried():
    spaces = {"units": Range(8, 24, step=8), "kind": Choice("a", "b")}
    found = Study(wanted(spaces=spaces, defaults={"units": 8, "kind": "a"}), 20, None, fresh=False)
    while (asked := found.next()) is not None:
        assert not found.finished
        found.end(asked.number, Outcome("complete", float(asked.settings["units"])))
    tried = [tuple(trial.parameters.values()) for trial in found.results()]
    assert len(tried) == len(set(tried)) == 6 and tried[0] == (8, "a")
    assert found.finished and found.exhausted
    found.close()


def test_other_code_is_told_once(tmp_path):
    found = Study(wanted(), 9, tmp_path, fresh=False)
    found.end(found.next().number, Outcome("complete", 1.0, code={"Line.train_step": "1b4f"}))
    found.end(found.next().number, Outcome("failed", error="no"))
    assert found.changed == ""
    with pytest.warns(TreadleWarning) as caught:
        for _ in range(2):
            found.end(
                found.next().number, Outcome("complete", 1.0, code={"Line.train_step": "77c2"})
            )
    assert len(caught) == 1 and str(caught[0].message) == found.changed
    assert found.changed == (
        "the code of Line.train_step changed since this search began, so its results are those of "
        "other code: fresh=True (--fresh) trains from scratch"
    )
    found.close()


def test_a_search_in_memory_has_no_output_to_look_at():
    Path("output.txt").touch()  # of another program
    found = Study(wanted(), 9, None, fresh=False)
    with pytest.raises(TreadleError, match=r"have failed, the last with ValueError: no$"):
        for _ in range(3):
            found.end(found.next().number, Outcome("failed", error="ValueError: no"))
    found.close()


def test_a_search_whose_first_trials_all_fail_is_given_up(tmp_path):
    found = Study(wanted(), 9, tmp_path, fresh=False)
    for _ in range(2):
        found.end(found.next().number, Outcome("failed", error="ValueError: no"))
    last = found.next()
    Path(last.directory).mkdir(parents=True)
    Path(last.directory, "output.txt").touch()
    with pytest.raises(TreadleError) as caught:
        found.end(last.number, Outcome("failed", error="ValueError: no"))
    assert str(caught.value) == (
        f"the first 3 trials have failed, the last with ValueError: no; see {tmp_path}/trials/0002/"
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


# Trials, in this process


class Line(treadle.Task):
    """A slope that is to become 2."""

    epochs = 3

    def __init__(
        self,
        rate: Annotated[float, Range(0.01, 0.5, log=True)] = 0.01,
        fails: Literal["", "made", "nan"] = "",
    ) -> None:
        if fails == "made":
            raise KeyError("my own mistake")
        self.slope = keras.Variable(0.0)
        self.optimizer = keras.optimizers.SGD(np.nan if fails == "nan" else rate)

    def _loss(self, batch):
        x, y = batch
        return ops.mean((self.slope * x - y) ** 2)

    def train_step(self, batch):
        loss = treadle.minimize(lambda: self._loss(batch), [self.slope], self.optimizer)
        return {"loss": loss}

    def eval_step(self, batch):
        return {"loss": self._loss(batch)}

    def datasets(self):
        x = np.linspace(-1, 1, 32, dtype="float32")
        train = treadle.data.from_arrays(x, 2 * x, batch_size=8)
        held_out = treadle.data.from_arrays(x[::3], 2 * x[::3], batch_size=11, shuffle=False)
        return treadle.Datasets(train=train, validation=held_out)


def log_of(directory):
    lines = (Path(directory) / "log.jsonl").read_text().splitlines()
    return [found for line in lines if "kind" in (found := json.loads(line))]


@pytest.mark.long
def test_tune_finds_better_settings_and_goes_on(tmp_path):
    told = []
    found = treadle.tune(Line, trials=3, fixed={"fails": ""}, directory="there", told=told.append)
    assert tuple(told) == found.trials and len(told) == 3 and not found.before
    first = found.trials[0]
    assert first.parameters == {"rate": 0.01} and first.ended == "complete" and first.reports == 3
    assert found.value == min(trial.value for trial in told) < first.value
    assert found.parameters == dict(found.best.parameters) and found.command is None
    # A trial is a run: its value is the last that its log holds.
    [*_, last] = log_of(found.best.directory)
    assert last["val_loss"] == found.value and last["epoch"] == 3
    again = treadle.tune(Line, trials=3, fixed={"fails": ""}, directory="there", told=told.append)
    assert again.before and again.trials == found.trials and len(told) == 3
    more = treadle.tune(Line, trials=4, fixed={"fails": ""}, directory="there", told=told.append)
    assert not more.before and more.trials[:3] == found.trials and len(told) == 4
    assert json.loads(json.dumps(more.facts()))["best"]["value"] == more.value


def test_equal_seeds_give_equal_trials():
    asked = {"trials": 2, "fixed": {"fails": ""}, "epochs": 1, "monitor": "loss"}
    one, two = (treadle.tune(Line, seed=3, **asked) for _ in range(2))
    assert [t.value for t in one.trials] == [t.value for t in two.trials]
    assert [t.parameters for t in one.trials] == [t.parameters for t in two.trials]
    assert one.direction == "min" and one.directory is None


@pytest.mark.long
def test_a_trial_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    class Cut(BaseException):
        pass

    def asked():
        return treadle.tune(Line, trials=2, fixed={"fails": ""}, directory="there", epochs=4)

    report = Study.report
    with monkeypatch.context() as patched:

        def cut(self, number, at, value):
            if (number, at) == (1, 2):
                raise Cut
            return report(self, number, at, value)

        patched.setattr(Study, "report", cut)
        with pytest.raises(Cut):
            asked()
    assert [line["epoch"] for line in log_of("there/trials/0001")][-1] == 3
    found = asked()
    monkeypatch.chdir(tmp_path.parent)
    alone = treadle.tune(Line, trials=2, fixed={"fails": ""}, epochs=4)
    assert [(t.value, t.reports, t.ended) for t in found.trials] == [
        (t.value, t.reports, t.ended) for t in alone.trials
    ]


def test_errors_and_nan_are_results():
    kinds = {"fails": Choice("", "made", "nan"), "rate": Range(0.1, 0.2)}
    found = treadle.tune(Line, trials=6, search=kinds, epochs=1, seed=2)
    ended = {trial.parameters["fails"]: trial for trial in found.trials}
    assert ended[""].ended == "complete" and ended[""].error is None
    assert (ended["made"].ended, ended["made"].value) == ("failed", None)
    assert ended["made"].error == "KeyError: 'my own mistake'"
    assert (ended["nan"].ended, ended["nan"].value) == ("diverged", None)
    assert found.parameters["fails"] == ""


def order(directory, **more):
    asked = {"settings": {}, "lasts": {}, "monitor": "val_loss", "direction": "min", **more}
    return Order(number=0, task="Line", directory=str(directory), **asked)


def made(**settings):
    from treadle.recipes._loading import Made
    from treadle.tuning.trial import TrialTask

    keras.backend.clear_session()
    treadle.setup(seed=0)
    return TrialTask(Made(Line(**settings), None))


def test_a_trial_is_ended_where_that_is_the_answer(tmp_path):
    from treadle.tuning.trial import tried

    reports = []

    def report(at, value):
        reports.append((at, value))
        return at == 1

    outcome = tried(order(tmp_path, lasts={"epochs": 5}), made, report)
    assert (outcome.ended, outcome.seed, outcome.error) == ("pruned", 0, None)
    assert [at for at, _ in reports] == [0, 1] and outcome.value == reports[1][1]
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["progress"]["epoch"] == 2 and run["finished"]
    assert run["reason"] == f"pruned: val_loss was {outcome.value:.6g}, and others were better"
    # If the process that would report it is gone, it is found in the directory.
    outcome = tried(order(tmp_path, lasts={"epochs": 5}), made, pytest.fail)
    assert outcome.ended == "pruned"


@pytest.mark.parametrize(
    ("error", "stops"),
    [
        (DirectoryError("locked"), "DirectoryError"),
        (CheckpointError("disk full"), "CheckpointError"),
        (DataError("no batch"), "DataError"),
        (ValueError("no"), None),
    ],
)
def test_which_errors_other_settings_would_meet_as_well(tmp_path, error, stops):
    from treadle.tuning.trial import tried

    def fail():
        raise error

    outcome = tried(order(tmp_path), fail, pytest.fail)
    assert (outcome.ended, outcome.stops) == ("failed", stops)
    assert outcome.error == f"{type(error).__name__}: {error}"


def test_a_trial_may_be_judged_by_what_a_hook_logs(tmp_path):
    from treadle.tuning.trial import TrialTask, tried

    class Told(Line):
        def hooks(self):
            return [treadle.every("2 steps", self.told)]

        def told(self, loop):
            return {"return": loop.progress.step, "note": "a text"}

    def subject():
        task = Told()
        return TrialTask(replace(made().made, task=task))

    reports = []
    asked = order(None, monitor="return", direction="max", lasts={"steps": 5})
    asked = replace(asked, directory=None)
    outcome = tried(asked, subject, lambda at, value: reports.append((at, value)))
    assert reports == [(0, 2.0), (1, 4.0)] and outcome.error is None
    assert (outcome.ended, outcome.value) == ("complete", 4.0)
    assert "Line.train_step" in " ".join(outcome.code)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"monitor": "val_los", "direction": "min"},
            "tune cannot find 'val_los' among the values that epochs, validations and hooks log. "
            "Did you mean 'val_loss'? Known: loss, val_loss.",
        ),
        (
            {"monitor": "error"},
            "tune cannot find 'error' among the values that epochs, validations and hooks log. "
            "Known: loss, val_loss.",
        ),
        (
            {"monitor": "quality"},
            "cannot infer from the name 'quality' whether smaller or larger is better",
        ),
        ({"direction": "down"}, "unknown direction 'down'. Known: min, max."),
        ({"trials": 0}, "trials must be at least 1, not 0"),
        ({"workers": 0}, "workers must be at least 1, not 0"),
        ({"workers": 2}, "the trials of a class or function run in this process, one after"),
        (
            {"backend": "jax"},
            "the trials of a class or function run in this process, one after another",
        ),
        ({"epochs": 1.5}, "epochs must be a whole number, not 1.5"),
        ({"fixed": {"rat": 1}}, "Line has no setting 'rat'. Did you mean 'rate'?"),
    ],
)
def test_what_cannot_be_meant(asked, message):
    with pytest.raises(ConfigurationError) as caught:
        treadle.tune(Line, **{"trials": 2, **asked})
    assert message in str(caught.value)


def test_a_value_of_validation_where_there_is_none():
    source = Line().datasets().train
    with pytest.raises(ConfigurationError) as caught:
        treadle.tune(Line, source, fixed={"fails": ""}, directory="there")
    assert str(caught.value) == (
        "tune cannot find 'val_loss' among the values that epochs, validations and hooks log. Did "
        "you mean 'loss'? Known: loss."
    )
    # Nothing came of it, so that it may be asked in another way.
    asked = {"fixed": {"fails": ""}, "trials": 1, "monitor": "loss"}
    assert treadle.tune(Line, source, directory="there", **asked).value > 0


def test_a_task_that_does_not_say_how_long():
    class Endless(Line):
        epochs = None

    with pytest.raises(ConfigurationError, match="Endless does not define how long it trains: add"):
        treadle.tune(Endless, trials=1)


def test_a_setting_that_is_needed():
    def make(rate: float): ...

    with pytest.raises(ConfigurationError) as caught:
        treadle.tune(make, search={"rate": Range(1, 2)}, fixed={"rate": 3})
    assert "rate is both searched (1..2) and fixed (3)" in str(caught.value)

    def two(rate: float, units: int): ...

    with pytest.raises(ConfigurationError) as caught:
        treadle.tune(two, search={"rate": Range(1, 2)})
    assert str(caught.value).endswith(
        "needs a value for 'units', of type int: fix it, as fixed={'units': …} or --set units=…, "
        "or search it"
    )


def test_settings_that_other_processes_cannot_be_told():
    with pytest.raises(ConfigurationError) as caught:
        treadle.tune("digits", fixed={"units": [64]})
    assert str(caught.value) == (
        "fixed={'units': …} must be a number, a text, True, False or None, to be sent to other "
        "processes, not of type list: pass a class or function instead of the task's name"
    )


def test_nothing_means_what_is_used(tmp_path, monkeypatch):
    found = []

    def study(wanted, *more):
        found.append(wanted)
        raise Killed

    monkeypatch.setattr(search, "Study", study)
    monkeypatch.delenv("KERAS_BACKEND")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "keras.json").write_text('{"backend": "torch"}')
    for asked in ({}, {"seed": 0, "backend": "torch"}, {"backend": "jax"}):
        with pytest.raises(Killed):
            treadle.tune("distillation", search={"temperature": Range(1, 16)}, **asked)
    same, other = (wanted.configuration() for wanted in (found[0], found[2]))
    assert found[1].configuration() == same and (same["seed"], same["backend"]) == (0, "torch")
    assert other == {**same, "backend": "jax"}
    # Defaults are part of what a search is, and stay with the task.
    assert found[0].fixed == {} and found[0].others and found[0].others == same["fixed"]
    with pytest.raises(Killed):
        treadle.tune(Line)
    assert found[3].configuration()["backend"] == keras.config.backend()


def test_data_beside_a_name():
    with pytest.raises(ConfigurationError, match="trials of digits run in other processes, on its"):
        treadle.tune("digits", [1, 2])


@pytest.mark.parametrize("module", [ranges, space, results, search])
def test_examples_in_docstrings_hold(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


# The command, whose trials are processes

FILE = """
    import sys, time
    from typing import Annotated
    import keras
    import numpy as np
    import treadle
    from keras import ops

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
            return [treadle.every("1 epoch", lambda loop: time.sleep(0.05))]

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


def command(*arguments, code=0):
    keras.backend.clear_session()
    result = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.long
def test_the_command_tells_what_came_of_each_trial(mine):
    asked = ("tune", "mine.py:Line", "--set", "faults=made", "--trials", 3, "--directory", "there")
    lines = command(*asked).stdout.splitlines()
    lines = [line for line in lines if "ended in this call" not in line]  # each 30 seconds
    assert lines[0] == "searching rate 0.01..0.5 log"
    assert lines[1].startswith("trial 0000  val_loss ") and lines[1].endswith("  rate=0.01")
    assert lines[2].startswith("trial 0001  failed: KeyError: 'my own mistake'  rate=")
    assert lines[3].startswith("trial 0002  val_loss ")
    assert lines[4].split() == ["trial", "val_loss", "rate", "seconds"]
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

    done = results.Trial(3, "complete", 0.5, {"kind": "a"}, 1, 2.0, None, "there/trials/0003")
    _print(Tuned("loss", "min", (done,), "there", "treadle run mine", exhausted=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "every combination was tried"
    assert lines[2].split() == ["0003", "0.5", "a", "2.0"]


def started(*arguments):
    code = "from treadle.cli import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], text=True)


def wait_for(path, process):
    end = time.monotonic() + 120
    while not path.exists():
        assert process.poll() is None and time.monotonic() < end, path
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.faults
def test_a_search_survives_an_interrupt_and_a_kill(mine):
    asked = ("tune", "mine.py", "--trials", 6, "--epochs", 5, "--directory")
    folder = Path("there")
    for number, sent, code in ((1, signal.SIGINT, 130), (3, signal.SIGKILL, -signal.SIGKILL)):
        process = started(*asked, folder)
        wait_for(folder / "trials" / f"{number:04}" / "run.json", process)
        process.send_signal(sent)
        assert process.wait(60) == code
        assert not json.loads((folder / "trials" / f"{number:04}" / "run.json").read_text())[
            "finished"
        ]
    found = json.loads(command(*asked, folder, "--json").stdout)
    straight = json.loads(command(*asked, "other", "--json").stdout)
    for name in ("number", "ended", "value", "parameters", "reports", "error"):
        assert [t[name] for t in found["trials"]] == [t[name] for t in straight["trials"]], name
    assert len(found["trials"]) == 6 and found["command"] == straight["command"]


# Processes, by a program that trains nothing

PROGRAM = """
    import json, os, signal, sys
    from pathlib import Path

    json.loads(sys.stdin.readline())
    trials = 0
    Path("threads").mkdir(exist_ok=True)
    Path("threads", str(os.getpid())).write_text(os.environ.get("OMP_NUM_THREADS", "all"))
    for line in sys.stdin:
        order = json.loads(line)
        trials += 1
        Path("pids").open("a").write(f"{order['number']} {os.getpid()} {trials}\\n")
        stopped = False
        for at in range(3):
            print(json.dumps({"report": [at, 1.0 + order["number"]]}), flush=True)
            stopped = stopped or json.loads(sys.stdin.readline())
            fatal = Path(f"kill-{order['number']}")
            if at == 1 and fatal.exists():
                if fatal.read_text() == "once":
                    fatal.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
        outcome = {"ended": "complete", "value": 1.0 + order["number"], "seed": 0}
        print(json.dumps({"outcome": outcome}), flush=True)
"""


def through_processes(monkeypatch, trials, count):
    Path("program.py").write_text(textwrap.dedent(PROGRAM))
    monkeypatch.setattr(workers, "PROGRAM", ("program.py",))
    monkeypatch.setattr(workers, "cores", lambda: 8)
    found = Study(wanted(pruning=False), trials, Path("there"), fresh=False)
    told = []
    try:
        workers.run(found, count, {}, told.append)
        assert sorted(told, key=lambda trial: trial.number) == list(found.results())
    finally:
        found.close()
    begun = [tuple(map(int, line.split())) for line in Path("pids").read_text().splitlines()]
    return found.results(), begun


def threads_of_processes(begun):
    folder = Path("threads")
    found = {(folder / str(pid)).read_text() for _, pid, _ in begun}
    assert len(found) == 1
    return found.pop()


def test_processes_are_replaced_where_they_die(monkeypatch):
    Path("kill-1").write_text("once")
    Path("kill-2").write_text("always")
    trials, begun = through_processes(monkeypatch, 5, 1)
    assert [trial.ended for trial in trials] == ["complete"] * 2 + ["failed"] + ["complete"] * 2
    assert [trial.reports for trial in trials] == [3, 3, 2, 3, 3]
    killed = "was killed by SIGKILL (possibly out of memory)"
    assert trials[2].error == (
        f"its process {killed}, and the one that replaced it {killed}; see "
        "there/trials/0002/output.txt"
    )
    assert [number for number, *_ in begun] == [0, 1, 1, 2, 2, 3, 4]
    assert len({pid for _, pid, _ in begun}) == 4


def test_a_process_that_dies_before_it_takes_the_answer_is_not_asked_again(monkeypatch):
    monkeypatch.setattr(Study, "over", lambda self, number: (number, self._reports[1]) == (1, 2))
    Path("kill-1").write_text("always")
    trials, begun = through_processes(monkeypatch, 3, 1)
    assert [trial.ended for trial in trials] == ["complete", "pruned", "complete"]
    assert trials[1].reports == 2 and [number for number, *_ in begun] == [0, 1, 2]


def test_processes_are_renewed(monkeypatch):
    monkeypatch.setattr(workers, "RENEWED", 2)
    trials, begun = through_processes(monkeypatch, 5, 1)
    assert [trial.ended for trial in trials] == ["complete"] * 5
    assert [count for *_, count in begun] == [1, 2, 1, 2, 1]


def test_several_processes_share_the_trials(monkeypatch):
    trials, begun = through_processes(monkeypatch, 7, 3)
    assert [trial.value for trial in trials] == [1.0 + number for number in range(7)]
    assert sorted(number for number, *_ in begun) == list(range(7))
    assert len({pid for _, pid, _ in begun}) == 3


@pytest.mark.parametrize(("count", "threads"), [(1, "all"), (3, "2"), (9, "1")])
def test_several_processes_share_the_cores(monkeypatch, count, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    _, begun = through_processes(monkeypatch, 9, count)
    assert threads_of_processes(begun) == threads


def test_threads_that_were_asked_for_are_kept(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    _, begun = through_processes(monkeypatch, 3, 3)
    assert threads_of_processes(begun) == "5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear"], "linear has no search space: annotate a setting"),
        (["digit"], "Did you mean 'digits'?"),
        (["digits", "--set", "unit=3"], "digits has no setting 'unit'. Did you mean 'units'?"),
        (
            ["digits", "--search", "unit=3..4"],
            "digits has no setting 'unit'. Did you mean 'units'?",
        ),
        (["digits", "--search", "units=9..3"], "9 is not less than 3"),
        (["digits", "--search", "units=3..9", "--set", "units=4"], "units is both searched (3..9)"),
        (["digits", "--monitor", "quality"], "cannot infer from the name 'quality'"),
        (["digits", "--data-dir", "nowhere"], "--data-dir nowhere: there is no such folder"),
        (["digits", "units=3"], "repeat --set for each setting, as --set units=3"),
    ],
)
def test_what_cannot_be_meant_is_one_red_line(arguments, message):
    result = command("tune", *arguments, code=2)
    assert message in result.stderr and result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
