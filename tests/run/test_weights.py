"""The warning at the end of a call that trained and changed no weight, and when there is none."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from treadle.errors import TreadleWarning
from treadle.hooks import Checkpoint, NonFinite
from treadle.run import unchanged_weights as weights

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
OPTIONS = treadle.Options(jit=False)


class Line(treadle.Task):
    """Two weights; what it does with their gradients is `update`'s."""

    def __init__(self, optimizer: Any = None, factor: float = 1.0) -> None:
        norm = keras.layers.BatchNormalization(center=False, scale=False)
        self.model = keras.Sequential([keras.Input((3,)), norm, keras.layers.Dense(1)])
        self.optimizer = optimizer or keras.optimizers.SGD(0.1)
        self.error = keras.metrics.MeanSquaredError()
        self.factor = factor

    def loss(self, x: Any) -> Any:
        return self.factor * ops.mean((self.model(x, training=True) - 1.0) ** 2)

    def train_step(self, batch: Any) -> Any:
        loss, grads = treadle.gradients(lambda: self.loss(batch), self.model)
        self.update(grads)
        return {"loss": loss}

    def update(self, grads: Any) -> None:
        self.optimizer.apply(grads, self.model.trainable_variables)


class Forgetful(Line):
    def update(self, grads: Any) -> None:
        pass


class NeverThere(Line):
    def update(self, grads: Any) -> None:
        apply = super().update
        treadle.cond(treadle.step() > 1000, lambda: apply(grads), lambda: None)


class Measures(Line):
    """Updates a metric and the statistics of BatchNormalization."""

    def train_step(self, batch: Any) -> Any:
        self.error.update_state(ops.ones((batch.shape[0], 1)), self.model(batch, training=True))


class Accumulates(Line):
    def __init__(self, steps: int) -> None:
        super().__init__()
        self.accumulator = treadle.Accumulator(steps)

    def update(self, grads: Any) -> None:
        self.accumulator.add(grads, super().update)


class Patch(Line):
    """A frozen model, whose input is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.model.trainable = False
        self.patch = keras.Variable(np.zeros(3, "float32"))

    def train_step(self, batch: Any) -> Any:
        def objective() -> Any:
            return self.loss(batch + self.patch)

        return {"loss": treadle.minimize(objective, [self.patch], self.optimizer)}


class OwnRule(Line):
    """No optimizer: the step assigns its weights itself."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        del self.optimizer
        self.rate = rate

    def update(self, grads: Any) -> None:
        for variable, gradient in zip(self.model.trainable_variables, grads, strict=True):
            variable.assign_sub(self.rate * gradient)


def trained(task: Any, *hooks: Any, source: Any = None, directory: Any = None, **end: Any) -> Any:
    keras.utils.set_random_seed(0)
    task = task() if isinstance(task, type) else task
    with treadle.Loop(task, directory, hooks, OPTIONS, console=False) as loop:
        loop.fit(source or [X] * 4, **(end or {"epochs": 2}))
    return loop


def told(loop: treadle.Loop) -> list[str]:
    logged = loop.history["warning"] if "warning" in loop.history.names() else []
    return [text for text in logged if text.startswith("no weight changed")]


KERNEL_AND_BIAS = "model/layers/1/kernel, model/layers/1/bias are the same as before"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Line(keras.optimizers.SGD(0.0)), "The learning rate of optimizer is 0"),
        (
            Forgetful,
            "train_step applies no optimizer to them and assigns none of them: call "
            "treadle.minimize, or optimizer.apply with the gradients",
        ),
        (
            lambda: Line(factor=0.0),
            "Either no update was made (a branch of treadle.cond that was never taken), or every "
            "update was zero: the loss does not depend on these weights (stop_gradient, argmax and "
            "rounding have gradients of zero), or the learning rate is too small for their dtype "
            "(learning rates: optimizer 0.1)",
        ),
        (NeverThere, "Either no update was made"),
        (lambda: OwnRule(0.0), "Either no update was made"),
    ],
    ids=["rate", "forgotten", "zero gradients", "cond", "own rule"],
)
def test_a_call_that_changed_no_weight_is_reported(make: Callable[[], Any], reason: str) -> None:
    with pytest.warns(TreadleWarning, match="no weight changed in 8 steps"):
        (text,) = told(trained(make()))
    assert text.startswith(
        f"no weight changed in 8 steps: the values of {KERNEL_AND_BIAS}. {reason}"
    )


def _nothing(name: str) -> Any:
    nan = np.full_like(X, np.nan)
    schedule = treadle.schedules.WarmUp(0.1, steps=10)
    accumulating = keras.optimizers.SGD(0.1, gradient_accumulation_steps=4)
    return {
        "trained": lambda: trained(Line),
        "own rule": lambda: trained(OwnRule(0.1)),
        "only metrics": lambda: trained(Measures),
        "frozen on purpose": lambda: trained(Patch),
        "accumulated": lambda: trained(Accumulates(4), steps=3),
        "accumulated by Keras": lambda: trained(Line(accumulating), steps=3),
        "warm-up": lambda: trained(Line(keras.optimizers.SGD(schedule)), steps=1),
        "all skipped": lambda: trained(Line, NonFinite("skip"), source=[nan] * 4),
    }[name]()


@pytest.mark.parametrize(
    "name",
    [
        *("trained", "own rule", "only metrics", "frozen on purpose", "accumulated"),
        *("accumulated by Keras", "warm-up", "all skipped"),
    ],
)
def test_a_call_that_is_meant_to_change_no_weight_is_not_reported(name: str) -> None:
    assert told(_nothing(name)) == []


def test_steps_that_loss_scaling_undid_do_not_count() -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        task = Line()
    finally:
        keras.config.set_dtype_policy("float32")
    task.loss_scale = treadle.LossScale(initial=2.0**60)
    loop = trained(task, steps=3)
    assert loop.history.steps("undone").tolist() == [1, 1, 1]
    assert told(loop) == []


def test_calls_and_parts() -> None:
    keras.utils.set_random_seed(0)
    task = Line(keras.optimizers.SGD(0.0))
    with treadle.Loop(task, options=OPTIONS, console=False) as loop:
        for _ in loop.epochs(2):
            for _ in loop.steps([X] * 4, every="2 steps"):
                pass
        loop.step(X)
        assert told(loop) == []  # what `with` surrounds is one run
    assert [text[:27] for text in told(loop)] == ["no weight changed in 9 step"]
    task.optimizer.learning_rate = 0.1
    loop.fit([X] * 4, epochs=1)
    task.optimizer.learning_rate = 0.0
    loop.fit([X], epochs=1)
    assert [text[:27] for text in told(loop)][1:] == ["no weight changed in 1 step"]


def test_a_console_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    with treadle.Loop(Line(keras.optimizers.SGD(0.0)), options=OPTIONS) as loop:
        loop.fit([X] * 4, epochs=1)
    assert "no weight changed in 4 steps" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("rates", "expected"),
    [((0.0, 0.0), ["no weight changed in 8 steps"]), ((0.1, 0.0), [])],
    ids=["nothing before", "changed before"],
)
def test_a_resumed_call_is_compared_with_its_start(
    tmp_path: Path, rates: tuple[float, float], expected: list[str]
) -> None:
    def run(die: bool) -> treadle.Loop:
        def end(loop: Any) -> None:
            loop.task.optimizer.learning_rate.assign(rates[1])
            if die:
                loop.save()
                raise OSError("killed")

        # A checkpoint of every step: with this rate no step after it changes anything.
        hooks = [Checkpoint(every="1 step"), treadle.at("4 steps", end)]
        return trained(Line(keras.optimizers.SGD(rates[0])), *hooks, directory=tmp_path)

    with pytest.raises(OSError, match="killed"):
        run(die=True)
    loop = run(die=False)
    assert loop.progress.step == 8
    assert [text.partition(":")[0] for text in told(loop)] == expected
    again = run(die=False)
    assert again.reason == "it was finished before"
    assert [text.partition(":")[0] for text in told(again)] == expected  # of the log, once


def test_steps_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    original = weights.checksum
    monkeypatch.setattr(weights, "checksum", lambda v: taken.append(1) or original(v))
    trained(Line, epochs=3)
    assert len(taken) == 3  # two at the start; the first one at the end differs
