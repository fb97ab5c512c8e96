"""Run directories for the tests of reports, written without training."""

import json
from pathlib import Path

import numpy as np

from tests.run_content import write_record
from treadle import Image
from treadle.hooks.images import source_of

PROGRESS = {"step": 8, "epoch": 2, "batch": 0, "examples": 64, "seconds": 4.0}
PATTERN, RUN = Image(np.eye(8)).png(), "0a"


def log_of(losses, epochs=(4, 8), **more):
    """Return a log with a loss for each step, and a record at the end of each epoch."""
    lines = []
    for step, loss in enumerate(losses, 1):
        lines.append({"step": step, "loss": loss, **more})
        if step in epochs:
            epoch = epochs.index(step) + 1
            head = {"kind": "epoch", "epoch": epoch, "step": step, "seconds": epoch * 2.0}
            lines.append({**head, "loss": loss, "accuracy": 0.4 * epoch, "val_loss": 3.0 / epoch})
    return lines


def record(kind, step, **values):
    return {"kind": kind, "epoch": 1, "step": step, "seconds": step / 2, **values}


def pattern(name):
    """Return an image as the run logs it under the name of a file."""
    return Image(np.eye(8)).png(source_of(RUN, name))


def write_run(path, log=None, settings=None, images=(), **facts):
    """Write a run directory, and return its path."""
    path = Path(path)
    path.mkdir(parents=True)
    configuration = {"task": "Tiny", "settings": settings or {}, "seed": 0, "recipe": "tiny"}
    configuration |= {"backend": "torch", "precision": "float32", "execution": "auto"}
    run = {
        **{"configuration": configuration, "backend": "torch", "progress": PROGRESS},
        **{"plan": "windows", "versions": {"keras": "3.15.1"}, "started": "2026-01-02T03:04:05"},
        **{"finished": "2026-01-02T03:05:00", "costs": {"compiling": 1.0, "waiting": 0.5}},
        **{"id": RUN, "files": {}, **facts},
    }
    log = log_of([4.0, 3.5, 3.0, 2.5, 2.0, 1.5, 1.0, 0.5]) if log is None else log
    write_record(path, run)
    (path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    for name in images:
        (path / "images").mkdir(exist_ok=True)
        (path / "images" / name).write_bytes(pattern(name))
    return path


def write_health(path, layers=3, steps=(1, 2, 101)):
    """Write the file of `GradientHealth`, with an incomplete last line."""
    names = [f"model/layers/{i}" for i in range(layers)]
    described = [{"path": name, "class": "Dense", "units": 8} for name in names]
    lines = [{"kind": "layers", "step": 1, "layers": described, "notes": ["a note"]}]
    for step in steps:
        values = {"gradient": [1e-9, 0.5, "NaN"][:layers], "weight": [2.0] * layers}
        values |= {"update": [0.0, 1.0, None][:layers], "dead": [None, 0.25, 1.0][:layers]}
        lines.append({"kind": "health", "step": step, **values})
    verdict = {"kind": "verdict", "step": 2, "verdict": "vanishing", "layers": names[:1]}
    lines.append({**verdict, "text": "model/layers/0 vanishes"})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "health.jsonl").write_text(f'{text}{{"kind": "health", "st')


def data_in(page):
    text = page.read_text() if isinstance(page, Path) else page
    begin = text.index('<script type="application/json" id="data">')
    text = text[text.index(">", begin) + 1 :]
    return json.loads(text[: text.index("</script>")])
