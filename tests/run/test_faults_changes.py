"""What a run must survive: errors of its own, and being another one when it is run again."""

import json
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import drill
import keras
import numpy as np
import pytest
from drill import Batches, Copies, Drill, batches, newest, outcome, run, train_source

import treadle
from tests.run_content import write_record
from treadle.checkpoint import Checkpoints
from treadle.errors import DirectoryError, StateError
from treadle.hooks import Checkpoint
from treadle.hooks.log_file import read_log
from treadle.steps.state import State

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


@pytest.mark.long
@pytest.mark.parametrize(
    ("who", "notes"),
    [
        (
            "source",
            [
                "while the source was giving batch 8 of epoch 2",
                "in the source, after step 20, epoch 2, batch 7; the weights are those of that "
                "step",
            ],
        ),
        ("step", ["in train_step, step 21 (epoch 2, batch 8); the weights are those before"]),
        (
            "hook",
            [
                "in Moments.steps, after step 20, epoch 2, batch 7; the weights are those of that "
                "step"
            ],
        ),
    ],
)
def test_an_error_names_its_step_and_the_run_resumes_once_fixed(
    tmp_path: Path, who: str, notes: list[str]
) -> None:
    train, broken = in_list(), False

    def asked(index: int) -> None:
        if who == "source" and broken and index == 7:
            raise OSError("the tape is torn")

    def at(moment: str, loop: Any) -> None:
        nonlocal broken
        broken |= moment == "epoch 1"
        if who == "step" and moment == "epoch 1":
            x, y = train.batches[7]
            train.batches[7] = np.concatenate([x, x], axis=1), y
        if who == "hook" and moment == "step 20":
            raise OSError("the tape is torn")

    train.asked = asked
    with pytest.raises(Exception) as raised:
        run(tmp_path, train=train, at=at)
    assert str(raised.value) == "the tape is torn" or who == "step"
    found = "\n".join(raised.value.__notes__)
    assert all(note in found for note in notes), found
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["finished"] is None and type(raised.value).__name__ in record["error"]
    assert 0 < newest(tmp_path) <= 20
    assert outcome(run(tmp_path, train=in_list())) == never_interrupted(in_list)


# Sources


@pytest.mark.long
def test_random_numbers_drawn_by_the_user_are_restored(tmp_path: Path) -> None:
    def noisy() -> Noisy:
        return Noisy(batches())

    copies = Copies(tmp_path / "run", "step 16", "step 25", "step 40")
    loop = run(tmp_path / "run", train=noisy(), at=copies.at)
    whole, drawn = outcome(loop), loop.history["numpy"]
    assert len(set(drawn)) == len(drawn) == drill.STEPS // 4
    assert whole["arrays"] != never_interrupted(in_list)["arrays"]
    for moment, copy in copies.taken.items():
        random.seed(99)
        np.random.seed(99)
        assert outcome(run(copy, train=noisy())) == whole, moment


def generated() -> Iterator[Any]:
    yield from batches()


@pytest.mark.long
def test_a_generator_is_skipped_forward_and_not_called_exact(tmp_path: Path, capsys: Any) -> None:
    copies = Copies(tmp_path / "run", "step 16")
    loop = run(tmp_path / "run", train=generated, at=copies.at, more=0, console=True)
    told = (
        "a resume of this run may not be exact: the function generated cannot seek: a resumed run "
        "draws and discards the batches before its position, which is exact only if they come in "
        "the same order again"
    )
    assert said(capsys).count(told) == 1
    again = run(copies.taken["step 16"], train=generated, more=0, console=True)
    assert outcome(again) == outcome(loop)
    assert said(capsys).count(told) == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"rows": 192}, r"train\.length was 13, now 12; train\.examples was 208, now 192"),
        ({"seed": 5}, r"train\.fingerprint was '\w+', now '\w+'"),
    ],
)
def test_other_data_is_refused_with_the_difference_unless_overridden(
    killed: Path, changed: Any, difference: str
) -> None:
    with pytest.raises(DirectoryError, match=f"holds another run: {difference}.*override=\\["):
        run(killed, train=train_source(**changed))
    assert newest(killed) == 15  # in the second of three epochs
    loop = run(killed, train=train_source(**changed), override=True)
    # The interrupted epoch ends after two batches of the old data, with a record of its own. It is
    # none of the three.
    partial = [r.progress for r in loop.history.records if r.kind == "partial"]
    assert [(at.step, at.epoch) for at in partial] == [(15, 1)]
    length = 12 if "rows" in changed else 13
    assert loop.progress.step == 15 + 2 * length + drill.MORE and loop.progress.epoch == 4
    overridden = json.loads((killed / "run.json").read_text())["overridden"]
    assert re.search(difference, "; ".join(overridden))


# Models


def as_drill(kind: type) -> type:
    """Let a class pass for the drill's, with settings that are the same."""
    kind.__qualname__ = Drill.__qualname__
    return kind


@as_drill
class Wider(Drill):
    def __init__(self) -> None:
        super().__init__(units=17)


@as_drill
class Deeper(Drill):
    def __init__(self) -> None:
        super().__init__(deeper=True)


@as_drill
class Renamed(Drill):
    def __init__(self) -> None:
        super().__init__()
        self.precision = self.accuracy
        del self.accuracy

    @property
    def accuracy(self) -> Any:
        return self.precision

    @accuracy.setter
    def accuracy(self, value: Any) -> None:
        vars(self)["precision"] = value

    @accuracy.deleter
    def accuracy(self) -> None:
        pass


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "mismatches"),
    [
        (
            Wider,
            [
                "model/layers/0/kernel has shape (8, 16), expected (8, 17)",
                "model/layers/0/bias has shape (16,), expected (17,)",
                "model/layers/3/kernel has shape (16, 3), expected (17, 3)",
                "optimizer/momentums/model/layers/0/kernel has shape (8, 16), expected (8, 17)",
            ],
        ),
        (
            Deeper,
            [
                "model/layers/4/kernel has no value",
                "model/layers/1/kernel has no value",
                "model/layers/1/gamma is not in this task",
            ],
        ),
        (
            Renamed,
            ["precision/total has no value", "accuracy/total is not in this task"],
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_assigned(
    killed: Path, kind: type, mismatches: list[str]
) -> None:
    made: list[Any] = []

    def task() -> Any:
        made.append(kind())
        return made[-1]

    with pytest.raises(StateError, match="cannot resume from its last checkpoint") as raised:
        run(killed, task=task, override=True)
    assert all(mismatch in str(raised.value) for mismatch in mismatches), raised.value
    assert str(raised.value).endswith("Nothing was changed")
    keras.utils.clear_session()
    treadle.setup(seed=3)
    fresh, found = State.discover(kind()).arrays(), State.discover(made[0]).arrays()
    weights = [path for path in fresh if path.startswith("model/")]
    assert weights
    for path in weights:
        np.testing.assert_array_equal(fresh[path], found[path])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "was", "now"),
    [
        ("activation", "relu", "tanh"),
        ("optimizer", "Adam", "Nadam"),
        ("learning_rate", 0.01, 0.02),
    ],
)
def test_another_setting_of_the_same_shapes_is_shown(
    killed: Path, name: str, was: Any, now: Any
) -> None:
    def other() -> Drill:
        return Drill(**{name: now})

    difference = f"settings.{name} was {was!r}, now {now!r}"
    with pytest.raises(DirectoryError, match=f"of another configuration: {re.escape(difference)}"):
        run(killed, task=other)
    if name != "optimizer":  # which has other slots
        run(killed, task=other, override=True)
        assert difference in json.loads((killed / "run.json").read_text())["overridden"]


@as_drill
class Sharper(Drill):
    def eval_step(self, batch: Any) -> Any:
        return {"loss": 2 * super().eval_step(batch)["loss"]}


def test_changed_code_is_reported(killed: Path, capsys: Any) -> None:
    run(killed, task=Sharper, console=True)
    assert "warning: the code of Sharper.eval_step changed since this run" in said(capsys)


# What computes


def lost(capsys: Any) -> list[str]:
    """What was said to keep a run from going on bit for bit."""
    return re.findall(r"resumes, but may not be bit-for-bit exact: (.*?)\. All", said(capsys))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "was", "difference"),
    [
        ("versions", {"keras": "3.0"}, "versions.keras was '3.0', now "),
        ("threads", 99, "threads was 99, now "),
        ("devices", ["tpu"] * 8, "devices was ['tpu', "),
    ],
)
def test_another_device_or_version_is_reported_with_the_lost_guarantee(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
    name: str,
    was: Any,
    difference: str,
) -> None:
    from treadle.run import run as module

    now = module.circumstances()
    with monkeypatch.context() as patch:
        patch.setattr(module, "circumstances", lambda: {**now, name: was})
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, at=_interrupted)
    capsys.readouterr()
    run(tmp_path, console=True)
    [found] = lost(capsys)
    assert difference in found


def _interrupted(moment: str, loop: Any) -> None:
    if moment == "step 16":
        raise KeyboardInterrupt


@pytest.mark.long
def test_another_plan_is_reported_with_the_lost_guarantee(killed: Path, capsys: Any) -> None:
    run(killed, console=True, options=treadle.Options(execution="eager"))
    [found] = lost(capsys)
    assert re.match(r"plan was '.+', now '.*eager.*'", found)


def test_another_precision_is_refused(killed: Path) -> None:
    record = json.loads((killed / "run.json").read_text())
    record["configuration"]["precision"] = "mixed_bfloat16"
    write_record(killed, record)
    with pytest.raises(DirectoryError, match=r"precision was 'mixed_bfloat16', now 'float32'"):
        run(killed)


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
