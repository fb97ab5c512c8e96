"""Probes: each sees the steps of its own thread, and a second one in a thread is refused."""

import threading
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from treadle.backends.step_context import StepContext, running
from treadle.errors import ConfigurationError
from treadle.steps.probes import ACTIVATION, ALL, LAYER, LOSS, METRIC, Probe, ProbedCall, probing
from treadle.steps.state import State


class Names(Probe):
    def see(self, call: ProbedCall, values: dict[str, Any]) -> Any:
        """Keep a call."""
        self.met.append((call.kind, call.path))
        return values["outputs"]


def task(units: int) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])
    return treadle.Supervised(model, "mse", keras.optimizers.SGD(0.1))


def call(made: Any) -> None:
    """Call the model, a function and a loss, as a step does."""
    with running(StepContext()):
        outputs = keras.ops.sigmoid(made.model(np.ones((2, 3), "float32")))
        keras.losses.MeanSquaredError()(outputs, outputs)


def replaced() -> list[Any]:
    """Return some of the functions that probes replace."""
    return [keras.layers.Layer.__call__, keras.losses.Loss.__call__, keras.ops.sigmoid]


def test_a_probe_sees_the_kinds_that_it_asks_for() -> None:
    made, probe = task(2), Names()
    with probing(probe, State.discover(made), frozenset((LAYER, LOSS))):
        call(made)
    assert [kind for kind, _ in probe.met] == [LAYER, LAYER, LOSS]


def test_two_threads_have_probes_that_do_not_end_in_order() -> None:
    before, tasks, probes = replaced(), [task(2), task(3)], [Names(), Names()]
    has_begun, has_ended = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def second() -> None:
        try:
            with probing(probes[1], State.discover(tasks[1]), ALL):
                has_begun.set()
                assert has_ended.wait(60)
                call(tasks[1])
        except BaseException as error:
            errors.append(error)
            has_begun.set()

    thread = threading.Thread(target=second)
    with probing(probes[0], State.discover(tasks[0]), ALL):
        thread.start()
        assert has_begun.wait(60)
        call(tasks[0])
    has_ended.set()
    thread.join(60)
    assert errors == []
    expected = [(LAYER, "model/layers/0"), (LAYER, "model"), (ACTIVATION, "sigmoid")]
    assert [[x for x in probe.met if x in expected] for probe in probes] == [expected, expected]
    assert [[kind for kind, _ in probe.met].count(LOSS) for probe in probes] == [1, 1]
    assert replaced() == before


def test_a_second_probe_in_a_thread_is_refused() -> None:
    before, made, probe = replaced(), task(2), Names()
    state = State.discover(made)
    with (
        probing(probe, state),
        pytest.raises(ConfigurationError, match="a probe already sees the steps of this thread"),
        probing(Names(), state),
    ):
        pass
    with probing(probe, state):
        call(made)
    assert [kind for kind, _ in probe.met].count(LAYER) == 2
    assert replaced() == before


def test_a_metric_may_name_its_arguments_as_it_likes() -> None:
    class Own(keras.metrics.Mean):
        def update_state(self, labels: Any, scores: Any, weights: Any = None) -> None:
            super().update_state(abs(labels - scores), weights)

    class Exchanged(keras.metrics.Mean):
        def update_state(self, y_pred: Any, y_true: Any) -> None:
            super().update_state(abs(y_pred - y_true))

    class Passing(keras.metrics.Mean):
        def update_state(self, *args: Any, **kwargs: Any) -> None:
            super().update_state(args[1], **kwargs)

    class Given(Probe):
        def see(self, found: ProbedCall, values: dict[str, Any]) -> Any:
            if found.kind == METRIC:
                names = ("y_true", "y_pred", "sample_weight")
                seen.append([values[name] for name in names])
            return values["outputs"]

    class Measured(treadle.Task):
        def __init__(self) -> None:
            self.own, self.mean = Own(), keras.metrics.Mean()
            self.exchanged, self.passing = Exchanged(), Passing()
            self.error = keras.metrics.MeanSquaredError()

    seen: list[Any] = []
    made = Measured()
    with running(StepContext()), probing(Given(), State.discover(made), frozenset({METRIC})):
        made.own.update_state(1.0, 2.0)
        made.mean.update_state(3.0, 4.0)
        made.mean.update_state(values=5.0)
        made.exchanged.update_state(1.0, 2.0)
        made.passing.update_state(1.0, 2.0, sample_weight=3.0)
        made.error.update_state([6.0], y_pred=[7.0], sample_weight=8.0)
    assert seen[0] == [1.0, 2.0, None]
    assert seen[1:3] == [[None, 3.0, 4.0], [None, 5.0, None]]
    assert seen[3:] == [[2.0, 1.0, None], [1.0, 2.0, 3.0], [[6.0], [7.0], 8.0]]


def test_a_refused_probe_changes_nothing() -> None:
    made, probe = task(2), Names()
    state = State.discover(made)
    with probing(probe, state):
        with (
            pytest.raises(ConfigurationError, match="a Names, so a Names cannot see them: leave"),
            probing(probe, state, frozenset({LOSS})),
        ):
            pass
        assert probe.kinds == ALL
