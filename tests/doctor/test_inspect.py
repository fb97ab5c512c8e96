"""The sheet: its facts are true, nothing is changed, and mistakes that are certain are found."""

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from executions import long_to_compile
from keras import ops

import treadle
from tests.doctor import doctor_further_programs  # noqa: F401  # it adds to PAIRS
from tests.doctor.differences import FOREIGN, named, sheet_of
from tests.doctor.doctor_programs import (
    BATCH,
    PAIRS,
    Program,
    Regression,
    classes,
    network,
    numbers,
    source,
)
from tests.doctor.doctor_sound import SOUND
from treadle import Datasets
from treadle.core.randomness import random_states
from treadle.doctor.sheets.differences import differences
from treadle.doctor.sheets.lines import HOW, NUMBER, UNNAMED, WIRING, Line
from treadle.doctor.sheets.sheet import SCHEMA
from treadle.errors import ConfigurationError, DataError
from treadle.steps import probes, transforms
from treadle.steps.state import State

ROOT = Path(__file__).parents[2]
SHEETS = ROOT / "src" / "treadle" / "doctor" / "sheets"
DOC = ROOT / "docs" / "doctor.md"

WARNINGS = (
    "ignore:.*received `from_logits=True`",  # Keras on TensorFlow
    "ignore:[\\s\\S]*softmax over axis",  # Keras, of one class
    "ignore:.*using a softmax over axis -1",  # Keras
)
LONG = pytest.mark.long
pytestmark = [pytest.mark.filterwarnings(text) for text in WARNINGS]

# The codes of what is certain, and the programs that must have one of them, by their names.
CODES = set(re.findall(r'"([A-Z]-[a-z-]+)"', "".join(x.read_text() for x in SHEETS.glob("*.py"))))
BY_NAME = {program.__name__: program for _, program in PAIRS}
MISTAKES = [(code, program) for code, program in PAIRS if code in CODES]
FIRSTS = {code: program for code, program in reversed(MISTAKES)}
# Programs whose sheets need few steps, and what their mistakes are in.
CHEAP = {
    "sum_over_rows": ["loss"],
    "half_of_the_variables": ["model/layers/1"],
    "attention_without_a_causal_mask": ["model/layers/2"],
}


def inspected(task: Any, data: Any) -> Any:
    """Return the sheet of a task, after checking that everything was measured without an error."""
    return complete(treadle.doctor.inspect(task, data))


def complete(sheet: Any) -> Any:
    """Return a sheet, after checking that everything was measured without an error."""
    assert [x for x in sheet.not_measured if x.endswith("facts") or x.startswith("mistakes")] == []
    return sheet


shared = cache(sheet_of)
"""The sheet of one form of a pair, which several tests read."""


def name_of(program: Any) -> str:
    """Return the name of a program, also of one with its argument."""
    return getattr(program, "func", program).__name__


def codes(sheet: Any) -> list[str]:
    return [finding.code for finding in sheet.findings]


def value(sheet: Any, subject: str, fact: str) -> Any:
    (found,) = [line.value for line in sheet.of(subject) if line.name == fact]
    return found


@pytest.mark.parametrize(
    ("code", "program"),
    [
        pytest.param(code, p, id=f"{code}:{p.__name__}", marks=long_to_compile if first else LONG)
        for code, p in MISTAKES
        for first in [p is FIRSTS[code]]
    ],
)
def test_a_certain_mistake_is_found(code: str, program: Program) -> None:
    assert code in codes(complete(shared(program, True)))


class Intended(Regression):
    """Sound programs that resemble a certain mistake; `kind` names one."""

    def __init__(self, kind: str) -> None:
        super().__init__(network(3 if kind in ("scores", "divergence") else 1))
        self.kind = kind

    def loss_of(self, y: Any, outputs: Any) -> Any:
        if self.kind == "scores":  # a cross-entropy divides by the sum of what it gets
            classes = ops.cast(y[:, 0] > 0, "int32")
            return keras.losses.SparseCategoricalCrossentropy()(classes, ops.exp(outputs))
        if self.kind == "divergence":  # in the other direction
            labels = ops.softmax(ops.concatenate([y, -y, 0 * y], -1))
            return keras.losses.KLDivergence()(ops.softmax(outputs), labels)
        if self.kind == "signs":  # -1 and 1 as weights of a policy's gradient
            return keras.losses.BinaryCrossentropy(from_logits=True)(ops.sign(y), outputs)
        if self.kind == "means":  # of the whole batch
            return (ops.mean(outputs) - ops.mean(y)) ** 2
        return super().loss_of(y, outputs)

    def update(self, gradients: Any) -> None:
        if self.kind == "normalized":  # so that a common factor has no effect
            clipped = transforms.clip_by_norm(gradients, 0.1)
            norm = ops.sqrt(sum(ops.sum(x * x) for x in clipped))
            gradients = [x / norm for x in clipped]
        super().update(gradients)


@pytest.mark.parametrize("kind", ["scores", "divergence", "signs", "means", "normalized"])
def test_an_unusual_step_that_may_be_intended_is_not_accused(kind: str) -> None:
    assert codes(inspected(Intended(kind), source(*numbers()))) == []


TWINS = [program for _, program in MISTAKES] + [program for program, _ in FOREIGN]
SOUND_FORMS = [*SOUND, *(partial(program, False) for program in TWINS)]


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(p, id=name_of(p), marks=() if number % 40 == 0 else LONG)
        for number, p in enumerate(SOUND_FORMS)
    ],
)
def test_a_sound_program_has_no_certain_mistake(program: Any) -> None:
    sheet = inspected(*program())
    assert codes(sheet) == [], str(sheet)


@pytest.mark.parametrize("name", CHEAP)
def test_a_difference_names_the_culprit(name: str) -> None:
    found = shared(BY_NAME[name], False).diff(shared(BY_NAME[name], True))
    assert named(found, CHEAP[name]), found


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_first_three_lines_of_differences_name_four_of_five_culprits() -> None:
    missed: list[str] = []
    for program, culprits in FOREIGN[::3]:  # all: python -m tests.doctor.differences
        found = sheet_of(program, False).diff(sheet_of(program, True))
        assert len(found) <= 8
        if not named(found, culprits):
            missed.append(program.__name__)
    assert len(missed) <= len(FOREIGN[::3]) // 5, missed


def test_what_is_connected_and_unusual_comes_first_in_a_difference() -> None:
    def lines(value: int) -> list[Line]:
        return [
            Line("metrics", "number", "mean", value, "recorded", weight=NUMBER),
            Line("layers", "setting", "rate", value, "object"),
            Line("layers", "marked", "rate", value, "object", mark="odd" * value),
            Line("variables", "wiring", "updated by", str(value), "recorded", weight=WIRING),
        ]

    found = differences(lines(0), lines(1))
    assert [x.subject for x in found] == ["wiring", "marked", "setting", "number"]


def test_equal_tasks_have_no_difference() -> None:
    program = BY_NAME["sum_over_rows"]
    assert sheet_of(program, False).diff(sheet_of(program, False)) == []


def dropping() -> Any:
    """Return a task that draws random numbers, and its data."""
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
    data = Datasets(source(*numbers()), source(*numbers(seed=1)))
    return treadle.Supervised(model, "mse", keras.optimizers.Adam(0.01), ["mae"]), data


def test_the_facts_of_a_small_task() -> None:
    sheet = inspected(*dropping())
    assert value(sheet, "batch[0]", "influences") == [
        *("predictions", "loss", "gradients", "returned values")
    ]
    assert value(sheet, "batch[0]", "a row changes predictions of")[0] != "its own row"
    assert value(sheet, "batch[1]", "a row counts in the loss of") == ["its own row"]
    assert value(sheet, "loss", "reduced over rows:") == "mean"
    assert value(sheet, "loss", "gradient is") == "the slope of the whole loss"
    assert value(sheet, "loss", "as outputs of model move to batch[1], it") == "falls"
    assert value(sheet, "loss", "returned as") == ["loss"]
    assert value(sheet, "model/layers/1", "mixes rows") is True
    assert value(sheet, "model/layers/1", "in evaluation") == ["off"]
    assert value(sheet, "model/layers/2", "in training") == ["on"]
    assert value(sheet, "model/layers/2", "in evaluation") == ["off"]
    assert value(sheet, "model/layers/3", "updated by") == ["optimizer"]
    assert value(sheet, "optimizer", "applies") == "the gradient"
    assert value(sheet, "optimizer", "rate") == pytest.approx(0.01)
    assert value(sheet, "eval_step", "changes") == []
    assert value(sheet, "mae", "updated by") == ["training", "evaluation"]
    # A bias before a BatchNormalization cancels: its gradient is rounding.
    assert value(sheet, "model/layers/0", "trainable") == "all"


def test_the_text_marks_what_is_unusual_and_says_how_it_was_measured() -> None:
    class Unweighted(Regression):
        """Does not use the third array."""

        def objective(self, batch: Any) -> Any:
            return ops.mean((self.model(batch[0]) - batch[1]) ** 2)

    x, y = numbers()
    sheet = inspected(Unweighted(), source(x, y, np.abs(y)))
    line, again = [text for text in str(sheet).splitlines() if " batch[2]: " in text]
    assert again == "unusual batch[2]: influences nothing  (without influence)"
    assert line.startswith("!   batch[2]: 32×1 float32; from ")
    assert line.endswith("influences nothing  (without influence)")
    assert HOW["values"] not in str(sheet) and HOW["row"] in sheet.text(how=True)
    assert len(str(sheet).splitlines()) < 40
    assert len(sheet.text(whole=True)) > len(str(sheet))
    last = str(sheet).splitlines()[-1]
    assert re.fullmatch(
        r"Unweighted on \w+: 0 certain mistakes, 1 unusual fact \(\d+ steps, [\d.]+ s\)", last
    )


def test_a_large_model_is_cut_off() -> None:
    body = [keras.layers.Dense(4) for _ in range(14)]
    model = keras.Sequential([keras.Input((6,)), *body, keras.layers.Dense(1)])
    sheet = inspected(Regression(model), source(*numbers()))
    assert "    … 3 more, as model/layers/12" in str(sheet)
    assert "more, as" not in sheet.text(whole=True)


def test_without_validation_data_a_training_batch_is_evaluated() -> None:
    class Scaled(Regression):
        def eval_step(self, batch: Any) -> Any:
            x, y = batch
            return {"loss": self.loss_of(y, self.model(10.0 * x))}

    class Other(Regression):
        def eval_step(self, batch: Any) -> Any:
            return {"loss": batch["noise"]}

    data = source(*numbers())
    assert "eval_step: evaluated on a batch of the training data" in str(inspected(Scaled(), data))
    sheet = inspected(Other(), data)
    assert "eval_step: not measured" in str(sheet)
    assert sheet.not_measured["evaluation"].startswith("without validation data, TypeError: ")


def test_the_sheet_is_json() -> None:
    task, data = BY_NAME["accuracy_of_outputs"](True)
    facts = json.loads(treadle.doctor.inspect(task, data).to_json())
    assert (facts["schema"], facts["task"]) == (SCHEMA, "Supervised")
    assert [finding["code"] for finding in facts["findings"]] == ["M-labels"]
    keys = {"group", "subject", "fact", "about", "value", "text", "how", "mark", "weight"}
    assert all(set(line) == keys for line in facts["lines"])
    assert {line["how"] for line in facts["lines"]} <= set(HOW.values())


def test_names_of_facts_are_fixed_and_hold_no_path() -> None:
    sheets = [sheet_of(BY_NAME[name], False).facts() for name in CHEAP]
    for line in [line for sheet in sheets for line in sheet["lines"]]:
        assert line["fact"] and not re.search(r"model|batch\[|/", line["fact"]), line
        assert line["fact"].count("{}") == len(line["about"])
        if line["fact"] not in UNNAMED:
            assert line["text"].startswith(line["fact"].format(*line["about"]))
    (line,) = [x for x in sheets[0]["lines"] if x["fact"] == "as outputs of {} move to {}, it"]
    assert (line["about"], line["value"]) == (["model", "batch[1]"], "falls")
    assert line["text"] == "as outputs of model move to batch[1], it falls"


@pytest.mark.parametrize("kind", ["mean", "sum", "two terms", "weighted"])
def test_an_uninformed_guess_is_shown_for_a_mean_of_one_loss(kind: str) -> None:
    class Classes(Regression):
        def objective(self, batch: Any) -> Any:
            x, y = batch
            reduction = "sum" if kind == "sum" else "sum_over_batch_size"
            entropy = keras.losses.SparseCategoricalCrossentropy(True, reduction=reduction)
            weights = ops.cast(y == 0, "float32") if kind == "weighted" else None
            loss = entropy(y, self.model(x), weights)
            return loss + ops.mean(self.model(x) ** 2) if kind == "two terms" else loss

    x, y = classes()
    facts = [line.name for line in inspected(Classes(network(3)), source(x, y)).of("loss")]
    assert ("an uninformed guess has" in facts) is (kind == "mean")


class Scaled(keras.layers.Layer):
    """A layer of the user whose name resembles those of layers with a mode."""

    def call(self, x: Any, training: bool = False) -> Any:
        return 2 * x


class Jitter(keras.layers.Layer):
    """A layer of the user that has a mode, with a name that does not say it."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + 0.5 if training else x


def test_a_mode_is_measured_and_not_read_from_a_name() -> None:
    named = type("RandomNoiseDropout", (Scaled,), {})
    body = [keras.layers.Dense(4), named(), Jitter(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((6,)), *body, keras.layers.Dense(1)])
    data = Datasets(source(*numbers()), source(*numbers(seed=1)))
    sheet = inspected(treadle.Supervised(model, "mse", keras.optimizers.Adam(0.01)), data)
    phases = ("in training", "in evaluation")
    assert [x.value for x in sheet.of("model/layers/1") if x.fact in phases] == []
    for path in ("model/layers/2", "model/layers/3"):
        modes = [x.value for x in sheet.of(path) if x.fact in phases]
        assert modes == [["on"], ["off"]]


class Clipped(keras.layers.Layer):
    """Clips what it returns, except in training."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x if training else ops.clip(x, -1.0, 1.0)


class Slope(treadle.Task):
    """Returns the norm of the gradient in the evaluation, too, and assigns a weight itself."""

    def __init__(self) -> None:
        self.model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), Clipped()])
        self.scale = keras.layers.Dense(1)
        self.optimizer = keras.optimizers.SGD(0.01)

    def gradients(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            return ops.sum((self.scale(self.model(x)) - y) ** 2)

        return treadle.gradients(objective, self.model)

    def train_step(self, batch: Any) -> Any:
        loss, grads = self.gradients(batch)
        self.optimizer.apply(grads, self.model.trainable_variables)
        for variable in self.scale.trainable_variables:
            variable.assign(variable * 0.9 + 0.01)
        return {"loss": loss}

    def eval_step(self, batch: Any) -> Any:
        loss, grads = self.gradients(batch)
        return {"loss": loss, "norm": sum(ops.sum(g * g) for g in grads)}


@pytest.mark.parametrize("rows", [1, 8])
def test_an_evaluation_that_differentiates_a_batch_of_another_size(rows: int) -> None:
    train = treadle.data.from_arrays(*numbers(64, 4), batch_size=16)
    validation = treadle.data.from_arrays(*numbers(64, 4, seed=1), batch_size=rows)
    sheet = treadle.doctor.inspect(Slope(), Datasets(train, validation))
    assert sheet.not_measured == {} and sheet.findings == []
    [random] = [x for x in sheet.of("eval_step") if x.fact == "random numbers change its results"]
    assert random.value is False
    # A layer that acts in the evaluation only may be meant to, and who assigns a weight updates it.
    assert [line for line in sheet.lines if line.mark] == []


class OfTheFirst(Regression):
    """Trains the first layer alone."""

    def variables(self) -> Any:
        return self.model.layers[0].trainable_variables


def test_moving_statistics_update_no_weight() -> None:
    layers = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    task = OfTheFirst(keras.Sequential([keras.Input((6,)), *layers]))
    sheet = treadle.doctor.inspect(task, source(*numbers()))
    [mark] = [x.mark for x in sheet.of("model/layers/1") if x.fact == "updated by"]
    assert mark == "trainable, and nothing updates it"


def test_every_code_is_found_in_a_program_and_described() -> None:
    assert set(FIRSTS) == CODES
    assert set(re.findall(r"`([A-Z]-[a-z-]+)`", DOC.read_text())) == CODES


def patched() -> list[Any]:
    """Return the functions that are replaced while a step runs."""
    return [
        keras.losses.Loss.__call__,
        keras.layers.Layer.__call__,
        keras.layers.Layer.add_loss,
        keras.random.normal,
        keras.ops.binary_crossentropy,
        transforms.clip_by_norm,
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_changed(fails: bool) -> None:
    task, data = dropping()
    treadle.Loop(task, console=False).fit(data.train, steps=2)
    before, drawn, functions = State.discover(task).arrays(), random_states(), patched()
    if fails:

        def eval_step(batch: Any) -> Any:
            raise ValueError("the evaluation fails")

        task.eval_step = eval_step
        with pytest.raises(ValueError, match="the evaluation fails"):
            treadle.doctor.inspect(task, data)
    else:
        assert codes(treadle.doctor.inspect(task, data)) == []
    after = State.discover(task).arrays()
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[path], after[path]) for path in before)
    assert np.array_equal(drawn["numpy"]["state"]["key"], random_states()["numpy"]["state"]["key"])
    assert "apply" not in vars(task.optimizer)
    assert patched() == functions
    assert not hasattr(keras.layers.Layer.add_loss, "__wrapped__")


def test_a_run_after_an_inspection_equals_one_without() -> None:
    losses: list[Any] = []
    for is_inspected in (False, True):
        keras.utils.set_random_seed(3)
        task, data = dropping()
        if is_inspected:
            treadle.doctor.inspect(task, data)
        history = treadle.Loop(task, console=False).fit(data.train, steps=6)
        losses.append(history.steps("loss"))
    assert np.array_equal(*losses)


class Optional(Regression):
    """A regression on batches that may hold None and scalars."""

    def objective(self, batch: Any) -> Any:
        loss = ops.mean((self.model(batch["x"]) - batch["y"]) ** 2)
        return loss * batch["scale"]


@pytest.mark.parametrize("kind", ["function", "generator", "list", "two batches"])
def test_sources_and_batches_of_other_kinds_are_inspected(kind: str) -> None:
    x, y = numbers()

    def batches() -> Any:
        for i in range(0, 2 * BATCH if kind == "two batches" else len(x), BATCH):
            part = slice(i, i + BATCH)
            yield {"x": x[part], "y": y[part], "no": None, "scale": np.float32(0.5)}

    made = {"function": batches, "generator": batches(), "list": list(batches())}
    sheet = inspected(Optional(), made.get(kind, list(batches())))
    assert codes(sheet) == [], str(sheet)
    assert value(sheet, "batch['scale']", "influences")[0] == "loss"


def test_mistakes_are_silenced_by_code() -> None:
    task, data = BY_NAME["a_mask_with_a_constant_seed"](True)
    task.doctor_ignore = ["R-constant-seed"]
    sheet = treadle.doctor.inspect(task, data)
    assert codes(sheet) == []
    assert [finding.code for finding in sheet.silenced] == ["R-constant-seed"]
    assert "silenced by doctor_ignore: R-constant-seed" in str(sheet)


def test_codes_to_silence_are_a_list() -> None:
    task, data = dropping()
    task.doctor_ignore = "R-constant-seed"
    with pytest.raises(ConfigurationError, match="must be a list of codes such as"):
        treadle.doctor.inspect(task, data)


@long_to_compile
def test_a_finding_names_path_numbers_line_and_fix() -> None:
    (finding,) = shared(BY_NAME["gradients_with_the_wrong_sign"], True).findings
    assert finding.where == "model/layers/0/kernel"
    assert finding.line.startswith("doctor_programs.py:")
    assert "opposite sign" in finding.seen
    text = "\n".join(finding.lines())
    assert finding.fix in text and finding.why in text


def test_a_notebook_shows_mistakes_with_their_fix_above_a_row_for_each_subject() -> None:
    sheet = shared(BY_NAME["flat_labels_against_a_column"], True)
    shown = sheet._repr_html_()
    assert shown.index("fix:  give both the same shape") < shown.index("<table>")
    subjects = {(line.group, line.subject) for line in sheet.lines if line.shown or line.mark}
    assert shown.count("<tr>") == 1 + len(subjects)


def test_what_a_step_refuses_is_listed() -> None:
    class Strict(Regression):
        """Refuses batches of other numbers of rows."""

        def objective(self, batch: Any) -> Any:
            if len(batch[0]) != BATCH:
                raise ValueError(f"{len(batch[0])} rows")
            return super().objective(batch)

    sheet = inspected(Strict(), source(*numbers()))
    reason = sheet.not_measured["reduction over rows"]
    assert reason == f"the changed step ends with ValueError: {2 * BATCH} rows"
    assert f"not measured: reduction over rows: {reason}" in str(sheet)


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

    sheet = inspected(Named(), source(*numbers()))
    assert value(sheet, "what", "updated by") == ["optimizer"]


def test_values_that_are_missing_on_purpose_are_not_blamed_for_an_overflow() -> None:
    class Masked(Regression):
        def loss_of(self, y: Any, outputs: Any) -> Any:
            missing = ops.isnan(y)
            return ops.mean(ops.where(missing, 0.0, outputs - ops.where(missing, 0.0, y)) ** 2)

    x, y = numbers()
    y[::3] = np.nan
    task = Masked(optimizer=keras.optimizers.SGD(1e25))
    (found,) = treadle.doctor.inspect(task, source(x, y, shuffle=False)).findings
    assert (found.code, found.where) == ("G-not-finite", "loss")
    assert found.seen.startswith("in step 2 the loss is not finite")


def test_a_source_without_batches_is_refused() -> None:
    with pytest.raises(DataError, match="gave no batch in epoch 1"):
        treadle.doctor.inspect(Regression(), [])


def test_a_call_below_a_command_has_no_line_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    assert probes.user_line().startswith("test_inspect.py:")
    monkeypatch.setattr(probes, "COMMANDS", __file__)
    assert probes.user_line() == ""
