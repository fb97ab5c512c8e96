"""Another directory, or another file, in the place of the one that a run writes to."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.directories.bases import tree
from tests.directories.compared import contents
from tests.line import Line
from treadle import hooks
from treadle.errors import DirectoryError

STEPS = 8
Change = Callable[[], object]


def run(directory: Path, step: int = 0, change: Change | None = None) -> None:
    """Train with every default hook, and images; something changes after a step."""

    def at(loop: Any) -> dict[str, Any]:
        if change is not None and loop.progress.step == step:
            change()
        return {"picture": treadle.Image(np.zeros((4, 4)))}

    keras.backend.clear_session()
    treadle.setup(seed=0)
    batches = [np.full((2, 3), 1.0 + i, "float32") for i in range(STEPS // 2)]
    given = [treadle.every("1 step", at), hooks.Checkpoint("1 step", keep_last=1)]
    given.append(hooks.GradientHealth("2 steps"))
    with treadle.Loop(Line(), directory, hooks=given, console=False) as loop:
        loop.fit(batches, epochs=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("finished") / "run"
    run(directory)
    return directory


@pytest.mark.parametrize("step", [1, pytest.param(STEPS - 1, marks=pytest.mark.long), STEPS])
def test_a_directory_renamed_over_that_of_a_run_stays_as_it_is(
    finished: Path, tmp_path: Path, step: int
) -> None:
    mine, other, away = tmp_path / "mine", tmp_path / "other", tmp_path / "away"
    shutil.copytree(finished, other)
    before = tree(other)

    def change() -> None:
        mine.rename(away)
        other.rename(mine)

    with pytest.raises(DirectoryError) as raised:
        run(mine, step, change)
    assert str(raised.value) == (
        f"the run directory {mine} was replaced by another one while the run trained into it. "
        "Nothing was changed in that one: put the run's own directory back in its place, and run "
        "the script again to resume"
    )
    assert len(raised.value.__notes__) == 1
    assert tree(mine) == before
    shutil.rmtree(mine)
    away.rename(mine)
    run(mine)
    assert contents(mine) == contents(finished)


def test_a_directory_that_is_renamed_is_resumed_when_it_is_back(
    finished: Path, tmp_path: Path
) -> None:
    mine, away = tmp_path / "mine", tmp_path / "away"
    with pytest.raises(DirectoryError, match="mine is gone: it was removed or renamed while"):
        run(mine, 3, lambda: mine.rename(away))
    assert not mine.exists()
    away.rename(mine)
    run(mine)
    assert contents(mine) == contents(finished)


def test_a_directory_made_in_the_place_of_another_before_the_first_step_stays_empty(
    tmp_path: Path,
) -> None:
    mine = tmp_path / "mine"
    keras.backend.clear_session()
    with (
        pytest.raises(DirectoryError, match=r"another process continued the run in .*mine after"),
        treadle.Loop(Line(), mine, console=False) as loop,
    ):
        mine.rename(tmp_path / "away")
        mine.mkdir()
        loop.fit([np.ones((2, 3), "float32")], epochs=1)
    assert not list(mine.iterdir())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("log.jsonl", kind) for kind in ("removed", "replaced", "shortened", "longer")),
        *(("health.jsonl", kind) for kind in ("replaced", "shortened")),
    ],
)
def test_a_file_that_is_not_as_the_run_left_it_ends_the_run(
    finished: Path, tmp_path: Path, name: str, kind: str
) -> None:
    mine = tmp_path / "mine"
    file, foreign = mine / name, b"of the user"

    def change() -> None:
        if kind == "removed":
            file.unlink()
        elif kind == "replaced":
            (tmp_path / "other").write_bytes(foreign)
            os.replace(tmp_path / "other", file)
        elif kind == "shortened":
            os.truncate(file, 5)
        else:
            file.write_bytes(file.read_bytes() + foreign)

    texts = {
        "removed": "was removed while the run was writing to it, and is there again with all that "
        "the run wrote. To resume, run the script again",
        "replaced": "was replaced by something else while the run was writing to it. To resume, "
        f"put {file}.saved in its place, which holds all that the run wrote, and run the script "
        "again",
        "shortened": r"had [0-9]+ bytes and has 5 while the run was writing to it. To resume, put "
        "it back as it was, and run the script again",
        "longer": r"had [0-9]+ bytes and has [0-9,]+ while the run was writing to it. To resume, "
        "put it back as it was, and run the script again",
    }
    with pytest.raises(DirectoryError) as raised:
        run(mine, 3, change)
    assert re.fullmatch(f"{file} {texts[kind]}", str(raised.value))
    if kind == "replaced":
        assert file.read_bytes() == foreign
        file.with_name(f"{name}.saved").rename(file)
    if kind in ("removed", "replaced"):
        run(mine)
        assert contents(mine) == contents(finished)


def test_another_directory_may_follow_under_the_path_of_a_run_that_failed(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    with pytest.raises(DirectoryError, match="is gone") as kept:
        run(directory, 4, lambda: directory.rename(tmp_path / "moved"))
    run(directory)  # while an interactive session keeps the traceback of the error
    assert contents(directory) and kept.tb is not None
