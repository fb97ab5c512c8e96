"""States of many bytes: memory holds them once, and the results are those of small states."""

import gc
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops
from loops import same

import treadle
from treadle.backends.base import active

X = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
torch_only = pytest.mark.skipif(keras.config.backend() != "torch", reason="only PyTorch proves")
jax_only = pytest.mark.skipif(keras.config.backend() != "jax", reason="only JAX donates")


class Line(treadle.Task):
    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
        self.optimizer = keras.optimizers.Adam(0.1)
        self.error = keras.metrics.MeanAbsoluteError()

    def train_step(self, x: Any) -> Any:
        def objective() -> Any:
            return ops.mean((self.model(x, training=True) - x[:, :3]) ** 2)

        loss = treadle.minimize(objective, self.model, self.optimizer)
        return {"loss": loss}

    def eval_step(self, x: Any) -> Any:
        self.error.update_state(x[:, :3], self.model(x, training=False))
        return {}


@pytest.fixture(params=["fused", "single"])
def options(request: Any) -> treadle.Options:
    return treadle.Options(fused=request.param == "fused")


def donate(monkeypatch: Any) -> None:
    """Make all states large."""
    from treadle.backends.jax import windows

    monkeypatch.setattr(windows, "MOST_BYTES_TWICE", 0)


def trained(options: treadle.Options, *hooks: Any) -> tuple[list[float], Any, Any]:
    keras.utils.set_random_seed(0)
    source = treadle.data.from_arrays(X, batch_size=8)
    with treadle.Loop(Line(), hooks=hooks, options=options, console=False) as loop:
        loop.fit(source, validation=source, epochs=3)
        losses = loop.history.steps("loss").tolist()
        return losses, loop.history["val_error"], loop.view.snapshot()


@jax_only
def test_donated_states_give_the_same_bits(monkeypatch: Any, options: treadle.Options) -> None:
    losses, errors, state = trained(options)
    donate(monkeypatch)
    again = trained(options)
    assert (losses, errors) == again[:2]
    same(again[2], state)


@jax_only
def test_values_that_others_hold_are_not_donated(
    monkeypatch: Any, options: treadle.Options
) -> None:
    donate(monkeypatch)
    held: list[Any] = []

    def hold(loop: Any) -> None:
        kernel = loop.task.model.layers[0].kernel
        held.append((kernel.value, np.array(kernel.value), loop.snapshot(), np.asarray(kernel)))

    expected = trained(options)[0]
    assert trained(options, treadle.every("4 steps", hold))[0] == expected
    assert len(held) > 3
    for value, copy, snapshot, view in held:
        np.testing.assert_array_equal(value, copy)
        np.testing.assert_array_equal(view, copy)
        assert any(np.array_equal(x, copy) for x in snapshot.values())


@jax_only
def test_the_state_before_a_donating_step_is_freed(
    monkeypatch: Any, options: treadle.Options
) -> None:
    import jax

    def kernels() -> list[Any]:
        gc.collect()
        return [x for x in jax.live_arrays() if x.shape == (6, 3)]

    donate(monkeypatch)
    others = kernels()  # of other tests: held, so that none is freed meanwhile
    source = treadle.data.from_arrays(X, batch_size=8)
    with treadle.Loop(Line(), options=options, console=False) as loop:
        for _ in range(3):
            loop.fit(source, epochs=1)
            loop.evaluate(source)
            assert len(kernels()) == len(others) + 3  # the kernel and its two slots


@jax_only
def test_variables_that_share_an_array_are_donated_as_copies(monkeypatch: Any) -> None:
    donate(monkeypatch)

    class Twice(treadle.Task):
        def __init__(self) -> None:
            self.one, self.other = keras.Variable(np.ones(3)), keras.Variable(np.ones(3))
            self.other._value = self.one._value

        def train_step(self, x: Any) -> Any:
            self.one.assign_add(ops.sum(x) * ops.ones(3))
            self.other.assign_add(ops.ones(3))
            return {"sum": ops.sum(self.one)}

    task = Twice()
    with treadle.Loop(task, console=False) as loop:
        loop.fit(treadle.data.from_arrays(np.ones((4, 1)), batch_size=2), epochs=1)
    assert active().read(task.one).tolist() == [5.0] * 3
    assert active().read(task.other).tolist() == [3.0] * 3


@jax_only
def test_the_state_remains_after_an_error_in_python(monkeypatch: Any) -> None:
    donate(monkeypatch)
    import jax

    class Fails(Line):
        def train_step(self, x: Any) -> Any:
            def check(y: Any) -> Any:
                if fails:
                    raise ValueError("no")
                return y

            return super().train_step(jax.pure_callback(check, x, x))

    fails: list[int] = []
    task = Fails()
    source = treadle.data.from_arrays(X, batch_size=8)
    with treadle.Loop(task, console=False) as loop:
        loop.fit(source, epochs=1)
        before = active().read(task.model.layers[0].kernel)
        fails.append(1)
        with pytest.raises(Exception, match="no"):
            loop.fit(source, epochs=1)
    assert np.array_equal(active().read(task.model.layers[0].kernel), before)


@jax_only
def test_a_saved_state_is_freed_when_it_is_on_disk(tmp_path: Any) -> None:
    checkpoint = treadle.hooks.Checkpoint("2 steps")
    with treadle.Loop(Line(), tmp_path, hooks=[checkpoint], console=False) as loop:
        for _ in loop.steps(treadle.data.from_arrays(X, batch_size=8)):
            loop.save()
            assert not checkpoint._buffers
    assert len(checkpoint.saved.steps()) > 1


@torch_only
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Nadam", "SGD"])
@pytest.mark.parametrize("execution", ["eager", "compiled"])
def test_updates_in_parts_give_the_same_bits(monkeypatch: Any, name: str, execution: str) -> None:
    from treadle.backends.torch import patches

    def weights() -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        task = Line()
        task.model = keras.Sequential(
            [keras.Input((6,)), *(keras.layers.Dense(n) for n in (5, 8, 3))]
        )
        task.optimizer = getattr(keras.optimizers, name)(0.01)
        options = treadle.Options(execution=execution)
        with treadle.Loop(task, options=options, console=False) as loop:
            loop.fit(treadle.data.from_arrays(X, batch_size=8), epochs=2)
        return [active().read(v) for v in (*task.model.weights, *task.optimizer.variables)]

    expected = weights()
    monkeypatch.setattr(patches, "PART_BYTES", 150)
    for one, other in zip(weights(), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@torch_only
def test_parts_are_consecutive_and_of_limited_size(monkeypatch: Any) -> None:
    import torch

    from treadle.backends.torch import patches

    monkeypatch.setattr(patches, "PART_BYTES", 40)
    tensors = [torch.zeros(n) for n in (4, 5, 20, 1, 9, 1)]
    parts = [[x.numel() for x in tensors[part]] for part in patches._parts(tensors)]
    assert parts == [[4, 5], [20], [1, 9], [1]]
    assert patches._parts([]) == [slice(None)]
    assert patches._parts([*tensors, torch.zeros(1, dtype=torch.float64)]) == [slice(None)]


@torch_only
def test_a_large_step_runs_as_python_unless_the_options_say_otherwise(monkeypatch: Any) -> None:
    monkeypatch.setattr("treadle.backends.torch.capture.windows.MOST_BYTES", 0)
    source = treadle.data.from_arrays(X, batch_size=8)
    for execution, plan in (("auto", "eager"), ("compiled", "windows of up to 256, captured")):
        options = treadle.Options(execution=execution)
        with treadle.Loop(Line(), options=options, console=False) as loop:
            loop.fit(source, epochs=1)
            assert loop.plan.startswith(plan)
            told = (
                "the step could not be captured: its variables have 0.0 GiB, and to verify the "
                "captured step takes four times that memory"
            )
            assert (told in loop.plan) == (execution == "auto")


@torch_only
@pytest.mark.parametrize("compiler", ["captured", "inductor"])
def test_a_proof_keeps_no_copy_of_the_state_on_the_device(monkeypatch: Any, compiler: str) -> None:
    import torch

    from treadle.backends.torch.capture import trials
    from treadle.backends.torch.patches import INTERNALS

    def kernels() -> list[Any]:
        gc.collect()
        tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
        return [x for x in tensors if x.shape == (6, 3)]

    others = {id(x): x for x in kernels()}  # of other tests
    on_host, copies = trials.on_host, dict[int, Any]()
    found: list[tuple[int, int]] = []  # for each run of the step: tensors on the device and others

    def noted(tensor: Any) -> Any:
        copy = on_host(tensor)
        copies[copy.data_ptr()] = copy
        return copy

    class Counting(Line):
        def train_step(self, x: Any) -> Any:
            places = {x.data_ptr() for x in kernels() if id(x) not in others}
            found.append((len(places - set(copies)), len(places & set(copies))))
            return super().train_step(x)

    monkeypatch.setattr(trials, "on_host", noted)
    options = treadle.Options(compiler=compiler)  # type: ignore[arg-type]
    task = Counting()
    with (
        INTERNALS["standalone_compile"].replaced(lambda graph, inputs, **_: lambda *x: graph(*x)),
        treadle.Loop(task, options=options, console=False) as loop,
    ):
        loop.fit(treadle.data.from_arrays(X, batch_size=8), epochs=1)
        assert f", {compiler}" in loop.plan
    during = [device for device, host in found if host]
    assert len(during) >= (12 if compiler == "inductor" else 4)
    assert max(during) <= 3  # the kernel and its two slots
