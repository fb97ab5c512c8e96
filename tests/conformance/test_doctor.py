"""Examinations: each wrong program has its finding, and its sound twin has none."""

import json
import re
from pathlib import Path
from typing import Any

import doctor_advanced_programs  # noqa: F401  # adds to PAIRS
import doctor_further_programs  # noqa: F401  # adds to PAIRS
import doctor_label_programs  # noqa: F401  # adds to PAIRS and SOUND
import doctor_other_programs  # noqa: F401  # adds to PAIRS
import doctor_supervised_programs  # noqa: F401  # adds to PAIRS
import doctor_term_programs  # noqa: F401  # adds to PAIRS
import keras
import numpy as np
import pytest
from doctor_programs import BATCH, PAIRS, Pair, Regression, numbers, source
from doctor_sound import SOUND
from keras import ops

import treadle
from treadle import Datasets
from treadle.core.randomness import random_states
from treadle.doctor.preflight import checks_gradients, checks_optimizers
from treadle.errors import ConfigurationError, DataError
from treadle.steps import transforms
from treadle.steps.state import State

ROOT = Path(__file__).parents[2]
PREFLIGHT = ROOT / "src" / "treadle" / "doctor" / "preflight"
DOC = ROOT / "docs" / "doctor.md"

# `scripts/test --all --every-backend` runs them on each: on JAX each takes two seconds or more.
FURTHER = [pytest.mark.long, pytest.mark.any_backend]


@pytest.fixture(autouse=True)
def no_source_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor reads less of a slow source, which any is on a busy machine."""
    for name in ("trials.ENOUGH", "checks_sources.SLOW"):
        monkeypatch.setattr(f"treadle.doctor.preflight.{name}", float("inf"))


def marked(pairs: list[Pair]) -> list[Any]:
    """Return the programs as parameters: the first of each code is for every backend."""
    first = {pair.code: pair for pair in reversed(pairs)}
    return [
        pytest.param(
            pair,
            id=pair.name,
            marks=[pytest.mark.long_to_compile] if first[pair.code] is pair else FURTHER,
        )
        for pair in pairs
    ]


def examined(task: Any, data: Any) -> Any:
    """Return the report on a task, after checking that no check failed with an exception."""
    report = treadle.doctor.examine(task, data)
    assert [text for text in report.skipped.values() if "could not run" in text] == []
    return report


@pytest.mark.filterwarnings("ignore:.*received `from_logits=True`")  # Keras on TensorFlow
@pytest.mark.filterwarnings("ignore:[\\s\\S]*softmax over axis")  # Keras, of one class
@pytest.mark.filterwarnings("ignore:.*using a softmax over axis -1")  # Keras
@pytest.mark.parametrize("pair", marked(PAIRS))
def test_the_mistake_is_found_and_its_twin_is_silent(pair: Pair) -> None:
    task, data = pair.program(True)
    wrong = examined(task, data)
    assert pair.code in wrong.codes(), str(wrong)
    task, data = pair.program(False)
    sound = examined(task, data)
    assert sound.codes() == [], str(sound)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(p, id=p.__name__, marks=() if number == 0 else FURTHER)
        for number, p in enumerate(SOUND)
    ],
)
def test_a_sound_program_has_neither_errors_nor_warnings(program: Any) -> None:
    task, data = program()
    report = examined(task, data)
    assert [finding for finding in report.findings if finding.severity != "note"] == [], str(report)


def test_data_that_fail_in_a_later_pass_are_reported() -> None:
    x, y = numbers()
    passes = 0

    class Rows:
        def __iter__(self) -> Any:
            nonlocal passes
            passes += 1
            if passes > 2:
                raise RuntimeError("the file is closed")
            yield from [(x[:BATCH], y[:BATCH])] * 4

    (found,) = treadle.doctor.examine(Regression(), Rows()).findings
    assert (found.code, found.severity) == ("D-hidden-state", "warning")
    assert found.seen.endswith("with equal seeds, it ends: RuntimeError: the file is closed")


def patched() -> list[Any]:
    """Return the functions that an examination replaces while a step runs."""
    return [
        keras.losses.Loss.__call__,
        keras.layers.Layer.__call__,
        keras.layers.Layer.add_loss,
        keras.random.normal,
        keras.ops.binary_crossentropy,
        transforms.clip_by_norm,
    ]


def test_a_step_that_fails_leaves_nothing_changed() -> None:
    task, data = dropping()
    treadle.Loop(task, console=False).fit(data.train, steps=2)
    before, functions = State.discover(task).arrays(), patched()

    def eval_step(batch: Any) -> Any:
        raise ValueError("the evaluation fails")

    task.eval_step = eval_step
    with pytest.raises(ValueError, match="the evaluation fails"):
        treadle.doctor.examine(task, data)
    after = State.discover(task).arrays()
    assert all(np.array_equal(before[path], after[path]) for path in before)
    assert "apply" not in vars(task.optimizer)
    assert patched() == functions


class Optional(Regression):
    """A regression on batches that may hold None and scalars."""

    def objective(self, batch: Any) -> Any:
        loss = ops.mean((self.model(batch["x"]) - batch["y"]) ** 2)
        return loss * batch["scale"]


@pytest.mark.parametrize("kind", ["function", "generator", "list", "two batches"])
def test_sources_and_batches_of_other_kinds_are_examined(kind: str) -> None:
    x, y = numbers()

    def batches() -> Any:
        for i in range(0, 2 * BATCH if kind == "two batches" else len(x), BATCH):
            part = slice(i, i + BATCH)
            yield {"x": x[part], "y": y[part], "no": None, "scale": np.float32(0.5)}

    made = {"function": batches, "generator": batches(), "list": list(batches())}
    report = treadle.doctor.examine(Optional(), made.get(kind, list(batches())))
    assert report.codes() == [], str(report)
    assert "L-sum, L-divided" not in report.skipped


def test_every_code_is_found_in_a_program_and_described() -> None:
    written = "".join(path.read_text() for path in PREFLIGHT.glob("*.py"))
    codes = set(re.findall(r'"([A-Z]-[a-z-]+)"', written))
    assert codes == {pair.code for pair in PAIRS}
    described = set(re.findall(r"`([A-Z]-[a-z-]+)`", DOC.read_text()))
    assert described == codes


def dropping() -> Any:
    """Return a task that draws random numbers, and its data."""
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    data = Datasets(source(*numbers()), source(*numbers(seed=1)))
    return treadle.Supervised(model, "mse", keras.optimizers.Adam(0.01), ["mae"]), data


def test_nothing_is_changed() -> None:
    task, data = dropping()
    treadle.Loop(task, console=False).fit(data.train, steps=2)
    before, drawn = State.discover(task).arrays(), random_states()
    assert treadle.doctor.examine(task, data).codes() == []
    after = State.discover(task).arrays()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[path], after[path]) for path in before)
    assert np.array_equal(drawn["numpy"]["state"]["key"], random_states()["numpy"]["state"]["key"])
    assert "apply" not in vars(task.optimizer)
    assert not hasattr(keras.layers.Layer.add_loss, "__wrapped__")


def test_a_run_after_an_examination_equals_one_without() -> None:
    losses: list[Any] = []
    for examined in (False, True):
        keras.utils.set_random_seed(3)
        task, data = dropping()
        if examined:
            treadle.doctor.examine(task, data)
        history = treadle.Loop(task, console=False).fit(data.train, steps=6)
        losses.append(history.steps("loss"))
    assert np.array_equal(*losses)


def test_findings_are_silenced_by_code() -> None:
    task, data = PAIRS[0].program(True)
    task.doctor_ignore = [PAIRS[0].code]
    report = treadle.doctor.examine(task, data)
    assert report.codes() == []
    assert [finding.code for finding in report.silenced] == [PAIRS[0].code]
    assert f"silenced by doctor_ignore: {PAIRS[0].code}" in str(report)


def test_codes_to_silence_are_a_list() -> None:
    task, data = dropping()
    task.doctor_ignore = "D-imbalance"
    with pytest.raises(ConfigurationError, match="must be a list of codes such as"):
        treadle.doctor.examine(task, data)


def test_a_finding_names_path_numbers_line_and_fix() -> None:
    task, data = next(p for p in PAIRS if p.code == "O-ascent").program(True)
    (finding,) = treadle.doctor.examine(task, data).errors
    assert finding.where == "model/layers/0/kernel"
    assert finding.line.startswith("doctor_programs.py:")
    assert "opposite sign" in finding.seen
    text = "\n".join(finding.lines())
    assert finding.fix in text and finding.why in text


def test_a_report_is_json() -> None:
    task, data = next(p for p in PAIRS if p.code == "M-labels").program(True)
    facts = json.loads(json.dumps(treadle.doctor.examine(task, data).facts()))
    assert facts["findings"][0]["code"] == "M-labels"
    assert facts["skipped"]


def test_a_check_whose_changed_batch_the_step_refuses_is_listed() -> None:
    class Strict(Regression):
        """Refuses batches of other numbers of rows."""

        def objective(self, batch: Any) -> Any:
            if len(batch[0]) != BATCH:
                raise ValueError(f"{len(batch[0])} rows")
            return super().objective(batch)

    report = treadle.doctor.examine(Strict(), source(*numbers()))
    assert report.codes() == []
    reason = report.skipped["L-sum, L-divided"]
    assert reason == f"the changed step ends with ValueError: {2 * BATCH} rows"
    assert f"not checked: L-sum, L-divided: {reason}" in str(report)


def test_an_exception_in_a_check_does_not_end_the_examination(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(*args: Any) -> Any:
        raise ZeroDivisionError("no gradients\nto divide by")

    monkeypatch.setattr(checks_optimizers, "_relative_update", half)
    x, y = numbers()
    report = treadle.doctor.examine(Regression(), source(x, y[:, 0]))
    assert report.codes() == ["L-unpaired"], str(report)  # the other checks ran
    (reason,) = [text for code, text in report.skipped.items() if "O-large-updates" in code]
    assert re.fullmatch(
        r"this check could not run: ZeroDivisionError: no gradients "
        r"\(checks_optimizers.py:\d+\)",
        reason,
    )
    assert f"not checked: O-large-updates, O-small-updates: {reason}" in str(report)


def test_an_exception_of_the_step_is_not_taken_for_one_of_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fails: list[str] = []

    class Failing(Regression):
        def update(self, gradients: Any) -> None:
            if fails:
                raise ValueError(fails[0])
            super().update(gradients)

    def again(trials: Any) -> Any:
        fails.append("the user's own error")
        try:
            trials.again()
        finally:
            fails.clear()

    monkeypatch.setattr(checks_gradients, "_underflow", again)
    report = treadle.doctor.examine(Failing(), source(*numbers()))
    assert report.codes() == []
    reasons = list(report.skipped.values())
    assert "the changed step ends with ValueError: the user's own error" in reasons


def test_variables_may_have_any_name() -> None:
    class Named(treadle.Task):
        """Its variables are named as arguments of the recorder."""

        def __init__(self) -> None:
            self.info, self.what = keras.Variable(1.0), keras.Variable(0.5)
            self.optimizer = keras.optimizers.SGD(0.01)

        def train_step(self, batch: Any) -> Any:
            x, y = batch

            def objective() -> Any:
                return ops.mean((self.info * x[:, :1] + self.what - y) ** 2)

            return {"loss": treadle.minimize(objective, [self.info, self.what], self.optimizer)}

    assert treadle.doctor.examine(Named(), source(*numbers())).codes() == []


def test_values_that_are_missing_on_purpose_are_not_blamed_for_an_overflow() -> None:
    class Masked(Regression):
        def loss_of(self, y: Any, outputs: Any) -> Any:
            missing = ops.isnan(y)
            return ops.mean(ops.where(missing, 0.0, outputs - ops.where(missing, 0.0, y)) ** 2)

    x, y = numbers()
    y[::3] = np.nan
    task = Masked(optimizer=keras.optimizers.SGD(1e25))
    report = treadle.doctor.examine(task, source(x, y, shuffle=False))
    (found,) = report.findings
    assert (found.code, found.where) == ("G-not-finite", "loss")
    assert found.seen.startswith("in step 2 the loss is not finite")
    assert report.skipped["all others"] == "they need finite numbers"


def test_a_source_without_batches_is_refused() -> None:
    with pytest.raises(DataError, match="gave no batch in epoch 1"):
        treadle.doctor.examine(Regression(), [])
