"""Links in a run directory lead no write, and no removal, out of it."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import treadle
from tests.line import Line
from treadle import Image, hooks
from treadle.errors import DataError, TreadleError

FILES = (
    *("run.json", "log.jsonl", "epochs.csv", "state.safetensors", "model.keras", "curves.png"),
    # Temporary names of this version and of earlier ones.
    *(".lock", ".writable", "run.json.partial", "state.safetensors.partial"),
    *("model.partial.keras", "epochs.csv.partial", "images/picture-4.png"),
)
FOLDERS = ("images", "checkpoints", "checkpoints/fixed")


def picture(loop: Any) -> dict[str, Any]:
    return {"picture": Image(np.zeros((4, 4)))}


def run(directory: Path, fails: bool = False, fresh: bool = False) -> None:
    """Train for two epochs of two steps; or fail after one."""

    def failing(loop: Any) -> None:
        if fails and loop.progress.step == 3:
            raise RuntimeError("interrupted")

    keras.backend.clear_session()
    treadle.setup(seed=0)
    batches = [np.ones((2, 3), "float32")] * 2
    given = [treadle.every("1 epoch", picture), treadle.every("1 step", failing)]
    given.append(hooks.Checkpoint("1 step", keep_last=1))
    with treadle.Loop(Line(), directory, hooks=given, fresh=fresh, console=False) as loop:
        loop.fit(batches, epochs=2)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that failed in its second epoch."""
    directory = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(RuntimeError, match="interrupted"):
        run(directory, fails=True)
    return directory


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
    }


def put(path: Path, kind: str, outside: Path) -> None:
    """Put a link in the place of a file or folder; what the link names holds what was there."""
    target = outside / path.name
    if path.is_dir():
        shutil.copytree(path, target)
        (target / "other-1.png").touch()
        (target / ".partial-other").touch()
        (target / f"{'0' * 64}.safetensors").touch()
        shutil.rmtree(path)
    else:
        target.write_bytes(path.read_bytes() if path.exists() else b"precious")
        path.unlink(missing_ok=True)
    if kind == "hard link":
        path.hardlink_to(target)
        return
    if kind == "dangling link":
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    path.symlink_to(target)


KINDS = ("link", "dangling link", "hard link")


def cases(part: int) -> list[tuple[str, str]]:
    """Return a third of all cases: each file once, and the kinds in turn."""
    turns = [(name, (number + part) % 3) for number, name in enumerate([*FILES, *FOLDERS])]
    return [(name, KINDS[k]) for name, k in turns if k < 2 or name not in FOLDERS]


@pytest.mark.parametrize(
    "fresh", [False, pytest.param(True, marks=pytest.mark.long)], ids=["resume", "fresh"]
)
@pytest.mark.parametrize("part", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_links_change_nothing_outside(begun: Path, tmp_path: Path, part: int, fresh: bool) -> None:
    ended = []
    for number, (name, kind) in enumerate(cases(part)):
        directory, outside = tmp_path / f"run-{number}", tmp_path / f"outside-{number}"
        shutil.copytree(begun, directory)
        outside.mkdir()
        put(directory / name, kind, outside)
        before = content(outside)
        try:
            run(directory, fresh=fresh)
            ended.append(name)
        except TreadleError as error:
            assert f"{directory}/{name}" in str(error), (name, kind)
        assert content(outside) == before, (name, kind)
        # A run that has nothing left to do, or fails again, changes nothing either.
        with suppress(TreadleError):
            run(directory)
        assert content(outside) == before, (name, kind)
    assert set(ended) >= {".lock", "curves.png", "run.json.partial", "state.safetensors"}
    assert fresh or "checkpoints" not in ended


def test_a_linked_log_is_named(begun: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(begun, tmp_path / "run")
    (directory / "log.jsonl").rename(tmp_path / "log")
    (directory / "log.jsonl").symlink_to(tmp_path / "log")
    with pytest.raises(DataError) as caught:
        run(directory)
    assert str(caught.value).startswith("cannot ")
    assert str(caught.value).endswith(
        f"{directory}/log.jsonl: it is a symbolic link, which is not followed. Put a file itself "
        "in its place"
    )


def test_fresh_removes_only_what_is_of_the_run(begun: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(begun, tmp_path / "run")
    own = {
        *("notes.txt", "images/holiday-2019.png", "images/mine.png", "checkpoints/mine.txt"),
        "checkpoints/fixed/mine.npz",
    }
    for name in own:
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("mine")
    left = [".partial-run.json-0123abcd", "images/.partial-picture-2.png-0123abcd"]
    left += [".partial-writable-0123abcd", ".partial-.lock-0123abcd"]
    for name in left:  # of a process that was killed
        (directory / name).touch()
    other = directory / ".partial-notes.txt-0123abcd"
    other.touch()
    before = content(directory)
    assert "images/picture-2.png" in before
    run(directory, fresh=True)
    after = content(directory)
    assert {name: after[name] for name in own} == dict.fromkeys(own, b"mine")
    assert not [name for name in after if name in left] and other.exists()
    fresh = tmp_path / "fresh"
    run(fresh)
    # A last checkpoint that was also due is saved twice, if the first was written quickly enough.
    found, expected = (
        {name.replace("step-000000000004-1", "step-000000000004") for name in names}
        for names in (after.keys() - own - {other.name}, content(fresh))
    )
    assert found == expected
