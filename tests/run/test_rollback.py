"""Going back to a checkpoint, and on without the batch that made something not finite."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import treadle
from treadle import data
from treadle.core.directory import read_run
from treadle.data.reader import BatchSource
from treadle.errors import ConfigurationError, NonFiniteError
from treadle.hooks import CSV, Checkpoint, EarlyStopping, NonFinite
from treadle.hooks.log_file import read_log

ROWS, BATCH = 96, 8


class Line(treadle.Task):
    """Random numbers, an optimizer with slots, and a metric: all that must be rewound."""

    def __init__(self) -> None:
        layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.3, seed=1)]
        self.model = keras.Sequential([*layers, keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(0.05)
        self.error = keras.metrics.MeanSquaredError()

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss = treadle.minimize(
            lambda: ops.mean((self.model(x, training=True) - y) ** 2), self.model, self.optimizer
        )
        self.error.update_state(y, self.model(x))
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        x, y = batch
        return {"loss": ops.mean((self.model(x, training=False) - y) ** 2)}


class Overflowing(Line):
    """A step that returns a finite loss, and leaves a weight that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = keras.Variable(1.0)

    def train_step(self, batch: Any) -> Any:
        values = super().train_step(batch)
        self.scale.assign(self.scale * ops.exp(ops.sum(ops.maximum(ops.max(batch[0]) - 50.0, 0.0))))
        return values


def arrays(*bad: int, value: float = np.nan) -> Any:
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
    y = x[:, :1].copy()
    for batch in bad:
        x[batch * BATCH + 1, 2] = value
    return x, y


def batches(*without: int, of: Any) -> Any:
    x, y = of
    parts = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, ROWS, BATCH)]
    return [part for i, part in enumerate(parts) if i not in without]


def forward(batches_of: Any) -> Any:
    """A source that says which epoch it reads, and cannot seek."""
    return BatchSource(batches_of, None, seeks=False)


def trained(
    source: Any, directory: Path, *hooks: Any, task: type[Line] = Line, epochs: int = 1, **how: Any
) -> treadle.Loop:
    keras.utils.set_random_seed(0)
    if not any(isinstance(hook, Checkpoint) for hook in hooks):
        hooks = (Checkpoint(every="3 steps"), *hooks)
    hooks = (NonFinite(action="rollback"), *hooks)
    with treadle.Loop(task(), directory, hooks=hooks, console=False, **how) as loop:
        loop.fit(source, batches(of=arrays()), epochs=epochs)
    return loop


def require_same(one: treadle.Loop, other: treadle.Loop) -> None:
    """Every variable, every step's values and every epoch's record are equal, bit for bit."""
    theirs = other.state.arrays()
    for path, value in one.state.arrays().items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=path)
    np.testing.assert_array_equal(one.history.steps("loss"), other.history.steps("loss"))
    for mine, its in zip(one.history.epochs, other.history.epochs, strict=True):
        assert mine == its


def passed_over(loop: treadle.Loop) -> list[str]:
    return [text for text in loop.history["warning"] if text.startswith("skipped batch")]


@pytest.mark.parametrize("execution", ["auto", "eager"])
def test_a_rolled_back_run_equals_a_run_without_the_excluded_batches(
    execution: Any, tmp_path: Path
) -> None:
    options, bad = treadle.Options(execution=execution), arrays(7, 8)
    source = data.from_arrays(*bad, batch_size=BATCH, shuffle=False)
    went = trained(source, tmp_path / "a", options=options)
    lacking = batches(7, 8, of=bad)
    require_same(went, trained(lacking, tmp_path / "b", options=options))
    first, second = passed_over(went)
    assert first.startswith("skipped batch 8 of epoch 1: loss is nan at step 8, epoch 1, batch")
    assert "The batch held it already: the first array, row 1" in first
    assert second.startswith("skipped batch 9 of epoch 1: loss is nan at step 8")
    recorded = read_run(tmp_path / "a")["passed_over"]
    assert [(x["epoch"], x["batch"], x["step"]) for x in recorded] == [(0, 7, 7), (0, 8, 7)]
    logged, _ = read_log(tmp_path / "a" / "log.jsonl")
    assert [line["step"] for line in logged] == list(range(1, 11))
    assert [line["loss"] for line in logged] == [float(x) for x in went.history.steps("loss")]


def test_the_step_is_found_that_ruined_a_weight_while_its_loss_was_a_number(tmp_path: Path) -> None:
    bad = arrays(4, value=200.0)  # the loss is finite, and exp(150) is not
    went = trained(batches(of=bad), tmp_path / "a", task=Overflowing)
    require_same(went, trained(batches(4, of=bad), tmp_path / "b", task=Overflowing))
    (only,) = passed_over(went)
    assert only.startswith("skipped batch 5 of epoch 1: scale holds 1 of 1 values")


class Killed(Exception):
    pass


def two_calls(second: Any, directory: Path, *hooks: Any) -> treadle.Loop:
    """Train twice, and change what training uses in between."""
    keras.utils.set_random_seed(0)
    task = Line()
    hooks = (NonFinite(action="rollback"), Checkpoint(every="1 epoch"), CSV(), *hooks)
    with treadle.Loop(task, directory, hooks=hooks, console=False) as loop:
        loop.fit(batches(of=arrays()), epochs=1)
        task.optimizer.learning_rate = 0.001
        task.model.layers[0].kernel.assign(np.full((3, 4), 0.5))
        task.kind = "fine"
        loop.log({"note": 1.0})
        loop.fit(second, epochs=1)
    return loop


@pytest.mark.long
def test_a_rollback_undoes_no_code_between_two_calls(tmp_path: Path) -> None:
    bad = arrays(2)
    went = two_calls(batches(of=bad), tmp_path / "a")
    require_same(went, two_calls(batches(2, of=bad), tmp_path / "b"))
    assert went.task.kind == "fine"

    def noted(name: str) -> int:
        return (tmp_path / name / "log.jsonl").read_text().count('"note": 1.0')

    assert noted("a") == list(went.history["note"]).count(1.0) == 1
    assert (tmp_path / "a" / "epochs.csv").read_text().count("\n") == 3

    def killed(loop: Any) -> None:
        raise Killed

    with pytest.raises(Killed):  # after the checkpoint of the second call's beginning
        two_calls(batches(of=bad), tmp_path / "c", treadle.at("13 steps", killed))
    resumed = two_calls(batches(of=bad), tmp_path / "c", treadle.at("13 steps", lambda loop: None))
    require_same(went, resumed)
    assert noted("c") == list(resumed.history["note"]).count(1.0) == 1


def test_the_checkpoint_of_a_calls_beginning_is_not_the_best(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    task = Line()
    saver = Checkpoint(every="1 epoch", keep_best=1, monitor="loss")
    hooks = (NonFinite(action="rollback"), saver)
    with treadle.Loop(task, tmp_path, hooks=hooks, console=False) as loop:
        loop.fit(batches(of=arrays()), epochs=2)
        task.model.layers[0].kernel.assign(np.full((3, 4), 50.0))
        task.model.layers[0].bias.assign([np.inf, 0, 0, 0])  # on purpose
        loop.fit(batches(of=arrays())[:1], epochs=1)
    best = saver.saved.best()
    assert best is not None and best.progress.step == 24
    assert not any((x == 50).any() for x in best.state.values())


def test_a_rollback_needs_a_checkpoint_of_this_call(tmp_path: Path) -> None:
    def remove(loop: Any) -> None:
        until = time.monotonic() + 60
        while not (found := [*(tmp_path / "checkpoints").glob("step-*12-1")]):
            assert time.monotonic() < until  # until that of the second call is written
            time.sleep(0.01)
        for place in found:
            shutil.rmtree(place)

    expected = (
        "loss is nan at step 15, epoch 2, batch 3. The batch held it already: the first array, "
        "row 1. Fix or remove these rows (numbered within the batch). The run cannot roll back, "
        "because the checkpoint with which this call of loop.fit began cannot be read: it was not "
        "written, as a warning says, or the files of the run directory were changed"
    )
    with pytest.raises(NonFiniteError, match=re.escape(expected)):
        two_calls(batches(of=arrays(2)), tmp_path, treadle.at("13 steps", remove))


def test_a_rollback_may_return_to_the_previous_epoch(tmp_path: Path) -> None:
    good, bad = batches(of=arrays()), batches(of=arrays(0))

    def epochs(reading: Any) -> Any:
        return iter(bad if reading.epoch == 1 else good)

    def lacking(reading: Any) -> Any:
        return iter(bad[1:] if reading.epoch == 1 else good)

    stopping = [EarlyStopping(monitor="val_loss", patience=9) for _ in range(2)]
    seldom = Checkpoint(every="7 steps")
    went = trained(forward(epochs), tmp_path / "a", stopping[0], seldom, epochs=3)
    other = trained(forward(lacking), tmp_path / "b", stopping[1], seldom, epochs=3)
    require_same(went, other)
    assert stopping[0].state() == stopping[1].state()
    assert "skipped batch 1 of epoch 2" in passed_over(went)[0]


def test_another_process_and_a_replay_skip_the_excluded_batch_too(tmp_path: Path) -> None:
    source = data.from_arrays(*arrays(4), batch_size=BATCH, shuffle=False)
    stopped = trained(source, tmp_path / "a", treadle.at("7 steps", lambda loop: loop.stop("!")))
    assert stopped.progress.step == 7 and stopped.progress.batch == 8
    for later in (tmp_path / "a" / "checkpoints").glob("*7*"):  # it resumes before the batch
        shutil.rmtree(later)
    whole = trained(source, tmp_path / "b")
    keras.utils.set_random_seed(0)
    report = treadle.doctor.replay(Line(), source, tmp_path / "b", step=6)
    assert report.agreement.difference == "" and report.agreement.compared
    assert report.batch_number == 7
    assert whole.progress.step == 11


@pytest.mark.long
def test_a_nan_not_caused_by_the_data_ends_the_run(tmp_path: Path) -> None:
    expected = (
        "The 10 batches before it failed at this step too and were excluded, so single batches are "
        "not the cause: examine the data, the learning rate, and the weights of the newest "
        "checkpoint"
    )
    with pytest.raises(NonFiniteError, match=re.escape(expected)):
        trained(batches(of=arrays(*range(1, 12))), tmp_path)


@pytest.mark.long
def test_a_batch_with_nan_is_excluded_in_each_of_many_epochs(tmp_path: Path) -> None:
    good, bad = batches(of=arrays())[0], batches(of=arrays(0))[0]
    loop = trained([good, bad], tmp_path, epochs=12)
    assert loop.progress.step == 12
    assert len(passed_over(loop)) == 12


def test_a_run_that_does_not_repeat_itself_says_so(tmp_path: Path) -> None:
    given = []

    def once(reading: Any) -> Any:
        given.append(reading.epoch)
        return iter(batches(of=arrays(4) if len(given) == 1 else arrays()))

    loop = trained(forward(once), tmp_path)
    assert loop.progress.step == 12
    (warning,) = loop.history["warning"]
    assert re.search(
        "rolled back to find the cause .* at step .*, but it did not occur again", warning
    )


def test_rollback_needs_a_directory() -> None:
    with pytest.raises(ConfigurationError, match="needs checkpoints, but this run has no"):
        treadle.Loop(Line(), hooks=[NonFinite(action="rollback")], console=False)


def test_rollback_is_refused_in_a_hand_written_loop(tmp_path: Path) -> None:
    hooks = [NonFinite(action="rollback")]
    with treadle.Loop(Line(), tmp_path, hooks=hooks, console=False) as loop:
        for call in (
            lambda: loop.step(batches(of=arrays())[0]),
            lambda: next(iter(loop.epochs(1))),
            lambda: next(iter(loop.steps(batches(of=arrays())))),
        ):
            with pytest.raises(ConfigurationError, match=r"rollback.* needs loop\.fit, but"):
                call()
