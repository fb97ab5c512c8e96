"""Replaying a step of a past run: the same bits, bisection, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from classifier import CLASSES, FEATURES, Classifier, dense, head
from executions import long_to_compile
from keras import ops
from mistakes import arrays, source
from replayed_runs import hashes, logged, plain, train, visit

import treadle
from treadle import data
from treadle.checkpoint import Checkpoints
from treadle.checkpoint.arrays import read_arrays
from treadle.checkpoint.format import digest_line
from treadle.doctor import Replay, replay, replaying
from treadle.doctor.numbers import Numbers, farthest
from treadle.errors import CheckpointError, ConfigurationError, DirectoryError, TreadleError
from treadle.hooks import Checkpoint, JSONLines

ROUNDING = 1e-4
STEPS = 15


def noisy() -> Classifier:
    """A task whose steps draw random numbers and move statistics."""
    normalized, dropped = keras.layers.BatchNormalization(), keras.layers.Dropout(0.4)
    return Classifier([dense(8), normalized, dropped, head()], keras.optimizers.Adam(1e-2))


@pytest.fixture(scope="module")
def noisy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("noisy") / "run"
    train(noisy, directory, validation=source())
    return directory


@pytest.mark.parametrize(
    "step",  # of the epochs' five: first, midst, last
    [6, *(pytest.param(step, marks=long_to_compile) for step in (1, 3, 8, STEPS))],
)
def test_a_replayed_step_equals_the_log_bit_for_bit(noisy_run: Path, step: int) -> None:
    before = hashes(noisy_run)
    found = visit(noisy, source(), noisy_run, step)
    assert hashes(noisy_run) == before
    assert (found.step, found.epoch, found.batch_number) == (
        step,
        (step - 1) // 5 + 1,
        (step - 1) % 5 + 1,
    )
    assert found.values["loss"] == logged(noisy_run)[step]["loss"]
    assert found.agreement.exact
    assert found.agreement.compared == step - found.checkpoint
    assert "compiled: equal to the log bit for bit" in str(found)
    assert found.eager_distance < ROUNDING
    assert found.origin == (
        "all values are finite: batch, activations, returned values, gradients, updates"
    )


def test_the_task_is_left_as_it_was_after_the_step(noisy_run: Path) -> None:
    keras.utils.set_random_seed(0)
    task = noisy()
    replay(task, source(), noisy_run, STEPS)
    kept = Checkpoints(noisy_run / "checkpoints").latest()
    assert kept is not None and kept.progress.step == STEPS
    kernel = kept.state["model/layers/0/kernel"]
    assert keras.ops.convert_to_numpy(task.model.layers[0].kernel).tobytes() == kernel.tobytes()


def test_the_report_shows_the_values_that_the_step_computed(tmp_path: Path) -> None:
    train(plain, tmp_path / "run")
    found = visit(plain, source(), tmp_path / "run", 7)
    file = tmp_path / "step.safetensors"
    found.save(file)
    kept = read_arrays(file)
    x, y = arrays()
    rows = kept["rows"]
    assert found.rows == tuple(rows.tolist())
    np.testing.assert_array_equal(kept["batch/0"], x[rows])
    np.testing.assert_array_equal(kept["batch/1"], y[rows])
    kernels = [kept[f"before/model/layers/{i}/kernel"] for i in (0, 1)]
    biases = [kept[f"before/model/layers/{i}/bias"] for i in (0, 1)]
    hidden = np.tanh(x[rows] @ kernels[0] + biases[0])
    logits = hidden @ kernels[1] + biases[1]
    for name, expected in (("layers/0", hidden), ("layers/1", logits), ("", logits)):
        path = f"activations/model/{name}".rstrip("/")
        np.testing.assert_allclose(kept[path], expected, rtol=1e-4, atol=1e-5)
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    slope = hidden.T @ (chances - np.eye(CLASSES)[y[rows]]) / len(rows)
    by_path = {variable.path: variable for variable in found.variables}
    np.testing.assert_allclose(kept["gradients/model/layers/1/kernel"], slope, rtol=1e-3, atol=1e-5)
    for path in ("model/layers/0/kernel", "model/layers/1/bias"):
        gradient = by_path[path].gradient
        assert gradient is not None
        assert gradient.norm == pytest.approx(np.linalg.norm(kept[f"gradients/{path}"]))
        assert by_path[path].update.norm == pytest.approx(0.1 * gradient.norm, rel=1e-3)
    first = found.batch[0]
    assert (first.least, first.shape, first.dtype) == (x[rows].min(), (8, FEATURES), "float32")
    assert first.mean == pytest.approx(x[rows].mean())
    shown = str(found)
    for word in ("the first array", "model/layers/1", "Dense", "gradient", "rows of the data set"):
        assert word in shown
    told = json.loads(json.dumps(found.as_dict()))
    assert told["values"] == found.values
    assert told["agreement"]["exact"]
    assert [layer["class"] for layer in told["layers"]] == ["Dense", "Dense", "Sequential"]


@pytest.mark.long
def test_a_run_of_several_calls_on_several_sources(tmp_path: Path) -> None:
    x, y = arrays(seed=3)
    sources = [source(), data.from_arrays(x, y, batch_size=10)]
    train(noisy, tmp_path, sources=sources, epochs=1)  # 5 steps, and then 4
    for step in (2, 6, 8):
        found = visit(noisy, dict(enumerate(sources)), tmp_path, step)
        assert found.agreement.exact
    assert found.batch[0].shape == (10, FEATURES)
    with pytest.raises(DirectoryError, match=r"there is no source for call 1: pass a dict"):
        visit(noisy, {0: sources[0]}, tmp_path, 8)
    with pytest.raises(
        DirectoryError,
        match=r"call 1 of the loop in .* other data: train\.length was 4, now 5;.* Its 2 calls",
    ):
        visit(noisy, sources[0], tmp_path, 8)


def halve(loop: Any) -> None:
    loop.task.optimizer.learning_rate.assign(0.05)


def test_hooks_that_change_how_it_trains_run_again(tmp_path: Path) -> None:
    hooks = [treadle.at("3 steps", halve), treadle.at("1 epochs", halve)]
    run = tmp_path / "run"
    train(plain, run, hooks=hooks)
    for later in sorted((run / "checkpoints").glob("step-*"))[1:]:  # so that both hooks run again
        shutil.rmtree(later)
    elsewhere = JSONLines(run / "mine.jsonl")
    before = hashes(run)
    found = visit(plain, source(), run, 5, hooks=[*hooks, elsewhere, Checkpoint()])
    assert found.agreement.exact
    assert hashes(run) == before  # hooks that write are left out
    without = visit(plain, source(), run, 5)
    assert not without.agreement.exact
    assert without.agreement.difference.startswith("loss of step 5 is ")
    assert "NOT equal to the log: loss of step 5 is" in str(without)
    assert "pass the run's hooks as hooks=[…]" in str(without.agreement)


@pytest.mark.long
def test_steps_that_are_eager_or_measured_are_so_again(tmp_path: Path) -> None:
    eager = treadle.Options(execution="eager")
    train(plain, tmp_path / "eager", options=eager, epochs=1)
    found = visit(plain, source(), tmp_path / "eager", 4)
    assert found.agreement.exact and found.plan == "eager"
    assert found.eager_distance == 0
    assert "eagerly: the same bits" in str(found)
    measured = treadle.Options(execution="measure")
    train(plain, tmp_path / "measured", options=measured, epochs=1)
    found = visit(plain, source(), tmp_path / "measured", 4)
    recorded = json.loads((tmp_path / "measured" / "run.json").read_text())["plan"]
    assert found.plan.partition(" (")[0].split(", data")[0] in recorded
    assert found.agreement.exact


class Critic(Classifier):
    """Differentiates twice, once within the other, and calls its model twice."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch

        def objective() -> Any:
            _, (slope,) = treadle.input_gradients(lambda x: ops.sum(self.model(x)), x)
            return self.loss(y, self.model(x, training=True)) + ops.mean(slope**2)

        loss = treadle.minimize(objective, self.model, self.optimizer)
        chosen = treadle.cond(loss > 0, lambda: ops.sum(self.model(x)), lambda: loss)
        return {"loss": loss, "chosen": chosen}


def test_activations_of_gradients_within_gradients(tmp_path: Path) -> None:
    train(Critic, tmp_path, epochs=1)
    found = visit(Critic, source(), tmp_path, 3)
    assert found.agreement.exact
    paths = [layer.path for layer in found.layers]
    outer = ["model/layers/0", "model/layers/1", "model"]
    assert paths == [*outer, *(f"{path}#2" for path in outer)]  # none of the branch
    both = [found.arrays[f"activations/model{which}"] for which in ("", "#2")]
    np.testing.assert_allclose(both[0], both[1], rtol=1e-5, atol=1e-6)
    assert all(v.gradient for v in found.variables if v.path.startswith("model/"))


class Native(Classifier):
    """Trains without `treadle.gradients`: by a rule that needs none."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), head()])

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        loss = self.loss(y, self.model(x))
        bias = self.model.layers[0].bias
        bias.assign(bias * 0.5 + ops.mean(x))
        return {"loss": loss}


def test_a_step_without_gradients_says_so(tmp_path: Path) -> None:
    train(Native, tmp_path, epochs=1)
    found = visit(Native, source(), tmp_path, 3)
    assert found.agreement.exact
    assert all(variable.gradient is None for variable in found.variables)
    assert {v.path: v.update.norm > 0 for v in found.variables}["model/layers/0/bias"]
    assert "without treadle.gradients, so its gradients cannot be seen" in str(found)


class Spiking(Classifier):
    """A classifier whose loss is multiplied where the first feature of a row is large."""

    def __init__(self) -> None:
        super().__init__([keras.Input((FEATURES,)), dense(), head()])

    def train_step(self, batch: Any) -> Any:
        x, _ = batch
        logs = super().train_step(batch)
        return {"loss": logs["loss"] * ops.where(ops.max(x[:, 0]) > 50, 100.0, 1.0)}


def spiked() -> Any:
    x, y = arrays()
    x[17, 0] = 60.0
    return data.from_arrays(x, y, batch_size=8)


def test_bisect_finds_a_spike_in_the_log(tmp_path: Path) -> None:
    train(Spiking, tmp_path, sources=[spiked()])
    expected = min(step for step, line in logged(tmp_path).items() if line["loss"] > 20)
    found = visit(Spiking, spiked(), tmp_path, bisect="loss > 20")
    assert found.step == expected
    assert found.found_by.startswith(
        f"loss > 20: first holds at step {expected} of the log: loss is"
    )
    assert found.batch[0].most == 60.0
    assert found.rows is not None and 17 in found.rows


def test_bisect_finds_where_a_variable_begins_to_be(noisy_run: Path) -> None:
    found = visit(noisy, source(), noisy_run, bisect="optimizer/iterations >= 9")
    assert found.step == 9
    assert found.found_by == ("optimizer/iterations >= 9: first holds after step 9")
    assert found.agreement.exact


def dip(loop: Any) -> None:
    """Make a variable large for two steps."""
    bias = loop.task.model.layers[1].bias
    bias.assign(bias + (100.0 if loop.progress.step == 3 else -100.0))


def test_bisect_finds_what_no_checkpoint_has_seen(tmp_path: Path) -> None:
    hooks = [treadle.at("3 steps", dip), treadle.at("5 steps", dip)]
    train(plain, tmp_path, hooks=hooks)
    for step in range(1, 6):  # one that became due while another was written came later
        shutil.rmtree(tmp_path / "checkpoints" / f"step-{step:012}", ignore_errors=True)
    path = "model/layers/1/bias"
    found = visit(plain, source(), tmp_path, bisect=f"norm({path}) > 50", hooks=hooks)
    assert found.step == 4
    assert found.found_by.endswith("first holds before step 4")


@pytest.mark.parametrize(
    ("asked", "kind", "message"),
    [
        ({}, ConfigurationError, r"specify the step: either its number, such as step=120, or"),
        ({"step": 1, "bisect": "loss > 5"}, ConfigurationError, "specify the step"),
        ({"step": 0}, ConfigurationError, "step must be at least 1, not 0"),
        ({"step": 16}, DirectoryError, r"there is no step 16 in .*: its steps are 1 to 15"),
        ({"bisect": "loss > 1e9"}, ConfigurationError, "'loss > 1e9' holds for none of the 15 st"),
        (
            {"bisect": "los > 5"},
            ConfigurationError,
            "'los > 5' names 'los', which is neither a value that steps returned nor the path of a "
            r"variable\. Did you mean 'loss'\?",
        ),
        (
            {"bisect": "loss > norm(model/layers/0/kernel)"},
            ConfigurationError,
            "compares 'loss', which steps returned, with a variable: .* Compare each with a number",
        ),
        (
            {"bisect": "model/layers/0/kernel > 5"},
            ConfigurationError,
            r"is an array of shape \(6, 8\), .* write norm\(model/layers/0/kernel\)",
        ),
        (
            {"bisect": "norm(model/layers/0/kernel) >= 0"},
            ConfigurationError,
            "holds already in the first checkpoint, after step 0",
        ),
        (
            {"bisect": "isnan(model/layers/0/kernel)"},
            ConfigurationError,
            r"holds after none of the 15 steps",
        ),
        ({"bisect": "loss"}, ConfigurationError, "cannot read the condition 'loss': compare"),
    ],
)
def test_invalid_arguments_are_refused(
    noisy_run: Path, asked: Any, kind: type[TreadleError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        visit(noisy, source(), noisy_run, **asked)


def test_the_run_of_another_task_is_refused(noisy_run: Path, tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="holds no run"):
        visit(noisy, source(), tmp_path, 1)
    with pytest.raises(DirectoryError, match=r"of another task: task was 'Classifier', now 'Crit"):
        visit(Critic, source(), noisy_run, 1)
    keras.utils.set_random_seed(1)
    with pytest.raises(DirectoryError, match="of another task: seed was 0, now 1"):
        replay(noisy(), source(), noisy_run, 1)
    other = data.from_arrays(*arrays(seed=9), batch_size=8)
    with pytest.raises(DirectoryError, match=r"call 0 .* other data: train.fingerprint was"):
        visit(noisy, other, noisy_run, 1)


def test_a_run_without_checkpoints_is_refused(noisy_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(noisy_run, copy)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(CheckpointError, match=r"holds no checkpoint at or before step 6"):
        visit(noisy, source(), copy, 7)


def test_a_checkpoint_of_a_later_call_than_the_record_is_named(
    noisy_run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(noisy_run, copy)
    for path in copy.glob("checkpoints/step-*/manifest.json"):
        record = json.loads(path.read_text())
        record["loop"]["call"] = 7
        path.write_text(json.dumps(record))
        path.with_name("manifest.sha256").write_bytes(digest_line(path.read_bytes()))
    text = (
        rf"^{copy} is damaged: the recorded calls of the loop, from that of the checkpoint "
        r"(step-0+[0-9]*) on, end at step [0-9]+, before step 7. Restore copies of run.json and of "
        "this checkpoint$"
    )
    with pytest.raises(DirectoryError, match=text):
        visit(noisy, source(), copy, 7)


def test_batches_passed_to_loop_step_cannot_be_replayed(tmp_path: Path) -> None:
    keras.utils.set_random_seed(0)
    with treadle.Loop(plain(), tmp_path, console=False) as loop:
        loop.step(arrays())
    with pytest.raises(DirectoryError, match=r"holds a run of loop\.step\(batch\) alone"):
        visit(plain, source(), tmp_path, 1)


def test_a_run_in_progress_can_be_replayed(tmp_path: Path) -> None:
    seen: list[Replay] = []

    def look(loop: Any) -> None:
        loop.save()  # and the checkpoint of the start before
        seen.append(visit(plain, source(), tmp_path, 4))

    train(plain, tmp_path, hooks=[treadle.at("8 steps", look)])
    assert seen[0].agreement.exact
    train(plain, tmp_path / "alone")
    assert logged(tmp_path) == logged(tmp_path / "alone")


def test_numbers_of_an_array() -> None:
    x = np.array([[3.0, 4.0], [np.inf, np.nan]], "float32")
    found = Numbers.of("x", x)
    assert (found.norm, found.least, found.most, found.mean) == (5.0, 3.0, 4.0, 3.5)
    assert (found.not_finite, found.rows, found.shape) == (2, (1,), (2, 2))
    assert Numbers.of("huge", np.full(4, 1e300)).norm == pytest.approx(2e300)
    assert farthest({"a": x}, {"a": x}, whole=True) == (0.0, "")
    assert farthest({"a": np.zeros(1)}, {"a": x[1, 1:]}, whole=True) == (np.inf, "a")


def test_a_measured_plan_is_replayed_as_the_plan_that_was_chosen() -> None:
    ran = {"compiler": "graph", "fused": True, "resident": False, "shards": 1}
    facts = {"options": {"execution": "measure"}, "execution": ran}
    found = replaying._options(facts)
    assert (found.execution, found.fused, found.jit) == ("compiled", True, False)


def remembering() -> treadle.Supervised:
    """A task whose recurrent layer calls its cell in a loop, since its inputs are masked."""
    inputs = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
    outputs = keras.layers.Dense(3)(keras.layers.LSTM(3)(embedded))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return treadle.Supervised(keras.Model(inputs, outputs), loss, keras.optimizers.SGD(0.1))


def test_layers_that_are_called_in_a_loop_can_be_replayed(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 7, (16, 5))
    batches = data.from_arrays(x, x[:, 0] % 3, batch_size=8)
    keras.utils.set_random_seed(0)
    with treadle.Loop(remembering(), directory=tmp_path / "run", console=False) as loop:
        loop.fit(batches, steps=2)
    keras.utils.set_random_seed(0)
    found = replay(remembering(), batches, tmp_path / "run", step=2)
    assert found.agreement.exact
    assert "model/layers/2" in {layer.path for layer in found.layers}
