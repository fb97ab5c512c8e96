"""Gradients, updates and dead units of layers, and that measuring them does not change training."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import EAGER_ONCE
from keras import layers, ops

import treadle
from treadle import data
from treadle.errors import ConfigurationError, NonFiniteError
from treadle.hooks import Checkpoint, GradientHealth
from treadle.hooks.gradient_health import read_health

rng = np.random.default_rng(0)
X = rng.normal(size=(128, 6)).astype("float32")
Y = np.sin(X.sum(axis=1, keepdims=True))


def source(**how: Any) -> Any:
    return data.from_arrays(X, Y, batch_size=16, **how)


def normal(deviation: float) -> Any:
    return keras.initializers.RandomNormal(stddev=deviation)


class Net(treadle.Task):
    """A network whose step returns the norms that the hook is to measure."""

    def __init__(self) -> None:
        self.model = keras.Sequential(
            [
                keras.Input((6,)),
                layers.Dense(8, activation="relu"),
                layers.BatchNormalization(),
                layers.Dropout(0.3),
                layers.Dense(8),
                layers.ReLU(),
                layers.Dense(1),
            ]
        )
        self.optimizer = keras.optimizers.AdamW(0.01)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return ops.mean((ops.cast(self.model(x, training=True), "float32") - y) ** 2)

        loss, grads = treadle.gradients(objective, self.model)
        norms = treadle.transforms.gradient_norms(grads, self.model)
        clipped, _ = treadle.clip_by_global_norm(grads, 0.1)
        self.optimizer.apply(clipped, self.model.trainable_variables)
        return {"loss": loss, **norms}


def fitted(task: Any, *hooks: Any, steps: int = 26, each: bool = False, **how: Any) -> treadle.Loop:
    with treadle.Loop(task, hooks=hooks, console=False, **how) as loop:
        if each:
            for _ in loop.epochs(2):
                for _ in loop.steps(source()):
                    pass
        else:
            loop.fit(source(), steps=steps)
    return loop


def made(task: Any) -> Any:
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    return task()


def rows(directory: Path) -> dict[int, Any]:
    return {line["step"]: line for line in read_health(directory) if line["kind"] == "health"}


@EAGER_ONCE
def test_training_is_equal_to_the_bit_and_what_is_measured_is_that_of_the_step(
    execution: Any, tmp_path: Path
) -> None:
    options = treadle.Options(execution=execution)
    plain = fitted(made(Net), options=options)
    hook = GradientHealth(every="10 steps")
    loop = fitted(made(Net), hook, options=options, directory=tmp_path / "run")
    for path, value in plain.state.arrays().items():
        assert loop.state.arrays()[path].tobytes() == value.tobytes(), path
    for name in plain.history.step_names:
        assert plain.history.steps(name).tolist() == loop.history.steps(name).tolist()
    found, head = rows(tmp_path / "run"), read_health(tmp_path / "run")[0]
    assert list(found) == [1, 2, 3, 4, 6, 8, 11, 12, 16, 21, 24]
    paths = [layer["path"] for layer in head["layers"]]
    assert paths == [f"model/layers/{i}" for i in (0, 1, 3, 4, 5)]
    assert [layer["class"] for layer in head["layers"]][-2:] == ["ReLU", "Dense"]
    assert [layer["units"] for layer in head["layers"]] == [8, None, None, 8, None]
    for step, row in found.items():
        for i, path in enumerate(paths):
            names = [n for n in loop.history.step_names if n.startswith(f"norm/{path}/")]
            norms = [loop.history.steps(name)[step - 1] for name in names]
            if norms:
                expected = np.sqrt(np.sum(np.square(norms)))
                np.testing.assert_allclose(row["gradient"][i], expected, rtol=1e-4)
            else:
                assert row["gradient"][i] is row["weight"][i] is row["update"][i] is None
        assert 0 <= row["dead"][0] <= 1


def test_updates_and_weights_are_those_of_the_step(tmp_path: Path) -> None:
    before: dict[int, Any] = {}

    def keep(loop: Any) -> None:
        before[loop.progress.step] = np.array(loop.task.model.layers[0].kernel)

    fitted(made(Net), GradientHealth(), treadle.every("1 step", keep), directory=tmp_path / "run")
    row = rows(tmp_path / "run")[4]
    bias_is_small = 0.05
    change = np.linalg.norm(before[4] - before[3])
    assert row["update"][0] == pytest.approx(change, rel=bias_is_small * 3)
    assert row["weight"][0] == pytest.approx(np.linalg.norm(before[3]), rel=bias_is_small)


def test_single_steps_are_measured_and_stay_the_same() -> None:
    plain, hook = fitted(made(Net), each=True), GradientHealth(every="5 steps")
    loop = fitted(made(Net), hook, each=True)
    assert hook.latest is not None and hook.latest.step == 16
    for path, value in plain.state.arrays().items():
        assert loop.state.arrays()[path].tobytes() == value.tobytes(), path


# The rules are the same for all plans: that which takes least time.
FAST = treadle.Options(
    execution="eager" if keras.config.backend() == "torch" else "auto", jit=False
)


class Deep(treadle.Supervised):
    def __init__(self, *hidden: Any, residual: bool = False, rate: float = 0.01) -> None:
        x = inputs = keras.Input((6,))
        x = layers.Dense(16)(x) if residual else x
        for layer in hidden:
            x = x + layer(layers.LayerNormalization()(x)) if residual else layer(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        super().__init__(model, "mse", keras.optimizers.SGD(rate))


def sigmoids() -> Any:
    return Deep(*[layers.Dense(16, activation="sigmoid") for _ in range(8)])


def large_weights(rate: float = 1e-30) -> Any:
    wide = normal(1.5)
    return Deep(*[layers.Dense(16, "relu", kernel_initializer=wide) for _ in range(8)], rate=rate)


def residual() -> Any:
    return Deep(*[layers.Dense(16, "relu") for _ in range(12)], residual=True, rate=1e-3)


def verdicts(task: Any, steps: int = 50) -> dict[str, Any]:
    hook = GradientHealth()
    loop = fitted(made(task), hook, steps=steps, options=FAST)
    warned = [r.values["warning"] for r in loop.history.records if "warning" in r.values]
    assert [v.text for v in hook.verdicts] == [w for w in warned if not w.startswith("no weight")]
    return {v.kind: v for v in hook.verdicts}


@pytest.mark.long
def test_a_resumed_run_writes_the_same_file(tmp_path: Path) -> None:
    def run(name: str, *ends: int) -> tuple[bytes, dict[str, Any]]:
        loop = None
        for steps in ends:
            hooks = GradientHealth(every="10 steps"), Checkpoint(every="7 steps")
            where = {"directory": tmp_path / name, "override": True}
            loop = fitted(made(Net), *hooks, steps=steps, **where)
        assert loop is not None
        return (tmp_path / name / "health.jsonl").read_bytes(), loop.state.arrays()

    whole, resumed = run("whole", 35), run("resumed", 17, 35)
    assert resumed[0] == whole[0]
    assert all(resumed[1][path].tobytes() == x.tobytes() for path, x in whole[1].items())


def test_vanishing_gradients_are_found_within_50_steps() -> None:
    found = verdicts(sigmoids)
    assert list(found) == ["vanishing"] and found["vanishing"].step <= 50
    assert found["vanishing"].layers[:2] == tuple(f"model/layers/{i}" for i in (1, 2))
    assert "vanishing gradients in model/layers/1 (Dense) at step 4: the norm of its" in (
        found["vanishing"].text
    )
    assert "Use residual connections" in found["vanishing"].text


def test_exploding_gradients_are_found_within_50_steps() -> None:
    found = verdicts(large_weights)
    assert "exploding" in found and found["exploding"].step <= 50
    assert "exploding gradients in model/layers/1 (Dense) at step 1" in found["exploding"].text
    assert "times that of its weights" in found["exploding"].text
    assert "clip gradients (clipnorm=1.0 in the optimizer)" in found["exploding"].text


def test_a_run_that_ends_with_nan_has_the_verdict_before() -> None:
    shallow = partial(Deep, layers.Dense(16), rate=50.0)
    for task in (partial(large_weights, 1e-2), shallow):
        hook = GradientHealth()
        with pytest.raises(NonFiniteError):
            fitted(made(task), hook, options=FAST)
        assert {v.kind for v in hook.verdicts} == {"exploding"}


@pytest.mark.long
def test_a_sound_deep_residual_network_gets_no_verdict() -> None:
    assert verdicts(residual) == {}


def dead() -> Any:
    bias = keras.initializers.Constant(-100.0)
    return Deep(layers.Dense(16, "relu"), layers.Dense(16, "relu", bias_initializer=bias))


def test_dead_units_and_the_layers_stuck_before_them_are_found() -> None:
    found = verdicts(dead)
    assert found["dead"].layers == ("model/layers/2",)
    assert "dead units in model/layers/2 (Dense) at step 32: 16 of its 16 units were 0 for all" in (
        found["dead"].text
    )
    assert "use leaky_relu" in found["dead"].text
    assert found["stuck"].layers == ("model/layers/1", "model/layers/2")
    assert "its weights did not change in steps" in found["stuck"].text
    assert "its gradient is exactly 0. The same holds for model/layers/2" in found["stuck"].text


class TwoNets(treadle.Task):
    """A GAN: two optimizers, and accumulated gradients for one of them."""

    def __init__(self) -> None:
        self.generator = keras.Sequential([keras.Input((6,)), layers.Dense(6, "relu")])
        self.critic = keras.Sequential(
            [keras.Input((6,)), layers.Dense(4, "relu"), layers.Dense(1)]
        )
        self.optimizers = {n: keras.optimizers.SGD(0.01) for n in ("generator", "critic")}
        self.accumulator = treadle.Accumulator(steps=2)

    def train_step(self, batch: Any) -> Any:
        x, _ = batch

        def objective() -> Any:
            fake, real = self.critic(self.generator(x)), self.critic(x)
            return {"generator": -ops.mean(fake), "critic": ops.mean(fake) - ops.mean(real)}

        nets = {"generator": self.generator, "critic": self.critic}
        losses, grads = treadle.gradients(objective, nets)
        self.optimizers["generator"].apply(
            grads["generator"], nets["generator"].trainable_variables
        )
        self.accumulator.add(
            grads["critic"],
            lambda mean: self.optimizers["critic"].apply(mean, nets["critic"].trainable_variables),
        )
        return losses


def test_two_optimizers_and_accumulated_gradients(tmp_path: Path) -> None:
    hook = GradientHealth()
    fitted(made(TwoNets), hook, directory=tmp_path / "run")
    head = read_health(tmp_path / "run")[0]
    owners = {layer["path"]: layer["optimizers"] for layer in head["layers"]}
    assert owners == {
        "generator/layers/0": ["optimizers/generator"],
        "critic/layers/0": ["optimizers/critic"],
        "critic/layers/1": ["optimizers/critic"],
    }
    assert "Gradients are accumulated: those of one call of the step" in head["notes"][0]
    found = rows(tmp_path / "run")
    assert found[1]["update"][1] == 0 and found[2]["update"][1] > 0
    assert min(found[1]["gradient"]) > 0 and hook.verdicts == []


class InABranch(Net):
    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def update() -> Any:
            def objective() -> Any:
                return ops.mean((ops.cast(self.model(x, training=True), "float32") - y) ** 2)

            return treadle.minimize(objective, self.model, self.optimizer)

        return {"loss": treadle.cond(treadle.step() % 2 == 0, update, lambda: ops.zeros(()))}


def test_gradients_in_a_branch_are_not_measured_and_named(tmp_path: Path) -> None:
    hook = GradientHealth()
    fitted(made(InABranch), hook, directory=tmp_path / "run")
    head, found = read_health(tmp_path / "run")[0], rows(tmp_path / "run")
    assert (
        "No gradient was measured of model/layers/0, model/layers/1, model/layers/3 and 1 more"
        in (head["notes"][0])
    )
    assert found[1]["update"][0] > 0 and found[2]["update"][0] == 0
    assert found[1]["gradient"][0] is None and hook.verdicts == []


class Half(Net):
    def __init__(self) -> None:
        keras.config.set_dtype_policy("mixed_float16")
        super().__init__()
        self.loss_scale = treadle.LossScale(initial=2.0**120)


def test_steps_that_loss_scaling_undoes_are_marked_and_get_no_verdict(tmp_path: Path) -> None:
    try:
        hook = GradientHealth()
        fitted(made(Half), hook, directory=tmp_path / "run", steps=3)
    finally:
        keras.config.set_dtype_policy("float32")
    found = rows(tmp_path / "run")
    assert found[1]["undone"] and found[1]["update"][0] == 0 and hook.verdicts == []
    assert all(isinstance(json.dumps(row, allow_nan=False), str) for row in found.values())


@pytest.mark.skipif(keras.config.backend() != "jax", reason="a callback of JAX")
def test_a_step_that_calls_python_is_not_measured_and_the_log_has_a_note() -> None:
    import jax

    calls: list[int] = []

    class Calling(Net):
        def train_step(self, batch: Any) -> Any:
            jax.debug.callback(lambda n: calls.append(int(n)), treadle.step())
            return super().train_step(batch)

    hook = GradientHealth()
    loop = fitted(made(Calling), hook)
    assert hook.latest is None and sorted(calls) == list(range(26))
    start = "GradientHealth: the layers were not measured: the compiled step calls"
    assert [note.startswith(start) for note in loop.history["note"]].count(True) == 1


def test_an_interval_that_is_not_in_steps_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match=r"every='1 epoch' must be a number of steps"):
        GradientHealth(every="1 epoch")
