"""Trials that train in this process."""

import json
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import keras
import numpy as np
import pytest

import treadle
from tests.tune_searches import Line, apart, quick  # noqa: F401
from treadle import Choice, Range
from treadle.errors import CheckpointError, DataError, DirectoryError
from treadle.tuning.orders import Order


def log_of(directory):
    lines = (Path(directory) / "log.jsonl").read_text().splitlines()
    return [found for line in lines if "kind" in (found := json.loads(line))]


@pytest.mark.long
def test_tune_finds_better_settings_and_goes_on(tmp_path):
    ended = []
    found = treadle.tune(
        Line, trials=3, fixed={"fails": ""}, directory="there", on_trial_end=ended.append
    )
    assert tuple(ended) == found.trials and len(ended) == 3 and not found.before
    first = found.trials[0]
    assert first.parameters == {"rate": 0.01} and first.ended == "complete" and first.reports == 3
    assert found.value == min(trial.value for trial in ended) < first.value
    assert found.parameters == dict(found.best.parameters) and found.command is None
    # A trial is a run: its value is the last that its log holds.
    [*_, last] = log_of(found.best.directory)
    assert last["val_loss"] == found.value and last["epoch"] == 3
    again = treadle.tune(
        Line, trials=3, fixed={"fails": ""}, directory="there", on_trial_end=ended.append
    )
    assert again.before and again.trials == found.trials and len(ended) == 3
    more = treadle.tune(
        Line, trials=4, fixed={"fails": ""}, directory="there", on_trial_end=ended.append
    )
    assert not more.before and more.trials[:3] == found.trials and len(ended) == 4
    assert json.loads(json.dumps(more.facts()))["best"]["value"] == more.value


def test_equal_seeds_give_equal_trials():
    asked = {"trials": 2, "fixed": {"fails": ""}, "epochs": 1, "monitor": "loss"}
    one, two = (treadle.tune(Line, seed=3, **asked) for _ in range(2))
    assert [t.value for t in one.trials] == [t.value for t in two.trials]
    assert [t.parameters for t in one.trials] == [t.parameters for t in two.trials]
    assert one.direction == "min" and one.directory is None


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


class Rises(treadle.Task):
    """The value is best after the first epoch, whose weights the trial leaves."""

    made: ClassVar[list["Rises"]] = []

    def __init__(self, rate: float = 1.0) -> None:
        self.value, self.rate = keras.Variable(0.0), rate
        self.made.append(self)

    def train_step(self, batch):
        self.value.assign_add(self.rate)
        return {"loss": keras.ops.copy(self.value)}

    def eval_step(self, batch):
        return {"loss": keras.ops.copy(self.value)}

    def datasets(self):
        return treadle.Datasets(train=[np.ones(2)] * 2, validation=[np.ones(2)])

    def hooks(self):
        return [treadle.hooks.EarlyStopping("val_loss", patience=2)]


class RisesByKeras(Rises):
    """The same, with the callback of Keras, which needs a model."""

    def __init__(self, rate: float = 1.0) -> None:
        super().__init__(rate)
        self.model = keras.Sequential([keras.Input((1,)), Held(self.value)])

    def hooks(self):
        options = {"patience": 2, "restore_best_weights": True}
        stopping = keras.callbacks.EarlyStopping("val_loss", **options)
        return [treadle.hooks.KerasCallbacks(stopping, self.model, keras.optimizers.SGD())]


class Held(keras.layers.Layer):
    def __init__(self, value: keras.Variable) -> None:
        super().__init__()
        self.value = value

    def call(self, x):
        return self.value * x


@pytest.mark.parametrize("kind", [Rises, RisesByKeras])
def test_the_value_of_a_trial_is_that_of_the_weights_it_leaves(kind, tmp_path):
    spaces = {"rate": Choice(1.0, 2.0)}
    found = treadle.tune(kind, trials=1, search=spaces, epochs=5, directory=tmp_path, seed=0)
    rate = found.parameters["rate"]
    assert (found.value, found.best.step, found.best.reports) == (2 * rate, 2, 3)
    assert keras.ops.convert_to_numpy(Rises.made[-1].value) == found.value
