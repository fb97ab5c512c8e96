"""Steps that run before the loop asks for them: its body always sees the state of its own step."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, FEATURES, Classifier, dense, head
from executions import long_to_compile, once
from loops import make, same

import treadle
from treadle import Options, data

JAX = keras.config.backend() == "jax"
if keras.config.backend() == "tensorflow":
    pytestmark = pytest.mark.long  # nothing runs ahead there, and it compiles each loop

STEPS = 40
BODIES: dict[str, Callable[[treadle.Loop, int], Any]] = {}
"""What the body of a `for` loop does after a step, given the loop and the number of the step."""
SNAPSHOTS: list[Any] = []


def body(function: Callable[[treadle.Loop, int], Any]) -> None:
    BODIES[function.__name__.replace("_", " ")] = function


@body
def reads_the_state_after_every_step(loop: treadle.Loop, step: int) -> Any:
    return loop.state.arrays()


@body
def reads_now_and_then(loop: treadle.Loop, step: int) -> Any:
    model = loop.task.model
    readings: dict[int, Callable[[], Any]] = {
        3: lambda: np.array(model.weights[0]),
        18: lambda: loop.evaluate(rows()),
        27: lambda: dict(loop.view.capture({}).state),
        33: model.get_weights,
        39: lambda: float(loop.task.accuracy.result()),
    }
    if JAX:  # the others neither pickle variables nor copy them
        readings |= {
            12: lambda: copy.deepcopy(model.weights[0]).numpy(),
            15: lambda: pickle.loads(pickle.dumps(model.weights[1])).numpy(),
            24: lambda: _jitted(model)(np.ones((2, FEATURES), "float32")),
        }
    return readings[step]() if step in readings else None


def _jitted(model: Any) -> Any:
    """Return a function whose trace reads the weights."""
    import jax

    return jax.jit(lambda x: model(x, training=False))


@body
def assigns_variables(loop: treadle.Loop, step: int) -> Any:
    kernel, bias = loop.task.model.weights[:2]
    if step in (9, 24):
        loop.task.optimizer.learning_rate = 1.0 / step
    if step == 33:
        bias.assign(np.ones(bias.shape))
        return np.array(kernel)
    return None


@body
def assigns_all_variables(loop: treadle.Loop, step: int) -> None:
    if step == 12:
        SNAPSHOTS.append(loop.view.snapshot())
    if step in (18, 30):
        loop.view.restore(SNAPSHOTS[-1])


@body
def changes_a_python_value(loop: treadle.Loop, step: int) -> None:
    if step == 18:
        loop.task.model.layers[1].rate = 0.1


def rows(count: int = STEPS * 4) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, FEATURES)).astype("float32")
    return data.from_arrays(x, rng.integers(0, CLASSES, size=len(x)).astype("int32"), batch_size=4)


class Dropped(Classifier):
    """It has weights, slots, a metric, and states of random generators."""

    def __init__(self) -> None:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        super().__init__([dense(), keras.layers.Dropout(0.3), head()], optimizer)


def seen(
    each: Callable[[treadle.Loop, int], Any], every: str, options: Options | None = None
) -> tuple[list[Any], list[float], dict[str, Any]]:
    """Return what a body sees after the steps, the losses, and the state at the end."""
    found: list[Any] = []
    with treadle.Loop(make(Dropped), console=False, options=options) as loop:
        for _ in loop.epochs(2):
            for logs in loop.steps(rows(), every=every):
                found.append(each(loop, logs.step))
    return found, loop.history.steps("loss").tolist(), loop.state.arrays()


@pytest.mark.parametrize(
    ("name", "every"),
    [
        *(
            pytest.param(x, "1 step", marks=long_to_compile if i % 3 else ())
            for i, x in enumerate(BODIES)
        ),
        *(
            pytest.param(x, "3 steps", marks=once if i % 3 else long_to_compile)
            for i, x in enumerate(BODIES)
        ),
    ],
)
def test_a_body_sees_the_state_of_its_step(name: str, every: str) -> None:
    # With `window=1` each step is a call of its own, and nothing runs ahead.
    expected, losses, state = seen(BODIES[name], every, Options(window=1))
    found, ahead_losses, ahead_state = seen(BODIES[name], every)
    for now, before in zip(found, expected, strict=True):
        same(_flat(now), _flat(before))
    assert ahead_losses == losses
    same(ahead_state, state)


def _flat(structure: Any) -> dict[str, Any]:
    return {str(i): np.asarray(x) for i, x in enumerate(keras.tree.flatten(structure))}


@pytest.mark.parametrize("fails", [False, True])
def test_a_body_that_ends_early_leaves_the_state_of_its_step(fails: bool) -> None:
    states: list[dict[str, Any]] = []
    for options in (Options(window=1), None):
        loop = treadle.Loop(make(Dropped), console=False, options=options)
        with pytest.raises(ZeroDivisionError) if fails else loop:
            for logs in loop.steps(rows()):
                if logs.step == 27:
                    assert 1 / (not fails)
                    break
        assert loop.progress.step == 27
        states.append(loop.state.arrays())
    same(*states)


class NotANumberLater(Dropped):
    """Its loss is NaN in step 30."""

    def train_step(self, batch: Any) -> Any:
        values = super().train_step(batch)
        bad = self.optimizer.iterations == 30
        return {"loss": keras.ops.where(bad, float("nan"), values["loss"])}


@long_to_compile
def test_a_loss_that_is_not_finite_ends_the_run_at_its_step() -> None:
    states: list[dict[str, Any]] = []
    for options in (Options(window=1), None):
        loop = treadle.Loop(make(NotANumberLater), console=False, options=options)
        with pytest.raises(treadle.errors.NonFiniteError):
            for _ in loop.steps(rows()):
                pass
        assert loop.progress.step == 30
        states.append(loop.state.arrays())
    same(*states)


def test_a_run_resumes_from_a_checkpoint_amid_steps_that_ran_ahead(tmp_path: Any) -> None:
    def trained(folder: Any, stop: int | None) -> dict[str, Any]:
        loop = treadle.Loop(make(Dropped), folder, console=False)
        with loop:
            for _ in loop.epochs(2):
                for logs in loop.steps(rows()):
                    if logs.step == stop:
                        raise KeyboardInterrupt
        return loop.state.arrays()

    whole = trained(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "parts", 29)
    same(trained(tmp_path / "parts", None), whole)


def test_a_hook_that_is_due_reads_the_state_of_its_step() -> None:
    found: list[list[Any]] = []
    for options in (Options(window=1), None):
        read: list[Any] = []
        hooks = [
            treadle.every("7 steps", lambda loop, read=read: read.append(loop.state.arrays())),
            treadle.every("1 step", lambda loop, read=read: read.append(loop.progress.step)),
        ]
        with treadle.Loop(make(Dropped), console=False, hooks=hooks, options=options) as loop:
            for _ in loop.steps(rows()):
                pass
        found.append(read)
    for now, before in zip(*found, strict=True):
        same(_flat(now), _flat(before))


def _restoring(rows_of_epoch: int, options: Options | None) -> tuple[list[float], dict[str, Any]]:
    """Train with a hook that assigns all variables, in epochs that end with a short batch."""
    kept: list[Any] = []
    hooks = [
        treadle.at("5 steps", lambda loop: kept.append(loop.snapshot())),
        treadle.at("40 steps", lambda loop: loop.restore(kept[0])),
    ]
    with treadle.Loop(make(Dropped), console=False, hooks=hooks, options=options) as loop:
        for _ in loop.epochs(2):
            for _ in loop.steps(rows(rows_of_epoch)):
                pass
    return loop.history.steps("loss").tolist(), loop.state.arrays()


@long_to_compile
def test_two_forms_of_batches_share_variables() -> None:
    (expected, state), (losses, ahead_state) = (
        _restoring(4 * STEPS + 2, options) for options in (Options(window=1), None)
    )
    assert losses == expected
    same(ahead_state, state)


@long_to_compile
def test_two_loops_share_variables() -> None:
    found: list[list[Any]] = []
    for options in (Options(window=1), None):
        task = make(Dropped)
        one, other = (treadle.Loop(task, console=False, options=options) for _ in range(2))
        steps, other_steps = iter(one.steps(rows())), iter(other.steps(rows()))
        losses: list[Any] = []
        for i in range(14):
            losses.append(next(steps)["loss"])
            if i == 2:
                kept = one.view.snapshot()
            if i in (5, 11):
                one.view.restore(kept)
            losses.append(next(other_steps)["loss"])
            losses.append(next(other_steps)["loss"])
        steps.close()
        other_steps.close()
        found.append([losses, *one.state.arrays().values()])
    for now, before in zip(*found, strict=True):
        np.testing.assert_array_equal(now, before)


def test_threads_may_read_variables() -> None:
    expected = seen(lambda loop, step: None, "1 step", Options(window=1))
    errors: list[BaseException] = []
    ended = threading.Event()
    with treadle.Loop(make(Dropped), console=False) as loop:

        def read() -> None:
            while not ended.wait(1e-4):
                try:
                    for variable in loop.task.model.variables:
                        np.array(variable)
                except BaseException as error:
                    errors.append(error)

        loop.prepare(rows())
        thread = threading.Thread(target=read)
        thread.start()
        try:
            for _ in loop.epochs(2):
                for _ in loop.steps(rows()):
                    pass
        finally:
            ended.set()
            thread.join()
    assert not errors
    same(loop.state.arrays(), expected[2])


@long_to_compile
@pytest.mark.skipif(not JAX, reason="calls Python by a function of JAX")
def test_a_step_that_calls_python_does_not_run_ahead() -> None:
    import jax

    numbers: list[int] = []

    class Calling(Dropped):
        def train_step(self, batch: Any) -> Any:
            values = super().train_step(batch)
            jax.debug.callback(lambda i: numbers.append(int(i)), self.optimizer.iterations.value)
            return values

    with treadle.Loop(make(Calling), console=False) as loop:
        for logs in loop.steps(rows()):
            if logs.step == 9:
                loop.state.arrays()
            if logs.step == 25:
                break
    jax.effects_barrier()
    assert sorted(numbers) == list(range(1, 26))


@pytest.mark.skipif(not JAX, reason="only JAX's arrays never change")
def test_steps_run_ahead_only_if_no_body_reads_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from treadle.backends.jax import windows

    calls: list[int] = []
    timed = windows._timed

    def counted(run: Any, count: int) -> Any:
        calls.append(count)
        return timed(run, count)

    monkeypatch.setattr(windows, "_timed", counted)
    monkeypatch.setattr("treadle.backends.jax.ahead.TARGET_SECONDS", 1000.0)
    seen(lambda loop, step: None, "1 step")
    assert sum(calls) == 2 * STEPS
    assert len(calls) < STEPS / 2
    calls.clear()
    seen(BODIES["reads the state after every step"], "1 step")
    assert calls.count(1) >= 2 * STEPS - 4
