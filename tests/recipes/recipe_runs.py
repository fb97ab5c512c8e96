"""Recipes, trained as the command line does."""

import keras
import pytest

import treadle
from treadle import recipes
from treadle.recipes import resolve


def make(name, *settings):
    """Make a recipe's task, as the command line does."""
    recipe = resolve(name)
    if recipe.backend not in (None, keras.config.backend()):
        pytest.skip(f"{name} runs on {recipe.backend} only")
    keras.backend.clear_session()
    treadle.setup(seed=0)
    return recipes.make(recipe, recipe.settings(settings))


def run(name, *settings, options=None, **lasts):
    """Train a recipe as the command line does; returns what was made and the loop."""
    made = make(name, *settings)
    datasets = made.datasets()
    with treadle.Loop(made.task, hooks=made.hooks(), options=options, console=False) as loop:
        loop.fit(datasets.train, datasets.validation, **(lasts or made.lasts))
    return made, loop
