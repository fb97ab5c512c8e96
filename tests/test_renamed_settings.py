"""Runs that were recorded with the earlier names of a recipe's settings."""

import doctest
import json

import keras
import pytest
from typer.testing import CliRunner

import treadle
from tests.run_content import write_record
from treadle.cli import app
from treadle.core import renamed
from treadle.core.renamed import RENAMED, with_current_names
from treadle.errors import ConfigurationError, DirectoryError
from treadle.recipes import find

RECIPES = {recipe.module: recipe for recipe in find().values()}
EARLIER = {"noise_variance": "noise"}


@pytest.mark.parametrize("module", RENAMED)
def test_the_table_leads_from_names_that_are_gone_to_those_of_the_recipe(module):
    recipe, names = RECIPES[module], RENAMED[module]
    known = {parameter.name for parameter in recipe.parameters}
    assert set(names.values()) <= known
    assert not set(names) & known
    assert len(set(names.values())) == len(names)
    current = recipe.settings([])
    back = {new: old for old, new in names.items()}
    earlier = {back.get(name, name): value for name, value in current.items()}
    found = with_current_names({"settings": earlier, "seed": 0}, module)
    assert found == {"settings": current, "seed": 0}
    for old in names:
        with pytest.raises(ConfigurationError, match=f"{recipe.name} has no setting '{old}'"):
            recipe.settings([f"{old}=1"])


def test_settings_of_other_tasks_keep_their_names():
    for module in (None, "mine", "treadle.recipes.digits"):
        found = {"settings": {"noise": 1}, "seed": 0}
        assert with_current_names(found, module) == found
    assert with_current_names({}, "treadle.recipes.vae") == {}


def test_the_example_in_the_docstring_holds():
    failed, tried = doctest.testmod(renamed)
    assert tried and not failed


def treadle_command(*arguments, code=0):
    keras.backend.clear_session()
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result


def with_earlier_names(directory):
    """Write `run.json` as an earlier version did."""
    file = directory / "run.json"
    record = json.loads(file.read_text())
    settings = record["configuration"]["settings"]
    record["configuration"]["settings"] = {EARLIER.get(k, k): v for k, v in settings.items()}
    assert "noise" in record["configuration"]["settings"]
    write_record(directory, record)


def settings_in(directory):
    return json.loads((directory / "run.json").read_text())["configuration"]["settings"]


def test_commands_resume_a_run_with_earlier_names(tmp_path):
    directory = tmp_path / "run"
    run = ("run", "custom-gradients", "--set", "noise_variance=0.5", "--directory", directory)
    treadle_command(*run, "--steps", 2)
    with_earlier_names(directory)
    treadle_command("evaluate", directory)
    treadle_command("replay", directory, "--step", 1)
    treadle_command("resume", directory, "--steps", 3)
    assert settings_in(directory)["noise_variance"] == 0.5
    assert "noise" not in settings_in(directory)
    with_earlier_names(directory)
    assert "is already finished" in treadle_command(*run, "--steps", 3).output
    other = ("run", "custom-gradients", "--set", "noise_variance=0.1", "--directory", directory)
    refused = treadle_command(*other, "--steps", 3, code=2)
    assert "settings.noise_variance was 0.5, now 0.1" in " ".join(refused.output.split())


def test_scripts_resume_a_run_with_earlier_names(tmp_path):
    from treadle.recipes.custom_gradients import CustomGradients

    def fit(steps, **settings):
        keras.backend.clear_session()
        treadle.setup(seed=0)
        task = CustomGradients(**settings)
        with treadle.Loop(task, tmp_path, console=False) as loop:
            loop.fit(task.datasets().train, steps=steps)
        return loop

    fit(2, noise_variance=0.5)
    with_earlier_names(tmp_path)
    task = CustomGradients(noise_variance=0.5)
    assert treadle.doctor.replay(task, task.datasets().train, tmp_path, step=1).agreement.exact
    assert fit(2, noise_variance=0.5).progress.step == 2
    with pytest.raises(DirectoryError, match=r"settings.noise_variance was 0\.5, now 0\.1"):
        fit(2, noise_variance=0.1)
