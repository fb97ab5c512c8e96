"""Files of a run directory, and reading `run.json`, without importing a framework."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DirectoryError
from . import run_file
from .folder import Folder
from .run_file import RunFile

RUN = "run.json"
LOG = "log.jsonl"
HEALTH = "health.jsonl"
STATE = "state.safetensors"
CHECKPOINTS = "checkpoints"
MODEL = ".keras"  # the suffix of models, after the name of an attribute of the task
DOCTOR = "doctor.json"  # of `treadle run --preflight`, or what `treadle doctor --json` printed


class LostRecordError(DirectoryError):
    """`run.json` is missing or damaged. A checkpoint may hold a copy of the record.

    Attributes:
        fault: What is wrong with the file, as a clause.
        missing: Whether there is no such file.

    Args:
        message: The message.
        fault: See above.
        missing: See above.
    """

    def __init__(self, message: str, fault: str, missing: bool = False) -> None:
        super().__init__(message)
        self.fault, self.missing = fault, missing


def read_run(path: Path) -> RunFile:
    """Return the checked content of a run directory's `run.json`.

    Raises:
        LostRecordError: The file is missing or damaged.
        DirectoryError: There is no such directory, the file is not a regular file, or another
            version of Treadle wrote it.
    """
    if not path.is_dir():
        raise DirectoryError(f"{path} holds no run: there is no such folder")
    with Folder.open(path) as folder:
        if folder.kind(RUN) is None:
            raise LostRecordError(
                f"{path} holds no run: there is no {RUN} in it", "is missing", missing=True
            )
        data = folder.read(RUN, run_file.MOST_BYTES)
    try:
        return run_file.decode(data)
    except ValueError as error:
        message = f"{path / RUN} is damaged, or is not the record of a run: {error}"
        message = f"{message}. Restore a copy of it"
        if isinstance(error, run_file.UnknownFormatError):
            raise DirectoryError(message) from error
        raise LostRecordError(message, f"is damaged ({error})") from error


def why_unfinished(record: RunFile) -> str:
    """Return in brackets the error that ended an unfinished run; empty if none was recorded.

    Example:
        >>> why_unfinished({"configuration": {}, "error": "KeyboardInterrupt",
        ...     "progress": {"step": 12}})
        ' (KeyboardInterrupt after step 12)'
    """
    error = record.get("error")
    return f" ({error} after step {run_file.progress_of(record).step})" if error else ""


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
