"""The private parts of Keras that Treadle uses are there, and are what they were."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from registers import (
    LINKS,
    REGISTERS,
    SOURCES,
    difference,
    missing,
    private_names_used,
)

from treadle.core import internals, keras_internals
from treadle.core.internals import Attribute, Internal
from treadle.errors import BackendError, TreadleWarning

ROOT = Path(__file__).parents[1]
# Private names of packages other than Keras and the frameworks, or public in spite of their name.
OTHERS = {
    "_exit",  # os: documented
    "_getframe",  # sys: documented
    "_trial_id",  # Optuna
    "_make",  # named tuples: documented
    "_to_copy",  # torch.ops.aten: an operator
    "_made_with",  # of a task: set by object.__setattr__
}


def optimizers() -> list[Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.1, use_ema=True)
    optimizer.build(model.trainable_variables)
    return [optimizer]


def functional() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def compiled() -> Any:
    model = functional()
    model.compile(loss="mse")
    return model


def multi() -> Any:
    from keras.src.optimizers.multi_optimizer import MultiOptimizer

    return MultiOptimizer([(keras.optimizers.SGD(0.1), lambda variable: True)])


def normalization() -> Any:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    return layer


EXAMPLES: dict[str, Callable[[], list[Any]]] = {
    "Variable": lambda: [keras.Variable(1.0)],
    "Layer": lambda: [keras.layers.Dense(1)],
    "Optimizer": optimizers,
    "Layer and Optimizer": lambda: [keras.layers.Dense(1), *optimizers()],
    "Functional": lambda: [keras.Model((x := keras.Input((2,))), keras.layers.Dense(1)(x))],
    "Model": lambda: [compiled()],
    "Metric": lambda: [keras.metrics.MeanSquaredError()],
    "MeanMetricWrapper": lambda: [keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error)],
    "AUC": lambda: [keras.metrics.AUC()],
    "TensorBoard": lambda: [keras.callbacks.TensorBoard()],
    "Callback method": lambda: [keras.callbacks.Callback().on_epoch_end],
    "SwapEMAWeights": lambda: [keras.callbacks.SwapEMAWeights()],
    "MultiOptimizer": lambda: [multi()],
    "BatchNormalization": lambda: [normalization()],
}


@pytest.mark.parametrize("name", keras_internals.INTERNALS)
def test_a_private_part_has_the_members_and_parameters_that_its_entry_lists(name: str) -> None:
    assert not difference(keras_internals.INTERNALS[name])


@pytest.mark.parametrize("name", keras_internals.ATTRIBUTES)
def test_objects_have_the_private_attributes_that_are_listed(name: str) -> None:
    attribute = keras_internals.ATTRIBUTES[name]
    assert not missing(name, attribute, EXAMPLES[attribute.owner]())


def test_a_layer_call_sets_the_global_attributes_that_remat_restores() -> None:
    found: dict[str, Any] = {}

    class Inspected(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            for name in ("current_call_ctx", "autocast_scope"):
                found[name] = keras_internals.global_state.get_global_attribute(name)
            return inputs

    Inspected(dtype="mixed_float16")(ops.convert_to_tensor(np.ones((1, 2), "float32")))
    assert hasattr(found["current_call_ctx"], "entry_layer")
    assert found["autocast_scope"] is not None
    assert keras_internals.global_state.get_global_attribute("object_name_uids")


def test_every_entry_links_to_its_source() -> None:
    for register in (keras_internals.INTERNALS, keras_internals.ATTRIBUTES):
        for name, entry in register.items():
            assert entry.reason and entry.upstream.startswith(LINKS), name


def test_the_tested_versions_are_those_that_the_tests_install() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    installed = dict(re.findall(r"^(\w+)==(\d+\.\d+)", constraints, re.MULTILINE))
    assert {name: installed[name] for name in internals.TESTED} == internals.TESTED


def test_only_registers_read_private_modules() -> None:
    private = (
        r"keras\.src\b|tensorflow\.(python|tsl|compiler|core)\b|\btf\.__internal__|"
        r"\btorch\._[a-zC]|torch\.utils\._|jax\._|jax\.(extend|interpreters)\b"
    )
    found = [
        f"{path.relative_to(SOURCES)}:{number}: {line.strip()}"
        for path in SOURCES.rglob("*.py")
        if path.name not in REGISTERS
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if re.search(private, line)
    ]
    assert found == [], "move these to core/keras_internals.py or backends/<name>/patches.py"


def test_registers_are_one_file_for_keras_and_one_for_each_backend() -> None:
    found = [path for name in REGISTERS for path in SOURCES.rglob(name)]
    assert {str(path.relative_to(SOURCES)) for path in found} == {
        "core/keras_internals.py",
        *(f"backends/{name}/patches.py" for name in ("jax", "tensorflow", "torch")),
    }


def test_every_private_attribute_that_is_read_is_listed() -> None:
    listed = {*keras_internals.ATTRIBUTES, *keras_internals.INTERNALS, *OTHERS}
    for name in ("jax", "tensorflow", "torch"):
        # Not imported, as only one backend is: an entry begins with its quoted name.
        text = (SOURCES / "backends" / name / "patches.py").read_text()
        listed |= set(re.findall(r'"(_\w+)"', text))
    unlisted = {name: at for name, at in private_names_used().items() if name not in listed}
    assert unlisted == {}, "add these to ATTRIBUTES in the register of their package"


def test_what_is_missing_is_an_error_that_names_it() -> None:
    message = (
        f"Keras {keras.__version__} has no keras.src.backend.common.gone, which Treadle needs "
        "(for a reason): install a version that it was tested with, keras==3.15.*"
    )
    with pytest.raises(BackendError, match=re.escape(message)):
        Internal("keras.src.backend.common:gone", "for a reason", "").resolve()
    with pytest.raises(BackendError, match=r"has no keras\.src\.gone, which"):
        Internal("keras.src.gone", "for a reason", "").resolve()
    with (
        pytest.raises(BackendError, match=r"has no keras\.src\.layers\.Layer\.gone, which"),
        Internal("keras.src.layers:Layer.gone", "for a reason", "").replaced(None),
    ):
        pass
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        keras_internals.unknown  # noqa: B018


def test_a_change_is_reported_by_name() -> None:
    draw = "keras.src.random.seed_generator:draw_seed"
    assert difference(Internal(draw, "", "", "(seed, other)")) == (
        f"{draw} takes (seed), and Treadle was written for (seed, other): see its uses in Treadle"
    )
    module = Internal("keras.src.random.seed_generator", "", "", members=("draw_seed", "gone"))
    assert difference(module) == (
        "keras.src.random.seed_generator has no gone: see its uses in Treadle"
    )
    attribute = Attribute("Variable", "for a reason", "a link")
    assert missing("_gone", attribute, [keras.Variable(1.0)]) == (
        "Variable has no _gone, which Treadle uses (for a reason): see a link"
    )


def test_a_patch_ends_with_its_context() -> None:
    from keras.src.random import seed_generator

    draw = Internal("keras.src.random.seed_generator:draw_seed", "", "")
    before = seed_generator.draw_seed
    with pytest.raises(ValueError, match="boom"), draw.replaced(print) as original:
        assert seed_generator.draw_seed is print
        assert original is before
        raise ValueError("boom")
    assert seed_generator.draw_seed is before


def test_patches_of_two_threads_end_in_any_order():
    draw = Internal("keras.src.backend.common.backend_utils:canonicalize_axis", "for a test", "")
    before, first, second = draw.resolve(), ExitStack(), ExitStack()
    first.enter_context(draw.replaced(min))
    second.enter_context(draw.replaced(max))
    first.close()
    assert draw.resolve() is max
    second.close()
    assert draw.resolve() is before


def test_a_newer_version_gives_one_warning(recwarn: pytest.WarningsRecorder) -> None:
    message = "Keras 3.99.0 is newer than the versions that Treadle was tested with (up to 3.15)"
    with pytest.warns(TreadleWarning, match=re.escape(message)):
        keras_internals.warn_if_untested("3.99.0")
    with pytest.warns(TreadleWarning, match=r"Keras 3\.16rc1 is newer"):
        keras_internals.warn_if_untested("3.16rc1")
    keras_internals.warn_if_untested(keras.__version__)
    keras_internals.warn_if_untested("3.14.2")
    assert len(recwarn) == 0
