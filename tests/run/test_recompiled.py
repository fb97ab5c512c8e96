"""Notes in the log that explain why a step was compiled again."""

from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import ops

import treadle
from treadle.checkpoint.batch_forms import described
from treadle.hooks import Checkpoint
from treadle.run.explanations import form_changes


class Mean(treadle.Task):
    def __init__(self) -> None:
        self.weight = keras.Variable(1.0)
        self.optimizer = keras.optimizers.SGD(0.1)

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return ops.mean((self.weight - ops.cast(batch["x"], "float32")) ** 2)

        return treadle.minimize(objective, [self.weight], self.optimizer)


def fitted(batches: Any, epochs: int = 2, **how: Any) -> treadle.Loop:
    with treadle.Loop(Mean(), console=False, **how) as loop:
        loop.fit(batches, epochs=epochs)
    return loop


def batch(*shape: int, dtype: str = "float32") -> Any:
    return {"x": np.ones(shape, dtype)}


def test_a_batch_of_another_shape_or_dtype_is_named_once() -> None:
    batches = [batch(8, 3), batch(8, 3), batch(5, 4), batch(8, 3, dtype="int32")]
    assert fitted(batches).history["note"] == [
        "another form of batch: the array 'x' changed from (8, 3) float32 to (5, 4) float32",
        "another form of batch: the array 'x' changed from (8, 3) float32 to (8, 3) int32",
    ]


def test_a_resumed_run_does_not_repeat_a_note(tmp_path: Path) -> None:
    batches = [batch(8, 3), batch(8, 5), batch(8, 3)]
    for epochs in (1, 3):
        loop = fitted(
            batches, epochs, directory=tmp_path / "run", override=True, hooks=[Checkpoint()]
        )
    assert len(loop.history["note"]) == 1 and loop.progress.step == 9


def test_only_the_first_eight_forms_are_logged() -> None:
    notes = fitted([batch(2, n) for n in range(1, 15)], epochs=1).history["note"]
    assert len(notes) == 8
    assert [note.endswith("Further forms are not logged") for note in notes] == [False] * 7 + [True]


def test_equal_forms_do_not_recompile() -> None:
    loop = fitted([batch(4, 2)] * 3)
    assert "note" not in loop.history.names()


def test_a_batch_with_fewer_rows_is_not_logged_and_one_with_more_is() -> None:
    assert "note" not in fitted([batch(8, 3), batch(5, 3), batch(2, 3)]).history.names()
    assert len(fitted([batch(5, 3), batch(8, 3)]).history["note"]) == 1


def test_another_structure_is_described() -> None:
    x = np.ones((2, 3), "float32")
    assert form_changes(described((x,)), described({"x": x})) == [
        "its structure changed from (array,) to {'x': array}"
    ]
    assert form_changes(None, described(x)) == form_changes(described(x), described(x)) == []
