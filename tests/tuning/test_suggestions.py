"""Suggested settings and outcomes of trials; nothing is trained here."""

from pathlib import Path

import pytest

from tests.tune_searches import apart, facts, go_through, quick, values, wanted  # noqa: F401
from treadle import Choice, Range
from treadle.errors import CheckpointError, DataError, TreadleError, TreadleWarning
from treadle.tuning import Tuned, suggestions
from treadle.tuning.orders import Outcome
from treadle.tuning.study import Study


def test_a_search_gets_better_and_ends_bad_trials_early():
    found = Tuned("val_loss", "min", go_through(40))
    assert facts(found.trials)[0][3] == {"rate": 0.5, "units": 16, "kind": "a"}  # the defaults
    pruned = [trial for trial in found.trials if trial.ended == "pruned"]
    assert pruned and all(trial.reports == 3 for trial in pruned)
    assert found.best.number > 10 and found.value < 0.6 * found.trials[0].value
    assert found.parameters["kind"] == "b"
    assert facts(go_through(40)) == facts(found.trials)
    assert facts(go_through(12, seed=1))[1:] != facts(found.trials)[1:12]


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
    one, other = (suggestions._for_sampler(trial) for trial in found._trials("PRUNED"))
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
