"""The loop: its parts, its order, and what it leaves untouched."""

import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import pytest
from classifier import CLASSES, Classifier, dense, head
from executions import some
from keras import ops
from loops import ROWS, arrays, loop_of, make, same, source

import treadle
from tests import forked
from treadle import data
from treadle.checkpoint import Checkpoints
from treadle.errors import DataError, StateError, TreadleWarning
from treadle.run import calls


def test_fit_reports_every_epoch_and_every_step() -> None:
    with loop_of() as loop:
        history = loop.fit(source(), validation=source(1), epochs=3)
    assert loop.progress.step == 18
    assert loop.progress.epoch == 3
    assert loop.progress.examples == 3 * ROWS
    assert history.steps("loss").shape == (18,)
    assert [sorted(epoch) for epoch in history.epochs] == 3 * [
        ["accuracy", "loss", "val_accuracy", "val_loss"]
    ]
    steps = history.steps("loss")[:6].astype("float64")
    weights = np.array([8, 8, 8, 8, 8, 4])
    assert history["loss"][0] == pytest.approx((steps * weights).sum() / ROWS, rel=1e-12)


def test_validation_leaves_training_as_if_it_had_not_run() -> None:
    with loop_of() as plain:
        plain.fit(source(), epochs=2)
    with loop_of() as validated:
        validated.fit(
            source(),
            validation={"a": source(1), "b": source(2)},
            epochs=2,
            validate_every="2 steps",
        )
    same(plain.state.arrays(), validated.state.arrays())
    np.testing.assert_array_equal(plain.history.steps("loss"), validated.history.steps("loss"))
    assert (
        plain.history["accuracy"] == validated.history.epochs[0:2]
        or [epoch["accuracy"] for epoch in validated.history.epochs] == plain.history["accuracy"]
    )
    kinds = [record.kind for record in validated.history.records]
    assert kinds == ["validation", "validation", "validation", "epoch"] * 2
    assert {"val_a_loss", "val_b_accuracy"} <= set(validated.history.names())


@pytest.mark.parametrize("every", some(["1 step", "4 steps", "auto"]))
def test_the_parts_do_what_fit_does(every: str) -> None:
    with loop_of() as whole:
        whole.fit(source(), epochs=2)
    seen: list[int] = []
    with loop_of() as parts:
        for _ in parts.epochs(2):
            for logs in parts.steps(source(), every=every):
                assert logs.step == parts.progress.step
                assert set(logs) == {"loss"}
                assert 0 <= logs["accuracy"] <= 1
                seen.append(logs.step)
    same(whole.state.arrays(), parts.state.arrays())
    assert whole.history.epochs == parts.history.epochs
    if every == "1 step":
        assert seen == list(range(1, 13))
    if every == "4 steps":
        assert seen == [4, 8, 12]


def test_loop_steps_by_time_yields_each_step_once() -> None:
    with loop_of() as loop:
        seen = []
        for logs in loop.steps(source(), every="0.001 s"):
            seen.append(logs.step)
            assert "loss" in logs
            time.sleep(0.002)
    assert len(set(seen)) == len(seen) and seen[-1] == loop.progress.step


def test_leaving_an_epoch_by_a_break_begins_the_next() -> None:
    with loop_of() as loop:
        for _ in loop.epochs(2):
            for logs in loop.steps(source(), every="2 steps"):
                if logs.step % 6 == 4:
                    break
    assert loop.progress.step == 10
    assert loop.progress.epoch == 2
    assert len(loop.history.epochs) == 2


HELD = """
import os
import sys
import numpy as np
import treadle
from tests.line import Line

loop = treadle.Loop(Line(), "run", console=False)
epochs = loop.epochs(2)
next(epochs)
steps = loop.steps(treadle.data.from_arrays(np.ones((8, 3), "float32"), batch_size=2))
next(steps), next(steps)
if os.fork() == 0:
    os.close(2)
    sys.exit()  # the run belongs to the first process
os.wait()
print(os.listdir("run/checkpoints"))
next(steps)
"""


def test_a_script_that_ends_within_an_epoch_saves_its_last_step(tmp_path: Path) -> None:
    command = [forked.python(), "-c", HELD]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0 and "Exception ignored" not in done.stderr
    assert "step-000000000000" in done.stdout and "step-000000000002" not in done.stdout
    found = Checkpoints(tmp_path / "run" / "checkpoints").latest()
    assert found is not None and found.progress.step == 3


@pytest.mark.parametrize("size", [1, 2])
def test_generators_are_closed_at_exit_in_one_process(
    size: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @calls.closed_at_exit
    def numbers(text: str) -> Any:
        try:
            yield from range(3)
        except GeneratorExit:
            raise OSError(text) from None

    monkeypatch.setattr(calls, "_open", WeakKeyDictionary())
    held = [numbers("the disk is full"), numbers("the folder is gone")]
    assert [next(one) for one in held] == [0, 0]
    monkeypatch.setattr(calls, "process_group", lambda: SimpleNamespace(size=size))
    calls._close()
    lines = capsys.readouterr().err.splitlines()
    errors = ["OSError: the folder is gone", "OSError: the disk is full"]
    assert [line for line in lines if line.startswith("OSError")] == errors * (size == 1)
    # Several processes save together, and the others may wait for messages of a step.
    assert [list(one) for one in held] == 2 * [[] if size == 1 else [1, 2]]


def test_a_call_that_ends_within_an_epoch_is_recorded() -> None:
    with loop_of() as loop:
        history = loop.fit(source(), validation=source(1), steps=8)
    assert [record.kind for record in history.records] == ["epoch", "validation"]
    assert history.records[-1].progress.step == 8
    assert {"loss", "accuracy", "val_loss", "val_accuracy"} == set(history.records[-1].values)


def test_nothing_is_recorded_twice_and_names_keep_their_order() -> None:
    class Named(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])

        def train_step(self, batch: Any) -> Any:
            loss = super().train_step(batch)["loss"]
            return {"z": loss, "loss": loss, "a": loss}

    with loop_of(make(Named)) as loop:
        history = loop.fit(source(), steps=8, validation=source(1), validate_every="4 steps")
    places = [(record.kind, record.progress.step) for record in history.records]
    assert places == [("validation", 4), ("epoch", 6), ("validation", 8)]
    assert history.step_names == ["z", "loss", "a"]


def test_closed_sources_see_every_update() -> None:
    seen: list[int] = []

    def act(loop: Any) -> Any:
        seen.append(loop.progress.step)
        x, y = arrays(len(seen))
        return x[:8], y[:8]

    with loop_of() as loop:
        loop.fit(data.closed_loop(act), steps=5, validation=source(1), validate_every="2 steps")
    assert seen == [0, 1, 2, 3, 4]


def test_single_steps_by_hand_and_windows_agree_bit_for_bit() -> None:
    x, y = arrays()
    train = data.from_arrays(x, y, batch_size=8, shuffle=False)
    with loop_of() as whole:
        whole.fit(train, epochs=1)
    with loop_of() as single:
        losses = [single.step((x[i : i + 8], y[i : i + 8]))["loss"] for i in range(0, ROWS, 8)]
    np.testing.assert_array_equal(whole.history.steps("loss"), np.array(losses, "float32"))


def test_what_is_read_to_the_end_must_have_one() -> None:
    """Training is cut into epochs; `evaluate`, `predict` and a validation would never return."""
    x, y = arrays(1)
    stream = data.closed_loop(lambda loop: (x[:4], y[:4]))
    expected = (
        "{} reads its data to the end, but this source never ends: choose how many batches with "
        "treadle.data.limited(source, batches)"
    )
    with loop_of() as loop:
        loop.fit(stream, steps=2)
        for read, what in (
            (lambda: loop.evaluate(stream), "evaluate"),
            (lambda: loop.predict(stream), "predict"),
            (lambda: loop.fit(source(), validation={"held": stream}, epochs=1), "validation"),
        ):
            with pytest.raises(DataError) as raised:
                read()
            assert str(raised.value) == expected.format(what)
        assert loop.evaluate(data.limited(stream, 2))


@pytest.mark.filterwarnings("always:.*unknown length")
def test_a_source_of_unknown_length_that_may_never_end_is_named() -> None:
    """An epoch of training has 6 batches, so that 60 of a validation are many."""
    x, y = arrays(1)

    def generated() -> Any:
        yield from [(x[:2], y[:2])] * 61

    expected = (
        r"^{} has read [\d,]+ batches of a source of unknown length, and reads to its end: if it "
        r"never ends, choose how many batches with treadle.data.limited\(source, batches\)$"
    )
    with loop_of() as loop:
        with pytest.warns(TreadleWarning, match=expected.format("evaluate")) as caught:
            loop.fit(source(), validation=generated, epochs=1)
        assert len([x for x in caught if "unknown length" in str(x.message)]) == 1
        with pytest.warns(TreadleWarning, match=expected.format("predict")):
            loop.predict(generated)


def test_evaluate_predict_and_call_change_nothing() -> None:
    with loop_of() as loop:
        loop.fit(source(), epochs=1)
        before = loop.state.arrays()
        results = loop.evaluate(source(1, shuffle=False))
        assert set(results) == {"loss", "accuracy"}
        assert results == loop.evaluate(source(1, shuffle=False))
        x, _ = arrays(1)
        outputs = loop.predict(source(1, shuffle=False))
        assert outputs.shape == (ROWS, CLASSES)
        logits = ops.convert_to_numpy(loop.task.model(x, training=False))
        np.testing.assert_allclose(outputs, logits, rtol=1e-5, atol=1e-5)

        def noise(count: int) -> Any:
            return keras.random.normal((count, 2)) + 0 * loop.task.model.layers[-1].bias[0]

        first, second = loop.call(noise, 3), loop.call(noise, 3)
        assert first.shape == (3, 2)
        assert not np.array_equal(first, second)
        assert loop.call(noise, 4).shape == (4, 2)
        trained = loop.call(lambda x: loop.task.model(x, training=True), x)
        assert trained.shape == (ROWS, CLASSES)
        same(before, loop.state.arrays())


def test_a_changed_python_value_is_named_and_the_step_recompiled() -> None:
    class Tempered(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])
            self.temperature = 1.0

        def train_step(self, batch: Any) -> Any:
            super().train_step(batch)
            return {"temperature": ops.convert_to_tensor(self.temperature)}

    task = make(Tempered)

    def cool(loop: Any) -> None:
        task.temperature = 0.5

    with loop_of(task, hooks=[treadle.at("2 steps", cool)]) as loop:
        history = loop.fit(source(), steps=4)
    assert history.steps("temperature").tolist() == [1.0, 1.0, 0.5, 0.5]
    assert history["note"] == ["recompiled because temperature changed from 1.0 to 0.5"]


def test_restore_undoes_training_and_state_arrays_are_checked_first() -> None:
    with loop_of() as loop:
        loop.fit(source(), steps=2)
        before = loop.state.arrays()
        kept = loop.view.snapshot()
        loop.fit(source(), steps=2)
        loop.view.restore(kept)
        same(before, loop.state.arrays())
        path = next(iter(before))
        wrong = {**before, path: np.zeros((1, 1))}
        wrong.pop("accuracy/total")
        with pytest.raises(StateError, match=rf"accuracy/total has no value; {path} has shape"):
            loop.state.assign(wrong)
        same(before, loop.state.arrays())
