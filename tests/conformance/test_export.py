"""Exported files: each format on each backend, and what is refused or fails."""

import errno
import re
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
from executions import long_to_compile, once, some
from keras import layers, ops
from keras_versions import needs_keras

import treadle
from treadle.errors import ConfigurationError, DataError, ExportError, StepError, TreadleWarning
from treadle.exporting import exported, formats
from treadle.exporting.comparing import largest_difference
from treadle.exporting.formats import FORMATS, check_free, missing_runtime
from treadle.exporting.prediction import by_name
from treadle.exporting.runtimes import Loaded, order_of

BACKEND = keras.config.backend()
ROOT = Path(__file__).parents[2]
RNG = np.random.default_rng(0)


class Likely(treadle.Task):
    """Two inputs by name, scaled pixels, probabilities; the model normalizes and drops units."""

    def __init__(self, optimizer=None):
        self.pixels = keras.Sequential(
            [keras.Input((4, 4)), layers.Flatten(), layers.Dense(8), layers.BatchNormalization()]
        )
        self.ages = keras.Sequential([keras.Input((2,)), layers.Dense(8), layers.Dropout(0.5)])
        self.head = keras.Sequential([keras.Input((8,)), layers.Dense(3)])
        self.optimizer = optimizer or keras.optimizers.SGD(0.1)

    def logits(self, x, training):
        both = self.pixels(x["image"] / 255, training=training)
        return self.head(both + self.ages(x["age"], training=training))

    def train_step(self, batch):
        x, y = batch

        def objective():
            return ops.mean((self.logits(x, True) - ops.one_hot(y, 3)) ** 2)

        models = [self.pixels, self.ages, self.head]
        weights = [v for model in models for v in model.trainable_variables]
        return {"loss": treadle.minimize(objective, weights, self.optimizer)}

    def predict_step(self, batch):
        x, _ = batch
        return {"probabilities": ops.softmax(self.logits(x, False)), "norm": self.logits(x, False)}


BATCH = (
    {"image": RNG.integers(0, 255, (6, 4, 4)).astype("float32"), "age": RNG.normal(size=(6, 2))},
    np.arange(6) % 3,
)


def line(**attributes):
    """A task with a small model, and other attributes or methods."""

    class Line(treadle.Task):
        def __init__(self):
            self.model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
            for name, value in state.items():
                setattr(self, name, value)

    state = {k: v for k, v in attributes.items() if not callable(v) or isinstance(v, keras.Layer)}
    for name in attributes.keys() - state.keys():
        setattr(Line, name, attributes[name])
    return Line()


X = RNG.normal(size=(4, 2)).astype("float32")


def skip_if_not_installed(form):
    if first := {"torch": "3.15", "litert": "3.13", "openvino": "3.11"}.get(form.name):
        needs_keras(first, f"writing the format {form.name}")
    if BACKEND == "torch" and form.name == "onnx" and find_spec("onnxscript") is None:
        needs_keras("3.14", "writing ONNX on PyTorch without onnxscript")
    for package in form.writers.get(BACKEND, ()):
        if find_spec(package) is None:
            pytest.skip(f"writing {form.name} on {BACKEND} needs {package}")
    if missing := missing_runtime(form):
        pytest.skip(f"the file cannot be compared: {missing}")


@pytest.mark.parametrize("name", some(FORMATS))
def test_each_format_computes_what_predict_computes_or_is_refused(name, tmp_path):
    form, path = FORMATS[name], tmp_path / f"likely{FORMATS[name].suffix}"
    if BACKEND not in form.writers:
        with pytest.raises(ConfigurationError) as refused:
            treadle.export(Likely(), path, name, batch=BATCH)
        start = f"the format {name} cannot be written on the backend {BACKEND}: "
        assert str(refused.value).startswith(start)
        assert "use " in str(refused.value)
        assert not any(tmp_path.iterdir())
        return
    skip_if_not_installed(form)
    found = treadle.export(Likely(), path, name, batch=BATCH)
    assert found.difference is not None
    assert found.difference <= 1e-6
    assert found.inputs == {"age": "float32 (None, 2)", "image": "float32 (None, 4, 4)"}
    assert found.outputs == {"norm": "float32 (None, 3)", "probabilities": "float32 (None, 3)"}
    assert found.runtime
    assert found.bytes > 100
    files = {file.name for file in tmp_path.iterdir()}
    assert files == {path.name} | ({"likely.bin"} if name == "openvino" else set())


def test_a_default_predict_step_takes_the_inputs_without_labels(tmp_path):
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    task = treadle.Supervised(model, "mse", "sgd")
    found = treadle.export(task, tmp_path / "line.keras", batch=(X, X[:, :1]))
    assert found.inputs == {"inputs": "float32 (None, 2)"}
    found = treadle.export(task, tmp_path / "plain.keras", batch=X)
    assert found.inputs == {"inputs": "float32 (None, 2)"}


def test_an_absent_part_of_a_batch_stays_absent(tmp_path):
    def with_mask(self, batch):
        x, mask = batch
        return self.model(x) if mask is None else self.model(x) * mask

    found = treadle.export(line(predict_step=with_mask), tmp_path / "a.keras", batch=(X, None))
    assert found.inputs == {"inputs": "float32 (None, 2)"}
    mask = np.ones((4, 1), "float32")
    found = treadle.export(line(predict_step=with_mask), tmp_path / "b.keras", batch=(X, mask))
    assert list(found.inputs) == ["inputs_0", "inputs_1"]


class Pair(NamedTuple):
    z: Any
    a: Any


@dataclass
class Scores:
    z: Any
    a: Any


# By name: outputs of two arrays, and their names in a file.
NESTED = {
    "dict of dicts": (lambda x, y: {"z": {"x": x}, "a": {"y": y}}, ["z_x", "a_y"]),
    "list in a dict": (lambda x, y: {"z": [x, y]}, ["z_0", "z_1"]),
    "nested tuple": (lambda x, y: (x, (y,)), ["0", "1_0"]),
    "named tuple": (Pair, ["z", "a"]),
    "dataclass": (Scores, ["z", "a"]),
    "None": (lambda x, y: {"z": x, "a": y, "mask": None}, ["z", "a"]),
    "whole numbers as keys": (lambda x, y: {1: x, 0: y}, ["1", "0"]),
    "names that collide": (lambda x, y: {"z_a": x, "z": {"a": y}}, ["z_a_0", "z_a_1"]),
    "plain": (lambda x, y: {"z": x, "a": y}, ["z", "a"]),
}
FEW = ("list in a dict", "dataclass")


@pytest.mark.parametrize("name", [name for name in FORMATS if BACKEND in FORMATS[name].writers])
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in FEW else pytest.mark.long) for k in NESTED]
)
def test_nested_outputs_are_named_by_their_paths(kind, name, tmp_path):
    skip_if_not_installed(FORMATS[name])
    made, names = NESTED[kind]
    task = line(predict_step=lambda self, x: made(self.model(x), self.model(-x)))
    path = tmp_path / f"line{FORMATS[name].suffix}"
    found = treadle.export(task, path, name, batch=X)
    assert list(found.outputs) == names
    assert found.difference <= 1e-6
    if name == "savedmodel" and kind != "nested tuple":
        import tensorflow as tf

        served = tf.saved_model.load(str(path)).signatures["serve"]
        assert sorted(served.structured_outputs) == sorted(names)


def test_pairs_of_an_operation_have_the_names_of_predict(tmp_path):
    """TensorFlow returns a named tuple, and its symbolic tensors a list."""
    task = line(predict_step=lambda self, x: {"top": ops.top_k(x, 2)})
    found = treadle.export(task, tmp_path / "line.keras", batch=X)
    parts = ("values", "indices") if BACKEND == "tensorflow" else ("0", "1")
    assert list(found.outputs) == [f"top_{part}" for part in parts]
    assert found.difference == 0


@once
def test_outputs_that_exporters_take_are_left_as_they_are():
    plain = [1, (1, 2), [1, 2], {"a": 1, "b": 2}]
    assert [by_name(outputs) for outputs in plain] == plain
    nested = {"a": [1, {"b": 2}]}
    assert by_name(nested, nested=True) == nested
    assert by_name(nested) == {"a_0": 1, "a_1_b": 2}
    assert by_name({"a": [1, None]}, nested=True) == {"a_0": 1}
    collide = {"a": {"b": 1}, "a_b": 2, "a_b_0": 3}
    assert by_name(collide) == {"a_b_0_0": 1, "a_b_1": 2, "a_b_0_2": 3}


def test_keys_that_are_no_identifiers_name_inputs(tmp_path):
    batch = {"im age/1": X, "im age:1": -2 * X, "b-0": X}

    def predict_step(self, x):
        return self.model(x["im age/1"]) - self.model(x["im age:1"]) + self.model(x["b-0"])

    names = ["keras", "torch" if BACKEND == "torch" else "savedmodel"]
    skip_if_not_installed(FORMATS[names[1]])
    for name in names:
        path = tmp_path / f"line{FORMATS[name].suffix}"
        found = treadle.export(line(predict_step=predict_step), path, name, batch=batch)
        assert list(found.inputs) == ["im_age_1_0", "im_age_1_1", "b_0"]


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tables are TensorFlow's")
def test_a_layer_with_a_table_is_exported(tmp_path):
    needs_keras("3.14", "a SavedModel with a table of a layer")
    task = line(
        lookup=layers.IntegerLookup(vocabulary=[5, 6, 7]),
        predict_step=lambda self, x: self.lookup(x),
    )
    found = treadle.export(task, tmp_path / "line", "savedmodel", batch=np.array([[5, 6], [7, 8]]))
    assert found.difference == 0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="tf2onnx alone makes them inputs")
def test_constants_that_become_inputs_are_named(tmp_path):
    skip_if_not_installed(FORMATS["onnx"])
    task = line(norm=layers.Normalization(), predict_step=lambda self, x: self.model(self.norm(x)))
    task.norm.adapt(X)
    message = r"nothing was written: it has further inputs \(.*\): its writer makes inputs of tens"
    with pytest.raises(ExportError, match=message):
        treadle.export(task, tmp_path / "line.onnx", batch=X)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="other backends give outputs in order")
def test_an_input_and_an_output_of_one_name_have_no_onnx_file(tmp_path):
    skip_if_not_installed(FORMATS["onnx"])
    task = line(predict_step=lambda self, x: {"a": self.model(x["a"])})
    message = "an input and an output of predict_step are both named a, and the format onnx has"
    with pytest.raises(ConfigurationError, match=message):
        treadle.export(task, tmp_path / "line.onnx", batch={"a": X})


@once
def test_inputs_that_a_writer_left_out_are_named():
    with pytest.raises(ValueError, match="it has the inputs a, and not b: its writer has computed"):
        order_of(["a"], ["a", "b"])
    assert order_of(["x_1", "x_2"], ["a", "b"]) == ["x_1", "x_2"]
    assert order_of(["b", "a"], ["a", "b"]) == ["a", "b"]


def test_a_variable_in_no_layer_is_exported(tmp_path):
    task = line(scale=keras.Variable(3.0), predict_step=lambda self, x: self.model(x) * self.scale)
    with pytest.raises(StepError, match="predict_step reads scale, a variable that is in no layer"):
        treadle.export(task, tmp_path / "line.keras", batch=X)
    name = "torch" if BACKEND == "torch" else "savedmodel"
    skip_if_not_installed(FORMATS[name])
    path = tmp_path / f"line{FORMATS[name].suffix}"
    assert treadle.export(task, path, name, batch=X).difference <= 1e-6
    skip_if_not_installed(FORMATS["onnx"])
    assert treadle.export(task, tmp_path / "line.onnx", batch=X).difference <= 1e-6


@long_to_compile
def test_averages_are_exported_on_request_and_weights_are_kept(tmp_path):
    averaging = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5)
    task = Likely(averaging)
    with treadle.Loop(task, console=False) as loop:
        for _ in range(3):
            loop.step(BATCH)
        weights = loop.state.arrays()
        treadle.export(loop, tmp_path / "raw.keras", batch=BATCH)
        treadle.export(loop, tmp_path / "averaged.keras", batch=BATCH, averages=True)
        for path, array in loop.state.arrays().items():
            np.testing.assert_array_equal(array, weights[path], err_msg=path)
    raw = _kernels(tmp_path / "raw.keras")
    averaged = _kernels(tmp_path / "averaged.keras")
    slot = "optimizer/model_variables_moving_average/"
    for name in ("pixels/layers/1/kernel", "ages/layers/0/kernel", "head/layers/0/kernel"):
        kernel, average = weights[name], weights[slot + name]
        assert any(np.array_equal(kernel, found) for found in raw)
        assert any(np.array_equal(average, found) for found in averaged)
        assert not np.array_equal(kernel, average)


def _kernels(path):
    return [ops.convert_to_numpy(v) for v in keras.saving.load_model(path).weights]


def test_averages_that_no_optimizer_keeps(tmp_path):
    message = "no optimizer of Likely has averaged weights: it needs use_ema=True, and at least"
    for optimizer in (None, keras.optimizers.SGD(0.5, use_ema=True)):
        with pytest.raises(ConfigurationError, match=message):
            treadle.export(Likely(optimizer), tmp_path / "a.keras", batch=BATCH, averages=True)


def test_half_precision_has_a_larger_tolerance(tmp_path):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        found = treadle.export(Likely(), tmp_path / "likely.keras", batch=BATCH)
    finally:
        keras.config.set_dtype_policy("float32")
    assert found.tolerance == 1e-2
    assert found.difference <= 1e-2
    assert found.outputs["norm"] == "bfloat16 (None, 3)"


@long_to_compile
def test_a_difference_above_the_tolerance_leaves_no_file(tmp_path, monkeypatch):
    load = exported.load

    def changed(*arguments):
        loaded = load(*arguments)
        return Loaded("Slightly Off 1.0", lambda inputs: [x + 0.01 for x in loaded.run(inputs)])

    monkeypatch.setattr(exported, "load", changed)
    with pytest.raises(ExportError) as raised:
        treadle.export(Likely(), tmp_path / "likely.keras", batch=BATCH)
    assert "in Slightly Off 1.0 differ from those of predict by up to 0.01" in str(raised.value)
    assert "above the tolerance of 0.0001, so nothing was written" in str(raised.value)
    assert not any(tmp_path.iterdir())
    treadle.export(Likely(), tmp_path / "likely.keras", batch=BATCH, tolerance=0.02)


def test_a_file_that_fails_in_its_runtime_is_not_kept(tmp_path, monkeypatch):
    def failing(*_):
        raise RuntimeError("there is no such operation")

    monkeypatch.setattr(exported, "load", failing)
    message = "fails in Keras model for a batch of 6, so nothing was written: there is no such op"
    with pytest.raises(ExportError, match=message):
        treadle.export(Likely(), tmp_path / "likely.keras", batch=BATCH)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_not_taken_for_a_fault_of_the_format(tmp_path, monkeypatch):
    def save(model, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keras.Model, "save", save)
    with pytest.raises(ExportError) as raised:
        treadle.export(line(), tmp_path / "line.keras", batch=np.ones((4, 2), "float32"))
    assert str(raised.value) == (
        "the disk is full, so nothing was written: [Errno 28] No space left on device. Free some "
        "space, or choose a path on another disk"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_file_without_its_runtime_is_written_with_a_warning(tmp_path, monkeypatch):
    missing = "other_runtime is not installed: pip install other_runtime"
    monkeypatch.setattr(exported, "missing_runtime", lambda form: missing)
    message = r"likely.keras was not compared with predict: other_runtime is not installed: pip ins"
    with pytest.warns(TreadleWarning, match=message):
        found = treadle.export(Likely(), tmp_path / "likely.keras", batch=BATCH)
    assert found.difference is None
    assert found.path.is_file()


def test_existing_files_are_replaced_on_request_only(tmp_path):
    path = tmp_path / "line.keras"
    path.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"line.keras exists: choose another path, or"):
        treadle.export(line(), path, batch=X)
    assert path.read_text() == "mine"
    treadle.export(line(), path, batch=X, overwrite=True)
    assert path.read_bytes()[:2] == b"PK"
    (tmp_path / "folder.keras").mkdir()
    (tmp_path / "link.keras").symlink_to(path)
    for name in ("folder", "link"):
        with pytest.raises(ConfigurationError, match=r"is not a file in the format keras, so it"):
            treadle.export(line(), tmp_path / f"{name}.keras", batch=X, overwrite=True)


@pytest.mark.skipif(BACKEND == "torch", reason="PyTorch writes no SavedModel")
def test_a_folder_is_replaced_if_it_holds_a_savedmodel(tmp_path):
    skip_if_not_installed(FORMATS["savedmodel"])
    path = tmp_path / "line"
    treadle.export(line(), path, "savedmodel", batch=X)
    (path / "more.txt").write_text("of the earlier one")
    treadle.export(line(), path, "savedmodel", batch=X, overwrite=True)
    assert not (path / "more.txt").exists()
    (path / "saved_model.pb").unlink()
    with pytest.raises(ConfigurationError, match="is not a file in the format savedmodel"):
        treadle.export(line(), path, "savedmodel", batch=X, overwrite=True)
    assert [file.name for file in tmp_path.iterdir()] == ["line"]


def draws(self, x):
    return self.model(x) + keras.random.normal((*ops.shape(x)[:1], 1), seed=self.seed)


def counts(self, x):
    self.count.assign_add(1)
    return self.model(x)


def branches(self, x):
    if ops.max(x) > 0:
        return self.model(x)
    return self.model(-x)


@pytest.mark.parametrize(
    ("attributes", "batch", "error", "message"),
    [
        (
            {"predict_step": draws, "seed": keras.random.SeedGenerator(0)},
            X,
            ConfigurationError,
            r"predict_step of Line draws random numbers \(seed/.*\), which an exported file",
        ),
        (
            {"predict_step": counts, "count": keras.Variable(0.0)},
            X,
            ConfigurationError,
            "predict_step of Line changes count: an exported file holds no state",
        ),
        (
            {"predict_step": lambda self, x: self.model(ops.ones((3, 2)))},
            X,
            ConfigurationError,
            "predict_step of Line uses no part of its batch",
        ),
        (
            {"predict_step": lambda self, batch: self.model(batch[0] + batch[1])},
            (X, X[:1]),
            DataError,
            r"differ in their first dimension \(inputs_0 \(4, 2\), inputs_1 \(1, 2\)\)",
        ),
    ],
)
def test_steps_that_a_file_cannot_repeat(attributes, batch, error, message, tmp_path):
    with pytest.raises(error, match=message):
        treadle.export(line(**attributes), tmp_path / "line.keras", batch=batch)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(BACKEND != "torch", reason="other backends reject the step already in predict")
def test_a_step_that_branches_on_values_has_no_keras_file(tmp_path):
    message = "the format keras needs a predict_step that is made of layers and of functions"
    with pytest.raises(StepError, match=message):
        treadle.export(line(predict_step=branches), tmp_path / "line.keras", batch=X)


@once
@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_each_backend_writes_a_format_or_has_a_reason(form):
    backends = ["jax", "tensorflow", "torch"]
    assert sorted([*form.writers, *form.refused]) == backends
    assert set(form.named) <= set(form.writers)
    # Messages say `pip install NAME` with the imported name.
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    packages = {re.split("[>=[]", x)[0].replace("-", "_") for part in extras.values() for x in part}
    assert {*form.runtimes, *(name for part in form.writers.values() for name in part)} <= packages


@once
def test_arguments_are_checked_before_anything_is_computed(tmp_path):
    def export(path, *arguments, **more):
        return treadle.export(None, tmp_path / path, *arguments, **more)

    cases = {
        r"a\.bin names no format: write format='keras' \(--format\), or an": lambda: export(
            "a.bin"
        ),
        "format='onx': there is no such format. Did you mean": lambda: export("a.onnx", "onx"),
        r"ends with \.onnx, but a file in the format keras ends with": lambda: export(
            "a.onnx", "keras"
        ),
        "tolerance is -1: expected a number of at": lambda: export("a.keras", tolerance=-1),
    }
    for message, call in cases.items():
        with pytest.raises(ConfigurationError, match=message):
            call()


@once
def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    message = (
        r"needs the package onnx on the backend torch, which is not installed: pip install onnx"
    )
    with pytest.raises(ConfigurationError, match=message):
        treadle.export(line(), tmp_path / "line.onnx", batch=X)


@once
def test_weights_in_a_file_of_their_own_replace_no_other_file(tmp_path):
    (tmp_path / "line.bin").write_text("mine")
    with pytest.raises(ConfigurationError, match=r"line.bin exists: choose another path, or repl"):
        check_free(FORMATS["openvino"], tmp_path / "line.xml", overwrite=False)
    check_free(FORMATS["onnx"], tmp_path / "line.onnx", overwrite=False)


@once
def test_differences_of_special_values():
    nan, inf = float("nan"), float("inf")
    same = np.array([nan, inf, -inf, 1.0])
    assert largest_difference([same], [same.copy()], 4) == 0
    for other in ([nan, inf, inf, 1.0], [0.0, inf, -inf, 1.0], [nan, inf, -inf, nan]):
        assert largest_difference([same], [np.array(other)], 4) == inf
    assert largest_difference([np.array([1, 5])], [np.array([1, 4])], 2) == 0.2
    with pytest.raises(ExportError, match=r"returns arrays of shape \(2,\), but predict returns"):
        largest_difference([np.zeros(3)], [np.zeros(2)], 3)
    message = "returns arrays of dtype int32, but predict returns uint8: cast them in predict_step"
    with pytest.raises(ExportError, match=message):
        largest_difference([np.zeros(2, "uint8")], [np.zeros(2, "int32")], 3)


def test_the_example_batch_is_that_of_the_task_s_data(tmp_path):
    rows = treadle.data.from_arrays(X, batch_size=2)
    other = treadle.data.from_arrays(np.ones((2, 5), "float32"), batch_size=2)

    def datasets(**sets):
        return lambda self: treadle.Datasets(**sets)

    for number, sets in enumerate(
        (
            {"train": rows},
            {"train": other, "validation": {"easy": rows}},
            {"train": other, "validation": other, "predict": rows},
        )
    ):
        path = tmp_path / f"{number}.keras"
        found = treadle.export(line(datasets=datasets(**sets)), path)
        assert found.inputs == {"inputs": "float32 (None, 2)"}
    with pytest.raises(ConfigurationError, match="Line has no datasets"):
        treadle.export(line(), Path(tmp_path / "none.keras"))
