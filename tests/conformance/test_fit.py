"""Programs of Keras train with `treadle.fit` as with `fit`: history, weights and callbacks."""

import itertools
from pathlib import Path
from shutil import copyfile
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.conformance.executions import long_to_compile
from tests.conformance.keras_comparison import (
    DIFFERENT,
    NOT_POSSIBLE,
    TOLERANCE,
    difference,
    made,
    programs,
)
from tests.conformance.keras_programs import BACKEND
from tests.conformance.keras_versions import needs_keras

OFTEN = ("own_steps", "callbacks")  # where XLA compiles


def chosen() -> list[Any]:
    """Return programs as parameters: all on PyTorch; of the long ones, each compiler has half."""
    found, turns = [], itertools.cycle(("jax", "tensorflow"))
    for name in programs():
        if name in OFTEN:
            found.append(name)
            continue
        # TensorFlow has what JAX cannot train, and what `fit` computes differently there.
        only = (name, "jax") in NOT_POSSIBLE or (name, "tensorflow") in DIFFERENT or "xla" in name
        compiler = "tensorflow" if only else next(turns)
        other = pytest.mark.skipif(BACKEND not in ("torch", compiler), reason=f"{compiler} has it")
        often = BACKEND == "torch" and len(found) % 3 == 0
        found.append(pytest.param(name, marks=other if often else (pytest.mark.long, other)))
    return found


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64:UserWarning")  # Keras on JAX
@pytest.mark.parametrize("name", chosen())
def test_a_program_trains_as_with_fit_of_keras(name: str, tmp_path: Path) -> None:
    if (name, BACKEND) in NOT_POSSIBLE:
        pytest.skip(NOT_POSSIBLE[name, BACKEND])
    if (name, BACKEND) == ("compiled", "torch"):
        needs_keras("3.10", "`fit` of a model with the metric AUC")
    bound, reason = DIFFERENT.get((name, BACKEND), (TOLERANCE, "equal"))
    assert difference(name, tmp_path) <= bound, reason
    if (tmp_path / "plain" / "log.csv").exists():
        texts = [(tmp_path / x / "log.csv").read_text() for x in ("plain", "ours")]
        rows = [[line.split(",") for line in text.splitlines()] for text in texts]
        assert rows[0][0] == rows[1][0] and len(rows[0]) == len(rows[1])


class Killed(BaseException):
    """Ends a run as the end of its process would: nothing is saved."""


@long_to_compile
@pytest.mark.parametrize("name", ["own_steps", "callbacks"])
def test_a_run_that_is_killed_resumes_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    def kill(loop: Any) -> None:
        raise Killed

    whole, first, second = (made(name, tmp_path / x) for x in ("whole", "first", "second"))
    expected = treadle.fit(whole.model, **whole.arguments, directory=tmp_path / "a")
    saving = treadle.hooks.Checkpoint(every="2 steps")
    with pytest.raises(Killed):
        hooks = [saving, treadle.at("8 steps", kill)]
        treadle.fit(first.model, **first.arguments, directory=tmp_path / "b", hooks=hooks)
    if name == "callbacks":  # whose file has another path
        copyfile(tmp_path / "first" / "log.csv", tmp_path / "second" / "log.csv")
    found = treadle.fit(second.model, **second.arguments, directory=tmp_path / "b", hooks=[saving])
    assert found.history == expected.history and found.epoch == expected.epoch
    for weight, other in zip(whole.model.variables, second.model.variables, strict=True):
        found_value, value = map(keras.ops.convert_to_numpy, (other, weight))
        np.testing.assert_array_equal(found_value, value, err_msg=weight.path)
    if name == "callbacks":
        tables = [(tmp_path / x / "log.csv").read_text() for x in ("whole", "second")]
        assert tables[0] == tables[1]
    pairs = zip(*(x.arguments.get("callbacks", ()) for x in (whole, second)), strict=True)
    for one, two in pairs:
        for attribute in ("best", "wait", "stopped_epoch", "best_epoch", "cooldown_counter"):
            assert getattr(two, attribute, None) == getattr(one, attribute, None), attribute
