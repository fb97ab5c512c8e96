"""Half precision: steps that are undone whole where float16 overflows."""

from typing import Any

import keras
import numpy as np
import pytest
import runs
from cases import CASES, batches_of
from classifier import FEATURES, ROWS, Classifier, batches, dense, head
from executions import long_to_compile, once
from gradient_tasks import TwoModels
from half_precision import (
    EXECUTIONS,
    clean,  # noqa: F401 - a fixture that every test uses
    half,
    loop_of,
    source,
)
from keras import ops

import treadle
from treadle.errors import NonFiniteError
from treadle.hooks import NonFinite
from treadle.testing import compiled_equals_eager, fused_equals_unfused, run_steps
from treadle.testing.running import Runner

# What is undone

WHOLE = """
    adam multi-optimizer ema accumulation batchnorm dropout-seeded dropout-unseeded keras-random
    regularizer cond substituted for-each two-models one-forward-pass convolution lstm attention
    metrics-only supervised
""".split()  # noqa: SIM905 - a list of strings would take a page


# On each backend those that differ most in what must be undone; the others on PyTorch.
OFTEN = (
    "adam",
    "multi-optimizer",
    "accumulation",
    "batchnorm",
    "dropout-seeded",
    "cond",
    "for-each",
)
RARELY = (pytest.mark.long, once)


@long_to_compile
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=runs.marks(n) if n in OFTEN else RARELY) for n in WHOLE]
)
def test_an_overflowing_step_is_undone_whole(name: str) -> None:
    runner = Runner(half(CASES[name].make), batches_of(name, 1)[0], treadle.Options(checked=True))
    start = runner.state.arrays()
    runner.state.assign({**start, "loss_scale/scale": np.float32(2.0**100)})
    trace = runner.run(batches_of(name, 1))
    assert trace.values["undone"].tolist() == [1.0]
    assert trace.values["loss_scale"].tolist() == [2.0**100]
    assert trace.state["loss_scale/scale"] == 2.0**99
    assert trace.state["loss_scale/finite_steps"] == 0
    seeds = {runner.state.path_of(v) for v in runner.state.seeds}
    assert trace.changed <= seeds | {"loss_scale/scale"}
    if name in ("dropout-seeded", "keras-random"):
        assert trace.changed & seeds  # random numbers are not drawn twice
    # The same step with a scale that fits learns.
    runner.state.assign({**start, "loss_scale/scale": np.float32(2.0**8)})
    learned = runner.run(batches_of(name, 1))
    assert learned.values["undone"].tolist() == [0.0]
    assert learned.changed - seeds - {"loss_scale/finite_steps"}


class Poisoned(TwoModels):
    """Two gradients in a step; a batch says the roots of what their losses are multiplied by.

    1e15 overflows in float16 alone, 1e30 anywhere.
    """

    def __init__(self, **scale: Any) -> None:
        super().__init__()
        # Not Adam, which divides a gradient that is mostly rounding by its own size.
        self.optimizers = {
            name: keras.optimizers.SGD(0.01, momentum=0.9) for name in ("generator", "critic")
        }
        self.loss_scale = treadle.LossScale(**scale)
        self.mean = keras.metrics.Mean()

    def train_step(self, batch: Any) -> Any:
        x, factors = batch
        fake = self.generator(x, training=True)
        critic_loss = treadle.minimize(
            lambda: (
                factors[0] ** 2 * ops.mean(ops.cast(self.critic(fake) - self.critic(x), "float32"))
            ),
            self.critic,
            self.optimizers["critic"],
        )
        generator_loss = treadle.minimize(
            lambda: (
                factors[1] ** 2 * -ops.mean(ops.cast(self.critic(self.generator(x)), "float32"))
            ),
            self.generator,
            self.optimizers["generator"],
        )
        self.mean.update_state(critic_loss)
        # Without the factor, so that all steps round alike.
        generator_loss = generator_loss / factors[1] ** 2
        return {"critic_loss": critic_loss, "generator_loss": treadle.weighted(generator_loss, 3)}


def poisoned_batches(*factors: tuple[float, float]) -> list[Any]:
    return [
        (x, np.array(f, "float32")) for x, f in zip(batches(len(factors))[0], factors, strict=True)
    ]


@EXECUTIONS
def test_one_overflow_of_several_gradients_undoes_them_all(options: Any) -> None:
    good, first, second, infinite = (1.0, 1.0), (1e15, 1.0), (1.0, 1e15), (1e30, 1.0)
    sequence = poisoned_batches(good, first, second, infinite, good)
    runner = Runner(half(Poisoned), sequence[0], options)
    start = runner.state.arrays()
    trace = runner.run(sequence)
    runner.state.assign(start)
    without = runner.run([sequence[0], sequence[4]])
    assert trace.values["undone"].tolist() == [0, 1, 1, 1, 0]
    assert trace.state["loss_scale/scale"] == 2.0**12
    for path, value in without.state.items():
        if not path.startswith("loss_scale/"):
            np.testing.assert_allclose(trace.state[path], value, rtol=1e-3, err_msg=path)


@long_to_compile
def test_windows_agree_bit_for_bit_and_compiled_equals_eager() -> None:
    good, bad = (1.0, 1.0), (1.0, 1e15)
    sequence = poisoned_batches(good, bad, good, good, bad, good, good)

    def make() -> Any:
        return half(lambda: Poisoned(initial=2.0**10, growth_steps=2))

    fused_equals_unfused(make, sequence)
    # `critic_loss` is a difference of outputs of up to 1.4 that nearly cancel, so the rounding of
    # the outputs, not the size of the loss, is what compiled and eager may differ by. Processors
    # with float16 arithmetic (AVX512-FP16) fuse more and round elsewhere: there the second step
    # gave 0.0029 compiled and 0.0043 eagerly, where float32 says 0.0052.
    compiled_equals_eager(make, sequence, rtol=1e-2, atol=4 * float(np.finfo("float16").eps))
    trace = run_steps(make(), sequence, windows=(3, 4))
    assert trace.values["undone"].tolist() == [0, 1, 0, 0, 1, 0, 0]
    scales = [2.0**e for e in (10, 10, 9, 9, 10, 9, 9)]
    assert trace.values["loss_scale"].tolist() == scales
    assert trace.state["loss_scale/scale"] == 2.0**10
    kept = 1 - trace.values["undone"]
    assert trace.weights["critic_loss"].tolist() == (ROWS * kept).tolist()
    assert trace.weights["generator_loss"].tolist() == (3 * kept).tolist()
    assert trace.weights["undone"].tolist() == [ROWS] * 7


# In a loop


@long_to_compile
def test_an_undone_step_counts_in_no_mean_and_ends_no_run() -> None:
    good, infinite = (1.0, 1.0), (1e30, 1.0)
    with loop_of(half(Poisoned)) as loop:
        history = loop.fit(poisoned_batches(good, infinite, good, good), epochs=1)
    losses, undone = history.steps("critic_loss"), history.steps("undone")
    assert undone.tolist() == [0, 1, 0, 0]
    assert not np.isfinite(losses[1])
    assert history["critic_loss"] == [pytest.approx(losses[[0, 2, 3]].mean(), rel=1e-6)]
    assert history["mean"] == [pytest.approx(losses[[0, 2, 3]].mean(), rel=1e-3)]
    assert history["undone"] == [0.25]
    assert loop.progress.step == 4
    assert int(loop.state.arrays()["optimizers/critic/iterations"]) == 3


@long_to_compile
def test_a_batch_that_holds_nan_still_ends_the_run() -> None:
    batch = poisoned_batches((1.0, np.nan))[0]
    with (
        pytest.raises(
            NonFiniteError, match=r"generator_loss is nan at step 1.*the second array, row 1"
        ),
        loop_of(half(Poisoned)) as loop,
    ):
        loop.step(batch)


class Root(Classifier):
    """A finite loss with a gradient that is no number, whatever the scale."""

    def __init__(self, **scale: Any) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.zero = keras.Variable(0.0)
        self.loss_scale = treadle.LossScale(**scale)

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return self.loss(batch[1], self.model(batch[0])) + ops.sqrt(self.zero)

        variables = [*self.model.trainable_variables, self.zero]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


@long_to_compile
def test_a_scale_that_falls_for_ever_ends_the_run() -> None:
    why = (
        r"gradients are not finite at step 4, .*not even with a loss scale of 2\*\*-14.*division by"
    )
    with (
        pytest.raises(NonFiniteError, match=why),
        loop_of(half(lambda: Root(initial=2.0**-11))) as loop,
    ):
        loop.fit(source(), epochs=1)
    stopping = loop_of(half(lambda: Root(initial=2.0**-11)), hooks=[NonFinite("stop")])
    with stopping as loop:
        loop.fit(source(), epochs=3, steps=12)
    assert "not even with a loss scale" in str(loop.reason)
