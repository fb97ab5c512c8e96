"""Keras' own callbacks do in a loop what they do under `fit`, on the same model and data."""

import csv
import re
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import some

import treadle
from tests.dying import Dying, Saving
from treadle import data
from treadle.errors import ConfigurationError
from treadle.hooks import KerasCallbacks
from treadle.hooks.callback_model import set_direction

Callback = keras.callbacks.Callback
BATCH = 16
METHODS = (
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_train_batch_begin",
    "on_train_batch_end",
    "on_test_begin",
    "on_test_end",
)
COUNTERS = ("best", "wait", "best_epoch", "stopped_epoch", "min_delta", "epochs", "losses")


def arrays(rows: int, seed: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 6)).astype("float32")
    noisy = x[:, 0] + x[:, 1] * x[:, 2] + 0.3 * rng.normal(size=rows)
    return x, (noisy > 0).astype("int32")


TRAIN, VALIDATION = arrays(88, 0), arrays(64, 1)  # the last batch of an epoch is a short one
# Without XLA on TensorFlow, which would take most of the time of these tests.
OPTIONS = treadle.Options(jit=False)
JIT = keras.config.backend() == "jax"


def new_model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(32, "tanh"), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((6,)), *layers])


def parts() -> tuple[Any, Any]:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return loss, keras.optimizers.Adam(0.03)


def under_fit(callbacks: list[Any], epochs: int = 12) -> Any:
    model, (loss, optimizer) = new_model(), parts()
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=JIT)
    kwargs = {"validation_data": VALIDATION, "epochs": epochs, "verbose": 0}
    model.fit(*TRAIN, BATCH, shuffle=False, callbacks=callbacks, **kwargs)
    return model


def under_treadle(
    callbacks: list[Any],
    epochs: int = 12,
    directory: Path | None = None,
    hooks: list[Any] | None = None,
) -> treadle.Loop:
    model, (loss, optimizer) = new_model(), parts()
    task = treadle.Supervised(model, loss, optimizer, ["accuracy"])
    train = data.from_arrays(*TRAIN, batch_size=BATCH, shuffle=False)
    validation = data.from_arrays(*VALIDATION, batch_size=BATCH, shuffle=False)
    given = [KerasCallbacks(callbacks), *(hooks or [])]
    with treadle.Loop(task, directory, given, OPTIONS, console=False) as loop:
        loop.fit(train, validation, epochs=epochs)
    return loop


class Seen(Callback):  # type: ignore[misc]
    """Writes down every call."""

    def __init__(self, stop: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any, list[str]]] = []
        self.numbers: list[float] = []
        self.parameters: dict[str, Any] = {}
        self.stop, self.epoch = stop, 0


def _recorder(method: str) -> Any:
    def record(self: Seen, *arguments: Any, **named: Any) -> None:
        *index, logs = [*arguments, *named.values()]
        assert self.model.optimizer.learning_rate is not None
        self.parameters = dict(self.params)
        self.calls.append((method, index[0] if index else None, sorted(logs)))
        self.numbers += [float(logs[name]) for name in sorted(logs)]
        if method == "on_epoch_begin":
            self.epoch = index[0]
        if method == "on_train_batch_end" and (self.epoch, index[0]) == self.stop:
            self.model.stop_training = True

    return record


for name in METHODS:
    setattr(Seen, name, _recorder(name))


def test_an_epoch_that_a_further_call_continues_begins_once() -> None:
    begun: list[int] = []
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: begun.append(epoch))
    train = data.from_arrays(*TRAIN, batch_size=BATCH, shuffle=False)
    task = treadle.Supervised(new_model(), *parts())
    with treadle.Loop(task, hooks=[KerasCallbacks(callback)], console=False) as loop:
        loop.fit(train, steps=2)
        loop.fit(train, steps=1)
        loop.fit(train, epochs=2)
        loop.fit(train, epochs=1)
    assert begun == [0, 1, 2]


def test_an_epoch_that_a_callback_stopped_has_ended_and_begins_again() -> None:
    ours = Seen(stop=(0, 1))
    train = data.from_arrays(*TRAIN, batch_size=BATCH, shuffle=False)
    task = treadle.Supervised(new_model(), *parts())
    with treadle.Loop(task, hooks=[KerasCallbacks(ours)], console=False) as loop:
        loop.fit(train, epochs=1)
        ours.stop = None
        loop.fit(train, epochs=1)
    calls = [(name, at) for name, at, _ in ours.calls if name in ("on_epoch_begin", "on_epoch_end")]
    assert calls == [(f"on_epoch_{name}", 0) for name in ("begin", "end", "begin", "end")]


@pytest.mark.parametrize("stop", [None, (1, 2), (1, 5)])
def test_methods_are_called_at_the_same_points_as_in_fit(stop: tuple[int, int] | None) -> None:
    theirs, ours = Seen(stop), Seen(stop)
    under_fit([theirs], epochs=3)
    loop = under_treadle([ours], epochs=3)
    assert ours.calls == theirs.calls
    np.testing.assert_allclose(ours.numbers, theirs.numbers, rtol=2e-4, atol=1e-5)
    kept = ("epochs", "steps")
    assert [ours.parameters[k] for k in kept] == [theirs.parameters[k] for k in kept] == [3, 6]
    if stop is not None:
        assert loop.reason == "Seen set model.stop_training"
        assert loop.progress.step == 6 + stop[1] + 1


def test_model_checkpoints_of_epochs_leave_windows_long(tmp_path: Path) -> None:
    path = str(tmp_path / "{epoch:02d}.keras")
    hook = KerasCallbacks([keras.callbacks.ModelCheckpoint(path)])
    assert hook.when is None
    assert KerasCallbacks([keras.callbacks.ModelCheckpoint(path, save_freq=2)]).when is not None
    assert KerasCallbacks([keras.callbacks.TerminateOnNaN()]).when is not None
    assert KerasCallbacks([keras.callbacks.LambdaCallback()]).when is None


@pytest.mark.long
def test_tensorboard_of_keras(tmp_path: Path) -> None:
    pytest.importorskip("tensorflow")  # which Keras' own writes with
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(train: Any, folder: Path, update: Any) -> list[tuple[str, str, list[int]]]:
        board = keras.callbacks.TensorBoard(str(folder), histogram_freq=1, update_freq=update)
        train([board], epochs=2)
        found: list[tuple[str, str, list[int]]] = []
        for part in ("train", "validation"):
            events = EventAccumulator(str(folder / part)).Reload()
            for tag in sorted(events.Tags()["tensors"]):
                steps = [event.step for event in events.Tensors(tag)]
                found.append((part, re.sub(r".*/histogram", "a histogram", tag), steps))
        return found

    for update in ("epoch", 4):
        ours = run(under_treadle, tmp_path / f"ours-{update}", update)
        theirs = run(under_fit, tmp_path / f"theirs-{update}", update)
        names = {tag for _, tag, _ in ours}
        assert {"a histogram", "epoch_learning_rate", "evaluation_loss_vs_iterations"} <= names
        assert ours == theirs


class Counting(Callback):  # type: ignore[misc]
    """A user's own: it counts, and keeps a list."""

    def __init__(self, most: int = 5) -> None:
        super().__init__()
        self.most, self.epochs, self.losses = most, 0, []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs += 1
        self.losses.append(logs["loss"])


@pytest.mark.long
@pytest.mark.parametrize("at", [16, 18, 20])
def test_counters_of_callbacks_are_restored_after_a_kill(tmp_path: Path, at: int) -> None:
    def new(folder: str) -> list[Any]:
        kinds = keras.callbacks
        return [
            kinds.EarlyStopping("val_loss", patience=3, restore_best_weights=True),
            kinds.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0.01),
            kinds.ModelCheckpoint(str(tmp_path / folder / "{epoch}.keras"), save_best_only=True),
            Counting(),
        ]

    whole = new("whole")
    expected = under_treadle(whole, directory=tmp_path / "a")
    saving = [Saving("5 steps")]
    with pytest.raises(OSError, match="killed"):
        under_treadle(new("cut"), directory=tmp_path / "b", hooks=[*saving, Dying(at)])
    rest = new("cut")
    loop = under_treadle(rest, directory=tmp_path / "b", hooks=saving)
    assert loop.progress.step == expected.progress.step
    for (path, ours), theirs in zip(
        loop.state.arrays().items(), expected.state.arrays().values(), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs, path)
    for ours, theirs in zip(rest, whole, strict=True):
        for name in COUNTERS:
            assert getattr(ours, name, None) == getattr(theirs, name, None), name
    files = [sorted(p.name for p in (tmp_path / part).iterdir()) for part in ("cut", "whole")]
    assert files[0] == files[1]


@pytest.mark.parametrize("every", some(["1 epoch", "100 steps"]))
def test_csv_logger_appends_after_a_resume(tmp_path: Path, every: str) -> None:
    def run(*hooks: Any) -> None:
        logger = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
        under_treadle([logger], 3, tmp_path / "run", [Saving(every), *hooks])

    with pytest.raises(OSError, match="killed"):
        run(Dying(9))
    run()
    rows = list(csv.reader((tmp_path / "log.csv").read_text().splitlines()))
    assert [row[0] for row in rows] == ["epoch", "0", "1", "2"]


def test_the_model_is_left_as_it_was() -> None:
    paths: list[list[str]] = []

    class Looking(treadle.Hook):
        def record(self, loop: Any, record: Any) -> None:
            paths.append([*loop.state.variables])

    loop = under_treadle([Seen()], epochs=2, hooks=[Looking()])
    assert {"optimizer", "stop_training"} & vars(loop.task.model).keys() == set()
    assert paths[0] == paths[1] == [*loop.state.variables]
    assert any(path.startswith("optimizer/") for path in paths[0])


class Pair(treadle.Task):
    def __init__(self) -> None:
        self.critic, self.generator = new_model(), new_model()
        self.loss, _ = parts()
        self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.2)]

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        for model, optimizer in zip((self.critic, self.generator), self.optimizers, strict=True):

            def objective(model: Any = model) -> Any:
                return self.loss(y, model(x, training=True))

            value = treadle.minimize(objective, model, optimizer)
        return {"loss": value}


def test_of_several_models_one_is_named() -> None:
    source = data.from_arrays(*TRAIN, batch_size=BATCH)

    def train(**how: Any) -> list[float]:
        rates: list[float] = []
        task = Pair()
        named = {name: getattr(task, value) for name, value in how.items()}
        reading = keras.callbacks.LambdaCallback()
        reading.on_epoch_end = lambda epoch, logs: rates.append(
            float(reading.model.optimizer.learning_rate)
        )
        hook = KerasCallbacks([reading], **named)
        with treadle.Loop(task, None, [hook], OPTIONS, console=False) as loop:
            loop.fit(source, epochs=1)
        return rates

    assert train(model="critic") == pytest.approx([0.1])
    assert train(model="generator") == pytest.approx([0.2])
    with pytest.raises(ConfigurationError) as caught:
        train()
    assert str(caught.value) == (
        "KerasCallbacks needs exactly one model, but Pair has critic, generator: pass it, as "
        "KerasCallbacks([...], model=task.critic)"
    )


def test_objects_that_are_no_callbacks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"objects of keras.callbacks.Callback, and found"):
        KerasCallbacks([print])
    message = (
        r"^KerasCallbacks cannot run BackupAndRestore, which .*give the loop a directory instead"
    )
    with pytest.raises(ConfigurationError, match=message):
        KerasCallbacks([keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))])


def test_methods_that_are_never_called_give_a_warning() -> None:
    class Predicting(keras.callbacks.Callback):  # type: ignore[misc]
        def on_predict_end(self, logs: Any = None) -> None:
            raise AssertionError

    loop = under_treadle([Predicting()], epochs=1)
    assert loop.history["warning"] == [
        "Predicting.on_predict_end is never called: predictions of a loop have no callbacks"
    ]


def test_no_end_of_training_after_an_error() -> None:
    seen = Seen()
    with pytest.raises(OSError, match="killed"):
        under_treadle([seen], epochs=3, hooks=[Dying(4)])
    methods = {method for method, _, _ in seen.calls}
    assert "on_train_begin" in methods and "on_train_end" not in methods


@pytest.mark.parametrize(
    ("name", "metric", "mode"),
    [
        ("up", keras.metrics.MeanSquaredError, "min"),
        ("down", keras.metrics.BinaryAccuracy, "max"),
    ],
)
def test_a_metric_has_its_direction_whatever_its_name(name: str, metric: Any, mode: str) -> None:
    callback = keras.callbacks.EarlyStopping(f"val_{name}")
    set_direction(callback, {name: metric(name=name)})
    assert callback.mode == mode
