"""Sheets of the recipes: everything is measured, and no mistake is found."""

import pytest
from recipe_runs import make

import treadle
from treadle.recipes import find

# Of recipes that take long; the others have the settings that users get.
SMALL = {
    "adversarial-training": ("units=32", "attack_steps=3"),
    "char-lm": ("width=32", "heads=2", "context_length=32", "batch_size=16"),
    "maml": ("tasks=4",),
    "wgan-gp": ("batch_size=16", "critic_steps=2"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", find())
def test_a_recipe_has_no_certain_mistake(name: str) -> None:
    made = make(name, *SMALL.get(name, ()))
    sheet = treadle.doctor.inspect(made.task, made.datasets())
    assert list(sheet.findings) == [], str(sheet)
    assert [x for x in sheet.not_measured if x.endswith("facts") or x.startswith("mistakes")] == []
