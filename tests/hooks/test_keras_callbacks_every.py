"""Each callback that Keras ships, with each of its arguments, does in a loop what it does in `fit`.

A case is a list of callbacks. The same model is trained by `fit` and by Treadle, and compared: the
history, the weights, the learning rate, what the callbacks hold, the files and the printed lines.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras_versions import needs_keras

import treadle
from treadle import data
from treadle.hooks import KerasCallbacks

kinds = keras.callbacks
EPOCHS, BATCH = 6, 8
JIT = keras.config.backend() == "jax"
OPTIONS = treadle.Options(jit=False)  # XLA would take most of the time of these tests
rng = np.random.default_rng(0)
X = rng.normal(size=(36, 4)).astype("float32")  # the last batch of an epoch is a short one
Y = (X[:, :1] + 0.5 * rng.normal(size=(36, 1))).astype("float32")
VALIDATION = X[:16], -0.2 * Y[:16]  # the validation loss falls, and rises again


class Doubling(keras.callbacks.Callback):  # type: ignore[misc]
    """A user's own: it changes a weight and a learning rate, and adds to the logs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        kernel = self.model.layers[0].kernel
        kernel.assign(kernel * 1.5)
        self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
        logs["doubled"] = epoch


def halved(epoch: int, rate: float) -> float:
    return rate * 0.5 if epoch > 1 else rate


Case = Callable[[str], list[Any]]
CASES: dict[str, Case] = {
    "csv": lambda d: [kinds.CSVLogger(f"{d}/log.csv", separator=";", append=False)],
    "csv-append": lambda d: [kinds.CSVLogger(f"{d}/log.csv", append=True)],
    "early-stopping": lambda d: [
        kinds.EarlyStopping("val_loss", patience=2, verbose=1, restore_best_weights=True)
    ],
    "early-stopping-arguments": lambda d: [
        kinds.EarlyStopping(
            "loss", min_delta=0.5, patience=1, mode="min", baseline=0.01, start_from_epoch=2
        )
    ],
    "early-stopping-max": lambda d: [
        kinds.EarlyStopping("val_mae", patience=0, mode="max", restore_best_weights=True)
    ],
    "lambda": lambda d: [
        kinds.LambdaCallback(
            on_epoch_begin=lambda epoch, logs: print("begin", epoch, sorted(logs)),
            on_epoch_end=lambda epoch, logs: print("end", epoch, sorted(logs)),
            on_train_begin=lambda logs: print("train begins", sorted(logs)),
            on_train_end=lambda logs: print("train ends", sorted(logs)),
            on_train_batch_begin=lambda batch, logs: print("batch", batch, sorted(logs)),
            on_train_batch_end=lambda batch, logs: print("batch ends", batch, sorted(logs)),
        )
    ],
    "scheduler": lambda d: [kinds.LearningRateScheduler(halved, verbose=1)],
    "plateau": lambda d: [
        kinds.ReduceLROnPlateau(
            "val_loss", factor=0.5, patience=1, verbose=1, min_delta=0.01, cooldown=1, min_lr=0.004
        )
    ],
    "plateau-max": lambda d: [kinds.ReduceLROnPlateau("loss", factor=0.9, patience=0, mode="max")],
    "checkpoints": lambda d: [kinds.ModelCheckpoint(f"{d}/{{epoch}}-{{loss:.1f}}.keras")],
    "checkpoint-best": lambda d: [
        kinds.ModelCheckpoint(
            f"{d}/{{epoch}}.keras", "val_loss", verbose=1, save_best_only=True, mode="min"
        )
    ],
    "checkpoint-threshold": lambda d: [
        kinds.ModelCheckpoint(
            f"{d}/{{epoch}}.keras", "val_loss", save_best_only=True, initial_value_threshold=0.05
        )
    ],
    "checkpoint-weights": lambda d: [
        kinds.ModelCheckpoint(
            f"{d}/{{epoch}}-{{batch}}.weights.h5", save_weights_only=True, save_freq=7
        )
    ],
    "swap": lambda d: [kinds.SwapEMAWeights()],
    "swap-epochs": lambda d: [
        kinds.SwapEMAWeights(swap_on_epoch=True),
        kinds.ModelCheckpoint(f"{d}/{{epoch}}.keras"),
    ],
    "swap-stopped": lambda d: [
        kinds.SwapEMAWeights(),
        kinds.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
    ],
    "nan": lambda d: [kinds.TerminateOnNaN(), kinds.CSVLogger(f"{d}/log.csv")],
    "history": lambda d: [kinds.History()],
    "progress": lambda d: [kinds.ProgbarLogger()],
    "own": lambda d: [Doubling(), kinds.CSVLogger(f"{d}/log.csv")],
    "list": lambda d: [kinds.CallbackList([Doubling(), kinds.EarlyStopping("loss", patience=1)])],
}
DEFAULT = (
    *("csv", "early-stopping", "early-stopping-arguments", "plateau"),
    *("checkpoint-best", "checkpoint-weights", "swap-stopped", "progress"),
)
OTHERWISE = {
    "Callback": "the base class",
    "BackupAndRestore": "refused; see test_objects_that_are_no_callbacks_are_refused",
    "RemoteMonitor": "sends to a server; test_a_remote_monitor",
    "TensorBoard": "test_tensorboard_of_keras",
    "OrbaxCheckpoint": "needs orbax-checkpoint, which is not installed with Treadle",
}


def new_model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((4,)), *layers])


def arrays(case: str) -> tuple[Any, Any]:
    y = Y.copy()
    if case == "nan":
        y[20] = np.nan
    return X, y


def new_optimizer(case: str) -> Any:
    averaging = {"use_ema": True, "ema_momentum": 0.9} if case.startswith("swap") else {}
    return keras.optimizers.SGD(0.05, momentum=0.5, **averaging)


def under_fit(case: str, callbacks: list[Any]) -> tuple[Any, Any]:
    model = new_model()
    model.compile(new_optimizer(case), "mse", metrics=["mae"], jit_compile=JIT)
    verbose = int(case == "progress")
    kwargs = {"validation_data": VALIDATION, "epochs": EPOCHS, "verbose": verbose}
    if any(isinstance(callback, kinds.CallbackList) for callback in callbacks):
        callbacks = callbacks[0].callbacks
    history = kinds.History()
    callbacks = [*callbacks, history]
    model.fit(*arrays(case), BATCH, shuffle=False, callbacks=callbacks, **kwargs)
    return model, history


def under_treadle(case: str, callbacks: list[Any]) -> tuple[Any, Any]:
    model, history = new_model(), kinds.History()
    task = treadle.Supervised(model, "mse", new_optimizer(case), {"mae": keras.metrics.get("mae")})
    train = data.from_arrays(*arrays(case), batch_size=BATCH, shuffle=False)
    validation = data.from_arrays(*VALIDATION, batch_size=BATCH, shuffle=False)
    hook = KerasCallbacks([*callbacks, history])
    loop = treadle.Loop(task, None, [hook], OPTIONS, console=False)
    loop.fit(train, validation, epochs=EPOCHS)
    model.optimizer = task.optimizer  # for the comparison
    return model, history


def held(callbacks: list[Any]) -> list[dict[str, Any]]:
    """Return the numbers, texts and arrays that callbacks hold."""
    found: list[dict[str, Any]] = []
    for callback in callbacks:
        if isinstance(callback, kinds.CallbackList):
            found += held([c for c in callback.callbacks if not isinstance(c, kinds.History)])
            continue
        plain = (bool, int, float, np.number, list)
        own = vars(callback).items()
        found.append({n: v for n, v in own if isinstance(v, plain) and not n.startswith("_")})
    return found


def same(ours: Any, theirs: Any, where: str) -> None:
    """Compare nested values, floats within rounding."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for name, value in theirs.items():
            same(ours[name], value, f"{where}/{name}")
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            same(one, other, f"{where}/{i}")
    elif isinstance(theirs, (bool, str, type(None))):
        assert ours == theirs, where
    else:
        np.testing.assert_allclose(ours, theirs, rtol=2e-3, atol=2e-5, err_msg=where)


def printed(text: str, folder: Path) -> list[str]:
    """Return what was printed, without the folder and without numbers that are rounded."""
    text = text.replace(str(folder), "").replace("\r", "\n").replace("\x08", "")
    text = re.sub(r"\x1b\[[0-9;]*m|\d+[mu]?s(/step|/epoch)?", "", text)
    return [line for line in re.sub(r"\d+\.\d+(e-?\d+)?", "x", text).splitlines() if line.strip()]


def _shape(table: str) -> list[Any]:
    lines = table.splitlines()
    return [lines[0], len(lines)]


@pytest.mark.parametrize(
    "case", [x if x in DEFAULT else pytest.param(x, marks=pytest.mark.long) for x in CASES]
)
def test_as_under_fit(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Any] = []
    for name, train in (("fit", under_fit), ("treadle", under_treadle)):
        folder = tmp_path / name
        folder.mkdir()
        callbacks = CASES[case](str(folder))
        capsys.readouterr()
        model, history = train(case, callbacks)
        output = printed(capsys.readouterr().out, folder)
        found.append(
            {
                "history": history.history,
                "epochs": history.epoch,
                "weights": model.get_weights(),
                "learning rate": float(model.optimizer.learning_rate),
                "callbacks": held(callbacks),
                "files": sorted(file.name for file in folder.iterdir()),
                "tables": [_shape(file.read_text()) for file in folder.glob("*.csv")],
                "printed": output if case != "progress" else output[-1:],
            }
        )
    same(found[1], found[0], case)


def test_no_callback_and_no_argument_is_left_out() -> None:
    classes = {name: k for name, k in vars(kinds).items() if inspect.isclass(k)}
    cases = {case: make("/tmp") for case, make in CASES.items()}
    used = {type(callback).__name__ for callbacks in cases.values() for callback in callbacks}
    assert classes.keys() - used - OTHERWISE.keys() == set()
    given = "\n".join(inspect.getsource(inspect.getmodule(make)) for make in CASES.values())
    elsewhere = {"monitor", "callbacks", "add_history", "add_progbar", "model"}  # by position
    missed = {
        f"{name}({argument})"
        for name in sorted(used & classes.keys())
        for argument, kind in inspect.signature(classes[name].__init__).parameters.items()
        if kind.default is not kind.empty and argument not in elsewhere
        if f"{argument}=" not in given
    }
    assert not missed


def test_a_remote_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = pytest.importorskip("requests")
    sent: list[Any] = []
    monkeypatch.setattr(requests, "post", lambda *url, **how: sent.append((url[0], how["headers"])))
    for arguments in ({"field": "x"}, {"send_as_json": True, "headers": {"a": "b"}}):
        found: list[Any] = []
        for train in (under_fit, under_treadle):
            sent.clear()
            train("remote", [kinds.RemoteMonitor("http://localhost", "/there", **arguments)])
            found.append(list(sent))
        assert len(found[0]) == EPOCHS and found[0] == found[1]


@pytest.mark.parametrize("train", [under_fit, under_treadle])
def test_nan_as_an_error(train: Any) -> None:
    needs_keras("3.13", "TerminateOnNaN(raise_error=…)")
    ended: list[Any] = []
    watching = kinds.LambdaCallback(on_train_end=ended.append)
    with pytest.raises(RuntimeError, match="NaN or Inf loss encountered at batch 2"):
        train("nan", [watching, kinds.TerminateOnNaN(raise_error=True)])
    assert not ended
