"""What is first used at the end of an epoch is checked before the first step."""

import random
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from treadle import hooks
from treadle.errors import ConfigurationError, StateError, StepError, TreadleWarning

X = np.ones((8, 2), "float32")


class Line(treadle.Task):
    """Trains one number, and evaluates in a way that the test chooses."""

    def __init__(self, evaluate: Any = None, **returned: Any) -> None:
        self.slope, self.optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)
        self.error = keras.metrics.Mean(name="error")
        self.evaluate, self.returned = evaluate or (lambda task, batch: {"loss": 0.0}), returned

    def train_step(self, batch: Any) -> Any:
        loss = treadle.minimize(lambda: ops.mean(self.slope * batch), [self.slope], self.optimizer)
        self.error.update_state(loss)
        return {"loss": loss, **self.returned}

    def eval_step(self, batch: Any) -> Any:
        return self.evaluate(self, batch)


def trained(task: Any, *chosen: Any) -> treadle.Loop:
    with treadle.Loop(task, hooks=chosen, console=False) as loop:
        loop.fit([X, X], validation=[X], epochs=2)
    return loop


def refused(error: Any, task: Any, validation: Any = X) -> str:
    """Return the message of an error before the first step."""
    loop = treadle.Loop(task, console=False)
    with pytest.raises(error) as caught, loop:
        loop.fit([X, X], validation=[validation], epochs=2)
    assert loop.progress.step == 0
    return str(caught.value)


HOOKS = {
    "BestWeights": lambda name: hooks.BestWeights(name, direction="max"),
    "EarlyStopping": lambda name: hooks.EarlyStopping(name, direction="max"),
    "ReduceOnPlateau": lambda name: hooks.ReduceOnPlateau(name, direction="max"),
    "Checkpoint": lambda name: hooks.Checkpoint(monitor=name, direction="max", keep_best=1),
}


@pytest.mark.parametrize("hook", HOOKS)
def test_a_monitored_name_that_no_step_returns(hook: str, tmp_path: Path) -> None:
    def message(name: str, **how: Any) -> str:
        loop = treadle.Loop(Line(), tmp_path / name, hooks=[HOOKS[hook](name)], console=False)
        with pytest.raises(ConfigurationError) as caught, loop:
            loop.fit([X, X], epochs=2, **how)
        assert loop.progress.step == 0
        return str(caught.value)

    known = "Known: loss, error, val_loss."
    assert message("val_los", validation=[X]) == (
        f"{hook} cannot find 'val_los'. Did you mean 'val_loss'? {known}"
    )
    assert message("lss", validation=[X]) == (
        f"{hook} cannot find 'lss'. Did you mean 'loss'? {known}"
    )


@pytest.mark.parametrize("hook", HOOKS)
def test_a_monitored_value_of_a_validation_that_a_later_call_has(hook: str, tmp_path: Path) -> None:
    message = (
        rf"{hook} finds no val_loss in this call of fit, which has no validation set: write "
        r"loop\.fit\(train, validation=source\), or monitor another value\. Known: loss, error"
    )
    with treadle.Loop(Line(), tmp_path, hooks=[HOOKS[hook]("val_loss")], console=False) as loop:
        with pytest.warns(TreadleWarning, match=message):
            loop.fit([X, X], epochs=1)
        loop.fit([X, X], validation=[X], epochs=1)
    assert loop.progress.step == 4


def test_names_that_are_recorded_later_are_accepted() -> None:
    class Parts(keras.metrics.Mean):
        def result(self) -> Any:
            return {"first": super().result(), "second": super().result()}

    class Later(Line):
        def __init__(self) -> None:
            super().__init__()
            self.error = Parts(name="error")

    trained(Later(), hooks.BestWeights("error_first", "min"))
    sets = {"easy": [X], "hard": [X]}
    with treadle.Loop(Line(), hooks=[hooks.BestWeights("val_hard_loss")], console=False) as loop:
        history = loop.fit([X], validation=sets, epochs=1)
    assert history["note"] == ["the weights are those of step 1, the best val_hard_loss: 0"]


def test_names_are_not_checked_in_a_loop_of_the_user() -> None:
    best = hooks.BestWeights("val_score", "max")
    with treadle.Loop(Line(), hooks=[best], console=False) as loop:
        for _ in loop.epochs(2):
            for _ in loop.steps([X, X]):
                pass
            loop.log({"val_score": 1.0})
    assert loop.progress.step == 4


def test_a_monitor_is_a_name() -> None:
    with pytest.raises(ConfigurationError) as caught:
        hooks.EarlyStopping(keras.metrics.Mean())  # type: ignore[arg-type]
    assert str(caught.value) == (
        "monitor is the name of a recorded value, such as 'val_loss', not a Mean"
    )


def test_a_mistake_in_eval_step() -> None:
    assert refused(AttributeError, Line(lambda task, batch: task.modle(batch))) == (
        "'Line' object has no attribute 'modle'"
    )
    assert refused(StepError, Line(lambda task, batch: {"loss": batch})).startswith(
        "eval_step returned 'loss' of shape (8, 2): only scalars can be logged"
    )
    product = Line(lambda task, batch: {"loss": ops.mean(ops.matmul(batch, ops.ones((2, 1))))})
    assert refused(Exception, product, np.ones((8, 3), "float32"))


def test_a_tf_data_set_is_checked_without_reading_it() -> None:
    import tensorflow as tf

    read: list[int] = []

    def batches() -> Iterator[Any]:
        read.append(1)
        yield X

    spec = tf.TensorSpec((None, 2), tf.float32)
    found = tf.data.Dataset.from_generator(batches, output_signature=spec)
    outside = keras.metrics.Mean()

    def counting(_: Any, batch: Any) -> Any:
        outside.update_state(batch)
        return {}

    def reading(_: Any, batch: Any) -> Any:
        if not ops.convert_to_numpy(batch).any():
            raise ValueError("these are zeros")
        return {"loss": ops.mean(batch)}

    def counted_from_one(_: Any, batch: Any) -> Any:
        labels, scores = ops.cast(batch[:, 0], "int32") - 1, ops.ones((ops.shape(batch)[0], 2)) / 2
        return {"loss": ops.mean(keras.losses.sparse_categorical_crossentropy(labels, scores))}

    for evaluate, hook, error, message in (
        (counting, [], StateError, "which no attribute of the task reaches"),
        (None, [hooks.EarlyStopping("val_acc", direction="max")], ConfigurationError, "'val_acc'"),
    ):
        loop = treadle.Loop(Line(evaluate), hooks=hook, console=False)
        with pytest.raises(error, match=message), loop:
            loop.fit([X, X], validation=found, epochs=2)
        assert loop.progress.step == 0 and not read
    for sound, loss in ((reading, 1.0), (counted_from_one, np.log(2))):  # zeros are no such data
        options = treadle.Options(execution="eager")
        with treadle.Loop(Line(sound), options=options, console=False) as loop:
            loop.fit([X, X], validation=found, epochs=1)
        assert loop.history["val_loss"] == [pytest.approx(loss)]


def test_a_value_that_eval_step_names_val_loss_keeps_its_name() -> None:
    loop = trained(Line(lambda task, batch: {"val_loss": 1.0}))
    assert loop.history["val_loss"] == [1.0, 1.0] and "val_val_loss" not in loop.history.names()
    # Also with another value, and in a set with a name.
    loop = trained(Line(lambda task, batch: {"val_loss": 1.0, "loss": 2.0}))
    assert (loop.history["val_val_loss"], loop.history["val_loss"]) == ([1.0] * 2, [2.0] * 2)
    with treadle.Loop(Line(lambda task, batch: {"val_loss": 1.0}), console=False) as loop:
        assert loop.fit([X], validation={"easy": [X]}, epochs=1)["val_easy_loss"] == [1.0]
    # A name that training has too is the validation's only with a prefix, as in Keras.
    task = Line(lambda task, batch: {"val_share": 1.0}, val_share=0.5)
    loop = trained(task)
    assert (loop.history["val_share"], loop.history["val_val_share"]) == ([0.5] * 2, [1.0] * 2)


def test_a_value_of_training_with_the_name_of_a_validation() -> None:
    assert refused(StepError, Line(val_loss=1.0)) == (
        "train_step returns 'val_loss', and a validation has this name as well: rename one of them"
    )


class Counted(keras.utils.PyDataset):
    def __init__(self) -> None:
        super().__init__()
        self.read: list[str] = []

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        self.read.append(f"batch {index}")
        return X

    def on_epoch_begin(self) -> None:
        self.read.append("begin")


def test_nothing_is_read_before_the_first_step_that_is_not_stored() -> None:
    drawn: list[float] = []

    def function() -> Iterator[Any]:
        drawn.append(random.random())
        yield X

    def of_hook() -> Iterator[Any]:
        return iter([drawn[0] * X])  # which a function or hook fills during the first epoch

    counted, sets = Counted(), {"function": function, "hook": of_hook}
    fill = treadle.at("1 step", lambda loop: drawn.append(1.0))
    with treadle.Loop(Line(), hooks=[fill], console=False) as loop:
        loop.fit([X], validation={**sets, "counted": counted}, epochs=2)
    assert counted.read == ["begin", "batch 0"] * 2
    assert len(drawn) == 3
    with treadle.Loop(Line(), console=False) as loop:
        stream = treadle.data.padded(iter([X[0], X[1]]), batch_size=2)
        assert "val_loss" in loop.fit([X], validation=stream, epochs=1).names()


def decorated(function: Any) -> Any:
    @wraps(function)
    def with_all(loop: Any) -> Any:
        return function(loop, 1)

    return with_all


def test_a_decorated_hook_is_called_as_its_wrapper_is() -> None:
    called: list[int] = []

    @decorated
    def show(loop: Any, number: int) -> None:
        called.append(number)

    class Own(treadle.Hook):
        def after_end(self) -> None:
            """Never called, since it belongs to `DetailedHook`."""

    with treadle.Loop(Line(), hooks=[treadle.every("1 step", show), Own()], console=False) as loop:
        loop.fit([X, X], epochs=1)
    assert called == [1, 1]
