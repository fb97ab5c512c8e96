"""The files of examples/clusters are short, valid, and named in the page.

`scripts/clusters` runs them. Costs less than a second, apart from the example that trains.
"""

import ast
import importlib.util
import subprocess
from pathlib import Path

import keras
import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples" / "clusters").glob("*.*"))
PAGE = (ROOT / "docs" / "clusters.md").read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_short_and_valid_and_in_the_page(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") < 60
    assert f"`{path.name}`" in PAGE
    if path.suffix == ".py":
        ast.parse(text)
    if path.suffix in (".sh", ".sbatch"):
        subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.long  # 3 s: five epochs of digits
def test_the_task_of_the_examples_learns(tmp_path: Path) -> None:
    keras.backend.clear_session()
    path = ROOT / "examples" / "clusters" / "task.py"
    spec = importlib.util.spec_from_file_location("task_of_examples", path)
    assert spec is not None and spec.loader is not None
    task = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(task)
    history = task.train(str(tmp_path / "run"))
    assert history["val_accuracy"][-1] > 0.9
    keras.backend.clear_session()
