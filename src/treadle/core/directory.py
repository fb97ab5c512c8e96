"""Files of a run directory, and reading `run.json`, without importing a framework."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DirectoryError

RUN = "run.json"
LOG = "log.jsonl"
STATE = "state.safetensors"
OLD_STATE = "state.npz"  # of earlier versions, with the same content
CHECKPOINTS = "checkpoints"


def state_file(directory: Path) -> Path | None:
    """Return the file with the final value of every variable; None if the run saved none."""
    files = (directory / name for name in (STATE, OLD_STATE))
    return next((file for file in files if file.is_file()), None)


def read_run(path: Path) -> dict[str, Any]:
    """Return the contents of a run directory's `run.json`.

    Raises:
        DirectoryError: The file is missing, cannot be read, or is not the record of a run.
    """
    file = path / RUN
    try:
        record = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise DirectoryError(f"{path} holds no run: there is no {RUN} in it") from error
    except (OSError, ValueError) as error:
        raise DirectoryError(f"cannot read {file}: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("configuration"), dict):
        raise DirectoryError(f"{file} is not the record of a run")
    return record  # type: ignore[return-value]


def why_unfinished(record: Mapping[str, Any]) -> str:
    """Return in brackets the error that ended an unfinished run; empty if none was recorded.

    Example:
        >>> why_unfinished({"error": "KeyboardInterrupt", "progress": {"step": 12}})
        ' (KeyboardInterrupt after step 12)'
    """
    error = record.get("error")
    return f" ({error} after step {record['progress']['step']})" if error else ""


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Describe the values in which two configurations differ."""
    found: list[str] = []
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            found += differences(before, after, f"{prefix}{key}.")  # type: ignore[arg-type]
        elif before != after:
            found.append(f"{prefix}{key} was {before!r}, now {after!r}")
    return found
