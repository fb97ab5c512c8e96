"""What the hook TensorBoard writes, read back; TensorBoard's own code checks the checksums."""

import struct
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import some

import treadle
from tests.dying import Dying, Saving
from treadle import data
from treadle.errors import ConfigurationError
from treadle.hooks import TensorBoard

pytest.importorskip("tensorboard")

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

ROWS, BATCH = 40, 8
OPTIONS = treadle.Options(jit=False)  # XLA on TensorFlow would take most of the time


class Classify(treadle.Task):
    def __init__(self, units: int = 6, rate: float = 0.05) -> None:
        layers = [keras.layers.Dense(units, "relu"), keras.layers.Dense(2)]
        self.model = keras.Sequential([keras.Input((4,)), *layers])
        self.optimizer = keras.optimizers.SGD(rate)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def loss(self, y: Any, logits: Any) -> Any:
        losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        return keras.ops.mean(losses)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            logits = self.model(x, training=True)
            return self.loss(y, logits), logits

        loss, logits = treadle.minimize(objective, self.model, self.optimizer)
        self.accuracy.update_state(y, logits)
        return {"loss": loss, "doubled": 2 * loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": self.loss(y, self.model(x))}


class Telling(treadle.Hook):
    def record(self, loop: Any, record: Any) -> None:
        if record.kind == "epoch":
            loop.log({"note": f"epoch {record.progress.epoch}", "mine": 3})


def source(batch_size: int = BATCH) -> Any:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
    return data.from_arrays(x, (x[:, 0] > 0).astype("int32"), batch_size=batch_size)


def train(directory: Any, hooks: list[Any], epochs: int = 3, **how: Any) -> treadle.Loop:
    keras.utils.set_random_seed(0)
    with treadle.Loop(Classify(), directory, hooks, OPTIONS, console=False) as loop:
        loop.fit(source(), source(20), epochs=epochs, **how)
    return loop


def events(folder: Path) -> list[Any]:
    """All events of a folder, in the order in which TensorBoard reads them."""
    found: list[Any] = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        rest = path.read_bytes()
        while rest:
            length, check = struct.unpack("<QI", rest[:12])
            content, (end,) = rest[12 : 12 + length], struct.unpack("<I", rest[12 + length :][:4])
            assert check == masked_crc32c(rest[:8]) and end == masked_crc32c(content)
            found.append(Event.FromString(content))
            rest = rest[16 + length :]
    return found


def scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every number by tag and step; no step may be there twice."""
    found: dict[str, dict[int, float]] = {}
    for event in events(folder):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                of = found.setdefault(value.tag, {})
                assert event.step not in of, (value.tag, event.step)
                of[event.step] = value.simple_value
    return found


def hyper_parameters(folder: Path) -> list[bytes]:
    """The content of every value of the page HParams."""
    about = [v.metadata.plugin_data for event in events(folder) for v in event.summary.value]
    return [data.content for data in about if data.plugin_name == "hparams"]


def test_a_run_is_one_run_and_one_below_it_for_validation(tmp_path: Path) -> None:
    def runs(directory: Path) -> list[str]:
        root = directory / "tensorboard"
        found = {file.parent.relative_to(root) for file in root.rglob("events.out.*")}
        assert all(scalars(root / run) for run in found)  # none is an empty page
        return sorted(map(str, found))

    train(tmp_path / "both", [TensorBoard()], epochs=1)
    assert runs(tmp_path / "both") == [".", "validation"]
    assert len(hyper_parameters(tmp_path / "both" / "tensorboard")) == 1
    with treadle.Loop(Classify(), tmp_path / "one", [TensorBoard()], console=False) as loop:
        loop.fit(source(), epochs=1)
    assert runs(tmp_path / "one") == ["."]


def test_numbers(tmp_path: Path) -> None:
    loop = train(tmp_path, [TensorBoard(), Telling()], validate_every="5 steps")
    found = scalars(tmp_path / "tensorboard")
    assert [*found["steps/loss"]] == list(range(1, 16))
    for name in ("loss", "doubled"):
        wanted = loop.history.steps(name)
        np.testing.assert_array_equal([*found[f"steps/{name}"].values()], wanted.astype("f4"))
    assert [*found["loss"]] == [*found["accuracy"]] == [5, 10, 15]
    np.testing.assert_allclose([*found["loss"].values()][-1], loop.history.epochs[-1]["loss"])
    assert [*found["mine"].values()] == [3, 3, 3]
    assert set(found["learning_rate"].values()) == {np.float32(0.05)}
    assert {5, 10, 15} <= {*found["learning_rate"]}
    validated = scalars(tmp_path / "tensorboard" / "validation")
    assert [*validated] == ["loss"] and [*validated["loss"]] == [5, 10, 15]
    np.testing.assert_allclose(
        [*validated["loss"].values()][-1], loop.history.epochs[-1]["val_loss"]
    )


def test_texts_pictures_histograms_and_hyper_parameters(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    hook = TensorBoard(histograms="4 steps")
    loop = train(tmp_path, [hook, Telling()], epochs=2)
    folder = tmp_path / "tensorboard"
    texts, histograms = [], []
    for event in events(folder):
        for value in event.summary.value:
            plugin = value.metadata.plugin_data.plugin_name
            if plugin == "text":
                texts.append((event.step, value.tag, value.tensor.string_val[0]))
            if plugin == "histograms":
                shape = [dim.size for dim in value.tensor.tensor_shape.dim]
                rows = np.frombuffer(value.tensor.tensor_content, "<f8").reshape(shape)
                histograms.append((event.step, value.tag, rows))
    assert texts == [(5, "note", b"epoch 0"), (10, "note", b"epoch 1")]
    assert {step for step, _, _ in histograms} == {4, 8}
    names = [f"model/layers/{i}/{name}" for i in (0, 1) for name in ("kernel", "bias")]
    assert {tag for _, tag, _ in histograms} == set(names)
    sizes = {tag: rows[:, 2].sum() for _, tag, rows in histograms}
    assert [sizes[name] for name in names] == [24, 6, 12, 2]
    (content,) = hyper_parameters(folder)
    settings = HParamsPluginData.FromString(content).session_start_info.hparams
    assert settings["settings.units"].number_value == 6
    assert settings["backend"].string_value == keras.config.backend()
    assert loop.progress.step == 10


def test_a_picture(tmp_path: Path) -> None:
    picture = treadle.Image(np.eye(3)[:2])
    showing = treadle.at("1 epoch", lambda loop: {"samples": picture})
    train(tmp_path, [TensorBoard(), showing], epochs=1)
    values = [v for e in events(tmp_path / "tensorboard") for v in e.summary.value]
    (image,) = [value.image for value in values if value.tag == "samples"]
    assert (image.height, image.width, image.colorspace) == (2, 3, 1)
    assert image.encoded_image_string == picture.png()


@pytest.mark.parametrize("at", some([3, 8, 12]))
def test_no_step_is_there_twice_after_a_resume(tmp_path: Path, at: int) -> None:
    def hooks() -> list[Any]:
        board = TensorBoard(histograms="1 epoch")
        return [board, Telling(), Saving("5 steps")]

    with pytest.raises(OSError, match="killed"):
        train(tmp_path / "cut", [*hooks(), Dying(at)])
    train(tmp_path / "cut", hooks())
    train(tmp_path / "whole", hooks())
    for part in ("", "validation"):
        cut, whole = (scalars(tmp_path / run / "tensorboard" / part) for run in ("cut", "whole"))
        rates = [found.pop("learning_rate", {}) for found in (cut, whole)]
        assert {5, 10, 15} & {*rates[0]} == {5, 10, 15} & {*rates[1]}
        assert cut == whole
    starts = [
        event.step
        for event in events(tmp_path / "cut" / "tensorboard")
        if event.HasField("session_log")
    ]
    assert starts == ([] if at == 3 else [at // 5 * 5 + 1])
    assert len(hyper_parameters(tmp_path / "cut" / "tensorboard")) == 1


def test_later_calls_append_to_the_same_event_files(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    with treadle.Loop(Classify(), hooks=[TensorBoard(tmp_path)], console=False) as loop:
        loop.fit(source(), epochs=1)
        loop.fit(source(), epochs=1)
    assert [*scalars(tmp_path)["steps/loss"]] == list(range(1, 11))
    with pytest.raises(ConfigurationError, match="holds events of another run"):
        train(None, [TensorBoard(tmp_path)], epochs=1)


def test_a_run_started_from_scratch_starts_new_event_files(tmp_path: Path) -> None:
    train(tmp_path, [TensorBoard()], epochs=1)
    with treadle.Loop(Classify(), tmp_path, [TensorBoard()], fresh=True, console=False) as loop:
        loop.fit(source(), epochs=1)
    assert [*scalars(tmp_path / "tensorboard")["steps/loss"]] == list(range(1, 6))


def test_without_a_directory_or_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=r"pass TensorBoard\('logs/first'\), or a dir"):
        train(None, [TensorBoard()], epochs=1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install tensorboard$"):
        TensorBoard()
