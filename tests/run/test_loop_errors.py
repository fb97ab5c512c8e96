"""The loop's errors: what is refused, and where the run stood."""

from typing import Any

import keras
import pytest
from classifier import Classifier, dense, head
from loops import arrays, loop_of, make, source

import treadle
from treadle import data
from treadle.errors import ConfigurationError, DataError, StepError


def test_fit_and_epochs_are_refused_in_the_body_of_another_loop() -> None:
    message = (
        r"loop\.{} was called while loop\.{} trains: in the body of a `for` loop, train with "
        r"loop\.steps\(source\) or loop\.step\(batch\)"
    )
    with loop_of() as loop:
        for _ in loop.epochs(1):
            with pytest.raises(ConfigurationError, match=message.format("fit", "epochs")):
                loop.fit(source(), steps=2)
            with pytest.raises(ConfigurationError, match=message.format("epochs", "epochs")):
                next(iter(loop.epochs(2)))
            for _ in loop.steps(source()):
                with pytest.raises(ConfigurationError, match=message.format("fit", "epochs")):
                    loop.fit(source(), steps=2)
        for _ in loop.steps(source()):
            with pytest.raises(ConfigurationError, match=message.format("fit", "steps")):
                loop.fit(source(), steps=2)
        steps = loop.progress.step
        loop.fit(source(), steps=2)
        assert loop.progress.step == steps + 2


@pytest.mark.parametrize("compiler", ["inductor", "captured"])
def test_pytorchs_compilers_are_refused_on_other_backends(compiler: Any) -> None:
    options = treadle.Options(compiler=compiler)
    backend = keras.config.backend()
    if backend == "torch":
        assert loop_of(options=options).view.options == options
        return
    with pytest.raises(ConfigurationError) as caught:
        loop_of(options=options)
    assert str(caught.value) == (
        f"compiler={compiler!r} is for PyTorch, and Keras runs on {backend}: remove it, or choose "
        "the backend 'torch'"
    )


def test_errors_of_the_user_say_where_the_run_stood() -> None:
    class Broken(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])

        def train_step(self, batch: Any) -> Any:
            error = ZeroDivisionError("mine")
            error.add_note("--------------------\nas JAX does")
            raise error

    with pytest.raises(ZeroDivisionError, match="mine") as caught, loop_of(make(Broken)) as loop:
        loop.fit(source(), epochs=1)
    assert caught.value.__notes__[:2] == [
        "in train_step, step 1 (epoch 1, batch 1); the weights are those before it",
        "--------------------\nas JAX does",
    ]
    assert any(entry.name == "train_step" for entry in caught.traceback)

    def failing(loop: Any) -> None:
        raise KeyError("hook")

    with pytest.raises(KeyError) as caught, loop_of(hooks=[treadle.at("3 steps", failing)]) as loop:
        loop.fit(source(), epochs=1)
    assert "in failing, after step 3, epoch 1, batch 3" in caught.value.__notes__[0]

    def batches() -> Any:
        x, y = arrays()
        yield x[:8], y[:8]
        raise OSError("disk")

    with pytest.raises(OSError, match="disk") as caught, loop_of() as loop:
        loop.fit(batches, epochs=1)
    assert any("batch 2" in note for note in caught.value.__notes__)


def test_bad_input_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"fit needs an end: epochs=…, steps=… or until"):
        loop_of().fit(source())
    with pytest.raises(ConfigurationError, match="epochs must be at least 1, not 0"):
        loop_of().fit(source(), epochs=0)
    with pytest.raises(ConfigurationError, match="must be a time, for example '30 min'"):
        loop_of().fit(source(), until="3 epochs")
    endless = data.closed_loop(lambda loop: arrays())
    with pytest.raises(
        ConfigurationError, match=r"the source never ends, so it has no epochs: use"
    ):
        loop_of().fit(endless, epochs=1)
    with pytest.raises(DataError, match="gave no batch"):
        loop_of().fit(lambda: iter(()), epochs=1)
    with pytest.raises(DataError, match=r"the batch of step 9 is not available"):
        loop_of().view.batch_at(9)

    class Silent(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])

        def train_step(self, batch: Any) -> None:
            pass

    with pytest.raises(StepError, match="returned nothing, and no metric of the task changed"):
        loop_of(make(Silent)).fit(source(), epochs=1)
