import csv
import doctest
import importlib
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import keras
import ml_dtypes
import numpy as np
import pytest

from treadle import hooks
from treadle.errors import ConfigurationError, DataError, NonFiniteError, StateError
from treadle.hook import Hook
from treadle.hooks import curves
from treadle.hooks.final import DTYPES, read_arrays, write_arrays
from treadle.hooks.lines import read_log
from treadle.logs import History, Record, StepLogs
from treadle.progress import Progress

NAN, INF = float("nan"), float("inf")
MODULES = ("console", "curves", "display", "final", "lines", "nonfinite", "stopping", "values")


class Loop:
    """What a hook sees of a loop, without one."""

    def __init__(self, directory=None, step=0, task=None, batches=()):
        self.directory, self.task, self.batches = directory, task, batches
        self.progress = Progress(step=step, seconds=0.25 * step)
        self.history, self.reason, self.weights = History(), None, 0
        self.state = SimpleNamespace(arrays=lambda: {"weights": np.array(self.weights)})

    def batch_at(self, step):
        return self.batches[step - 1]

    def stop(self, why):
        self.reason = why

    def log(self, values):
        self.history.add(Record("log", self.progress, values))

    def snapshot(self):
        return self.weights

    def restore(self, snapshot):
        self.weights = snapshot

    def window(self, hook, **values):
        arrays = {n: v if isinstance(v, np.ndarray) else np.array(v, "f4") for n, v in values.items()}
        steps = len(next(iter(arrays.values()))) if arrays else 1
        first = self.progress.step + 1
        self.progress = self.progress.advanced(steps, 8 * steps).after_seconds(0.25)
        hook.steps(self, StepLogs(first, arrays, arrays, 8, self.progress))

    def record(self, hook, kind, step=None, **values):
        if step is not None:
            self.progress = Progress(step, step // 10, step % 10, 8 * step, 0.25 * step)
        record = Record(kind, self.progress, values)
        self.history.add(record)
        hook.record(self, record)

    @property
    def warnings(self):
        return [r.values["warning"] for r in self.history.records if "warning" in r.values]


# The package


def test_defaults():
    def names(found):
        return [type(hook).__name__ for hook in found]

    everything = ["Console", "JSONLines", "CSV", "NonFinite", "FinalModel", "LearningCurve"]
    assert names(hooks.defaults(Path("runs"), quiet=False)) == everything
    assert names(hooks.defaults(Path("runs"), quiet=True)) == everything[1:]
    assert names(hooks.defaults(None, quiet=True)) == ["NonFinite"]


def test_public_names_are_there():
    for name in hooks.__all__:
        assert name in dir(hooks)
        assert name == "defaults" or issubclass(getattr(hooks, name), Hook)
    with pytest.raises(AttributeError, match=r"module 'treadle.hooks' has no attribute 'Consol'"):
        _ = hooks.Consol


def test_importing_the_package_imports_neither_keras_nor_rich():
    code = "import sys, treadle.hooks; print({'keras', 'rich', 'matplotlib'} & {*sys.modules})"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(importlib.import_module(f"treadle.hooks.{name}"))
    assert result.attempted and not result.failed


# NonFinite


def nonfinite(loop, action="raise", **values):
    with pytest.raises(NonFiniteError) as caught:
        loop.window(hooks.NonFinite(action), **values)
    return str(caught.value)


def test_nonfinite_names_the_rows_of_the_batch():
    x = np.zeros((8, 3), np.float32)
    x[2, 1], x[5, 0] = NAN, INF
    y = np.zeros(8)
    y[7] = NAN
    loop = Loop(step=20, batches={22: (x, {"label": y, "id": np.arange(8), "none": None})})
    assert nonfinite(loop, loss=[1.0, NAN, NAN]) == (
        "loss is nan at step 23, epoch 1, batch 2. The batch held it already: leaf 0, rows 2, 5; "
        "leaf 1/label, row 7. Mend or leave out these rows (their numbers count within the batch)"
    ).replace("step 23", "step 22")
