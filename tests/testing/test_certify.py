"""The certificate: what is exact passes, and what is not is caught and named."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import broken
import keras
import numpy as np
import pytest
from classifier import batches
from executions import once
from typer.testing import CliRunner

from treadle.cli import app, certifying
from treadle.testing import resumed_equals_uninterrupted
from treadle.testing.certify.drill import in_one_process

pytestmark = pytest.mark.usefixtures("started_at_once")

FILE = Path(broken.__file__)
BACKEND = keras.config.backend()


def certified(task: str, *options: str) -> Any:
    arguments = ["certify", f"{FILE}:{task}", "--backend", BACKEND, *options]
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def message(make_task: Any, make_source: Any) -> str:
    """What a drill says of a task that is not exact."""
    with pytest.raises(AssertionError) as caught:
        resumed_equals_uninterrupted(make_task, make_source, steps=3)
    return str(caught.value)


def has(text: str, *parts: str) -> None:
    assert [part for part in parts if part not in text] == [], text


@pytest.fixture
def float32_again() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


@pytest.mark.long
@pytest.mark.parametrize("line", ["", "treadle.setup(seed=1, precision='float32')"])
def test_the_task_is_made_again_with_its_file_s_setup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, float32_again: None, line: str
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    file = tmp_path / "mine.py"
    # Without dropout: in bfloat16, XLA draws other numbers than TensorFlow does eagerly.
    file.write_text(
        f"import treadle\nfrom broken import Sound\n{line}\nclass Mine(Sound):\n"
        "    def __init__(self):\n        super().__init__(rate=0.0)\n"
    )
    keras.backend.clear_session()
    given = {"backend": BACKEND, "precision": "mixed_bfloat16", "seed": 3, "data_dir": None}
    subject = certifying.make(task=f"{file}:Mine", **given)
    found = in_one_process(subject, list(zip(*batches(4), strict=True)))
    assert found == {"windows": "", "eager": ""}
    models = [subject.again().model for _ in range(2)]
    assert [model.dtype_policy.name for model in models] == ["mixed_bfloat16"] * 2
    for one, other in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
@pytest.mark.usefixtures("started_at_once")  # here too, for the module that imports the test
@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=once)])
def test_an_exact_task_is_certified(deterministic: bool) -> None:
    done = certified("Sound", "--json", *(["--deterministic"] if deterministic else []))
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["exact"] is True
    # An epoch has 5 batches: the checkpoint lies in the second, and the third ends too.
    assert (found["steps"], found["place"]) == (7, "epoch 2, after 2 of its batches")
    assert [(check["name"], check["result"]) for check in found["checks"]] == [
        ("two fresh processes", "exact"),
        ("resumed = never interrupted", "exact"),
        ("many steps in one call = single steps", "exact"),
        ("compiled = eager", "within rounding"),
    ]
    assert all(check["findings"] == [] for check in found["checks"])
    assert found["checks"][1]["compared"].startswith("batches 7, logged values 7, records 3, ")
    assert found["holds_for"]["backend"] == BACKEND
    assert {"plan", "devices", "threads", "versions"} <= found["holds_for"].keys()
    assert found["holds_for"].get("algorithms") == ("deterministic" if deterministic else None)


@pytest.mark.long
def test_data_that_depends_on_its_past_is_caught() -> None:
    told = message(broken.Line, broken.remembering_data)
    has(
        told,
        "exact           two fresh processes",
        "differs         resumed = never interrupted",
        "step 4 (epoch 1, batch 4) was trained on other data: the array 'x' differs",
        "why: the data depends on something that is not part of the checkpoint",
        "look at: train: remembered.seen was list of 4: [0, 1, 2, 3] at step 3 of the straight "
        "run, and list of 1: [0] when the resumed run started",
    )


@pytest.mark.long
def test_data_that_differs_in_each_process_is_caught() -> None:
    told = message(broken.Line, broken.momentary_data)
    has(
        told,
        "differs         two fresh processes",
        "step 1 (epoch 1, batch 1) was trained on other data: the array 'x' and the array 'y' "
        "differ",
        "why: the data depends on something that no seed controls: the time, a generator without",
        "look at: train: drawn.rng was a NumPy Generator in state",
        "look at: train: drawn calls time",
        "not checked     resumed = never interrupted: uninterrupted runs already differ",
    )


@pytest.mark.long
def test_a_python_value_that_a_hook_changes_is_exact() -> None:
    done = certified("Growing", "--steps", "3")
    assert done.exit_code == 0, done.output
    has(done.stdout, "exact           resumed = never interrupted")


@pytest.mark.long
def test_a_step_that_reads_what_a_hook_counts_for_itself_is_caught() -> None:
    done = certified("Hooked", "--steps", "3")
    assert done.exit_code == 1, done.output
    has(
        done.stdout,
        "Hooked: 3 steps, a checkpoint (epoch 1, after 3 of its batches), 3 more in another",
        "differs         resumed = never interrupted",
        "step 5: loss is ",
        "after step 6, weight is ",
        "why: the batches are equal, and the step depends on something that is not part of the "
        "checkpoint: a hook's attribute",
        "look at: hooks: grow.factor was list of 1: [1.5] at step 3 of the straight run, and list",
        "exact           many steps in one call = single steps",
        "not exact: see above",
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("make_task", "make_source", "told"),
    [
        (
            broken.Line,
            broken.spent_data,
            [
                "refused         two fresh processes: the run did not finish",
                "the first process failed with DataError: a generator gives its batches once: 4 "
                "of them are spent",
            ],
        ),
        (
            broken.Counting,
            broken.fixed,
            [
                "Counting: no checkpoint was reached",
                "the first process failed with StepError: train_step changes Python values (calls "
                "changed",
            ],
        ),
    ],
    ids=["a generator that cannot begin again", "a step that counts in Python"],
)
def test_an_error_of_training_is_reported(
    make_task: Any, make_source: Any, told: list[str]
) -> None:
    has(message(make_task, make_source), *told)


@pytest.mark.long
def test_initial_values_that_differ_in_each_process_are_caught() -> None:
    has(
        message(broken.Unseeded, broken.fixed),
        "differs         two fresh processes",
        "before the first step, weight is ",
        "why: the initial values depend on something that no seed controls: the time, or a "
        "generator without a seed",
        "look at: task: Unseeded.__init__ calls default_rng",
    )


@pytest.mark.long
def test_records_of_what_a_hook_counts_are_caught() -> None:
    told = message(broken.Noisy, broken.fixed)
    has(
        told,
        "exact           two fresh processes",
        "differs         resumed = never interrupted",
        "the log record of step 4: said is 4.0 in the straight run, but 1.0 in the resumed run",
        "why: training is equal, but the records differ: validation, or what a hook logs, ",
        "look at: hooks: say.said was list of 3: [1, 1, 1] at step 3 of the straight run, and list "
        "of 0: [] when the resumed run started",
    )
    assert "step 4: loss" not in told
