"""Errors of sources say where the run stood, and are not explained as errors of a step."""

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle

ROWS = np.ones((8, 1), "float32")
WEIGHTS = "; the weights are those of "


class Tiny(treadle.Task):
    def __init__(self) -> None:
        self.w = keras.Variable(1.0)

    def train_step(self, batch: Any) -> Any:
        self.w.assign(self.w * 0.5)
        return {"loss": self.w}

    def eval_step(self, batch: Any) -> Any:
        return {"loss": ops.mean(self.w * batch)}

    def predict_step(self, batch: Any) -> Any:
        return self.w * batch


class Failing:
    """A generator function whose batch 3 fails, the second time that it is read or the first."""

    def __init__(self, time: int) -> None:
        self.time, self.times = time, 0

    def __call__(self) -> Any:
        self.times += 1
        for number in range(4):
            if number == 2 and self.times == self.time:
                raise ValueError("broken file")
            yield ROWS[:2]


def trained(validation: Any, **how: Any) -> Any:
    def run(loop: treadle.Loop) -> None:
        loop.fit(treadle.data.from_arrays(ROWS, batch_size=2), validation, epochs=3, **how)

    return run


IN_EVALUATION = "in the source of an evaluation, which always reads its epoch 1, "
GIVING = "while the source was giving batch 3 of epoch 1"


@pytest.mark.parametrize(
    ("run", "notes"),
    [
        (trained(Failing(2)), [f"{IN_EVALUATION}after step 8, epoch 2, batch 4{WEIGHTS}that step"]),
        (
            trained({"easy": [ROWS], "hard": Failing(2)}, validate_every="3 steps"),
            [
                f"{IN_EVALUATION}after step 6, epoch 2, batch 2{WEIGHTS}that step",
                "in the validation set 'hard'",
            ],
        ),
        (
            lambda loop: loop.evaluate(Failing(1)),
            [f"{IN_EVALUATION}before the first step{WEIGHTS}the start"],
        ),
        (lambda loop: loop.predict(Failing(1)), []),
        (
            lambda loop: loop.fit(Failing(1), epochs=1),
            [f"in the source, after step 2, epoch 1, batch 2{WEIGHTS}that step"],
        ),
    ],
    ids=["validation", "a set", "evaluate", "predict", "training"],
)
def test_an_error_of_a_source_names_the_place_in_the_run(run: Any, notes: list[str]) -> None:
    eager = treadle.Options(execution="eager")
    with (
        pytest.raises(ValueError, match="broken file") as caught,
        treadle.Loop(Tiny(), options=eager, console=False) as loop,
    ):
        run(loop)
    assert caught.value.__notes__ == [GIVING, *notes]


OTHER = "torch" if keras.config.backend() == "tensorflow" else "tensorflow"
FAILS: dict[str, Any] = {"__name__": f"{OTHER}.data"}  # as the code of another framework
exec("def fails(*_): raise RuntimeError('of another framework')", FAILS)


def of_another_framework() -> Any:
    yield from [ROWS[:2]] * 2
    FAILS["fails"]()


class InStep(Tiny):
    train_step = eval_step = predict_step = lambda self, batch: FAILS["fails"]()


@pytest.mark.parametrize("is_in_step", [False, True], ids=["source", "step"])
@pytest.mark.parametrize("kind", ["fit", "validation", "evaluate", "predict"])
def test_only_an_error_of_a_step_is_explained_as_one(kind: str, is_in_step: bool) -> None:
    source = [ROWS] if is_in_step else of_another_framework
    run = {
        "fit": lambda loop: loop.fit(source, epochs=1),
        "validation": trained(source),
        "evaluate": lambda loop: loop.evaluate(source),
        "predict": lambda loop: loop.predict(source),
    }[kind]
    task, eager = InStep() if is_in_step else Tiny(), treadle.Options(execution="eager")
    with (
        pytest.raises(RuntimeError, match="of another framework") as caught,
        treadle.Loop(task, options=eager, console=False) as loop,
    ):
        run(loop)
    notes = caught.value.__notes__
    assert (GIVING in notes) is not is_in_step
    assert any(f"KERAS_BACKEND={OTHER}" in note for note in notes) is is_in_step
