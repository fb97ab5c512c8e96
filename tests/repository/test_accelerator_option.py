"""The pytest option `--accelerator`, and tests that need an accelerator."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import WATCHDOG

ROOT = Path(__file__).parents[2]


def pytest_run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "torch"},
        timeout=WATCHDOG,
    )


@pytest.mark.long
def test_without_an_accelerator_the_option_fails_and_says_so() -> None:
    done = pytest_run("--accelerator", "tests/conformance/test_accelerator.py")
    assert done.returncode == 4
    assert "--accelerator: no accelerator is visible to torch" in done.stdout + done.stderr


@pytest.mark.long
def test_tests_for_accelerators_are_skipped_with_the_reason() -> None:
    done = pytest_run("tests/conformance/test_accelerator.py")
    assert done.returncode == 0, done.stdout
    assert "needs an accelerator: run scripts/test --accelerator where there is one" in done.stdout
    assert "5 skipped" in done.stdout
