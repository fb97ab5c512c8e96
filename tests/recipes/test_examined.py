"""Examinations of the recipes: no mistakes, and only notes that are true."""

import pytest
from recipe_runs import make

import treadle
from treadle.recipes import find

NOTES = {
    "char-lm": ["O-decays-biases"],  # AdamW decays everything, as the recipe's optimizer says
    "custom-optimizer": ["O-decays-biases"],
}


@pytest.mark.any_backend  # the recipes were examined on each backend: docs/doctor.md
@pytest.mark.long
@pytest.mark.parametrize("name", find())
def test_a_recipe_has_no_findings_but_notes(name: str) -> None:
    made = make(name)
    report = treadle.doctor.examine(made.task, made.datasets())
    assert report.codes() == NOTES.get(name, []), str(report)
    assert [text for text in report.skipped.values() if "could not run" in text] == []
