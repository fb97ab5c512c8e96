"""On each backend, what is inspected is what the objective does now: its branches and rules."""

from typing import Any

import keras
import pytest
from keras import ops

import treadle
from tests.doctor.doctor_programs import Regression, network, numbers, source


def lines_of(task: Any, fact: str) -> dict[str, Any]:
    sheet = treadle.doctor.inspect(task, source(*numbers()))
    return {line.subject: line.value for line in sheet.lines if line.fact == fact}


class Branching(Regression):
    """A regression whose objective calls a layer in a branch."""

    def __init__(self) -> None:
        super().__init__(network(4))
        self.head = keras.layers.Dense(1)

    def variables(self) -> Any:
        return [*self.model.trainable_variables, *self.head.trainable_variables]

    def loss_of(self, y: Any, outputs: Any) -> Any:
        chosen = treadle.cond(
            ops.mean(y) < 100.0, lambda: self.head(outputs), lambda: outputs[:, :1]
        )
        return super().loss_of(y, chosen)


def test_the_branch_that_an_objective_takes_is_seen() -> None:
    assert lines_of(Branching(), "called")["head"] == ["1× in training", "1× in evaluation"]


class Scaling(Regression):
    """A regression that scales the gradient of its outputs, by a Python number."""

    scale = 1.0

    def loss_of(self, y: Any, outputs: Any) -> Any:
        scale = self.scale

        @ops.custom_gradient
        def same(x: Any) -> Any:
            def gradient(*args: Any, upstream: Any = None) -> Any:
                return (args[0] if upstream is None else upstream) * scale

            return x * 1.0, gradient

        return super().loss_of(y, same(outputs))


def test_an_objective_is_differentiated_by_its_present_rules() -> None:
    # The second step is measured: a rate of 0, since Adam's `epsilon` would move weights otherwise.
    task = Scaling(optimizer=keras.optimizers.SGD(0.0))
    found = list[dict[str, Any]]()
    for scale in (1.0, 3.0):
        task.scale = scale
        found.append(lines_of(task, "gradient"))
    first, second = found
    assert second == {name: pytest.approx(3 * norm, rel=1e-5) for name, norm in first.items()}
