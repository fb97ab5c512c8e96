"""The private parts of Keras that Treadle uses are there, and are what they were."""

import random
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from registers import REGISTERS, SOURCES, missing, private_names_used

from treadle.core import internals, keras_internals
from treadle.core.internals import Attributes, Internal
from treadle.errors import BackendError, TreadleWarning

ROOT = Path(__file__).parents[2]
# Private names of packages other than Keras and the frameworks, or public in spite of their name.
OTHERS = {
    "_exit",  # os: documented
    "_getframe",  # sys: documented
    "_trial_id",  # Optuna
    "_make",  # named tuples: documented
    # torch.ops.aten: operators, which are types of operations
    *("_to_copy", "_unsafe_view", "_native_batch_norm_legit"),
    *("_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_"),
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


EXAMPLES: dict[str, Callable[[], list[Any]]] = {
    "Variable": lambda: [keras.Variable(1.0)],
    "Layer": lambda: [keras.layers.Dense(1)],
    "Layer with losses": lambda: [keras.layers.Dense(1)],
    "Optimizer": optimizers,
    "Optimizer's settings": optimizers,
    "Optimizer of your own": optimizers,
    "Metric": lambda: [keras.metrics.MeanSquaredError()],
    "Model": lambda: [compiled()],
    "Model's metrics": lambda: [compiled()],
    "TensorBoard": lambda: [keras.callbacks.TensorBoard()],
    "SwapEMAWeights": lambda: [keras.callbacks.SwapEMAWeights()],
}


@pytest.mark.parametrize("name", keras_internals.INTERNALS)
def test_a_private_part_has_the_members_and_parameters_that_its_entry_lists(name: str) -> None:
    assert not keras_internals.INTERNALS[name].missing()


@pytest.mark.parametrize("owner", keras_internals.ATTRIBUTES)
def test_objects_have_the_private_attributes_that_are_listed(owner: str) -> None:
    assert not missing(keras_internals.ATTRIBUTES[owner], EXAMPLES[owner]())


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


def test_the_tested_versions_are_those_that_the_tests_install() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    installed = dict(re.findall(r"^(\w+)==(\d+\.\d+)", constraints, re.MULTILINE))
    assert {name: installed[name] for name in internals.TESTED} == internals.TESTED


def test_only_registers_read_private_modules() -> None:
    private = (
        r"keras\.src\b|tensorflow\.(python|tsl|compiler|core)\b|\btf\.__internal__|"
        r"\btorch\._[a-zC]|torch\.utils\._|jax\._(?!_)|jax\.(extend|interpreters)\b"
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
    listed = {*keras_internals.INTERNALS, *OTHERS}
    listed.update(*(entry.names for entry in keras_internals.ATTRIBUTES.values()))
    for name in ("jax", "tensorflow", "torch"):
        # Not imported, as only one backend is.
        text = (SOURCES / "backends" / name / "patches.py").read_text()
        listed |= set(re.findall(r'"(_\w+)"', text))
    unlisted = {name: at for name, at in private_names_used().items() if name not in listed}
    assert unlisted == {}, "add these to ATTRIBUTES in the register of their package"


def test_what_is_missing_is_an_error_that_names_it() -> None:
    message = (
        f"Keras {keras.__version__} has no keras.src.backend.common.gone, which Treadle needs "
        "(for a reason): install a version that Treadle was tested with, keras==3.15.*"
    )
    gone = Internal(("keras.src.backend.common:gone",), "for a reason")
    for use in (gone.resolve, gone.get, lambda: gone.replaced(None).__enter__()):
        with pytest.raises(BackendError, match=re.escape(message)):
            use()
    with pytest.raises(BackendError, match=r"has no keras\.src\.gone, which"):
        Internal(("keras.src.gone",), "for a reason").resolve()
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        keras_internals.unknown  # noqa: B018


def test_what_is_lost_without_a_part_that_is_not_needed_is_said_once(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(internals, "switched_off", {})
    gone = Internal(("keras.src.gone",), "for a reason", loses="speed", lost="it is slow")
    sentence = f"Keras {keras.__version__} has no keras.src.gone, so it is slow"
    assert gone.get() is None and gone.get() is None
    with gone.replaced(print) as original, internals.wrapped({gone: print}):
        assert original is None
    assert [str(x.message) for x in recwarn.list] == [sentence] == list(internals.switched_off)
    with (
        pytest.raises(BackendError, match=re.escape(f"{sentence}: install a version that")),
        internals.wrapped({gone: print}, required=True),
    ):
        pass


def test_a_seed_that_keras_does_not_keep_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "switched_off", {})
    monkeypatch.setattr(keras, "__version__", "3.9.2")
    expected = (
        "Keras 3.9.2 does not keep the seed of keras.utils.set_random_seed, so the order of "
        "shuffled data does not depend on it: use treadle.setup(seed=…)"
    )
    with pytest.warns(TreadleWarning, match=re.escape(expected)):
        assert keras_internals.random_seed() is None
    assert list(internals.switched_off) == [expected]
    monkeypatch.setattr(keras, "__version__", "3.10.0")
    assert keras_internals.random_seed() is None


def test_the_classes_that_compile_uses_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_classes: Any = keras_internals.compiled_classes.__wrapped__
    names = keras_internals.global_state.get_global_attribute("object_name_uids") or {}
    before = dict(names), random.getstate()
    assert all(isinstance(kind, type) for kind in compiled_classes())
    assert (dict(names), random.getstate()) == before
    message = (
        f"Keras {keras.__version__} has no Model._compile_loss, so treadle.Supervised cannot be "
        "used: install a version that Treadle was tested with, keras==3.15.*"
    )
    empty = SimpleNamespace(compile=lambda *_, **__: None)
    monkeypatch.setattr(keras, "Sequential", lambda name: empty)
    with pytest.raises(BackendError, match=re.escape(message)):
        compiled_classes()


def test_a_part_with_other_parameters_or_members_is_missing() -> None:
    draw = "keras.src.random.seed_generator:draw_seed"
    begin = f"Keras {keras.__version__} has"
    entry = Internal((draw,), "", ("(seed, other)",), loses="speed", lost="it is slow")
    assert entry.missing() == (
        f"{begin} keras.src.random.seed_generator.draw_seed(seed) with other parameters, so it is "
        "slow"
    )
    assert not Internal((draw,), "", ("(seed, other)", "(seed)")).missing()
    module = Internal(("keras.src.random.seed_generator",), "why", members=("draw_seed", "gone"))
    assert module.missing() == (
        f"{begin} no keras.src.random.seed_generator.gone, which Treadle needs (why)"
    )
    entry = Attributes(("_value", "_gone"), "keras.src.backend", "for a reason")
    assert missing(entry, [keras.Variable(1.0)]) == (
        "Variable has no _gone, which Treadle uses (for a reason): see keras.src.backend"
    )


def test_the_newest_place_of_a_part_that_exists_is_used() -> None:
    places = ("keras.src.newer:gone", "keras.src.random.seed_generator:draw_seed")
    assert Internal(places, "").resolve() is keras_internals.seed_generator.draw_seed


def test_a_patch_ends_with_its_context() -> None:
    from keras.src.random import seed_generator

    draw = Internal(("keras.src.random.seed_generator:draw_seed",), "")
    before = seed_generator.draw_seed
    with pytest.raises(ValueError, match="boom"), draw.replaced(print) as original:
        assert seed_generator.draw_seed is print
        assert original is before
        raise ValueError("boom")
    assert seed_generator.draw_seed is before


def test_patches_of_two_threads_end_in_any_order():
    draw = Internal(("keras.src.backend.common.backend_utils:canonicalize_axis",), "for a test")
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
