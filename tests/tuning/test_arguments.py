"""Arguments of `treadle.tune`: what is rejected, and what identifies a search."""

import keras
import numpy as np
import pytest

import treadle
from tests.tune_searches import Killed, Line, apart, quick  # noqa: F401
from treadle import Range
from treadle.errors import ConfigurationError
from treadle.tuning import search


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


def test_optuna_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        treadle.tune("digits")
    assert str(caught.value) == (
        "searching for settings needs Optuna, which is not installed: pip install optuna"
    )


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
    same, other = (asked.facts() for asked in (found[0], found[2]))
    assert found[1].facts() == same and (same["seed"], same["backend"]) == (0, "torch")
    assert other == {**same, "backend": "jax"}
    # Defaults are part of what a search is, and stay with the task.
    assert found[0].order.settings == {} and found[0].others and found[0].others == same["fixed"]
    with pytest.raises(Killed):
        treadle.tune(Line)
    assert found[3].facts()["backend"] == keras.config.backend()


def test_data_beside_a_name():
    with pytest.raises(ConfigurationError, match="trials of digits run in other processes, on its"):
        treadle.tune("digits", [1, 2])
