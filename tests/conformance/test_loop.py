"""The loop, on every backend: its parts, its order, its messages, and what it leaves untouched."""

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from cases import CLASSES, FEATURES, Classifier, dense, head
from keras import ops

import treadle
from treadle import data
from treadle.errors import (
    ConfigurationError,
    DataError,
    DirectoryError,
    NonFiniteError,
    StateError,
    StepError,
)

pytestmark = pytest.mark.any_backend

ROWS = 44  # 5 batches of 8 and a short one of 4


def arrays(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(ROWS, FEATURES)).astype("float32")
    return x, rng.integers(0, CLASSES, size=ROWS).astype("int32")


def source(seed: int = 0, **kwargs: Any) -> Any:
    return data.from_arrays(*arrays(seed), batch_size=8, **kwargs)


class WithEverything(Classifier):
    """Dropout and BatchNorm, so that whatever validation touched would show."""

    def __init__(self) -> None:
        super().__init__(
            [
                dense(),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dropout(0.3, seed=4),
                head(),
            ],
            keras.optimizers.Adam(1e-2),
        )


def make(task: Any = WithEverything) -> Any:
    keras.utils.set_random_seed(0)
    return task()


def loop_of(task: Any = None, **kwargs: Any) -> treadle.Loop:
    return treadle.Loop(task or make(), console=False, **kwargs)


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert list(a) == list(b)
    for path in a:
        np.testing.assert_array_equal(a[path], b[path], err_msg=path)


@pytest.mark.every_backend
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


@pytest.mark.parametrize("every", ["1 step", "4 steps", "auto"])
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


def test_state_is_exactly_at_the_step_that_the_body_sees() -> None:
    states: dict[int, dict[str, Any]] = {}
    with loop_of() as loop:
        for logs in loop.steps(source(), every="2 steps"):
            states[logs.step] = loop.state.arrays()
    with loop_of() as other:
        other.fit(source(), steps=4)
    same(states[4], other.state.arrays())


def test_a_look_by_time_needs_a_new_step() -> None:
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


def test_what_ends_within_an_epoch_is_recorded() -> None:
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


def test_a_call_goes_on_where_the_last_one_stopped() -> None:
    with loop_of() as whole:
        whole.fit(source(), epochs=2)
    with loop_of() as pieces:
        train = source()
        pieces.fit(train, steps=4)
        assert pieces.progress.batch == 4
        pieces.fit(train, steps=5)
        pieces.fit(train, steps=3)
    same(whole.state.arrays(), pieces.state.arrays())


@pytest.mark.long_to_compile
@pytest.mark.every_backend
def test_single_steps_by_hand_and_windows_agree_bit_for_bit() -> None:
    x, y = arrays()
    train = data.from_arrays(x, y, batch_size=8, shuffle=False)
    with loop_of() as whole:
        whole.fit(train, epochs=1)
    with loop_of() as single:
        losses = [single.step((x[i : i + 8], y[i : i + 8]))["loss"] for i in range(0, ROWS, 8)]
    np.testing.assert_array_equal(whole.history.steps("loss"), np.array(losses, "float32"))


def test_hooks_run_when_they_are_due_and_their_dicts_are_logged() -> None:
    moments: dict[str, list[int]] = {
        "every": [],
        "at": [],
        "after": [],
        "epochs": [],
        "examples": [],
    }

    def note(name: str) -> Any:
        def hook(loop: Any) -> Any:
            moments[name].append(loop.progress.step)
            return {f"seen_{name}": loop.progress.examples}

        return hook

    hooks = [
        treadle.every("5 steps", note("every")),
        treadle.at("7 steps", note("at")),
        treadle.after("60 examples", note("after")),
        treadle.every("2 epochs", note("epochs")),
        treadle.every("40 examples", note("examples")),
    ]
    with loop_of(hooks=hooks) as loop:
        history = loop.fit(source(), epochs=4)
    assert moments["every"] == [5, 10, 15, 20]
    assert moments["at"] == [7]
    assert moments["after"] == [8]  # an epoch is 6 steps of 44 examples
    assert moments["epochs"] == [12, 24]
    assert moments["examples"] == [5, 11, 16, 22]  # the first boundary at or after each 40
    assert history["seen_at"] == [52]


class Counted(treadle.Hook):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, loop: Any) -> None:
        self.calls.append("start")

    def end(self, loop: Any, error: Any) -> None:
        self.calls.append(error)


def test_hooks_start_and_end_once_for_each_call_of_fit_and_once_for_the_parts() -> None:
    hook = Counted()
    with loop_of(hooks=[hook]) as loop:
        loop.fit(source(), steps=2)
        assert hook.calls == ["start", None]
        x, y = arrays()
        loop.step((x[:8], y[:8]))
        loop.step((x[:8], y[:8]))
        for _ in loop.steps(source()):
            pass
        assert hook.calls == ["start", None, "start"]
    assert hook.calls == ["start", None, "start", None]
    error, hook = ValueError("in the body"), Counted()
    with pytest.raises(ValueError, match="in the body"), loop_of(hooks=[hook]) as loop:
        for _ in loop.steps(source()):
            raise error
    assert hook.calls == ["start", error]


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


class Detailed(treadle.DetailedHook):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def before(self, loop: Any) -> None:
        self.calls.append(loop.progress.step)

    def validation(self, loop: Any, results: Any) -> None:
        self.calls.append("validation" if results is None else set(results))

    def evaluation(self, loop: Any, results: Any) -> None:
        self.calls.append("evaluation" if results is None else set(results))


class WithoutBase(treadle.Hook):
    """A hook that defines a method of `DetailedHook` without that base class."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def before(self, loop: Any) -> None:
        self.calls.append(loop.progress.step)


def test_detailed_hooks_are_called_before_windows_and_around_evaluations() -> None:
    hook, other = Detailed(), WithoutBase()
    evaluating = treadle.at("2 steps", lambda loop: loop.evaluate(source(1)) and None)
    with loop_of(hooks=[hook, other, evaluating]) as loop:
        loop.fit(source(), validation=source(1), steps=4, validate_every="4 steps")
        loop.evaluate(source(1))  # after training
    results = {"loss", "accuracy"}
    validated = {f"val_{name}" for name in results}
    assert other.calls[0] == 0 and 2 in other.calls  # a window ends before the evaluation
    at = hook.calls.index("evaluation")
    assert hook.calls[at - 1] < 2 and hook.calls[at : at + 3] == ["evaluation", results, 2]
    assert hook.calls[-2:] == ["validation", validated]
    assert [call for call in hook.calls if isinstance(call, int)] == other.calls


def test_stopping_is_told_and_ends_at_the_boundary() -> None:
    hooks = [treadle.every("3 steps", lambda loop: loop.stop("seen enough"))]
    with loop_of(hooks=hooks) as loop:
        loop.fit(source(), epochs=5)
    assert loop.progress.step == 3
    assert loop.reason == "seen enough"
    with loop_of() as loop:
        loop.fit(source(), epochs=10_000, until="0.01 s")
    assert loop.reason == "time limit reached"


@pytest.mark.every_backend
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


@pytest.mark.every_backend
def test_a_changed_python_value_is_named_and_compiled_anew() -> None:
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


@pytest.mark.every_backend
def test_a_step_that_counts_in_python_is_refused() -> None:
    class Counting(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])
            self.count = 0

        def train_step(self, batch: Any) -> Any:
            self.count += 1
            return super().train_step(batch)

    with (
        pytest.raises(StepError, match=r"changes Python values \(count changed from .* keras.Var"),
        loop_of(make(Counting)) as loop,
    ):
        loop.fit(source(), steps=2)


def test_errors_of_the_user_say_where_the_run_stood() -> None:
    class Broken(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])

        def train_step(self, batch: Any) -> Any:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine") as caught, loop_of(make(Broken)) as loop:
        loop.fit(source(), epochs=1)
    assert caught.value.__notes__[-1] == (
        "in train_step, step 1 (epoch 1, batch 1); the weights are those before it"
    )
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
    with pytest.raises(ConfigurationError, match="steps must be at least 1, not -3"):
        loop_of().fit(source(), steps=-3)
    with pytest.raises(ConfigurationError, match="must be a time, for example '30 min'"):
        loop_of().fit(source(), until="3 epochs")
    endless = data.closed_loop(lambda loop: arrays())
    with pytest.raises(
        ConfigurationError, match=r"the source never ends, so it has no epochs: use"
    ):
        loop_of().fit(endless, epochs=1)
    with pytest.raises(ConfigurationError, match=r"is not a hook: schedule a function"):
        loop_of(hooks=[print])
    with pytest.raises(DataError, match="gave no batch"):
        loop_of().fit(lambda: iter(()), epochs=1)
    with pytest.raises(DataError, match=r"the batch of step 9 is not available"):
        loop_of().batch_at(9)

    class Silent(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])

        def train_step(self, batch: Any) -> None:
            pass

    with pytest.raises(StepError, match="returned nothing, and no metric of the task changed"):
        loop_of(make(Silent)).fit(source(), epochs=1)

    class Colliding(Classifier):
        def __init__(self) -> None:
            super().__init__([dense(), head()])

        def train_step(self, batch: Any) -> Any:
            return {"accuracy": super().train_step(batch)["loss"]}

    with pytest.raises(
        StepError, match="returns 'accuracy', and a metric of the task has this name"
    ):
        loop_of(make(Colliding)).fit(source(), epochs=1)

    class NoEvaluation(treadle.Task):
        def __init__(self) -> None:
            self.w = keras.Variable(1.0)
            self.optimizer = keras.optimizers.SGD(0.1)

        def train_step(self, batch: Any) -> Any:
            return treadle.minimize(lambda: self.w * self.w, [self.w], self.optimizer)

    with pytest.raises(ConfigurationError, match="NoEvaluation has no eval_step: write one"):
        loop_of(NoEvaluation()).fit(source(), validation=source(), epochs=1)
    with pytest.raises(ConfigurationError, match="neither a predict_step nor a model"):
        loop_of(NoEvaluation()).predict(source())


def test_labels_of_the_wrong_shape_come_out_with_the_place() -> None:
    x, _ = arrays()
    wrong = data.from_arrays(x, np.zeros((ROWS, 7), "int32"), batch_size=8)
    with pytest.raises(Exception) as caught, loop_of() as loop:
        loop.fit(wrong, epochs=1)
    assert "in train_step, step 1 (epoch 1, batch 1)" in caught.value.__notes__[-1]


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_rows() -> None:
    x, y = arrays()
    x[17, 2] = np.nan
    train = data.from_arrays(x, y, batch_size=8, shuffle=False)
    with pytest.raises(NonFiniteError, match=r"(?s)loss.*step 3.*row"), loop_of() as loop:
        loop.fit(train, epochs=1)


def test_the_state_takes_back_what_it_gave_and_checks_it_first() -> None:
    with loop_of() as loop:
        loop.fit(source(), steps=2)
        before = loop.state.arrays()
        kept = loop.snapshot()
        loop.fit(source(), steps=2)
        loop.restore(kept)
        same(before, loop.state.arrays())
        path = next(iter(before))
        wrong = {**before, path: np.zeros((1, 1))}
        wrong.pop("accuracy/total")
        with pytest.raises(StateError, match=rf"accuracy/total has no value; {path} has shape"):
            loop.state.assign(wrong)
        same(before, loop.state.arrays())


def test_a_run_leaves_its_directory_and_is_not_run_twice(tmp_path: Path) -> None:
    configuration = {"task": "WithEverything", "settings": {"units": 5}}
    with loop_of(directory=tmp_path, configuration=configuration) as loop:
        first = loop.fit(source(), validation=source(1), epochs=2)
    found = {path.name for path in tmp_path.iterdir()}
    assert {"run.json", "log.jsonl", "epochs.csv", "model.keras", "state.safetensors"} <= found
    with loop_of(directory=tmp_path, configuration=configuration) as again:
        history = again.fit(source(), validation=source(1), epochs=2)
    assert again.progress == loop.progress
    assert again.reason == "it was finished before"
    assert history.epochs == first.epochs
    np.testing.assert_array_equal(history.steps("loss"), first.steps("loss"))
    same(loop.state.arrays(), again.state.arrays())
    with (
        pytest.raises(DirectoryError, match="holds another run: epochs was 2, now 3"),
        loop_of(directory=tmp_path, configuration=configuration) as other,
    ):
        other.fit(source(), epochs=3)
    with pytest.raises(DirectoryError, match=r"another configuration: settings.units was 5, now 6"):
        loop_of(directory=tmp_path, configuration={**configuration, "settings": {"units": 6}})
    with loop_of(directory=tmp_path, configuration={"task": "other"}, fresh=True) as again:
        again.fit(source(), epochs=1)
    assert again.progress.step == 6


def test_a_bad_directory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(DirectoryError, match=r"cannot write to the run directory .*file"):
        loop_of(directory=file)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(DirectoryError, match="is not the record of a run"):
        loop_of(directory=tmp_path)


@pytest.mark.long_to_compile
@pytest.mark.every_backend
def test_the_eager_reference_agrees_within_rounding() -> None:
    with loop_of() as compiled:
        compiled.fit(source(), epochs=1)
    with loop_of(options=treadle.Options(execution="eager")) as eager:
        eager.fit(source(), epochs=1)
    np.testing.assert_allclose(
        compiled.history.steps("loss"), eager.history.steps("loss"), rtol=1e-4
    )
