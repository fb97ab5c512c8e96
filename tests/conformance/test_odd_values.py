"""Values that a backend cannot hold, or that have no place: they are converted, or named in errors.

They enter with batches and as inputs of `loop.call`, and leave as results of steps.
"""

import os
import re
from pathlib import Path

import keras
import numpy as np
import pytest
from executions import EXECUTIONS, long_to_compile, once
from keras import ops
from keras_versions import needs_keras

import treadle
from treadle.errors import DataError, StepError

JAX = keras.config.backend() == "jax"
LARGE = 2**40 + 3


class Returns(treadle.Task):
    def __init__(self, function):
        self.function = function
        self.count = keras.Variable(0.0)

    def train_step(self, batch):
        self.count.assign_add(1.0)
        return {"value": self.function(batch)}

    def eval_step(self, batch):
        return {"value": self.function(batch)}

    def predict_step(self, batch):
        return self.function(batch)


def loop_of(function, execution="auto", directory=None, **more):
    options = treadle.Options(execution=execution)
    return treadle.Loop(Returns(function), directory, options=options, console=False, **more)


def highest(batch):
    return ops.max(batch["labels"])


def large_batches(kind):
    labels = {"labels": np.array([LARGE, 1], "int64")}
    return treadle.data.from_arrays(labels, batch_size=2) if kind == "arrays" else [labels]


@pytest.mark.parametrize("kind", ["list", "arrays"])
@EXECUTIONS
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_integers_are_exact_or_refused(method, execution, kind):
    function = (lambda batch: batch["labels"]) if method == "predict" else highest
    loop, source = loop_of(function, execution), large_batches(kind)
    call = (lambda: loop.fit(source, epochs=1)) if method == "fit" else None
    call = call or (lambda: getattr(loop, method)(source))
    if JAX:
        expected = (
            f"['labels'] holds {LARGE}, but JAX computes with int32, from -2147483648 to "
            "2147483647: use smaller numbers, such as the indices of the distinct values, or "
            "treadle.setup(precision='float64'), which turns 64-bit types on"
        )
        with pytest.raises(DataError, match=re.escape(expected)):
            call()
        return
    call()
    if method == "fit":
        assert loop.history.steps("value").tolist() == [LARGE]


def test_inputs_of_a_called_function_are_exact_or_refused():
    loop = loop_of(highest)
    if JAX:
        with pytest.raises(DataError, match=rf"the array \[0\] holds {LARGE}, but JAX"):
            loop.call(lambda x: x + 1, np.array([LARGE]))
    else:
        assert loop.call(lambda x: x + 1, np.array([LARGE])).tolist() == [LARGE + 1]
    assert loop.call(lambda x: x + 1, np.array([1.0], ">f4")).tolist() == [2.0]


def test_large_python_integers_are_named():
    def returned():
        loop_of(lambda batch: LARGE).fit([np.ones(2, "float32")], epochs=1)

    def computed():
        loop_of(lambda batch: ops.max(batch) + LARGE).fit([np.ones(2, "float32")], epochs=1)

    if not JAX:
        needs_keras("3.14", "a Python integer above 32 bits in convert_to_tensor")
        returned()
        computed()
        return
    expected = (
        f"train_step returned 'value', the integer {LARGE}, which this backend's integers cannot "
        "hold: return a float, such as float(value)"
    )
    with pytest.raises(StepError, match=re.escape(expected)):
        returned()
    with pytest.raises(OverflowError) as found:
        computed()
    assert any("JAX computes with integers of 32 bits: write" in x for x in found.value.__notes__)


def test_a_complex_value_is_refused_in_the_dry_run():
    loop = loop_of(lambda batch: ops.cast(ops.mean(batch), "complex64"))
    expected = (
        "train_step returned 'value' of dtype complex64: only real numbers can be logged; return "
        "parts of it, for example ops.real(value) and ops.imag(value)"
    )
    with pytest.raises(StepError, match=re.escape(expected)):
        loop.fit([np.ones(2, "float32")], epochs=1)
    assert loop.progress.step == 0


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">i4", ">i2"])
@EXECUTIONS
def test_other_byte_orders_are_converted(execution, dtype):
    x = np.arange(4).astype(dtype)
    loop = loop_of(lambda batch: ops.max(batch), execution)
    loop.fit([x], epochs=1)
    loop.fit(treadle.data.from_arrays(x, batch_size=4), epochs=1)
    assert loop.history.steps("value").tolist() == [3, 3]
    assert loop.evaluate([x]) == {"value": 3}


@once
def test_a_mapped_file_of_another_byte_order_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(4, dtype=">f4"))
    x = np.load(tmp_path / "x.npy", mmap_mode="r")
    expected = (
        "the batch is a memory-mapped file of dtype >f4, whose byte order is not that of this "
        "machine: write it once as float32, or read it into memory with numpy.asarray(x).astype"
    )
    with pytest.raises(DataError, match=re.escape(expected)):
        treadle.data.from_arrays(x, batch_size=2)


@once
def test_predictions_name_an_output_that_cannot_be_joined():
    batches = [np.ones((2, 1), "float32"), np.ones((2, 3), "float32")]
    widths = (
        "predict_step returned the output ['rows'] with shape (2, 3) for a batch, and (2, 1) for "
        "the first one: all batches are joined on the first axis, so only that one may differ. Pad "
        "the outputs to one shape, or reduce them"
    )
    with pytest.raises(StepError, match=re.escape(widths)):
        loop_of(lambda batch: {"rows": batch}).predict(batches)
    found = loop_of(lambda batch: {"rows": batch, "none": None}).predict(batches[:1] * 2)
    assert found["none"] is None and found["rows"].shape == (4, 1)


class Named(Returns):
    """Returns named values from each step."""

    def train_step(self, batch):
        self.count.assign_add(1.0)
        return self.function(batch)[0]

    def eval_step(self, batch):
        return self.function(batch)[1]


@once
def test_two_values_of_one_name_are_refused():
    def fit(trained, validated, validation):
        task = Named(lambda batch: (trained, validated))
        treadle.Loop(task, console=False).fit([np.ones(2)], validation, epochs=1)

    sets = {"a": [np.ones(2)], "a_b": [np.ones(2)]}
    both = {"loss": 1.0, "b_loss": 2.0}
    message = "another validation set returns 'val_a_b_loss', and the set 'a_b' has this name"
    with pytest.raises(StepError, match=message):
        fit({"loss": 1.0}, both, sets)
    with pytest.raises(StepError, match="train_step returned two values with the name '1': rename"):
        fit({1: 1.0, "1": 2.0}, both, None)


@once
def test_a_relative_directory_outlives_a_change_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hooks = [
        treadle.hooks.TensorBoard("events"),
        treadle.hooks.CSV("epochs.csv"),
        treadle.hooks.JSONLines("steps.jsonl"),
        treadle.hooks.Profiler("1:2", "trace"),
        treadle.every("1 step", lambda loop: os.chdir("/")),
    ]
    with loop_of(lambda batch: ops.mean(batch), directory="runs/a", hooks=hooks) as loop:
        loop.fit([np.ones(2, "float32")] * 3, epochs=2)
    assert loop.directory == tmp_path / "runs/a"
    assert (tmp_path / "runs/a/state.safetensors").exists()
    assert {"events", "epochs.csv", "steps.jsonl", "trace"} <= set(os.listdir(tmp_path))


TABLE = Path(__file__).parents[2] / "docs/data.md"
COLUMN = {"tensorflow": 1, "jax": 2, "torch": 3}[keras.config.backend()]


def documented():
    """Return the dtype in the step by the dtype of an array, as the documentation says."""
    section = TABLE.read_text().partition("## Dtypes")[2].partition("\n## ")[0]
    rows = [line.split("|")[1:-1] for line in section.splitlines() if line.startswith("| `")]
    found = {}
    for cells in rows:
        for name in re.findall("`(.*?)`", cells[0]):
            found[name] = name if "same" in cells[COLUMN] else cells[COLUMN].strip(" `")
    return found


@long_to_compile
@EXECUTIONS
@pytest.mark.parametrize("kind", ["list", "arrays"])
def test_the_documentation_lists_the_dtypes_in_steps(kind, execution):
    import ml_dtypes

    documented_dtypes, found = documented(), {}
    assert len(documented_dtypes) == 14

    def noted(batch):
        seen.append(keras.backend.standardize_dtype(batch.dtype))
        return 0.0

    for name in documented_dtypes:
        seen, x = [], np.ones(2, ml_dtypes.bfloat16 if name == "bfloat16" else name)
        source = [x] if kind == "list" else treadle.data.from_arrays(x, batch_size=2)
        try:
            loop_of(noted, execution).fit(source, epochs=1)
        except ValueError as error:
            assert f"Unsupported dtype for PyTorch: {name}" in str(error)
            seen.append("refused")
        (found[name],) = set(seen)
    assert found == documented_dtypes
