"""The content of a run directory without times, to compare the directories of equal runs."""

import csv
import json
import zipfile
from pathlib import Path
from typing import Any

# Fields that are times, or follow from one: the size and the hash of a log that contains times.
# Keras also writes addresses in memory into the configuration of a model.
TIMES = {
    "run.json": {"started", "finished", "costs", "seconds", "resumed"},
    "manifest.json": {"started", "seconds", "JSONLines"},
    "log.jsonl": {"seconds"},
    "epochs.csv": {"seconds"},
    "metadata.json": {"date_saved"},
    "config.json": {"shared_object_id"},
}


def content_of(directory: Path) -> dict[str, Any]:
    """Return the content of each file by its path, without times."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): _content(path.name, path.read_bytes(), path)
        for path in files
        if path.name != "manifest.sha256"  # of a file that contains times
    }


def require_equal(found: Path, expected: Path) -> None:
    """Check that two directories hold the same files with the same content, but for times."""
    a, b = content_of(found), content_of(expected)
    assert not a.keys() ^ b.keys(), a.keys() ^ b.keys()
    for name, content in a.items():
        assert content == b[name], f"{found / name} differs from {expected / name}"


def _content(name: str, data: bytes, path: Path | None = None) -> Any:
    times = TIMES.get(name, set())
    if name.endswith(".json"):
        return _without(json.loads(data), times)
    if name.endswith(".jsonl"):
        return [_without(json.loads(line), times) for line in data.splitlines()]
    if name.endswith(".csv"):
        return [_without(row, times) for row in csv.DictReader(data.decode().splitlines())]
    if name.endswith(".keras") and path is not None:
        with zipfile.ZipFile(path) as file:
            return {part: _content(part, file.read(part)) for part in file.namelist()}
    return data


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(part, names) for key, part in value.items() if key not in names}
    return [_without(part, names) for part in value] if isinstance(value, list) else value
