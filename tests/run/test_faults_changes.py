"""What a run must survive: errors of its own, and being another one when it is run again."""

import random
import re
import shutil
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import drill
import keras
import numpy as np
import pytest
from drill import Batches, Copies, Drill, batches, outcome, run

import treadle
from treadle.checkpoint import Checkpoints
from treadle.errors import DirectoryError
from treadle.hooks import Checkpoint
from treadle.hooks.log_file import read_log

GOLDEN = Path(__file__).parents[1] / "stored" / "run-of-jax"


def in_list() -> Batches:
    return Batches(batches())


class Noisy(Batches):
    """Draws from every generator that a user may draw from."""

    def __getitem__(self, index: Any) -> Any:
        x, y = super().__getitem__(index)
        noise = random.random() + np.random.normal(size=x.shape)
        if "torch" in sys.modules:
            noise = noise + sys.modules["torch"].rand(x.shape).numpy()
        return (x + 0.01 * noise).astype("float32"), y


@cache
def never_interrupted(train: Callable[[], Any]) -> dict[str, Any]:
    """The outcome with a source, when nothing happens."""
    with TemporaryDirectory() as folder:
        return outcome(run(Path(folder), train=train()))


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a run that was killed at step 16, with a checkpoint of step 15."""
    copies = Copies(tmp_path / "run", "step 16")
    save = Checkpoint.save
    with monkeypatch.context() as patched:  # a slow disk would postpone saves to other steps
        patched.setattr(Checkpoint, "save", lambda self, loop, wait=True: save(self, loop, True))
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run", at=lambda moment, loop: _until_16(copies, moment))
    return copies.taken["step 16"]


def _until_16(copies: Copies, moment: str) -> None:
    copies.at(moment)
    if moment == "step 16":
        raise KeyboardInterrupt


def said(capsys: Any) -> str:
    """What was shown, as one line."""
    return " ".join(capsys.readouterr().out.split())


# Errors


# Sources


@pytest.mark.long
def test_random_numbers_drawn_by_the_user_are_restored(tmp_path: Path) -> None:
    def noisy() -> Noisy:
        return Noisy(batches())

    copies = Copies(tmp_path / "run", "step 16", "step 40")  # in each of the two calls
    loop = run(tmp_path / "run", train=noisy(), at=copies.at)
    whole, drawn = outcome(loop), loop.history["numpy"]
    assert len(set(drawn)) == len(drawn) == drill.STEPS // 4
    assert whole["arrays"] != never_interrupted(in_list)["arrays"]
    for moment, copy in copies.taken.items():
        random.seed(99)
        np.random.seed(99)
        assert outcome(run(copy, train=noisy())) == whole, moment


class Sharper(Drill):
    def eval_step(self, batch: Any) -> Any:
        return {"loss": 2 * super().eval_step(batch)["loss"]}


Sharper.__qualname__ = Drill.__qualname__  # else it is another task


def test_changed_code_is_reported(killed: Path, capsys: Any) -> None:
    run(killed, task=Sharper, console=True)
    assert "warning: the code of Sharper.eval_step changed since this run" in said(capsys)


# What computes


def lost(capsys: Any) -> list[str]:
    """What was said to keep a run from going on bit for bit."""
    return re.findall(r"resumes, but may not be bit-for-bit exact: (.*?)\. All", said(capsys))


@pytest.mark.long
def test_another_device_or_version_is_reported_with_the_lost_guarantee(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    from treadle.run import run as module

    others = {"versions": {"keras": "3.0"}, "threads": 99, "devices": ["tpu"] * 8}
    now = module.circumstances()
    with monkeypatch.context() as patch:
        patch.setattr(module, "circumstances", lambda: {**now, **others})
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, at=_interrupted)
    capsys.readouterr()
    run(tmp_path, console=True)
    [found] = lost(capsys)
    for difference in (
        "versions.keras was '3.0', now ",
        "threads was 99, now ",
        "devices was ['tp",
    ):
        assert difference in found


def _interrupted(moment: str, loop: Any) -> None:
    if moment == "step 16":
        raise KeyboardInterrupt


@pytest.mark.long
def test_another_plan_is_reported_with_the_lost_guarantee(killed: Path, capsys: Any) -> None:
    run(killed, console=True, options=treadle.Options(execution="eager"))
    [found] = lost(capsys)
    assert re.match(r"plan was '.+', now '.*eager.*'", found)


def test_an_unchanged_run_resumes_without_a_warning(killed: Path, capsys: Any) -> None:
    run(killed, console=True)
    assert lost(capsys) == []


# Another backend. The golden run was begun on JAX; see the end of `drill`.


@pytest.mark.long
def test_a_run_of_another_backend_or_version_resumes_from_the_same_bits(
    tmp_path: Path, capsys: Any
) -> None:
    directory = tmp_path / "run"
    shutil.copytree(GOLDEN, directory)
    saved = Checkpoints(directory / "checkpoints").latest()
    assert saved is not None
    if keras.config.backend() != "jax":
        told = f"configuration: backend was 'jax', now '{keras.config.backend()}'"
        with pytest.raises(DirectoryError, match=told):
            run(directory)
    begun: list[Any] = []

    def at(moment: str, loop: Any) -> None:
        if moment.startswith("start") and not begun:
            begun.append((moment, loop.state.arrays()))

    run(directory, at=at, override=True, console=True)
    [(moment, state)] = begun
    assert moment == f"start {saved.progress.step}" and saved.progress.step > drill.BATCHES
    floats = [path for path, x in saved.state.items() if x.dtype == np.float32]
    assert len(floats) > 20
    for path in floats:
        assert state[path].tobytes() == saved.state[path].tobytes(), path
    before, _ = read_log(GOLDEN / "log.jsonl")
    after, _ = read_log(directory / "log.jsonl")
    assert [line["step"] for line in after] == list(range(1, drill.STEPS + 1))
    assert after[: saved.progress.step] == before[: saved.progress.step]
    if keras.config.backend() != "jax":
        [found] = lost(capsys)
        assert f"backend was 'jax', now '{keras.config.backend()}'" in found
