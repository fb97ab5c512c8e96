"""Every example in the docstrings of modules that need Keras, on this backend."""

import doctest
import importlib
import io

import keras
import pytest

MODULES = (
    "steps.accumulation",
    "steps.control_flow",
    "steps.gradients",
    "steps.planning",
    "doctor.find_lr",
    "doctor.findings",
    "doctor.numbers",
    "loop",
    "report.images",
    "report.saved_run",
    "backends.plans",
    "core.directory",
    "core.lazy",
    "run.state",
    "steps.constants",
    "schedules",
    "steps.state",
    "steps.helpers",
    "steps.supervised",
    "steps.task",
    "testing",
    "testing.checks",
    "testing.running",
    "testing.trace",
    "steps.transforms",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(
    name: str, tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    monkeypatch.setattr("sys.stderr", io.StringIO())  # where a loop shows its progress
    keras.utils.set_random_seed(0)
    result = doctest.testmod(importlib.import_module(f"treadle.{name}"))
    assert result.attempted
    assert not result.failed
