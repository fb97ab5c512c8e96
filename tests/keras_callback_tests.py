"""Runs Keras' own callback tests with `fit` replaced by a Treadle loop and `KerasCallbacks`.

    KERAS_BACKEND=jax python tests/keras_callback_tests.py [FOLDER] [pytest arguments]

FOLDER holds Keras' `*_test.py` files of callbacks; by default it is the `callbacks` folder of the
installed Keras, whose wheel contains them. From a checkout of Keras it is `keras/src/callbacks`, at
the tag of the installed version. Nothing of these tests is part of this repository.

The exit status is 0 if exactly the tests fail that `DIFFERENCES` names, each with its reason; they
are described in docs/keras-callbacks.md.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import numpy as np
import pytest

import treadle

_REFUSED = "BackupAndRestore is refused: a run with a directory resumes by itself"
_BACKUP = "backup_and_restore::BackupAndRestoreCallbackTest"
# Test: why it cannot pass. Each reason is a row of the table of docs/keras-callbacks.md.
DIFFERENCES = {
    f"{_BACKUP}::test_backup_corrupted": _REFUSED,
    f"{_BACKUP}::test_best_case_epoch": _REFUSED,
    f"{_BACKUP}::test_best_case_step": _REFUSED,
    f"{_BACKUP}::test_model_deleted_case_epoch": _REFUSED,
    "terminate_on_nan::TerminateOnNaNTest::test_raise_error_terminate_preserves_backup": _REFUSED,
    "swap_ema_weights::SwapEMAWeightsTest::test_swap_ema_weights_with_tf_distribute": (
        "Distribution strategies are refused: a loop trains on one device"
    ),
}

if keras.config.backend() == "jax":
    DIFFERENCES["tensorboard::TestTensorBoardV2::test_custom_summary"] = (
        "Steps are traced on JAX, where fit with jit_compile=False runs a layer's TensorFlow calls"
    )


class Unguarded(treadle.hooks.NonFinite):
    """Takes the place of the default hook that ends a run at NaN: `fit` trains on."""

    def steps(self, loop: Any, logs: Any) -> None:
        """Do nothing."""

    def record(self, loop: Any, record: Any) -> None:
        """Do nothing."""

    def end(self, loop: Any, error: Any) -> None:
        """Do nothing."""


class Results:
    """A plugin of pytest: which tests passed and failed, and the options of Keras' own conftest."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: list[str] = []

    def pytest_configure(self, config: Any) -> None:
        """Register the marker that Keras' tests use."""
        config.addinivalue_line("markers", "requires_trainable_backend: all backends here are")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Collect the outcome of a test."""
        name = report.nodeid.rsplit("/", 1)[-1].replace("_test.py::", "::")
        if report.failed:
            lines = str(report.longrepr).strip().splitlines()
            self.failed[name] = next((x[4:] for x in lines if x.startswith("E   ")), lines[-1])
        elif report.skipped:
            self.skipped.append(name)
        elif report.when == "call":
            self.passed.append(name)


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    epochs: int = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool = True,
    validation_freq: int = 1,
    steps_per_epoch: int | None = None,
    validation_batch_size: int | None = None,
) -> Any:
    """Do what `Model.fit` does, by a Treadle loop."""
    if validation_split:
        at = int(len(x) * (1 - validation_split))
        validation_data = x[at:], y[at:]
        x, y = x[:at], y[:at]
    compiled = model._compile_config.config
    # Loss scaling is Treadle's own: a LossScaleOptimizer is refused, the inner one is used.
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    metrics = _metrics(model, x, y)
    task = treadle.Supervised(model, compiled["loss"], optimizer, metrics)
    train = _source(x, y, batch_size, shuffle)
    if steps_per_epoch is not None:
        train = treadle.data.limited(train, steps_per_epoch)
    validation = None
    if validation_data is not None:
        parts = validation_data if isinstance(validation_data, tuple) else (validation_data, None)
        validation = _source(*parts, validation_batch_size or batch_size, shuffle=False)
    history = keras.callbacks.History()
    hooks: list[Any] = [treadle.hooks.KerasCallbacks([callbacks, history])]
    if not hooks[0].replaces:
        hooks.append(Unguarded())
    options = treadle.Options(jit=bool(model.jit_compile), preflight=False)
    loop = treadle.Loop(task, None, hooks, options, console=False)
    loop.fit(train, validation, epochs=epochs, validate_every=f"{validation_freq} epochs")
    return history


def _metrics(model: Any, x: Any, y: Any) -> dict[str, Any]:
    """Return the metrics that `compile` made, by name; "acc" follows from targets and outputs."""
    compiled = model._compile_metrics
    if compiled is None:
        return {}
    if not compiled.built:
        compiled.build(np.asarray(y[:1]), model(np.asarray(x[:1])))
    return {metric.name: metric for part in compiled.metrics for metric in _leaves(part)}


def _leaves(metric: Any) -> list[Any]:
    return [leaf for part in getattr(metric, "metrics", ()) for leaf in _leaves(part)] or [metric]


def _source(x: Any, y: Any, batch_size: int | None, shuffle: bool) -> Any:
    if y is None:
        return x
    arrays = np.asarray(x), np.asarray(y)
    return treadle.data.from_arrays(*arrays, batch_size=batch_size or 32, shuffle=shuffle)


def _skip_if_backend(backend: str, reason: str) -> Any:
    return pytest.mark.skipif(keras.config.backend() == backend, reason=reason)


def main(arguments: Sequence[str]) -> int:
    """Run the tests, and compare the failed ones with those that are expected to fail."""
    folder = Path(keras.src.callbacks.__file__).parent
    if arguments and not arguments[0].startswith("-"):
        folder, arguments = Path(arguments[0]), arguments[1:]
    files = sorted(str(file) for file in folder.glob("*_test.py"))
    if find_spec("orbax") is None:  # which is not installed with Treadle
        files = [file for file in files if "orbax" not in Path(file).name]
    if not files:
        print(f"{folder} holds no *_test.py: pass keras/src/callbacks of a checkout of Keras")
        return 2
    # What tests import from Keras' own conftest, which is not in its wheel.
    own_conftest = ModuleType("conftest")
    vars(own_conftest)["skip_if_backend"] = _skip_if_backend
    sys.modules["conftest"] = own_conftest
    keras.Model.fit = fit
    results = Results()
    own = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", "/dev/null"]
    own += ["--continue-on-collection-errors", f"--rootdir={folder}"]
    pytest.main([*own, *arguments, *files], plugins=[results])
    unexpected = {name: why for name, why in results.failed.items() if name not in DIFFERENCES}
    ran = {*results.passed, *results.failed}
    passed = [name for name in DIFFERENCES if name in results.passed]
    print(
        f"\n{keras.config.backend()}, Keras {keras.__version__}: {len(ran)} tests ran, "
        f"{len(results.passed)} passed, {len(results.failed)} failed, "
        f"{len(results.skipped)} were skipped"
    )
    for name in sorted(results.failed):
        reason = DIFFERENCES.get(name) or f"UNEXPECTED: {results.failed[name]}"
        print(f"  failed  {name}: {reason}")
    for name in passed:
        print(f"  passed  {name}, which DIFFERENCES names: remove it there")
    return 1 if unexpected or passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
