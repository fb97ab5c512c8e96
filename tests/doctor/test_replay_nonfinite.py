"""Replaying a step of a past run: the origin of a value that is not finite."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from classifier import FEATURES, Classifier, dense, head
from keras import ops
from mistakes import arrays, source
from replayed_runs import logged, plain, train, visit

import treadle
from treadle import data
from treadle.errors import NonFiniteError
from treadle.hooks import NonFinite


def ruined() -> Any:
    x, y = arrays()
    x[35, 2] = np.nan
    return data.from_arrays(x, y, batch_size=8)


def stopped(make: Callable[[], Any], directory: Path, *args: Any, **kwargs: Any) -> tuple[str, int]:
    """Train until it ends for a value that is not finite; returns the message, and its step."""
    with pytest.raises(NonFiniteError) as caught:
        train(make, directory, *args, **kwargs)
    message = str(caught.value)
    call = re.search(r"To inspect the step: print\((.*), step=(\d+)\)\)$", message)
    assert call is not None, message
    assert call[1] == f"treadle.doctor.replay(task, train, {str(directory)!r}"
    return message, int(call[2])


def test_nan_in_a_batch_is_traced_to_its_rows(tmp_path: Path) -> None:
    _, step = stopped(plain, tmp_path, sources=[ruined()])
    found = visit(plain, ruined(), tmp_path, step)
    assert found.agreement.exact
    assert found.rows is not None
    row = found.rows.index(35)
    assert found.batch[0].rows == (row,)
    assert found.origin == (
        f"first non-finite value: 1 of 48 numbers of the first array of the batch, row {row} "
        "(of the data set: 35)"
    )
    assert visit(plain, ruined(), tmp_path, bisect="isnan(loss)").step == step


def test_steps_that_were_skipped_are_skipped_again(tmp_path: Path) -> None:
    train(plain, tmp_path, hooks=[NonFinite(action="skip")], sources=[ruined()])
    step = min(step for step, line in logged(tmp_path).items() if line["undone"])
    found = visit(plain, ruined(), tmp_path, step)
    assert found.agreement.exact and found.values["undone"] == 1.0
    assert "(of the data set: 35)" in found.origin
    assert {v.path: v.update.norm for v in found.variables}["model/layers/0/kernel"] == 0
    assert visit(plain, ruined(), tmp_path, step + 6).agreement.exact


class Root(keras.layers.Layer):
    """Of what is larger than 6, it returns NaN."""

    def call(self, inputs: Any) -> Any:
        return ops.sqrt(6.0 - inputs)


def rooted() -> Classifier:
    normalized = keras.layers.BatchNormalization()
    return Classifier([keras.Input((FEATURES,)), Root(), dense(), normalized, head()])


def large() -> Any:
    x, y = arrays()
    x[11, 4] = 7.0
    return data.from_arrays(x, y, batch_size=8)


def test_nan_in_a_layer_is_traced_to_the_layer_and_its_rows(tmp_path: Path) -> None:
    _, step = stopped(rooted, tmp_path, sources=[large()])
    found = visit(rooted, large(), tmp_path, step)
    assert found.rows is not None
    assert found.origin == (
        "first non-finite value: 1 of 48 numbers of the output of model/layers/0 (Root), row "
        f"{found.rows.index(11)} (of the data set: 11), while its variables, the batch and the "
        "layers before it are finite"
    )
    assert "model/layers/0" in str(found) and found.batch[0].not_finite == 0


SLOT = "optimizer/momentums/model/layers/0/kernel"


def adam() -> Classifier:
    return Classifier([keras.Input((FEATURES,)), dense(), head()], keras.optimizers.Adam(1e-2))


def spoil(loop: Any) -> None:
    slot = loop.state.variables[SLOT]
    value = np.array(ops.convert_to_numpy(slot))
    value[2, 3] = np.nan
    slot.assign(value)


def test_nan_in_an_optimizer_slot_is_traced_to_its_cause(tmp_path: Path) -> None:
    hooks = [treadle.at("7 steps", spoil)]
    _, step = stopped(adam, tmp_path, hooks=hooks)
    assert step > 8
    later = visit(adam, source(), tmp_path, step, hooks=hooks)
    assert re.fullmatch(
        rf"first non-finite value: 1 of 30 numbers of model/layers/0/kernel, before step "
        rf"{step} began: an earlier step set it. --bisect 'not isfinite\(model/layers/0/kernel"
        r"\)' finds that step",
        later.origin,
    )
    made = visit(
        adam, source(), tmp_path, bisect="not isfinite(model/layers/0/kernel)", hooks=hooks
    )
    assert made.step == 8 and made.found_by.endswith("first holds after step 8")
    assert made.origin == (
        f"first non-finite value: 1 of 30 numbers of {SLOT}, before step 8 began, but not "
        "when step 7 ended: a hook or the script set it between the two steps"
    )
    between = visit(adam, source(), tmp_path, bisect=f"isnan({SLOT})", hooks=hooks)
    assert between.step == 8 and between.found_by.endswith("first holds before step 8")
    finite = next(v for v in made.variables if v.path == "model/layers/0/kernel")
    assert finite.gradient is not None
    assert (finite.value.not_finite, finite.gradient.not_finite) == (0, 0)
    assert finite.update.not_finite == 1


class Rooted(Classifier):
    """Its loss is finite, and its gradient is not, where a weight is zero."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.scale = keras.Variable(0.0)

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return self.loss(y, self.model(x)) + ops.sqrt(self.scale * self.scale)

        variables = [*self.model.trainable_variables, self.scale]
        return {"loss": treadle.minimize(objective, variables, self.optimizer)}


def test_a_nonfinite_gradient_is_distinguished_from_a_nonfinite_loss(tmp_path: Path) -> None:
    _, step = stopped(Rooted, tmp_path)
    assert step == 2  # the first one that is seen to be NaN
    found = visit(Rooted, source(), tmp_path, 1)
    assert found.origin.startswith(
        "first non-finite value: 1 of 1 numbers of the gradient of scale, while the loss is "
        "finite: look for a root"
    )


class Divided(Classifier):
    """Its loss is not finite though all layers' outputs are; or what it assigns is not; or none."""

    def __init__(self, what: str = "loss") -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])
        self.what = what
        self.memory = keras.Variable(1.0, trainable=False)

    def train_step(self, batch: Any) -> Any:
        logs = super().train_step(batch)
        nothing = ops.zeros_like(logs["loss"])
        if self.what == "loss":
            return {"loss": logs["loss"] / nothing}
        if self.what == "memory":
            self.memory.assign(logs["loss"] / nothing)
        return logs


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("loss", "loss, which train_step returned, while all activations are finite"),
        ("memory", "1 of 1 numbers of the update of memory, while its gradient is finite"),
    ],
)
def test_nonfinite_results_of_finite_inputs_are_reported(
    tmp_path: Path, what: str, told: str
) -> None:
    def make() -> Divided:
        return Divided(what)

    train(make, tmp_path, hooks=[NonFinite(action="stop")], epochs=1)
    found = visit(make, source(), tmp_path, 1)
    assert found.origin.startswith(f"first non-finite value: {told}")


def test_weights_ruined_at_an_unknown_step_are_searched_for(tmp_path: Path) -> None:
    def spoil_memory(loop: Any) -> None:
        loop.task.memory.assign(float("nan"))

    hooks = [treadle.at("3 steps", spoil_memory)]
    with pytest.raises(NonFiniteError) as caught:
        train(lambda: Divided("nothing"), tmp_path, hooks=hooks)
    assert str(caught.value).endswith(
        f"To inspect the step: print(treadle.doctor.replay(task, train, {str(tmp_path)!r}, "
        "bisect='not isfinite(memory)'))"
    )


def test_without_a_directory_no_step_can_be_replayed() -> None:
    with pytest.raises(NonFiniteError) as caught:
        train(plain, None, sources=[ruined()])
    assert "replay" not in str(caught.value)
