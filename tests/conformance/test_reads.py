"""What a step reads of a variable is a value: assignments afterwards do not change it."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from executions import EXECUTIONS
from keras import ops

import treadle

READS: dict[str, Callable[[Any], Any]] = {
    "value": lambda v: v.value,
    "convert": ops.convert_to_tensor,
    "add": lambda v: v + 0.0,
    "rows": lambda v: v[0:2],
    "stop": ops.stop_gradient,
    "cast": lambda v: ops.cast(v, "float32"),
    "reshape": lambda v: ops.reshape(v, (2, 1)),
    "expand": lambda v: ops.expand_dims(v, 0),
    "first": lambda v: v.value[:1],
}


class Reading(treadle.Task):
    """Reads variables, and then assigns them; weights are changed by an optimizer."""

    def __init__(self) -> None:
        self.counts = {
            name: keras.Variable([1.0, 1.0], trainable=False, name=f"count_{name}")
            for name in READS
        }
        self.w = keras.Variable([1.0, 1.0])
        self.optimizer = keras.optimizers.SGD(1.0)

    def train_step(self, x: Any) -> Any:
        found: dict[str, Any] = {}
        for name, read in READS.items():
            old = read(self.counts[name])
            self.counts[name].assign(self.counts[name] * 3.0)
            found[name] = ops.mean(old)
        before = {name: read(self.w) for name, read in READS.items()}

        def objective() -> Any:
            return ops.sum(self.w * x), {
                "value": self.w.value,
                "self": ops.convert_to_tensor(self.w),
            }

        (_, inside), grads = treadle.gradients(objective, [self.w])
        self.optimizer.apply(grads, [self.w])
        found |= {f"w_{name}": ops.mean(old) for name, old in before.items()}
        return found | {f"inside_{name}": ops.mean(old) for name, old in inside.items()}


@EXECUTIONS
def test_a_read_is_the_value_at_its_time(execution: Any) -> None:
    options = treadle.Options(execution=execution)
    with treadle.Loop(Reading(), console=False, options=options) as loop:
        history = loop.fit([np.full(2, 0.5, "float32")] * 3, epochs=1)
    for name in READS:
        assert history.steps(name).tolist() == [1.0, 3.0, 9.0], name
        assert history.steps(f"w_{name}").tolist() == [1.0, 0.5, 0.0], name
    for name in ("inside_value", "inside_self"):
        assert history.steps(name).tolist() == [1.0, 0.5, 0.0], name


def test_steps_without_gradients_read_values_too() -> None:
    count = keras.Variable(1.0, trainable=False)

    def step(x: Any) -> Any:
        old = count.value
        count.assign(count * 2.0)
        return {"old": old + 0.0 * ops.sum(x)}

    with treadle.Loop(treadle.task(step, count=count), console=False) as loop:
        found = loop.fit([np.ones(2, "float32")] * 3, epochs=1).steps("old")
    assert found.tolist() == [1.0, 2.0, 4.0]
