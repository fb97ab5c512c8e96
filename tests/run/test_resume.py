"""A run that resumes in another process ends like an uninterrupted one.

Here a process ends by an exception, and the next one is a new task and a new loop; what signals and
kills do is tested with processes of their own.
"""

import json
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
from executions import long_to_compile, once
from keras import ops

import treadle
from tests.dying import Dying
from treadle import data
from treadle.core.processes import process_group
from treadle.errors import (
    ConfigurationError,
    DirectoryError,
    StateError,
    Terminated,
    TreadleWarning,
)
from treadle.hooks import Checkpoint, EarlyStopping

ROWS, EVERY = 40, "3 steps"


def source(batch_size: int = 8, rows: int = ROWS) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype("float32")
    return data.from_arrays(x, x[:, :1], batch_size=batch_size)


class Noisy(treadle.Task):
    """Draws, averages, schedules and counts: all that a resume can lose."""

    def __init__(self, units: int = 6, built: bool = True) -> None:
        layers = [keras.layers.Dense(units, "relu"), keras.layers.BatchNormalization()]
        inputs = [keras.Input((4,))] if built else []
        self.model = keras.Sequential(
            [*inputs, *layers, keras.layers.Dropout(0.2), keras.layers.Dense(1)]
        )
        rate = keras.optimizers.schedules.CosineDecay(1e-2, 30)
        self.optimizer = keras.optimizers.Adam(rate, use_ema=True, ema_overwrite_frequency=4)
        self.error = keras.metrics.MeanSquaredError()

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            noise = keras.random.normal(ops.shape(x))
            return ops.mean((self.model(x + 0.1 * noise, training=True) - y) ** 2)

        loss = treadle.minimize(objective, self.model, self.optimizer)
        self.error.update_state(y, self.model(x))
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        self.error.update_state(y, self.model(x))
        return {"loss": ops.mean((self.model(x) - y) ** 2)}


class Drawing(treadle.Hook):
    """Draws from global generators, and logs the numbers."""

    def record(self, loop: Any, record: Any) -> None:
        if record.kind == "epoch":
            loop.log({"drawn": random.random() + np.random.random()})


def fit_twice(loop: treadle.Loop) -> None:
    loop.fit(source(), validation=source(5), epochs=3, validate_every="4 steps")
    loop.fit(source(10), validation=source(), steps=6)


def own_epochs(loop: treadle.Loop) -> None:
    for epoch in loop.epochs(3):
        for logs in loop.steps(source(), every="2 steps"):
            loop.log({"seen": logs["loss"], "in": epoch})


def bare_steps(loop: treadle.Loop) -> None:
    for _ in range(3):
        for _ in loop.steps(source(), every="4 steps"):
            pass


def endless(loop: treadle.Loop) -> None:
    def batches() -> Iterator[Any]:
        while True:
            x = np.random.normal(size=(8, 4)).astype("float32")
            yield x, x[:, :1]

    stream = data.limited(batches, 5)
    loop.fit(stream, epochs=3)


def tensorflow_stream(loop: treadle.Loop) -> None:
    tf = pytest.importorskip("tensorflow")
    x = np.random.default_rng(0).normal(size=(38, 4)).astype("float32")  # the last batch is short
    stream = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(20, seed=2)
    stream = stream.map(lambda x, y: (x * 2 - 1, y), num_parallel_calls=2).batch(8).prefetch(2)
    loop.fit(stream, validation=source(5), epochs=3)


LOOPS: dict[Callable[[treadle.Loop], None], Any] = {
    fit_twice: once,
    own_epochs: once,
    bare_steps: (),
    endless: once,
    tensorflow_stream: once,
}


def run(
    directory: Path,
    body: Callable[[treadle.Loop], None] = fit_twice,
    die_at: int | None = None,
    error: BaseException | None = None,
    hooks: Any = (),
    options: treadle.Options | None = None,
    every: str = EVERY,
    jit: bool | None = False,
    **how: Any,
) -> treadle.Loop:
    """Do what a script does from its first line on."""
    keras.utils.set_random_seed(1)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    if options is None and keras.config.backend() == "torch":
        options = treadle.Options(execution="eager")  # capturing would take most of the time
    if keras.config.backend() == "tensorflow":  # XLA takes three times as long to compile
        options = replace(options or treadle.Options(), jit=jit)
    task = Noisy(**{name: how.pop(name) for name in ("units", "built") if name in how})
    chosen = [Checkpoint(every=every), Drawing(), Dying(die_at, error), *hooks]
    with treadle.Loop(
        task, directory, hooks=chosen, options=options, **{"console": False, **how}
    ) as loop:
        body(loop)
    return loop


def logged(directory: Path) -> list[Any]:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{n: v for n, v in line.items() if n != "seconds"} for line in lines]


def same_run(a: treadle.Loop, b: treadle.Loop) -> None:
    assert a.progress.step == b.progress.step and a.progress.epoch == b.progress.epoch
    theirs = b.state.arrays()
    for path, value in a.state.arrays().items():
        assert value.tobytes() == theirs[path].tobytes(), path
    assert a.directory is not None and b.directory is not None
    assert logged(a.directory) == logged(b.directory)
    assert a.history.epochs == b.history.epochs
    np.testing.assert_array_equal(a.history.steps("loss"), b.history.steps("loss"))


def test_an_interrupted_run_equals_an_uninterrupted_run(tmp_path: Path) -> None:
    how: Any = {"options": treadle.Options()}
    straight = run(tmp_path / "straight", **how)
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", die_at=10, **how)
    same_run(run(tmp_path / "cut", **how), straight)


@pytest.mark.long
@pytest.mark.parametrize(
    "body", [pytest.param(body, marks=marks, id=body.__name__) for body, marks in LOOPS.items()]
)
def test_a_run_interrupted_often_equals_an_uninterrupted_run(tmp_path: Path, body: Any) -> None:
    how: Any = {"body": body, "jit": None, "options": treadle.Options()}
    straight = run(tmp_path / "straight", **how)
    for step in (2, 7, 15):  # before a checkpoint, in and at the end of epochs
        with pytest.raises(OSError, match="killed"):
            run(tmp_path / "cut", die_at=step, **how)
    same_run(run(tmp_path / "cut", **how), straight)


def test_early_stopping_and_the_best_weights_are_restored(tmp_path: Path) -> None:
    def patient() -> Any:
        return [EarlyStopping("val_loss", patience=2)]

    def body(loop: treadle.Loop) -> None:
        loop.fit(source(), validation=source(5), epochs=30)

    straight = run(tmp_path / "straight", body, hooks=patient())
    last = straight.progress.step
    assert straight.reason is not None and last < 150
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", body, die_at=last - 1, hooks=patient())
    cut = run(tmp_path / "cut", body, hooks=patient())
    assert cut.reason == straight.reason
    same_run(cut, straight)


@pytest.mark.long
def test_windows_may_have_other_sizes_after_a_resume(tmp_path: Path) -> None:
    straight = run(tmp_path / "straight")
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", die_at=8, options=treadle.Options(window=1))
    same_run(run(tmp_path / "cut", options=treadle.Options(window=4)), straight)


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "error", "code"),
    [(signal.SIGINT, KeyboardInterrupt, None), (signal.SIGTERM, Terminated, 143)],
)
def test_a_signal_saves_at_the_next_boundary(
    tmp_path: Path, number: signal.Signals, error: Any, code: int | None
) -> None:
    before = signal.getsignal(number)

    class Asking(treadle.Hook):
        def steps(self, loop: Any, logs: Any) -> None:
            if loop.progress.step == 7:
                os.kill(os.getpid(), number)

    straight = run(tmp_path / "straight", hooks=[treadle.every("7 steps", lambda loop: None)])
    with pytest.raises(error) as caught:
        run(
            tmp_path / "cut",
            hooks=[treadle.every("7 steps", lambda loop: None), Asking()],
            every="1 h",
        )
    assert getattr(caught.value, "code", None) == code
    assert signal.getsignal(number) is before
    assert not (tmp_path / "cut" / "state.safetensors").exists()
    found = treadle.checkpoint.Checkpoints(tmp_path / "cut" / "checkpoints").latest()
    assert found is not None and found.progress.step == 7  # no step is lost
    record = json.loads((tmp_path / "cut" / "run.json").read_text())
    assert record["finished"] is None and record["reason"] == f"received {number.name}"
    going_on = run(tmp_path / "cut", hooks=[treadle.every("7 steps", lambda loop: None)])
    same_run(going_on, straight)


def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    class Asking(treadle.Hook):
        def steps(self, loop: Any, logs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated) as caught:
        run(tmp_path, hooks=[Asking()])
    assert caught.value.code == 143
    found = treadle.checkpoint.Checkpoints(tmp_path / "checkpoints")
    assert found.steps() == [0]  # none was saved on leaving


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path) -> None:
    handlers: list[Any] = []

    class Looking(treadle.Hook):
        def steps(self, loop: Any, logs: Any) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=run, args=(tmp_path,), kwargs={"hooks": [Looking()]})
    with pytest.warns(TreadleWarning, match="outside the main thread, where Python cannot handle"):
        thread.start()
        thread.join()
    assert set(handlers) == {before}
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["finished"] and "launcher" not in record


def test_within_ray_a_thread_is_no_reason_to_warn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_RAYLET_PID", "7")
    monkeypatch.setattr(process_group(), "launcher", "")
    monkeypatch.setattr(process_group(), "in_thread", False)
    treadle.setup()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        thread = threading.Thread(target=run, args=(tmp_path,))
        thread.start()
        thread.join()
    assert [str(one.message) for one in shown if "main thread" in str(one.message)] == []
    assert json.loads((tmp_path / "run.json").read_text())["launcher"] == "Ray"


def test_a_run_ended_by_a_deadline_can_be_resumed(tmp_path: Path) -> None:
    def body(loop: treadle.Loop) -> None:
        loop.fit(source(), epochs=3, until="0.000001 s")

    first = run(tmp_path / "cut", body)
    assert first.view.unfinished and first.reason == "time limit reached"
    assert not (tmp_path / "cut" / "state.safetensors").exists()

    def forever(loop: treadle.Loop) -> None:
        loop.fit(source(), epochs=3, until="1 h")

    straight = run(tmp_path / "straight", forever)
    same_run(run(tmp_path / "cut", forever, override=["until"]), straight)


@pytest.mark.long
def test_a_time_limit_alone_holds_for_a_resumed_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step takes a second; with `epochs`, the limit is that of a process."""
    now = [0.0]
    monkeypatch.setattr("treadle.run.call.time.monotonic", lambda: now[0])

    def train(limits: dict[str, Any], die_at: int | None) -> treadle.Loop:
        def second(loop: Any) -> None:
            now[0] += 1
            if loop.progress.step == die_at:
                raise OSError("killed")

        hooks = [treadle.every("1 step", second), treadle.every("1 step", lambda x: x.save())]
        directory = tmp_path / "-".join(limits)
        with treadle.Loop(Noisy(), directory, hooks, console=False) as loop:
            loop.fit(source(), until="8 s", **limits)
        return loop

    # The second of the fourth step is later than its checkpoint.
    for limits, steps in ({}, 9), ({"epochs": 9}, 12):
        with pytest.raises(OSError, match="killed"):
            train(limits, die_at=5)
        loop = train(limits, die_at=None)
        assert (loop.progress.step, loop.reason) == (steps, "time limit reached")
        assert loop.view.unfinished == bool(limits)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"units": 7}, r"settings\.units was 6, now 7"),
        ({"body": own_epochs}, r"holds another run: .*train was .* now None"),
    ],
)
def test_another_configuration_is_not_resumed(tmp_path: Path, changed: Any, message: str) -> None:
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, die_at=5)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    with pytest.raises(DirectoryError, match=message):
        run(tmp_path, **changed)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_shapes_that_changed_are_all_listed_and_nothing_is_assigned(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, die_at=5)
    with pytest.raises(
        StateError, match=r"(?s)cannot resume from its last.*layers/0/kernel has shape \(4, 6\)"
    ):
        run(tmp_path, units=7, override=True)


@pytest.mark.long
def test_a_finished_call_restores_its_weights_before_training(tmp_path: Path) -> None:
    first = run(tmp_path, own_epochs)
    results = first.evaluate(source())
    again = run(tmp_path, own_epochs)
    assert again.reason == "it was finished before"
    assert again.evaluate(source()) == results
    unbuilt = tmp_path / "unbuilt"
    results = run(unbuilt, own_epochs, built=False).evaluate(source())
    assert run(unbuilt, own_epochs, built=False).evaluate(source()) == results

    def body(loop: treadle.Loop) -> None:
        with pytest.raises(ConfigurationError, match=r"kernel was not yet built.*loop\.prepare"):
            loop.evaluate(source())
        loop.prepare(source())
        assert loop.evaluate(source()) == results

    run(unbuilt, body, built=False)


@long_to_compile
def test_a_resumed_loop_evaluates_and_predicts_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="killed"):
        run(tmp_path, die_at=5, every="1 step")
    found = treadle.checkpoint.Checkpoints(tmp_path / "checkpoints").latest()
    assert found is not None

    def body(loop: treadle.Loop) -> None:
        loop.evaluate(source())
        loop.predict(source())
        for path, value in loop.state.arrays().items():
            if path.startswith("model/"):
                np.testing.assert_array_equal(value, found.state[path], err_msg=path)

    run(tmp_path, body)


def test_loop_save_saves_immediately(tmp_path: Path) -> None:
    def body(loop: treadle.Loop) -> None:
        for logs in loop.steps(source(), every="1 step"):
            if logs.step == 4:
                loop.save()
                raise OSError("killed")

    with pytest.raises(OSError, match="killed"):
        run(tmp_path, body, every="1 h")
    found = treadle.checkpoint.Checkpoints(tmp_path / "checkpoints").latest()
    assert found is not None and found.progress.step == 4
    with pytest.raises(ConfigurationError, match="writes into the run directory"):
        treadle.Loop(Noisy(), hooks=[Checkpoint()])
    with (
        pytest.raises(ConfigurationError, match="needs a directory"),
        treadle.Loop(Noisy(), console=False) as loop,
    ):
        loop.fit(source(), epochs=1)
        loop.save()


def test_two_loops_cannot_train_into_one_directory(tmp_path: Path) -> None:
    def body(loop: treadle.Loop) -> None:
        for _ in loop.steps(source(), every="2 steps"):
            with pytest.raises(DirectoryError, match="by another loop of this process: wait"):
                treadle.Loop(Noisy(), tmp_path, console=False)

    run(tmp_path, body)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "5"}, "cannot read '5'"),
        ({"keep_every": "2 epochs"}, "keep_every='2 epochs' must count steps"),
        ({"keep_best": 2}, "keep_best=2 needs monitor="),
        ({"keep_best": 2, "monitor": "points"}, "cannot infer from the name 'points'"),
        ({"keep_last": 0}, "keep_last must be at least 1"),
    ],
)
def test_invalid_checkpoint_settings(tmp_path: Path, arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        treadle.Loop(Noisy(), tmp_path, hooks=[Checkpoint(**arguments)], console=False)


def test_interleaved_loops_restore_signal_handlers() -> None:
    before = signal.getsignal(signal.SIGINT)
    first, second = (treadle.Loop(Noisy(), console=False) for _ in range(2))
    one = first.steps(source(), every="1 step")
    next(one)
    other = second.steps(source(), every="1 step")
    next(other)
    one.close()
    other.close()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.long
def test_a_process_may_end_between_two_calls(tmp_path: Path) -> None:
    """The record then says that the run is finished, as one of a script with one call is."""

    def patient() -> Any:
        return [EarlyStopping("val_loss", patience=1)]

    def first(loop: treadle.Loop) -> None:
        loop.fit(source(), validation=source(5), epochs=4, validate_every="4 steps")

    def both(loop: treadle.Loop) -> None:
        first(loop)
        loop.fit(source(10), validation=source(), epochs=2)

    straight = run(tmp_path / "straight", both, hooks=patient())
    run(tmp_path / "cut", first, hooks=patient())
    with pytest.raises(OSError, match="killed"):
        run(tmp_path / "cut", both, die_at=straight.progress.step - 3, hooks=patient())
    same_run(run(tmp_path / "cut", both, hooks=patient()), straight)


class Ending(treadle.Hook):
    """Logs when training begins and ends, and changes a variable when it begins."""

    def start(self, loop: Any) -> None:
        loop.task.optimizer.learning_rate.assign(0.03)

    def end(self, loop: Any, error: BaseException | None) -> None:
        if error is None:
            loop.log({"ended": loop.progress.step})


class Rated(Noisy):
    """Reads a rate that the script or a hook sets, and a value that it may set late."""

    given: ClassVar[dict[str, float]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.optimizer, self.scale = keras.optimizers.SGD(0.1), 1

    def train_step(self, batch: Any) -> Any:
        rate = ops.convert_to_tensor(self.optimizer.learning_rate)
        weight = self.scale * self.given["weight"]
        return {**super().train_step(batch), "rate": rate, "weight": weight}


def sets_variables(loop: treadle.Loop) -> None:
    """The body sets a variable and a value, draws numbers, reads weights, logs and evaluates."""
    task = loop.task
    task.given["weight"] = 2.0
    loop.log({"before": 1})
    for epoch in loop.epochs(3):
        task.optimizer.learning_rate.assign(0.01 / (1 + epoch))
        task.scale = epoch
        first = float(ops.convert_to_numpy(task.model.weights[0])[0, 0])
        drawn = float(ops.convert_to_numpy(keras.random.normal(())))
        error = loop.evaluate(source(5))["loss"]
        loop.log({"first": first, "drawn": drawn + random.random(), "evaluated": error})
        for _ in loop.steps(source(), every="auto"):
            pass
    loop.log({"between": 1})
    task.optimizer.learning_rate.assign(0.02)
    for logs in loop.steps(source()):
        loop.log({"rate of step": logs["rate"]})


def builds_late(loop: treadle.Loop) -> None:
    """The step cannot be built before the body has run."""
    loop.task.given.clear()
    for _ in loop.epochs(4):
        loop.task.given["weight"] = 2.0
        for _ in loop.steps(source(), every="auto"):
            pass


def doubled(loop: Any) -> None:
    loop.task.scale *= 2


@pytest.mark.parametrize(
    ("body", "every", "at"),
    [
        (sets_variables, "1 epoch", 14),  # the newest checkpoint is of step 10
        pytest.param(sets_variables, "3 steps", 14, marks=pytest.mark.long),  # of step 12
        pytest.param(
            sets_variables, "1 epoch", 18, marks=pytest.mark.long
        ),  # of the first call's end
        pytest.param(builds_late, "1 epoch", 14, marks=pytest.mark.long),
    ],
)
def test_the_body_of_an_epoch_runs_again(tmp_path: Path, body: Any, every: str, at: int) -> None:
    """What code sets after the checkpoint stays, and what it had set before is replaced."""

    def train(directory: Path, die_at: int | None) -> treadle.Loop:
        keras.backend.clear_session()
        keras.utils.set_random_seed(1)
        change = [treadle.every("3 steps", doubled)] if body is builds_late else []
        chosen = [Checkpoint(every=every), Dying(die_at), Ending(), *change]
        with treadle.Loop(Rated(), directory, hooks=chosen, console=False) as loop:
            body(loop)
        return loop

    straight = train(tmp_path / "straight", None)
    with pytest.raises(OSError, match="killed"):
        train(tmp_path / "resumed", at)
    same_run(train(tmp_path / "resumed", None), straight)
    told = [line for line in logged(tmp_path / "resumed") if "ended" in line]
    assert [line["step"] for line in told] == [20]


def test_logs_of_steps_begin_after_fit() -> None:
    with treadle.Loop(Noisy(), console=False) as loop:
        loop.fit(source(), epochs=1)
        first = next(iter(loop.steps(source())))["loss"]
    assert first == pytest.approx(loop.history.steps("loss")[5])
