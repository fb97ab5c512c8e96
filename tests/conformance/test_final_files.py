"""The final files of a run on every backend; tests/cli/test_final_files.py has every command."""

import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile, once
from keras import ops

import treadle
from tests.run.test_equal_directories import copies
from tests.run.test_resume_ends import by_epochs
from treadle.core.directory import read_run
from treadle.errors import DirectoryError, TreadleWarning

FILE = "state.safetensors"


class Averaging(treadle.Task):
    """Variables of several dtypes, and averages of the weights."""

    def __init__(self, averages: bool) -> None:
        dense = keras.layers.Dense(2, dtype="mixed_bfloat16")
        self.model = keras.Sequential([keras.Input((3,)), dense, keras.layers.Dropout(0.5, seed=1)])
        self.optimizer = keras.optimizers.Adam(0.1, use_ema=averages)
        self.error = keras.metrics.Mean()

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return ops.mean(ops.square(ops.cast(self.model(batch, training=True), "float32")))

        loss = treadle.minimize(objective, self.model, self.optimizer)
        self.error.update_state(loss)
        return {"loss": loss}


def fit(directory: Path, averages: bool, execution: Any) -> treadle.Loop:
    keras.backend.clear_session()
    treadle.setup(seed=0)
    data = treadle.data.from_arrays(np.ones((8, 3), "float32"), batch_size=2)
    options = treadle.Options(execution=execution)
    with treadle.Loop(Averaging(averages), directory, options=options, console=False) as loop:
        loop.fit(data, epochs=2)
    return loop


@long_to_compile
@EXECUTIONS
@pytest.mark.parametrize("averages", [False, True])
def test_values_of_the_checkpoint_have_the_bits_of_the_damaged_file(
    tmp_path: Path, averages: bool, execution: Any
) -> None:
    expected = fit(tmp_path, averages, execution).state.arrays()
    file = tmp_path / FILE
    whole = file.read_bytes()
    said = rf"{FILE}: expected .* The values are those of checkpoint step-0+8, which are the same$"
    for place in (3, 100, len(whole) // 2, len(whole) - 1):
        data = bytearray(whole)
        data[place] ^= 1
        file.write_bytes(data)
        with pytest.warns(TreadleWarning, match=said):
            require_equal(treadle.load_run(tmp_path).variables(), expected)
    with pytest.warns(TreadleWarning, match=said):
        again = fit(tmp_path, averages, execution)
    assert again.reason == "it was finished before"
    require_equal(again.state.arrays(), expected)
    for folder in (tmp_path / "checkpoints").glob("step-*8"):
        (folder / "manifest.json").unlink()
    with (
        pytest.raises(DirectoryError, match=rf"{FILE}: .*; there is no valid checkpoint of step 8"),
        pytest.warns(TreadleWarning, match="skipped checkpoint"),
    ):
        fit(tmp_path, averages, execution)


def require_equal(found: Any, expected: Any) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path].tobytes() == value.tobytes(), path


@once
def test_a_run_killed_at_any_operation_of_its_end_opens(tmp_path: Path) -> None:
    """Its weights are those of its newest checkpoint or, if it has finished, the final ones."""
    last = f"step-{10:012d}"
    begun = False

    def of_the_end(number: int, changed: str) -> bool:
        nonlocal begun
        begun = begun or f" {last}" in changed
        return begun

    taken = copies(by_epochs, tmp_path / "run", of_the_end, every="10 steps").taken
    final = treadle.load_run(tmp_path / "run").variables()
    kept = treadle.load_run(tmp_path / "run").variables(10)
    assert any(kept[path].tobytes() != value.tobytes() for path, value in final.items())
    finished = 0
    for directory in taken:
        done = bool(read_run(directory)["finished"])
        finished += done
        with warnings.catch_warnings():
            warnings.simplefilter("error", TreadleWarning)
            found = treadle.load_run(directory).variables()
        if done or (directory / "checkpoints" / last).exists():
            # A metric is reset between two checkpoints of the last step.
            wanted = final if done else {**kept, "error/total": found["error/total"]}
            require_equal(found, {**wanted, "error/count": found["error/count"]})
    assert len(taken) > 10 and 1 <= finished < len(taken)
