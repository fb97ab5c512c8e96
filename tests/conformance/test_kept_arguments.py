"""Steps keep the tensors that they pass to Keras: losses, metrics, layers and `keras.ops`."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, ROWS, batches
from executions import EXECUTIONS
from keras import layers, ops
from keras.src.backend.common.masking import set_keras_mask
from own_step import CAPTURED, Steps

import treadle
from treadle.testing import run_steps

BACKEND = keras.config.backend()
ON_TORCH = pytest.mark.skipif(BACKEND != "torch", reason="tensors of other backends never change")
BATCHES = [*zip(*batches(4), strict=True)]
MASK = np.tile([1.0, 0.0], ROWS // 2).astype("float32")


@EXECUTIONS
@pytest.mark.parametrize("metric", [False, True])
def test_a_mask_with_sample_weights_leaves_the_weights(execution: Any, metric: bool) -> None:
    loss = keras.losses.MeanSquaredError()
    mean = keras.metrics.MeanSquaredError(name="squares")

    def step(task: Any, x: Any, y: Any) -> Any:
        weights = ops.ones((ROWS,)) * 3

        def objective() -> Any:
            predicted, target = task.model(x), ops.ones((ROWS, CLASSES))
            set_keras_mask(predicted, ops.convert_to_tensor(MASK) > 0)
            if metric:
                task.mean.update_state(target, predicted, sample_weight=weights)
            return loss(target, predicted, sample_weight=weights)

        found = treadle.minimize(objective, task.model, task.optimizer)
        return {"loss": found, "first": weights[0], "second": weights[1]}

    task = Steps(step, mean=mean)
    found = run_steps(task, BATCHES, treadle.Options(execution=execution), (4,), start=0)
    assert np.all(found.values["first"] == 3) and np.all(found.values["second"] == 3)
    if BACKEND == "torch" and execution == "auto":
        assert found.plan == CAPTURED


def arguments() -> list[tuple[Any, ...]]:
    """Arguments that many functions take: floats, integers, booleans, images, boxes."""
    rng = np.random.default_rng(0)
    floats = [rng.uniform(0.1, 0.9, size=(4, 4)).astype("float32") for _ in range(3)]
    image = rng.uniform(0.1, 0.9, size=(2, 6, 6, 3)).astype("float32")
    whole, flags = np.arange(16, dtype="int32").reshape(4, 4) % 4, floats[0] > 0.5
    return [
        (floats[0],),
        (floats[0], floats[1]),
        (floats[0], floats[1], floats[2]),
        (whole,),
        (whole, whole + 1),
        (floats[0], whole),
        (flags,),
        (flags, flags),
        (flags, floats[0], floats[1]),
        (image,),
        (image, image[..., :1]),
        (floats[0], 1),
        (floats[0], (0, 1)),
        (floats[0], [[0, 1], [2, 3]], floats[1][0, :2]),
        (floats[0], [1, 1], floats[1][:2, :2]),
        ([floats[0], floats[1]],),
        (image, (4, 4)),
        (image, 1.0),
    ]


def tensors_of(given: Any) -> list[Any]:
    return [x for x in keras.tree.flatten(given) if keras.ops.is_tensor(x)]


def changed(call: Callable[..., Any], given: Any, named: Any = None) -> list[Any] | None:
    """Return the tensors that a call changes; None if it does not take them."""
    given, named = keras.tree.map_structure(
        lambda x: ops.convert_to_tensor(x) if isinstance(x, np.ndarray) else x, (given, named or {})
    )
    tensors = tensors_of((given, named))
    before = [np.array(ops.convert_to_numpy(x)) for x in tensors]
    try:
        call(*given, **named)
    except Exception:
        return None
    return [
        x
        for x, old in zip(tensors, before, strict=True)
        if not np.array_equal(ops.convert_to_numpy(x), old)
    ]


def functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in (ops, keras.activations, keras.losses, keras.metrics):
        for name, thing in vars(module).items():
            if not name.startswith("_") and callable(thing) and not inspect.isclass(thing):
                yield f"{module.__name__}.{name}", thing


def objects() -> Iterator[tuple[str, Callable[..., Any], Any]]:
    """Losses, metrics and layers that take tensors, and arguments of theirs."""
    rng = np.random.default_rng(0)
    y, z = (rng.uniform(0.1, 0.9, size=(4, 3)).astype("float32") for _ in range(2))
    weights = np.arange(1, 5, dtype="float32")

    def masked(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(y: Any, z: Any, sample_weight: Any) -> Any:
            mask = ops.convert_to_tensor(np.tile([True, False], len(weights) // 2))
            set_keras_mask(z, mask)
            return call(y, z, sample_weight=sample_weight)

        return run

    for base, call in ((keras.losses, "__call__"), (keras.metrics, "update_state")):
        for name, kind in vars(base).items():
            if inspect.isclass(kind) and hasattr(kind, call):
                try:
                    made = kind()
                except TypeError:
                    continue
                for around in (masked, lambda call: call):
                    yield name, around(getattr(made, call)), ((y, z), {"sample_weight": weights})
    images = rng.uniform(0.1, 0.9, size=(2, 6, 6, 3)).astype("float32")
    for name, kind in vars(layers).items():
        if inspect.isclass(kind) and issubclass(kind, layers.Layer):
            for made in (lambda kind=kind: kind(), lambda kind=kind: kind(0.5)):
                try:
                    layer = made()
                    layer(ops.convert_to_tensor(images))
                except Exception:
                    continue
                yield name, lambda x, layer=layer: layer(x, training=True), ((images,), {})
                break


@pytest.mark.long
@ON_TORCH
def test_no_function_of_keras_changes_its_arguments() -> None:
    """A sweep: whatever function and object of Keras takes some of many arguments."""
    found: dict[str, set[str]] = {"changed": set(), "called": set()}

    def note(name: str, result: Any) -> None:
        if result is not None:
            found["called"].add(name)
        if result:
            found["changed"].add(name)

    from treadle.backends.torch.in_place import kept_arguments

    with kept_arguments():
        for name, call in functions():
            for given in arguments():
                note(name, changed(call, given))
        for name, call, (given, named) in objects():
            note(name, changed(call, given, named))
    print(len(found["called"]), found["changed"])
    if keras.__version__.startswith("3.9."):  # writes into its input, and 3.10 into a copy
        found["changed"].discard("keras.api.ops.scatter_update")
    assert not found["changed"] and len(found["called"]) > 300
