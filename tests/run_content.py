"""The content of a run directory without times, to compare the directories of equal runs."""

import csv
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle.checkpoint.run_files import list_files
from treadle.core.directory import encode_record
from treadle.core.folder import Folder

# Fields that are times, or follow from one: the size and the hash of a log that contains times.
# An identifier is drawn at random. Keras also writes addresses in memory into the configuration
# of a model.
FOLLOWING = {"id", "sha256", "checkpoint", "files"}
TIMES = {
    "run.json": {"started", "finished", "costs", "seconds", "resumed", *FOLLOWING},
    "manifest.json": {"started", "seconds", "JSONLines", "id"},
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
        return without(json.loads(data), times)
    if name.endswith(".jsonl"):
        return [without(json.loads(line), times) for line in data.splitlines()]
    if name.endswith(".csv"):
        return [without(row, times) for row in csv.DictReader(data.decode().splitlines())]
    if name.endswith(".keras") and path is not None:
        with zipfile.ZipFile(path) as file:
            return {part: _content(part, file.read(part)) for part in file.namelist()}
    if name.endswith(".png"):
        return b"".join(part for part in chunks(data) if not part[4:].startswith(b"tEXtSource"))
    return data


def content_of_file(path: Path) -> Any:
    """Return the content of one file without times."""
    return _content(path.name, path.read_bytes(), path)


def chunks(data: bytes) -> Iterator[bytes]:
    """Yield the parts of a PNG file, one of which holds the identifier of the run."""
    place = 8
    while place < len(data):
        end = place + 12 + int.from_bytes(data[place : place + 4])
        yield data[place:end]
        place = end


def write_record(directory: Path, record: Any) -> None:
    """Write an edited `run.json`; its SHA-256 follows."""
    (directory / "run.json").write_bytes(encode_record(record))


def list_again(directory: Path) -> None:
    """Edit `run.json` so that it lists the files of a run as they are now."""
    record = json.loads((directory / "run.json").read_bytes())
    with Folder.open(directory) as folder:
        record["files"] = list_files(folder, record["files"])
    write_record(directory, record)


def without(value: Any, names: set[str]) -> Any:
    """Return JSON without the values of these names."""
    if isinstance(value, dict):
        return {key: without(part, names) for key, part in value.items() if key not in names}
    return [without(part, names) for part in value] if isinstance(value, list) else value
