"""The run directories that are damaged, and what each command makes of them undamaged."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.run_content import without

from .damages import SECRET
from .running import Outcome, run

KINDS = ("finished", "killed", "failed", "recipe")
TASK = Path(__file__).with_name("tiny_task.py")
STEP = 17  # of the replay: after a checkpoint, before the death of a run
TIMES = {"seconds", "directory", "files", "finished_before", "costs", "reason", "progress", "plan"}
# What a replay compares with, and from where: the values of the step do not depend on it.
COMPARED = {"agreement", "checkpoint", "notes", "found_by", "origin"}
EVIL = """open({!r}, "w").close()
import treadle
class Evil(treadle.Task):
    epochs = 1
    def __init__(self, **settings): pass
"""


@dataclass(frozen=True)
class Place:
    """A folder with one run directory and what lies around it.

    Attributes:
        root: The folder. It holds `run`, the run directory; `outside`, which must not change;
            `mine`, the user's state; and `kept` and `notes`, undamaged copies of both.
    """

    root: Path

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def mine(self) -> Path:
        return self.root / "mine"

    def make(self) -> None:
        """Make the undamaged run directories."""
        for name in ("kept", "mine", "notes"):
            (self.root / name).mkdir(parents=True)
        shutil.copy(TASK, self.root / "tiny_task.py")
        for kind in KINDS:
            self._refill(None)
            out = run(self, self.first(kind), dies=kind)
            if not (self.run / "run.json").exists():
                raise SystemExit(f"no run was made: {out}")
            self.run.rename(self.root / "kept" / kind)
            self.mine.rename(self.root / "notes" / kind)
            self.mine.mkdir()

    def restore(self, kind: str | None) -> None:
        """Put an undamaged run directory in place, and everything around it."""
        self._refill(kind)

    def first(self, kind: str) -> list[str]:
        """Return the command that starts a run."""
        task = "linear" if kind == "recipe" else str(self.root / "tiny_task.py")
        how_long = ["--steps", "24"] if kind == "recipe" else []
        return ["run", task, *how_long, "--directory", str(self.run), "--json"]

    def command(self, name: str, kind: str) -> list[str]:
        """Return the arguments of a command."""
        directory = str(self.run)
        return {
            "run": self.first(kind),
            "run --fresh": [*self.first(kind), "--fresh"],
            "resume": ["resume", directory, "--json"],
            "evaluate": ["evaluate", directory, "--json"],
            "replay": ["replay", directory, "--step", str(STEP), "--json"],
            "runs": ["runs", directory],
            "log": ["log", directory],
            "report": ["report", directory, "--out", str(self.root / "report.html")],
        }[name]

    def _refill(self, kind: str | None) -> None:
        for folder in (self.run, self.outside):
            shutil.rmtree(folder, ignore_errors=True)
        (self.outside / "folder").mkdir(parents=True)
        (self.outside / "secret.txt").write_text(f"{SECRET}\n" * 3)
        for name in ("arrays.npz", "a-1.png", ".partial-mine", "run.json", "log.jsonl"):
            (self.outside / "folder" / name).write_text("a file of the user")
        (self.outside / "evil.py").write_text(EVIL.format(str(self.outside / "code-has-run")))
        if kind is not None:
            shutil.copytree(self.root / "kept" / kind, self.run)
            shutil.rmtree(self.mine)  # it notes which code may run, that of the last run
            shutil.copytree(self.root / "notes" / kind, self.mine)


WRITING = ("run", "run --fresh", "resume")
READING = ("evaluate", "replay", "runs", "log", "report")
COMMANDS = (*WRITING, *READING)


def result(place: Place, kind: str, command: str, out: Outcome) -> Any:
    """Return what a command that succeeded computed, without times."""
    if command in ("runs", "log", "report"):
        return None
    printed = without(json.loads(out.stdout[out.stdout.index("{") :]), TIMES | COMPARED)
    written = command == "run --fresh" or (command in WRITING and kind in ("killed", "failed"))
    return printed, _files(place.run) if written else None


def _files(directory: Path) -> Any:
    """Return the arrays, the log and the table of a run; a file that cannot be read is an error."""
    state = {
        name: array.tobytes() for name, array in load_file(directory / "state.safetensors").items()
    }
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    # Notes and warnings tell of the damage.
    lines = [without(line, TIMES) for line in lines if line.get("kind") not in ("note", "warning")]
    rows = [re.sub(r"^(\d+),(\d+),[\d.]+", r"\1,\2", row) for row in _rows(directory)]
    digest = hashlib.sha256(repr(sorted(state.items())).encode()).hexdigest()
    return digest, lines, rows


def _rows(directory: Path) -> list[str]:
    path = directory / "epochs.csv"
    return path.read_text().splitlines() if path.exists() else []


def tree(folder: Path) -> dict[str, Any]:
    """Return the kind, the mode and the content of everything in a folder."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        about = path.lstat()
        content: Any = None
        if path.is_symlink():
            content = os.readlink(path)
        elif path.is_file():
            content = (
                about.st_size,
                path.read_bytes() if about.st_size < 1 << 26 else about.st_mtime,
            )
        found[str(path.relative_to(folder))] = about.st_mode, content
    return found
