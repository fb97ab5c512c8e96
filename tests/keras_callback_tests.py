"""Runs Keras' own callback tests with `fit` replaced by `treadle.fit`.

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


def fit(model: Any, *arguments: Any, **named: Any) -> Any:
    """Train with `treadle.fit`, also if values are not finite."""
    return treadle.fit(model, *arguments, hooks=[Unguarded()], **named)


def _skip_if_backend(backend: str, reason: str) -> Any:
    return pytest.mark.skipif(keras.config.backend() == backend, reason=reason)


def results_of(folder: Path, *arguments: str) -> Results:
    """Run tests of Keras' own."""
    # What tests import from Keras' own conftest, which is not in its wheel.
    own_conftest = ModuleType("conftest")
    vars(own_conftest)["skip_if_backend"] = _skip_if_backend
    sys.modules["conftest"] = own_conftest
    results = Results()
    own = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "-c", "/dev/null"]
    pytest.main([*own, f"--rootdir={folder}", *arguments], plugins=[results])
    return results


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
    keras.Model.fit = fit
    results = results_of(folder, "--continue-on-collection-errors", *arguments, *files)
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
