"""`treadle find-lr` and `treadle schedule`."""

import json
from pathlib import Path

import keras
import pytest

from tests.cli_runs import treadle


@pytest.fixture(autouse=True)
def apart(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KERAS_BACKEND", keras.config.backend())


def test_find_lr_suggests_and_draws():
    result = treadle("find-lr", "digits", "--plot", "rates.png")
    first, *_, suggested, last = result.stdout.splitlines()
    assert first.startswith("optimizer: ")
    rate = suggested.removeprefix("suggested, where it fell fastest: ")
    assert 1e-3 < float(rate) < 0.1
    assert last == f"try it: treadle run digits --set learning_rate={rate}"
    assert Path("rates.png").read_bytes()[1:4] == b"PNG"


def test_find_lr_in_json():
    options = ("--steps", 12, "--begin", 1e-4, "--end", 0.1)
    found = json.loads(treadle("find-lr", "digits", "--json", *options).stdout)
    assert len(found["rates"]) == len(found["losses"]) == 12
    assert found["rates"][0] == pytest.approx(1e-4) and found["rates"][-1] == pytest.approx(0.1)
    assert found["suggestion"] == found["steepest"] <= found["lowest"]


def test_a_schedule_as_text():
    text = "warm_up(cyclic(1, 3, step_size=2), 2)"
    result = treadle("schedule", text, "--steps", 7, "--plot", "rate.svg")
    assert result.stdout == f"{text}: 0 at step 0, 1 at step 6; from 0 to 3\n"
    assert "<svg" in Path("rate.svg").read_text()
    found = json.loads(treadle("schedule", text, "--steps", 7, "--json").stdout)
    assert found == {text: {"steps": list(range(7)), "values": [0, 0.5, 1, 2, 3, 2, 1]}}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Piecewise([1, 0.5], [2])", "1 at step 0, 0.5 at step 3; from 0.5 to 1"),
        ("ExponentialDecay(8.0, 1, 0.5)", "8 at step 0, 1 at step 3; from 1 to 8"),
        ("one_cycle(1, 3, initial=-1, final=0)", "-1 at step 0, 0 at step 3; from -1 to 0.4815"),
    ],
)
def test_schedules_as_text(text, line):
    assert treadle("schedule", text, "--steps", 4).stdout == f"{text}: {line}\n"


def test_the_rates_of_a_task():
    assert treadle("schedule", "digits", "--steps", 5).stdout == (
        "optimizer: 0.01 at step 0, 0.01 at step 4; from 0.01 to 0.01\n"
    )
    assert treadle("schedule", "cyclic-lr", "--set", "low=0.25", "--steps", 47).stdout == (
        "optimizer: 0.25 at step 0, 0.5 at step 46; from 0.25 to 0.5\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule", "cyclic(1,"], "there is no recipe 'cyclic(1,'."),
        (["schedule", "cyclic(1,,)"], "cannot read the schedule 'cyclic(1,,)': write it as a call"),
        (["schedule", "cyclic(low, 1, 2)"], "cannot read the schedule 'cyclic(low, 1, 2)'"),
        (
            ["schedule", "cyclic({[1]: 2}, 1, 2)"],
            "cannot read the schedule 'cyclic({[1]: 2}, 1, 2)'",
        ),
        (["schedule", "cyclic(**{'low': 1})"], "cannot read the schedule \"cyclic(**{'low': 1})\""),
        (["schedule", "cyclic(low.real, 1, 2)"], "cannot read the schedule"),
        (["schedule", "cyclic(*[1, 2, 3])"], "cannot read the schedule"),
        (
            ["schedule", "warm_up(cosine_decay, 5)"],
            "cannot read the schedule 'warm_up(cosine_decay",
        ),
        (["schedule", "cosine_decay('a', 3)"], "cosine_decay('a', 3): "),
        (["schedule", "(1, 2)"], "cannot read the schedule '(1, 2)'"),
        (["schedule", "().__class__.mro()"], "there is no schedule 'mro'."),
        (["schedule", "cyclic(open('made', 'w'), 1, 2)"], "there is no schedule 'open'."),
        (
            ["schedule", "cyclick(1, 2, 3)"],
            "there is no schedule 'cyclick'. Did you mean 'Cyclic'?",
        ),
        (
            ["schedule", "cyclic(1, 2)"],
            "cyclic(1, 2): Cyclic: missing a required argument: 'step_size'; its arguments are low",
        ),
        (["schedule", "cyclic(1, 2, 3, size=3)"], "got an unexpected keyword argument 'size'; its"),
        (["schedule", "warm_up(CosineDecay(1), 5)"], "CosineDecay: missing a required argument"),
        (["schedule", "one_cycle(1, 2, 3, 4, 5, 6)"], "OneCycle: too many positional arguments"),
        (["schedule", "cyclic(1, 2, 0)"], "step_size must be at least 1, not 0"),
        (["schedule", "digit"], "Did you mean 'digits'?"),
        (["schedule", "digits", "more"], "unexpected argument 'more'"),
        (["schedule", "digits", "--plot", "rate.gif"], "unknown kind of picture 'gif'"),
        (["find-lr", "digits", "--plot", "no/rate.png"], "there is no folder no"),
        (["find-lr", "digits", "--set", "unit=3"], "Did you mean 'units'?"),
        (["find-lr", "digits", "--optimizer", "adam"], "the task has no optimizer 'adam'"),
        (["find-lr", "digits", "--monitor", "los"], "Did you mean 'loss'?"),
    ],
)
def test_wrong_usage_is_one_red_line(arguments, message):
    result = treadle(*arguments, code=2)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output
