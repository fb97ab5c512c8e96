"""Runs that the tests of replaying a step share, and helpers that inspect these runs."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
from classifier import FEATURES, Classifier, dense, head
from mistakes import source

import treadle
from treadle.doctor import Replay, replay
from treadle.hooks import Checkpoint
from treadle.hooks.log_file import read_log


def plain() -> Classifier:
    return Classifier([keras.Input((FEATURES,)), dense(), head()], keras.optimizers.SGD(0.1))


def train(
    make: Callable[[], Any],
    directory: Path | None,
    hooks: Sequence[Any] = (),
    sources: Sequence[Any] | None = None,
    **how: Any,
) -> treadle.Loop:
    """Train as a script does, which makes a call of the loop for each source."""
    keras.utils.set_random_seed(0)
    options = how.pop("options", None)
    checkpoint = [Checkpoint(every="2 steps", keep_every="6 steps")] if directory else []
    task = make()
    with treadle.Loop(
        task, directory, [*checkpoint, *hooks], options=options, console=False
    ) as loop:
        for part in sources or [source()]:
            loop.fit(part, **{"epochs": 3, **how})
    return loop


def visit(make: Callable[[], Any], *args: Any, **kwargs: Any) -> Replay:
    """Replay a step as another process would: with a new task."""
    keras.utils.set_random_seed(0)
    return replay(make(), *args, **kwargs)


def hashes(directory: Path) -> dict[str, str]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def logged(directory: Path) -> dict[int, Any]:
    return {line["step"]: line for line in read_log(directory / "log.jsonl")[0]}
