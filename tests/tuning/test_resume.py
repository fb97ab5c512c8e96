"""Resumed searches, their directories and databases; nothing is trained here."""

import json

import pytest

from tests.tune_searches import SPACES, Killed, apart, facts, go_through, quick, wanted  # noqa: F401
from treadle import Choice, Range
from treadle.errors import DirectoryError
from treadle.tuning.orders import Outcome
from treadle.tuning.storage import DATABASE
from treadle.tuning.study import Study


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param([(0, 2), (6, "begun"), (11, 1)], id="reports", marks=pytest.mark.long),
        pytest.param([(n, 2) for n in range(6, 12)], id="pruning"),  # where some are pruned
    ],
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
        ({"settings": {"name": "y"}}, "fixed.name was 'x', now 'y'"),
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
    assert (folder / DATABASE).is_file()
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
    (tmp_path / DATABASE).write_text("these are no tables, but more than a hundred bytes" * 9)
    with pytest.raises(DirectoryError, match=r"cannot use .*study\.db as the database of a search"):
        Study(wanted(), 4, tmp_path, fresh=False)
    Study(wanted(), 4, tmp_path, fresh=True).close()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(DirectoryError, match="cannot make the directory"):
        Study(wanted(), 4, tmp_path / "file" / "inside", fresh=False)


def test_the_database_is_plain(tmp_path):
    """Whatever stands in it is a number or JSON: loading it runs no code."""
    import sqlite3

    go_through(3, tmp_path)
    with sqlite3.connect(tmp_path / DATABASE) as opened:
        tables = opened.execute("select name from sqlite_master where type = 'table'").fetchall()
        for (table,) in tables:
            columns = [column[1] for column in opened.execute(f"pragma table_info({table})")]
            for row in opened.execute(f"select * from {table}"):
                for name, value in zip(columns, row, strict=True):
                    assert not isinstance(value, bytes)
                    if name.endswith("_json"):
                        json.loads(value)
    opened.close()
