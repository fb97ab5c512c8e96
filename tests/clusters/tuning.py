"""Trials of Ray Tune, of which a worker is killed, and the same trials in one process."""

import contextlib
import json
from pathlib import Path
from typing import Any

from .launchers import RayTrain, called

AGAIN = """
import json, sys
import keras
from original import train

for directory, settings in json.loads(sys.argv[1]):
    keras.backend.clear_session()
    train(directory, **settings)
"""


def compared_trials(stack: contextlib.ExitStack, folder: Path, backend: str) -> int:
    """Run the search, kill one of its workers, and compare; return 1 if anything differs."""
    launcher = RayTrain(folder)
    stack.enter_context(launcher.running())
    directory = folder / "runs" / f"tune-{backend}"
    directory.mkdir()
    fault = directory / "any.fault-00"
    fault.write_text("step 40 0")  # of the trial that comes to this step first
    command = ["python", "ray_tune.py", str(directory), backend]
    said = called(command, folder, backend, launcher.variables)
    if fault.exists():
        raise RuntimeError("no worker was killed")
    trials = found_trials(Path(f"{directory}-ray"))
    again = folder / "runs" / f"again-{backend}"
    wanted = [(str(again / name), lines[-1]["config"]) for name, lines in trials.items()]
    for _, settings in wanted:
        settings.pop("directory", None)
    called(["python", "-c", AGAIN, json.dumps(wanted)], folder, backend)
    return reported(said, directory, again, trials)


def found_trials(storage: Path) -> dict[str, list[Any]]:
    """Return what each trial reported to Ray, by its name."""
    found: dict[str, list[Any]] = {}
    for path in sorted(storage.rglob("result.json")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[lines[-1]["trial_id"]] = lines
    return found


def reported(said: str, directory: Path, again: Path, trials: dict[str, list[Any]]) -> int:
    """Print how the trials compare; return 1 if a value or the best settings differ."""
    differing = 0
    best: list[tuple[float, Any]] = []
    for name, lines in trials.items():
        values = validation_losses(again / name)
        pairs = [(line["val_loss"], values[line["epoch"] - 1]) for line in lines]
        differing += any(a != b for a, b in pairs)
        best.append((values[lines[-1]["epoch"] - 1], lines[-1]["config"]))
        resumed = json.loads((directory / name / "run.json").read_text()).get("resumed", [])
        steps = [one["step"] for one in resumed]
        print(f"{name}: {len(lines)} epochs, {pairs[-1][0]} and {pairs[-1][1]}, resumed at {steps}")
    value, settings = min(best, key=lambda one: one[0])
    shown = f"best: {value} {settings}"
    print(f"{len(trials)} trials, of which {differing} differ; in one process, {shown}")
    # Lines of the workers may come later.
    found = [line for line in said.splitlines() if line.startswith("best: ")]
    print("\n".join(found))
    return int(differing > 0 or found != [shown])


def validation_losses(run: Path) -> list[float]:
    """Return the loss of each validation of a run, from its log."""
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [line["val_loss"] for line in lines if line.get("kind") == "epoch"]
