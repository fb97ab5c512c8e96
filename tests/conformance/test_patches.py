"""The private parts of a framework that Treadle uses are there, and are what they were."""

import importlib
import warnings
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile
from loops import same
from registers import missing

import treadle
from treadle.core import float64, internals, keras_internals
from treadle.errors import BackendError

BACKEND = keras.config.backend()
INSTALL = r"install a version that Treadle was tested with, keras==3\.15"
patches: Any = importlib.import_module(f"treadle.backends.{BACKEND}.patches")


def layer() -> list[Any]:
    made = keras.layers.Dense(1)
    made.build((None, 2))
    return [made]


def of_torch() -> dict[str, Callable[[], list[Any]]]:
    import torch

    def collected() -> list[Any]:
        for made in (layers := layer()):
            made.torch_params  # noqa: B018 - Keras collects the parameters
        return layers

    return {
        "OpOverload": lambda: [torch.ops.aten.add.Tensor],
        "Tensor": lambda: [torch.zeros(1)],
        "UntypedStorage and Generator": lambda: [
            torch.zeros(1).untyped_storage(),
            torch.Generator(),
        ],
        "Layer": collected,
    }


def of_tensorflow() -> dict[str, Callable[[], list[Any]]]:
    import tensorflow as tf

    data = tf.data.Dataset.range(3)
    function = tf.function(lambda x: x)
    return {
        "ConcreteFunction": lambda: [function.get_concrete_function(tf.TensorSpec([]))],
        "tf.function": lambda: [function],
        "tf.data.Dataset": lambda: [data, data.map(lambda x: x)],
        "tf.data iterator": lambda: [iter(data)],
        "shuffled tf.data.Dataset": lambda: [data.shuffle(2, seed=1)],
        "random tf.data.Dataset": lambda: [tf.data.Dataset.random(seed=1)],
        "parallel tf.data.Dataset": lambda: [
            data.map(lambda x: x, num_parallel_calls=2, deterministic=False)
        ],
    }


def of_jax() -> dict[str, Callable[[], list[Any]]]:
    return {"Variable": lambda: [keras.Variable(1.0)]}


EXAMPLES = {"jax": of_jax, "tensorflow": of_tensorflow, "torch": of_torch}[BACKEND]()


@pytest.mark.parametrize("name", patches.INTERNALS)
def test_a_private_part_has_the_members_and_parameters_that_its_entry_lists(name: str) -> None:
    assert not patches.INTERNALS[name].missing()


@pytest.mark.parametrize("owner", [x for x in patches.ATTRIBUTES if not x.endswith("(prefix)")])
def test_objects_have_the_private_attributes_that_are_listed(owner: str) -> None:
    assert not missing(patches.ATTRIBUTES[owner], EXAMPLES[owner]())


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own attributes")
def test_tensorflow_marks_its_own_attributes_by_a_prefix() -> None:
    import tensorflow as tf

    module = tf.Module()
    module.parts = [tf.Variable(1.0)]
    own = [name for name in vars(module) if name.startswith("_self_")]
    assert own, "attributes of a tf.Module without the prefix _self_ become part of the state"


@pytest.mark.skipif(BACKEND != "tensorflow", reason="TensorFlow's own classes")
def test_what_tensorflow_tracks_has_a_class_of_its_own(tmp_path: Path) -> None:
    import tensorflow as tf

    tf.saved_model.save(tf.Module(), str(tmp_path))
    tracked = [tf.Module(), tf.train.Checkpoint(), tf.random.Generator.from_seed(1)]
    for thing in (*tracked, tf.saved_model.load(str(tmp_path))):
        assert isinstance(thing, patches.AutoTrackable)
    for thing in (object(), keras.losses.MeanSquaredError(), tf.constant(1)):
        assert not isinstance(thing, patches.AutoTrackable)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="functions of TensorFlow")
def test_optional_features_of_a_function_are_found() -> None:
    import tensorflow as tf

    feature = tf.autograph.experimental.Feature.EQUALITY_OPERATORS
    for given, expected in ((None, ()), (feature, (feature,)), ((feature,), (feature,))):
        function = tf.function(lambda: 1, experimental_autograph_options=given)
        assert patches._features(function) == expected


@pytest.mark.skipif(BACKEND != "tensorflow", reason="files of TensorFlow's profiler")
def test_a_profile_is_read_as_tensorflow_reads_it(tmp_path: Path) -> None:
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    from treadle.backends.tensorflow.profile import spans

    with tf.profiler.experimental.Profile(str(tmp_path)):
        tf.function(lambda x: x @ x + 1.0)(tf.ones((4, 4)))
    data = next(tmp_path.rglob("*.xplane.pb")).read_bytes()
    expected = [
        (
            plane.name,
            line.display_name or line.name or str(line.id),
            about.display_name or about.name,
            line.timestamp_ns / 1e3 + event.offset_ps / 1e6,
            event.duration_ps / 1e6,
        )
        for plane in xplane_pb2.XSpace.FromString(data).planes
        for line in plane.lines
        for event in line.events
        for about in [plane.event_metadata[event.metadata_id]]
    ]
    assert [astuple(span) for span in spans(data)] == expected
    assert len(expected) > 3


@pytest.mark.skipif(BACKEND != "torch", reason="the devices of PyTorch")
def test_the_device_of_new_variables_is_that_of_the_scope() -> None:
    assert str(patches.get_device()) == keras.ops.zeros(()).device.type
    with keras.device("meta"):
        assert str(patches.get_device()) == "meta" == keras.ops.zeros(()).device.type
    with keras.device("cpu:0"):
        assert str(patches.get_device()) == "cpu:0"


@pytest.mark.skipif(BACKEND != "tensorflow", reason="patched on TensorFlow")
def test_the_patch_of_moments_is_still_needed() -> None:
    """If this fails, TensorFlow or Keras is repaired: remove the patch."""
    import tensorflow as tf
    from keras.src.backend.tensorflow import nn

    def second_derivative() -> float:
        x = tf.constant([1.0, 2.0, 4.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                variance = nn._compute_moments(x, [0], keepdims=False)[1]
            gradient = inner.gradient(variance, x)
        return float(outer.jacobian(gradient, x)[0, 0])

    right = 2 / 3 * (1 - 1 / 3)
    with patches.true_moments():
        assert second_derivative() == pytest.approx(right)
    assert second_derivative() != pytest.approx(right)


class Own(treadle.Task):
    """A step written by hand, which needs no feature."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.optimizer = keras.optimizers.Adam(0.01)
        self.accuracy = keras.metrics.SparseCategoricalAccuracy()

    def train_step(self, batch: Any) -> dict[str, Any]:
        x, y = batch

        def objective() -> tuple[Any, Any]:
            outputs = self.model(x, training=True)
            return self.loss(y, outputs), outputs

        (loss, outputs), gradients = treadle.gradients(objective, self.model.trainable_variables)
        self.optimizer.apply(gradients, self.model.trainable_variables)
        self.accuracy.update_state(y, outputs)
        return {"loss": loss}


def _model() -> Any:
    return keras.Sequential(
        [
            keras.layers.Embedding(9, 4),
            keras.layers.SimpleRNN(4, return_sequences=True),
            keras.layers.BatchNormalization(),
            keras.layers.LayerNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )


def _data() -> Any:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9, (24, 5)), rng.integers(0, 3, 24)
    return treadle.data.from_arrays(x, y, batch_size=8)


def _train() -> dict[str, Any]:
    """Train a few steps of dropout, recurrence, normalization and embeddings.

    Without XLA, which rounds otherwise than kernels, and is not used where its random numbers would
    differ; and without the LSTM of PyTorch, which rounds otherwise than Keras' cells.
    """
    options = treadle.Options(jit=False) if BACKEND == "tensorflow" else None
    keras.utils.set_random_seed(3)
    loop = treadle.Loop(Own(_model()), console=False, options=options)
    loop.fit(_data(), epochs=2)
    return loop.state.arrays()


ENTRIES = {
    f"{register}: {name}": entry
    for register, known in (("Keras", keras_internals.INTERNALS), (BACKEND, patches.INTERNALS))
    for name, entry in known.items()
    if entry.need != "core"
}


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    return _train()


def _remove(gone: list[Any], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let parts be missing; return the sentences about those that are asked for from now on."""
    found, get, asked = internals._found, internals.Internal.get, []

    def sentence(entry: Any) -> str:
        return f"there is no {entry.places[0]}, so {entry.lost}"

    def missing(entry: Any) -> Any:
        return sentence(entry) if entry in gone else found(entry)

    def noted(entry: Any) -> Any:
        if entry in gone and sentence(entry) not in asked:
            asked.append(sentence(entry))
        return get(entry)

    for name in keras_internals.INTERNALS:  # what was imported before
        monkeypatch.delattr(keras_internals, name, raising=False)
    monkeypatch.setattr(internals, "_found", missing)
    monkeypatch.setattr(internals.Internal, "get", noted)
    monkeypatch.setattr(internals, "switched_off", {})
    return asked


# Parts of Keras one by one on PyTorch, which compiles nothing, and those of each framework on it.
ALONE = [x for x in sorted(ENTRIES) if BACKEND == "torch" or not x.startswith("Keras")]


@long_to_compile
@pytest.mark.parametrize("name", ["all", *(pytest.param(x, marks=pytest.mark.long) for x in ALONE)])
def test_training_gives_the_same_bits_without_a_part_that_is_not_needed(
    name: str, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [entry for key, entry in ENTRIES.items() if name in ("all", key)]
    asked = _remove(gone, monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        actual = _train()
    same(actual, expected)
    said = [str(x.message) for x in caught if str(x.message).startswith("there is no")]
    lacking = [text for text in internals.switched_off if text.startswith("there is no")]
    assert said == asked == lacking  # each once
    assert asked or name != "all"


def test_a_feature_that_is_missing_is_refused_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _remove([*ENTRIES.values()], monkeypatch)
    task = treadle.Supervised(_model(), "sparse_categorical_crossentropy", "adam")
    lost = f"so treadle.Supervised and treadle doctor cannot be used, and .*: {INSTALL}"
    with pytest.raises(BackendError, match=lost):
        treadle.Loop(task, console=False).fit(_data(), epochs=1)
    assert task.optimizer.iterations == 0
    with pytest.raises(BackendError, match=f'so precision="float64" cannot be used: {INSTALL}'):
        float64.switch(not float64.is_on())
    assert keras.config.floatx() == "float32"


@pytest.mark.skipif(BACKEND != "jax", reason="the other backends do without the method")
def test_a_compiled_model_is_refused_if_keras_does_not_build_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _remove([keras_internals.INTERNALS["symbolic_build"]], monkeypatch)
    model = _model()
    model.compile("adam", "sparse_categorical_crossentropy")
    with pytest.raises(BackendError, match=f"so treadle.fit cannot train on JAX: {INSTALL}"):
        treadle.Loop(model, console=False).fit(_data(), epochs=1)
