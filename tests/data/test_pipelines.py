"""Runs on pipelines of tf.data and PyTorch resume exactly, or announce before training why not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import once

import treadle
from tests import forked, pipelines, position_kinds

SHORT = [
    "tf.data filtered",  # the end of an epoch is found when it is reached
    "tf.data shuffled for validation too",
    "tf.data zipped with a map of it",
    "own noise of NumPy",
]


# One of each kind of reader; of their combinations, and of what each backend reads, with `--all`.
KINDS = ("arrays", "function with a state", "closed with a state", "list", "generator function")
KINDS += ("limited stream that ends", "PyDataset that shuffles", "Grain loader")
KINDS += ("DataLoader with a generator", "DataLoader with a state", "tf.data shuffled")


INEXACT = {name for name, (_, announced) in pipelines.ALL.items() if announced}
PARTS = 2


def by_default(names: Any, chosen: Any) -> list[Any]:
    """Return parameters for all names, of which those that are not chosen are long."""
    long = pytest.mark.long
    return [pytest.param(name, marks=() if name in chosen else (long,)) for name in names]


@pytest.fixture(scope="module", autouse=True)
def files(tmp_path_factory: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPELINE_FILES", str(tmp_path_factory.mktemp("files")))
        pipelines.write_files()
        yield


@pytest.mark.parametrize(
    "name", [SHORT[0], *(pytest.param(name, marks=(pytest.mark.long, once)) for name in SHORT[1:])]
)
def test_a_run_resumes_at_every_batch_as_if_it_were_never_interrupted(
    tmp_path: Path, name: str
) -> None:
    """With the pipeline created again: its generators are those of a new process."""
    expected, copies = pipelines.straight(name, tmp_path / "run", epochs=1)
    assert len(copies) >= 4
    for copy in copies:
        assert pipelines.train(name, copy) == expected, copy


@pytest.mark.parametrize("name", by_default(position_kinds.KINDS, KINDS))
@once
def test_a_run_resumes_at_the_last_batch_of_an_epoch(tmp_path: Path, name: str) -> None:
    """Each kind of source: `test_positions` reads them on from every other batch."""
    expected, copies = pipelines.straight(name, tmp_path / "run", epochs=1)
    assert pipelines.train(name, copies[-1]) == expected


@pytest.mark.parametrize("name", by_default(pipelines.ALL, list(pipelines.ALL)[::4]))
@once
def test_what_is_inexact_is_announced(name: str) -> None:
    found, expected = pipelines.announced(name), pipelines.ALL[name][1]
    assert found is None if expected is None else (found or "").startswith(expected)


@pytest.mark.long
@once
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_all_pipelines_resume_in_a_new_process(tmp_path: Path, part: int) -> None:
    """At a batch of two epochs, another one in the next pipeline; in each third at the last one."""
    names = [*dict.fromkeys((*pipelines.ALL, *KINDS))][part::PARTS]
    runs: dict[str, tuple[list[float], list[Path]]] = {}
    for i, name in enumerate(names):
        expected, copies = pipelines.straight(name, tmp_path / str(i))
        runs[name] = expected, [copies[7 * i % (len(copies) - 1) if i % 3 else -1]]
    listed = tmp_path / "copies.json"
    listed.write_text(json.dumps({n: [str(x) for x in copies] for n, (_, copies) in runs.items()}))
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    script = [forked.python(), str(Path(root, "tests/pipelines.py")), str(listed)]
    subprocess.run(script, env=environment, check=True)
    found = json.loads(listed.read_text())
    differ = [
        name
        for name, (expected, copies) in runs.items()
        if name not in INEXACT and found[name] != [expected] * len(copies)
    ]
    assert not differ


def test_a_step_that_is_prepared_at_the_end_of_an_epoch_opens_the_position_once(
    tmp_path: Path,
) -> None:
    name = "tf.data filtered"
    expected, copies = pipelines.straight(name, tmp_path / "run", epochs=1)
    assert pipelines.train(name, copies[-1], prepare=True) == expected


class Named(treadle.Task):
    """Counts steps, and reads batches whose form no checkpoint can describe."""

    def __init__(self) -> None:
        self.count = keras.Variable(0.0)

    def train_step(self, batch: Any) -> dict[str, Any]:
        self.count.assign_add(1.0)
        return {"value": keras.ops.sum(batch["x", 1])}


def test_a_batch_is_read_to_build_the_step_if_its_form_is_unknown(tmp_path: Path) -> None:
    def run(directory: Path) -> list[float]:
        generator = np.random.default_rng(3)
        source = treadle.data.from_function(lambda rng: {("x", 1): generator.random(2)}, 3)
        options = treadle.Options(execution="eager")
        hooks = [treadle.every("1 step", copy)] if directory.name == "run" else []
        with treadle.Loop(Named(), directory, hooks, options=options, console=False) as loop:
            loop.fit(source, epochs=2)
        return loop.history.steps("value").tolist()

    def copy(loop: Any) -> None:
        if loop.progress.step == 3:
            loop.save()
            shutil.copytree(loop.directory, tmp_path / "copy")

    assert run(tmp_path / "run") == run(tmp_path / "copy")
