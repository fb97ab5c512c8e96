"""What a run directory contains, without times: two runs of the same program must be equal."""

import csv
import json
import zipfile
from pathlib import Path
from typing import Any

from tests.run_content import FOLLOWING, content_of_file, without
from treadle.checkpoint import Checkpoints

# Times, and addresses in memory, which Keras writes.
TIMES = {"seconds", "started", "finished", "costs", "resumed", "shared_object_id", *FOLLOWING}
UNCOMPARED = (".lock", "curves.png")


def contents(directory: Path) -> dict[str, Any]:
    """Return the content of every file of a run directory, by its path, without times.

    Of the checkpoints, it is the newest one: which others are kept depends on where a run resumed.
    """
    checkpoints = directory / "checkpoints"
    newest = Checkpoints(checkpoints).latest()
    found = {
        str(path.relative_to(directory)): _content(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name not in UNCOMPARED and checkpoints not in path.parents
    }
    if newest is not None:
        found["checkpoint"] = (
            newest.progress.step,
            {
                name: (array.dtype.str, array.shape, array.tobytes())
                for name, array in newest.state.items()
            },
        )
    return found


def _content(path: Path) -> Any:
    if path.suffix == ".jsonl":
        return [without(json.loads(line), TIMES) for line in path.read_text().splitlines()]
    if path.suffix == ".json":
        return without(json.loads(path.read_text()), TIMES)
    if path.suffix == ".csv":
        rows = list(csv.DictReader(path.read_text().splitlines()))
        return [without(row, TIMES) for row in rows]
    if path.suffix == ".keras":
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name != "metadata.json"]  # the date
            found: dict[str, Any] = {name: archive.read(name) for name in names}
        found["config.json"] = without(json.loads(found["config.json"]), TIMES)
        return found
    return content_of_file(path)
