"""What certificates are made of: digests, attributes, differences, causes; and what is refused."""

import functools
import itertools
import os
import random
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner

import treadle
from treadle.cli import app
from treadle.errors import ConfigurationError, DataError
from treadle.testing import resumed_equals_uninterrupted
from treadle.testing.certify.attributes import PlainValues, differing
from treadle.testing.certify.certificate import certify, judged
from treadle.testing.certify.comparing import (
    Entry,
    Mismatch,
    Written,
    cause,
    compared_lines,
    differences_between,
    suspects,
)
from treadle.testing.certify.drill import steps_until_checkpoint
from treadle.testing.certify.processes import Maker

KEPT: list[int] = [1, 2]
NAMES = "the straight run", "the resumed run"
GENERATORS = {"random/python": "1a", "random/numpy": "2b"}


def left(
    losses: Any = (0.5, 0.25),
    batches: Any = ("a", "b"),
    weight: Any = "1.0",
    records: Any = (),
    generators: Any = None,
    attributes: Any = None,
    outcome: Any = None,
) -> Written:
    """What a process writes in a run of two steps, with checkpoints of steps 0 and 2."""

    def saved(step: int, kind: str, title: str, value: Any) -> list[Entry]:
        return [
            Entry(kind, step, title, {"kernel": value}),
            Entry("random", step, title, generators or GENERATORS),
            Entry("attribute", step, "", attributes or {}),
            Entry("call", step, "", {}),
            Entry("saved", step, f"batch {step}", {"backend": "jax", "plan": "windows"}),
        ]

    lines = saved(0, "start", "before the first step", "0.0")
    for step, (loss, batch) in enumerate(zip(losses, batches, strict=False), 1):
        place = f"step {step} (epoch 1, batch {step})"
        lines.append(Entry("batch", step, place, {"the batch": batch}))
        lines.append(Entry("value", step, f"step {step}", {"loss": loss}))
    lines += [*records, *saved(2, "variable", "after step 2", weight)]
    return Written(lines, outcome or {"made": True, "reason": "bored"})


def record(step: int, kind: str = "epoch", **values: Any) -> Entry:
    return Entry("record", step, f"the {kind} record of step {step}", values)


def between(a: Written, b: Written) -> list[Mismatch]:
    return differences_between(a.lines, b.lines, NAMES)


@pytest.mark.parametrize(
    ("other", "kind", "step", "text"),
    [
        (
            {"losses": (0.5, 0.75)},
            "value",
            2,
            "step 2: loss is 0.25 in the straight run, but 0.75 in the resumed run",
        ),
        (
            {"batches": ("a", "c")},
            "batch",
            2,
            "step 2 (epoch 1, batch 2) was trained on other data: the batch differs",
        ),
        (
            {"weight": "2.0"},
            "variable",
            2,
            "after step 2, kernel is 1.0 in the straight run, but 2.0 in the resumed run",
        ),
        (
            {"records": [record(1, loss=0.5)]},
            "record",
            1,
            "the epoch record of step 1: loss is 0.25 in the straight run, but 0.5 in the resumed",
        ),
        (
            {"records": [record(1, loss=0.25), record(2, "log", note="x")]},
            "record",
            2,
            "only the resumed run has the log record of step 2",
        ),
        (
            {"records": [record(1, loss=0.25, accuracy=1)]},
            "record",
            1,
            "the epoch record of step 1: only the resumed run has accuracy",
        ),
        (
            {"generators": GENERATORS | {"random/numpy": "3c"}},
            "random",
            0,
            "before the first step, generators have other states: random/numpy differs",
        ),
    ],
)
def test_the_first_difference_is_named(other: Any, kind: str, step: int, text: str) -> None:
    a, b = left(records=[record(1, loss=0.25)]), {"records": [record(1, loss=0.25)]}
    assert between(a, left(**b)) == []
    found = between(a, left(**{**b, **other}))
    assert [(d.kind, d.step) for d in found] == [(kind, step)]
    assert found[0].text.startswith(text)


def test_a_step_that_is_missing_is_named() -> None:
    found = between(left(), left(losses=(0.5,)))
    assert [(d.kind, d.text) for d in found] == [
        ("batch", "only the straight run has step 2 (epoch 1, batch 2)"),
        ("value", "only the straight run has step 2"),
    ]


def test_not_a_number_equals_itself_and_zeros_have_signs() -> None:
    nan = float("nan")
    assert between(left((nan, 1)), left((nan, 1))) == []
    (found,) = between(left((0.0, 1)), left((-0.0, 1)))
    assert found.text == "step 1: loss is 0.0 in the straight run, but -0.0 in the resumed run"


def test_values_that_were_not_restored_are_reported() -> None:
    start = Entry("start", 2, "", {"kernel": "1.0", **GENERATORS, "random/python": "9f"})
    found = differences_between(*compared_lines(left(), Written([start]), 2, 2), NAMES)
    assert [finding.text for finding in found] == [
        "the resumed run started in another state than that after step 2: random/python differs"
    ]
    assert "a bug in Treadle" in cause(found, 2, None, {}, {})


def test_an_unchecked_property_is_not_exact() -> None:
    found = judged("mine", left(), left(), Written())
    assert not found.exact
    assert found.lines() == [
        "mine: 2 steps, a checkpoint (batch 2), 2 more in another process",
        "not checked     two fresh processes: the run stopped after 2 steps "
        "(bored): use fewer --steps",
        "not checked     resumed = never interrupted: uninterrupted runs already differ",
        "holds for: backend jax; plan windows",
        "not verified: see above",
    ]
    assert found.facts()["exact"] is False


@pytest.mark.parametrize(
    ("failed", "when"), [(0, "the first process failed"), (1, "another process failed")]
)
def test_a_failed_process_is_reported(failed: int, when: str) -> None:
    error = {"type": "OSError", "message": "in use", "notes": ["in train_step"]}
    runs = [left(), replace(left(), outcome={})]
    runs[failed] = replace(runs[failed], outcome={"made": True, "error": error})
    found = judged("mine", runs[0], runs[1], Written()).checks[0]
    assert found.result == "refused"
    assert found.findings[0].text == f"{when} with OSError: in use; in train_step"


def went_on(straight: Written) -> Written:
    """What the process writes that resumes from the last checkpoint, and has nothing to do."""
    start = Entry("start", 2, "", {"kernel": "1.0", **GENERATORS})
    return replace(straight, lines=[start, straight.lines[-1]])


UNORDERED = (
    "this device adds sums in a varying order, so that equal runs differ in rounding. Certify with "
    "--deterministic or treadle.setup(deterministic=True), or on a CPU"
)


def test_on_a_device_that_does_not_repeat_roundings_are_not_checked() -> None:
    outcome = {"made": True, "repeats": False}
    straight, rounded = left(outcome=outcome), left(losses=(0.5, 0.25000001), weight="1.0000001")
    resumed, killed = replace(straight, lines=()), replace(rounded, outcome={})
    found = judged("mine", straight, killed, resumed)
    assert [check.result for check in found.checks] == ["not checked", "not checked"]
    assert found.checks[0].cause == UNORDERED and not found.exact
    assert found.lines()[-3:] == [
        f"note: {UNORDERED}",
        "holds for: backend jax; plan windows",
        "not verified: see above",
    ]
    data = replace(left(batches=("a", "c")), outcome={})
    assert judged("mine", straight, data, resumed).checks[0].result == "differs"
    lucky = judged("mine", straight, replace(left(), outcome={}), went_on(straight))
    assert [check.result for check in lucky.checks] == ["exact", "exact"]
    assert not lucky.exact and lucky.lines()[-1] == "not verified: see above"


def test_a_certificate_names_deterministic_algorithms() -> None:
    outcome = {"made": True, "repeats": True, "deterministic": True}
    straight = left(outcome=outcome)
    found = judged("mine", straight, replace(left(), outcome={}), went_on(straight))
    assert found.exact
    assert "holds for: backend jax; plan windows; algorithms deterministic" in found.lines()


def test_a_resumed_run_that_ends_elsewhere_differs() -> None:
    a, killed = left(), replace(left(), outcome={})
    found = judged("mine", a, killed, replace(a, lines=[a.saved[0]]))
    assert found.checks[0].result == "exact"
    assert found.checks[1].findings[0].text == (
        "one run ended after 2 steps, the resumed one after 0"
    )


ABOUT = {"backend": "jax", "plan": "windows"}


@pytest.mark.parametrize(
    ("kinds", "first", "inexact", "told"),
    [
        (["start"], 0, None, "the initial values depend on something that no seed"),
        (["batch", "value"], 0, None, "the data depends on something that no seed controls"),
        (["batch", "value"], 4, None, "the data depends on something that is not part of the"),
        (["batch"], 4, "a generator cannot seek", "the source cannot be restored exactly: a"),
        (["value"], 4, None, "the batches are equal, and the step depends on something that is"),
        (["value"], 0, None, "the batches are equal, and the step depends on something that no"),
        (["value", "batch"], 4, None, "step 6 had equal data, and the step depends on something"),
        (["record"], 4, None, "training is equal, but the records differ"),
        (["random"], 4, None, "all values are equal, but a global generator was drawn from"),
    ],
)
def test_causes(kinds: list[str], first: int, inexact: str | None, told: str) -> None:
    found = [Mismatch(kind, 6, "", "") for kind in kinds]
    assert cause(found, first, inexact, ABOUT, ABOUT).startswith(told)
    assert cause(found, first, inexact, ABOUT, {**ABOUT, "threads": 4}) == (
        "the two processes ran under different conditions: threads was None, now 4"
    )


def test_suspects_begin_with_the_likely_ones() -> None:
    a = left(attributes={"task.n": "1", "train: f.seen": "list of 1", "hooks.m": "1", "task.e": ""})
    b = left(attributes={"task.n": "2", "train: f.seen": "list of 2", "hooks.m": "1"})
    data, step = Mismatch("batch", 1, "", ""), Mismatch("value", 1, "", "")
    seen, n = "train: f.seen was list of 1 at", "task.n was 1 at"
    for found, order in ((data, (seen, n)), (step, (n, seen))):
        lines = suspects(a, b, (0, 2), [found])
        assert [line[: len(want)] for line, want in zip(lines, order, strict=True)] == list(order)
    assert suspects(a, b, (0, 2), [step])[0].endswith(
        "step 2 of the first process, and 2 in the other one"
    )


def test_attributes_are_found_where_state_hides() -> None:
    hidden = [1]
    kept = KEPT
    named = {"n": 1}

    class Own:
        shared: ClassVar = deque([3])

        def __init__(self) -> None:
            self.count = 1
            self.nested = {"a": {"b": random.Random(3)}, "array": np.zeros(2)}
            self.large = np.zeros(1 << 19)

        def method(self, default: Any = hidden) -> Any:
            return kept, KEPT, os.urandom(1), default

        def other(self, *, default: Any = named) -> Any:
            return default

    attributes = PlainValues()
    attributes.take(Own(), "task")
    attributes.take(functools.partial(lambda counter: counter, itertools.count(5)), "train")
    attributes.take((x for x in hidden), "validation")
    attributes.take(treadle.every("1 step", lambda loop: hidden), "hooks")
    found = attributes.found
    assert found["task.count"] == "1"
    assert found["task.nested['a']['b']"].startswith("a random.Random in state ")
    assert found["task.nested['array']"].startswith("float64 array of shape (2,), ")
    assert found["task.large"] == "float64 array of shape (524288,)"
    assert found["task.shared"] == "deque of 1: [3]"
    assert found["task: Own.method.kept"] == found["task: KEPT"] == "list of 2: [1, 2]"
    assert found["task: Own.method's default"] == "list of 1: [1]"
    assert found["task: Own.other's default"] == "dict of 1: {'n': 1}"
    assert found["train"] == "count(5)"
    assert found["hooks: <lambda>.hidden"] == "list of 1: [1]"
    assert attributes.calls == {"task: Own.__init__": "Random", "task: Own.method": "urandom"}
    assert differing(found, {**found, "task.count": "2"}) == [("task.count", "1", "2")]


def test_sets_are_described_in_sorted_order() -> None:
    attributes = PlainValues()
    attributes.take({"b", "a", "c"}, "task.names")
    assert attributes.found == {"task.names": "set of 3: ['a', 'b', 'c']"}


def test_the_checkpoint_lies_in_the_midst_of_an_epoch() -> None:
    for length in range(2, 200):
        middle = steps_until_checkpoint(None, length)
        assert middle % length
        assert length > 24 or middle > length
    assert steps_until_checkpoint(5, 3) == 5


def test_steps_below_one_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="steps must be at least 1, not 0"):
        certify(Maker("a:b", {}, "a task"), 0)
    with pytest.raises(ConfigurationError, match="steps must be at least 1, not 0"):
        resumed_equals_uninterrupted(make, steps=0)


def make() -> Any:
    raise AssertionError("no drill is meant to begin")


def test_functions_that_no_process_can_import_are_refused() -> None:
    def local() -> Any: ...

    told = "at the top of a file, so that another process can import it, not "
    for function in (local, lambda: None, 3):
        with pytest.raises(ConfigurationError, match=f"make_task must be .* {told}"):
            resumed_equals_uninterrupted(function)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=rf"make_source must be .*{told}.*<locals>.local"):
        resumed_equals_uninterrupted(make, local)


def dies(**_: Any) -> Any:
    print("the last words", flush=True)
    os._exit(3)


def fails(kind: str) -> Any:
    raise {"DataError": DataError, "KeyError": KeyError}[kind]("it is not there")


def maker(function: Any, **arguments: Any) -> Maker:
    return Maker(f"{Path(__file__).stem}:{function.__name__}", arguments, "mine")


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.long
@pytest.mark.usefixtures("started_at_once")
def test_a_task_that_cannot_be_made_is_no_finding(importable: None) -> None:
    died = r"(?s)the process that examined mine ended with code 3:.*the last words"
    with pytest.raises(ConfigurationError, match=died):
        certify(maker(dies))
    with pytest.raises(DataError, match="it is not there"):
        certify(maker(fails, kind="DataError"))
    with pytest.raises(ConfigurationError, match="mine cannot be made: KeyError: 'it is not there"):
        certify(maker(fails, kind="KeyError"))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["digit"], "Did you mean 'digits'?"),
        (["digits", "--set", "unit=3"], "Did you mean 'units'?"),
        (["digits", "units=3"], "unexpected argument 'units=3'"),
        (["digits", "--steps", "0"], "should be greater than or equal to 1"),
    ],
)
def test_wrong_usage_is_an_error_before_a_process_starts(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["certify", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert told in done.output
