"""Random programs agree with themselves however they run; see `tests/fuzz`.

They run in a process of their own: TensorFlow never frees what XLA compiled of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
from executions import long_to_compile, once

from tests.fuzz import byhand
from tests.fuzz.checks import Difference, check, script
from tests.fuzz.grammar import FEATURES, HAS
from tests.fuzz.program import (
    Change,
    Control,
    Form,
    Memory,
    Network,
    Outputs,
    Part,
    Program,
    Second,
    shown,
)
from tests.fuzz.search import program_of

ROOT = Path(__file__).parents[2]
# As many as take about half a minute: JAX compiles each operation that runs by hand or eagerly, 27
# processor seconds a program, TensorFlow takes 10 and PyTorch 4. `scripts/fuzz` runs more.
PROGRAMS = {"jax": 1, "tensorflow": 3, "torch": 8}[keras.config.backend()]


class Worker:
    """A process that runs the programs of all seeds from the first one that is asked for."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def result(self, seed: int) -> dict[str, Any]:
        if self._process is None:
            backend = keras.config.backend()
            how = ["--worker", "--short", f"--seed={seed}", f"--programs={PROGRAMS - seed}"]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz", *how, f"--backend={backend}"],
                cwd=ROOT,
                env=os.environ | {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._process.stdout is not None
        for text in self._process.stdout:
            line = json.loads(text)
            if line.get("seed") == seed:
                return line
        raise AssertionError(f"the process ended with {self._process.wait()} at seed {seed}")

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


@pytest.mark.long
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_random_program_agrees(worker: Worker, seed: int) -> None:
    found = worker.result(seed)
    assert found["result"] == "agree", (
        f"{found['message']}\n{found['program']}\n{found['script']}\nshrink it with scripts/fuzz "
        f"--short --programs 1 --seed {seed} --backend {keras.config.backend()}"
    )


@long_to_compile
@pytest.mark.parametrize("failed", ["window", "resumed", "eager"])
def test_a_program_that_does_not_agree_is_found_and_shown(failed: str) -> None:
    seen = {
        "window": "len(str(loop.options.window))",
        "eager": "len(loop.options.execution)",
        "resumed": "len(loop.directory.name)",  # `first` and `killed`
    }
    code = f"task.opt0.learning_rate = 0.01 * {seen[failed]}"
    program = Program(changes=(Change(4, code, constant=False),))
    with pytest.raises(Difference, match=f"^{failed}: ") as caught:
        check(program, (failed,))
    assert caught.value.check == failed
    assert code in script(program, failed)


def test_a_step_that_differs_from_the_loop_by_hand_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = byhand.clip_by_global_norm
    monkeypatch.setattr(byhand, "clip_by_global_norm", lambda grads, _: right(grads, 0.4))
    program = Program(forms=(Form(parts=(Part(kind="gradients"),)),))
    with pytest.raises(Difference, match=r"^hand: steps/loss is\n"):
        check(program, ("hand",))


@pytest.mark.long
def test_a_seed_gives_one_program_that_its_description_makes_again() -> None:
    classes = (Program, Network, Part, Form, Change, Control, Memory, Outputs, Second)
    for seed in range(20):
        program = program_of(seed, frozenset(FEATURES))
        assert program == program_of(seed, frozenset(FEATURES))
        assert program == eval(shown(program), {cls.__name__: cls for cls in classes})


@once
def test_batches_by_hand_come_from_the_right_source_and_epoch() -> None:
    calls = (("steps", 2, 0), ("epochs", 1, 1), ("break", 1, 1), ("both", 1, 1), ("steps", 3, 1))
    program = Program(second=Second(), calls=calls)
    visits = program.visits(lambda source, _: len(program.sources[source].order))
    assert [(visit.source, visit.epoch, visit.batch) for visit in visits] == [
        *((0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1), (1, 2, 0)),
        *((1, 2, 1), (0, 2, 0), (0, 2, 1), (0, 2, 2)),
        *((1, 3, 0), (1, 3, 1), (1, 4, 0)),
    ]


@pytest.mark.long
@once
def test_programs_have_every_feature_that_is_not_left_out() -> None:
    def found(without: str = "") -> set[str]:
        made = [program_of(seed, frozenset(FEATURES) - {without}) for seed in range(60)]
        return {kind for program in made for kind, has in HAS.items() if has(program)}

    every = found()
    assert every == {*HAS}
    for kind in every:
        assert found(without=kind) == every - {kind}
