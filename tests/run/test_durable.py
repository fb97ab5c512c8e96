"""What a resume needs is on the disk before it counts: files are synced before they are named."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults import path_of
from tests.run.test_links import run
from treadle.core.folder import FileSystem, written_as

DURABLE = {"run.json", "state.safetensors", "model.keras", "curves.png", "epochs.csv"}


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Path, str]]]:
    """All operations of all files: their name, the path, and the new name of what is renamed."""
    done: list[tuple[str, Path, str]] = []
    perform = FileSystem.perform

    def recorded(system: FileSystem, operation: Any, *arguments: Any) -> Any:
        result = perform(system, operation, *arguments)
        new = arguments[2] if operation.__name__ == "replace" else ""
        done.append((operation.__name__, path_of(arguments), new))
        return result

    with monkeypatch.context() as patched:
        patched.setattr(FileSystem, "perform", recorded)
        yield done


def test_files_are_synced_before_they_get_their_names(
    tmp_path: Path, operations: list[tuple[str, Path, str]]
) -> None:
    run(tmp_path / "run")
    names = [name for name, _, _ in operations]
    found = set()
    for number, (name, path, new) in enumerate(operations):
        if name != "replace" or new not in DURABLE:
            continue
        # Models are written in a folder of their own, as `Folder.write_with` does.
        assert written_as(path.name) == new or written_as(path.parent.name) == new
        assert ("sync_file", path, "") in operations[:number], new
        assert ("sync_folder", tmp_path / "run", "") in operations[number:], new
        found.add(new)
    assert found == DURABLE
    assert names.count("sync_file") > 10


def test_a_checkpoint_is_named_after_the_log_is_synced(
    tmp_path: Path, operations: list[tuple[str, Path, str]]
) -> None:
    run(tmp_path / "run")
    log, picture = tmp_path / "run" / "log.jsonl", tmp_path / "run" / "images" / "picture-2.png"
    # On a slow disk, a checkpoint is omitted while the one before it is written.
    steps = [n for n, (_, _, new) in enumerate(operations) if new.startswith("step-")]
    assert ("sync_file", log, "") in operations[: steps[1]]
    # What is logged later is synced before `run.json` says that the run is finished.
    finished = max(n for n, (_, _, new) in enumerate(operations) if new == "run.json")
    at = {operation: n for n, operation in enumerate(operations)}  # the last time
    assert at["append", log, ""] < at["sync_file", log, ""] < finished
    assert at["sync_file", picture, ""] < finished
