"""The examples in the docstrings of all modules."""

import doctest
import importlib
import io
import re
from pathlib import Path

import keras
import pytest

SOURCE = Path(__file__).parents[2] / "src"
# Examples that need code of the user's own, which those of a docstring are not.
LEFT_OUT = {"treadle.steps.own_values"}
FOUND = [
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r"^ *>>> ", path.read_text(), re.M)
]


@pytest.mark.parametrize("name", [name for name in FOUND if name not in LEFT_OUT])
def test_examples_in_docstrings(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stderr", io.StringIO())  # where a loop shows its progress
    keras.backend.clear_session()  # setup(seed=…) must come before layers
    keras.utils.set_random_seed(0)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried and not failed
